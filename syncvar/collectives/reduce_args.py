"""Arguments of the collectives that combine: input, result, description and persistent call.

Persistent calls exist for arrays, numbers, short lists of numbers, and pytrees of these that travel
as one small vector. Everything else takes the slow path, which also reports wrong arguments.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import LEAVES_MAX
from syncvar.bootstrap.process import joined
from syncvar.collectives.dispatch import Persistable, never_persistent, plain_array
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import LEAF, PyTree, TreeDef
from syncvar.core.reduce_ops import OPS, Reduction, finish, identity, reduction
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.compile_reduce import EVERYWHERE, ResultPlacement
from syncvar.runtime.persistent_reduce import ReduceForm, persist_reduction
from syncvar.runtime.planner import Published
from syncvar.runtime.request import Stage
from syncvar.runtime.shm_reduce import ReduceBuffers, in_one_exchange, is_direct

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator, Persistent

_NOTHING: NDArray[Any] = np.empty(0, np.uint8)
_DEPTH_MAX = 16
_KINDS: dict[type[Any], str] = {dict: "dict", list: "list", tuple: "tuple"}
_LOCATING = ("minloc", "maxloc")


class BucketLimits(NamedTuple):
    """How a list of arrays is divided into buckets; an array is never cut."""

    nbytes: int  # the most that a bucket holds, unless it holds a single array
    first: int  # the same for the first bucket

    @classmethod
    def checked(cls, nbytes: Any, first: Any) -> BucketLimits | None:
        """Return the limits of `bucket_bytes=` and `first_bucket_bytes=`; None without any."""
        if nbytes is None and first is None:
            return None
        if nbytes is None:
            raise ConfigError("first_bucket_bytes needs bucket_bytes, the size of the others")
        pairs = ("bucket_bytes", nbytes), ("first_bucket_bytes", nbytes if first is None else first)
        for name, value in pairs:
            is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not is_integer or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
        return cls(*(int(value) for _, value in pairs))

    def divide(self, arrays: Iterable[tuple[int, Any]]) -> list[list[int]]:
        """Return the indices of each bucket: arrays of one kind that follow one another.

        Example:
            >>> BucketLimits(8, 4).divide([(4, "f"), (4, "f"), (4, "f"), (4, "d"), (9, "d")])
            [[0], [1, 2], [3], [4]]
        """
        buckets: list[list[int]] = []
        size, last = 0, None
        for index, (nbytes, kind) in enumerate(arrays):
            limit = self.first if len(buckets) == 1 else self.nbytes
            if not buckets or size + nbytes > limit or kind != last:
                buckets.append([])
                size = 0
            buckets[-1].append(index)
            size, last = size + nbytes, kind
        return buckets


UNLIMITED = BucketLimits(sys.maxsize, sys.maxsize)


class ReduceOptions(NamedTuple):
    """Options of an all-reduce."""

    reproducible: bool = False  # whether the ranks combine by the reproducible tree
    algorithm: str | None = None  # name of the algorithm; None lets syncvar choose
    # Ufunc: the output becomes apply(output, result), and half types are rounded after that.
    # None stores the result.
    apply: np.ufunc | None = None
    limits: BucketLimits | None = None  # of the buckets over links; None: one for each kind


def describe_reduction(
    array: NDArray[Any],
    op: str,
    name: str,
    options: ReduceOptions,
    *,
    root: int = -1,
    rows: tuple[int, ...] = (),
) -> tuple[Reduction, CollectiveSpec]:
    """Return the reduction of an array, and the description of the call `name` that makes it."""
    reducer = reduction_of(array, op)
    return reducer, CollectiveSpec(
        name,
        reducer.name,
        root,
        options.algorithm,
        options.reproducible,
        options=(rows, reducer.element_shape),
        dtype=reducer.source,
        shape=array.shape,
        elements=array.size,
        size=array.nbytes,
        text=_array_label,
    )


def describe_tree_reduction(
    structure: TreeDef,
    arrays: Sequence[NDArray[Any]],
    reducers: Sequence[Reduction],
    op: str,
    name: str,
    options: ReduceOptions,
) -> CollectiveSpec:
    """Return the description of a call that reduces a pytree; see `describe_reduction`."""
    op, shape = (reducers[0].name, reducers[0].element_shape) if reducers else (op, ())
    # `reducer.source` is the name of the dtype: `dtype.name` is slow.
    kinds = [(reducer.source, array.shape) for reducer, array in zip(reducers, arrays, strict=True)]
    return CollectiveSpec(
        name,
        op,
        algorithm=options.algorithm,
        reproducible=options.reproducible,
        structure=structure,
        kinds=tuple(kinds),
        options=shape if options.limits is None else (shape, *options.limits),
        size=sum([array.nbytes for array in arrays]),
        text=_tree_label,
    )


def _array_label(spec: CollectiveSpec) -> str:
    return f"{spec.collective}({spec.op}, {spec.array}{spec.mode}{spec.to_root})"


def _tree_label(spec: CollectiveSpec) -> str:
    return f"{spec.collective}({spec.op}, {spec.tree}, {spec.size} bytes{spec.mode})"


def reduction_of(array: NDArray[Any], op: str) -> Reduction:
    """Return the reduction of an array by an op; ConfigError if it does not fit dtype or shape."""
    reducer = reduction(op, array.dtype)
    shape = reducer.element_shape
    if shape and array.shape[-len(shape) :] != shape:
        lengths = ", ".join(map(str, shape))
        raise ConfigError(
            f"the op {reducer.name!r} was registered for arrays of shape (..., {lengths}), "
            f"not {array.shape}"
        )
    return reducer


def checked_scale(name: str, scale: Any, array: NDArray[Any]) -> Any:
    """Return a factor for the elements; ConfigError if it is none, or would have to be rounded."""
    if isinstance(scale, bool) or not isinstance(scale, int | float | complex | np.number):
        raise ConfigError(f"{name} must be a number, not {scale!r}")
    if array.dtype.kind not in "fVc":
        raise ConfigError(
            f"{name} of {array.dtype.name} would have to be rounded: write x.astype('float64'), "
            f"or scale the result"
        )
    if isinstance(scale, complex | np.complexfloating) and array.dtype.kind != "c":
        raise ConfigError(f"{name} of {array.dtype.name} must be a real number, not {scale!r}")
    return scale


def contribution(
    array: NDArray[Any], reducer: Reduction, rank: int, prescale: Any = None
) -> NDArray[Any]:
    """Return the input of a rank as a new flat array in the dtype that accumulates."""
    if reducer.is_locating:
        output = np.empty(array.size, reducer.accumulate)
        output["value"] = array.reshape(-1)
        output["rank"] = rank
        return output
    kind = array.dtype if reducer.element_shape else reducer.accumulate
    output = np.array(array, dtype=kind, order="C", copy=True).reshape(-1)
    if prescale is not None:
        output *= np.asarray(prescale, output.dtype)
    return output.view(reducer.accumulate) if reducer.element_shape else output


def outcome(
    reducer: Reduction,
    total: NDArray[Any],
    count: int,
    shape: tuple[int, ...],
    out: NDArray[Any] | None = None,
    postscale: Any = None,
) -> Any:
    """Return the result in the caller's shape; minloc and maxloc give (values, ranks).

    `count` is the number of inputs in the flat array `total`. `postscale` is applied before
    rounding.
    """
    if reducer.is_locating:
        pairs = total.reshape(shape)
        return np.ascontiguousarray(pairs["value"]), np.ascontiguousarray(pairs["rank"])
    if reducer.element_shape:
        total = total.view(reducer.result)
    if postscale is not None:
        total = (
            finish(reducer._replace(result=total.dtype), total, count)
            * np.asarray(postscale, total.dtype)
        ).astype(reducer.result)
        result = total.reshape(shape)
    else:
        result = finish(reducer, total, count).reshape(shape)
    if out is None:
        return result
    out[...] = result
    return out


def kinds_of(reducers: Sequence[Reduction]) -> dict[Reduction, list[int]]:
    """Group arrays by reduction: return the places of each, in order of first appearance."""
    kinds: dict[Reduction, list[int]] = {}
    if len(set(map(id, reducers))) == 1:
        kinds[reducers[0]] = list(range(len(reducers)))
    else:
        for index, reducer in enumerate(reducers):
            kinds.setdefault(reducer, []).append(index)
    return kinds


def sizes_of(kinds: Mapping[Reduction, Sequence[int]], arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return how many bytes are combined for each kind of `kinds_of`."""
    return [
        sum([reducer.count(arrays[place]) for place in places]) * reducer.accumulate.itemsize
        for reducer, places in kinds.items()
    ]


def run_plan(
    communicator: Communicator,
    collective: str,
    work: NDArray[Any],
    reducer: Reduction,
    **options: Any,
) -> Generator[Stage, None, Reduction]:
    """Run the schedule of a collective on a flat array; return what is left to do for `outcome`.

    In shared memory each rank divides a mean where it combines, as the persistent call does.
    """
    counts = options.pop("counts", work.size)
    if not reducer.commutes and collective not in ("scan", "exscan"):
        options["reproducible"] = True  # the tree keeps the ranks in order
    plan = communicator.plan(collective, counts, work.itemsize, **options)
    vector = None
    if reducer.is_mean and isinstance(plan, Published) and plan.reduces:
        divisor = plan.ends.divisor(communicator.member_rank, communicator.size)
        vector = ReduceBuffers.of(
            [work], [work], reducer.ufunc, work.dtype, divisor, ends=plan.ends
        )
        reducer = reducer._replace(is_mean=False)
    yield Stage(plan, work, reducer.ufunc, vector)
    return reducer


def release_others(communicator: Communicator, informed: int) -> Generator[Stage, None, None]:
    """Let `informed`, the one rank that has heard of all others, release them.

    So a mismatch fails on every rank. In shared memory phase 0 of the call does this.
    """
    if not communicator.is_shared:
        yield Stage(communicator.plan("broadcast", 0, root=informed), _NOTHING)


def plain_operand(x: Any) -> NDArray[Any] | PyTree | None:
    """Return the plain array of a value, or its pytree; None for the slow path."""
    array = plain_array(x)
    if array is not None:
        return array
    arrays: list[NDArray[Any]] = []
    structure = _plain_structure(x, arrays, _DEPTH_MAX)
    return None if structure is None or not arrays else PyTree.of(structure, arrays)


def _plain_structure(value: Any, arrays: list[NDArray[Any]], depth: int) -> TreeDef | None:
    """Append the arrays of plain containers, and return the tree; None for the slow path."""
    kind = type(value)
    array = value if kind is np.ndarray else None if kind is dict else plain_array(value)
    if array is not None:
        arrays.append(array)
        return LEAF
    if kind not in _KINDS or depth == 0 or len(value) + len(arrays) > LEAVES_MAX:
        return None
    names: tuple[str, ...] = ()
    holds = True
    if kind is dict:
        if not {str}.issuperset(map(type, value)):
            return None
        names = tuple(sorted(value))
    else:  # nested numbers are an array
        holds = any(type(part) is np.ndarray or type(part) is dict for part in value)
    parts = []
    for part in map(value.__getitem__, names) if kind is dict else value:
        structure = _plain_structure(part, arrays, depth - 1)
        if structure is None or (structure is LEAF and not holds):
            return None
        parts.append(structure)
    return TreeDef(_KINDS[kind], names, tuple(parts))


class ReductionCall(Persistable):
    """A checked call that combines. A subclass is one collective.

    `ends` says which ranks get which result, and `op` names the op. `is_dispatched`: the result has
    the dtype of the input, the only one that the C dispatch looks at.
    """

    ends = EVERYWHERE

    def __init__(
        self, communicator: Communicator, spec: CollectiveSpec, *, is_dispatched: bool
    ) -> None:
        super().__init__(spec)
        self.communicator, self.op, self.is_dispatched = communicator, spec.op, is_dispatched

    def persistent(self, like: NDArray[Any] | PyTree) -> Persistent | None:
        """Build the persistent call of such calls; see `Persistable`."""
        return persist_reductions(self.communicator, like, self.op, self.spec, self.ends)


def persist_reductions(
    communicator: Communicator,
    operand: NDArray[Any] | PyTree,
    op: str,
    spec: CollectiveSpec,
    ends: ResultPlacement = EVERYWHERE,
    apply: np.ufunc | None = None,
) -> Persistent | None:
    """Build the persistent call of reductions like `operand`, or None, or `never_persistent`.

    With `apply`, `out` must be given and becomes apply(out, result). Registered ops have no such
    call, because they may be replaced.
    """
    if not communicator.keeps_persistent or communicator.channel is None:
        return None
    leaves = operand.without_memory() if isinstance(operand, PyTree) else None
    arrays = [operand] if isinstance(operand, np.ndarray) else operand.arrays
    kinds = kinds_of([reduction_of(array, op) for array in arrays])
    are_known = (
        all(reducer.name in OPS and reducer.name not in _LOCATING for reducer in kinds)
        and communicator.forced(ends.collective) is None
    )
    if (
        not are_known
        or not all(array.dtype.isnative for array in arrays)
        or (leaves is not None and ends != EVERYWHERE)
    ):
        return never_persistent
    sizes = sizes_of(kinds, arrays)
    is_small, longest = is_direct(sum(sizes), communicator.size), 0
    if leaves is not None and (len(kinds) > 1 or not is_small):
        are_at_once, long = in_one_exchange(sizes, communicator.size)
        if not are_at_once:
            return never_persistent
        is_small, longest = long is None, long or 0
    reducers = list(kinds)
    if not is_small and ends != EVERYWHERE and operand.dtype != reducers[0].accumulate:
        return never_persistent  # the slow path converts the input
    reducers.insert(0, reducers.pop(longest))
    neutral = identity(reducers[0]) if ends.collective == "exscan" else None
    by_kind = [(reducer, kinds[reducer]) for reducer in reducers]
    shape = arrays[0].shape
    if leaves is not None:
        shape = (sum([arrays[place].size for place in by_kind[0][1]]),)
    same_form = ReduceForm(by_kind, shape, is_small, leaves, apply, ends, neutral)
    return persist_reduction(communicator, same_form, spec)


def persistent_reduction(
    communicator: Communicator,
    x: NDArray[Any],
    op: str,
    name: CollectiveSpec,
    options: ReduceOptions,
) -> Persistent | None:
    """Build the persistent call of the all-reduces of `AllReduceCall` for a variable."""
    _, spec = describe_reduction(x, op, name.collective, options)
    spec = spec._replace(variable=name.variable, access=name.access)
    call = persist_reductions(communicator, x, op, spec, apply=options.apply)
    return None if call is never_persistent else call


# -- check of inputs for NaN and infinity (setting `check_finite`: off, warn, raise) -----------
#
# After a reduction every rank's result contains the NaN. Only a check of the inputs can name the
# rank and the variable from which it came.

_log = logging.getLogger("syncvar")
_REPEAT_S = 30.0
_last_warnings: dict[tuple[int, str], float] = {}


def is_finite_checked() -> bool:
    """Return whether the settings of this rank's job ask for the check."""
    context = joined()
    return context is not None and context.config.check_finite != "off"


def check_finite(value: Any, description: str) -> None:
    """Check this rank's input of the call `description` if the setting `check_finite` asks for it.

    Cost: nothing when off, else one pass over the array.
    """
    context = joined()
    if context is None or context.config.check_finite == "off":
        return
    try:
        array: NDArray[Any] = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # the call raises a better error
        return
    if array.dtype.kind not in "fcV":
        return
    finite: NDArray[np.bool_] = np.isfinite(array)
    if finite.all():
        return
    bad = np.flatnonzero(~finite.reshape(-1))
    place = ", ".join(str(int(index)) for index in np.unravel_index(bad[0], array.shape))
    text = (
        f"{bad.size} of {array.size} elements of rank {context.rank}'s input are not finite in "
        f"{description}; the first one, at [{place}], is {array.reshape(-1)[bad[0]]}"
    )
    if context.config.check_finite == "raise":
        raise ConfigError(text)
    now = time.monotonic()
    if now - _last_warnings.get((context.rank, description), float("-inf")) >= _REPEAT_S:
        _last_warnings[context.rank, description] = now
        _log.warning("%s", text)
