"""All-reduces by their prepared way: which values have one, and how it is made after the first call has gone the long way.

What programs write in every step is prepared: arrays, numbers, short lists of numbers, and structures of a few of these
that travel as one small vector. Everything else goes the long way, which also refuses what is wrong and tells the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives._arguments import flatten
from syncvar.collectives._reducing import described, described_reduction, described_together, reduction_of
from syncvar.engine.call_sites import own_site
from syncvar.engine.prepared_reductions import prepare_reduction
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import SyncvarError
from syncvar.execution.kernels import OPS, identity
from syncvar.execution.reductions import is_direct
from syncvar.kernel import remember

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator, PreparedCall
    from syncvar.engine.preparation import Said
    from syncvar.engine.work import Work
    from syncvar.execution.lower_reduce import Ends

__all__ = ["Leaves", "begun", "call_reduction", "form_of", "key_of", "plain_array", "prepare", "prepare_array", "prepare_as", "prepared_reduction"]

_NUMBERS = frozenset((float, int, bool, complex))
_NUMBERS_MAX = 64  # of a list: finding out that it holds numbers takes longer than the call, from some length on
_LEAVES_MAX = 16
_LOCATING = ("minloc", "maxloc")


class Leaves(NamedTuple):
    """A structure of one level and few leaves.

    Args:
        names: Keys of a dict, sorted; or the type of the sequence.
        arrays: The leaves, in the order of `flatten`.
    """

    names: tuple[str, ...] | type
    arrays: list[NDArray[Any]]

    def with_values(self, flat: NDArray[Any]) -> Any:
        """Return the same structure with the parts of a vector as its leaves, each an array of its own."""
        made, start = [], 0
        for array in self.arrays:
            stop = start + array.size
            made.append(flat[start:stop].reshape(array.shape).copy())
            start = stop
        names = self.names
        if isinstance(names, tuple):
            return dict(zip(names, made, strict=True))
        return made if names is list else tuple(made)


def plain_array(x: Any) -> NDArray[Any] | None:
    """Return the array that `as_array` makes of an array, a number or a short list of numbers; None of anything else."""
    kind = type(x)
    if kind is np.ndarray:
        return x  # type: ignore[no-any-return]
    is_list = (kind is list or kind is tuple) and len(x) <= _NUMBERS_MAX and _NUMBERS.issuperset(map(type, x))
    if not is_list and kind not in _NUMBERS and not isinstance(x, np.generic):
        return None
    try:
        return np.asarray(x)
    except (ValueError, TypeError, OverflowError):  # the long way tells the others
        return None


def form_of(x: Any) -> NDArray[Any] | Leaves | None:
    """Return the plain array of a value, or its leaves; None where the long way has to look at it."""
    array = plain_array(x)
    if array is not None:
        return array
    kind = type(x)
    if kind is dict:
        return _leaves(tuple(sorted(x)), x) if len(x) <= _LEAVES_MAX and set(map(type, x)) == {str} else None
    is_sequence = (kind is list or kind is tuple) and len(x) <= _LEAVES_MAX
    return _leaves(kind, x) if is_sequence and np.ndarray in map(type, x) else None


def _is_prepared(communicator: Communicator, op: str, *arrays: NDArray[Any], name: str = "all_reduce") -> bool:
    """Return whether an op on arrays has a short way; a registered op may be replaced, and has none."""
    is_forced = communicator.forced(name) is not None
    return op in OPS and op not in _LOCATING and not is_forced and all(array.dtype.isnative for array in arrays)


def _leaves(names: Any, x: Any) -> Leaves | None:
    arrays = []
    for item in x if names is type(x) else map(x.__getitem__, names):
        made = plain_array(item)
        if made is None:
            return None
        arrays.append(made)
    return Leaves(names, arrays)


def key_of(name: str, op: str, form: NDArray[Any] | Leaves, reproducible: bool) -> Hashable:
    """Return the key of a prepared call."""
    if isinstance(form, Leaves):
        return name, op, form.names, tuple([(array.dtype, array.shape) for array in form.arrays]), reproducible
    return name, op, form.dtype, form.shape, reproducible


def prepare(communicator: Communicator, key: Hashable, x: Any, form: NDArray[Any] | Leaves, op: str, name: str, reproducible: bool) -> None:
    """Prepare the short way of the all-reduce of `x`, in its `form_of`, that has just gone the long way, unless it is there."""
    if key in communicator.prepared_calls:
        return
    if isinstance(form, Leaves):
        hows = [reduction_of(array, op) for array in form.arrays]
        digest, what = described_together(flatten(x)[0], form.arrays, hows, op, name, reproducible)
    else:
        _, digest, what = described_reduction(form, op, name, reproducible)
    prepare_as(communicator, key, form, op, digest, what)


def prepare_as(communicator: Communicator, key: Hashable, form: NDArray[Any] | Leaves, op: str, digest: int, what: str) -> None:
    """Prepare the short way of an all-reduce of a value in a form, whose fingerprint and words are known, unless it is there."""
    if key in communicator.prepared_calls or not communicator.prepares or communicator.channel is None:
        return
    arrays = form.arrays if isinstance(form, Leaves) else [form]
    hows = {reduction_of(array, op) for array in arrays}
    how, shape = hows.pop(), arrays[0].shape
    if hows or not _is_prepared(communicator, how.name, *arrays):
        made: PreparedCall | None = _never
    elif isinstance(form, Leaves):
        shape = (sum(array.size for array in arrays),)
        is_small = is_direct(shape[0] * how.accumulate.itemsize, communicator.size)
        inner = prepare_reduction(communicator, how, shape, digest, what) if is_small else _never
        made = None if inner is None else _of_leaves(inner)
    else:
        made = prepare_reduction(communicator, how, shape, digest, what)
    communicator.keep_prepared(key, made)


def _never(*_: Any) -> None:
    """Take the long way: stands for the short way of calls that have none, so that none is looked for again."""


def _of_leaves(inner: PreparedCall) -> PreparedCall:
    def call(leaves: Leaves, out: Any, said: Said | None = None, timeout: float | None = None) -> Any:
        if out is not None:
            return None
        made = inner(np.concatenate([array.reshape(-1) for array in leaves.arrays]), None, said, timeout)
        return None if made is None else leaves.with_values(made)

    return call


def begun(ready: PreparedCall, x: Any, out: Any, timeout: float | None) -> Work | None:
    """Begin a prepared call, to be waited for later; None where nothing has been done, as always where Python runs it."""
    begin = getattr(ready, "begin", None)
    return None if begin is None else begin(x, out, timeout, own_site())


def call_reduction(
    communicator: Communicator, ends: Ends, x: Any, op: Any, out: Any, timeout: float | None, *options: Any, public: Any, shown: str = ""
) -> Any:
    """Make a plain reduce or scan by its prepared way; None where nothing has been done.

    Args:
        communicator: The group.
        ends: Which ranks end with what; those that end with nothing get an array without elements.
        x: As the caller gave it; so are `op`, `out` and `timeout`.
        op: The op.
        out: Where the result goes.
        timeout: In seconds.
        options: What else is compared, as `described` takes it.
        public: The public function, where it is called with `op` beside `x`; None elsewhere.
        shown: The options in words.
    """
    array = plain_array(x) if isinstance(op, str) and (timeout is None or is_seconds(timeout)) else None
    if array is None:
        return None
    name = ends.collective
    key = (name, op, ends.root, array.dtype, array.shape)
    ready = communicator.prepared_calls.get(key)
    if ready is None:
        if not communicator.prepares or not communicator.is_shared:
            return None
        try:
            how, digest, what = described(array, op, name, *options, shown=shown)
            neutral = identity(how) if name == "exscan" else None
        except SyncvarError:  # the long way tells the others what is wrong
            return None
        is_widened = array.dtype != how.accumulate  # the general way brings what it combines
        if not _is_prepared(communicator, how.name, array, name=name) or (
            is_widened and not is_direct(array.size * how.accumulate.itemsize, communicator.size)
        ):
            made: PreparedCall | None = _never
        else:
            made = prepare_reduction(communicator, how, array.shape, digest, what, None, ends, neutral)
        ready = communicator.keep_prepared(key, made)
        if public is not None:
            remember(public, op, ready, communicator.prepared_calls)
    return None if ready is None else ready(array, out, None, timeout)


def prepare_array(communicator: Communicator, x: NDArray[Any], op: str, name: str, *, reproducible: bool) -> None:
    """Prepare the short way of the all-reduce of an array that has just gone the long way, unless it is there."""
    prepare(communicator, key_of(name, op, x, reproducible), x, x, op, name, reproducible)


def prepared_reduction(
    communicator: Communicator, x: NDArray[Any], op: str, name: str, reproducible: bool, apply: np.ufunc | None = None
) -> PreparedCall | None:
    """Make the short way of the all-reduce that `reduce_request` with these arguments makes, if there is one."""
    if communicator.channel is None or not communicator.prepares:
        return None
    how, digest, what = described_reduction(x, op, name, reproducible)
    if not _is_prepared(communicator, how.name, x):
        return None
    return prepare_reduction(communicator, how, x.shape, digest, what, apply)
