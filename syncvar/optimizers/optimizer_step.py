"""One step of an optimizer: load the gradients, combine those of all replicas, change the copies.

`GradientStep` changes the copies in this process; `RemoteStep` sends the gradients to servers.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.reduce_args import check_finite
from syncvar.collectives.sharded_sums import ShardsCall
from syncvar.core.errors import ConfigError, error_line
from syncvar.core.reduce_ops import quiet
from syncvar.optimizers.compressed_gradients import CompressedGradients
from syncvar.optimizers.gradient_call import Call, combine_persistent, combining_call
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.variables.grouped_writes import change_copies, copy_of
from syncvar.variables.variable_owner import current_owner
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec, PowerSGD
    from syncvar.collectives.reduce_args import BucketLimits
    from syncvar.optimizers.gradient_buckets import BucketPlan, Clipping
    from syncvar.optimizers.slots import OptimizerSlots
    from syncvar.optimizers.update_rules import UpdateRule
    from syncvar.runtime.communicator import CheckedCall
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import RemoteOptimizer, VariableOwner

# Options that servers do not have, with their usual values.
_LOCAL_OPTIONS = {
    "clip_norm": None,
    "clip_value": None,
    "accumulate": 1,
    "nonfinite": "allow",
    "compress": None,
    "bucket_bytes": None,
}


class GradientTransfer(NamedTuple):
    """Options of the way in which gradients travel."""

    compressor: Codec | PowerSGD | None = None  # None: as they are
    limits: BucketLimits | None = None  # of their buckets between hosts


class GradientStep:
    """The steps of one optimizer, and what it keeps between the calls of one step."""

    def __init__(
        self,
        name: str,
        rule: UpdateRule,
        slots: OptimizerSlots,
        *,
        clipping: Clipping,
        accumulate: int,
        is_error: bool,
        transfer: GradientTransfer,
    ) -> None:
        self.name, self.rule, self.slots, self.clipping = name, rule, slots, clipping
        self.accumulate = accumulate  # calls for one step
        self.transfer = transfer
        self.is_error = is_error  # whether an infinity or NaN is an error
        self.variables_of_step: tuple[int, ...] | None = None  # ids
        self._refused: str | None = None  # why this replica rejected an earlier call of this step

    def __deepcopy__(self, memo: dict[Any, Any]) -> GradientStep:
        result = copy.copy(self)
        memo[id(self)] = result
        result.slots, result.variables_of_step = self.slots.copied(memo), None
        result.rule = copy.deepcopy(self.rule, memo)
        return result

    def forget(self) -> None:
        """Forget the earlier calls of an incomplete step, but not their gradients."""
        self.variables_of_step = self._refused = None

    def _number(self) -> int:
        assert self.slots.iterations is not None
        return int(copy_of(self.slots.iterations))

    def load(self, call: Call, plan: BucketPlan, number: int) -> None:
        """Copy the gradients to the flat arrays, or accumulate them."""
        weight, calls = call.weight, self.accumulate
        if call.shards is not None:
            for arrays in call.shards.values() if self.is_error else ():
                for variable, array in zip(call.variables, arrays, strict=True):
                    if not bool(np.isfinite(array).all()):
                        raise _nonfinite_error(variable)
            return
        if self.slots.weight is not None:
            self._check_calls(self.slots.weight, call, plan, number)
            self._rescale(call, plan, number)
            change_copies([self.slots.weight], _add, -1.0 if weight is None else weight, number)
        mean = call.op == "mean" and weight is None
        for part, gradient in zip(plan.parts, call.gradients, strict=True):
            check_finite(gradient, f"the step, as the gradient of variable {part.variable.name!r}")
            factor = None if calls == 1 and part.is_replica_local else weight
            part.load(gradient, factor, number, calls, mean=mean)
        for bucket in (*plan.shared, *plan.local) if self.is_error else ():
            bad = bucket.first_nonfinite()
            if bad is not None:
                raise _nonfinite_error(bad.variable)

    def _check_calls(self, weight: Variable, call: Call, plan: BucketPlan, number: int) -> None:
        """Raise ConfigError if this call does not fit the earlier ones of the same step."""
        if number and self.variables_of_step not in (None, plan.key):
            raise ConfigError(
                "the calls of one step must name the same variables, with None for the same "
                "gradients; pass zeros where a variable has no gradient in one of them"
            )
        self.variables_of_step = plan.key
        if number and (call.weight is not None) is not (float(copy_of(weight)) >= 0):
            raise ConfigError(
                "the calls of one step must all have a weight, or none of them; pass weight in each"
            )

    def _rescale(self, call: Call, plan: BucketPlan, number: int) -> None:
        """Rescale sums that another number of replicas made before a checkpoint."""
        assert self.slots.replicas is not None
        assert self.slots.weight is not None
        size = float(len(call.owner.communicator.whole))
        before = float(copy_of(self.slots.replicas))
        if before == size:
            return
        is_sum = call.op == "sum" or call.weight is not None
        if number and before and call.travels and not call.is_combined and is_sum:
            shared = [part for part in plan.parts if not part.is_replica_local]
            summed = [part.accumulator for part in shared if part.accumulator is not None]
            for one in (*summed, self.slots.weight):
                change_copies([one], _scale, before / size)
        change_copies([self.slots.replicas], _fill, size)

    def _weight_here(self, call: Call) -> float:
        """Return the weight of this replica's gradients in all calls of the step."""
        assert call.weight is not None
        return call.weight if self.slots.weight is None else float(copy_of(self.slots.weight))

    def combine(self, call: Call, plan: BucketPlan, rate: float) -> None:
        """Make the one collective that combines or compares the gradients of all replicas."""
        owner = call.owner
        refused, self._refused = self._refused, None
        if not call.travels:
            if refused is not None:
                raise _earlier_error(refused)
            return
        registry = owner.registry
        if refused is not None or registry is None or registry.is_free:
            self._exchange(call, plan, rate, refused)
            return
        tally = state_of((plan.shared or plan.local)[0].parts[0].variable).tally
        if registry.is_due(tally):
            registry.before_write(
                [state_of(variable) for part in plan.parts for variable in part.changed]
            )
        self._exchange(call, plan, rate, None)
        registry.count(tally)

    def _exchange(self, call: Call, plan: BucketPlan, rate: float, refused: str | None) -> None:
        """Combine or compare the gradients; raise the error of an earlier call of this step."""
        owner = call.owner
        weighted = call.weight is not None
        if weighted and plan.shared:
            plan.shared[0].whole[-1] = self._weight_here(call)
        communicator = owner.communicator
        # One replica alone may still have an error from a checkpoint of several.
        compressor, limits = self.transfer
        keeps_error = compressor is not None and compressor.keeps_error
        is_single = communicator.size == 1 and not keeps_error
        if is_single and refused is None and call.shards is None:
            return
        step = self._number()
        mode = "as given" if call.is_combined else call.op + (", weighted" if weighted else "")
        mode += "" if call.shards is None else ", of shards"
        if call.is_combined and not owner.check_cross_writes and refused is None:
            return
        spec = CollectiveSpec(
            "apply_gradients",
            call.op,
            options=(call.base, mode, rate),
            variable=call.names,
            step=step,
            text=_label,
            shown=(self.name, call.shown),
        )
        if call.shards is not None:
            checked = partial(ShardsCall, communicator, call.shards, call.op, name=spec)
            totals = communicator.perform("apply_gradients", checked, owner.timeout)
            for part, total in zip(plan.parts, totals, strict=True):
                part.gradient[...] = total
            return
        op = "" if call.is_combined else "sum" if weighted else call.op
        if compressor is not None and op and plan.shared and refused is None:
            compressed = partial(
                CompressedGradients,
                communicator,
                plan,
                compressor,
                spec,
                mean=op == "mean",
                weighted=weighted,
                limits=limits,
            )
            communicator.perform("apply_gradients", compressed, owner.timeout).commit()
            return

        def check() -> CheckedCall:
            if refused is not None:
                raise _earlier_error(refused)
            return combining_call(owner, plan, op, spec, weighted=weighted)

        if refused is not None or not combine_persistent(owner, plan, op, spec, weighted=weighted):
            communicator.perform("apply_gradients", check, owner.timeout)

    def finish(self, call: Call, plan: BucketPlan, rate: float) -> None:
        """Scale and clip the combined gradients, and make the step."""
        with quiet():
            shared = local = False
            if plan.shared:
                total = None if call.weight is None else float(plan.shared[0].whole[-1])
                shared = self.clipping.apply(plan.shared, plan, total, divide=True)
            if plan.local:
                own = None if call.weight is None else self._weight_here(call)
                local = self.clipping.apply(plan.local, plan, own, divide=self.accumulate > 1)
            step = self._number()
            known: dict[int, tuple[float, ...]] = {}
            for bucket in (*(plan.shared if shared else ()), *(plan.local if local else ())):
                for part in bucket.parts:
                    change_copies(part.changed, self.rule.change, part, plan, rate, step, known)
        # Replicas have agreed on the step of what they share; a step of NONE variables alone is
        # each replica's own.
        if shared if plan.shared else local or call.travels:
            assert self.slots.iterations is not None
            change_copies([self.slots.iterations], _fill, step + 1)

    def refuse(self, failure: Exception, owner: VariableOwner | None, *, travels: bool) -> None:
        """Raise the failure of this replica's call, and inform the others if they take part in it.

        A rejected call counts: if several calls make one step, the replicas learn of it in the
        last one.
        """
        slots = self.slots
        if self.accumulate > 1 and slots.calls is not None:
            number = int(copy_of(slots.calls))
            if number < self.accumulate - 1:
                self._refused = self._refused or error_line(failure)
                self.set_calls(number + 1)
                raise failure
            self.set_calls(0)
        self._refused = None
        if travels:

            def check() -> CheckedCall:
                raise failure

            (owner or current_owner()).communicator.perform("apply_gradients", check)
        raise failure

    def set_calls(self, number: int) -> None:
        """Store the number of calls of the present step."""
        if self.slots.calls is not None:
            change_copies([self.slots.calls], _fill, number)


def _label(spec: CollectiveSpec) -> str:
    (name, variables), (_, mode, rate) = spec.shown, spec.options
    call = f"apply_gradients({name}, {mode}, learning_rate={rate!r}, step {spec.step})"
    return f"{call} of {variables}"


def _nonfinite_error(variable: Variable) -> ConfigError:
    return ConfigError(
        f"gradient of variable {variable.name!r}: it holds an infinity or NaN, and the optimizer "
        "has nonfinite='error'. Use 'skip' to leave such steps out, or clip"
    )


def _earlier_error(reason: str) -> ConfigError:
    return ConfigError(f"an earlier call of this step failed, so the step is left out: {reason}")


def _fill(arrays: list[NDArray[Any]], number: float) -> None:
    arrays[0][...] = number


def _scale(arrays: list[NDArray[Any]], factor: float) -> None:
    np.multiply(arrays[0], factor, out=arrays[0])


def _add(arrays: list[NDArray[Any]], number: float, call: int) -> None:
    arrays[0][...] = number if call == 0 else arrays[0] + number


class RemoteStep:
    """State of an optimizer for server-side variables: servers run its rule, and keep the slots."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._extra = [
            option for option, usual in _LOCAL_OPTIONS.items() if settings[option] != usual
        ]
        own = {option: value for option, value in settings.items() if option not in _LOCAL_OPTIONS}
        self.rule = name, own
        self.steps = 0  # of this worker
        self.variables: dict[str, Variable] = {}  # that it has stepped, by name

    def step(
        self,
        stepper: RemoteOptimizer,
        pairs: list[Any],
        rate: float,
        reduce: str | None,
        *,
        is_plain: bool,
    ) -> None:
        """Send one step to the servers."""
        if self._extra or not is_plain:
            raise ConfigError(
                "servers make the steps of variables by their own gradients: leave out "
                f"{', '.join(self._extra) or 'weight and shards'}"
            )
        stepper.step(self.rule, rate, pairs, "sum" if reduce == "sum" else "mean")
        for gradient, variable in pairs:
            if gradient is not None:
                self.variables.setdefault(variable.name, variable)
        self.steps += 1


def remote_optimizer_of(pairs: list[Any]) -> RemoteOptimizer | None:
    """Return the remote optimizer of these variables, None for local ones."""
    steppers = [
        getattr(one[1], "stepper", None)
        if isinstance(one, tuple | list) and len(one) == 2
        else None
        for one in pairs
    ]
    found = next((one for one in steppers if one is not None), None)
    if found is not None and any(one is not found for one in steppers):
        raise ConfigError(
            "variables on servers and others are in one call of apply_gradients; make an "
            "optimizer and a call for each"
        )
    return found
