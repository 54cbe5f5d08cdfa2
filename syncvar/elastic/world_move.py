"""The move of strategies, variables and optimizers to the world that this process has joined.

They stay the same Python objects, and each copy keeps its value. All members move the same objects
in the same order, because the order numbers the strategies and names the variables. A strategy
needs no message. Optimizers keep their slots as values, and the next step makes the slots again;
so members that have made steps, and newcomers that have not, make them together.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import current
from syncvar.checkpoint.optimizer_state import SlotLeaf
from syncvar.checkpoint.trackables import VariableLeaf
from syncvar.core.errors import UsageError
from syncvar.strategies.base import strategies_in_order
from syncvar.variables.policy import VariableSynchronization
from syncvar.variables.variable import move_variable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.checkpoint.checkpoint import CheckpointCore
    from syncvar.checkpoint.trackables import Leaf
    from syncvar.variables.variable import Variable


class WorldMove:
    """What moves together: the strategies of a program's start, and the objects of a state.

    Args:
        core: The objects of the state.
        home: The world in which the program has made its strategies, before it became elastic.
    """

    def __init__(self, core: CheckpointCore, home: ProcessContext) -> None:
        self._core = core
        # All ranks run the same program up to here, so these are the same everywhere, if dropped
        # strategies are gone. They refer to themselves, so only the collector frees them.
        gc.collect()
        self._first = [one for one in strategies_in_order(home) if one.spans_world]

    def run(self, leaves: Iterable[Leaf]) -> None:
        """Move all objects to the current world; again, if an earlier move was interrupted."""
        variables = list({id(one): one for one in variables_by_key(leaves).values()}.values())
        needed = [one.strategy for one in (*variables, *self._core.iterators())]
        for strategy in dict.fromkeys([*self._first, *needed]):
            _require_movable(strategy)
            strategy.move_to_world()
        for variable in variables:
            _require_world(variable)
        for optimizer in self._core.optimizers():
            optimizer.leave_world()
        for variable in variables:
            move_variable(variable)


def variables_by_key(leaves: Iterable[Leaf]) -> dict[str, Variable]:
    """Return the variables among leaves, without slots of optimizers."""
    return {
        leaf.key: leaf.variable
        for leaf in leaves
        if isinstance(leaf, VariableLeaf) and not isinstance(leaf, SlotLeaf)
    }


def _require_world(variable: Variable) -> None:
    """Raise UsageError if hosts have values of their own, of which a newcomer may get the wrong."""
    is_local = variable.synchronization is VariableSynchronization.NONE
    replicas, world = variable.strategy.communicator, current().world
    if not is_local and replicas.size != world.size:
        raise UsageError(
            f"variable {variable.name!r} has replicas on {replicas.size} of {world.size} ranks "
            "(MirroredStrategy spans those of one host), and a state is the same on all ranks. "
            "Make the variable under sv.MultiWorkerMirroredStrategy()"
        )


def _require_movable(strategy: Any) -> None:
    if not hasattr(strategy, "move_to_world"):
        raise UsageError(
            f"{strategy!r} cannot move to a job with other members: make it, and its variables, "
            "inside the function of sv.elastic.run"
        )
