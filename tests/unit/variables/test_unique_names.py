"""The names of variables that are used up."""

import random
import sys

from syncvar.variables.create import Names


class Plain:
    """The rule itself: every name that was taken is remembered."""

    def __init__(self):
        self.taken = set()

    def take(self, base):
        name, number = base, 0
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name


def test_names_are_those_of_the_rule():
    for seed in range(200):
        choose = random.Random(seed)
        names, plain = Names(), Plain()
        bases = [
            "w",
            "w_1",
            "w_2",
            "w_01",
            "w_0",
            "w_",
            "_1",
            "1",
            "w_1_1",
            "w_12",
            "v/w_1",
            "w__1",
        ]
        for _ in range(60):
            base = (
                choose.choice(bases)
                if choose.random() < 0.8
                else choose.choice(sorted(plain.taken) or bases)
            )
            assert names.free(base) == names.free(base)
            assert names.take(base) == plain.take(base)
            for name in [*bases, *sorted(plain.taken)[:5], "w_3", "w_100"]:
                assert (name in names) == (name in plain.taken), (seed, name)


def test_a_name_costs_as_much_after_thousands():
    def lines(fn):
        """Return how many lines of Python a call runs."""
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            fn()
        finally:
            sys.settrace(before)
        return count

    names, costs = Names(), {}
    for number in range(8001):
        if number in (500, 8000):
            costs[number] = lines(lambda: (names.free("Variable"), names.take("Variable")))
        else:
            names.take("Variable")
    assert costs[8000] == costs[500]
    assert len(names) == 1
