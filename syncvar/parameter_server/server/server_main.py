"""A server: a process that holds variables for the workers, and runs nothing of theirs but registered update rules.

It is started as `worker_entry.py syncvar.parameter_server.server.server_main server 1 train.py`; the script is named so that what stands beside it can be
imported, and is not run. It ends when it is told to, after all workers have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.bootstrap import worker_main
from syncvar.bootstrap.job_secret import keys_of
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError, WireError
from syncvar.core.fork_cleanup import handle_signal
from syncvar.core.process_ids import (
    SERVER_0,
    heirs_of,
    is_server,
    process_name,
    server_hosts,
    server_number,
)
from syncvar.core.settings import RuntimeConfig, log_at
from syncvar.core.stack_dump import frames_before
from syncvar.parameter_server.discovery import Directory
from syncvar.parameter_server.messages import frames_of, message_of
from syncvar.parameter_server.server.server_machine import Server
from syncvar.parameter_server.server.server_stats import Served, what_of
from syncvar.parameter_server.transport.server_links import ServerLinks
from syncvar.parameter_server.transport.shm_buffers import lender_of
from syncvar.runtime.flight_recorder.call_record import CallInfo
from syncvar.runtime.flight_recorder.recorder import Recorder
from syncvar.shm.segment_layout import bytes_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from syncvar.parameter_server.discovery import ProcessChange
    from syncvar.parameter_server.messages import Endpoint, OutgoingMessage
    from syncvar.parameter_server.transport.server_links import ReceivedMessage, Route

__all__ = ["Serving", "main", "number_of", "party_of"]

_log = logging.getLogger("syncvar")
_AT_ONCE = 64  # messages of one socket before the others are looked at
_PAUSE_S = 1.0
_NEVER = float("inf")
_SAID_MAX = 5
_TOLDS_MAX = 1024


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
    with contextlib.closing(Serving(environment, config, os.environ)) as serving:
        handle_signal(signal.SIGTERM, lambda *_: serving.end())
        try:
            serving.run()
        except BaseException as error:
            serving.failed(error)
            raise


def party_of(number: int) -> Endpoint:
    """Return how messages name a process.

    Example:
        >>> party_of(3), party_of(SERVER_0 + 1)
        (('worker', 3), ('server', 1))
    """
    return ("server", number - SERVER_0) if is_server(number) else ("worker", number)


def number_of(party: Endpoint) -> int:
    """Return the number of a process that messages name; the inverse of `party_of`."""
    return party[1] + (SERVER_0 if party[0] == "server" else 0)


class Serving:
    """The loop of a server.

    Args:
        environment: Which one.
        config: Deadlines and limits.
        environ: `os.environ`, from which the job's secret is taken.
    """

    def __init__(
        self, environment: RankEnvironment, config: RuntimeConfig, environ: MutableMapping[str, str]
    ) -> None:
        self._config = config
        self._environment = environment
        self._index = environment.rank
        self._recorder = Recorder(
            server_number(environment.rank),
            environment.world_size,
            environment.generation,
            job=environment.job_id,
            host=environment.host,
            folder=environment.flight_dir,
        )
        self._tolds: dict[tuple[str, int], CallInfo] = {}
        self._hurt = ""  # what has gone wrong first, of which a record is evidence
        self._served: Served | None = None
        if environment.stats_dir:
            self._served = Served(environment.rank)
        hosts = server_hosts(environment.servers, environment.host_count)
        heirs = [
            heirs_of(server, hosts, environment.server_replicas)
            for server in range(environment.servers)
        ]
        self.server = Server(environment.rank, environment.world_size, heirs)
        self._incarnations: dict[int, int] = {}
        self._said = 0
        self._is_over = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        keys = keys_of(environment, config, environ)
        self._lender = lender_of(environment, config)
        if self._lender is not None:
            self.server.read_into(self._lender.room)
        self._directory = Directory(self._context, environment, config, keys)
        self.links = ServerLinks(self._context, environment, config, keys, self._lender)
        try:
            self.links.listen()
            self._directory.serve(self.links.address, self.links.outside)
        except BaseException:
            self.close()
            raise
        copies = f"copies on server {heirs[self._index][0]}" if heirs[self._index] else "no copies"
        memory = (
            "memory is shared with the workers of this host"
            if self._lender is not None
            else "no memory is shared"
        )
        _log.info(
            "server %d of %d: serving %d workers, %s, %s",
            self._index,
            environment.servers,
            environment.world_size,
            copies,
            memory,
        )

    def end(self) -> None:
        """Let `run` return; from a signal handler."""
        self._is_over = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve until `end` is called."""
        watching = self.links.watching
        watching.add(self._directory.socket)
        watching.add(self._wake)
        wake_at = 0.0
        while not self._is_over:
            for one in watching.wait(
                _PAUSE_S if wake_at == _NEVER else min(_PAUSE_S, wake_at - time.monotonic())
            ):
                if one is self._directory.socket:
                    for change in self._directory.changes():
                        self._take_in(change)
                    watching.is_empty(one)
                elif one != self._wake:
                    self._receive(one)
            wake_at = self.server.wake_at()
            if wake_at != _NEVER and wake_at <= (now := time.monotonic()):
                self._send(self.server.wake(now))
        for (
            change
        ) in self._directory.changes():  # told before the word to end, which came another way
            self._note(change)

    def failed(self, error: BaseException) -> None:
        """Write the flight record of a server that ends by an exception."""
        self._recorder.ended(
            f"uncaught {type(error).__name__}: {error}", frames_before(error.__traceback__)
        )

    def close(self) -> None:
        """Close everything; what was sent is flushed."""
        shards = [
            shard
            for primary in self.server.primaries.values()
            for shard in primary.ledger.shards.values()
        ]
        _log.info(
            "server %d: over, with %d parts of variables, %s",
            self._index,
            len(shards),
            bytes_in_words(sum(one.array.nbytes for one in shards)),
        )
        if self._hurt:
            self._recorder.ended(self._hurt)
        if self._served is not None:
            self._served.write(
                self._environment.stats_dir,
                self._environment.generation,
                self.server.stats()["staleness"],
            )
        self.links.close(self._config.shutdown_timeout_s)
        self._directory.close()
        self._context.term()
        if self._lender is not None:
            self._lender.close()
        os.close(self._wake)

    # -- inside ------------------------------------------------------------------------------------

    def _receive(self, socket: Any) -> None:
        for _ in range(_AT_ONCE):
            came = self.links.receive(socket)
            if came is None:
                return
            self._handle(came)
            if not self.links.may_have_more(socket):
                return
        self.links.watching.touch(socket)

    def _handle(self, came: ReceivedMessage) -> None:
        sender, began = party_of(came.number), time.monotonic_ns()
        try:
            message, arrays = message_of(came.frames)
            entry = self._recorder.begin(self._told(what_of(message), came.number), -1)
            made = self.server.handle(sender, message, arrays, time.monotonic())
        except WireError as error:
            self.links.refused += 1
            if self._said < _SAID_MAX:  # who sends more of these has been told of
                self._said += 1
                sys.stderr.write(f"a message of {process_name(came.number)} was refused: {error}\n")
            return
        self._send(made, sender, came.answers)
        entry.end()
        if self.server.new_copies:
            for server in self.server.new_copies:
                self._directory.say_copied(server)
            self.server.new_copies.clear()
            self.links.watching.touch(
                self._directory.socket
            )  # what the launcher says meanwhile may have come unnoticed
        if self._served is not None:
            self._served.count(message, arrays, made, time.monotonic_ns() - began)

    def _told(self, what: str, number: int) -> CallInfo:
        """Return how a message is recorded."""
        key = what, number
        if key not in self._tolds and len(self._tolds) >= _TOLDS_MAX:
            self._tolds.clear()
        return self._tolds.setdefault(
            key, CallInfo(f"{what} of {process_name(number)}", -1, (), 0, 0, "")
        )

    def _send(
        self, made: Iterable[OutgoingMessage], sender: Endpoint | None = None, answers: Route = b""
    ) -> None:
        for one in made:
            route = answers if one.target == sender and answers else None
            self.links.send(number_of(one.target), frames_of(one.message, one.arrays), route)

    def _note(self, change: ProcessChange) -> None:
        """Remember that a process was lost."""
        if change.kind == "ended" and change.reason:
            name = process_name(change.number)
            self._hurt = self._hurt or f"{name} was lost: {change.reason}"
            self._recorder.note("lost", f"{name}: {change.reason}")
            _log.info("server %d: %s is lost: %s", self._index, name, change.reason)

    def _take_in(self, change: ProcessChange) -> None:
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
