"""Results of long calls lie in memory that results of earlier calls have left, unless the user has told the C library otherwise.

No call keeps memory of the program.
"""

import gc
import platform
import weakref

import numpy as np

import syncvar as sv
from syncvar.testing import run_ranks

SCRIPT = """
import resource
import numpy as np
import syncvar as sv
from probe import note

sv.init()
arrays = [np.full(1 << 18, sv.rank(), np.float32) for _ in range(3)]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(25):
    if turn == 5:
        before = faults()
    made = sv.all_reduce(arrays)
    assert all((one == 1).all() for one in made)
note("took", pages=faults() - before)
"""


CALLS = (sv.broadcast, sv.all_gather, sv.gather, sv.scatter, sv.all_to_all, sv.reduce_scatter)


def faults(launch, env):
    job = launch(SCRIPT, workers=2, env=env)
    assert job.wait(120) == 0, str(job)
    return [took["pages"] for took in job.events("took")]


def test_memory_that_is_freed_is_used_again(launch):
    kept, mapped = faults(launch, {}), faults(launch, {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)})
    assert len(kept) == len(mapped) == 2
    if platform.libc_ver()[0] == "glibc":  # which learns from what is freed
        assert 4 * max(kept) < min(mapped), (kept, mapped)


def test_a_cached_call_keeps_no_array_of_the_program():
    """The cached call keeps the object of the first call, which has had the arrays."""

    def fn():
        gone = []
        for call in CALLS:
            x = np.arange(4.0)
            for _ in range(3):
                call(x)
            gone.append((call.__name__, weakref.ref(x)))
            del x
        gc.collect()
        return [name for name, reference in gone if reference() is not None]

    assert run_ranks(2, fn, shared=True, timeout_s=60) == [[], []]
