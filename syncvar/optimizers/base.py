"""The base of all optimizers: `apply_gradients`, from local gradients to one common step."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from syncvar.collectives.reduce_args import check_finite
from syncvar.collectives.sharded_sums import shards_request
from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.migration_hints import MigrationHintsMixin, attribute_hint
from syncvar.core.reduce_ops import quiet
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
    combine_cached,
    combining_request,
    dense_gradient,
    describe_variables,
    strategy_of_pairs,
)
from syncvar.optimizers.remote_step import RemoteStep, remote_optimizer_of
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
from syncvar.runtime.call_record import CallFields, CallLabel
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.variables.assign_all import change_copies, copy_of
from syncvar.variables.policy import CallContext
from syncvar.variables.values import operand_array
from syncvar.variables.variable_owner import context_of, current_owner
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.optimizers.update_rules import Rate
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import RemoteOptimizer, VariableOwner

_STEP_SPREAD = 0x9E3779B97F4A7C15  # odd: all steps below 2**64 give different digests
_DIGEST_MASK = (1 << 64) - 1
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
        name: Part of the slots' names; None means that of the class.
    """

    def __init__(self, learning_rate: Rate, rule: UpdateRule, **options: Unpack[Options]) -> None:
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            from syncvar.core.migration_hints import unexpected_keyword

            raise unexpected_keyword(type(self), unknown, Options.__annotations__)
        self._rate = checked_rate(learning_rate)
        self._rule = rule
        rule.decay = checked_number("weight_decay", options.get("weight_decay", 0.0))
        clip_norm, clip_value = options.get("clip_norm"), options.get("clip_value")
        norm_max = (
            None if clip_norm is None else checked_number("clip_norm", clip_norm, open_low=True)
        )
        value_max = (
            None if clip_value is None else checked_number("clip_value", clip_value, open_low=True)
        )
        self._accumulate = checked_count("accumulate", options.get("accumulate", 1))
        self._nonfinite = checked_choice("nonfinite", options.get("nonfinite", "allow"), _NONFINITE)
        self._clipping = Clipping(norm_max, value_max, skips=self._nonfinite == "skip")
        self._settings = {
            **rule.numbers,
            "weight_decay": rule.decay,
            "clip_norm": norm_max,
            "clip_value": value_max,
            "accumulate": self._accumulate,
            "nonfinite": self._nonfinite,
        }
        self._slots = OptimizerSlots(
            checked_name(options.get("name"), type(self).__name__),
            rule.initials(),
            counts=rule.counts_steps,
            accumulates=self._accumulate > 1,
        )
        self._plans: dict[tuple[int, ...], BucketPlan] = {}
        self._bases: dict[Any, tuple[Any, ...]] = {}
        self._variables_of_step: tuple[int, ...] | None = None
        self._remote = RemoteStep(type(self).__name__, self._settings)
        self._refused: str | None = None  # why this replica rejected an earlier call of this step

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
    def learning_rate(self, given: Rate) -> None:
        """The present learning rate; can be set to a number or a function of the step."""
        self._rate = checked_rate(given)

    @property
    def iterations(self) -> int:
        """Number of steps so far."""
        made = self._slots.iterations
        if made is not None:
            return int(copy_of(made))
        return self._remote.steps or self._slots.restored_iterations

    @property
    def variables(self) -> list[Variable]:
        """Its own variables that exist: iterations and slots, in order of creation."""
        return list(self._slots.tracked.values())

    def tracked(self) -> dict[str, Variable]:
        """Return its own variables that exist, by key.

        The keys are "iterations", "<name of the variable>/<slot>", such as "w/m", and
        "NONE:<name>/<slot>" for NONE variables, whose names are a namespace of their own. A
        checkpoint writes the key of the variable that it saves, instead of its name.
        """
        return dict(self._slots.tracked)

    @property
    def elsewhere(self) -> RemoteStep | None:
        """State for server-side variables; None for local ones. For this package only."""
        return self._remote if self._slots.iterations is None else None

    @property
    def slots(self) -> OptimizerSlots:
        """Its slots, and restored values that wait for them. For this package only."""
        return self._slots

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
            self._slots.missing(chosen)
        except Exception as error:  # raised on the other replicas below
            failure = error
        if failure is not None:
            self._refuse(failure, owner, travels=any(not is_replica_local(one) for one in chosen))
        assert owner is not None
        self._build(owner, chosen, all(is_replica_local(variable) for variable in chosen))

    def __repr__(self) -> str:
        rate = self._rate if callable(self._rate) else f"{self._rate:g}"
        name = type(self).__name__
        return f"<sv.optimizers.{name} learning_rate={rate} iterations={self.iterations}>"

    def __copy__(self) -> Optimizer:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[Any, Any]) -> Optimizer:
        if self._remote.variables:
            raise TypeError(
                f"{self!r} cannot be copied: its slots are on servers, beside their variables. "
                f"Make another one, sv.optimizers.{type(self).__name__}(…)"
            )
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        own = {
            "_slots": self._slots.copied(memo),
            "_plans": {},
            "_bases": {},
            "_variables_of_step": None,
        }
        for name, value in self.__dict__.items():
            made.__dict__[name] = own[name] if name in own else copy.deepcopy(value, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._slots.stepped or self._remote.variables:
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
            outside every
        scope gradients are each replica's own. In cross context (and inside merge_call) they are
        used as given and must be the same everywhere. A digest checks that, unless the strategy has
        check_cross_writes=False. NONE variables are stepped by their own replica's gradient,
        without a message.

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
            The first call creates the slots, which takes a few calls for each.
        Order: as `all_reduce`; with the strategy's reproducible=True by the tree over replicas.

        Example:
            >>> import syncvar as sv
            >>> w = sv.Variable([1.0, 2.0])
            >>> sv.optimizers.SGD(0.5).apply_gradients([([2.0, 4.0], w)])
            >>> w.numpy()
            array([0., 0.], dtype=float32)
        """
        pairs: Any = grads_and_vars
        made: Call | None = None
        failure: Exception | None = None
        plan: BucketPlan | None = None
        stepper: RemoteOptimizer | None = None
        try:
            pairs = listed(grads_and_vars)
            stepper = remote_optimizer_of(pairs)
            if stepper is None:
                made, plan = self._checked(pairs, reduce, weight, shards)
        except Exception as error:  # raised on the other replicas below
            failure = error
        if stepper is not None:
            rate = self._rate_at(self.iterations)
            self._remote.step(stepper, pairs, rate, reduce, is_plain=weight is None and not shards)
            return
        if made is None:
            owner, travels = strategy_of_pairs(pairs)
            if self._slots.owner is not None:
                owner, travels = self._slots.owner, not self._slots.apart
            self._refuse(failure or ConfigError("no pairs"), owner, travels=travels)
            return
        if plan is None:
            plan = self._new_plan(made, [id(variable) for variable in made.variables])
        slots = self._slots
        number = 0 if slots.calls is None else int(copy_of(slots.calls))
        rate = 0.0
        try:
            self._load(made, plan, number)
            rate = self._rate_at(self.iterations)
        except Exception as error:  # the same
            self._refuse(error, made.owner, travels=made.travels)
            return
        if number < self._accumulate - 1:
            self._set_calls(number + 1)
            return
        try:
            self._combine(made, plan, rate)
            self._finish(made, plan, rate)
        finally:
            self._set_calls(0)

    def _checked(
        self, pairs: list[Any], reduce: str | None, weight: float | None, shards: bool
    ) -> tuple[Call, BucketPlan | None]:
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
            variables = [
                one
                for gradient, one in zip(gradients, everything, strict=True)
                if gradient is not None
            ]
            travels = any(not is_replica_local(one) for one in everything)
            settings = (type(self).__name__, *self._settings.items())
            known = (
                owner,
                variables,
                everything,
                travels,
                *describe_variables(settings, variables, everything),
            )
            # Cache only after all checks of these variables have passed.
            if not self._slots.missing(variables):
                if len(self._bases) >= _PLANS_MAX:
                    self._bases.clear()
                self._bases[identities] = (
                    known  # keeps the variables, and with them their identities
                )
        owner, variables, _, travels, base, shown = known
        context = context_of(owner, "apply_gradients")
        op = None if reduce is None else checked_choice("reduce", reduce, ("mean", "sum"))
        is_given = op is None or context in (CallContext.CROSS, CallContext.MERGE)
        gradients = [
            one if type(one) is np.ndarray or shards else dense_gradient(one, variable)
            for one, variable in pairs
            if one is not None
        ]
        if shards:
            self._check_sharded(variables, is_given=is_given, weighted=weight is not None)
        call = Call(
            owner,
            gradients,
            variables,
            travels,
            op or "mean",
            is_given,
            None if weight is None else checked_number("weight", weight),
            base,
            shown,
            checked_shards(gradients, variables) if shards else None,
        )
        if weight is not None and (op == "sum" or (is_given and call.travels)):
            raise ConfigError(
                "weight belongs to the mean over replicas: reduce='mean', inside strategy.run or "
                "outside every scope; gradients that are summed, or used as given, have none"
            )
        return call, self._plans.get(tuple([id(variable) for variable in variables]))

    def _check_sharded(
        self, variables: Sequence[Variable], *, is_given: bool, weighted: bool
    ) -> None:
        """Raise ConfigError if gradients of shards have no meaning here."""
        if is_given:
            raise ConfigError(
                "shards=True belongs where gradients are each replica's own: inside strategy.run "
                "or outside every scope, with reduce='mean' or 'sum'"
            )
        if weighted:
            raise ConfigError(
                "weight belongs to a replica, and with shards=True the step may not depend on "
                "replicas: multiply the gradients of a shard by its share"
            )
        if self._accumulate > 1:
            raise ConfigError(
                "an optimizer with accumulate takes no shards: make more micro-shards of a step, "
                "each replica may bring many"
            )
        for variable in variables:
            if is_replica_local(variable):
                raise ConfigError(
                    f"variable {variable.name!r} is NONE: each replica steps its own copy by its "
                    "own gradient, which has no shards; step it by another optimizer"
                )

    def _checked_family(self, owner: VariableOwner, variables: Sequence[Variable]) -> None:
        """Raise UsageError unless this optimizer can step these variables with its own."""
        slots = self._slots
        if slots.owner is None:
            return
        if owner is not slots.owner:
            raise UsageError(
                "this optimizer has variables of another strategy; make one for each strategy"
            )
        if slots.apart != all(is_replica_local(variable) for variable in variables):
            raise UsageError(
                "an optimizer steps either NONE variables alone, or variables that replicas share "
                "(and NONE variables in the same calls): else its count of steps would differ "
                "between replicas. Make another optimizer"
            )

    def _refuse(self, failure: Exception, owner: VariableOwner | None, *, travels: bool) -> None:
        """Raise the failure of this replica's call, and inform the others if they take part in it.

        A rejected call counts: if several calls make one step, the replicas learn of it in the last
            one.
        """
        slots = self._slots
        if self._accumulate > 1 and slots.calls is not None:
            number = int(copy_of(slots.calls))
            if number < self._accumulate - 1:
                self._refused = self._refused or f"{type(failure).__name__}: {failure}"
                self._set_calls(number + 1)
                raise failure
            self._set_calls(0)
        self._refused = None
        if travels:

            def check() -> CollectiveSpec:
                raise failure

            (owner or current_owner()).communicator.perform("apply_gradients", check)
        raise failure

    def _set_calls(self, number: int) -> None:
        if self._slots.calls is not None:
            change_copies([self._slots.calls], _fill, number)

    # -- slots -------------------------------------------------------------------------------------

    def _new_plan(self, call: Call, key: list[int]) -> BucketPlan:
        """Create missing slots, and the flat arrays."""
        if self._slots.iterations is None or self._slots.missing(call.variables):

            def check() -> None:
                if call.shards is None:
                    for gradient, variable in zip(call.gradients, call.variables, strict=True):
                        what = f"gradient of variable {variable.name!r}"
                        operand_array(gradient, variable.shape, compute_dtype(variable.dtype), what)
                self._rate_at(self.iterations)

            self._build(call.owner, call.variables, not call.travels, check, call.base)
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        made = self._plans[tuple(key)] = BucketPlan(call.owner, call.variables, self._slots)
        return made

    def _build(
        self,
        owner: VariableOwner,
        variables: list[Variable],
        apart: bool,
        check: Callable[[], None] | None = None,
        base: int = 0,
    ) -> None:
        if not apart:
            names = tuple(
                (one.name, one.shape, one.dtype.name)
                for one in variables
                if not is_replica_local(one)
            )
            shown = ", ".join(repr(name) for name, *_ in names[:3]) + (
                ", …" if len(names) > 3 else ""
            )
            what = f"slots of {type(self).__name__} for {shown}"
            parts = (what, names, tuple(self._settings.items()), base)
            meet(owner.communicator, what, parts, owner.timeout, check)
        elif check is not None:
            check()
        self._slots.build(owner, variables, apart=apart)

    # -- gradients ---------------------------------------------------------------------------------

    def _rate_at(self, step: int) -> float:
        rate = self._rate
        return checked_number("learning_rate", rate(step)) if callable(rate) else rate

    def _load(self, call: Call, plan: BucketPlan, number: int) -> None:
        """Copy the gradients to the flat arrays, or accumulate them."""
        weight, calls = call.weight, self._accumulate
        if call.shards is not None:
            if self._nonfinite == "error":
                for arrays in call.shards.values():
                    for variable, array in zip(call.variables, arrays, strict=True):
                        _refuse_nonfinite(variable, is_finite=bool(np.isfinite(array).all()))
            return
        if self._slots.weight is not None:
            if number and self._variables_of_step not in (None, plan.key):
                raise ConfigError(
                    "the calls of one step must name the same variables, with None for the same "
                    "gradients; pass zeros where a variable has no gradient in one of them"
                )
            self._variables_of_step = plan.key
            if number and (weight is not None) is not (float(copy_of(self._slots.weight)) >= 0):
                raise ConfigError(
                    "the calls of one step must all have a weight, or none of them; pass weight "
                    "in each"
                )
            self._spread(call, plan, number)
            change_copies([self._slots.weight], _add, -1.0 if weight is None else weight, number)
        mean = call.op == "mean" and weight is None
        for part, gradient in zip(plan.parts, call.gradients, strict=True):
            check_finite(gradient, f"the step, as the gradient of variable {part.variable.name!r}")
            factor = None if calls == 1 and part.is_replica_local else weight
            part.load(gradient, factor, number, calls, mean=mean)
        if self._nonfinite == "error":
            for bucket in (*plan.shared, *plan.apart):
                bad = bucket.first_nonfinite()
                if bad is not None:
                    _refuse_nonfinite(bad.variable, is_finite=False)

    def _spread(self, call: Call, plan: BucketPlan, number: int) -> None:
        """Rescale sums that another number of replicas made before a checkpoint."""
        assert self._slots.replicas is not None
        assert self._slots.weight is not None
        size, before = (
            float(len(call.owner.communicator.whole)),
            float(copy_of(self._slots.replicas)),
        )
        if before == size:
            return
        if (
            number
            and before
            and call.travels
            and not call.is_given
            and (call.op == "sum" or call.weight is not None)
        ):
            summed = [
                part.accumulator
                for part in plan.parts
                if part.accumulator is not None and not part.is_replica_local
            ]
            for one in (*summed, self._slots.weight):
                change_copies([one], _scale, before / size)
        change_copies([self._slots.replicas], _fill, size)

    def _weight_here(self, call: Call) -> float:
        """Return the weight of this replica's gradients in all calls of the step."""
        assert call.weight is not None
        return call.weight if self._slots.weight is None else float(copy_of(self._slots.weight))

    def _combine(self, call: Call, plan: BucketPlan, rate: float) -> None:
        """Make the one collective that combines or compares the gradients of all replicas."""
        owner = call.owner
        refused, self._refused = self._refused, None
        if not call.travels:
            if refused is not None:
                raise ConfigError(
                    f"an earlier call of this step failed, so the step is left out: {refused}"
                )
            return
        registry = owner.registry
        if refused is not None or registry is None or registry.is_free:
            self._bring(call, plan, rate, refused)
            return
        tally = state_of((plan.shared or plan.apart)[0].parts[0].variable).tally
        if registry.is_due(tally):
            registry.before_write(
                [state_of(variable) for part in plan.parts for variable in part.changed]
            )
        self._bring(call, plan, rate, None)
        registry.count(tally)

    def _bring(self, call: Call, plan: BucketPlan, rate: float, refused: str | None) -> None:
        owner = call.owner
        weighted = call.weight is not None
        if weighted and plan.shared:
            plan.shared[0].whole[-1] = self._weight_here(call)
        communicator = owner.communicator
        if communicator.size == 1 and refused is None and call.shards is None:
            return
        step = self.iterations
        how = "as given" if call.is_given else call.op + (", weighted" if weighted else "")
        how += "" if call.shards is None else ", of shards"
        what = CallLabel(
            f"apply_gradients({type(self).__name__}, {how}, learning_rate={rate!r}, step {step}) "
            f"of {call.shown}",
            CallFields("apply_gradients", op=call.op),
        )
        if call.is_given and not owner.check_cross_writes and refused is None:
            return
        # The step is not among the parts: fingerprints are remembered, and these would push all
        # others out.
        digest = (fingerprint("step", call.base, how, rate) + step * _STEP_SPREAD) & _DIGEST_MASK
        if call.shards is not None:
            request = partial(
                shards_request, communicator, call.shards, call.op, name=what, digest=digest
            )
            totals = communicator.perform("apply_gradients", request, owner.timeout)
            for part, total in zip(plan.parts, totals, strict=True):
                part.gradient[...] = total
            return
        op = "" if call.is_given else "sum" if weighted else call.op

        def check() -> CollectiveSpec:
            if refused is not None:
                raise ConfigError(
                    f"an earlier call of this step failed, so the step is left out: {refused}"
                )
            return combining_request(owner, plan, op, what, digest, weighted=weighted)

        if refused is not None or not combine_cached(
            owner, plan, op, what, digest, weighted=weighted
        ):
            communicator.perform("apply_gradients", check, owner.timeout)

    def _finish(self, call: Call, plan: BucketPlan, rate: float) -> None:
        """Scale and clip the combined gradients, and make the step."""
        with quiet():
            shared = bool(plan.shared) and self._clipping.apply(
                plan.shared,
                plan,
                None if call.weight is None else float(plan.shared[0].whole[-1]),
                divide=True,
            )
            apart = bool(plan.apart) and self._clipping.apply(
                plan.apart,
                plan,
                None if call.weight is None else self._weight_here(call),
                divide=self._accumulate > 1,
            )
            step = self.iterations
            known: dict[int, tuple[float, ...]] = {}
            for bucket in (*(plan.shared if shared else ()), *(plan.apart if apart else ())):
                for part in bucket.parts:
                    change_copies(part.changed, self._rule.change, part, plan, rate, step, known)
        # Replicas have agreed on the step of what they share; a step of NONE variables alone is
        # each replica's own.
        if shared if plan.shared else apart or call.travels:
            assert self._slots.iterations is not None
            change_copies([self._slots.iterations], _fill, step + 1)


def _refuse_nonfinite(variable: Variable, *, is_finite: bool) -> None:
    """Raise ConfigError about a gradient that is not finite."""
    if not is_finite:
        raise ConfigError(
            f"gradient of variable {variable.name!r}: it holds an infinity or NaN, and the "
            "optimizer has nonfinite='error'. Use 'skip' to leave such steps out, or clip"
        )


def _fill(arrays: list[NDArray[Any]], number: float) -> None:
    arrays[0][...] = number


def _scale(arrays: list[NDArray[Any]], factor: float) -> None:
    np.multiply(arrays[0], factor, out=arrays[0])


def _add(arrays: list[NDArray[Any]], number: float, call: int) -> None:
    arrays[0][...] = number if call == 0 else arrays[0] + number
