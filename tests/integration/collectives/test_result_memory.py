"""Results of long calls lie in memory that results of earlier calls have left, unless the user has told the C library otherwise.

No call keeps memory of the program.
"""

import gc
import platform
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks
from tests.support.harness import everywhere

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
    """The persistent call keeps the object of the first call, which has had the arrays."""

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


@pytest.mark.parametrize("algorithm", [None, "direct", "pairwise", "bruck"])
@pytest.mark.parametrize("size", [2, 3])
def test_an_all_to_all_over_links_receives_where_the_results_go(size, algorithm):
    rows = 40_000  # longer than what is exchanged whole

    def fn():
        rank = sv.rank()
        x = np.arange(size * rows, dtype=np.int32).reshape(-1, 2) + 1_000_000 * rank
        before, out = x.copy(), np.zeros_like(x)
        made = sv.all_to_all(x, out=out, algorithm=algorithm)
        assert all(one.base is out for one in made)
        wanted = [
            x[rank * rows // 2 : (rank + 1) * rows // 2] % 1_000_000 + 1_000_000 * source
            for source in range(size)
        ]
        assert (out == np.concatenate(wanted)).all()
        narrow = np.zeros((rows * size // 2, 4), np.int32)[:, ::2]  # not contiguous
        sv.all_to_all(x, out=narrow, algorithm=algorithm)
        assert (narrow == out).all()
        listed = sv.all_to_all(list(x.reshape(size, -1, 2)), algorithm=algorithm)
        started = sv.all_to_all(x, algorithm=algorithm, async_op=True)
        x[...] = -1  # the value is that of when the call was made
        for one, other, want in zip(listed, started.wait(), wanted, strict=True):
            assert (one == want).all()
            assert (other == want).all()
        x[...] = before
        if algorithm != "bruck":  # which takes parts of one length
            parts = [np.full(3 if dest == rank else 1, rank) for dest in range(size)]
            counts = [len(one) for one in sv.all_to_all(parts, algorithm=algorithm)]
            assert counts == [3 if source == rank else 1 for source in range(size)]

    everywhere(size, fn)


@pytest.mark.parametrize("size", [2, 3])
def test_a_broadcast_over_links_sends_the_array_and_receives_into_out(size):
    def fn():
        for root in range(size):
            x = np.arange(40_000.0) + sv.rank()
            assert sv.broadcast(x, root, out=x) is x
            assert (x == np.arange(40_000.0) + root).all()
            x += sv.rank() - root
            out = np.zeros_like(x)
            assert sv.broadcast(x, root, out=out) is out
            made = sv.broadcast(x, root)
            assert not np.may_share_memory(made, x)
            assert (x == np.arange(40_000.0) + sv.rank()).all()
            turned = sv.broadcast(x.reshape(200, 200).T, root)
            for one in (out, made, turned.T.reshape(-1)):
                assert (one == np.arange(40_000.0) + root).all()

    everywhere(size, fn)
