"""Which message comes next: probes, and receives from any source.

A probe and a receive from any source look at the messages that have come. These are in the rings of
this host, in frames that wait for their receive, and in this rank's own mailbox. A receive from any
source then is the ordinary next receive of the pair and tag that it has found. So it takes none but
the three ways of `p2p_channel`, and message k of a pair and tag still meets receive k.

While there is no message, a request of the engine waits for a `MessageWait`. It has the deadline of
other calls, and ends with their errors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.array_types import dtype_from_index
from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.protocol.fixed_records import ARRAY, BYTES, RECORD_BYTES, unpack_record
from syncvar.protocol.frame import FrameType
from syncvar.runtime.call_record import CallInfo, PendingRecord, own_site
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint
from syncvar.runtime.p2p_channel import (
    RECV_NAMES,
    RecvChannel,
    SendChannel,
    pair_identity,
    stream_identity,
    tag_of,
)
from syncvar.runtime.p2p_endpoints import MessageForm
from syncvar.runtime.p2p_mailbox import AnyMessage, Mailbox, info_of
from syncvar.runtime.p2p_match_log import MatchLog
from syncvar.runtime.request import BodyError, Request
from syncvar.runtime.state import send_queued
from syncvar.runtime.work import Work, checked_timeout
from syncvar.shm.channel_table import BUDGET_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.protocol.fixed_records import InputRecord
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.p2p_channel import P2PChannel, ReceiveArgs
    from syncvar.runtime.p2p_endpoints import Key, RecvEndpoint
    from syncvar.runtime.p2p_mailbox import MessageInfo
    from syncvar.runtime.progress import ProgressEngine
    from syncvar.runtime.request import Steps
    from syncvar.transports.base import Frame

_CHANNELS_MAX = 128  # of a group; beyond that, idle ones are dropped
_channels_lock = threading.RLock()  # reentrant for signal handlers


class Search(NamedTuple):
    """Where a numbered call looks for a message."""

    call: int
    sources: Sequence[int]
    tag: int | None  # None: any tag
    waits: bool


# -- channels of pairs and tags --------------------------------------------------------------------


def channel_of(communicator: Communicator, context: Any, source: int, dest: int, tag: int) -> Any:
    """Return this rank's channel of a pair and tag: send k meets receive k.

    A tag may be a step number, so channels that are not used any more are dropped.
    """
    with _channels_lock:
        return _channel_of(communicator, context, source, dest, tag)


class UsedChannel:
    """A channel of a pair and tag that a thread uses, so that no other thread drops it meanwhile.

    Else two channels would count the same messages.
    """

    __slots__ = ("_args", "_channel")

    def __init__(
        self, communicator: Communicator, context: Any, source: int, dest: int, tag: int
    ) -> None:
        self._args = communicator, context, source, dest, tag

    def __enter__(self) -> Any:
        with _channels_lock:
            self._channel: P2PChannel = _channel_of(*self._args)
            self._channel.users += 1
        return self._channel

    def __exit__(self, *_: object) -> None:
        with _channels_lock:
            self._channel.users -= 1


def _channel_of(communicator: Communicator, context: Any, source: int, dest: int, tag: int) -> Any:
    channels = communicator.streams
    found = channels.get((source, dest, tag))
    if found is None:
        if len(channels) >= _CHANNELS_MAX:
            _drop_idle(channels)
        identity = stream_identity(pair_identity(communicator.identity, source, dest), tag)
        pair = communicator.members[source], communicator.members[dest]
        stream = context.communicator(identity, pair, shares=False)
        post, engine = context.post, stream.engine
        assert engine is not None  # there are two ranks
        if post is not None and not all(map(post.serves, pair)):
            post = None  # they share no memory
        if communicator.member_rank == source:
            outward = None if post is None else post.outward(pair[1])
            found = SendChannel(stream, tag, outward, context)
            engine.sent.note(identity, pair[1], tag)
        else:
            inward = None if post is None else post.inward(pair[0])
            found = RecvChannel(stream, tag, inward, context)
        channels[source, dest, tag] = found
    return found


def _drop_idle(channels: dict[tuple[int, int, int], P2PChannel]) -> None:
    for key, channel in list(channels.items()):
        stream, engine = channel.stream, channel.stream.engine
        is_used = channel.users or stream.busy.locked()
        if engine is not None and not is_used and engine.is_idle(stream.identity):
            del channels[key]
            channel.retire()
            engine.flow.rest(stream.identity, stream.members[1 - stream.member_rank])


# -- messages that have come -----------------------------------------------------------------------


class _Acceptor:
    """Accepts the keys of the next message from a source, with one tag or (None) any."""

    def __init__(self, matcher: MessageMatcher, source: int, tag: int | None) -> None:
        self._matcher = matcher
        self._source = source
        self._tag = tag
        self.pair = pair_identity(matcher.communicator.identity, source, matcher.rank)

    def __call__(self, key: Key) -> bool:
        tag = tag_of(key[0], self.pair)
        if tag is None or self._tag not in (None, tag):
            return False
        return key[1] == self._matcher.next_call(self._source, tag, key[0])


class MessageMatcher:
    """Finds the messages that have come for this rank in a group."""

    def __init__(self, communicator: Communicator, context: Any) -> None:
        self.communicator = communicator
        self.rank = communicator.member_rank
        self.mailbox = Mailbox(communicator.own_messages, self.rank)
        self._context = context
        self._first = 0  # source at which the next search begins
        self._calls = itertools.count()
        if "matches" not in context.extras:
            config, rank = context.config, communicator.members[self.rank]
            context.extras["matches"] = MatchLog(config.match_log, config.match_replay, rank)
        self._log: MatchLog = context.extras["matches"]
        self._members = (communicator.members[self.rank],)
        self._identity = fingerprint("any source", communicator.identity, *self._members)

    @property
    def engine(self) -> ProgressEngine | None:
        """The engine; None in a world of one."""
        return self.communicator.engine

    def next_call(self, source: int, tag: int, identity: int) -> int:
        """Return the number of the next receive of a source and tag."""
        channel = self.communicator.streams.get((source, self.rank, tag))
        if channel is not None:
            following: int = channel.stream.next_call
            return following
        assert self.engine is not None  # another rank has sent something
        return self.engine.book.following(identity)

    def endpoint(self, source: int) -> RecvEndpoint | None:
        """Return the end of the ring from a source; None if it shares no memory with this rank."""
        post, world_rank = self._context.post, self.communicator.members[source]
        if post is None or source == self.rank or not post.serves(world_rank):
            return None
        found: RecvEndpoint = post.inward(world_rank)
        return found

    def find(self, sources: Sequence[int], tag: int | None) -> MessageInfo | None:
        """Return the next message of one of the sources, each of which gets its turn."""
        for source in sorted(sources, key=lambda one: one < self._first):
            if source == self.rank:
                found = self.mailbox.find(tag)
            else:
                acceptor = _Acceptor(self, source, tag)
                found = self._find_in_ring(source, acceptor) or self._find_early(source, acceptor)
            if found is not None:
                self._first = source + 1
                return found
        return None

    def _find_in_ring(self, source: int, acceptor: _Acceptor) -> MessageInfo | None:
        end = self.endpoint(source)
        found = None if end is None else end.find(acceptor)
        if found is None:
            return None
        key, form = found
        return info_of(source, tag_of(key[0], acceptor.pair) or 0, form)

    def _find_early(self, source: int, acceptor: _Acceptor) -> MessageInfo | None:
        """Return a message over a link whose first frames have come before their receive."""
        early: list[tuple[Key, list[Frame]]] = []
        if self.engine is not None:
            with contextlib.suppress(RuntimeError):  # the driver has changed it: look again later
                early = list(self.engine.book.early.items())
        for key, frames in early:
            record = _record_in(frames) if acceptor(key) else None
            if record is not None:
                form = MessageForm(record.kind, dtype_from_index(record.dtype), record.shape)
                return info_of(source, tag_of(key[0], acceptor.pair) or 0, form)
        return None

    def find_or_poll(self, sources: Sequence[int], tag: int | None) -> MessageInfo | None:
        """Return the next message; handle arrived frames first, if that may bring one."""
        found = self.find(sources, tag)
        if found is None and self.engine is not None:
            self.engine.poll()
            found = self.find(sources, tag)
        return found

    def require_live_source(self, sources: Sequence[int], tag: int | None, label: str) -> None:
        """Raise PeerLost if all sources have left the job without sending a message."""
        engine, members = self.engine, self.communicator.members
        others = [members[source] for source in sources if source != self.rank]
        if engine is None or not others or any(other not in engine.book.left for other in others):
            return
        for source in sources:
            if source != self.rank and self._has_sent(source, tag):
                return
        raise engine.book.ended(others[0], label)

    def _has_sent(self, source: int, tag: int | None) -> bool:
        """Return whether a source that has left had sent more than has been received."""
        assert self.engine is not None
        pair = pair_identity(self.communicator.identity, source, self.rank)
        entered = self.engine.book.left[self.communicator.members[source]]
        for identity, last in entered.items():
            sent = tag_of(identity, pair)
            if sent is None or tag not in (None, sent):
                continue
            if last >= self.next_call(source, sent, identity):
                return True
        return False

    # -- calls -------------------------------------------------------------------------------------

    def require_usable(self, spec: CollectiveSpec) -> None:
        """Raise an error if no message can be received now."""
        if self.communicator.is_destroyed:
            self.communicator.require_free(spec)
        if self.engine is not None:
            self.engine.check()
            self.engine.refuse_in_handler(spec)
            if self.engine.queues:
                send_queued(self.engine.queues)

    def search(self, sources: Sequence[int], tag: int | None, *, waits: bool) -> Search:
        """Number a call, and return where it looks for a message: in a replay at the recorded one.

        Raises UsageError if a replayed call waits that found nothing in the recorded run.
        """
        call = next(self._calls)
        recorded = self._log.recorded(self.communicator.identity, call)
        if recorded is not None:
            return Search(call, recorded[:1], recorded[1], waits=True)
        if self._log.found_nothing(self.communicator.identity, call):
            if waits:
                raise UsageError(
                    f"match_replay: in the recorded run call {call + 1} of sv.probe and "
                    "sv.recv_any in this group found no message. Replay the same program"
                )
            return Search(call, (), tag, waits=False)
        return Search(call, sources, tag, waits=waits)

    def record(self, spec: CollectiveSpec, call: int, found: MessageInfo, begin: int) -> None:
        """Record a probe that has ended at once, or the choice of a source."""
        info = self._call_info(spec)._replace(path=self.choice(call, found), nbytes=found.nbytes)
        self.communicator.recorder.add((info, call, begin, monotonic_ns(), get_ident()))

    def choice(self, call: int, found: MessageInfo) -> str:
        """Write to the log which message a call has found; return it as text for the record."""
        self._log.add(self.communicator.identity, call, found)
        return f"found rank {self.communicator.members[found.source]}, tag {found.tag}"

    def request(self, spec: CollectiveSpec, call: int, steps: ProbeSteps) -> Request:
        """Return a request that waits for a message."""
        entry = self.communicator.recorder.begin(self._call_info(spec), call)
        request = steps.wait.outer = Request(entry, steps.run(entry))
        request.is_shared = True  # nothing else signals its end
        request.alternatives = steps.wait.alternatives()
        return request

    def _call_info(self, spec: CollectiveSpec) -> CallInfo:
        return CallInfo(spec, self._identity, self._members, spec.fingerprint)

    def channel(self, found: MessageInfo) -> UsedChannel:
        """Return the channel of a message that another rank has sent."""
        return UsedChannel(self.communicator, self._context, found.source, self.rank, found.tag)

    def claim(self, wait: MessageWait, args: ReceiveArgs) -> Request | None:
        """Return the ordinary receive of the message that a wait has found, as the driver.

        None: another thread is faster. The receive has its number, and the engine does not know it.
        """
        found = wait.found
        assert found is not None
        if found.source == self.rank:
            return self.mailbox.take(found, args)
        with self.channel(found) as channel:
            return self._claimed(channel, wait, args)

    def _claimed(
        self, channel: RecvChannel, wait: MessageWait, args: ReceiveArgs
    ) -> Request | None:
        stream, found = channel.stream, wait.found
        assert found is not None
        if not stream.busy.acquire(blocking=False):
            return None
        try:
            wait.found = found = self.find((found.source,), found.tag)
            if found is None:
                return None
            call = stream.next_call
            stream.next_call = call + 1
            return stream.request_of(call, channel.checked(_exact(args, found)))
        finally:
            stream.busy.release()


def _exact(args: ReceiveArgs, found: MessageInfo) -> ReceiveArgs:
    """Return the arguments of the receive of a message that was found."""
    return args._replace(kind=BYTES if found.is_object and args.out is None else ARRAY)


def _record_in(frames: list[Frame]) -> InputRecord | None:
    """Return the description of a message in its first frames; None if it has not come."""
    first = [one for one in frames if one.header.kind == FrameType.DATA and not one.header.round]
    first.sort(key=lambda one: one.header.segment)
    data = b"".join(bytes(one.payload) for one in first if one.payload is not None)
    return unpack_record(data) if len(data) == RECORD_BYTES else None


class MessageWait:
    """A wait for a message from one of several sources; it is a `Wait` of a request."""

    need = 0
    is_published = False  # no sender sees that this rank waits
    outer: Request  # the request of this wait; set before its first step

    def __init__(
        self, matcher: MessageMatcher, sources: Sequence[int], tag: int | None, label: str
    ) -> None:
        self.found: MessageInfo | None = None
        self._matcher = matcher
        self._sources = sources
        self._tag = tag
        self._label = label
        ends = map(matcher.endpoint, sources)
        self._ends = [end for end in ends if end is not None]

    @property
    def awaiting(self) -> tuple[int, ...]:
        """World ranks that may send the message."""
        members = self._matcher.communicator.members
        return tuple(members[one] for one in self._sources if one != self._matcher.rank)

    def alternatives(self) -> tuple[int, ...]:
        """Return `Request.alternatives`; empty for any tag, whose calls have no fixed identity."""
        matcher, found = self._matcher, []
        members, engine = matcher.communicator.members, matcher.engine
        assert engine is not None
        for source in self._sources if self._tag is not None else ():
            if source != matcher.rank and members[source] not in engine.book.left:
                assert self._tag is not None
                pair = pair_identity(matcher.communicator.identity, source, matcher.rank)
                identity = stream_identity(pair, self._tag)
                call = matcher.next_call(source, self._tag, identity)
                found += [members[source], identity, call]
        return tuple(found)

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread waits; else the program may still send a message to this rank itself."""
        return self.outer.thread != 0 or self._matcher.rank not in self._sources

    @property
    def needs_looks(self) -> bool:
        """Whether the message may come through shared memory, which needs polling."""
        return bool(self._ends) or self._matcher.rank in self._sources

    def is_reached(self) -> bool:
        """Return whether a message has come; raise the error if none can come any more."""
        self.found = self._matcher.find(self._sources, self._tag)
        if self.found is None and self.is_waited_for:
            try:
                self._matcher.require_live_source(self._sources, self._tag, self._label)
            except SyncvarError as error:
                raise BodyError(error) from error
        return self.found is not None

    def look(self) -> bool:
        """Spin for a short while; return whether a ring has news."""
        until = time.perf_counter() + BUDGET_S
        while self._ends:
            if any(end.has_news() for end in self._ends):
                return True
            os.sched_yield()
            if time.perf_counter() > until:
                break
        return False


class ProbeSteps:
    """The steps of a probe that waits: its result is the `MessageInfo`."""

    def __init__(self, matcher: MessageMatcher, wait: MessageWait) -> None:
        self.matcher = matcher
        self.wait = wait

    def run(self, entry: PendingRecord) -> Steps:
        """Return the steps of a request with this record."""
        yield self.wait
        assert self.wait.found is not None
        entry.way = self.matcher.choice(entry.call, self.wait.found)
        return self.wait.found


class _ClaimWait(MessageWait):
    """A wait that gives the message that comes its receive, before another thread takes it."""

    receive: Request | None = None

    def __init__(
        self,
        matcher: MessageMatcher,
        sources: Sequence[int],
        tag: int | None,
        label: str,
        args: ReceiveArgs,
    ) -> None:
        super().__init__(matcher, sources, tag, label)
        self._args = args

    def is_reached(self) -> bool:
        """Return whether a message has come and its receive has a number."""
        if super().is_reached():
            self.receive = self._matcher.claim(self, self._args)
        return self.receive is not None


class _ReceiveWait:
    """A wait for the receive of the chosen message; it is a `Wait`."""

    is_published = False

    def __init__(self, receive: Request) -> None:
        self._receive = receive

    @property
    def need(self) -> int:
        """Number that changes when the receive makes progress."""
        return self._receive.need

    @property
    def needs_looks(self) -> bool:
        """Whether the receive needs polling."""
        return self._receive.is_over or self._receive.needs_looks

    @property
    def awaiting(self) -> tuple[int, ...]:
        """The sender."""
        return self._receive.awaiting

    def is_reached(self) -> bool:
        """Return whether the receive is over."""
        return self._receive.is_over

    def look(self) -> bool:
        """Spin for a short while; return whether the receive can continue."""
        return not self._receive.state or self._receive.is_over or self._receive.look()


class AnyReceiveSteps(ProbeSteps):
    """The steps of a receive from any source: its result is an `AnyMessage`."""

    wait: _ClaimWait

    def __init__(
        self, matcher: MessageMatcher, sources: Sequence[int], tag: int | None, args: ReceiveArgs
    ) -> None:
        super().__init__(matcher, _ClaimWait(matcher, sources, tag, RECV_NAMES[args.kind], args))

    def run(self, entry: PendingRecord) -> Steps:
        """Return the steps of a request with this record."""
        yield self.wait
        found, receive, engine = self.wait.found, self.wait.receive, self.matcher.engine
        assert found is not None and receive is not None and engine is not None  # noqa: PT018
        entry.way, entry.nbytes = self.matcher.choice(entry.call, found), found.nbytes
        if not receive.is_over:
            outer = self.wait.outer
            receive.started, receive.deadline = time.monotonic(), outer.deadline
            receive.timeout_s = outer.timeout_s
            receive.report_at = receive.started + engine.config.report_after_s
            engine.inbox.append(receive)
            yield _ReceiveWait(receive)
        if receive.error is not None:
            assert isinstance(receive.error, Exception)
            raise BodyError(receive.error)
        return AnyMessage(found.source, receive.result, found.tag, found.is_object)


def matcher_of(communicator: Communicator, context: Any) -> MessageMatcher:
    """Return the matcher of a group, which its first probe makes."""
    if communicator.matcher is None:
        communicator.matcher = MessageMatcher(communicator, context)
    matcher: MessageMatcher = communicator.matcher
    return matcher


def probe_messages(
    matcher: MessageMatcher,
    sources: Sequence[int],
    tag: int | None,
    spec: CollectiveSpec,
    timeout: float | None,
    *,
    waits: bool,
) -> MessageInfo | None:
    """Return the next message, without receiving it; None if there is none and it does not wait."""
    begin = monotonic_ns()
    allowed = None if timeout is None else checked_timeout(timeout)
    matcher.require_usable(spec)
    call, sources, tag, waits = matcher.search(sources, tag, waits=waits)
    found = matcher.find_or_poll(sources, tag)
    if found is not None:
        matcher.record(spec, call, found, begin)
    if found is not None or not waits:
        return found
    if matcher.engine is None or tuple(sources) == (matcher.rank,):
        raise matcher.mailbox.refusal(spec.collective, tag, "probe after that")
    wait = MessageWait(matcher, sources, tag, spec.label)
    request = matcher.request(spec, call, ProbeSteps(matcher, wait))
    result: MessageInfo = matcher.engine.run(request, allowed)
    return result


def receive_any(
    matcher: MessageMatcher,
    tag: int | None,
    args: ReceiveArgs,
    spec: CollectiveSpec,
    timeout: float | None,
) -> AnyMessage:
    """Receive the next message from any source."""
    begin, ranks = monotonic_ns(), range(matcher.communicator.size)
    allowed = None if timeout is None else checked_timeout(timeout)
    matcher.require_usable(spec)
    search = matcher.search(ranks, tag, waits=True)
    call, sources, tag, _ = search
    found = matcher.find_or_poll(sources, tag)
    if len(ranks) == 1 or (found is not None and found.source == matcher.rank):
        if found is not None:
            matcher.record(spec, call, found, begin)
        own: AnyMessage = matcher.mailbox.receive(tag, args, async_op=False, is_any=True)
        return own
    if found is not None:
        try:
            with matcher.channel(found) as channel:
                delivered = channel.receive(args, None, waits=False)
        except ConfigError:  # the message is consumed
            matcher.record(spec, call, found, begin)
            raise
        if delivered is not None:
            matcher.record(spec, call, found, begin)
            is_object = delivered.kind == BYTES
            return AnyMessage(found.source, delivered.result, found.tag, is_object)
    result: AnyMessage = _started(matcher, search, args, spec, allowed).wait()
    return result


def start_any_receive(
    matcher: MessageMatcher,
    tag: int | None,
    args: ReceiveArgs,
    spec: CollectiveSpec,
    timeout: float | None,
) -> Work:
    """Start a receive from any source."""
    allowed = None if timeout is None else checked_timeout(timeout)
    matcher.require_usable(spec)
    ranks = range(matcher.communicator.size)
    if len(ranks) == 1:
        work: Work = matcher.mailbox.receive(tag, args, async_op=True, is_any=True)
        return work
    return _started(matcher, matcher.search(ranks, tag, waits=True), args, spec, allowed)


def _started(
    matcher: MessageMatcher,
    search: Search,
    args: ReceiveArgs,
    spec: CollectiveSpec,
    allowed: float | None,
) -> Work:
    engine = matcher.engine
    assert engine is not None  # there are two ranks
    steps = AnyReceiveSteps(matcher, search.sources, search.tag, args)
    request = matcher.request(spec, search.call, steps)
    request.site = own_site()
    engine.start(request, allowed)
    if not request.is_over:
        engine.transport.wake()  # the progress thread continues it
    return Work(engine, request)
