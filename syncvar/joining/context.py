"""The runtime object of a process: joining, leaving, and who this process is.

There is one context per process, made by `init` or by the first call that needs it. Threads of an in-process test
world each have their own, which `use` binds to them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from syncvar.arena.boxes import Boxes
from syncvar.arena.channels import Channels
from syncvar.arena.mapping import Arena
from syncvar.engine.engine import Engine
from syncvar.engine.group import Communicator
from syncvar.engine.hierarchical import Hosts
from syncvar.engine.messages import Post
from syncvar.engine.queued import send_queued
from syncvar.engine.recorder import Recorder
from syncvar.env import RankEnvironment
from syncvar.errors import (
    ArenaUnavailable,
    ConfigError,
    HandshakeError,
    PeerLost,
    RendezvousError,
    SyncvarError,
    TransportError,
    UsageError,
)
from syncvar.joining.likeness import likeness
from syncvar.joining.secret import job_secret
from syncvar.kernel import entrance, message_door, told, which
from syncvar.logs import log_at
from syncvar.plans import parse_forced
from syncvar.topology import HostMap, is_meant_alone, rank_list, told_elsewhere, why_not_alone
from syncvar.wire import Message, pack_message

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence

    import zmq

    from syncvar.config import RuntimeConfig
    from syncvar.stacks import Frame
    from syncvar.transports import Control, Transport
    from syncvar.transports.mpi import Fabric

__all__ = ["Context", "current", "environment_here", "init", "is_initialized", "joined", "member", "on_join", "shutdown", "use"]

_WORLD = 0
_OF_THE_LAST = ("left", "verdict")  # who joins anew is told still of ranks that leave the generation that it has left
_log = logging.getLogger("syncvar")


class Context:
    """One process's membership in one generation of a job.

    Args:
        environment: Who this process is; None for a world of one.
        config: Deadlines and limits.
        transport: Not yet opened; None for a world of one.
        control: Channel to the launcher; None for a world of one.
        generation: Version of the membership.
        arena: The memory shared with the ranks of this host, or in words why there is none.
    """

    def __init__(
        self,
        environment: RankEnvironment | None,
        config: RuntimeConfig,
        transport: Transport | None = None,
        control: Control | None = None,
        generation: int = 0,
        arena: Arena | str = "a world of one shares nothing",
    ) -> None:
        self.config = config
        self.rank = environment.rank if environment else 0
        self.world_size = environment.world_size if environment else 1
        self.local_rank = environment.local_rank if environment else 0
        self.local_world_size = environment.local_world_size if environment else 1
        self.host_index = environment.host_index if environment else 0
        self.host_count = environment.host_count if environment else 1
        self.restarts = environment.restarts if environment else 0
        self.generation = generation
        self.is_closed = False
        self.is_forked = False
        self.process = os.getpid()
        self.uneven: object | None = None  # the block of sv.uneven that the program is in
        self.extras: dict[str, Any] = {}  # what upper rooms keep per context: default strategy, names of variables
        self._transport = transport
        self._control = control
        self._zeromq: zmq.Context[Any] | None = None
        self._next_group = _WORLD + 1
        if config.check_finite != "off":
            from syncvar.joining import finite

            finite.turn_on()
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()  # programs may make many
        self.engine: Engine | None = None
        self.post: Post | None = None  # messages between ranks of this host
        self.recorder = Recorder(
            self.rank,
            self.world_size,
            generation,
            job=environment.job_id if environment else "",
            host=environment.host if environment else "localhost",
            folder=environment.flight_dir if environment else "",
            trace=config.trace,
            stats=environment.stats_dir if environment else "",
        )
        self.arena: Arena | None = None if isinstance(arena, str) else arena
        self.without_arena = arena if isinstance(arena, str) else ""
        self._forced = parse_forced(config.algorithm)
        self._channels = None if self.arena is None else Channels(
            self.arena, self.local_ranks, reaches=config.single_copy == "auto", runner=which(config.kernel)
        )
        self.hosts = HostMap((self.world_size,))
        self._have_arena: frozenset[int] = frozenset()  # hosts whose ranks all see one
        if environment is not None and transport is not None and control is not None:
            roll = _meet(environment, config, transport, control, generation, self.without_arena)
            self.hosts = HostMap.of_places(roll["places"])
            if self.hosts.ranks(self.host_index) != self.local_ranks:
                raise RendezvousError(
                    f"rank {self.rank} has {rank_list(self.local_ranks)} on its host, by its environment, and "
                    f"{rank_list(self.hosts.ranks(self.host_index))} by what the others say"
                )
            missing = {self.hosts.host_of(rank) for rank in roll["without_arena"]}
            self._have_arena = frozenset(range(len(self.hosts.sizes))) - missing
            without = {rank: why for rank, why in roll["without_arena"].items() if rank in self.local_ranks}
            if without and self.arena is not None:  # one rank of a host that does not see it is enough
                self._let_go_of_arena()
                rank, self.without_arena = next(iter(without.items()))
                self.without_arena += f" (rank {rank})"
            self.engine = Engine(
                self.rank, self.world_size, generation, transport, control, config, roll["hosts"], self.arena, self.recorder
            )
            if self._channels is not None:
                self.post = Post(Boxes(self._channels), self.engine, config.window_bytes)
            self.recorder.transport = self.transport  # the ring forgets
            self.recorder.note("joined", self.transport)
            _log.info("rank %d of %d: transport %s", self.rank, self.world_size, self.transport)
        self.world = self.communicator(_WORLD, tuple(range(self.world_size)))

    @property
    def transport(self) -> str:
        """The data path between processes of this host, and why."""
        between = f"; {self.config.between_hosts} between {self.host_count} hosts" if self.host_count > 1 else ""
        if self.arena is not None:
            return f"arena: {self.local_world_size} ranks of this host share memory{between}; {told(self.config.kernel)}"
        return f"{'mpi' if self.config.uses_mpi else 'zmq'}: {self.without_arena}{between}"

    def _let_go_of_arena(self) -> None:
        self._channels = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks of the world on this host."""
        first = self.rank - self.local_rank
        return tuple(range(first, first + self.local_world_size))

    def communicator(self, identity: int, members: tuple[int, ...], *, shares: bool = True) -> Communicator:
        """Make the calls of a group possible; every member must use the same identity.

        Args:
            identity: The same on all members.
            members: Ranks of the world, in the group's order.
            shares: Go through shared memory where all members see it; else over links.
        """
        channel = None
        if shares and self._channels is not None and len(members) > 1 and self.rank in members and self._channels.serves(members):
            channel = self._channels.make(identity, members, members.index(self.rank))
        made = Communicator(
            identity, members, self.rank, self.engine, channel,
            recorder=self.recorder, forced=self._forced, hosts=self._hosts_of(identity, members) if shares else None,
        )  # fmt: skip
        made.is_pair = not shares
        made.prepares = self.config.check_finite == "off"  # a prepared call looks at nothing
        self._communicators.add(made)
        return made

    def _hosts_of(self, identity: int, members: tuple[int, ...]) -> Hosts | None:
        """Return the hosts of a group that goes through the arenas of several; the same answer on all its ranks."""
        sizes = self.hosts.blocks(members)
        if self.rank not in members or sizes is None or len(sizes) == 1 or max(sizes) == 1:
            return None
        on_hosts = [[rank for rank in members if self.hosts.host_of(rank) == host] for host in range(len(self.hosts.sizes))]
        if any(len(ranks) > 1 and host not in self._have_arena for host, ranks in enumerate(on_hosts)):
            return None
        mine = on_hosts[self.host_index]
        if len(mine) == 1 or self._channels is None:
            return Hosts(sizes, None)
        return Hosts(sizes, self._channels.make(identity, mine, mine.index(self.rank)))

    def groups_within(self, members: Collection[int]) -> list[Communicator]:
        """Return the groups of some ranks that this one makes collective calls in, with others, in the order of their identities."""
        found = [
            one for one in self._communicators
            if one.size > 1 and one.rank is not None and not one.is_pair and not one.is_destroyed and set(one.members) <= set(members)
        ]  # fmt: skip
        return sorted(found, key=lambda one: one.identity)

    def refuse_in_block(self, what: str) -> None:
        """Raise UsageError inside a block of sv.uneven."""
        if self.uneven is not None:
            raise UsageError(
                f"{what} inside `with sv.uneven():` is refused: a rank that has left its loop would not take part. Do it before the block"
            )

    def new_identity(self) -> int:
        """Return the next group identity; called in the same order on all ranks, it is the same on all."""
        identity = self._next_group
        self._next_group += 1
        return identity

    def close(self, *, orderly: bool, reason: str = "it did not leave in order", stack: Sequence[Frame] = ()) -> None:
        """Leave the job.

        Args:
            orderly: Finish what was started, say goodbye and flush. Otherwise just let go: the process is failing.
            reason: Why it fails, for the flight record.
            stack: Where its main thread was then, likewise; empty for where it is.

        Raises:
            SyncvarError: A started call that nobody waited for had failed.
        """
        if self.is_closed:
            return
        self.is_closed = True
        engine = self.engine
        if not orderly:
            self.recorder.ended(reason, stack)
        if engine is None:
            self.recorder.closed()
            return
        error: SyncvarError | None = None
        linger_s = 0.0
        try:
            if orderly and engine.failure is None:
                linger_s = self.config.shutdown_timeout_s
                try:
                    send_queued(engine)
                    engine.leave(time.monotonic() + self.config.collective_timeout_s)
                except SyncvarError as failed:
                    error = failed
        finally:
            engine.stop()
            if self._transport is not None:
                self._transport.close(linger_s if engine.failure is None else 0.0)
            if self._control is not None:
                self._control.close(self.config.shutdown_timeout_s)
            if self._zeromq is not None:
                self._zeromq.term()
            self._let_go_of_arena()
            self.recorder.closed()
        if error is not None:
            raise error

    def disown(self) -> None:
        """Become unusable: this process is a forked copy of the one that joined."""
        failure = UsageError(
            f"this process was forked from rank {self.rank} (process {self.process}) after it had joined the job; a "
            f"copy cannot take part. Fork before sv.init(), or start children with subprocess or "
            f"multiprocessing's 'spawn' method"
        )
        if self.engine is not None:
            self.engine.disown(failure)
        for communicator in self._communicators:
            communicator.disown(failure)
        self.is_forked = True
        self.arena = None  # the memory is the parent's; what lies in it is copied when it is written
        self.is_closed = True
        _state.forked = failure

    def take_zeromq(self, context: zmq.Context[Any]) -> None:
        """Own the ZeroMQ context, to end it with this one."""
        self._zeromq = context


class _State:
    """The default context of the process, and the one that each thread of a test world has instead."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.default: Context | None = None
        self.thread = threading.local()
        self.is_bound = False  # some thread has had a context of its own
        self.forked: UsageError | None = None
        self.generations = 0
        self.hooked = False
        self.environ: MutableMapping[str, str] = os.environ  # what tells this process who it is
        self.joiners: list[Callable[[Context], None]] = []


_state = _State()


def init(*, alone: bool = False) -> None:
    """Join the job. Does nothing when this process has joined already.

    A process that no launcher has started becomes a world of one. One that another engine has started, such as srun,
    mpirun, torchrun or an indexed job of Kubernetes, joins the others by what that tells it. One that is told of others and
    not how to meet them is refused: it would compute numbers of its own. After `shutdown`, `init` joins anew, together with
    all other ranks.

    Args:
        alone: Be a world of one on purpose, whatever other launchers say; as the variable SYNCVAR_WORLD_SIZE=1 says it.

    Raises:
        RendezvousError: Not all ranks came in time; the missing ones are named.
        ConfigError: The environment or a setting is wrong, or two launchers contradict each other; or one has started this
            process and others and does not say how they meet, and the message names the variable and what to write; or
            `alone` contradicts `syncvar-launch`, or what this process has joined already.

    Example:
        >>> import syncvar as sv
        >>> sv.init()
        >>> sv.rank(), sv.world_size()
        (0, 1)
    """
    context = current(alone=alone)
    if alone and context.world_size > 1:
        raise ConfigError(f"sv.init(alone=True), but this process has joined already: as rank {context.rank} of {context.world_size}")


def shutdown() -> None:
    """Leave the job in order. Not a barrier; later calls to this rank raise PeerLost there. Idempotent.

    Raises:
        SyncvarError: A started call that nobody waited for had failed.
    """
    with _state.lock:
        context: Context | None = getattr(_state.thread, "context", None) or _state.default
        if context is None or context.is_closed:
            return
        if context is _state.default:
            _state.default = None
        context.close(orderly=True)


def is_initialized() -> bool:
    """Return whether this process has joined and not left."""
    context = getattr(_state.thread, "context", None) or _state.default
    return context is not None and not context.is_closed


def joined() -> Context | None:
    """Return the context of this thread or process; None where it has not joined, which asking does not change."""
    context: Context | None = getattr(_state.thread, "context", None) or _state.default
    return None if context is None or context.is_closed else context


def environment_here() -> RankEnvironment | None:
    """Return who a launcher says that this process is, without joining."""
    return RankEnvironment.from_mapping(_state.environ)


def on_join(listener: Callable[[Context], None]) -> None:
    """Call `listener(context)` whenever this process joins a job from now on."""
    _state.joiners.append(listener)


def current(*, alone: bool = False) -> Context:
    """Return the context of this thread or process, joining first if need be (`alone`: as a world of one)."""
    context = getattr(_state.thread, "context", None) or _state.default
    if context is not None and not context.is_closed:
        return context
    return _join(alone=alone)


def entered_natively(function: Any, **arguments: Any) -> Any:
    """Return a callable that runs a public function's prepared calls in C where they are of the job of this process; see `entrance`."""
    return entrance(function, _state, **arguments)


def entered_by_door(function: Any, *, is_sending: bool) -> Any:
    """Return the same for `send` and `recv`; see `message_door`."""
    return message_door(function, _state, is_sending=is_sending)


@contextlib.contextmanager
def use(context: Context) -> Iterator[None]:
    """Bind a context to this thread."""
    _state.is_bound = True
    _state.thread.context = context
    try:
        yield
    finally:
        del _state.thread.context


def abandon(reason: str = "it ends with an error", stack: Sequence[Frame] = ()) -> None:
    """Let go of the job without a goodbye: this process is about to end with an error.

    Args:
        reason: Which, for the flight record.
        stack: Where it came up in the main thread, likewise.
    """
    context = _state.default
    if context is not None and context.process == os.getpid():
        _state.default = None
        context.close(orderly=False, reason=reason, stack=stack)


@contextlib.contextmanager
def member(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let a mapping tell this process who it is, in place of its environment, until a block ends; then it leaves the job.

    For processes that are an engine's before and after they are a rank: actors of Ray, workers of Dask. A block that raises
    leaves without a goodbye.

    Raises:
        UsageError: This process is a rank already.
        SyncvarError: A started call that nobody waited for had failed.
    """
    with _state.lock:
        if _state.environ is not os.environ or (_state.default is not None and not _state.default.is_closed):
            raise UsageError(f"process {os.getpid()} is a rank already: each rank needs a process of its own")
        _state.environ, _state.generations = environ, 0
    try:
        yield
        shutdown()
    except BaseException as error:
        from syncvar.stacks import frames_before

        abandon(f"{type(error).__name__}: {error}"[:2000], frames_before(error.__traceback__))
        raise
    finally:
        with _state.lock:
            _state.environ = os.environ


def _join(*, alone: bool) -> Context:
    if getattr(_state.thread, "context", None) is not None:
        raise UsageError("this thread's context has been shut down")
    with _state.lock:
        if _state.forked is not None:
            raise _state.forked
        if _state.default is not None and not _state.default.is_closed:
            return _state.default
        _state.default = _connect(_state.environ, alone=alone)
        for listener in _state.joiners:
            listener(_state.default)
        _state.generations += 1
        if not _state.hooked:
            _state.hooked = True
            os.register_at_fork(after_in_child=_forked)
            atexit.register(_at_exit)
        return _state.default


def _connect(environ: MutableMapping[str, str], *, alone: bool) -> Context:
    from syncvar.config import RuntimeConfig, doubtful_variables

    environment = RankEnvironment.from_mapping(environ)
    if environment is not None and environment.role == "server":
        raise UsageError(f"server {environment.rank} is none of the ranks: an update rule that runs there makes no call of syncvar")
    keeper = 0 if environment is None else None  # of the roll: rank 0's process, or the launcher
    secret: bytes | None = None
    if alone and environment is not None and environment.world_size > 1:
        raise ConfigError(
            f"sv.init(alone=True) contradicts SYNCVAR_RANK={environment.rank} and SYNCVAR_WORLD_SIZE={environment.world_size}: "
            f"syncvar-launch has started this process with others. Leave alone=True out, or start the script with plain python"
        )
    config = RuntimeConfig.from_mapping(environ).consistent()
    log_at(config.log_level)
    if environment is None:  # syncvar-launch, which hands its settings on, has said so itself
        for sentence in doubtful_variables(environ):
            _log.warning("%s", sentence)
    fabric: Fabric | None = None
    if config.uses_mpi:
        environment, secret, fabric = _met_by_mpi(config, environ, environment, alone=alone)
    elif environment is not None or not (alone or is_meant_alone(environ)):
        told = told_elsewhere(environ, environment)
        if environment is None and told is not None and told.world_size > 1:
            from syncvar.joining.meeting import meet

            environment, secret = meet(told, config, environ, job_secret(environ))
        elif environment is None and told is None and (reason := why_not_alone(environ)):
            raise ConfigError(reason)
    if environment is None or (environment.world_size == 1 and environment.host_count == 1):
        return Context(environment, config)
    import zmq

    from syncvar.transports.zeromq import ZeromqControl, ZeromqTransport, tcp_endpoint

    keys = None
    outside = ""
    if environment.host_count > 1 or environment.rendezvous.startswith("tcp://"):
        secret = secret or job_secret(environ)
        outside = tcp_endpoint(environment.host_address) if environment.host_count > 1 else ""
        if secret is None and config.encryption != "off":
            raise ConfigError(
                f"rank {environment.rank} is to speak with other hosts and has no secret (SYNCVAR_KEY_FD, SYNCVAR_KEY_FILE "
                f"or SYNCVAR_KEY): start the script with syncvar-launch"
            )
        if secret is not None and config.encryption != "off":
            from syncvar.transports.curve import link_keys

            keys = link_keys(secret, environment.job_id)
    zeromq: zmq.Context[Any] = zmq.Context()
    control: ZeromqControl | None = None
    transport: Transport | None = None
    arena: Arena | str = ""
    try:
        control = ZeromqControl(zeromq, environment.rendezvous, environment.rank, config, keys, keeper)
        generation = environment.generation + _state.generations
        if fabric is not None:
            from syncvar.transports.mpi import MpiTransport, tag_of

            transport = MpiTransport(fabric, environment.rank, tag_of(generation), config.segment_bytes, control)
        else:
            transport = ZeromqTransport(
                zeromq, environment.rank, f"ipc://{environment.socket_directory}", environment.job_id, config, control,
                outside=outside, keys=keys if outside else None,
            )  # fmt: skip
        arena = _attach(environment, config, generation)
        context = Context(environment, config, transport, control, generation, arena)
    except BaseException:
        if isinstance(arena, Arena):
            arena.close()
        if transport is not None:
            transport.close(0)
        if control is not None:
            control.close(0)
        zeromq.term()
        raise
    context.take_zeromq(zeromq)
    return context


def _met_by_mpi(
    config: RuntimeConfig, environ: MutableMapping[str, str], environment: RankEnvironment | None, *, alone: bool
) -> tuple[RankEnvironment | None, bytes | None, Fabric | None]:
    """Return who this process is by what MPI says, the job's secret, and the process's end of MPI; nothing where it is alone."""
    if environment is not None:
        raise ConfigError(
            f"SYNCVAR_TRANSPORT={config.transport} contradicts SYNCVAR_RANK={environment.rank}: syncvar-launch starts no processes of MPI. "
            f"Start the script with mpirun, or unset SYNCVAR_TRANSPORT"
        )
    if alone or is_meant_alone(environ):
        return None, None, None
    from syncvar.joining.mpi_meeting import join

    joined = join(config, environ)
    if joined is None:
        return None, None, None
    from syncvar.joining.meeting import meet

    return *meet(joined.told, config, environ, job_secret(environ), joined.cards), joined.cards.fabric


def _attach(environment: RankEnvironment, config: RuntimeConfig, generation: int) -> Arena | str:
    """Return the arena of this host, or in words why there is none."""
    if not config.shares_memory:
        return f"SYNCVAR_TRANSPORT={config.transport} asks for it"
    if environment.local_world_size == 1:
        return "there is one rank on this host"
    from syncvar.arena.handing import arena_path, fetch

    path = arena_path(environment.socket_directory)
    fd, reason = fetch(
        path, environment.job_id, generation, environment.local_rank, min(config.handshake_timeout_s, 3600.0)
    )
    if fd is None:
        return reason or "the launcher gave no reason"
    try:
        return Arena.attach(fd, environment.local_rank, checks=config.check_arena == "on")
    except ArenaUnavailable as error:
        return str(error)


def _meet(
    environment: RankEnvironment,
    config: RuntimeConfig,
    transport: Transport,
    control: Control,
    generation: int,
    without_arena: str,
) -> Message:
    """Join the roll call; open the transport when all have come.

    Returns:
        The roll: among others, host and place of each rank, and why those ranks that have no arena have none.
    """
    control.send(
        pack_message(
            "join",
            rank=environment.rank,
            job=environment.job_id,
            generation=generation,
            address=transport.address,
            pid=os.getpid(),
            host=environment.host,
            about={
                **likeness(config),
                "arena": without_arena,
                "host_index": environment.host_index,
                "outside": transport.outside,
            },
        )
    )
    # The launcher decides when the roll call has failed; this limit only guards against a launcher that is stuck.
    deadline = time.monotonic() + config.rendezvous_timeout_s + 10.0
    while True:
        message: Message | None = control.receive()
        if message is None:
            if time.monotonic() > deadline:
                raise RendezvousError(f"the launcher did not answer rank {environment.rank} in time")
            transport.wait(min(1.0, deadline - time.monotonic()))
        elif message["kind"] == "roll":
            transport.open(message["addresses"], message["generation"])
            return message
        elif message["kind"] == "refused":
            if message["error"] == "HandshakeError":
                raise HandshakeError(message["reason"])
            raise RendezvousError(f"rank {environment.rank} could not join: {message['reason']}", message["missing"])
        elif message["kind"] == "abort":
            raise PeerLost(message["rank"], message["host"], message["reason"], "while the ranks met")
        elif message["kind"] not in _OF_THE_LAST:
            raise TransportError(f"unexpected message {message['kind']!r} while the ranks met")


def _forked() -> None:
    if _state.default is not None:
        _state.default.disown()
        _state.default = None


def _at_exit() -> None:
    context = _state.default
    if context is None or context.process != os.getpid():
        return
    failing = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    _state.default = None
    with contextlib.suppress(SyncvarError):
        context.close(orderly=not failing)
