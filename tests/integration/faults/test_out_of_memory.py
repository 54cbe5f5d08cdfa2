"""A rank that finds no memory for a call tells the others, and the next calls of all meet each other."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import everywhere

CONFIG = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0)
HUGE = np.lib.stride_tricks.as_strided(
    np.ones(1, "f4"), (1 << 60,), (0,)
)  # no address space has room for a copy of it

CALLS = {  # all of them copy what is brought, or cut it
    "reduce": lambda x, how: sv.reduce(x, root=1, **how),
    "scan": lambda x, how: sv.scan(x, **how),
    "exscan": lambda x, how: sv.exscan(x, **how),
    "all_reduce, scaled": lambda x, how: sv.all_reduce(x, prescale=1.0, **how),
}


@pytest.mark.parametrize("way", [{}, {"async_op": True}], ids=["at once", "started"])
@pytest.mark.parametrize("kernel", ["auto", "python"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_without_memory_tells_the_others_and_all_go_on(name, kernel, way):
    def call(x):
        made = CALLS[name](x, way)
        return made.wait() if way else made

    def fn():
        seen = []
        for turn in range(3):
            for x in (
                HUGE if sv.rank() == 0 else np.ones(4, "f4"),
                np.arange(4, dtype="f4") + sv.rank() * 10**turn,
            ):
                try:
                    made = call(x)
                    seen.append(None if made is None else made.tolist())
                except Exception as error:
                    seen.append(type(error).__name__)
            seen.append(float(sv.all_reduce(float(turn))))
        return seen

    one, other = everywhere(2, fn, shared=True, config=CONFIG.replaced(call_runner=kernel))
    assert set(one[0::3]) <= {"MemoryError", "MismatchError", "ConfigError"}
    assert set(other[0::3]) == {"MismatchError"}
    assert one[2::3] == other[2::3] == [0.0, 2.0, 4.0]
    for turn in range(3):
        mine, theirs = np.arange(4.0), np.arange(4.0) + 10**turn
        wanted = {
            "reduce": [None, mine + theirs],
            "scan": [mine, mine + theirs],
            "exscan": [np.zeros(4), mine],
            "all_reduce, scaled": [mine + theirs, mine + theirs],
        }[name]
        for seen, right in zip((one, other), wanted, strict=True):
            assert seen[3 * turn + 1] == (None if right is None else right.tolist())
