"""Messages between an ordered pair of ranks with one tag: the requests of both ends.

Over a link a message has two stages: a record of fixed length with dtype and shape, then the array.
Ranks of one host use a message ring instead; see `runtime/p2p_endpoints.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import MessageCounter
from syncvar.algorithms.compile_schedule import compile_for_links
from syncvar.algorithms.schedule import Chunk, Recv, Schedule, Send
from syncvar.bootstrap.process import current
from syncvar.core.array_types import dtype_from_index
from syncvar.protocol.fixed_records import (
    ARRAY,
    BYTES,
    RECORD_BYTES,
    array_record,
    pack_record,
    unpack_record,
)
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.p2p_channel import P2PChannel
from syncvar.runtime.p2p_endpoints import RecvEndpoint, SendEndpoint
from syncvar.runtime.p2p_requests import Receiving, Sending
from syncvar.runtime.request import Stage
from syncvar.shm.message_ring import array_code

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.algorithms.compile_schedule import LinkSchedule
    from syncvar.algorithms.schedule import Step
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.p2p_endpoints import Landing

_SOURCE, _DEST = 0, 1  # ranks of the pair
_MESSAGE = "message"  # what both ends compare: the channel has the pair and the tag
_STREAMS_MAX = 128  # channels of a group; beyond that, idle ones are dropped


def channel_of(communicator: Communicator, source: int, dest: int, tag: int) -> P2PChannel:
    """Return the channel of a pair and tag: send k meets receive k. A tag may be a step number."""
    streams = communicator.streams
    found = streams.get((source, dest, tag))
    if found is None:
        if len(streams) >= _STREAMS_MAX:
            _drop_idle(streams)
        identity = fingerprint("message", communicator.identity, source, dest, tag)
        pair = (communicator.members[source], communicator.members[dest])
        context = current()
        stream = context.communicator(identity, pair, shares=False)
        post, engine = context.post, context.engine
        end: RecvEndpoint | SendEndpoint | None = None
        if post is not None and engine is not None and all(map(post.serves, pair)):
            is_source = communicator.member_rank == source
            end = post.outward(pair[1]) if is_source else post.inward(pair[0])
            stream.count = MessageCounter(identity, stream.next_call)
            engine.book.count_by(stream.count)
        if engine is not None and communicator.member_rank == source:
            engine.sent.note(identity, pair[1], tag)
        begin = partial(_continued_call, tag)
        found = streams[source, dest, tag] = P2PChannel(context, stream, end, ARRAY, begin)
    return found


def _drop_idle(streams: dict[tuple[int, int, int], P2PChannel]) -> None:
    for key, channel in list(streams.items()):
        stream, engine = channel.stream, channel.stream.engine
        if engine is not None and not stream.busy.locked() and engine.is_idle(stream.identity):
            streams.pop(key, None)  # another thread may have dropped it
            channel.retire()
            engine.flow.rest(stream.identity, stream.members[1 - stream.member_rank])


def send_spec(
    name: str, channel: P2PChannel, array: NDArray[Any], kind: int, tag: int
) -> CollectiveSpec:
    """Return the description of a send."""
    peer, nbytes = channel.stream.members[_DEST], array.nbytes
    spec = CollectiveSpec(name, size=nbytes, peer=peer, tag=tag, compared=_MESSAGE)
    data = f"{nbytes} bytes"
    if kind != BYTES:
        spec = spec.with_array(array)
        data = spec.array
    return spec._replace(shown=(f"{data} to rank {peer}", f"tag {tag}"))


def send_request(
    name: str,
    channel: P2PChannel,
    array: NDArray[Any],
    kind: int,
    tag: int,
    *,
    waits: bool,
    copies: bool,
) -> CheckedCall:
    """Return the call that sends an array, or an object as bytes; `waits` for its receiver."""
    stream = channel.stream
    copies = copies or not array.flags.c_contiguous
    work = np.array(array, order="C", copy=copies, ndmin=0).reshape(-1)
    header = array_record(array, int(waits))._replace(kind=kind)
    record = np.frombuffer(pack_record(header), np.uint8)

    def body() -> Generator[Stage, None, None]:
        yield Stage(_plan(stream, Send(_DEST, Chunk(0, record.size))), record)
        rounds: list[Step] = [Recv(_DEST, Chunk(0, 0))] if waits else []
        yield Stage(_plan(stream, *rounds, Send(_DEST, Chunk(0, work.size))), work)

    code = array_code(kind, header.dtype, array.ndim)
    message = None
    if isinstance(channel.end, SendEndpoint):
        message = Sending(channel.end, code, work.reshape(array.shape), waits=waits)
    return CheckedCall(send_spec(name, channel, array, kind, tag), body(), message)


def receive_request(
    name: str,
    channel: P2PChannel,
    tag: int,
    landing: Landing,
    finish: Callable[[int, NDArray[Any]], Any],
) -> CheckedCall:
    """Return the call that receives a message."""
    stream = channel.stream

    def body() -> Generator[Stage, None, Any]:
        data = np.empty(RECORD_BYTES, np.uint8)
        yield Stage(_plan(stream, Recv(_SOURCE, Chunk(0, data.size))), data)
        record = unpack_record(data.tobytes())
        output: NDArray[Any] = np.empty(record.shape, dtype_from_index(record.dtype))
        work = output.reshape(-1)
        rounds: list[Step] = [Send(_SOURCE, Chunk(0, 0))] if record.nbytes else []
        yield Stage(_plan(stream, *rounds, Recv(_SOURCE, Chunk(0, work.size))), work)
        return finish(record.kind, output)

    peer = stream.members[_SOURCE]
    shown = f"from rank {peer}", f"tag {tag}"
    spec = CollectiveSpec(name, peer=peer, tag=tag, compared=_MESSAGE, shown=shown)
    end = channel.end
    message = Receiving(end, landing, finish) if isinstance(end, RecvEndpoint) else None
    return CheckedCall(spec, body(), message)


def _continued_call(tag: int, channel: P2PChannel, array: NDArray[Any]) -> CheckedCall:
    """Return the call of a long message that the C extension has begun, with its array."""
    if isinstance(channel.end, SendEndpoint):
        return send_request("send", channel, array, ARRAY, tag, waits=True, copies=False)
    return receive_request("recv", channel, tag, lambda *_: None, lambda _kind, output: output)


def _plan(stream: Communicator, *steps: Step) -> LinkSchedule:
    """Return a schedule for this end of the pair, with one step in each round."""
    count = max(step.chunk.stop for step in steps if isinstance(step, Send | Recv))
    rounds = tuple((step,) for step in steps)
    schedule = Schedule("message", "pair", stream.member_rank, 2, count, 0, rounds)
    return compile_for_links(schedule, stream.members)
