"""The base of all optimizers: `apply_gradients`, from local gradients to one common step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from syncvar.collectives.compressors import checked_compressor, signature_of
from syncvar.collectives.reduce_args import BucketLimits
from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.lazy_import import MigrationHintsMixin, attribute_hint
from syncvar.optimizers.gradient_buckets import (
    BucketPlan,
    Clipping,
    checked_pairs,
    checked_variables,
    listed,
)
from syncvar.optimizers.gradient_call import (
    Call,
    checked_shards,
    dense_gradient,
    describe_variables,
    strategy_of_pairs,
)
from syncvar.optimizers.optimizer_step import (
    GradientStep,
    GradientTransfer,
    RemoteStep,
    remote_optimizer_of,
)
from syncvar.optimizers.slots import OptimizerSlots, is_replica_local
from syncvar.optimizers.update_rules import (
    Options,
    UpdateRule,
    checked_choice,
    checked_count,
    checked_name,
    checked_number,
    checked_rate,
    compute_dtype,
)
from syncvar.runtime.collective_spec import CollectiveSpec, names_text
from syncvar.variables.grouped_writes import copy_of
from syncvar.variables.policy import CallContext
from syncvar.variables.values import operand_array
from syncvar.variables.variable_owner import context_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar.optimizers.update_rules import Rate
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import RemoteOptimizer, VariableOwner

_PLANS_MAX = 8  # cached lists of variables, with their flat arrays
_NONFINITE = ("allow", "error", "skip")


class Optimizer(MigrationHintsMixin):
    """Base of the optimizers. A step uses the mean of the replicas' gradients.

    So a program does not divide its loss by the number of replicas.

    Args:
        learning_rate: A number, or a function of the step (0 for the first), the same on every
            replica.
        rule: The update rule.
        weight_decay: This times the variable is added to its gradient (L2 regularization); AdamW
            and LAMB decay the variable itself.
        clip_norm: Maximum 2-norm of the combined gradients, as of one vector; they are scaled down
            to it. Gradients of NONE variables count separately, for each replica. Source: Pascanu,
            Mikolov, Bengio 2013.
        clip_value: Limit of each element of the combined gradients, to [-clip_value, clip_value],
            before clip_norm.
        accumulate: Number of calls of `apply_gradients` for one step. Only the last one
            communicates and writes.
        nonfinite: Treatment of infinities and NaN. "allow" them; "error": a replica that passes one
            raises ConfigError, the others MismatchError, nothing changes; "skip": all replicas
            leave out the step if the combined gradients hold one (for a search of the loss scale).
        compress: "float16", "bfloat16", "int8", "topk", "powersgd", or a compressor of
            `sv.compressors`, the same on every replica. The gradients travel in fewer bytes, and
            are rounded; float64 becomes float32 first. With "topk" and "powersgd" a step adds what
            did not travel before. Each replica has it in a slot, which a checkpoint saves. Not for
            variables on servers.
        bucket_bytes, first_bucket_bytes: As in `sv.all_reduce`: between hosts the gradients travel
            in buckets of at most so many bytes. Not for variables on servers.
        name: Part of the slots' names; None means that of the class.
    """

    def __init__(self, learning_rate: Rate, rule: UpdateRule, **options: Unpack[Options]) -> None:
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            from syncvar.core.migration_hints import unexpected_keyword

            raise unexpected_keyword(type(self), unknown, Options.__annotations__)
        self._rate = checked_rate(learning_rate)
        rule.decay = checked_number("weight_decay", options.get("weight_decay", 0.0))
        norm_max, value_max = (_checked_limit(options, one) for one in ("clip_norm", "clip_value"))
        accumulate = checked_count("accumulate", options.get("accumulate", 1))
        nonfinite = checked_choice("nonfinite", options.get("nonfinite", "allow"), _NONFINITE)
        compress = options.get("compress")
        compressor = None if compress is None else checked_compressor(compress)
        limits = BucketLimits.checked(
            options.get("bucket_bytes"), options.get("first_bucket_bytes")
        )
        self._settings = {
            **rule.numbers,
            "weight_decay": rule.decay,
            "clip_norm": norm_max,
            "clip_value": value_max,
            "accumulate": accumulate,
            "nonfinite": nonfinite,
            "compress": None if compressor is None else signature_of(compressor),
            "bucket_bytes": limits,
        }
        name = type(self).__name__
        slots = OptimizerSlots(
            checked_name(options.get("name"), name),
            rule.initials(),
            counts=rule.counts_steps,
            accumulates=accumulate > 1,
            compressor=compressor,
        )
        self._step = GradientStep(
            name,
            rule,
            slots,
            clipping=Clipping(norm_max, value_max, skips=nonfinite == "skip"),
            accumulate=accumulate,
            is_error=nonfinite == "error",
            transfer=GradientTransfer(compressor, limits),
        )
        self._remote = RemoteStep(name, self._settings)
        self._plans: dict[tuple[int, ...], BucketPlan] = {}
        self._bases: dict[Any, tuple[Any, ...]] = {}

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and attribute_hint(type(self), name):
                getattr(self, name)  # raises: to set it would change nothing
            super().__setattr__(name, value)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The present learning rate; can be set to a number or a function of the step."""
        return self._rate_at(self.iterations)

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        """The present learning rate; can be set to a number or a function of the step."""
        self._rate = checked_rate(value)

    @property
    def iterations(self) -> int:
        """Number of steps so far."""
        counter = self._step.slots.iterations
        if counter is not None:
            return int(copy_of(counter))
        return self._remote.steps or self._step.slots.restored_iterations

    @property
    def variables(self) -> list[Variable]:
        """Its own variables that exist (iterations and slots), in order of creation."""
        return list(self._step.slots.tracked.values())

    def tracked(self) -> dict[str, Variable]:
        """Return its own variables that exist, by key.

        The keys are "iterations", "<name of the variable>/<slot>", such as "w/m", and
        "NONE:<name>/<slot>" for NONE variables, whose names are a namespace of their own. A
        checkpoint writes the key of the variable that it saves, instead of its name.
        """
        return dict(self._step.slots.tracked)

    @property
    def remote_step(self) -> RemoteStep | None:
        """State for server-side variables; None for local ones. For this package only."""
        return self._remote if self._step.slots.iterations is None else None

    @property
    def slots(self) -> OptimizerSlots:
        """Its slots, and restored values that wait for them. For this package only."""
        return self._step.slots

    @property
    def gradient_step(self) -> GradientStep:
        """Its steps of local variables. For this package only."""
        return self._step

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the slots of variables now rather than at their first step.

        Collective, except for NONE variables. For variables on servers it only asks the servers
        whether they support this optimizer, and is not collective.

        Args:
            variables: The same, in the same order, on every replica.

        Raises:
            ConfigError: A variable that cannot be stepped; the others raise MismatchError.
            MismatchError: The replicas pass different variables.

        Example:
            >>> import syncvar as sv
            >>> optimizer = sv.optimizers.Momentum(0.1)
            >>> optimizer.build([sv.Variable([1.0, 2.0], name="weight")])
            >>> sorted(optimizer.tracked())
            ['iterations', 'weight/momentum']
        """
        chosen = list(variables)
        stepper = remote_optimizer_of([(None, one) for one in chosen])
        if stepper is not None:
            stepper.prepare(self._remote.rule)
            return
        failure: Exception | None = None
        owner: VariableOwner | None = None
        try:
            if not chosen:
                raise ConfigError("build needs at least one variable: optimizer.build([v, …])")
            owner = checked_variables(chosen)
            self._checked_family(owner, chosen)
            self._step.slots.missing(chosen)
        except Exception as error:  # raised on the other replicas below
            failure = error
        if failure is not None:
            self._step.refuse(
                failure, owner, travels=any(not is_replica_local(one) for one in chosen)
            )
        assert owner is not None
        is_independent = all(is_replica_local(variable) for variable in chosen)
        self._build(owner, chosen, is_independent=is_independent)

    def leave_world(self) -> None:
        """Keep its state for the next step, in another world. For this package only."""
        self._step.slots.release()
        self._step.forget()
        self._plans.clear()
        self._bases.clear()

    def __repr__(self) -> str:
        rate = self._rate if callable(self._rate) else f"{self._rate:g}"
        name = type(self).__name__
        return f"<sv.optimizers.{name} learning_rate={rate} iterations={self.iterations}>"

    def __copy__(self) -> Optimizer:
        result = type(self).__new__(type(self))
        result.__dict__.update(self.__dict__)
        return result

    def __deepcopy__(self, memo: dict[Any, Any]) -> Optimizer:
        if self._remote.variables:
            raise TypeError(
                f"{self!r} cannot be copied: its slots are on servers, beside their variables. "
                f"Make another one, sv.optimizers.{type(self).__name__}(…)"
            )
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for name, value in self.__dict__.items():
            is_cache = name in ("_plans", "_bases")
            result.__dict__[name] = {} if is_cache else copy.deepcopy(value, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._step.slots.stepped or self._remote.variables:
            raise TypeError(
                f"{self!r} cannot be pickled: its slots live in several processes, as variables "
                "do. Save it with sv.Checkpoint(optimizer=optimizer, w=w).save(path), or "
                "copy.deepcopy(optimizer)"
            )
        return super().__reduce_ex__(protocol)

    # -- one call ----------------------------------------------------------------------------------

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        *,
        reduce: str | None = "mean",
        weight: float | None = None,
        shards: bool = False,
    ) -> None:
        """Make one step with the mean of the replicas' gradients.

        It is not their sum: do not divide the loss by the number of replicas. Inside `run` and
        outside every scope gradients are each replica's own. In cross context (and inside
        merge_call) they are used as given and must be the same everywhere. A digest checks that,
        unless the strategy has check_cross_writes=False. NONE variables are stepped by their own
        replica's gradient, without a message.

        Args:
            grads_and_vars: Pairs of a gradient (array of the variable's shape, or None) and a
                variable, the same variables in the same order on every replica. A None gradient
                leaves its variable and slots unchanged; it must be None on all replicas (NONE
                variables excepted). A gradient may name rows, (indices, values) or a
                tf.IndexedSlices: all other rows count as zero.
            reduce: "mean" or "sum" of the replicas' gradients; None means that they are combined
                already, as in cross context. The calls of one step (accumulate) are combined in the
                same way, None as the mean.
            weight: Weight of this replica's gradients in the mean, such as the number of its
                examples: sum(weight * gradient) / sum(weight). With weight zero a replica has no
                influence, whatever its gradients hold. If all weights are zero nothing changes.
            shards: Each gradient is a dict of id -> gradient of a micro-shard: this replica's, {}
                for none. Over all replicas the ids are 0 to n-1, each once; "mean" divides by n.
                The bits of the step do not depend on the number of replicas or on which replica
                passes which shard (`sv.all_reduce_shards`). Inside `run` and outside every scope;
                not with weight, accumulate or NONE variables.

        Raises:
            ConfigError: A wrong argument here: shape, dtype, an ON_READ variable, no gradient at
                all. The other replicas raise MismatchError, and nothing changes anywhere.
            MismatchError: The replicas name different variables, steps, learning rates or settings;
                nothing changes.
            UsageError: Variables of another strategy.

        Cost: one all-reduce for all float32 and half gradients together (half types travel as
            float32), in the same call one for float64; for shards, the cost of `all_reduce_shards`.
            The first call creates the slots, which takes a few calls for each. With `compress` one
            compressed all-reduce for all, and 8 bytes of each replica for a weight.
        Order: as `all_reduce`; with the strategy's reproducible=True by the tree over replicas.

        Example:
            >>> import syncvar as sv
            >>> w = sv.Variable([1.0, 2.0])
            >>> sv.optimizers.SGD(0.5).apply_gradients([([2.0, 4.0], w)])
            >>> w.numpy()
            array([0., 0.], dtype=float32)
        """
        pairs: Any = grads_and_vars
        call: Call | None = None
        failure: Exception | None = None
        plan: BucketPlan | None = None
        stepper: RemoteOptimizer | None = None
        try:
            pairs = listed(grads_and_vars)
            stepper = remote_optimizer_of(pairs)
            if stepper is None:
                call, plan = self._checked(pairs, reduce, weight, shards=shards)
        except Exception as error:  # raised on the other replicas below
            failure = error
        if stepper is not None:
            rate = self._rate_at(self.iterations)
            self._remote.step(stepper, pairs, rate, reduce, is_plain=weight is None and not shards)
            return
        if call is None:
            owner, travels = strategy_of_pairs(pairs)
            if self._step.slots.owner is not None:
                owner, travels = self._step.slots.owner, not self._step.slots.is_independent
            self._step.refuse(failure or ConfigError("no pairs"), owner, travels=travels)
            return
        if plan is None:
            plan = self._new_plan(call, [id(variable) for variable in call.variables])
        slots = self._step.slots
        number = 0 if slots.calls is None else int(copy_of(slots.calls))
        rate = 0.0
        try:
            self._step.load(call, plan, number)
            rate = self._rate_at(self.iterations)
        except Exception as error:  # the same
            self._step.refuse(error, call.owner, travels=call.travels)
            return
        if number < self._step.accumulate - 1:
            self._step.set_calls(number + 1)
            return
        try:
            self._step.combine(call, plan, rate)
            self._step.finish(call, plan, rate)
        finally:
            self._step.set_calls(0)

    def _checked(
        self, pairs: list[Any], reduce: str | None, weight: float | None, *, shards: bool
    ) -> tuple[Call, BucketPlan | None]:
        owner, variables, _, travels, base, shown, names = self._base_of(pairs)
        context = context_of(owner, "apply_gradients")
        op = None if reduce is None else checked_choice("reduce", reduce, ("mean", "sum"))
        is_combined = op is None or context in (CallContext.CROSS, CallContext.MERGE)
        gradients = [
            one if type(one) is np.ndarray or shards else dense_gradient(one, variable)
            for one, variable in pairs
            if one is not None
        ]
        if shards:
            self._check_sharded(variables, is_combined=is_combined, weighted=weight is not None)
        call = Call(
            owner,
            gradients,
            variables,
            travels,
            op or "mean",
            is_combined,
            None if weight is None else checked_number("weight", weight),
            base,
            shown,
            names,
            checked_shards(gradients, variables) if shards else None,
        )
        if weight is not None and (op == "sum" or (is_combined and call.travels)):
            raise ConfigError(
                "weight belongs to the mean over replicas: reduce='mean', inside strategy.run or "
                "outside every scope; gradients that are summed, or used as given, have none"
            )
        return call, self._plans.get(tuple([id(variable) for variable in variables]))

    def _base_of(self, pairs: list[Any]) -> tuple[Any, ...]:
        """Return what does not change from step to step: owner, variables, signature, names."""
        try:
            identities = tuple(
                [id(one) if gradient is not None else -id(one) for gradient, one in pairs]
            )
        except (TypeError, ValueError):
            checked_pairs(pairs)
            raise
        known = self._bases.get(identities)
        if known is None:
            gradients, everything = checked_pairs(pairs)
            owner = checked_variables(everything)
            self._checked_family(owner, everything)
            paired = zip(gradients, everything, strict=True)
            variables = [one for gradient, one in paired if gradient is not None]
            travels = any(not is_replica_local(one) for one in everything)
            settings = (type(self).__name__, *self._settings.items())
            description = describe_variables(settings, variables, everything)
            known = (owner, variables, everything, travels, *description)
            # Cache only after all checks of these variables have passed.
            if not self._step.slots.missing(variables):
                if len(self._bases) >= _PLANS_MAX:
                    self._bases.clear()
                # Keeps the variables, and with them their identities.
                self._bases[identities] = known
        return known

    def _check_sharded(
        self, variables: Sequence[Variable], *, is_combined: bool, weighted: bool
    ) -> None:
        """Raise ConfigError if gradients of shards have no meaning here."""
        if is_combined:
            raise ConfigError(
                "shards=True belongs where gradients are each replica's own: inside strategy.run "
                "or outside every scope, with reduce='mean' or 'sum'"
            )
        if weighted:
            raise ConfigError(
                "weight belongs to a replica, and with shards=True the step may not depend on "
                "replicas: multiply the gradients of a shard by its share"
            )
        if self._step.accumulate > 1:
            raise ConfigError(
                "an optimizer with accumulate takes no shards: make more micro-shards of a step, "
                "each replica may bring many"
            )
        if self._step.transfer.compressor is not None:
            raise ConfigError(
                "with shards=True the step does not depend on the number of replicas, and with "
                "compress= it does: leave out one of them"
            )
        for variable in variables:
            if is_replica_local(variable):
                raise ConfigError(
                    f"variable {variable.name!r} is NONE: each replica steps its own copy by its "
                    "own gradient, which has no shards; step it by another optimizer"
                )

    def _checked_family(self, owner: VariableOwner, variables: Sequence[Variable]) -> None:
        """Raise UsageError unless this optimizer can step these variables with its own."""
        slots = self._step.slots
        if slots.owner is None:
            return
        if owner is not slots.owner:
            raise UsageError(
                "this optimizer has variables of another strategy; make one for each strategy"
            )
        if slots.is_independent != all(is_replica_local(variable) for variable in variables):
            raise UsageError(
                "an optimizer steps either NONE variables alone, or variables that replicas share "
                "(and NONE variables in the same calls): else its count of steps would differ "
                "between replicas. Make another optimizer"
            )

    # -- slots -------------------------------------------------------------------------------------

    def _new_plan(self, call: Call, key: list[int]) -> BucketPlan:
        """Create missing slots, and the flat arrays."""
        if self._step.slots.iterations is None or self._step.slots.missing(call.variables):

            def check() -> None:
                if call.shards is None:
                    for gradient, one in zip(call.gradients, call.variables, strict=True):
                        label = f"gradient of variable {one.name!r}"
                        operand_array(gradient, one.shape, compute_dtype(one.dtype), label)
                self._rate_at(self.iterations)

            is_independent, base = not call.travels, call.base
            self._build(
                call.owner, call.variables, is_independent=is_independent, check=check, base=base
            )
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        step, variables = self._step, call.variables
        result = BucketPlan(call.owner, variables, step.slots, step.transfer.limits)
        self._plans[tuple(key)] = result
        return result

    def _build(
        self,
        owner: VariableOwner,
        variables: list[Variable],
        *,
        is_independent: bool,
        check: Callable[[], None] | None = None,
        base: int = 0,
    ) -> None:
        if not is_independent:
            shared = [one for one in variables if not is_replica_local(one)]
            names = tuple((one.name, one.shape, one.dtype.name) for one in shared)
            shown = ", ".join(repr(one.name) for one in shared[:3])
            shown += ", …" if len(shared) > 3 else ""
            label = f"slots of {type(self).__name__} for {shown}"
            options = names, tuple(self._settings.items()), base
            variable = names_text([one.name for one in shared])
            spec = CollectiveSpec(label, options=options, variable=variable, access="slots")
            meet(owner.communicator, spec, owner.timeout, check)
        elif check is not None:
            check()
        self._step.slots.build(owner, variables, is_independent=is_independent)

    def _rate_at(self, step: int) -> float:
        rate = self._rate
        return checked_number("learning_rate", rate(step)) if callable(rate) else rate


def _checked_limit(options: Options, name: str) -> float | None:
    """Return the option `name`: a positive number, or None."""
    value: Any = options.get(name)
    return None if value is None else checked_number(name, value, open_low=True)
