"""Primitives of JAX that make collectives: how each runs, is differentiated and is batched.

A compiled program calls back into Python for each collective. All primitives have one ordered
effect, so that JAX keeps the order of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax._src import effects  # JAX has no public way to declare an effect
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from syncvar.bootstrap.process import world_size
from syncvar.collectives.all_reduce import all_reduce
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.gather import all_gather
from syncvar.collectives.reduce import reduce, reduce_scatter
from syncvar.collectives.scatter import all_to_all
from syncvar.collectives.send_recv import recv, send, sendrecv
from syncvar.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.collectives.groups import Group

LINEAR_OPS = ("sum", "mean")


class CollectiveEffect(effects.Effect):  # type: ignore[misc]
    """The effect of all collectives: JAX neither drops nor reorders them.

    Only `jax.checkpoint` repeats them, on all ranks alike.
    """

    def __str__(self) -> str:
        return "syncvar"


EFFECT = CollectiveEffect()
for _set in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _set.add_type(CollectiveEffect)


def size_of(group: Group | None) -> int:
    """Return the number of ranks of a group; None means the world."""
    return world_size() if group is None else group.size


def zero_tangent(value: Any) -> Any:
    """Return the symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


class CallOptions(NamedTuple):
    """What a call takes besides arrays; each primitive reads its own part."""

    group: Group | None = None
    op: str = "sum"
    axis: int = 0
    root: int = 0
    dest: int | None = None
    source: int | None = None
    tag: int = 0
    recv_tag: int = 0


class CollectivePrimitive:
    """A collective of any number of arrays. Subclasses say what it does with them.

    Attributes:
        bind: Makes the call, now or as a part of the program that JAX traces.
    """

    name: ClassVar[str]
    has_effect: ClassVar[bool] = True

    def __init__(self) -> None:
        primitive = Primitive(f"syncvar_{self.name}")
        primitive.multiple_results = True
        primitive.def_impl(self.evaluate)
        primitive.def_effectful_abstract_eval(self.abstract)
        mlir.register_lowering(primitive, self.lower)
        ad.primitive_jvps[primitive] = self.jvp
        ad.primitive_transposes[primitive] = self.transpose
        batching.primitive_batchers[primitive] = self.batch
        self.bind = primitive.bind

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call with NumPy arrays, and return its results."""
        raise NotImplementedError

    def results_of(self, inputs: Sequence[Any], options: CallOptions) -> list[ShapedArray]:
        """Return shapes and dtypes of the results; those of the inputs if not overridden."""
        return [ShapedArray(one.shape, one.dtype) for one in inputs]

    def require_linear(self, options: CallOptions) -> None:
        """Raise UsageError if the call has no derivative."""

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Return the cotangents of the inputs, from those of the results."""
        raise NotImplementedError

    def evaluate(self, *arrays: Any, options: CallOptions) -> list[Any]:
        """Make the call now, after those of compiled functions that still run."""
        jax.effects_barrier()
        results = self.checked_run(*map(np.asarray, arrays), options=options)
        return [jnp.asarray(result) for result in results]

    def checked_run(self, *arrays: Any, options: CallOptions) -> tuple[Any, ...]:
        """Make the call, and require results of the promised shapes and dtypes."""
        promised = self.results_of(arrays, options)
        results = tuple(map(np.asarray, self.run(list(arrays), options)))
        for result, wanted in zip(results, promised, strict=True):
            if result.shape != wanted.shape or result.dtype != wanted.dtype:
                raise ConfigError(
                    f"syncvar.jax.{self.name}: the result is {result.dtype}{list(result.shape)}, "
                    f"but the program was traced for {wanted.dtype}{list(wanted.shape)}: pass "
                    "arrays of one shape and dtype on all ranks, and describe messages by `like`"
                )
        return results

    def abstract(self, *inputs: Any, options: CallOptions) -> tuple[list[Any], set[Any]]:
        """Return shapes and dtypes of the results, and the effects."""
        return self.results_of(inputs, options), {EFFECT} if self.has_effect else set()

    def lower(self, context: Any, *operands: Any, options: CallOptions) -> Sequence[Any]:
        """Compile the call: a callback that waits for the one before."""
        call = BoundCall(self, options)
        results, token, _ = mlir.emit_python_callback(
            context,
            call,
            context.tokens_in.get(EFFECT),
            list(operands),
            context.avals_in,
            context.avals_out,
            has_side_effect=True,
            returns_token=True,
        )
        context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({EFFECT: token})))
        return results  # type: ignore[no-any-return]

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], list[Any]]:
        """Make the call with values and with tangents; all collectives here are linear."""
        results = self.bind(*primals, options=options)
        places = [at for at, one in enumerate(tangents) if type(one) is not ad.Zero]
        derivatives = [zero_tangent(result) for result in results]
        if places:
            self.require_linear(options)
            found = self.bind(*(tangents[at] for at in places), options=options)
            for at, tangent in zip(places, found, strict=True):
                derivatives[at] = tangent
        return results, derivatives

    def transpose(
        self, cotangents: Sequence[Any], *primals: Any, options: CallOptions
    ) -> list[Any]:
        """Return the cotangents of the inputs, None for those that have none."""
        self.require_linear(options)
        places = [at for at, one in enumerate(cotangents) if type(one) is not ad.Zero]
        results: list[Any] = [None] * len(primals)
        if places:
            found = self.transposed([cotangents[at] for at in places], options)
            for at, cotangent in zip(places, found, strict=True):
                results[at] = cotangent
        return results

    def batch(
        self, arrays: Sequence[Any], axes: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], Sequence[Any]]:
        """Make one call for the whole batch; its axis stays where it is."""
        return self.bind(*arrays, options=options), axes


class BoundCall:
    """The callback of one call in a compiled program."""

    def __init__(self, primitive: CollectivePrimitive, options: CallOptions) -> None:
        self._primitive = primitive
        self._options = options

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Make the call."""
        return self._primitive.checked_run(*arrays, options=self._options)


class AxisPrimitive(CollectivePrimitive):
    """A collective that cuts or joins its array along an axis."""

    def batch(
        self, arrays: Sequence[Any], axes: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], Sequence[Any]]:
        """Move the axis of the batch to the front, and count the other axis from there."""
        moved = jnp.moveaxis(arrays[0], axes[0], 0)
        shifted = options._replace(axis=options.axis + 1)
        return self.bind(moved, options=shifted), [0]


class AllReducePrimitive(CollectivePrimitive):
    """Combine arrays; the result is one value that all ranks share."""

    name = "all_reduce"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make one call for all arrays."""
        if len(arrays) == 1:
            return [all_reduce(arrays[0], options.op, group=options.group)]
        return all_reduce(arrays, options.op, group=options.group)  # type: ignore[no-any-return]

    def require_linear(self, options: CallOptions) -> None:
        """Refuse ops other than sum and mean."""
        require_linear_op("all_reduce", options.op)

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Return the cotangents: the ranks share the result, so each has the whole cotangent."""
        if options.op == "mean":
            cotangents = [one / size_of(options.group) for one in cotangents]
        return SUM_GRADIENTS.bind(*cotangents, options=options)  # type: ignore[no-any-return]


class SumGradientsPrimitive(CollectivePrimitive):
    """The identity on values that all ranks share; the transpose of a sum."""

    name = "sum_gradients"
    has_effect = False

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Return the arrays."""
        del options
        return arrays

    def lower(self, context: Any, *operands: Any, options: CallOptions) -> Sequence[Any]:
        """Return the operands: nothing is called."""
        return operands

    def evaluate(self, *arrays: Any, options: CallOptions) -> list[Any]:
        """Return the arrays."""
        return list(arrays)

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Sum the cotangents of all ranks."""
        return ALL_REDUCE.bind(*cotangents, options=options._replace(op="sum"))  # type: ignore[no-any-return]


class BroadcastPrimitive(CollectivePrimitive):
    """Give every rank the root's arrays."""

    name = "broadcast"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make one call for all arrays."""
        if len(arrays) == 1:
            return [broadcast(arrays[0], options.root, group=options.group)]
        return broadcast(arrays, options.root, group=options.group)  # type: ignore[no-any-return]

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Sum the cotangents on the root."""
        return REDUCE.bind(*cotangents, options=options)  # type: ignore[no-any-return]


class ReducePrimitive(CollectivePrimitive):
    """Sum arrays on the root; the other ranks get zeros."""

    name = "reduce"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make one call for each array."""
        sums = [reduce(one, "sum", options.root, group=options.group) for one in arrays]
        return [
            np.zeros_like(array) if total is None else total
            for array, total in zip(arrays, sums, strict=True)
        ]

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Give every rank the root's cotangents."""
        return BROADCAST.bind(*cotangents, options=options)  # type: ignore[no-any-return]


class AllGatherPrimitive(AxisPrimitive):
    """Join the arrays of all ranks along an axis."""

    name = "all_gather"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call."""
        return [all_gather(arrays[0], axis=options.axis, group=options.group)]

    def results_of(self, inputs: Sequence[Any], options: CallOptions) -> list[ShapedArray]:
        """Return the shape of the joined array."""
        shape = list(inputs[0].shape)
        shape[options.axis] *= size_of(options.group)
        return [ShapedArray(tuple(shape), inputs[0].dtype)]

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Sum the cotangents, and give each rank its piece."""
        return REDUCE_SCATTER.bind(*cotangents, options=options._replace(op="sum"))  # type: ignore[no-any-return]


class ReduceScatterPrimitive(AxisPrimitive):
    """Combine arrays, and give each rank its piece of an axis."""

    name = "reduce_scatter"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call, with the axis in front."""
        piece = reduce_scatter(front(arrays[0], options.axis), options.op, group=options.group)
        return [np.moveaxis(piece, 0, options.axis)]

    def results_of(self, inputs: Sequence[Any], options: CallOptions) -> list[ShapedArray]:
        """Return the shape of the piece."""
        shape = list(inputs[0].shape)
        shape[options.axis] //= size_of(options.group)
        return [ShapedArray(tuple(shape), inputs[0].dtype)]

    def require_linear(self, options: CallOptions) -> None:
        """Refuse ops other than sum and mean."""
        require_linear_op("reduce_scatter", options.op)

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Join the cotangents of the pieces."""
        if options.op == "mean":
            cotangents = [one / size_of(options.group) for one in cotangents]
        return ALL_GATHER.bind(*cotangents, options=options)  # type: ignore[no-any-return]


class AllToAllPrimitive(AxisPrimitive):
    """Send part d of an axis to rank d, and join the parts that arrive."""

    name = "all_to_all"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call, with the axis in front."""
        parts = all_to_all(front(arrays[0], options.axis), group=options.group)
        return [np.moveaxis(np.concatenate(parts), 0, options.axis)]

    def transposed(self, cotangents: list[Any], options: CallOptions) -> Sequence[Any]:
        """Return the cotangents to the ranks that sent the parts."""
        return ALL_TO_ALL.bind(*cotangents, options=options)  # type: ignore[no-any-return]


class SendrecvPrimitive(CollectivePrimitive):
    """Send an array to one rank and receive one like the second operand from another."""

    name = "sendrecv"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call; without a source the result is zero."""
        result = sendrecv(
            arrays[0],
            options.dest,
            options.source,
            tag=options.tag,
            recv_tag=options.recv_tag,
            group=options.group,
        )
        return [np.zeros_like(arrays[1]) if result is None else result]

    def results_of(self, inputs: Sequence[Any], options: CallOptions) -> list[ShapedArray]:
        """Return the shape and dtype of the second operand."""
        return [ShapedArray(inputs[1].shape, inputs[1].dtype)]

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], list[Any]]:
        """Send the tangent the same way; the second operand only has a shape."""
        results = self.bind(*primals, options=options)
        if type(tangents[0]) is ad.Zero:
            return results, [zero_tangent(results[0])]
        like = jnp.zeros_like(results[0])
        return results, self.bind(tangents[0], like, options=options)

    def transpose(
        self, cotangents: Sequence[Any], *primals: Any, options: CallOptions
    ) -> list[Any]:
        """Send the cotangent the opposite way."""
        if type(cotangents[0]) is ad.Zero:
            return [None, None]
        sent = primals[0].aval
        opposite = options._replace(
            dest=options.source,
            source=options.dest,
            tag=options.recv_tag,
            recv_tag=options.tag,
        )
        like = jnp.zeros(sent.shape, sent.dtype)
        return [*self.bind(cotangents[0], like, options=opposite), None]

    def batch(
        self, arrays: Sequence[Any], axes: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], Sequence[Any]]:
        """Send the whole batch as one message."""
        length = next(
            array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
        )
        moved = [
            jnp.broadcast_to(array, (length, *array.shape))
            if axis is None
            else jnp.moveaxis(array, axis, 0)
            for array, axis in zip(arrays, axes, strict=True)
        ]
        return self.bind(*moved, options=options), [0]


class SendPrimitive(CollectivePrimitive):
    """Send an array to a rank; without result, and so without derivative."""

    name = "send"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call."""
        send(arrays[0], options.dest or 0, tag=options.tag, group=options.group)
        return []

    def results_of(self, inputs: Sequence[Any], options: CallOptions) -> list[ShapedArray]:
        """Return nothing."""
        return []

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], list[Any]]:
        """Refuse to send a value that has a derivative: the receiver could not return it."""
        if type(tangents[0]) is not ad.Zero:
            raise UsageError(
                "syncvar.jax.send has no derivative, because it has no result: use sendrecv on "
                "both ranks, or send jax.lax.stop_gradient(x)"
            )
        return self.bind(*primals, options=options), []

    def batch(
        self, arrays: Sequence[Any], axes: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], Sequence[Any]]:
        """Send the whole batch as one message, with its axis in front."""
        return self.bind(jnp.moveaxis(arrays[0], axes[0], 0), options=options), []


class RecvPrimitive(CollectivePrimitive):
    """Receive an array like the operand from a rank; it depends on no value of this rank."""

    name = "recv"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call."""
        del arrays
        return [recv(options.source, tag=options.tag, group=options.group)]

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], list[Any]]:
        """Return a zero tangent: the operand only has a shape."""
        del tangents
        results = self.bind(*primals, options=options)
        return results, [zero_tangent(results[0])]

    def batch(
        self, arrays: Sequence[Any], axes: Sequence[Any], options: CallOptions
    ) -> tuple[list[Any], Sequence[Any]]:
        """Receive the whole batch as one message, with its axis in front."""
        return self.bind(jnp.moveaxis(arrays[0], axes[0], 0), options=options), [0]


class BarrierPrimitive(CollectivePrimitive):
    """Wait until all ranks have come."""

    name = "barrier"

    def run(self, arrays: list[Any], options: CallOptions) -> Sequence[Any]:
        """Make the call."""
        barrier(group=options.group)
        return arrays


def require_linear_op(name: str, op: str) -> None:
    """Raise UsageError if a reduction has no derivative."""
    if op not in LINEAR_OPS:
        raise UsageError(
            f"syncvar.jax.{name}: only {' and '.join(LINEAR_OPS)} have a derivative, not {op}; "
            "pass jax.lax.stop_gradient(x) if you need none"
        )


def front(array: Any, axis: int) -> Any:
    """Return an array with an axis moved to the front."""
    return np.ascontiguousarray(np.moveaxis(array, axis, 0))


ALL_REDUCE = AllReducePrimitive()
SUM_GRADIENTS = SumGradientsPrimitive()
BROADCAST = BroadcastPrimitive()
REDUCE = ReducePrimitive()
ALL_GATHER = AllGatherPrimitive()
REDUCE_SCATTER = ReduceScatterPrimitive()
ALL_TO_ALL = AllToAllPrimitive()
SENDRECV = SendrecvPrimitive()
SEND = SendPrimitive()
RECV = RecvPrimitive()
BARRIER = BarrierPrimitive()
