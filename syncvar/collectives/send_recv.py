"""Send and receive: one array, or one object, from one rank to another.

Messages of one sender, receiver and tag arrive in the order sent. Messages of different tags do not
wait for each other. A message of up to `eager_bytes` is sent at once. A longer one waits until the
receiver has called `recv`, so that the deadlock detector finds a cycle of ranks that all send
first.
"""

from __future__ import annotations

import contextlib
import reprlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Never

import numpy as np

from syncvar._native import remember
from syncvar.bootstrap.process import current, dispatch_messages
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.tensors import call_with_numpy, is_foreign
from syncvar.core.array_arguments import as_array
from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.core.pytree import is_structure
from syncvar.protocol.fixed_records import ARRAY, BYTES
from syncvar.protocol.object_codec import pack_object
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.p2p_channel import (
    EITHER,
    RECV_NAMES,
    SEND_NAMES,
    TAG_MAX,
    ReceiveArgs,
    RecvChannel,
    SendChannel,
    ended,
)
from syncvar.runtime.p2p_mailbox import Mailbox
from syncvar.runtime.p2p_matching import (
    UsedChannel,
    matcher_of,
    probe_messages,
    receive_any,
    start_any_receive,
)
from syncvar.runtime.work import is_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import CheckedCall, Communicator
    from syncvar.runtime.p2p_mailbox import MessageInfo
    from syncvar.runtime.p2p_matching import MessageMatcher

_NO_MESSAGES = (
    "send and recv do not work inside `with sv.uneven():`, because no rank answers for one "
    "that has left its loop. Send before or after the block, or use a collective (scatter, "
    "all_to_all, broadcast)"
)


def send(
    x: Any,
    dest: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    synchronous: bool = False,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Send an array to another rank, which receives it with `recv`.

    Args:
        x: Array of any shape, or number.
        dest: Rank of the group that receives it; may be this one.
        tag: Integer from 0 to 2**31 - 1; the receiver passes the same.
        synchronous: Whether the send ends only after the receiver has begun to receive the message,
            as MPI_Ssend.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        None as soon as you may change `x`. The receiver may not yet have a message of up to
        `eager_bytes`, unless the send is synchronous.

    Raises:
        ConfigError: An argument is wrong.
        MismatchError: Deadlock: a cycle of ranks, each of which waits for the next one to receive.
        PeerLost: The receiver has failed.
        DeadlineExceeded: The receiver did not take a long or synchronous message in time.
        UsageError: A synchronous message to this rank itself, which has started no receive.

    Cost: on one host a copy into shared memory and one out of it; least for a dtype and shape that
        were sent before. Of a long array up to 8 MiB go through shared memory while both ranks
        copy; the receiver reads the rest directly. Between hosts, or if shared memory is full, two
        frames over a link; a long message waits for one more.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.send(np.arange(3), 0)
        >>> sv.recv(0)
        array([0, 1, 2])
    """
    if _foreign:
        raise unexpected_keyword(send, _foreign)
    communicator = communicator_of(group)
    if timeout is None and not synchronous and (not async_op or _is_short(x)):
        native = _native_endpoint(communicator, communicator.rank, dest, tag)
        if native is not None and native.send(x):
            if communicator is current().world:
                remember(send, native, dest, tag)
            return ended() if async_op else None
    if is_foreign(x):
        options: dict[str, Any] = {"async_op": async_op, "timeout": timeout}
        options["synchronous"] = synchronous
        return call_with_numpy(partial(send, dest=dest, tag=tag, group=group, **options), x)
    one = _Outgoing(communicator, ARRAY, x, synchronous)
    return _send(one, dest, tag, timeout, async_op=async_op)


def send_object(
    o: Any,
    dest: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    synchronous: bool = False,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Send plain data to another rank, which receives it with `recv_object`.

    Args:
        o: Any object that `broadcast_object` takes.
        dest: Rank of the group that receives it; may be this one.
        tag: Integer from 0 to 2**31 - 1; the receiver passes the same. Arrays and objects of one
            tag arrive in the order sent.
        synchronous: Whether the send ends only after the receiver has begun to receive the message.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        None as soon as you may change `o`.

    Raises:
        ConfigError: An argument is wrong, or the object cannot be sent.
        MismatchError: Deadlock: a cycle of ranks, each of which waits for the next one to receive.
        PeerLost: The receiver has failed.
        DeadlineExceeded: The receiver did not take a long or synchronous message in time.
        UsageError: A synchronous message to this rank itself, which has started no receive.

    Cost: that of `send`, for the packed object.

    Example:
        >>> import syncvar as sv
        >>> sv.send_object({"a": 7, "b": 3.14}, 0)
        >>> sv.recv_object(0)
        {'a': 7, 'b': 3.14}
    """
    if _foreign:
        raise unexpected_keyword(send_object, _foreign)
    one = _Outgoing(communicator_of(group), BYTES, o, synchronous)
    return _send(one, dest, tag, timeout, async_op=async_op)


class _Outgoing(NamedTuple):
    """An array to send, or with `kind` BYTES an object."""

    communicator: Communicator
    kind: int
    value: Any
    is_synchronous: bool

    def checked(self, channel: SendChannel, *, keeps: bool) -> CheckedCall:
        """Return the call that sends it; `keeps` copies an array, which may change meanwhile."""
        array = _message(self.kind, self.value)
        array = array.copy() if keeps else array
        return channel.checked(self.kind, array, synchronous=self.is_synchronous)

    def put(self, tag: int, *, async_op: bool) -> Any:
        """Send it to this rank itself."""
        own = Mailbox(self.communicator.own_messages, self.communicator.member_rank)
        array = _message(self.kind, self.value).copy()
        if self.is_synchronous and not async_op and not own.has_receive(tag):
            raise own.unreceived()
        work = own.put(tag, self.kind, array, synchronous=self.is_synchronous)
        return work if async_op else None


def _send(one: _Outgoing, dest: Any, tag: Any, timeout: float | None, *, async_op: bool) -> Any:
    """Send an array or an object; return None, or with `async_op` a `Work`."""
    communicator, kind, synchronous = one.communicator, one.kind, one.is_synchronous
    if communicator.uneven is not None:
        raise UsageError(_NO_MESSAGES)
    dest, tag = _checked("dest", dest, communicator.size), _checked_tag(tag)
    rank = communicator.member_rank
    if dest == rank:
        return one.put(tag, async_op=async_op)
    channel: SendChannel
    with UsedChannel(communicator, current(), rank, dest, tag) as channel:
        if timeout is None or is_seconds(timeout):
            with contextlib.suppress(ConfigError):  # `perform` raises it, and informs the receiver
                array = _message(kind, one.value)
                if channel.send(kind, array, timeout, waits=not async_op, synchronous=synchronous):
                    return ended() if async_op else None
        make_checked = partial(one.checked, channel, keeps=async_op)
        return channel.stream.perform(SEND_NAMES[kind], make_checked, timeout, async_op=async_op)


def recv(
    source: int | None = None,
    *,
    tag: int = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Receive the next array that another rank sends to this one with this tag.

    Args:
        source: Rank of the group that sends it; may be this one. Required.
        tag: Tag of the message, as the sender passes it.
        out: Array of the message's shape and dtype to write to.
        group, timeout: See `syncvar.collectives`.
        async_op: See `syncvar.collectives`. A receive from this rank itself may precede the send;
            wait for it only after the send.

    Returns:
        A new array in the shape and dtype of the message, or `out`.

    Raises:
        ConfigError: An argument is wrong, or the message does not fit `out`; the message is
            consumed.
        UsageError: This rank waits for itself, and has sent nothing.
        MismatchError: Deadlock: a cycle of ranks that wait for one another.
        PeerLost: The sender has failed.
        DeadlineExceeded: No message came in time.

    Cost: that of `send`.

    Example:
        >>> import syncvar as sv
        >>> sv.send(2.5, 0, tag=7)
        >>> sv.recv(0, tag=7)
        array(2.5)
    """
    if _foreign:
        raise unexpected_keyword(recv, _foreign)
    communicator = communicator_of(group)
    if not async_op and timeout is None:
        native = _native_endpoint(communicator, source, communicator.rank, tag)
        value = None if native is None else native.receive(out)
        if value is not None:
            if communicator is current().world:
                remember(recv, native, source, tag)
            return value
    if is_foreign(out):
        return call_with_numpy(
            partial(recv, tag=tag, group=group, async_op=async_op, timeout=timeout), source, out
        )
    args = ReceiveArgs(ARRAY, out)
    return _receive(communicator, args, source, tag, timeout, async_op=async_op)


def sendrecv(  # noqa: PLR0913  (public signature)
    x: Any,
    dest: int | None,
    source: int | None,
    *,
    tag: int = 0,
    recv_tag: int | None = None,
    out: Any = None,
    group: Group | None = None,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Send an array to one rank and receive one from another, without deadlock if all ranks do so.

    Args:
        x: Array of any shape, or number.
        dest: Rank of the group that receives `x`. None sends nothing, as at the edge of a domain.
        source: Rank of the group that sends the result. None receives nothing.
        tag: Tag of the message sent, from 0 to 2**31 - 1.
        recv_tag: Tag of the message received. None means `tag`.
        out: Array of the received shape and dtype to write to. It may be `x`, or share memory with
            it.
        group: Group of `dest` and `source`; None means the world.
        timeout: Seconds for the send, and for the receive; None means the job's default.

    Returns:
        A new array in the shape and dtype of the message, or `out`. None if `source` is None.

    Raises:
        ConfigError: An argument is wrong, or the message does not fit `out`; the message is
            consumed.
        PeerLost: The receiver or the sender has failed.
        DeadlineExceeded: One of the two messages was not received in time.

    Cost: that of `send` and `recv`; both messages travel at the same time.
    Source: MPI_Sendrecv, with None for MPI_PROC_NULL.

    Example:
        >>> import syncvar as sv
        >>> right, left = (sv.rank() + 1) % sv.world_size(), (sv.rank() - 1) % sv.world_size()
        >>> sv.sendrecv(2.5, right, left)
        array(2.5)
    """
    if _foreign:
        raise unexpected_keyword(sendrecv, _foreign)
    options: dict[str, Any] = {"group": group, "timeout": timeout}
    if is_foreign(x, out):
        again = partial(sendrecv, dest=dest, source=source, tag=tag, recv_tag=recv_tag, **options)
        return call_with_numpy(again, x, out)
    if source is None:
        return None if dest is None else send(x, dest, tag=tag, **options)
    recv_options = {**options, "tag": tag if recv_tag is None else recv_tag, "out": out}
    if dest is None:
        return recv(source, **recv_options)
    try:
        array = _message(ARRAY, x)
    except ConfigError:
        return send(x, dest, tag=tag, **options)  # raises it again, and informs the receiver
    for name, rank in (("dest", dest), ("source", source)):  # check both before sending
        _checked(name, rank, communicator_of(group).size)
    _checked_tag(recv_options["tag"])
    if array.nbytes <= current().config.eager_bytes:  # does not wait for its receiver
        send(array, dest, tag=tag, **options)
        return recv(source, **recv_options)
    if isinstance(out, np.ndarray) and np.may_share_memory(array, out):
        array = array.copy()  # the receive may write to it before it has been sent
    work = recv(source, **recv_options, async_op=True)
    send(array, dest, tag=tag, **options)
    return work.wait()


def recv_object(
    source: int | None = None,
    *,
    tag: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Receive the next object that another rank sends to this one with this tag, by `send_object`.

    Args:
        source: Rank of the group that sends it. Required.
        tag: Tag of the message, as the sender passes it.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        The object.

    Raises:
        ConfigError: An argument is wrong, or the message is an array; the message is consumed.
        MismatchError: Deadlock: a cycle of ranks that wait for one another.
        PeerLost: The sender has failed.
        DeadlineExceeded: No message came in time.

    Cost: that of `recv`.

    Example:
        >>> import syncvar as sv
        >>> sv.send_object(["done", 3], 0, tag=1)
        >>> sv.recv_object(0, tag=1)
        ['done', 3]
    """
    if _foreign:
        raise unexpected_keyword(recv_object, _foreign)
    args = ReceiveArgs(BYTES)
    return _receive(communicator_of(group), args, source, tag, timeout, async_op=async_op)


def probe(  # noqa: PLR0913  (public signature)
    source: int | None = None,
    *,
    tag: int | None = 0,
    group: Group | None = None,
    wait: bool = True,
    timeout: float | None = None,
    **_foreign: Never,
) -> MessageInfo | None:
    """Look at the next message to this rank, without receiving it.

    `sv.recv(info.source, tag=info.tag)` then receives that message, unless another thread of this
    rank has received it meanwhile.

    Args:
        source: Rank of the group that sends it; may be this one. None means any rank.
        tag: Tag of the message. None means any tag.
        group: Group of the ranks; None means the world.
        wait: Whether to wait for a message if there is none.
        timeout: Seconds to wait; None means the job's default.

    Returns:
        Source, tag, dtype, shape and bytes of the message. None if there is none yet and `wait` is
        False.

    Raises:
        ConfigError: An argument is wrong.
        UsageError: This rank waits for itself, and has sent nothing.
        PeerLost: Every rank that could send the message has left the job, or a rank has failed.
        DeadlineExceeded: No message came in time.

    Cost: no message. The sources are looked at one after another.
    Order: messages of one source and tag are found in the order sent. Of several sources, each gets
        its turn.
    Source: MPI_Probe, with `wait=False` MPI_Iprobe.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.probe(wait=False) is None
        True
        >>> sv.send(np.zeros((2, 3), np.int8), 0, tag=5)
        >>> info = sv.probe(tag=None)
        >>> info.source, info.tag, info.dtype, info.shape, info.nbytes
        (0, 5, dtype('int8'), (2, 3), 6)
        >>> sv.recv(info.source, tag=info.tag).shape
        (2, 3)
    """
    if _foreign:
        raise unexpected_keyword(probe, _foreign)
    communicator = communicator_of(group)
    matcher, tag = _matcher(communicator, tag)
    sources: Sequence[int] = range(communicator.size)
    if source is not None:
        sources = (_checked("source", source, communicator.size),)
    spec = _any_spec("probe", communicator, sources, tag)
    return probe_messages(matcher, sources, tag, spec, timeout, waits=wait)


def recv_any(  # noqa: PLR0913  (public signature)
    *,
    tag: int | None = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Receive the next array or object that any rank sends to this one.

    Args:
        tag: Tag of the message. None means any tag.
        out: Array of the message's shape and dtype to write to; then an object is an error.
        group, timeout: See `syncvar.collectives`.
        async_op: See `syncvar.collectives`. The call takes its message when one comes, and not
            when you start it: a later `recv` may take an earlier message.

    Returns:
        An `AnyMessage`: `source`, `value`, `tag` and `is_object`.

    Raises:
        ConfigError: An argument is wrong, or the message does not fit `out`; the message is
            consumed.
        UsageError: The group has only this rank, which has sent itself nothing.
        PeerLost: All other ranks have left the job, or a rank has failed.
        DeadlineExceeded: No message came in time.

    Cost: that of `recv`; before, the sources are looked at one after another.
    Order: as in `probe`. Which source comes first depends on time. The flight record names it.
    Source: MPI_Recv from MPI_ANY_SOURCE.

    Example:
        >>> import syncvar as sv
        >>> sv.send_object({"task": 3}, 0, tag=2)
        >>> message = sv.recv_any(tag=None)
        >>> message.source, message.tag, message.value
        (0, 2, {'task': 3})
    """
    if _foreign:
        raise unexpected_keyword(recv_any, _foreign)
    if is_foreign(out):
        options = {"tag": tag, "group": group, "async_op": async_op, "timeout": timeout}
        return call_with_numpy(partial(_recv_any_to, **options), None, out)
    communicator = communicator_of(group)
    matcher, tag = _matcher(communicator, tag)
    args = ReceiveArgs(EITHER, out)
    spec = _any_spec("recv_any", communicator, range(communicator.size), tag)
    receive = start_any_receive if async_op else receive_any
    return receive(matcher, tag, args, spec, timeout)


def _recv_any_to(_: Any, out: Any, **options: Any) -> Any:
    return recv_any(out=out, **options)


def _matcher(communicator: Communicator, tag: Any) -> tuple[MessageMatcher, int | None]:
    if communicator.uneven is not None:
        raise UsageError(_NO_MESSAGES)
    checked = None if tag is None else _checked_tag(tag)
    return matcher_of(communicator, current()), checked


def _any_spec(
    name: str, communicator: Communicator, sources: Sequence[int], tag: int | None
) -> CollectiveSpec:
    """Return the description of a probe, or of a receive from any source."""
    is_any, peer = len(sources) > 1, communicator.members[sources[0]]
    shown = (
        "from any rank" if is_any else f"from rank {peer}",
        "any tag" if tag is None else f"tag {tag}",
    )
    return CollectiveSpec(
        name, peer=-1 if is_any else peer, tag=-1 if tag is None else tag, shown=shown
    )


def _receive(
    communicator: Communicator,
    args: ReceiveArgs,
    source: int | None,
    tag: int,
    timeout: float | None,
    *,
    async_op: bool,
) -> Any:
    """Receive the next message of a tag."""
    if communicator.uneven is not None:
        raise UsageError(_NO_MESSAGES)
    source, tag = _checked("source", source, communicator.size), _checked_tag(tag)
    rank = communicator.member_rank
    if source == rank:
        return Mailbox(communicator.own_messages, rank).receive(tag, args, async_op=async_op)
    channel: RecvChannel
    with UsedChannel(communicator, current(), source, rank, tag) as channel:
        if timeout is None or is_seconds(timeout):
            try:
                delivered = channel.receive(args, timeout, waits=not async_op)
            except SyncvarError as error:
                if not async_op:
                    raise
                return ended(error=error)
            if delivered is not None:
                return ended(delivered.result) if async_op else delivered.result
        make_checked = partial(channel.checked, args)
        return channel.stream.perform(
            RECV_NAMES[args.kind], make_checked, timeout, async_op=async_op
        )


if not TYPE_CHECKING:
    send = dispatch_messages(send, is_sending=True)
    recv = dispatch_messages(recv, is_sending=False)


def _native_endpoint(communicator: Communicator, source: Any, dest: Any, tag: Any) -> Any:
    """Return the C endpoint of a pair and tag, if there is one; else None."""
    if type(source) is type(dest) is type(tag) is int and communicator.uneven is None:
        channel = communicator.streams.get((source, dest, tag))
        return None if channel is None else channel.native
    return None


def _is_short(x: Any) -> bool:
    """Return whether an array is a message that does not wait for its receiver."""
    return type(x) is np.ndarray and bool(x.nbytes <= current().config.eager_bytes)


def _checked(name: str, rank: Any, size: int) -> int:
    if type(rank) is int and 0 <= rank < size:
        return rank
    from syncvar.core.migration_hints import hint_for

    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        hint = f"write sv.send(x, {size - 1}), for instance"
        if name == "source":
            hint = hint_for("sv", "ANY_SOURCE")
        raise ConfigError(f"{name} must be a rank, not {rank!r:.100}: {hint}")
    if not 0 <= rank < size:
        # MPI's ANY_SOURCE and PROC_NULL are negative numbers, others in each implementation.
        words = ("PROC_NULL", "ANY_SOURCE")[: 1 + (name == "source")] if rank < 0 else ()
        hint = "".join(f"; {hint_for('sv', word)}" for word in words)
        raise ConfigError(f"{name} {rank} is not in the group: its ranks are 0 to {size - 1}{hint}")
    return int(rank)


def _message(kind: int, value: Any) -> NDArray[Any]:
    """Return the contiguous array of a message, with `kind` BYTES of an object's bytes."""
    if kind == BYTES:
        return np.frombuffer(pack_object(value), np.uint8)
    if type(value) is not np.ndarray and (
        value is None or isinstance(value, str | bytes | set) or is_structure(value)
    ):
        raise ConfigError(
            f"send takes an array or a number, not {reprlib.repr(value)}: write "
            f"sv.send_object(o, dest), and sv.recv_object(source) on the receiver"
        )
    array = as_array(value)
    return array if array.flags.c_contiguous else array.copy()


def _checked_tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag <= TAG_MAX:
        raise ConfigError(f"tag must be an integer from 0 to {TAG_MAX}, not {tag!r}")
    return int(tag)
