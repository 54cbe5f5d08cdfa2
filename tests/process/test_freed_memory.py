"""Results of long calls lie in memory that results of earlier calls have left, unless the user has told the C library otherwise."""

import platform

import pytest

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
PAGES = 20 * 3 * 256  # of the results


LEARNS = platform.libc_ver()[0] == "glibc"


@pytest.mark.parametrize(
    ("env", "least", "most"),
    [({}, 0, PAGES // 8 if LEARNS else 4 * PAGES), ({"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}, PAGES // 2 if LEARNS else 0, 4 * PAGES)],
)
def test_memory_that_is_freed_is_used_again(launch, env, least, most):
    job = launch(SCRIPT, workers=2, env=env)
    assert job.wait(60) == 0, str(job)
    for took in job.events("took"):
        assert least <= took["pages"] <= most, str(job)
