"""`sv.elastic.State`: the objects of an elastic job, and their commits in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.checkpoint.checkpoint import CheckpointCore, NamedObjects, core_of
from syncvar.checkpoint.manager import CheckpointManager
from syncvar.core.errors import ConfigError
from syncvar.elastic.held_objects import HeldObjects

if TYPE_CHECKING:
    from collections.abc import Callable


class State(NamedObjects):
    """Named objects that the members of an elastic job commit in memory, and restore together.

    A state accepts what `sv.Checkpoint` accepts: variables, optimizers, iterators, generators,
    objects with `state_dict()` and `load_state_dict(state)`, checkpoints, and plain data. As there,
    `state.name` is the object, and `state.step += 1` changes plain data.

    `commit()` marks a point of the program. When the members of the job change, the objects move to
    the new members as they are, the same Python objects. All members then have the values of the
    last commit; newcomers take them from a member. ON_WRITE variables and optimizers have the same
    value everywhere; modules begin with the weights of rank 0. The sum of an ON_READ variable is
    split again, exactly. NONE variables, and plain data that differs between ranks, such as
    generators, stay those of each rank.

    Args:
        checkpoint: A manager whose latest checkpoint serves if no member has the state any more.
            Its `sv.Checkpoint` and the state then hold the same objects, so
            `manager.save(state.step)` saves the state.
        objects: Objects by name.

    Raises:
        ConfigError: An object that cannot be held, or the name of a method.

    Example:
        >>> import syncvar as sv
        >>> state = sv.elastic.State(w=sv.Variable([1.0, 2.0]), step=0)
        >>> state.commit()
        >>> state.step += 1
        >>> _ = state.w.assign([3.0, 4.0])
        >>> state.restore()
        >>> state.w.numpy(), state.step
        (array([1., 2.], dtype=float32), 0)
    """

    def __init__(self, *, checkpoint: CheckpointManager | None = None, **objects: Any) -> None:
        core = CheckpointCore()
        if checkpoint is not None:
            if not isinstance(checkpoint, CheckpointManager):
                raise ConfigError(
                    f"checkpoint must be a sv.CheckpointManager, not {checkpoint!r:.60}: write "
                    "checkpoint=sv.CheckpointManager(sv.Checkpoint(), 'folder')"
                )
            core = core_of(checkpoint) or core
        super().__init__(core, objects)
        self.__dict__["_held"] = HeldObjects(core, checkpoint)

    def _title(self) -> str:
        return "sv.elastic.State"

    def commit(self) -> None:
        """Keep the present values of all objects, in memory. Collective over the world.

        When it returns, every member has this commit, so it survives while one of them lives.
        The state keeps two commits: the last complete one, and the one in progress. If the
        members of the job are about to change, `sv.elastic.run` calls the function again
        from its beginning, and the call does not return.

        Raises:
            UsageError: The call is inside `strategy.run` or a block of `sv.uneven`.
            ConfigError: An object cannot be held, for instance a variable on servers.
            MismatchError: The ranks have other objects, or have made other commits.

        Cost: A copy of this rank's values, and one all-reduce of 24 bytes and 16 for each object of
            plain data. A transfer for each ON_READ variable that is combined. Optimizers with
            `accumulate` send what they have added up, if a step is incomplete.

        Example:
            >>> import syncvar as sv
            >>> state = sv.elastic.State(step=0)
            >>> for step in range(3):
            ...     state.step = step
            ...     state.commit()
            >>> state.step
            2
        """
        held_by(self).commit()

    def restore(self) -> None:
        """Go back to the last complete commit. Local, but all members should do the same.

        `sv.elastic.run` does it by itself. A program may call it, for instance when a loss is NaN.
        If AUTO has deferred increments, they are sent first, so the call is collective then.

        Raises:
            UsageError: There is no commit; or the call is inside `strategy.run` or a block of
                `sv.uneven`.

        Example:
            >>> import syncvar as sv
            >>> state = sv.elastic.State(step=0)
            >>> state.commit()
            >>> state.step = 7
            >>> state.restore()
            >>> state.step
            0
        """
        held_by(self).restore()

    def register_reset(self, fn: Callable[[], None]) -> None:
        """Call a function after each change of members, the first one included.

        The objects then have the values of the last commit. `sv.rank()` and `sv.world_size()` are
        those of the new members, for instance for a learning rate that depends on their number.

        Args:
            fn: Function without arguments; it may make calls, the same on all ranks.

        Raises:
            ConfigError: `fn` is no function.

        Example:
            >>> import syncvar as sv
            >>> optimizer = sv.optimizers.SGD(0.1)
            >>> state = sv.elastic.State(optimizer=optimizer, w=sv.Variable(0.0))
            >>> def scale_rate():
            ...     optimizer.learning_rate = 0.1 * sv.world_size()
            >>> state.register_reset(scale_rate)
        """
        if not callable(fn):
            raise ConfigError(f"register_reset takes a function without arguments, not {fn!r:.60}")
        held_by(self).reset_functions.append(fn)


def held_by(state: State) -> HeldObjects:
    """Return the commits of a state; for this package only."""
    held: HeldObjects = state.__dict__["_held"]
    return held
