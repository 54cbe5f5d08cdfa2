"""A worker of an elastic job: it enrolls with the launcher, and joins the generations it gets.

The channel to the launcher lives as long as the process. Each generation has sockets, links and
shared memory of its own, see `connect_generation`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.connect import connect_generation
from syncvar.bootstrap.job_private import keys_of
from syncvar.bootstrap.process import environment_here, leave_generation, process_environ, replace
from syncvar.core.errors import TransportError, UsageError
from syncvar.core.exit_status import RUN_ENDED, send_status
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.control_messages import pack_message

if TYPE_CHECKING:
    from syncvar.bootstrap.context import ProcessContext
    from syncvar.core.environment import RankEnvironment
    from syncvar.protocol.control_messages import Message

_LOOK_S = 1.0


class Dismissed(Exception):  # noqa: N818  (nothing has gone wrong)
    """The job is finished, or ends, and needs this worker no more."""


class Enrollment:
    """The channel of this worker to the launcher, about its membership.

    Attributes:
        generation: The generation to which this worker was assigned last; -1 for none.
        has_ended: Whether the program's function has returned on all members.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        import zmq

        from syncvar.transports.zeromq_links import ZeromqControl

        environ = process_environ()
        self._environment = environment
        self._config = RuntimeConfig.from_mapping(environ).consistent()
        self._keys = keys_of(environment, self._config, environ, None)
        self._zeromq: zmq.Context[Any] = zmq.Context()
        self._channel = ZeromqControl(
            self._zeromq,
            environment.rendezvous,
            environment.rank,
            self._config,
            self._keys,
            kind=b"E",
        )
        self._lock = threading.RLock()  # a handler of SIGTERM may come in between
        self._assignment: Message | None = None  # the newest one that nobody has taken
        self._is_dismissed = self._is_closed = False
        self._has_change = False
        self.generation = -1
        self.has_ended = False

    @property
    def abort_grace_s(self) -> float:
        """How long the launcher lets the other workers end by themselves after a failure."""
        return self._config.abort_grace_s

    def change_is_pending(self) -> bool:
        """Return whether the launcher wants to change the membership at the next commit."""
        self._receive()
        return self._has_change

    def is_dismissed(self, within_s: float = 0.0) -> bool:
        """Return whether the job needs this worker no more; wait for such news for a while."""
        until = time.monotonic() + within_s
        while True:
            self._receive()
            left_s = until - time.monotonic()
            if self._is_dismissed or left_s <= 0:
                return self._is_dismissed
            self._channel.socket.poll(int(left_s * 1000) + 1)

    def ask_to_leave(self) -> None:
        """Ask to leave at the next commit; the launcher announces a change if others suffice."""
        self._send("leaving")

    def announce_end(self) -> None:
        """Tell the launcher that the program's function has returned on all members.

        This takes the way of a failure, so a later failure cannot overtake it.
        """
        self.has_ended = True
        send_status(RUN_ENDED)

    def join_next(self, holds: int = -1) -> ProcessContext:
        """Enroll, wait for the next generation, join it, and return its context.

        Args:
            holds: The generation of the tag of this worker's state; -1 for none.

        Raises:
            Dismissed: The job is finished.
            SyncvarError: The generation could not begin, for instance because a member was lost.
        """
        if self.has_ended:
            raise UsageError(
                "this process has already run a function of sv.elastic.run to its end, and the job "
                "takes no more workers: do all elastic work in one function"
            )
        leave_generation()
        here = self._environment
        self._send(
            "enroll",
            heard=self.generation,
            holds=holds,
            incarnation=here.incarnation,
            job=here.job_id,
        )
        assignment = self._next_assignment()
        self.generation = assignment["generation"]
        names = ("rank", "world_size", "local_rank", "local_world_size", "host_index", "host_count")
        here = here._replace(
            worker=here.rank,
            generation=self.generation,
            **{name: assignment[name] for name in names},
        )
        return replace(lambda: connect_generation(here, self._config, self._keys))

    def close(self) -> None:
        """Close the channel after its messages have left. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._channel.close(self._config.shutdown_timeout_s)
            self._zeromq.term()

    def _next_assignment(self) -> Message:
        while True:
            self._receive()
            if self._is_dismissed:
                raise Dismissed
            if self._assignment is not None:
                assignment, self._assignment = self._assignment, None
                return assignment
            self._channel.socket.poll(int(_LOOK_S * 1000))

    def _receive(self) -> None:
        """Take what has come."""
        with self._lock:
            while (message := self._channel.receive()) is not None:
                kind = message["kind"]
                if kind == "assignment":
                    self._assignment = message
                    self._has_change = False  # what was announced before concerned the last one
                elif kind == "membership_change":
                    self._has_change = True
                elif kind == "dismissal":
                    self._is_dismissed = True
                else:
                    raise TransportError(f"unexpected message {kind!r} about the membership")

    def _send(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._channel.send(pack_message(kind, **fields))


_enrollments: list[Enrollment] = []  # at most one: the channel belongs to the process


def enrollment() -> Enrollment | None:
    """Return the channel of this worker, opened at the first call; None in other jobs."""
    if _enrollments:
        return _enrollments[0]
    environment = environment_here()
    if environment is None or not environment.elastic:
        return None
    _enrollments.append(Enrollment(environment))
    register_exit(_enrollments[0].close)
    return _enrollments[0]
