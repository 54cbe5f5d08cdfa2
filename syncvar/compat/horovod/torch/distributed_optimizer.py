"""`DistributedOptimizer`: average the gradients of all ranks during the backward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from syncvar.collectives.reduce_args import BucketLimits
from syncvar.compat.horovod.torch.gradient_compression import Compression
from syncvar.compat.horovod.torch.hvd_calls import Adasum, Average, ReduceCall, ScaledOp
from syncvar.compat.horovod.torch.hvd_operations import sparse_allreduce_async, synchronize
from syncvar.compat.horovod.torch.operation_queue import operations
from syncvar.compat.horovod.torch.process_sets import (
    ProcessSet,
    global_process_set,
    require_init,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_LIMITS = BucketLimits(8 << 20, first=1 << 20)


class HvdBucket:
    """Parameters whose gradients travel together.

    Attributes:
        parameters: In the order in which all ranks send them.
        handle: Of the operation that has started, or a function that waits for it.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.parameters = list(parameters)
        self.ready: set[Any] = set()
        self.handle: Any = None
        self.contexts: list[Any] = []
        self.sparse: dict[Any, Callable[[], Any]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether all gradients have been computed."""
        return len(self.ready) == len(self.parameters)


class GradientReducer:
    """Reduces the gradients of an optimizer, bucket by bucket, in one order on all ranks.

    A bucket starts when its gradients are ready and all buckets before it have started. The order
    is that of the parameters, reversed, because a backward pass ends with the first ones.
    """

    def __init__(self, names: dict[Any, str], options: ReducerOptions) -> None:
        self.names = names
        self.options = options
        self.passes = options.passes
        self.passes_left = dict.fromkeys(names, self.passes)
        self.buckets: list[HvdBucket] = []
        self.bucket_of: dict[Any, HvdBucket] = {}
        self.started = 0  # number of buckets
        self.hooks: list[Any] = []

    def watch(self, units: Sequence[Sequence[Any]]) -> None:
        """Reduce these groups of parameters from now on."""
        self.buckets = [HvdBucket(unit) for unit in units if unit]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self.bucket_of[parameter] = bucket
                hook = parameter.register_post_accumulate_grad_hook(self.on_gradient)
                self.hooks.append(hook)

    @property
    def is_busy(self) -> bool:
        """Whether a gradient is on its way, or has been accumulated for a later step."""
        return self.started > 0 or any(bucket.ready for bucket in self.buckets)

    def on_gradient(self, parameter: Any) -> None:
        """Note that the gradient of a parameter has been accumulated; begin what can begin."""
        if self.passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call "
                "to step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.passes_left[parameter] -= 1
        if self.passes_left[parameter] == 0:
            self.bucket_of[parameter].ready.add(parameter)
            while self.started < len(self.buckets) and self.buckets[self.started].is_ready:
                self.begin_next()

    def begin_next(self) -> None:
        """Begin the operation of the next bucket; missing gradients are zero."""
        bucket = self.buckets[self.started]
        self.started += 1
        dense, names = [], []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse and not self.options.sparse_as_dense:
                self.begin_sparse(bucket, parameter)
                continue
            gradient = parameter.grad
            dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
            names.append(self.names[parameter])
        if dense:
            pairs = [self.options.codec.compress(one) for one in dense]
            bucket.contexts = [context for _, context in pairs]
            tensors = [one for one, _ in pairs]
            reduction, process_set = self.options.reduction, self.options.process_set
            call = ReduceCall(tensors, tensors, names, reduction, process_set, is_group=True)
            bucket.handle = operations.submit(call)

    def begin_sparse(self, bucket: HvdBucket, parameter: Any) -> None:
        """Begin the operation of a sparse gradient."""
        bucket.sparse[parameter] = sparse_allreduce_async(
            parameter.grad,
            self.names[parameter],
            self.options.reduction.op,
            self.options.process_set,
        )

    def finish(self) -> None:
        """Begin what has not started, wait for all, and write the gradients."""
        while self.started < len(self.buckets):
            self.begin_next()
        for bucket in self.buckets:
            results = [] if bucket.handle is None else synchronize(bucket.handle)
            dense = [one for one in bucket.parameters if one not in bucket.sparse]
            for parameter, result, context in zip(dense, results, bucket.contexts, strict=True):
                self.write(parameter, self.options.codec.decompress(result, context))
            for parameter, wait in bucket.sparse.items():
                parameter.grad = wait()
        self.reset()

    def write(self, parameter: Any, result: Any) -> None:
        """Write a gradient; a sparse one stays sparse."""
        if parameter.grad.is_sparse:
            parameter.grad = result.to_sparse()
        elif result is not parameter.grad:
            parameter.grad.copy_(result)

    def reset(self) -> None:
        """Forget this step."""
        self.started = 0
        for bucket in self.buckets:
            bucket.ready.clear()
            bucket.sparse.clear()
            bucket.handle, bucket.contexts = None, []
        self.passes_left = dict.fromkeys(self.names, self.passes)


class ReducerOptions:
    """The options of `DistributedOptimizer` for the reduction."""

    def __init__(
        self,
        *,
        codec: Any,
        passes: int,
        reduction: ScaledOp,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.codec = codec
        self.passes = passes
        self.reduction = reduction
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set


class DistributedMethods:
    """The methods that an optimizer gets; a class of its own optimizer follows in the MRO."""

    reducer: GradientReducer
    _is_synchronized = False
    _synchronizes = True

    @property
    def _parameter_names(self) -> dict[Any, str]:
        """The names by parameter, which programs read in Horovod too."""
        return self.reducer.names

    def synchronize(self) -> None:
        """Wait until the gradients of this step are those of all ranks."""
        self.reducer.finish()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` in a block rely on an earlier `synchronize`."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes before each step."""
        self.reducer.passes = passes
        self.reducer.passes_left = dict.fromkeys(self.reducer.names, passes)

    def step(self, closure: Any = None) -> Any:
        """Synchronize the gradients, and make a step."""
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear the gradients; an error if they are on their way."""
        if self.reducer.is_busy:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition."
            )
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the optimizer, and forget the gradients of this step."""
        self.reducer.reset()
        self._is_synchronized, self._synchronizes = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer whose steps use the gradients of all ranks.

    It has the parameters, options and state of `optimizer`, and its class is derived from that of
    `optimizer`. Gradients travel while the backward pass continues, in one order on all ranks.

    Args:
        optimizer: Optimizer of PyTorch.
        named_parameters: Names of all parameters, as `model.named_parameters()` gives them.
        compression: `Compression.none` or `Compression.fp16`.
        backward_passes_per_step: Number of backward passes whose gradients are added before they
            travel.
        op: Average or Sum.
        gradient_predivide_factor: Part of the division that is made before the sum.
        num_groups: Old form of `groups`.
        groups: Number of groups of gradients that travel together, or lists of parameters. None
            makes groups of up to 8 MiB.
        sparse_as_dense: Whether sparse gradients travel as dense ones.
        process_set: Ranks that take part.

    Raises:
        ValueError: An argument is wrong, or the names are not unique.
        NotImplementedError: `op` is Adasum.
    """
    require_init()
    if op == Adasum:
        ScaledOp(op).checked()
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = groups or num_groups
    options = ReducerOptions(
        codec=compression,
        passes=backward_passes_per_step,
        reduction=ScaledOp(op, 1 / gradient_predivide_factor, gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    names = parameter_names(optimizer, named_parameters)
    cls: Any = type(type(optimizer).__name__, (DistributedMethods, type(optimizer)), {})
    distributed = cls.__new__(cls)
    distributed.__dict__.update(optimizer.__dict__)
    # A scheduler of the optimizer has hidden its method behind one that would not synchronize.
    distributed.__dict__.pop("step", None)
    distributed.reducer = GradientReducer(names, options)
    if process_set.included() and (process_set.size() or 1) > 1:
        distributed.reducer.watch(units_of(list(names), groups))
    return distributed


def parameter_names(optimizer: Any, named: Iterable[tuple[str, Any]] | None) -> dict[Any, str]:
    """Return the names of an optimizer's parameters, in its order; raise ValueError if one lacks.

    Parameters without gradient have no place in the result.
    """
    own = [one for group in optimizer.param_groups for one in group["params"]]
    pairs = None if named is None else list(named)
    if pairs is None:
        pairs = [(f"allreduce.noname.{place}", one) for place, one in enumerate(own)]
    if any(not isinstance(one, tuple) for one in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    names = {one: name for name, one in pairs}
    missing = [place for place, one in enumerate(own) if one not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"numbers {missing} of the optimizer"
        )
    return {one: names[one] for one in own if one.requires_grad}


def units_of(parameters: Sequence[Any], groups: Any) -> list[list[Any]]:
    """Return lists of parameters whose gradients travel together, the last parameters first."""
    order = list(reversed(parameters))
    if groups is None:
        sizes = ((one.nbytes, one.dtype) for one in order)
        return [[order[place] for place in places] for places in _LIMITS.divide(sizes)]
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a positive number or lists of tensors")
        count = groups or len(order)
        length = -(-len(order) // count) if order else 1
        return [order[at : at + length] for at in range(0, len(order), length)]
    listed = [one for group in groups for one in group]
    if any(not isinstance(one, torch.Tensor) for one in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len(set(listed)) != len(listed):
        raise ValueError("A parameter can only appear once in groups.")
    known = set(order)
    units = [[one for one in group if one in known] for group in reversed(groups)]
    rest = known.difference(listed)
    return units + [[one] for one in order if one in rest]
