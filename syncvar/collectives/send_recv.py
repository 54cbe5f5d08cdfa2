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
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar._native import remember
from syncvar.bootstrap.process import current, messages_entered_natively
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.pair_calls import channel_of, receive_request, send_request, send_spec
from syncvar.collectives.tensors import call_with_numpy, is_foreign
from syncvar.core.array_arguments import as_array, deliver
from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.core.pytree import is_structure
from syncvar.protocol.fixed_records import ARRAY, BYTES, array_record
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.p2p_channel import NOT_YET, Mailbox, done, failed
from syncvar.runtime.work import is_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import CheckedCall, Communicator
    from syncvar.runtime.p2p_channel import P2PChannel

_TAG_MAX = (1 << 31) - 1
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
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Send an array to another rank, which receives it with `recv`.

    Args:
        x: Array of any shape, or number.
        dest: Rank of the group that receives it; may be this one.
        tag: Integer from 0 to 2**31 - 1; the receiver passes the same.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        None as soon as you may change `x`. The receiver may not yet have a message of up to
        `eager_bytes`.

    Raises:
        ConfigError: An argument is wrong.
        MismatchError: Deadlock: a cycle of ranks, each of which waits for the next one to receive.
        PeerLost: The receiver has failed.
        DeadlineExceeded: The receiver did not take a long message in time.

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
    if not async_op and timeout is None and type(dest) is int is type(tag):
        channel = communicator.streams.get((communicator.rank, dest, tag))  # type: ignore[arg-type]
        native = None if channel is None else channel.native  # a thread may retire it
        if (
            channel is not None
            and native is not None
            and communicator.uneven is None
            and native.send(x)
        ):
            _remember(send, channel, communicator, dest, tag)
            return None
    if is_foreign(x):
        return call_with_numpy(
            partial(send, dest=dest, tag=tag, group=group, async_op=async_op, timeout=timeout), x
        )
    return _send(communicator, lambda: _message(x), ARRAY, dest, tag, timeout, async_op=async_op)


def send_object(
    o: Any,
    dest: int,
    *,
    tag: int = 0,
    group: Group | None = None,
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
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        None as soon as you may change `o`.

    Raises:
        ConfigError: An argument is wrong, or the object cannot be sent.
        MismatchError: Deadlock: a cycle of ranks, each of which waits for the next one to receive.
        PeerLost: The receiver has failed.
        DeadlineExceeded: The receiver did not take a long message in time.

    Cost: that of `send`, for the packed object.

    Example:
        >>> import syncvar as sv
        >>> sv.send_object({"a": 7, "b": 3.14}, 0)
        >>> sv.recv_object(0)
        {'a': 7, 'b': 3.14}
    """
    if _foreign:
        raise unexpected_keyword(send_object, _foreign)
    communicator = communicator_of(group)

    def make() -> NDArray[Any]:
        return np.frombuffer(pack_object(o), np.uint8)

    return _send(communicator, make, BYTES, dest, tag, timeout, async_op=async_op)


def _send(
    communicator: Communicator,
    make: Callable[[], NDArray[Any]],
    kind: int,
    dest: int,
    tag: int,
    timeout: float | None,
    *,
    async_op: bool,
) -> Any:
    """Send what `make` returns: an array, or with `kind` BYTES an object as bytes."""
    if communicator.uneven is not None:
        raise UsageError(_NO_MESSAGES)
    name = "send" if kind == ARRAY else "send_object"
    dest, tag = _checked("dest", dest, communicator.size), _checked_tag(tag)
    rank = communicator.member_rank
    if dest == rank:
        _own(communicator, tag).put(kind, make().copy())
        return done() if async_op else None
    channel = channel_of(communicator, rank, dest, tag)
    eager_bytes = current().config.eager_bytes

    def words_of(array: NDArray[Any]) -> tuple[CollectiveSpec, int]:
        return send_spec(name, channel, array, kind, tag), array_record(array).dtype

    def check() -> CheckedCall:
        array = make()
        waits = array.nbytes > eager_bytes
        return send_request(name, channel, array, kind, tag, waits=waits, copies=async_op)

    if channel.end is not None and (timeout is None or is_seconds(timeout)):
        with contextlib.suppress(ConfigError):  # the slow path raises it, and informs the receiver
            mine = make()
            waits = mine.nbytes > eager_bytes
            if not (waits and async_op) and channel.send(
                mine, kind, partial(words_of, mine), check, timeout, waits=waits
            ):
                return done() if async_op else None
    return channel.perform(name, check, timeout, async_op=async_op)


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
    if not async_op and timeout is None and type(source) is int is type(tag):
        channel = communicator.streams.get((source, communicator.rank, tag))  # type: ignore[arg-type]
        native = None if channel is None else channel.native  # a thread may retire it
        if channel is not None and native is not None and communicator.uneven is None:
            value = native.receive(out)
            if value is not None:
                _remember(recv, channel, communicator, source, tag)
                return value
    if is_foreign(out):
        return call_with_numpy(
            partial(recv, tag=tag, group=group, async_op=async_op, timeout=timeout), source, out
        )
    return _receive(communicator, ARRAY, source, tag, timeout, out=out, async_op=async_op)


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
        array = _message(x)
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
    return _receive(communicator_of(group), BYTES, source, tag, timeout, async_op=async_op)


def _receive(
    communicator: Communicator,
    kind: int,
    source: int | None,
    tag: int,
    timeout: float | None,
    *,
    out: Any = None,
    async_op: bool,
) -> Any:
    """Receive the next message of a tag, possibly directly in `out`; `kind` BYTES is an object."""
    if communicator.uneven is not None:
        raise UsageError(_NO_MESSAGES)
    name, finish = ("recv", partial(_delivered, out)) if kind == ARRAY else _RECV_OBJECT
    source, tag = _checked("source", source, communicator.size), _checked_tag(tag)
    rank = communicator.member_rank
    if source == rank:
        own = _own(communicator, tag)
        return own.start(name, finish) if async_op else own.take(name, finish)
    channel = channel_of(communicator, source, rank, tag)

    def landing(kind: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        return out if kind == ARRAY and _is_alike(out, dtype, shape) else None

    def check() -> CheckedCall:
        return receive_request(name, channel, tag, landing, finish)

    if channel.end is not None and (timeout is None or is_seconds(timeout)):
        try:
            result = channel.take(check, landing, finish, timeout, waits=not async_op)
        except SyncvarError as error:
            if not async_op:
                raise
            return failed(error)
        if result is not NOT_YET:
            return done(result) if async_op else result
    return channel.perform(name, check, timeout, async_op=async_op)


def _unpacked(kind: int, value: NDArray[Any]) -> Any:
    if kind != BYTES:
        raise ConfigError(
            f"the message is an array, {value.dtype.name}{list(value.shape)}, not an object: "
            f"receive it with sv.recv(source)"
        )
    return unpack_object(value.tobytes())


_RECV_OBJECT = "recv_object", _unpacked


def _delivered(out: Any, kind: int, value: NDArray[Any]) -> NDArray[Any]:
    if kind == BYTES:
        raise ConfigError(
            "the message is an object, not an array: receive it with sv.recv_object(source)"
        )
    return deliver(value, out)


def _is_alike(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return whether a message of this dtype and shape can be written directly to `out`."""
    return (
        type(out) is np.ndarray
        and out.shape == shape
        and out.dtype == dtype
        and out.flags.c_contiguous
        and out.flags.writeable
    )


if not TYPE_CHECKING:
    send = messages_entered_natively(send, is_sending=True)
    recv = messages_entered_natively(recv, is_sending=False)


def _remember(
    dispatch: Any, channel: P2PChannel, communicator: Communicator, peer: int, tag: int
) -> None:
    """Let the C dispatch find this channel at once, for messages of the world."""
    if not channel.is_remembered and communicator is current().world:
        channel.is_remembered = True
        remember(dispatch, channel.native, peer, tag)


def _own(communicator: Communicator, tag: int) -> Mailbox:
    """Return the messages that this rank has sent to itself."""
    return Mailbox(communicator.own_messages, communicator.member_rank, tag)


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


def _message(x: Any) -> NDArray[Any]:
    """Return the array of a message; raise ConfigError if the value cannot be one."""
    if x is None or isinstance(x, str | bytes | set) or is_structure(x):
        raise ConfigError(
            f"send takes an array or a number, not {reprlib.repr(x)}: write sv.send_object(o, dest)"
            f", and sv.recv_object(source) on the receiver"
        )
    return as_array(x)


def _checked_tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag <= _TAG_MAX:
        raise ConfigError(f"tag must be an integer from 0 to {_TAG_MAX}, not {tag!r}")
    return int(tag)
