"""The frame of every public call, and of every call that is prepared: what all of them do around their own checks and buffers.

`make_call` finds the group and the persistent call by which what is repeated is made; where there is none, it prepares one of the
call's own request, and what has none is made by the request itself. A request that can be prepared knows how: `Moving` and
`Reducing` are such.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from syncvar._native import recall, remember
from syncvar.bootstrap.process import entered_natively
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.tensors import in_kind, is_foreign
from syncvar.core.lazy_import import unexpected
from syncvar.runtime.communicator import CollectiveSpec
from syncvar.runtime.flight_recorder.call_sites import own_site
from syncvar.runtime.programs.block_transfer import NOTHING
from syncvar.runtime.timeouts import is_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.persistent.builder import Said
    from syncvar.runtime.work import Work

    Make = Callable[[Any, Any], "Cacheable"]  # of (x, out)

__all__ = ["Cacheable", "call_prepared", "entered", "make_call", "never", "plain_array"]

Function = TypeVar("Function", bound="Callable[..., Any]")

_NUMBERS = frozenset((float, int, bool, complex))
_NUMBERS_MAX = 1024  # of a list, as in dispatch.c


class Cacheable(CollectiveSpec):
    """A checked call whose like are prepared."""

    __slots__ = ()

    is_entered = True
    """Whether the C runner's entrance may find its persistent call by the dtype of what is brought."""

    def prepared(self, communicator: Communicator, like: Any, make: Make) -> PreparedCall | None:
        """Return what makes calls that are alike, or None where there is no such way at present; `never` where there never is.

        Args:
            communicator: The group.
            like: What this rank brings to such a call, in the form in which persistent calls take it.
            make: Of (x, out): the request of such a call.
        """
        raise NotImplementedError


def never(*_: Any) -> None:
    """Do nothing: stands for the persistent call of calls that have none, so that none is looked for again."""


def entered(**how: Any) -> Callable[[Function], Function]:
    """Return a decorator that lets the C runner make a public function's persistent calls without a step of Python.

    Args:
        how: As for `syncvar._native.entrance`.
    """

    def decorated(function: Function) -> Function:
        made: Function = entered_natively(function, **how)
        return made

    return decorated


def make_call(
    public: Callable[..., Any],
    form_of: Callable[..., Any] | None,
    make: Callable[..., Any],
    x: Any,
    out: Any,
    group: Any,
    async_op: bool,
    timeout: float | None,
    foreign: Mapping[str, Any],
    how: tuple[Any, ...] = (),
) -> Any:
    """Make a public call: by its persistent call, or generally.

    Args:
        public: The public function.
        form_of: Of (communicator, x, out, how): what persistent calls take in place of `x`, with a dtype and a shape, or None for a call
            that has to be made generally, as any in which something is wrong or unusual. None where all calls bring the same.
        make: Checks the arguments: of (communicator, x, out, keep, *how), with `keep` where it takes copies of what the caller may
            change before the call ends. Returns a `CollectiveSpec`, and a `Cacheable` where there is a form.
        x: As the caller gave it; so are the others.
        out: Where the result goes; None for nowhere.
        group: None for the world.
        async_op: Return a `Work`.
        timeout: In seconds; None for the job's default.
        foreign: Keywords of other libraries, which are refused with ours.
        how: What else the call is made with; the first is what an entrance knows beside the array.
    """
    if foreign:
        raise unexpected(public, foreign)
    communicator = communicator_of(group)
    if communicator.channel is not None and (timeout is None or is_seconds(timeout)):
        form = x if form_of is None else form_of(communicator, x, out, how)
        if form is not None:
            key = (make, how) if form_of is None else (make, how, form.dtype, form.shape)
            ready = _ready(
                communicator,
                key,
                form,
                x,
                out,
                lambda x, out: make(communicator, x, out, False, *how),
                public,
                how,
            )
            if ready is not None:
                result = (
                    _begun(ready, form, out, timeout)
                    if async_op
                    else ready(form, out, None, timeout)
                )
                if result is not None:
                    return None if result is NOTHING else result
    if is_foreign(x, out):
        return in_kind(
            lambda x, out=None: make_call(
                public, form_of, make, x, out, group, async_op, timeout, {}, how
            ),
            x,
            out,
        )
    return communicator.perform(
        public.__name__,
        partial(make, communicator, x, out, async_op, *how),
        timeout,
        async_op=async_op,
    )


def call_prepared(
    communicator: Communicator,
    key: Hashable,
    form: Any,
    out: Any,
    timeout: float | None,
    make: Make,
    said: Said | None = None,
    *,
    public: Any = None,
    how: tuple[Any, ...] = (),
) -> Any:
    """Make a call by its persistent call; None where nothing has been done, because there is none or it does not serve.

    Args:
        communicator: The group.
        key: Of the call.
        form: What this rank brings.
        out: As the caller gave it.
        timeout: In seconds, None for the job's default.
        make: Of (x, out): the request of such a call; used where it is to be prepared, or the ranks do not bring the same.
        said: This call in words, and the fingerprint that is compared; None for those of the request.
        public: A function with an entrance, which may find such calls from now on; None for none.
        how: As for `make_call`.
    """
    ready = _ready(communicator, key, form, form, out, make, public, how)
    return (
        None
        if ready is None or not (timeout is None or is_seconds(timeout))
        else ready(form, out, said, timeout)
    )


def _ready(
    communicator: Communicator,
    key: Hashable,
    form: Any,
    x: Any,
    out: Any,
    make: Make,
    public: Any,
    how: tuple[Any, ...],
) -> PreparedCall | None:
    """Return the persistent call of a key; the entrance of the public function finds it if all else that it is made with is as usual."""
    ready = communicator.prepared_calls.get(key)
    if ready is not None:
        if public is not None:
            recall(public, ready)
        return ready
    if not communicator.prepares or not communicator.is_shared:
        return None
    try:
        request = make(x, out)
        request.body.close()
        made = communicator.keep_prepared(key, request.prepared(communicator, form, make))
    except Exception:  # whatever it is: the call has no number yet, and the general way raises it again and tells the others
        return None
    if public is not None and request.is_entered and not any(how[1:]):
        remember(public, how[0] if how else None, made, communicator.prepared_calls)
    return made


def _begun(ready: PreparedCall, x: Any, out: Any, timeout: float | None) -> Work | None:
    """Begin a persistent call, to be waited for later; None where nothing has been done, as always where Python runs it."""
    begin = getattr(ready, "begin", None)
    return None if begin is None else begin(x, out, timeout, own_site())


def plain_array(x: Any) -> NDArray[Any] | None:
    """Return the array that `as_array` makes of an array, a number or a short list of numbers; None of anything else."""
    kind = type(x)
    if kind is np.ndarray:
        return x  # type: ignore[no-any-return]
    is_list = (
        (kind is list or kind is tuple)
        and len(x) <= _NUMBERS_MAX
        and _NUMBERS.issuperset(map(type, x))
    )
    if not is_list and kind not in _NUMBERS and not isinstance(x, np.generic):
        return None
    try:
        return np.asarray(x)
    except (ValueError, TypeError, OverflowError):  # the general way tells the others
        return None
