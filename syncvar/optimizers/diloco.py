"""DiLoCo: replicas train alone for some steps; an outer optimizer applies their mean change."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.broadcast import BroadcastCall
from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import quiet
from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.builtin_optimizers import Nesterov
from syncvar.optimizers.gradient_buckets import (
    BucketPlan,
    checked_pairs,
    checked_variables,
)
from syncvar.optimizers.gradient_call import (
    Call,
    combine_persistent,
    combining_call,
    strategy_of_pairs,
)
from syncvar.optimizers.outer_slots import (
    ANCHOR,
    INNER_STEPS,
    REPLICAS,
    RUNNING,
    SENT,
    SENT_AT,
    Fragment,
    OuterSlots,
    divided,
)
from syncvar.optimizers.slots import is_replica_local
from syncvar.optimizers.update_rules import UpdateRule, checked_count, checked_name, is_half
from syncvar.runtime.collective_spec import CollectiveSpec, names_text
from syncvar.variables.grouped_writes import change_copies, copy_of
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.optimizers.update_rules import Rate
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import VariableOwner

_START, _FIRST = "slots of DiLoCo", "first weights of DiLoCo"


class DiLoCo(Optimizer):
    """Train alone for `steps` steps, then apply the mean change of all replicas.

    The weights are NONE variables: each replica steps its own by the inner optimizer, which sends
    nothing. Beside them all replicas keep the same shared weights, at first those of replica 0.
    After every `steps` inner steps each replica sends its change = shared - own. The outer
    optimizer steps the shared weights, with the mean change as their gradient. Each replica
    continues with the shared weights.

    With `delay` a replica goes on with its own weights while the changes travel. The mean arrives
    after `delay` more inner steps. The outer optimizer then steps the shared weights, and each
    replica takes own = shared + (own - sent), where `sent` are its weights when it sent the change.
    So every inner step counts once, and a replica waits only if the mean is late.

    With `fragments` the variables are divided, in their order, into fragments of about equal bytes.
    Fragment i of n is sent after inner steps whose number is (i + 1) * steps // n, modulo `steps`.

    Call `finish()` after the last step: then all replicas have the same weights. Between outer
    steps `tracked()["NONE:w/outer_anchor"]` is the variable with the shared weights of w.

    Args:
        inner: Optimizer of the inner steps, such as AdamW. `learning_rate` and `iterations` are its
            own.
        outer: Optimizer of the shared weights, with any options except accumulate, compress,
            bucket_bytes and nonfinite="error". None means Nesterov(0.7, momentum=0.9), as in the
            paper. A function as its learning rate counts the outer steps of all fragments. With
            nonfinite="skip" a change that is not finite is dropped, and all replicas take the
            shared weights.
        steps: Number of inner steps between two outer steps, the same on every replica.
        delay: Number of inner steps that hide the exchange, 0 to `steps`; 0 waits for it.
        fragments: Number of fragments, at most `steps` and the number of variables.
        name: Part of the slots' names; None means "DiLoCo".

    Raises:
        ConfigError: A wrong argument, or an outer optimizer that has made steps.

    Cost: for each `steps` inner steps one all-reduce of each fragment, of 4 bytes for a float32 or
        half element and 8 for a float64. Memory beside the inner optimizer: the shared weights, the
        outer slots, a copy of the weights if delay > 0, and a copy of each fragment on its way.
    Order: as `all_reduce` with "mean"; shared weights have the same bytes on every replica.
    Source: Douillard et al. 2023, arXiv 2311.08105. Delay and fragments: Douillard et al. 2025,
        arXiv 2501.18512, which mixes own and shared weights instead.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable([4.0, 8.0], synchronization="NONE")
        >>> outer = sv.optimizers.SGD(0.5)
        >>> optimizer = sv.optimizers.DiLoCo(sv.optimizers.SGD(1.0), outer, steps=2)
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([([1.0, 2.0], w)])
        >>> w.numpy()
        array([3., 6.], dtype=float32)
    """

    def __init__(
        self,
        inner: Optimizer,
        outer: Optimizer | None = None,
        steps: int = 100,
        *,
        delay: int = 0,
        fragments: int = 1,
        name: str | None = None,
    ) -> None:
        super().__init__(0.0, UpdateRule())
        outer = Nesterov(0.7, momentum=0.9) if outer is None else outer
        _check_optimizers(inner, outer)
        self._inner, self._outer = inner, outer
        self._steps = checked_count("steps", steps)
        self._delay = _checked_part("delay", delay, 0, self._steps)
        self._count = _checked_part("fragments", fragments, 1, self._steps)
        self._step = outer.gradient_step
        name = checked_name(name, "DiLoCo")
        self._step.slots = OuterSlots(
            name, self._step.rule, inner, self._count, keeps_sent=self._delay > 0
        )

    @property
    def learning_rate(self) -> float:
        """The present learning rate of the inner optimizer; can be set."""
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        """The present learning rate of the inner optimizer; can be set."""
        self._inner.learning_rate = value

    @property
    def iterations(self) -> int:
        """Number of inner steps of this replica so far."""
        return self._inner.iterations

    @property
    def remote_step(self) -> None:
        """None: it steps no variables on servers. For this package only."""
        return

    @property
    def _own(self) -> OuterSlots:
        assert isinstance(self._step.slots, OuterSlots)
        return self._step.slots

    @property
    def _owner(self) -> VariableOwner:
        assert self._own.owner is not None
        return self._own.owner

    def leave_world(self) -> None:
        """Keep its state for the next step, in another world. For this package only."""
        super().leave_world()
        self._inner.leave_world()

    def __repr__(self) -> str:
        options = f"steps={self._steps} delay={self._delay} fragments={self._count}"
        return f"<sv.optimizers.DiLoCo inner={self._inner!r} outer={self._outer!r} {options}>"

    # -- steps -------------------------------------------------------------------------------------

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the slots now rather than at the first step; as `Optimizer.build`. Collective.

        All replicas then have the weights of replica 0.
        """
        self._prepare([(0.0, one) for one in variables])
        self._follow_changes()

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        *,
        reduce: str | None = "mean",
        weight: float | None = None,
        shards: bool = False,
    ) -> None:
        """Make one inner step with this replica's own gradients, and the outer steps that are due.

        It is collective if it is the first call or the first after a restore, or if an outer step
        begins or ends. Other calls send nothing.

        Args:
            grads_and_vars: As `Optimizer.apply_gradients`. The first call names all variables, in
                the same order on every replica; others may leave some out.
            reduce: How the inner optimizer combines the calls of one step (accumulate).
            weight: Weight of this call among them.
            shards: Not possible.

        Raises:
            ConfigError: A wrong argument here, and no step here. If it is a variable of the first
                call, the other replicas raise MismatchError.
            MismatchError: The replicas have other variables, settings or outer learning rates, or
                have made other numbers of inner steps. The shared weights do not change.

        Example:
            >>> import syncvar as sv
            >>> w = sv.Variable([1.0, 2.0], synchronization="NONE")
            >>> optimizer = sv.optimizers.DiLoCo(sv.optimizers.SGD(0.5), steps=8)
            >>> optimizer.apply_gradients([([2.0, 4.0], w)])
            >>> w.numpy()
            array([0., 0.], dtype=float32)
        """
        pairs: Any = grads_and_vars
        if not isinstance(pairs, list) and isinstance(pairs, Iterable):
            pairs = list(pairs)
        own = self._own
        if not own.fragments:
            self._prepare(pairs)
        for variable in checked_pairs(pairs)[1]:
            if id(variable) not in own.known:
                raise ConfigError(
                    f"variable {variable.name!r} was not in the first call of this optimizer, "
                    "which divides all variables into fragments: name it there, or in build"
                )
        self._follow_changes()
        self._inner.apply_gradients(pairs, reduce=reduce, weight=weight, shards=shards)
        if self._inner.slots.is_in_step:
            return
        number = int(own.numbers(INNER_STEPS)) + 1
        own.set_number(INNER_STEPS, number)
        for one in own.fragments:
            if one.plan is not None and number - own.numbers(SENT_AT)[one.number] >= self._delay:
                self._receive(one)
        for one in own.fragments:
            if number % self._steps == one.offset:
                self._send(one, is_async=self._delay > 0)

    def finish(self) -> None:
        """End all outer steps, so that the replicas have the same weights. Collective.

        Changes on their way arrive now. One more outer step follows if there are inner steps since
        then. All replicas take the shared weights, and the next inner step counts as the first.
        Before the first step this does nothing.

        Raises:
            ConfigError: A checkpoint was restored, and neither a step nor `build` followed.
            MismatchError: The replicas have made different numbers of inner steps.

        Example:
            >>> import syncvar as sv
            >>> w = sv.Variable([4.0, 8.0], synchronization="NONE")
            >>> outer = sv.optimizers.SGD(0.5)
            >>> optimizer = sv.optimizers.DiLoCo(sv.optimizers.SGD(1.0), outer, steps=100)
            >>> optimizer.apply_gradients([([1.0, 2.0], w)])
            >>> optimizer.finish()
            >>> w.numpy()
            array([3.5, 7. ], dtype=float32)
        """
        own = self._own
        if not own.fragments:
            if own.waiting:
                raise ConfigError(
                    "a checkpoint has restored state of weights that this optimizer has not seen "
                    "yet: call optimizer.build([v, …]) before finish"
                )
            return
        self._follow_changes()
        number = int(own.numbers(INNER_STEPS))
        spec = CollectiveSpec("finish", options=(number,), text=_finish_label)
        meet(self._owner.communicator, spec, self._owner.timeout)
        for fragment in own.fragments:
            if fragment.plan is not None:
                self._receive(fragment)
        for fragment in own.fragments:
            if number > own.numbers(SENT_AT)[fragment.number]:
                self._send(fragment, is_async=False)
        self._take_shared()

    # -- slots and weights -------------------------------------------------------------------------

    def _prepare(self, pairs: Any) -> None:
        """Create the slots, or raise the failure of this replica on all. Collective."""
        spec, own = CollectiveSpec(_START), self._own
        chosen: list[Variable] = []
        failure: Exception | None = None
        try:
            chosen = checked_pairs(pairs)[1]
            spec = self._describe(chosen)
        except Exception as error:  # raised on the other replicas below
            failure = error
        owner, _ = strategy_of_pairs(pairs)
        meet(owner.communicator, spec, owner.timeout, partial(_raise_failure, failure))
        self._inner.build(chosen)
        own.build(owner, chosen, is_independent=False)
        own.known = {id(one): one for one in chosen}
        offsets = [(place + 1) * self._steps // self._count for place in range(self._count)]
        own.fragments = [
            Fragment(place, offset % self._steps, part)
            for place, (offset, part) in enumerate(
                zip(offsets, divided(chosen, self._count), strict=True)
            )
        ]

    def _describe(self, variables: list[Variable]) -> CollectiveSpec:
        """Check the variables, and return the description of a start with them."""
        for one in variables:
            if not is_replica_local(one):
                raise ConfigError(
                    f"variable {one.name!r} is {one.synchronization.name}, and DiLoCo steps each "
                    "replica's own weights: make it with synchronization='NONE'"
                )
        if self._count > len(variables):
            raise ConfigError(
                f"fragments={self._count}, but there are {len(variables)} variables, and a "
                "variable is not divided: choose fewer fragments"
            )
        checked_variables(variables)
        self._inner.slots.missing(variables)
        kinds = tuple((one.name, one.shape, one.dtype.name) for one in variables)
        rule = type(self._outer).__name__, *self._step.rule.numbers.items(), self._step.rule.decay
        shown = f"steps={self._steps}", f"delay={self._delay}", f"fragments={self._count}"
        options = (kinds, rule, tuple(self._step.clipping), *shown)
        names = names_text([one.name for one in variables])
        return CollectiveSpec(_START, options=options, shown=shown, variable=names, access="slots")

    def _follow_changes(self) -> None:
        """Take over what a start or a restore has changed. Collective then; else does nothing."""
        own, communicator = self._own, self._owner.communicator
        if not own.has_changed:
            return
        for fragment in own.fragments:
            if fragment.work is not None:  # of a state that is gone
                fragment.work.wait()
            fragment.plan = fragment.work = None
        fresh = own.without_anchor()
        if fresh:
            values = [np.array(self._weights(one)) for one in fresh]
            call = partial(BroadcastCall, communicator, values, name=_FIRST)
            values = communicator.perform(_FIRST, call, self._owner.timeout)
            for variable, value in zip(fresh, values, strict=True):
                change_copies([own[variable, ANCHOR]], _store, value)
                self._set_weights(variable, value)
        if int(own.numbers(REPLICAS)) != communicator.size:
            if own.numbers(REPLICAS):  # other replicas made the inner steps that were saved
                self._take_shared()
            own.set_number(REPLICAS, communicator.size)
        for fragment in own.fragments:
            if own.numbers(RUNNING)[fragment.number]:
                self._exchange(fragment, is_async=True)
        own.has_changed = False

    def _take_shared(self) -> None:
        """Let all replicas continue with the shared weights, as after an outer step."""
        for variable in self._own.known.values():
            self._set_weights(variable, copy_of(self._own[variable, ANCHOR]))
        for name in (INNER_STEPS, SENT_AT, RUNNING):
            self._own.set_number(name, 0)

    def _weights(self, variable: Variable) -> NDArray[Any]:
        """Return this replica's weights, those of a half type as float32; not to keep."""
        own = copy_of(variable)
        state = self._inner.slots.state(variable)
        if state is None or not is_half(variable.dtype):
            return own
        master = copy_of(state.changed[1])  # lacks what the program has written since the last step
        return np.where(master.astype(own.dtype) == own, master, own.astype(master.dtype))

    def _set_weights(self, variable: Variable, value: NDArray[Any]) -> None:
        state = self._inner.slots.state(variable)
        masters = state.changed[1:2] if state and is_half(variable.dtype) else ()
        for one in (variable, *masters):
            change_copies([one], _store, value)

    # -- outer steps -------------------------------------------------------------------------------

    def _send(self, fragment: Fragment, *, is_async: bool) -> None:
        """Begin an outer step of a fragment; without `is_async` end it too."""
        own = self._own
        for variable in fragment.variables if self._delay else ():
            change_copies([own[variable, SENT]], _store, self._weights(variable))
        self._exchange(fragment, is_async=is_async)
        own.set_number(SENT_AT, int(own.numbers(INNER_STEPS)), fragment.number)
        if is_async:
            own.set_number(RUNNING, 1, fragment.number)
        else:
            self._receive(fragment)

    def _exchange(self, fragment: Fragment, *, is_async: bool) -> None:
        """Combine the changes of all replicas, or begin to."""
        own, owner = self._own, self._owner
        plan = BucketPlan(owner, [own[one, ANCHOR] for one in fragment.variables], own)
        with quiet():
            for part, one in zip(plan.parts, fragment.variables, strict=True):
                mine = copy_of(own[one, SENT]) if self._delay else self._weights(one)
                np.subtract(copy_of(part.variable), mine, out=part.gradient)
        spec = CollectiveSpec(
            "outer_step",
            "mean",
            options=(fragment.number, int(own.numbers(INNER_STEPS)), self._outer.learning_rate),
            variable=fragment.names,
            step=self._outer.iterations,
            text=_outer_label,
        )
        if is_async or not combine_persistent(owner, plan, "mean", spec, weighted=False):
            call = partial(combining_call, owner, plan, "mean", spec, weighted=False)
            found = owner.communicator.perform(spec, call, owner.timeout, async_op=is_async)
            fragment.work = found if is_async else None
        fragment.plan = plan

    def _receive(self, fragment: Fragment) -> None:
        """Take the mean change of a fragment, and make its outer step."""
        own, owner, plan, work = self._own, self._owner, fragment.plan, fragment.work
        fragment.plan = fragment.work = None
        own.set_number(RUNNING, 0, fragment.number)
        assert plan is not None
        if work is not None:
            work.wait()
        tally = state_of(plan.parts[0].variable).tally
        registry = None if owner.registry is None or owner.registry.is_free else owner.registry
        if registry is not None and registry.is_due(tally):
            registry.before_write([state_of(one) for part in plan.parts for one in part.changed])
        before, names = self._outer.iterations, fragment.names
        whole: Any = {"travels": True, "is_combined": False, "weight": None, "base": 0}
        call = Call(owner, [], [], op="mean", shown=names, names=names, **whole)
        self._step.finish(call, plan, self._outer.learning_rate)
        if registry is not None:
            registry.count(tally)
        has_stepped = self._outer.iterations > before
        is_since = int(own.numbers(INNER_STEPS)) > own.numbers(SENT_AT)[fragment.number]
        for variable in fragment.variables:
            value = np.array(copy_of(own[variable, ANCHOR]))
            if has_stepped and is_since:
                with quiet():
                    value += self._weights(variable) - copy_of(own[variable, SENT])
            self._set_weights(variable, value)


def _check_optimizers(inner: Any, outer: Any) -> None:
    """Raise ConfigError unless these can be the two optimizers."""
    for label, one in (("inner", inner), ("outer", outer)):
        if not isinstance(one, Optimizer) or isinstance(one, DiLoCo):
            raise ConfigError(
                f"{label} must be an optimizer such as sv.optimizers.AdamW(1e-3), not {one!r:.80}"
            )
    step = outer.gradient_step
    is_used = isinstance(step.slots, OuterSlots) or step.slots.stepped or outer.iterations
    if outer is inner or is_used:
        raise ConfigError(f"outer={outer!r:.80} is in use: make another optimizer for DiLoCo")
    if step.accumulate > 1 or step.is_error or any(step.transfer):
        raise ConfigError(
            "the outer optimizer takes one exact change for each step: leave out its accumulate, "
            "its compress and bucket_bytes, and nonfinite='error' ('skip' drops a change that is "
            "not finite)"
        )


def _checked_part(name: str, value: Any, low: int, steps: int) -> int:
    """Return an integer from `low` to the number of inner steps between two outer steps."""
    if isinstance(value, int | np.integer) and value is not True and low <= value <= steps:
        return int(value)
    raise ConfigError(f"{name} must be an integer from {low} to steps={steps}, not {value!r:.80}")


def _raise_failure(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _store(arrays: list[NDArray[Any]], value: NDArray[Any]) -> None:
    arrays[0][...] = value


def _outer_label(spec: CollectiveSpec) -> str:
    fragment, number, rate = spec.options
    where = f"fragment {fragment}, learning_rate={rate!r}"
    return f"outer step {spec.step} after {number} inner steps ({where}) of {spec.variable}"


def _finish_label(spec: CollectiveSpec) -> str:
    return f"finish of DiLoCo after {spec.options[0]} inner steps"
