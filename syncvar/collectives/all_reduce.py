"""All-reduce: every rank ends with the combination of all ranks' values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives.buckets import reduce_one, reduce_together
from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.compressed_reduce import CompressedCall
from syncvar.collectives.dispatch import call_persistent, make_call, native_dispatch
from syncvar.collectives.reduce_args import (
    BucketLimits,
    ReduceOptions,
    ReductionCall,
    check_finite,
    checked_scale,
    contribution,
    describe_reduction,
    describe_tree_reduction,
    is_finite_checked,
    outcome,
    plain_operand,
    reduction_of,
)
from syncvar.core.array_arguments import as_array, checked_output
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import arrays_of, flatten, is_structure, private_copy, unflatten
from syncvar.core.reduce_ops import op_name

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec, PowerSGD
    from syncvar.collectives.groups import Group
    from syncvar.core.pytree import PyTree, TreeDef
    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


_DEFAULT = ReduceOptions()


@native_dispatch(second="op", usual="sum", positions=2)
def all_reduce(  # noqa: PLR0913  (public signature)
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    reproducible: bool = False,
    prescale: float | None = None,
    postscale: float | None = None,
    weight: float | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    compress: str | Codec | PowerSGD | None = None,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    **_foreign: Never,
) -> Any:
    """Combine the values of all ranks and give every rank the result.

    Args:
        x: Array of any shape, number, or a nested dict/list/tuple/dataclass of them. Shapes and
            dtypes must be the same on every rank.
        op: A member of `sv.ReduceOp`, or a name. "sum", "mean", "prod", "min" and "max" work on
            numbers. "and", "or" and "xor" are logical on bools and bitwise on integers. "minloc"
            and "maxloc" return a pair of arrays: the values, and the lowest rank that has each of
            them. Names that you registered with `sv.register_op` work too.
        out: Array of the result's shape and dtype (or a pytree of them) to write to. It may be `x`
            itself; arrays of `sv.empty` are then reduced in place. After an error of the arguments
            `out` is unchanged. After PeerLost or DeadlineExceeded it may be partly written.
        reproducible: Combine by the tree T(lo, hi) = T(lo, mid) + T(mid, hi) over ranks, where mid
            = lo + the largest power of two below hi - lo. The bits are then the same for all sizes,
            hosts and transports.
        prescale: Factor of this rank's input; it may differ between ranks. Not for integers.
        postscale: Factor of the result, applied before half types are rounded; the same on every
            rank.
        weight: Weight of this rank in a mean. The result is the sum of weight * x, divided by the
            sum of the weights. A rank of weight 0 does not count, even if its input is NaN.
        compress: "float16", "bfloat16", "int8", "topk", "powersgd", or a compressor of
            `sv.compressors`, the same on every rank. Values travel in fewer bytes, and are
            rounded; the compressor states the error. Only for the sum and the mean of real floating
            numbers, without the four arguments above and `algorithm`.
        bucket_bytes: Between hosts, the most bytes of a pytree's arrays that travel together (with
            `compress`, their bytes as float32); the same on every rank. An array is not cut: a
            longer one travels by itself. None means one bucket for each dtype. Smaller buckets take
            less memory; with `compress` the next one is encoded while one travels.
        first_bucket_bytes: The same for the first bucket, so that something travels early. None
            means `bucket_bytes`.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        An array of the shape and dtype of `x` (the mean of integers is float64), or the same pytree
        of arrays. If `x` is a tensor of another library (PyTorch, JAX, or any with DLPack and an
        array namespace), the result is one too; this holds for every collective.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: ring, 2(n-1) rounds and 2(n-1)/n of the buffer sent by each rank; small buffers take fewer
        rounds. With `compress` two rounds, and 2(n-1)/n of the compressed buffer; never the fast
        path of shared memory, so inside one host it costs more than it saves.
    Order: fixed by count, number of ranks and hosts; the bytes are equal on every rank. With
        `compress` sums are made in float32, in the order of ranks.
    Source: Patarasuk and Yuan 2009 (ring); Thakur, Rabenseifner, Gropp 2005 (tree).

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_reduce(np.array([1.0, 2.0]))
        array([1., 2.])
        >>> sv.all_reduce({"loss": 0.5, "n": 3}, "mean")["n"]
        array(3.)
    """
    make: type[AllReduceCall | CompressedCall] = _PublicCall
    options: tuple[Any, ...] = (op_name(op), reproducible, algorithm)
    if compress is not None:
        make = CompressedCall
        excluded = {
            "reproducible": reproducible or None,
            "prescale": prescale,
            "postscale": postscale,
            "weight": weight,
            "algorithm": algorithm,
        }
        others = [name for name, value in excluded.items() if value is not None]
        options = (op_name(op), compress, others, (bucket_bytes, first_bucket_bytes))
    elif prescale is not None or postscale is not None or weight is not None:
        make, options = _ScaledCall, (*options, (prescale, postscale, weight))
    elif bucket_bytes is not None or first_bucket_bytes is not None:
        make, options = _BucketedCall, (*options, (bucket_bytes, first_bucket_bytes))
    return make_call(all_reduce, make, x, out, group, async_op, timeout, _foreign, options)


class AllReduceCall(ReductionCall):
    """An all-reduce of an array or a pytree; `keep` copies the input."""

    def __init__(
        self,
        communicator: Communicator,
        x: Any,
        op: str,
        *,
        out: Any = None,
        name: str = "all_reduce",
        options: ReduceOptions = _DEFAULT,
        keep: bool = False,
    ) -> None:
        self._options, self._structure, self._like = options, None, x
        targets: list[NDArray[Any] | None]
        if is_structure(x):
            self._structure, leaves = flatten(x)
            arrays = arrays_of(x, leaves)
            reducers = [reduction_of(array, op) for array in arrays]
            targets = [None] * len(arrays)
            if out is not None:
                shape_of_out, outs = flatten(out)
                if shape_of_out != self._structure:
                    raise ConfigError("out must have the same structure as the value")
                targets = [
                    checked_output(one, array.shape, reducer.result)
                    for one, array, reducer in zip(outs, arrays, reducers, strict=True)
                ]
            kinds = self._structure, arrays, reducers
            spec = describe_tree_reduction(*kinds, op, name, options)
        else:
            array = as_array(x)
            reducer, spec = describe_reduction(array, op, name, options)
            if reducer.is_locating and out is not None:
                raise ConfigError(f"{reducer.name} gives two arrays; out cannot be given")
            targets = [None if out is None else checked_output(out, array.shape, reducer.result)]
            arrays, reducers = [array], [reducer]
        if keep:
            self._like = None if self._structure is None else private_copy(self._structure, x)
            arrays = [array.copy() for array in arrays]
            targets = list(map(partial(_output_for, communicator), arrays, reducers, targets))
        self._arrays, self._reducers, self._targets = arrays, reducers, targets
        are_same = [array.dtype for array in arrays] == [reducer.result for reducer in reducers]
        super().__init__(communicator, spec, is_dispatched=are_same)

    def stages(self) -> Generator[Stage, None, Any]:
        """Return the stages, which end with the results."""
        if self._structure is not None:
            return self._tree_stages(self._structure)
        one = self._arrays[0], self._reducers[0], self._targets[0]
        return reduce_one(self.communicator, *one, self._options)

    def _tree_stages(self, structure: TreeDef) -> Generator[Stage, None, Any]:
        several = self._arrays, self._reducers, self._targets
        results = yield from reduce_together(self.communicator, *several, self._options, opens=True)
        return unflatten(structure, results, self._like)


class _PublicCall(AllReduceCall):
    """The call of `sv.all_reduce` without factors; its arguments come as in `make_call`."""

    @staticmethod
    def persistent_input(
        _communicator: Communicator, x: Any, _out: Any, options: Any
    ) -> NDArray[Any] | PyTree | None:
        op, reproducible, algorithm = options
        if algorithm is None and isinstance(op, str) and type(reproducible) is bool:
            return x if type(x) is np.ndarray else plain_operand(x)
        return None

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, op: str, *options: Any, keep: bool
    ) -> None:
        for leaf in (flatten(x)[1] if is_structure(x) else [x]) if is_finite_checked() else ():
            check_finite(as_array(leaf), "all_reduce")
        super().__init__(communicator, x, op, out=out, options=ReduceOptions(*options), keep=keep)


class _BucketedCall(_PublicCall):
    """An all-reduce in buckets of the sizes (bucket_bytes, first_bucket_bytes)."""

    @staticmethod
    def persistent_input(
        communicator: Communicator, x: Any, out: Any, options: Any
    ) -> NDArray[Any] | PyTree | None:
        return _PublicCall.persistent_input(communicator, x, out, options[:3])

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, op: str, *options: Any, keep: bool
    ) -> None:
        *choice, sizes = options
        limits = BucketLimits.checked(*sizes)
        super().__init__(communicator, x, out, op, *choice, None, limits, keep=keep)


class _ScaledCall(AllReduceCall):
    """An all-reduce of one array with the factors (prescale, postscale, weight)."""

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, op: str, *options: Any, keep: bool
    ) -> None:
        *choice, (prescale, postscale, weight) = options
        if is_structure(x):
            raise ConfigError(
                "prescale, postscale and weight take one array; call all_reduce for each leaf"
            )
        array = as_array(x)
        reducer = reduction_of(array, op)
        for name, scale in (("prescale", prescale), ("postscale", postscale), ("weight", weight)):
            if scale is not None:
                checked_scale(name, scale, array)
        if weight is not None and not reducer.is_mean:
            raise ConfigError(f"weight belongs to the mean, not to {reducer.name}; use prescale")
        self._out = None if out is None else checked_output(out, array.shape, reducer.result)
        if weight is None or weight:  # the input of a rank of weight 0 does not count
            check_finite(array, "all_reduce")
        work = contribution(array, reducer, communicator.home_rank, prescale)
        if reducer.element_shape:
            work, reducer = work.view(reducer.result), reducer._replace(element_shape=())
        operand: Any = work.reshape(array.shape)
        inner = reducer.name
        if weight is not None:
            factor = np.asarray(weight, work.dtype)
            # The mean over an empty batch is NaN and has weight 0: NaN * 0 would be NaN.
            operand = operand * factor if weight else np.zeros_like(operand)
            operand, inner = [operand, factor.reshape(())], "sum"
        self._is_weighted, self._postscale = weight is not None, postscale
        self._rule, self._shape = reducer._replace(is_mean=False), array.shape
        scaled = f", scaled{', weighted' if self._is_weighted else ''}"
        by = "" if postscale is None else f" by {postscale!r}"
        name = f"all_reduce{scaled} of {reducer.source}{by}"
        options = ReduceOptions(*choice)
        super().__init__(communicator, operand, inner, name=name, options=options)

    def stages(self) -> Generator[Stage, None, Any]:
        total = yield from super().stages()
        if self._is_weighted:
            total = total[0] / total[1]  # nan where all weights are 0
        flat = np.asarray(total).reshape(-1)
        return outcome(self._rule, flat, 1, self._shape, self._out, self._postscale)


def _output_for(
    communicator: Communicator, copy: NDArray[Any], reducer: Reduction, target: NDArray[Any] | None
) -> NDArray[Any] | None:
    """Return the output of an asynchronous call: in shared memory the copy of the input serves."""
    serves = (
        target is None
        and communicator.is_shared
        and copy.dtype == reducer.result
        and not reducer.is_packed
    )
    return copy if serves else target


def agree(
    communicator: Communicator,
    name: str,
    op: str,
    numbers: NDArray[Any],
    timeout: float | None,
    spec: CollectiveSpec | None = None,
) -> NDArray[Any]:
    """Combine a few numbers of all ranks elementwise by a persistent call. Collective.

    `numbers` is flat and alike on all ranks. `spec` describes the call; None for `name`.
    """
    make_checked = partial(agreement_call, communicator, name, op, None, numbers)
    output = call_persistent(communicator, (name, op), numbers, None, timeout, make_checked, spec)
    if output is None:
        make_checked = partial(agreement_call, communicator, name, op, spec, numbers)
        output = communicator.perform(spec or name, make_checked, timeout)
    return output  # type: ignore[no-any-return]


def agreement_call(
    communicator: Communicator,
    name: str,
    op: str,
    spec: CollectiveSpec | None,
    numbers: NDArray[Any],
) -> AllReduceCall:
    """Return the call of `agree`."""
    call = AllReduceCall(communicator, numbers, op, name=name)
    call.spec = spec or call.spec
    return call


register(
    Collective(
        (all_reduce,), CollectiveKind.REDUCE, gives="an array",
        gets="the combination of all ranks' arrays",
        cost="one or two rounds; over links 2(n-1) rounds, 2(n-1)/n of the array sent",
        wanted=lambda case: case.combined(), in_place=True,
    )
)  # fmt: skip
