"""Dispatch of public calls: find the group and the persistent call, or take the slow path.

`make_call` runs the persistent call of a repeated call. On the first call it builds one from the
request of the call, if that is `Cacheable`. Every other call runs its request.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from syncvar._native import recall, remember
from syncvar._native.constants import NUMBERS_MAX
from syncvar.bootstrap.process import entered_natively
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.tensors import call_with_numpy, is_foreign
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.runtime.block_transfer import NOTHING
from syncvar.runtime.call_record import own_site
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.work import is_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray

    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator, PreparedCall

Function = TypeVar("Function", bound="Callable[..., Any]")

_NUMBERS = frozenset((float, int, bool, complex))


class Cacheable(CheckedCall):
    """A checked call for whose repetitions a persistent call can be built."""

    is_entered = True
    """Whether the C dispatch may find the persistent call by the dtype of the input."""

    @staticmethod
    def form_of(_communicator: Communicator, _x: Any, _out: Any, _rest: Any, /) -> Any:
        """Return a persistent call's input, which has a dtype and a shape; None if it has none."""
        return None

    def prepared(self, like: Any) -> PreparedCall | None:
        """Return a persistent call for inputs like `like`, or None, or `uncacheable`."""
        raise NotImplementedError


def uncacheable(*_: Any) -> None:
    """Cache value for calls that can never be persistent, so that the lookup is not repeated."""


def native_dispatch(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that lets the C extension make persistent calls of a public function.

    The keywords are those of `syncvar._native.entrance`.
    """

    def decorated(function: Function) -> Function:
        call: Function = entered_natively(function, **options)
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
    rest: tuple[Any, ...] = (),
) -> Any:
    """Make a public call by its persistent call, or by the slow path.

    Args:
        public: The public function.
        make: The subclass of `Cacheable`. It takes (communicator, x, out, *rest, keep=...) and
            checks the arguments; `keep` copies the input.
        x, out, group, async_op, timeout: The caller's arguments.
        foreign: Unknown keywords, for which an error names ours.
        rest: The other arguments; the C extension looks up calls by the first one and the array.
    """
    if foreign:
        raise unexpected_keyword(public, foreign)
    communicator = communicator_of(group)
    if communicator.channel is not None and (timeout is None or is_seconds(timeout)):
        form = make.form_of(communicator, x, out, rest)
        if form is not None:
            key = key_of((make, rest), form)
            ready: Any = communicator.prepared_calls.get(key)
            if ready is None:
                check = partial(make, communicator, x, out, *rest, keep=False)
                ready = _prepare(communicator, key, form, check, public, rest)
            else:
                recall(public, ready)
            if ready is not None:
                result: Any = None
                if not async_op:
                    result = ready(form, out, None, timeout)
                elif ready is not uncacheable:
                    result = ready.begin(form, out, timeout, own_site())
                if result is not None:  # None: nothing was done, so the slow path follows
                    return None if result is NOTHING else result
    if is_foreign(x, out):
        options = {"group": group, "async_op": async_op, "timeout": timeout, "rest": rest}
        again = partial(make_call, public, make, out=None, foreign={}, **options)
        return call_with_numpy(again, x, out)
    check = partial(make, communicator, x, out, *rest, keep=async_op)
    return communicator.perform(public.__name__, check, timeout, async_op=async_op)


def call_persistent(  # noqa: PLR0913  (hot path)
    communicator: Communicator,
    key: tuple[Hashable, ...],
    form: Any,
    out: Any,
    timeout: float | None,
    check: Callable[[], Cacheable],
    spec: CollectiveSpec | None = None,
    *,
    public: Any = None,
    rest: tuple[Any, ...] = (),
) -> Any:
    """Make a call by its persistent call; return None, having done nothing, if there is none.

    `check` checks the arguments and returns the request, from which the persistent call is built.
    `spec` describes this call; None: the spec of the request does. From now on the C dispatch of
    `public`, if given, may find the call. `key` is as for `key_of`, `rest` as for `make_call`.
    """
    whole_key = key_of(key, form)
    ready = communicator.prepared_calls.get(whole_key)
    if ready is None:
        ready = _prepare(communicator, whole_key, form, check, public, rest)
    elif public is not None:
        recall(public, ready)
    if ready is None or not (timeout is None or is_seconds(timeout)):
        return None
    return ready(form, out, spec, timeout)


def key_of(key: tuple[Hashable, ...], form: Any) -> tuple[Hashable, ...]:
    """Return the cache key of persistent calls: what their spec depends on.

    The spec itself would take a microsecond in each repetition.
    """
    return (*key, form.dtype, form.shape)


def _prepare(
    communicator: Communicator,
    key: tuple[Hashable, ...],
    form: Any,
    check: Callable[[], Cacheable],
    public: Any,
    rest: tuple[Any, ...],
) -> PreparedCall | None:
    """Build the persistent call of a key, and show it to the C dispatch of the public function."""
    if not communicator.prepares or not communicator.is_shared:
        return None
    try:
        request = check()
        call = communicator.keep_prepared(key, request.prepared(form))
    except Exception:
        # The call has no number yet: the slow path raises the error again, and informs the group.
        return None
    # C looks at the first of `rest` only, so all others must have their default.
    if public is not None and request.is_entered and not any(rest[1:]):
        remember(public, rest[0] if rest else None, call, communicator.prepared_calls)
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


def plain_form(
    _communicator: Communicator, x: Any, _out: Any, rest: tuple[Any, ...]
) -> NDArray[Any] | None:
    """Return the array of a call with an op, a root, or both, and no algorithm; else None."""
    *options, algorithm = rest
    is_plain = all(isinstance(one, str) or type(one) is int for one in options)
    return plain_array(x) if is_plain and algorithm is None else None
