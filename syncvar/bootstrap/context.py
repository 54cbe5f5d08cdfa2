"""`ProcessContext`: one process's membership in one generation of a job, and all it owns for that.

It begins with the handshake: the rank announces itself and its versions, and receives the members
and their addresses. The launcher, or rank 0's process, decides; see `protocol/membership.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import runner_text, which
from syncvar.algorithms.cost_model import BetweenHosts
from syncvar.algorithms.selection import parse_forced
from syncvar.bootstrap.host_probe import HostProbe, network_of, wants_probe
from syncvar.core.environment import HostMap, RankEnvironment
from syncvar.core.errors import (
    HandshakeError,
    PeerLost,
    RendezvousError,
    SyncvarError,
    TransportError,
    UsageError,
)
from syncvar.core.exit_status import is_failing
from syncvar.core.process_ids import rank_list
from syncvar.protocol.control_messages import Message, pack_message
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar.protocol.membership import SCRIPT, SETTING
from syncvar.protocol.unreceived_messages import SentCount, unreceived_text
from syncvar.runtime.communicator import Communicator, GroupHosts
from syncvar.runtime.p2p_endpoints import EndpointTable
from syncvar.runtime.progress import ProgressEngine
from syncvar.runtime.recorder import Recorder, RecordIdentity
from syncvar.runtime.state import send_queued
from syncvar.shm.channel_table import ChannelTable
from syncvar.shm.group_channel import GroupChannel
from syncvar.shm.message_ring import RingTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from syncvar.algorithms.cost_model import HostNetwork
    from syncvar.core.settings import RuntimeConfig
    from syncvar.core.stack_dump import StackFrame
    from syncvar.shm.segment import SharedSegment
    from syncvar.transports.base import Arrival, Control, Transport

_WORLD = 0
_WORLD_OF_ONE = RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "")
_log = logging.getLogger("syncvar")
_SCRIPT_NBYTES_MAX = 4 << 20
# Messages of the last generation that a rank may still receive when it joins again.
_OF_LAST_GENERATION = ("leave_notice", "decision")


def join_handshake(
    environment: RankEnvironment,
    config: RuntimeConfig,
    transport: Transport,
    control: Control,
    generation: int,
    without_shm: str,
) -> Message:
    """Announce this rank; open the transport and return the answer when all ranks have come."""
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
                **compatibility_fields(config, environment.program),
                "shm": without_shm,
                "host_index": environment.host_index,
                "outside": transport.outside,
                "probes": int(wants_probe(config, transport)),
            },
        )
    )
    # The launcher decides when the handshake has failed; this limit only guards against a stuck
    # launcher.
    limit_s = config.rendezvous_timeout_s + 10.0
    members: Message | None = None
    leftovers: list[Arrival] = []
    began, has_warned = time.monotonic(), False
    deadline = began + limit_s
    while True:
        message: Message | None = control.receive()
        if message is None:
            now = time.monotonic()
            if now > deadline:
                raise RendezvousError(_no_answer(environment, control, limit_s))
            if now - began >= config.missing_report_s and not has_warned:
                has_warned = True
                _warn_of_wait(environment, control, now - began)
            transport.wait(min(1.0, deadline - time.monotonic()))
        elif message["kind"] == "members":
            transport.open(message["addresses"], message["generation"])
            if not message["probes"]:
                return message
            members = message
            leftovers = _measure_hosts(environment.rank, config, transport, control, members)
        elif message["kind"] == "host_network" and members is not None:
            return {**members, "rates": message["rates"], "leftovers": leftovers}
        else:
            _raise_refusal(environment.rank, message)


def _raise_refusal(rank: int, message: Message) -> None:
    """Raise the error that a message brings instead of members; pass over older messages."""
    if message["kind"] == "refused":
        if message["error"] == "HandshakeError":
            raise HandshakeError(message["reason"])
        raise RendezvousError(
            f"rank {rank} could not join: {message['reason']}", message["missing"]
        )
    if message["kind"] == "abort":
        raise PeerLost(
            message["rank"],
            message["host"],
            message["reason"],
            "while the ranks met",
            status=next(iter(message["status"]), None),
            kind=message["failure_kind"],
        )
    if message["kind"] not in _OF_LAST_GENERATION:
        raise TransportError(f"unexpected message {message['kind']!r} while the ranks met")


def _measure_hosts(
    rank: int, config: RuntimeConfig, transport: Transport, control: Control, members: Message
) -> list[Arrival]:
    """Measure between the hosts, if this rank is the head of one; return what else has arrived."""
    places = members["host_indices"]
    if rank != min(one for one in places if places[one] == places[rank]):
        return []
    from syncvar.transports.lane_transport import path_between_hosts

    probe = HostProbe(transport, rank, members["generation"], places)
    rates = probe.run(config.segment_bytes)
    control.send(pack_message("host_rates", rates=rates, path=path_between_hosts(config)))
    return probe.leftovers


def _warn_of_wait(environment: RankEnvironment, control: Control, waited_s: float) -> None:
    """Log that this rank waits, unless another process on this host names the missing ranks."""
    if control.keeper not in (None, environment.rank) and environment.local_rank == 0:
        _log.warning(
            "rank %d has waited %.0f s for the others at %s, where rank %d runs the rendezvous",
            environment.rank,
            waited_s,
            environment.rendezvous,
            control.keeper,
        )


def _no_answer(environment: RankEnvironment, control: Control, limit_s: float) -> str:
    """Return the error text for a handshake without answer."""
    rank, address = environment.rank, environment.rendezvous
    if control.keeper is None:
        return f"syncvar-launch did not answer rank {rank} at {address} within {limit_s:g} s"
    hosts = f"{environment.host_count} host{'s' * (environment.host_count != 1)}"
    return (
        f"rank {control.keeper} did not answer rank {rank} at {address} within {limit_s:g} s: no "
        "syncvar-launch started these ranks, so they meet in the process of rank "
        f"{control.keeper}. Check that it runs, that this host reaches the address, and that all "
        f"ranks have the same variables: rank {rank} reads from its own that "
        f"{environment.world_size} ranks run on {hosts}, {environment.local_world_size} of them "
        "on this one"
    )


def compatibility_fields(config: RuntimeConfig, program: int = 0) -> dict[str, int | str]:
    """Return versions, script and settings that must be equal on all ranks (some 50 us).

    In a job of several programs, only ranks with the same one are to have the same script.
    """
    return {
        "protocol": PROTOCOL_VERSION,
        "byte_order": sys.byteorder,
        # Importing the package here would be circular.
        "syncvar": sys.modules["syncvar"].__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": ".".join(np.__version__.split(".")[:2]),
        f"{SCRIPT}{program or ''}": _script(),
        **{SETTING + name: value for name, value in config.shared().items()},
    }


def _script() -> str:
    """Return name and digest of the file that runs as `__main__`; empty if there is none."""
    import hashlib  # imported late: it slows down importing the package

    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):  # a pipe has been read already
        return ""
    try:
        with open(path, "rb") as file:
            data = file.read(_SCRIPT_NBYTES_MAX)
    except OSError:
        return ""
    return f"{os.path.basename(path)[:100]} {hashlib.blake2b(data, digest_size=4).hexdigest()}"


class ProcessContext:
    """One process's membership in one generation of a job.

    In a world of one `environment`, `transport` (not yet opened) and `control` are None. `shm` is
    the shared memory of this host, or the reason why there is none.
    """

    def __init__(
        self,
        environment: RankEnvironment | None,
        config: RuntimeConfig,
        transport: Transport | None = None,
        control: Control | None = None,
        generation: int = 0,
        shm: SharedSegment | str = "a world of one shares nothing",
    ) -> None:
        self.config = config
        me = environment or _WORLD_OF_ONE
        self.rank, self.world_size = me.rank, me.world_size
        self.local_rank, self.local_world_size = me.local_rank, me.local_world_size
        self.host_index, self.host_count = me.host_index, me.host_count
        self.restarts = me.restarts
        self.generation = generation
        self.is_closed = False
        self.is_forked = False
        self.process = os.getpid()
        self.uneven: object | None = None  # the current block of sv.uneven
        # State of higher rooms: default strategy, names of variables.
        self.extras: dict[str, Any] = {}
        self._transport = transport
        self._control = control
        # rank 0's process runs the rendezvous, because there is no launcher
        self.is_rank_served = False
        # Terminates ZeroMQ after the sockets are closed.
        self.ends_sockets: Callable[[], object] = lambda: None
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self.engine: ProgressEngine | None = None
        self.post: EndpointTable | None = None  # endpoints of messages between ranks of this host
        if config.trace:
            from syncvar.core.output_files import check_folder

            check_folder(config.trace, "SYNCVAR_TRACE")
        if config.ledger:
            from syncvar.core.output_files import check_folder

            check_folder(config.ledger, "SYNCVAR_LEDGER")
        self.recorder = Recorder(
            RecordIdentity(me.rank, me.world_size, generation, me.job_id, me.host, me.worker),
            folder=me.flight_dir,
            trace=config.trace,
            stats=me.stats_dir,
            ledger=config.ledger,
        )
        self.shm: SharedSegment | None = None if isinstance(shm, str) else shm
        self.without_shm = shm if isinstance(shm, str) else ""
        self._forced = parse_forced(config.algorithm)
        self._channels: ChannelTable | None = None
        if self.shm is not None:
            reaches, runner = config.single_copy == "auto", which(config.call_runner)
            self._channels = ChannelTable(
                self.shm, self.local_ranks, reaches=reaches, runner=runner
            )
        self.hosts = HostMap((self.world_size,))
        self.network: HostNetwork | None = None  # between the hosts, the same on all ranks
        self._have_shm: frozenset[int] = frozenset()  # hosts on which all ranks have shared memory
        if transport is not None and control is not None:
            answer = join_handshake(me, config, transport, control, generation, self.without_shm)
            self._adopt(answer)
            self.network = network_of(self.host_count, answer["rates"])
            self.engine = ProgressEngine(
                self.recorder,
                transport,
                control,
                config,
                answer["hosts"],
                self.shm,
                answer.get("leftovers", ()),
            )
            if self._channels is not None:
                self.post = EndpointTable(
                    RingTable(self._channels), self.engine, config.window_bytes
                )
            # Also outside of the ring, which drops old entries.
            self.recorder.transport = self.transport
            self.recorder.note("joined", self.transport)
            _log.info("rank %d of %d: transport %s", self.rank, self.world_size, self.transport)
        self.world = self.communicator(_WORLD, tuple(range(self.world_size)))

    def _adopt(self, answer: Message) -> None:
        """Take the hosts, and which of them share memory, from the answer of the handshake."""
        self.hosts = HostMap.of_places(answer["host_indices"])
        if self.hosts.ranks(self.host_index) != self.local_ranks:
            raise RendezvousError(
                f"rank {self.rank} has {rank_list(self.local_ranks)} on its host, by its "
                f"environment, and {rank_list(self.hosts.ranks(self.host_index))} by those of the "
                "other ranks"
            )
        missing = {self.hosts.host_of(rank) for rank in answer["without_shm"]}
        self._have_shm = frozenset(range(len(self.hosts.sizes))) - missing
        # One rank without shared memory disables it for its host.
        without = [rank for rank in answer["without_shm"] if rank in self.local_ranks]
        if without and self.shm is not None:
            self._release_shm()
            reason = answer["without_shm"][without[0]]
            self.without_shm = f"{reason} (rank {without[0]})"

    @property
    def transport(self) -> str:
        """The data path between processes of this host, and why."""
        between = ""
        if self.host_count > 1:
            between = f"; {self.config.between_hosts} between {self.host_count} hosts"
            from syncvar.transports.lane_transport import LaneTransport

            between += " on lanes" if isinstance(self._transport, LaneTransport) else ""
        if self.shm is not None:
            return (
                f"shared memory: {self.local_world_size} ranks of this host share "
                f"memory{between}; {runner_text(self.config.call_runner)}"
            )
        return f"{'mpi' if self.config.uses_mpi else 'zmq'}: {self.without_shm}{between}"

    def _release_shm(self) -> None:
        self._channels = None
        if self.shm is not None:
            self.shm.close()
            self.shm = None

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """World ranks on this host."""
        first = self.rank - self.local_rank
        return tuple(range(first, first + self.local_world_size))

    def communicator(
        self, identity: int, members: tuple[int, ...], *, shares: bool = True
    ) -> Communicator:
        """Create the communicator of a group, whose members all use the same `identity`.

        If all members have shared memory, it uses that, unless `shares` is false.
        """
        channel = None
        if (
            shares
            and self._channels is not None
            and len(members) > 1
            and self.rank in members
            and self._channels.serves(members)
        ):
            channel = GroupChannel(self._channels, identity, members)
        created = Communicator(
            identity,
            members,
            self.recorder,
            self.engine,
            channel,
            forced=self._forced,
            hosts=self._hosts_of(identity, members) if shares else None,
        )
        created.is_pair = not shares
        self._use_network(created)
        # Persistent calls do not check values.
        created.keeps_persistent = self.config.check_finite == "off"
        self._communicators.add(created)
        return created

    def _use_network(self, created: Communicator) -> None:
        """Let a group of several hosts choose by what was measured between them."""
        if self.network is None:
            return
        places = [self.hosts.host_of(rank) for rank in created.members]
        hosts = tuple(dict.fromkeys(places))
        if created.rank is not None and len(hosts) > 1:
            keeps = self.config.algorithm_choice != "measured"
            created.plan.between = BetweenHosts(self.network.among(hosts), keeps)
            created.plan.has_one_rank_per_host = len(hosts) == len(places)

    def _hosts_of(self, identity: int, members: tuple[int, ...]) -> GroupHosts | None:
        """Return the hosts of a group that uses the segments of several hosts; None for others."""
        sizes = self.hosts.blocks(members)
        if self.rank not in members or sizes is None or len(sizes) == 1 or max(sizes) == 1:
            return None
        on_hosts = [
            [rank for rank in members if self.hosts.host_of(rank) == host]
            for host in range(len(self.hosts.sizes))
        ]
        shared = [host for host, ranks in enumerate(on_hosts) if len(ranks) > 1]
        if not self._have_shm.issuperset(shared):
            return None
        mine = on_hosts[self.host_index]
        if len(mine) == 1 or self._channels is None:
            return GroupHosts(sizes, None)
        return GroupHosts(sizes, GroupChannel(self._channels, identity, mine))

    def groups_within(self, members: Collection[int]) -> list[Communicator]:
        """Return the groups of some ranks that make collective calls here, sorted by identity."""
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has added a group
                created = list(self._communicators)
                break
        found = [
            one
            for one in created
            if one.size > 1
            and one.rank is not None
            and not one.is_pair
            and not one.is_destroyed
            and set(one.members) <= set(members)
        ]
        return sorted(found, key=lambda one: one.identity)

    def refuse_in_block(self, call: str) -> None:
        """Raise UsageError inside a block of sv.uneven."""
        if self.uneven is not None:
            raise UsageError(
                f"{call} inside `with sv.uneven():` is refused: a rank that has left its loop "
                "would not take part. Do it before the block"
            )

    def close(
        self,
        *,
        orderly: bool,
        reason: str = "it did not leave in order",
        stack: Sequence[StackFrame] = (),
    ) -> None:
        """Leave the job.

        In order it completes started calls, announces the end and flushes; otherwise it releases
        everything at once. `reason` and `stack` (empty for the current one) go to the flight
        record. Raises the error of an asynchronous call that was not waited for.
        """
        if self.is_closed:
            return
        self.is_closed = True
        engine = self.engine
        if orderly:
            self._warn_of_own_messages()
        else:
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
                    send_queued(engine.queues)
                    engine.leave(time.monotonic() + self.config.collective_timeout_s)
                except SyncvarError as failed:
                    error = failed
        finally:
            engine.stop()
            is_unnoticed = self.is_rank_served and not orderly and engine.failure is None
            if self._control is not None and is_unnoticed:  # a launcher notices it by itself
                kind = "raised" if is_failing() or sys.exception() is not None else "lost"
                self._control.send(
                    pack_message("process_failure", reason=reason, failure_kind=kind)
                )
            if self._transport is not None:
                self._transport.close(linger_s if engine.failure is None else 0.0)
            if self._control is not None:
                self._control.close(self.config.shutdown_timeout_s)
            self.ends_sockets()
            self._release_shm()
            self.recorder.closed()
        if error is not None:
            raise error

    def _warn_of_own_messages(self) -> None:
        """Warn of messages that this rank has sent to itself and not received."""
        for one in list(self._communicators):
            for tag, waiting in list(one.own_messages.items()):
                missing = sum(isinstance(message, tuple) for message in list(waiting))
                if missing and tag is not None:
                    count = SentCount(one.identity, self.rank, tag, missing, "")
                    _log.warning("%s", unreceived_text(self.rank, count, missing))

    def disown(self) -> UsageError:
        """Become unusable in a forked copy; return the error of all later calls."""
        failure = UsageError(
            f"this process was forked from rank {self.rank} (process {self.process}) after it had "
            "joined the job; a copy cannot take part. Fork before sv.init(), or start children "
            "with subprocess or multiprocessing's 'spawn' method"
        )
        if self.engine is not None:
            self.engine.disown(failure)
        for communicator in self._communicators:
            communicator.disown(failure)
        self.is_forked = True
        self.shm = None  # the mapping belongs to the parent; writes copy pages
        self.is_closed = True
        return failure
