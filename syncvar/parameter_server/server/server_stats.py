"""What a server has done, added up by kind and size for `--stats`. Where nobody asks for totals there is none of this."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from syncvar.core.process_ids import process_name, server_number
from syncvar.core.state_folder import write_record
from syncvar.runtime.flight_recorder.call_stats import size_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncvar.parameter_server.messages import Arrays, Message, OutgoingMessage

_KINDS_MAX = 4096
_BEYOND = "others"


def what_of(message: Message) -> str:
    """Return in words what a message asks of a server.

    Example:
        >>> what_of({"kind": "request", "operations": [{"do": "push"}, {"do": "push"}, {"do": "tick"}]}), what_of({"kind": "cut"})
        ('push+tick', 'cut')
    """
    return (
        "+".join(dict.fromkeys(str(one.get("do")) for one in message["operations"]))
        if message["kind"] == "request"
        else str(message["kind"])
    )


class Served:
    """The messages of one server, in the form of the totals of a rank's calls.

    Args:
        server: Which one.

    Example:
        >>> served = Served(1)
        >>> served.count({"kind": "request", "operations": [{"do": "pull"}, {"do": "pull"}]}, (), (), 1500)
        >>> [(row["call"], row["ranks"], row["calls"], row["ns"]) for row in served.rows()]
        [('served pull', 'server 1', 1, 1500)]
        >>> [(row["call"], row["calls"]) for row in served.rows({0: 9, 1: 3})[1:]]
        [('reads 0 ticks ahead', 9), ('reads 1 tick ahead', 3)]
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._rows: dict[
            tuple[str, int], list[int]
        ] = {}  # what was served, class of sizes -> calls, bytes, ns, refused

    def count(
        self, message: Message, arrays: Arrays, made: Iterable[OutgoingMessage], ns: int
    ) -> None:
        """Add a message that was handled.

        Args:
            message: It; a request is counted by what it asks.
            arrays: Those that came with it.
            made: What was sent for it: bytes are those that came and those of the answers to workers.
            ns: How long it took, in nanoseconds, sending included.
        """
        answers = [one for one in made if one.message["kind"] in ("answer", "taken")]
        nbytes = sum(array.nbytes for array in arrays) + sum(
            array.nbytes for one in answers for array in one.arrays
        )
        key = f"served {what_of(message)}", size_class(nbytes)
        if key not in self._rows and len(self._rows) >= _KINDS_MAX:
            key = _BEYOND, key[1]
        row = self._rows.setdefault(key, [0, 0, 0, 0])
        row[0] += 1
        row[1] += nbytes
        row[2] += ns
        row[3] += any(one.message.get("error") for one in answers)

    def rows(self, ahead: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
        """Return the totals, as `syncvar_launcher.job.job_stats` reads them.

        Args:
            ahead: By how many ticks readers were ahead of the slowest worker -> reads; a row for each.
        """
        name = process_name(server_number(self._server))
        served = [(*key, *counts) for key, counts in self._rows.items()]
        served += [
            (f"reads {ticks} tick{'s' * (ticks != 1)} ahead", 0, reads, -1, 0, 0)
            for ticks, reads in sorted((ahead or {}).items())
        ]
        return [
            {
                "call": call,
                "group": -1,
                "ranks": name,
                "size": 1,
                "class": end,
                "calls": calls,
                "nbytes": nbytes,
                "ns": ns,
                "failed": failed,
            }
            for call, end, calls, nbytes, ns, failed in served
        ]

    def write(self, folder: str, generation: int, ahead: Mapping[int, int]) -> None:
        """Leave the totals where the launcher reads them; `ahead` as in `rows`."""
        number = server_number(self._server)
        with contextlib.suppress(OSError):  # the launcher says who has told nothing
            write_record(
                folder,
                f"stats-{number}.{generation}.json",
                json.dumps({"rank": number, "rows": self.rows(ahead)}),
            )
