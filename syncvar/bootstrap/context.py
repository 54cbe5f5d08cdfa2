"""`ProcessContext`.

One process's membership in one generation of a job, and everything it owns for that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

from syncvar._native import runner_text, which
from syncvar.algorithms.selection import parse_forced
from syncvar.bootstrap.handshake import join_handshake
from syncvar.core.environment import HostMap, RankEnvironment
from syncvar.core.errors import RendezvousError, SyncvarError, UsageError
from syncvar.core.process_ids import rank_list
from syncvar.protocol.control_messages import pack_message
from syncvar.protocol.unreceived_messages import SentCount, unreceived_text
from syncvar.runtime.communicator import Communicator, GroupHosts
from syncvar.runtime.p2p_endpoints import EndpointTable
from syncvar.runtime.progress import ProgressEngine
from syncvar.runtime.recorder import Recorder
from syncvar.runtime.state import send_queued
from syncvar.shm.channel_table import ChannelTable
from syncvar.shm.group_channel import GroupChannel
from syncvar.shm.message_ring import RingTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from syncvar.core.settings import RuntimeConfig
    from syncvar.core.stack_dump import StackFrame
    from syncvar.shm.segment import SharedSegment
    from syncvar.transports.base import Control, Transport

_WORLD = 0
_WORLD_OF_ONE = RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "")
_log = logging.getLogger("syncvar")


class ProcessContext:
    """One process's membership in one generation of a job.

    Args:
        environment: Identity of this process; None for a world of one.
        config: Deadlines and limits.
        transport: Not yet opened; None for a world of one.
        control: Channel to the launcher; None for a world of one.
        generation: Version of the membership.
        shm: Shared memory of this host, or the reason why there is none.
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
        self.recorder = Recorder(
            me.rank,
            me.world_size,
            generation,
            job=me.job_id,
            host=me.host,
            folder=me.flight_dir,
            trace=config.trace,
            stats=me.stats_dir,
        )
        self.shm: SharedSegment | None = None if isinstance(shm, str) else shm
        self.without_shm = shm if isinstance(shm, str) else ""
        self._forced = parse_forced(config.algorithm)
        self._channels = (
            None
            if self.shm is None
            else ChannelTable(
                self.shm,
                self.local_ranks,
                reaches=config.single_copy == "auto",
                runner=which(config.call_runner),
            )
        )
        self.hosts = HostMap((self.world_size,))
        self._have_shm: frozenset[int] = frozenset()  # hosts on which all ranks have shared memory
        if transport is not None and control is not None:
            answer = join_handshake(me, config, transport, control, generation, self.without_shm)
            self.hosts = HostMap.of_places(answer["host_indices"])
            if self.hosts.ranks(self.host_index) != self.local_ranks:
                raise RendezvousError(
                    f"rank {self.rank} has {rank_list(self.local_ranks)} on its host, by its "
                    f"environment, and {rank_list(self.hosts.ranks(self.host_index))} by what the "
                    "others say"
                )
            missing = {self.hosts.host_of(rank) for rank in answer["without_shm"]}
            self._have_shm = frozenset(range(len(self.hosts.sizes))) - missing
            without = {
                rank: reason_of
                for rank, reason_of in answer["without_shm"].items()
                if rank in self.local_ranks
            }
            # One rank without shared memory disables it for its host.
            if without and self.shm is not None:
                self._release_shm()
                rank, self.without_shm = next(iter(without.items()))
                self.without_shm += f" (rank {rank})"
            self.engine = ProgressEngine(
                self.rank,
                self.world_size,
                generation,
                transport,
                control,
                config,
                answer["hosts"],
                self.shm,
                self.recorder,
            )
            if self._channels is not None:
                self.post = EndpointTable(
                    RingTable(self._channels), self.engine, config.window_bytes
                )
            # also outside of the ring, which forgets old entries
            self.recorder.transport = self.transport
            self.recorder.note("joined", self.transport)
            _log.info("rank %d of %d: transport %s", self.rank, self.world_size, self.transport)
        self.world = self.communicator(_WORLD, tuple(range(self.world_size)))

    @property
    def transport(self) -> str:
        """The data path between processes of this host, and why."""
        between = (
            f"; {self.config.between_hosts} between {self.host_count} hosts"
            if self.host_count > 1
            else ""
        )
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
        """Create the communicator of a group; every member must use the same identity.

        Args:
            identity: Number of the group, the same on all members.
            members: World ranks, in the group's order.
            shares: Use shared memory if all members have it; else use links only.
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
            self.rank,
            self.engine,
            channel,
            recorder=self.recorder,
            forced=self._forced,
            hosts=self._hosts_of(identity, members) if shares else None,
        )
        created.is_pair = not shares
        created.prepares = self.config.check_finite == "off"  # cached calls do not check values
        self._communicators.add(created)
        return created

    def _hosts_of(self, identity: int, members: tuple[int, ...]) -> GroupHosts | None:
        """Return the hosts of a group that uses the segments of several hosts.

        The same on all its ranks.
        """
        sizes = self.hosts.blocks(members)
        if self.rank not in members or sizes is None or len(sizes) == 1 or max(sizes) == 1:
            return None
        on_hosts = [
            [rank for rank in members if self.hosts.host_of(rank) == host]
            for host in range(len(self.hosts.sizes))
        ]
        if any(
            len(ranks) > 1 and host not in self._have_shm for host, ranks in enumerate(on_hosts)
        ):
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

        Args:
            orderly: Complete started calls, announce the end and flush; otherwise release
                everything at once.
            reason: Reason of a failure, for the flight record.
            stack: Stack of the main thread, for the flight record; empty for the current one.

        Raises:
            SyncvarError: An asynchronous call that was not waited for had failed.
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
            if (
                self._control is not None
                and self.is_rank_served
                and not orderly
                and engine.failure is None
            ):
                # a launcher would notice it by itself
                self._control.send(pack_message("process_failure", reason=reason))
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
                if missing:
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
