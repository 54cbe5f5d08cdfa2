"""What a primary says, and what its mirror has: nothing is said before the mirror has executed what it follows from.

A server that becomes the mirror later, as another one was lost, gets the whole ledger first (`seed`), then every entry. What is said
waits for that too, so that it has all that anybody knows of from the moment on in which it has the ledger.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.parameter_server.messages import OutgoingMessage
from syncvar.parameter_server.server.replicated_state import ReplicatedState
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from syncvar.parameter_server.messages import Arrays, Message
    from syncvar.parameter_server.server.shard import Room

PATIENCE = 16
"""What has no answer is sent again after up to so many times the usual interval, which doubles each time."""


class ReplicationStream:
    """The entries of one ledger on their way to its mirror, and what waits for them.

    Args:
        server: Whose ledger.
        entries: How many there are already, which the mirror has too.
        mirror: Who executes them; None for nobody.
        resend_s: Seconds after which what has no answer is sent again.
    """

    def __init__(self, server: int, entries: int, mirror: int | None, resend_s: float) -> None:
        self.mirror = mirror
        self._server = server
        self._resend_s = self._patience_s = resend_s
        self._seed: OutgoingMessage | None = None
        self._log: deque[tuple[int, OutgoingMessage]] = (
            deque()
        )  # entries that the mirror has not executed
        self._logged = self._copied = entries
        self._sent_at = 0.0
        self._unsaid: deque[tuple[int, OutgoingMessage]] = deque()
        self._out: list[OutgoingMessage] = []

    def enter(self, entry: Message, arrays: Arrays, now: float) -> None:
        """Copy an entry that has just been executed."""
        self._logged += 1
        if self.mirror is None:
            self._copied = self._logged
            return
        copy = {"kind": "copy", "server": self._server, "index": self._logged, "entry": entry}
        made = OutgoingMessage(("server", self.mirror), copy, arrays)
        if not self._log and self._seed is None:
            self._sent_at = now
        self._log.append((self._logged, made))
        self._out.append(made)

    def move_to(self, mirror: int | None, ledger: ReplicatedState, now: float) -> None:
        """Make another server the mirror, or none: the one before is lost."""
        self.mirror = mirror
        self._log.clear()
        if mirror is None:
            self._seed, self._copied = None, self._logged
            return
        self._seed = OutgoingMessage(
            ("server", mirror),
            {"kind": "seed", "server": self._server, "index": self._logged},
            seed_of(ledger),
        )
        self._sent_at, self._patience_s = now, 4 * self._resend_s  # it may be large
        self._out.append(self._seed)

    def copied(self, index: int) -> None:
        """Note that the mirror has executed the entries up to one."""
        self._copied, self._seed = max(self._copied, index), None
        self._patience_s = self._resend_s

    def say(self, outgoing: OutgoingMessage) -> None:
        """Send a message once the mirror has what it follows from."""
        self._unsaid.append((self._logged, outgoing))

    def retire(self) -> None:
        """Say nothing more: another server is in charge."""
        self._unsaid.clear()

    def wake_at(self) -> float:
        """Return when `wake` has something to do at the latest; infinite for never."""
        return (
            self._sent_at + self._patience_s
            if self._log or self._seed is not None
            else float("inf")
        )

    def wake(self, now: float) -> None:
        """Send again what the mirror has not confirmed."""
        if self.wake_at() > now:
            return
        self._sent_at = now
        self._patience_s = min(2 * self._patience_s, PATIENCE * self._resend_s)
        self._out += [
            *([] if self._seed is None else [self._seed]),
            *(copy for _, copy in self._log),
        ]

    def said(self) -> list[OutgoingMessage]:
        """Return what may be sent: what follows from entries that the mirror has executed, and copies for it."""
        while self._log and self._log[0][0] <= self._copied:
            self._log.popleft()
        made, self._out = self._out, []
        while self._unsaid and self._unsaid[0][0] <= self._copied:
            made.append(self._unsaid.popleft()[1])
        return made


def seed_of(ledger: ReplicatedState) -> Arrays:
    """Return a whole ledger as arrays that do not change any more: one of plain data, then those that it names by number."""
    arrays: list[Any] = []
    state = pack_object(_apart(ledger.state(), arrays))
    return (np.frombuffer(state, np.uint8), *arrays)


def ledger_of(server: int, workers: int, seed: Arrays, room: Room) -> ReplicatedState:
    """Return the ledger of a seed."""
    state = unpack_object(seed[0].tobytes())
    return ReplicatedState.of_state(server, workers, _together(state, seed[1:]), room)


def _apart(value: Any, arrays: list[Any]) -> Any:
    """Return plain data in which arrays are named by number: a map from None to it."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {None: len(arrays) - 1}
    if isinstance(value, dict):
        return {key: _apart(one, arrays) for key, one in value.items()}
    if isinstance(value, tuple | list):
        parts = [_apart(one, arrays) for one in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _together(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, dict):
        return (
            arrays[value[None]]
            if None in value
            else {key: _together(one, arrays) for key, one in value.items()}
        )
    if isinstance(value, tuple | list):
        return type(value)(_together(one, arrays) for one in value)
    return value
