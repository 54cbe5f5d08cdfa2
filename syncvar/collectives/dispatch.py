"""Dispatch of public calls: find the group and the persistent call, or take the slow path.

`make_call` runs the persistent call of a repeated call. If there is none, it makes the checked call
and lets it build one (`Persistable.persistent`). That fails until the first call of the group has
opened its channel. Then, and for unusual calls, `Communicator.perform` makes the checked call again
and runs it as a request.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from syncvar._native import recall, remember
from syncvar._native.constants import NUMBERS_MAX
from syncvar.bootstrap.process import dispatch_calls
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.tensors import call_with_numpy, is_foreign
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.runtime.block_transfer import NO_RESULT
from syncvar.runtime.call_record import own_place
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.work import is_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray

    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator, Persistent

Function = TypeVar("Function", bound="Callable[..., Any]")

_NUMBERS = frozenset((float, int, bool, complex))


class Persistable(CheckedCall):
    """A checked call for whose repetitions a persistent call can be built."""

    is_dispatched = True
    """Whether the C dispatch may find the persistent call by the dtype of the input."""

    @staticmethod
    def persistent_input(_communicator: Communicator, _x: Any, _out: Any, _rest: Any, /) -> Any:
        """Return a persistent call's input, which has a dtype and a shape; None if it has none."""
        return None

    def persistent(self, like: Any) -> Persistent | None:
        """Return a persistent call for inputs like `like`, or None, or `never_persistent`."""
        raise NotImplementedError


def never_persistent(*_: Any) -> None:
    """Cache value for calls that can never be persistent, so that the lookup is not repeated."""


def native_dispatch(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that lets the C extension make persistent calls of a public function.

    The keywords are those of `syncvar._native.call_dispatch`.
    """

    def decorated(function: Function) -> Function:
        call: Function = dispatch_calls(function, **options)
        return call

    return decorated


def make_call(  # noqa: PLR0913, PLR0917  (the arguments of all public calls; hot path)
    public: Callable[..., Any],
    make: Any,
    x: Any,
    out: Any,
    group: Any,
    async_op: bool,  # noqa: FBT001  (hot path)
    timeout: float | None,
    foreign: Mapping[str, Any],
    options: tuple[Any, ...] = (),
) -> Any:
    """Make a public call by its persistent call, or by the slow path.

    Args:
        public: The public function.
        make: The subclass of `Persistable`. It takes (communicator, x, out, *options, keep=...) and
            checks the arguments; `keep` copies the input.
        x, out, group, async_op, timeout: The caller's arguments.
        foreign: Unknown keywords, for which an error names ours.
        options: The other arguments; the C extension looks up calls by the first one and the array.
    """
    if foreign:
        raise unexpected_keyword(public, foreign)
    communicator = communicator_of(group)
    if communicator.channel is not None and (timeout is None or is_seconds(timeout)):
        array = make.persistent_input(communicator, x, out, options)
        if array is not None:
            key = key_of((make, options), array)
            persistent: Any = communicator.persistent_calls.get(key)
            if persistent is None:
                make_checked = partial(make, communicator, x, out, *options, keep=False)
                persistent = _persist(communicator, key, array, make_checked, public, options)
            else:
                recall(public, persistent)
            if persistent is not None:
                result: Any = None
                if not async_op:
                    result = persistent(array, out, None, timeout)
                elif persistent is not never_persistent:
                    result = persistent.start(array, out, timeout, *own_place())
                if result is not None:  # None: nothing was done, so the slow path follows
                    return None if result is NO_RESULT else result
    if is_foreign(x, out):
        names = {"group": group, "async_op": async_op, "timeout": timeout, "options": options}
        again = partial(make_call, public, make, out=None, foreign={}, **names)
        return call_with_numpy(again, x, out)
    make_checked = partial(make, communicator, x, out, *options, keep=async_op)
    return communicator.perform(public.__name__, make_checked, timeout, async_op=async_op)


def call_persistent(  # noqa: PLR0913  (hot path)
    communicator: Communicator,
    key: tuple[Hashable, ...],
    array: Any,
    out: Any,
    timeout: float | None,
    make_checked: Callable[[], Persistable],
    spec: CollectiveSpec | None = None,
    *,
    public: Any = None,
    options: tuple[Any, ...] = (),
) -> Any:
    """Make a call by its persistent call; return None, having done nothing, if there is none.

    `make_checked` checks the arguments and returns the checked call, which builds the persistent
    one. `spec` describes this call; None: the spec of the checked call does. From now on the C
    dispatch of `public`, if given, may find the call. `key` is as for `key_of`, `options` as for
    `make_call`.
    """
    whole_key = key_of(key, array)
    persistent = communicator.persistent_calls.get(whole_key)
    if persistent is None:
        persistent = _persist(communicator, whole_key, array, make_checked, public, options)
    elif public is not None:
        recall(public, persistent)
    if persistent is None or not (timeout is None or is_seconds(timeout)):
        return None
    return persistent(array, out, spec, timeout)


def key_of(key: tuple[Hashable, ...], array: Any) -> tuple[Hashable, ...]:
    """Return the cache key of persistent calls: what their spec depends on.

    The spec itself would take a microsecond in each repetition.
    """
    return (*key, array.dtype, array.shape)


def _persist(
    communicator: Communicator,
    key: tuple[Hashable, ...],
    array: Any,
    make_checked: Callable[[], Persistable],
    public: Any,
    options: tuple[Any, ...],
) -> Persistent | None:
    """Build the persistent call of a key, and show it to the C dispatch of the public function."""
    if not communicator.keeps_persistent or not communicator.is_shared:
        return None
    try:
        checked = make_checked()
        call = communicator.keep_persistent(key, checked.persistent(array))
    except Exception:
        # The call has no number yet: the slow path raises the error again, and informs the group.
        return None
    # C looks at the first of `options` only, so all others must have their default.
    if public is not None and checked.is_dispatched and not any(options[1:]):
        remember(public, options[0] if options else None, call, communicator.persistent_calls)
    return call


def plain_array(x: Any) -> NDArray[Any] | None:
    """Return the array of an array, a number or a short list of numbers; None for anything else."""
    kind = type(x)
    if kind is np.ndarray:
        return x  # type: ignore[no-any-return]
    is_list = (
        (kind is list or kind is tuple)
        and len(x) <= NUMBERS_MAX
        and _NUMBERS.issuperset(map(type, x))
    )
    if not is_list and kind not in _NUMBERS and not isinstance(x, np.generic):
        return None
    try:
        return np.asarray(x)
    except (ValueError, TypeError, OverflowError):  # the slow path informs the group
        return None


def plain_input(
    _communicator: Communicator, x: Any, _out: Any, options: tuple[Any, ...]
) -> NDArray[Any] | None:
    """Return the array of a call with an op, a root, or both, and no algorithm; else None."""
    *others, algorithm = options
    is_plain = all(isinstance(one, str) or type(one) is int for one in others)
    return plain_array(x) if is_plain and algorithm is None else None
