"""Messages that need no waiting engine: one that finds room in the box, or one that is there or comes soon.

Nothing is started, and no lock of the engine taken. What is unusual (a known refusal, queued writes, another thread in the same
call, a full box) is left to the long way; a wait that takes long is left to the engine, with the number that the call has.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.arena.boxes import what_of
from syncvar.errors import SyncvarError
from syncvar.runtime.messages import WAY
from syncvar.runtime.recorder import Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.runtime.group import Communicator, Request
    from syncvar.runtime.messages import Landing

__all__ = ["NOT_YET", "Sort", "put_at_once", "take_at_once"]

NOT_YET = object()
_SORTS_MAX = 64  # of a pair and tag
_EXPORTED = "biufc"  # kinds of dtypes whose arrays are buffers


class Sort(NamedTuple):
    """What all messages of a pair and tag with the same dtype and shape have in common.

    Args:
        what: See `Outbox.put`.
        told: For the flight recorder.
        is_buffer: The array can be copied as it is.
    """

    what: int
    told: Told
    is_buffer: bool


def put_at_once(stream: Communicator, array: NDArray[Any], kind: int, words: Callable[[], tuple[str, int]]) -> bool:
    """Send a message that is not long, if there is room for it now.

    Args:
        stream: The pair's calls.
        array: The message.
        kind: Of the message.
        words: Returns the call in words and the index of the array's dtype; asked once for each dtype and shape.

    Returns:
        False when nothing has been done.
    """
    engine, outward, tally = stream.engine, stream.end, stream.tally
    if engine is None or tally is None or not engine.is_quiet or not array.flags.c_contiguous:
        return False
    sorts: dict[Any, Sort] = stream.shortcuts  # type: ignore[assignment]
    key = array.dtype, array.shape, kind
    sort = sorts.get(key)
    if sort is None:
        said, dtype = words()
        if len(sorts) >= _SORTS_MAX:
            sorts.clear()
        told = Told(said, stream.identity, stream.members, 0, array.nbytes, WAY)
        sort = sorts[key] = Sort(what_of(kind, dtype, array.ndim), told, array.dtype.kind in _EXPORTED)
    if not stream.busy.acquire(blocking=False):
        return False
    number, begin = stream.next_call, monotonic_ns()
    try:
        if not outward.lock.acquire(blocking=False):
            return False
        try:
            box = outward.box()
            if box is None:
                return False
            data = array if sort.is_buffer else array.reshape(-1).view(np.uint8)
            while not box.put(sort.what, stream.identity, number, array.shape, data, array.nbytes):
                room = box.room_at(array.shape, array.nbytes)
                if room is None or not outward.wait(room[:1], room[1]):
                    return False
            tally.next_call = stream.next_call = number + 1
        finally:
            outward.lock.release()
    except BaseException as error:  # the other rank may have the message, or not
        stream.interrupt(number, begin, error)
        raise
    else:
        stream.recorder.add((sort.told, number, begin, monotonic_ns(), get_ident()))
        return True
    finally:
        stream.busy.release()


def take_at_once(
    stream: Communicator, request: Callable[[], Request], landing: Landing, finish: Callable[[int, NDArray[Any]], Any],
    timeout: float | None, *, waits: bool,
) -> Any:  # fmt: skip
    """Receive a message that is there or comes soon; where it does not, the engine waits.

    Args:
        stream: The pair's calls.
        request: Makes the call, where the engine has to go on.
        landing: Where the message is written to.
        finish: Makes the result.
        timeout: Seconds, or None for the job's default.
        waits: Whether to wait at all.

    Returns:
        The result, or NOT_YET when nothing has been done.

    Raises:
        SyncvarError: As `recv`.
    """
    engine, inward, tally = stream.engine, stream.end, stream.tally
    if engine is None or tally is None or not engine.is_quiet or engine.is_busy_here or not stream.busy.acquire(blocking=False):
        return NOT_YET
    try:
        number, begin = stream.next_call, monotonic_ns()
        stream.next_call = number + 1
        key = stream.identity, number
        try:
            taken = inward.take(key, landing)
            while taken is None and waits and inward.wait():
                news = inward.seen
                taken = inward.take(key, landing)
                if inward.seen == news:  # another thread has the box
                    break
            if taken is not None:
                tally.next_call = number + 1
                result = finish(*taken)
                stream.recorder.add((_told(stream, request, taken[1].nbytes), number, begin, monotonic_ns(), get_ident()))
                return result
            if not waits:
                stream.next_call = number
                return NOT_YET
        except SyncvarError as error:
            tally.next_call = number + 1
            stream.recorder.begin(_told(stream, request, 0), number, begin).end(error)
            stream.recorder.failed(error)
            raise
        except BaseException as error:
            stream.interrupt(number, begin, error)
            raise
        return engine.take_over(stream.operation(number, request(), begin), timeout)
    finally:
        stream.busy.release()


def _told(stream: Communicator, request: Callable[[], Request], nbytes: int) -> Told:
    tolds: dict[int, Told] = stream.shortcuts  # type: ignore[assignment]
    found = tolds.get(nbytes)
    if found is None:
        if len(tolds) >= _SORTS_MAX:
            tolds.clear()
        made = request()
        made.body.close()
        found = tolds[nbytes] = Told(made.what, stream.identity, stream.members, made.digest, nbytes, WAY)
    return found
