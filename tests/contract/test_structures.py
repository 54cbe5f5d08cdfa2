"""Lists, tuples and dicts of arrays in worlds of one process, see structures.py; tests/process has them in jobs."""

import numpy as np
import pytest
from harness import everywhere
from prepared_calls import fill_the_arena
from structures import KINDS, LONG, SMALL, check_every_structure, check_results_over_other_arrays
from test_prepared_equals_plain import CONFIG, LAYOUTS

import syncvar as sv
from syncvar.engine.group import Communicator
from syncvar.execution import reductions


@pytest.mark.parametrize(("layout", "size"), [("kernel", 2), ("python", 2), pytest.param("arena", 3, marks=pytest.mark.slow), pytest.param("kernel", 4, marks=pytest.mark.slow),
                                              pytest.param("python", 4, marks=pytest.mark.slow), pytest.param("full", 2, marks=pytest.mark.slow)])  # fmt: skip
def test_structures_wherever_their_arrays_lie(monkeypatch, layout, size):
    monkeypatch.setattr(reductions, "_ALONE_BYTES", 128 << 10)

    def fn():
        held = []
        if layout == "full":
            sv.all_reduce(np.zeros(100_000))
            held = fill_the_arena() if sv.rank() == 1 else []
        check_every_structure(7, SMALL, 4)
        check_every_structure(8, LONG, 4)
        return bool(held)

    everywhere(size, fn, timeout_s=90, **{"config": CONFIG, **LAYOUTS[layout]})


@pytest.mark.parametrize(("layout", "size", "turns"), [("kernel", 2, 30), ("python", 3, 10), pytest.param("kernel", 4, 100, marks=pytest.mark.slow)])
def test_results_lie_over_other_arrays(layout, size, turns):
    everywhere(size, lambda: check_results_over_other_arrays(9, turns), timeout_s=90, **{"config": CONFIG, **LAYOUTS[layout]})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_many_structures(monkeypatch, size, seed):
    monkeypatch.setattr(reductions, "_ALONE_BYTES", 128 << 10)
    everywhere(size, lambda: check_every_structure(100 + seed, SMALL + LONG, 12), timeout_s=110, **{"config": CONFIG, **LAYOUTS["kernel"]})


@pytest.mark.needs_kernel
@pytest.mark.parametrize("counts", [(3, 4), (70_000, 2, 80_000)])
def test_structures_are_reduced_in_c_once_they_are_prepared(monkeypatch, counts):
    calls = []
    plain = reductions.reduce_shared
    monkeypatch.setattr("syncvar.engine.prepared_reductions.reduce_shared", lambda *given: calls.append(given) or plain(*given))
    general = Communicator.perform
    monkeypatch.setattr(Communicator, "perform", lambda *given, **options: calls.append(given[1]) or general(*given, **options))

    def fn():
        sv.all_reduce(np.zeros(100_000))  # takes the memory for segments
        sv.barrier()
        calls.clear()
        sv.barrier()
        x = [np.ones(count, np.float32) for count in counts]
        for kind in KINDS:
            for out in (None, kind(x)):
                for _ in range(3):
                    sv.all_reduce(kind(x), "mean", out=out)
        return [type(one).__name__ for key, one in sv.collectives.communicator_of(None).prepared_calls.items() if len(key) == 4 and key[2] is None]

    assert everywhere(2, fn, shared=True) == [["SlotCall"] * len(KINDS)] * 2
    assert not calls


@pytest.mark.needs_kernel
@pytest.mark.parametrize("where", ["both", "source", "target"])
def test_arrays_of_the_arena_are_reduced_in_c_where_they_lie(monkeypatch, where):
    """Where cells begin on a page, and where an array lies, was told by one word: of such arrays the C runner then found no cells."""
    calls = []
    plain = reductions.reduce_shared
    monkeypatch.setattr("syncvar.engine.prepared_reductions.reduce_shared", lambda *given: calls.append(given) or plain(*given))

    def fn():
        x, out = np.ones(100_000, np.float32), np.empty(100_000, np.float32)
        sv.all_reduce(out, out=np.empty_like(out))  # takes the memory for segments
        sv.barrier()
        calls.clear()
        sv.barrier()
        if where != "target":
            x = sv.empty(100_000, np.float32)
            x[...] = 1
        if where != "source":
            out = x if where == "both" else sv.empty(100_000, np.float32)
        sums = [sv.all_reduce(x, out=out)[0] for _ in range(8)]
        return sums == ([2.0] * 8 if where != "both" else [2.0 ** (turn + 1) for turn in range(8)])

    assert everywhere(2, fn, shared=True) == [True, True]
    assert not calls
