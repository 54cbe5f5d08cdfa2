"""Worlds of different sizes, one after the other, whose ranks keep their objects: an elastic job without its launcher."""

import syncvar as sv
from syncvar.elastic.elastic_state import held_by
from syncvar.testing import run_ranks
from tests.support.harness import everywhere


class FakeMembership:
    """What a commit asks about the job."""

    def __init__(self, generation):
        self.generation, self.is_changing = generation, False

    def change_is_pending(self):
        """Return whether this rank knows that the members are to change."""
        return self.is_changing


class Workers:
    """Workers, each with the state that `make()` has made in a world of one."""

    def __init__(self, count, make):
        self.states = [run_ranks(1, make)[0] for _ in range(count)]
        for one in self.states:
            if isinstance(one, BaseException):
                raise one
        self.generation = 0

    def generation_of(self, members, fn, *, may_fail=False, **world):
        """Let workers form a world, in this order, and synchronize; return what `fn(state)` returns on each.

        With `may_fail` the result of a rank is the exception that it raised.
        """
        self.generation += 1
        generation = self.generation

        def train():
            state = self.states[members[sv.rank()]]
            enter(state, generation)
            return fn(state)

        if may_fail:
            return run_ranks(len(members), train, **world)
        return everywhere(len(members), train, **world)


def enter(state, generation):
    """Move a state to the current world and synchronize it, as sv.elastic.run does."""
    held = held_by(state)
    held.membership = FakeMembership(generation)
    held.moves_to_current_world()
    held.synchronize()
