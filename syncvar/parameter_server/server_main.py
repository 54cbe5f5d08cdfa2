"""The process of a parameter server: it holds variables, and runs only registered update rules.

The launcher starts it as `worker_entry.py syncvar.parameter_server.server_main server 1
train.py`. It does not run the script, but can import modules beside it. It ends on SIGTERM, after
all workers have ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.bootstrap import worker_main
from syncvar.bootstrap.job_private import keys_of
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError, WireError, error_line
from syncvar.core.fork_cleanup import handle_signal
from syncvar.core.output_files import write_record
from syncvar.core.process_ids import SERVER_0, is_server, process_name, server_number
from syncvar.core.settings import RuntimeConfig, log_at
from syncvar.core.stack_dump import frames_before
from syncvar.parameter_server.discovery import Directory, heirs_of
from syncvar.parameter_server.messages import frames_of, message_of
from syncvar.parameter_server.same_host_links import lender_of
from syncvar.parameter_server.server_links import ServerLinks
from syncvar.parameter_server.server_machine import Server
from syncvar.runtime.call_record import CallInfo, size_class
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.recorder import Recorder, RecordIdentity
from syncvar.shm.segment_file import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

    from syncvar.parameter_server.discovery import ProcessChange
    from syncvar.parameter_server.messages import Arrays, Endpoint, Message, OutgoingMessage
    from syncvar.parameter_server.server_links import ReceivedMessage, Route

_log = logging.getLogger("syncvar")
_BATCH = 64  # messages that it takes from one socket before it looks at the others
_PAUSE_S = 1.0
_NEVER = float("inf")
_WARNINGS_MAX = 5
_CALL_INFOS_MAX = 1024
_ROWS_MAX = 4096
_OTHERS = "others"


def main() -> None:
    """Serve, in a fresh process."""
    arguments = sys.argv[1:]  # "server", its number, and what the workers run
    if len(arguments) < 2 or arguments[0] != "server":
        raise SystemExit("a server is started by syncvar-launch --servers N")
    if arguments[2:]:
        worker_main.add_folder(arguments[2:])
    worker_main.work(_serve)


def _serve(_arguments: list[str]) -> None:
    environment = RankEnvironment.from_mapping(os.environ)
    if environment is None or environment.role != "server":
        raise ConfigError(
            "SYNCVAR_ROLE is not server: a server is started by syncvar-launch --servers N"
        )
    config = RuntimeConfig.from_mapping(os.environ).consistent()
    log_at(config.log_level)
    with contextlib.closing(ServerLoop(environment, config, os.environ)) as serving:
        handle_signal(signal.SIGTERM, lambda *_: serving.end())
        try:
            serving.run()
        except BaseException as error:
            serving.failed(error)
            raise


def number_of(endpoint: Endpoint) -> int:
    """Return the process number of an endpoint."""
    return endpoint[1] + (SERVER_0 if endpoint[0] == "server" else 0)


def operations_text(message: Message) -> str:
    """Return the operations of a request, or the kind of another message.

    Example:
        >>> operations_text({"kind": "request", "operations": [{"op": "push"}, {"op": "tick"}]})
        'push+tick'
        >>> operations_text({"kind": "cut"})
        'cut'
    """
    if message["kind"] != "request":
        return str(message["kind"])
    return "+".join(dict.fromkeys(str(one.get("op")) for one in message["operations"]))


class ServerStats:
    """Totals of one server's messages for `--stats`, in the form of the totals of a rank's calls.

    Example:
        >>> stats = ServerStats(1)
        >>> stats.count({"kind": "request", "operations": [{"op": "pull"}]}, (), (), 1500)
        >>> [(row["call"], row["ranks"], row["calls"], row["ns"]) for row in stats.rows({})]
        [('served pull', 'server 1', 1, 1500)]
        >>> [(row["call"], row["calls"]) for row in stats.rows({0: 9, 1: 3})[1:]]
        [('reads 0 ticks ahead', 9), ('reads 1 tick ahead', 3)]
    """

    def __init__(self, server: int) -> None:
        self._server = server
        # (operations, size class) -> calls, bytes, nanoseconds, errors
        self._rows: dict[tuple[str, int], list[int]] = {}

    def count(
        self, message: Message, arrays: Arrays, outgoing: Iterable[OutgoingMessage], ns: int
    ) -> None:
        """Add a message that took `ns` nanoseconds; bytes are those of request and answers."""
        answers = [one for one in outgoing if one.message["kind"] in ("answer", "state")]
        sent = [array for one in answers for array in one.arrays]
        nbytes = sum(array.nbytes for array in (*arrays, *sent))
        key = f"served {operations_text(message)}", size_class(nbytes)
        if key not in self._rows and len(self._rows) >= _ROWS_MAX:
            key = _OTHERS, key[1]
        row = self._rows.setdefault(key, [0, 0, 0, 0])
        has_failed = any(one.message.get("error") for one in answers)
        for index, increment in enumerate((1, nbytes, ns, has_failed)):
            row[index] += increment

    def rows(self, ahead: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return the totals for `syncvar_launcher.job.job_files`.

        `ahead` is ticks ahead of the slowest worker -> number of reads, one row for each.
        """
        name = process_name(server_number(self._server))
        totals = [(*key, *counts) for key, counts in self._rows.items()]
        totals += [
            (f"reads {ticks} tick{'s' * (ticks != 1)} ahead", 0, reads, -1, 0, 0)
            for ticks, reads in sorted(ahead.items())
        ]
        names = ("call", "class", "calls", "nbytes", "ns", "failed")
        common = {"group": -1, "ranks": name, "size": 1}
        return [{**dict(zip(names, row, strict=True)), **common} for row in totals]

    def write(self, folder: str, generation: int, ahead: Mapping[int, int]) -> None:
        """Write the totals for the launcher."""
        number = server_number(self._server)
        record = json.dumps({"rank": number, "rows": self.rows(ahead)})
        with contextlib.suppress(OSError):  # the launcher names processes without totals
            write_record(folder, f"stats-{number}.{generation}.json", record)


class ServerLoop:
    """The loop of a server."""

    def __init__(
        self, environment: RankEnvironment, config: RuntimeConfig, environ: MutableMapping[str, str]
    ) -> None:
        self._config, self._environment = config, environment
        self._index = environment.rank
        self._recorder = Recorder(
            RecordIdentity(
                server_number(environment.rank),
                environment.world_size,
                environment.generation,
                environment.job_id,
                environment.host,
            ),
            folder=environment.flight_dir,
        )
        self._call_infos: dict[tuple[str, int], CallInfo] = {}
        self._first_failure = ""  # a reason to write a flight record
        self._stats = ServerStats(environment.rank) if environment.stats_dir else None
        heirs = heirs_of(environment)
        self.server = Server(environment.rank, environment.world_size, heirs)
        self._incarnations: dict[int, int] = {}
        self._warnings = 0
        self._is_over = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        keys = keys_of(environment, config, environ)
        self._lender = lender_of(environment, config)
        if self._lender is not None:
            self.server.use_allocator(self._lender.allocate)
        self._directory = Directory(self._context, environment, config, keys)
        self.links = ServerLinks(self._context, environment, config, keys, self._lender)
        try:
            self.links.listen()
            self._directory.serve(self.links.address, self.links.outside)
        except BaseException:
            self.close()
            raise
        copies = f"copies on server {heirs[self._index][0]}" if heirs[self._index] else "no copies"
        sharing = "no memory is shared"
        if self._lender is not None:
            sharing = "memory is shared with the workers of this host"
        _log.info(
            "server %d of %d: serving %d workers, %s, %s",
            self._index,
            environment.servers,
            environment.world_size,
            copies,
            sharing,
        )

    def end(self) -> None:
        """Make `run` return; for a signal handler."""
        self._is_over = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve until `end` is called."""
        watching = self.links.watching
        watching.add(self._directory.socket)
        watching.add(self._wake)
        wake_at = 0.0
        while not self._is_over:
            pause_s = _PAUSE_S
            if wake_at != _NEVER:
                pause_s = min(_PAUSE_S, wake_at - time.monotonic())
            for one in watching.wait(pause_s):
                if one is self._directory.socket:
                    for change in self._directory.changes():
                        self._apply_change(change)
                    watching.is_empty(one)
                elif one != self._wake:
                    self._receive(one)
            wake_at = self.server.wake_at()
            if wake_at != _NEVER and wake_at <= (now := time.monotonic()):
                self._send(self.server.wake(now))
        for change in self._directory.changes():  # sent before SIGTERM, perhaps received after it
            self._note(change)

    def failed(self, error: BaseException) -> None:
        """Write the flight record of a server that ends by an exception."""
        reason = f"uncaught {error_line(error)}"
        self._recorder.ended(reason, frames_before(error.__traceback__))

    def close(self) -> None:
        """Close everything, after flushing sent messages."""
        ledgers = [primary.ledger for primary in self.server.primaries.values()]
        shards = [shard for ledger in ledgers for shard in ledger.shards.values()]
        size = format_bytes(sum(one.array.nbytes for one in shards))
        _log.info("server %d: over, with %d parts of variables, %s", self._index, len(shards), size)
        if self._first_failure:
            self._recorder.ended(self._first_failure)
        if self._stats is not None:
            me, ahead = self._environment, self.server.stats()["staleness"]
            self._stats.write(me.stats_dir, me.generation, ahead)
        self.links.close(self._config.shutdown_timeout_s)
        self._directory.close()
        self._context.term()
        if self._lender is not None:
            self._lender.close()
        os.close(self._wake)

    def _receive(self, socket: Any) -> None:
        for _ in range(_BATCH):
            received = self.links.receive(socket)
            if received is None:
                return
            self._handle(received)
            if not self.links.may_have_more(socket):
                return
        self.links.watching.touch(socket)

    def _handle(self, received: ReceivedMessage) -> None:
        number, began = received.number, time.monotonic_ns()
        sender = ("server", number - SERVER_0) if is_server(number) else ("worker", number)
        try:
            message, arrays = message_of(received.frames)
            info = self._call_info(operations_text(message), received.number)
            entry = self._recorder.begin(info, -1)
            outgoing = self.server.handle(sender, message, arrays, time.monotonic())
        except WireError as error:
            self.links.refused += 1
            if self._warnings < _WARNINGS_MAX:
                self._warnings += 1
                name = process_name(received.number)
                sys.stderr.write(f"a message of {name} was refused: {error}\n")
            return
        self._send(outgoing, sender, received.answers)
        entry.end()
        if self.server.new_copies:
            for server in self.server.new_copies:
                self._directory.report_backup(server)
            self.server.new_copies.clear()
            # Sending may have consumed the notification of an incoming message.
            self.links.watching.touch(self._directory.socket)
        if self._stats is not None:
            self._stats.count(message, arrays, outgoing, time.monotonic_ns() - began)

    def _call_info(self, operations: str, number: int) -> CallInfo:
        key = operations, number
        if key not in self._call_infos and len(self._call_infos) >= _CALL_INFOS_MAX:
            self._call_infos.clear()
        info = CallInfo(CollectiveSpec(f"{operations} of {process_name(number)}"))
        return self._call_infos.setdefault(key, info)

    def _send(
        self,
        outgoing: Iterable[OutgoingMessage],
        sender: Endpoint | None = None,
        answers: Route = b"",
    ) -> None:
        for one in outgoing:
            route = answers if one.target == sender and answers else None
            self.links.send(number_of(one.target), frames_of(one.message, one.arrays), route)

    def _note(self, change: ProcessChange) -> None:
        if change.kind == "ended" and change.reason:
            name = process_name(change.number)
            self._first_failure = self._first_failure or f"{name} was lost: {change.reason}"
            self._recorder.note("lost", f"{name}: {change.reason}")
            _log.info("server %d: %s is lost: %s", self._index, name, change.reason)

    def _apply_change(self, change: ProcessChange) -> None:
        number, now = change.number, time.monotonic()
        if change.kind == "begins":
            self._incarnations[number] = change.incarnation
            self.links.forget(number, change.incarnation - 1)
        elif change.kind == "serves":
            if number != SERVER_0 + self._index:
                self.links.connect(number - SERVER_0, self._directory.addresses[number - SERVER_0])
        else:
            self.links.forget(number, self._incarnations.get(number, 0))
            self._note(change)
            if is_server(number):
                served = set(self.server.primaries)
                self._send(self.server.server_lost(number - SERVER_0, now))
                for server in self.server.primaries.keys() - served:
                    self._recorder.note("takes over", process_name(server_number(server)))
                    _log.info("server %d: takes the place of server %d", self._index, server)
            else:
                self._send(self.server.worker_lost(number, self._incarnations.get(number, 0), now))
