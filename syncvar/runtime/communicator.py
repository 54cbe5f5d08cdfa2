"""The calls of one group: members, call numbers, compiled schedules, persistent calls.

Every collective ends in `Communicator.perform` or in a persistent call of the group.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

from syncvar._native import CommunicatorState, note_change
from syncvar.core.errors import ConfigError, MismatchError, UsageError, error_line
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.call_record import EPOCH_CALLS, CallInfo, own_site
from syncvar.runtime.collective_spec import CollectiveSpec, spec_of
from syncvar.runtime.link_exchange import LinkExchange, NullSink
from syncvar.runtime.planner import Planner
from syncvar.runtime.request import Request, stage_steps
from syncvar.runtime.sequence import EpochRange
from syncvar.runtime.state import send_queued
from syncvar.runtime.work import Work, checked_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar._native import MessageCounter
    from syncvar.runtime.link_exchange import FrameSink
    from syncvar.runtime.p2p_requests import Receiving, Sending
    from syncvar.runtime.progress import ProgressEngine
    from syncvar.runtime.recorder import Recorder
    from syncvar.runtime.request import Stage
    from syncvar.shm.group_channel import GroupChannel

    Persistent = Callable[..., NDArray[Any] | None]

_PERSISTENT_MAX = 2048


class CheckedCall:
    """A call whose arguments are checked, ready to become a request. A subclass is one call."""

    message: Sending | Receiving | None = None

    def __init__(self, spec: CollectiveSpec) -> None:
        self.spec = spec

    def about(self, variable: str, access: str) -> Self:
        """Return this call with the name of the variable that it is about, and of the access."""
        self.spec = self.spec._replace(variable=variable, access=access)
        return self

    def stages(self) -> Generator[Stage, None, Any]:
        """Return the stages, which end with the result of the call."""
        raise NotImplementedError


class MessageCall(CheckedCall):
    """A message, which may use a ring in shared memory, or else takes its stages over links."""

    def __init__(
        self,
        spec: CollectiveSpec,
        stages: Generator[Stage, None, Any],
        message: Sending | Receiving | None,
    ) -> None:
        super().__init__(spec)
        self._stages, self.message = stages, message

    def stages(self) -> Generator[Stage, None, Any]:
        """Return the stages over links."""
        return self._stages


def _end_of(number: int) -> int:
    """Return the end of the block of call numbers that `number` is in, or has just completed."""
    return -(-number // EPOCH_CALLS) * EPOCH_CALLS - 1


def begin_epochs(communicators: Sequence[Communicator], *, is_run: bool) -> None:
    """Begin a new block of call numbers in groups of one process, at both ends of `strategy.run`.

    `is_run`: the block is that of `strategy.run`, and not what comes after it.

    Blocks are counted, not derived from the calls made. So ranks that left an earlier block at
    different calls have the same number again. A peer may still wait in a call of the old block
    that this rank never made. It is informed when its frame arrives.
    """
    engine, is_shared = None, True
    for one in communicators:
        following, end = one.next_call, one.block_end
        if following > end:
            end = _end_of(following)
        # The progress thread counts the calls at any moment: so the gap comes first.
        one.recorder.numbers.skip(one.identity, following, end + 1, is_run=is_run)
        one.next_call, one.block_end = end + 1, end + EPOCH_CALLS
        engine = one.engine
        if engine is None:
            continue
        block = one.ended
        if block is not None and block.epoch_end == following - 1 and not block.is_reported:
            # No call has been made since. Another thread may remove the block, or shorten it.
            block.epoch_end = end
        else:
            block = one.ended = EpochRange(one.members, following - 1, end)
            engine.book.blocks(one.identity).append(block)
        is_shared = is_shared and one.channel is not None
    if engine is not None and not (is_shared and engine.is_quiet):
        engine.check_ended_blocks(communicators)


class GroupHosts(NamedTuple):
    """The hosts of a group that spans several, as seen by this rank."""

    sizes: tuple[int, ...]  # ranks of the group on each host, in the group's order
    channel: GroupChannel | None  # channel of this host's ranks; None for the only rank of its host


class GroupMembership(Protocol):
    """The membership all-reduce before each call of a group inside a block of sv.uneven."""

    def agree_on_members(self, name: str | CollectiveSpec, timeout: float | None) -> None:
        """Agree on the active ranks; afterwards the group's communicator has only these."""

    def require_all(self, label: str, instead: str = "") -> None:
        """Raise UsageError if a rank has left."""

    def abort_step(self, error: BaseException) -> None:
        """Make no more calls in the block."""


class Communicator(CommunicatorState):
    """The calls of one group.

    Args:
        identity: Number of the group, the same on all ranks.
        members: World ranks, in the group's order.
        recorder: Flight recorder of this process.
        engine: None in a world of one.
        channel: This rank's end of the group's channels, if all members share memory; else None.
        forced: Algorithms that the job's setting demands, by collective.
        hosts: Hosts of a group that spans several, with shared memory on each; else None.
    """

    def __init__(
        self,
        identity: int,
        members: Sequence[int],
        recorder: Recorder,
        engine: ProgressEngine | None,
        channel: GroupChannel | None = None,
        *,
        forced: Mapping[str, str] | None = None,
        hosts: GroupHosts | None = None,
    ) -> None:
        self.identity = identity
        self.members = tuple(members)
        self.size = len(self.members)
        world_rank = recorder.identity.rank
        self.rank = self.members.index(world_rank) if world_rank in self.members else None
        self.whole = self.members  # members plus the ranks that have left a block of sv.uneven
        self.uneven: GroupMembership | None = None
        self.is_pair = False  # all calls are messages of a pair
        self.counter: MessageCounter | None = None  # of messages that the engine does not know
        self.engine = engine
        self.recorder = recorder
        self.frame_sink: FrameSink = NullSink() if engine is None or self.size == 1 else engine.flow
        self.next_call = 0
        self.block_end = EPOCH_CALLS - 1  # last number of the current block of calls
        self.ended: EpochRange | None = None  # the block that ended last
        self.busy = threading.Lock()
        self.channel = channel
        self.hosts = hosts
        sizes = None if hosts is None else hosts.sizes
        self.plan = Planner(
            self.members, self.rank, dict(forced or {}), is_shared=self.is_shared, host_sizes=sizes
        )
        self.streams: dict[tuple[int, int, int], Any] = {}  # `P2PChannel` by (source, dest, tag)
        # By root: an array like the latest result of a scatter.
        self.last_parts: dict[int, NDArray[Any]] = {}
        # By tag: messages to this rank itself, see `p2p_mailbox.Mailbox`.
        self.own_messages: dict[int | None, Any] = {}
        self.matcher: Any = None  # a `p2p_matching.MessageMatcher`, once it is needed
        # By members: where they agree on groups of themselves.
        self.meeting_places: dict[tuple[int, ...], Communicator] = {}
        self.keeps_persistent = True
        # By `dispatch.key_of`: what makes the call, its options, dtype and shape
        self.persistent_calls: dict[Any, Persistent] = {}
        self._forked: UsageError | None = None
        self._destroyed: UsageError | None = None
        if engine is not None and self.rank is not None:
            # 0, except for a pair that was released and is used again.
            self.next_call = engine.book.following(identity)
            engine.book.announce(identity, self.next_call)
            if channel is not None:
                engine.book.count_by(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        ranks = ", ".join(map(str, self.whole[:8])) + (", …" if len(self.whole) > 8 else "")
        raise TypeError(
            f"the group of ranks {ranks} cannot be copied or pickled: its sockets and memory "
            "belong to this process. Use the same group in the copy, or make another one there: "
            "sv.new_group(ranks)"
        )

    def forced(self, collective: str) -> str | None:
        """Return the algorithm that the job's setting demands for a collective."""
        return self.plan.forced.get(collective)

    def keep_persistent(self, key: Any, persistent: Persistent | None) -> Persistent | None:
        """Cache a compiled call, if this group caches calls."""
        if persistent is None or not self.keeps_persistent:
            return None
        if len(self.persistent_calls) >= _PERSISTENT_MAX:
            self.persistent_calls.clear()
        self.persistent_calls[key] = persistent
        return persistent

    @property
    def epoch(self) -> int:
        """Number of the block of calls; equal on ranks that have begun and ended the same runs."""
        return self.block_end // EPOCH_CALLS

    @property
    def is_destroyed(self) -> bool:
        """Whether the program has destroyed the group."""
        return self._destroyed is not None

    @property
    def is_awaited(self) -> bool:
        """Whether another rank is known to be in this group's next call."""
        channel, engine = self.channel, self.engine
        if channel is None:
            if engine is not None and engine.book.is_awaited(self.identity, self.next_call):
                return True
            channel = None if self.hosts is None else self.hosts.channel
            if channel is None:
                return False
        words, entered = channel.words, (self.next_call + 1) << 1
        for other in channel.others:  # noqa: SIM110  (asked after every queued write)
            if words[other] >= entered:
                return True
        return False

    @property
    def is_shared(self) -> bool:
        """Whether calls go through shared memory."""
        return self.channel is not None and self.size > 1

    @property
    def member_rank(self) -> int:
        """This process's rank in the group; raises UsageError if it is not a member."""
        if self.rank is None:
            raise UsageError(
                f"this rank is not a member of the group of ranks {list(self.members)}: call it "
                "on members only (group.is_member tells)"
            )
        return self.rank

    @property
    def home_rank(self) -> int:
        """This process's rank in the whole group, with ranks that have left sv.uneven."""
        rank = self.member_rank
        return rank if self.uneven is None else self.whole.index(self.members[rank])

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks of the whole group that take part in its calls."""
        if self.uneven is None:
            return tuple(range(self.size))
        return tuple(map(self.whole.index, self.members))

    def require_all(self, label: str, instead: str = "") -> None:
        """Raise UsageError on all active ranks if one has left the block of sv.uneven."""
        if self.uneven is not None:
            self.require_free(label)
            self.uneven.require_all(label, instead)

    def agree_on_members(self, name: str | CollectiveSpec, timeout: float | None) -> None:
        """Agree on the active ranks; collective in a block of sv.uneven, else does nothing.

        If no call is possible now, this raises UsageError. The other ranks then wait.
        """
        if self.uneven is not None:
            self.require_free(name)
            # From here on the members are the active ranks.
            self.uneven.agree_on_members(name, timeout)

    def become(self, other: Communicator) -> None:
        """Swap contents with another communicator: holders of this one make its calls then."""
        for one in (self, other):  # the progress thread may look at any moment
            if one.engine is not None and one.channel is not None:
                one.engine.book.note(one.identity, one.next_call)
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__
        self.next_call, other.next_call = other.next_call, self.next_call
        note_change()
        for one in (self, other):
            if one.engine is not None and one.channel is not None:
                one.engine.book.count_by(one)

    def perform(
        self,
        name: str | CollectiveSpec,
        make_checked: Callable[[], CheckedCall],
        timeout: float | None = None,
        *,
        async_op: bool = False,
        after_queued: bool = True,
    ) -> Any:
        """Make a call: number it, send deferred writes, check its arguments, run it.

        A call with bad arguments uses up its number and informs the group. So all ranks stay at the
        same call, and the others raise MismatchError instead of waiting.

        Args:
            name: The collective, or the description of the call, for messages.
            make_checked: Checks the arguments and returns the checked call. Its exceptions reach
                the caller.
            timeout: Seconds; None for the job's default.
            async_op: Return a `Work` at once.
            after_queued: Send deferred writes before; False for the call that sends them.
        """
        self.agree_on_members(name, timeout)
        self.require_free(name)
        engine = self.engine
        with self.busy:
            call = self.next_call
            try:
                allowed = None if timeout is None else checked_timeout(timeout)
                if after_queued and engine is not None:
                    for listener in engine.before_calls:
                        listener(self.identity, str(name))
                    if engine.queues:
                        send_queued(engine.queues)
                # Not before: while this rank sends deferred writes, it has not entered the call.
                self.next_call = call + 1
                with quiet():
                    checked = make_checked()
            except Exception as error:
                self.next_call = call + 1
                self._refuse(name, call, error)
                raise
            request = self.request_of(call, checked)
            if engine is None or self.size == 1:
                request.advance()
                work = Work(None, request)
                return work if async_op else work.wait()
            if async_op and self.uneven is None:
                request.site = own_site()
                engine.start(request, allowed)
                if not request.is_over:
                    engine.transport.wake()  # the progress thread continues it
                return Work(engine, request, sends=not after_queued)
            if not async_op:
                return engine.run(request, allowed)
            # Blocks of sv.uneven run asynchronous calls at once.
            with contextlib.suppress(MismatchError):
                engine.run(request, allowed)
            return Work(None, request)

    def _refuse(self, name: str | CollectiveSpec, call: int, error: Exception) -> None:
        """Record a call with bad arguments, and inform the group."""
        if isinstance(error, ConfigError) and self.size > 1:
            error.add_note(
                f"refused on rank {self.members[self.member_rank]}; the other ranks of the group "
                "raise MismatchError"
            )
        info = CallInfo(spec_of(name), self.identity, self.members)
        self.recorder.refused(info, call, error)
        if self.engine is not None and self.size > 1:
            self.engine.book.announce(self.identity, call + 1)
            reason = error_line(error)
            self.engine.reject_call(self.identity, self.members, call, str(name), reason)

    def require_free(self, name: str | CollectiveSpec) -> None:
        """Raise an error, before anything is numbered or sent, if no call can be made."""
        self.member_rank  # noqa: B018  (raises for non-members)
        if self._destroyed is not None:
            raise self._destroyed
        if self.engine is not None:
            self.engine.check()
            self.engine.refuse_in_handler(name)
        elif self._forked is not None:
            raise self._forked
        if self.busy.locked():
            raise UsageError(
                f"{name}: another call on this group is running in another thread; give each "
                "thread its own group (sv.new_group), or take turns"
            )

    def interrupt(self, call: int, begin: int, error: BaseException) -> None:
        """Break the group: an exception interrupted a message that the other rank may wait for."""
        if self.engine is not None:
            info = CallInfo(CollectiveSpec("a message"), self.identity, self.members)
            self.engine.interrupted(Request(self.recorder.begin(info, call, begin), None), error)

    def request_of(self, call: int, checked: CheckedCall, begin: int | None = None) -> Request:
        """Return a call as a request of the engine."""
        hosts, message = self.hosts, checked.message
        channel = hosts.channel if hosts is not None else None if self.size == 1 else self.channel
        is_shared = hosts is None and channel is not None
        way = "hosts" if hosts is not None else "shm" if is_shared else "links"
        info = self.call_info(checked.spec, 0, way)
        entry = self.recorder.begin(info, call, begin)
        links = None if is_shared else LinkExchange(entry, self.frame_sink)
        if is_shared and self.engine is not None and self.engine.async_calls:
            self.engine.continue_async_calls()  # they are before it in the channel's queue
        steps = stage_steps(entry, checked.stages(), channel, links)
        if message is None or links is None:
            return Request(entry, steps, channel, links)
        request = Request(entry, message.steps(entry, links, steps), channel, links)
        request.is_shared = True
        request.abandon = message.abandon
        return request

    def call_info(self, spec: CollectiveSpec, nbytes: int, path: str) -> CallInfo:
        """Return the part of a record that all calls of this description share."""
        return CallInfo(spec, self.identity, self.members, spec.fingerprint, nbytes, path)

    def begin_epoch(self) -> None:
        """Begin a new block of call numbers (see `begin_epochs`)."""
        begin_epochs([self], is_run=True)

    def leave_epoch(self, error: BaseException) -> None:
        """End a block, also one of sv.uneven, after an exception, and inform the group at once."""
        if self.engine is not None and self.engine.failure is None:
            if self.uneven is not None:
                self.uneven.abort_step(error)
            if self.size > 1:
                reason = f"left strategy.run: {error_line(error)}"
                self.engine.abort_step(
                    self.identity, self.members, self.next_call - 1, self.block_end, reason
                )
        end = self.block_end if self.next_call <= self.block_end else _end_of(self.next_call)
        self.recorder.numbers.skip(self.identity, self.next_call, end + 1)
        self.next_call, self.block_end = end + 1, end + EPOCH_CALLS
        if self.engine is not None:
            self.engine.book.announce(self.identity, self.next_call)

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None and (self.counter is not None or self.is_shared):
            engine.book.release(self.identity, self.next_call)

    def destroy(self) -> None:
        """Release the group's resources and refuse later calls. Started calls continue."""
        self._destroyed = UsageError(
            f"this group of ranks {list(self.members)} has been destroyed; make it again with "
            "sv.new_group or split"
        )
        if self.engine is not None and self.is_shared:
            self.engine.book.release(self.identity, self.next_call)
        self.channel = self.hosts = None
        self.persistent_calls.clear()
        self.plan.forget()
        self.streams.clear()

    def disown(self, failure: UsageError) -> None:
        """Refuse every later call: this process is a forked copy."""
        self._forked = failure
