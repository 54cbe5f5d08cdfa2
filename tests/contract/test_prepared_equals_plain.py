"""Every prepared call gives what the plain one gives, wherever the arrays of the ranks lie. See prepared_calls.py."""

import sys

import numpy as np
import pytest
from everyday_calls import Everyday
from harness import everywhere
from prepared_calls import PREPARED, Rank, fill_the_arena, register_ops

import syncvar as sv
from syncvar.config import RuntimeConfig
from syncvar.testing import run_ranks

CONFIG = RuntimeConfig(collective_timeout_s=30.0, shutdown_timeout_s=1.0, check_arena="on")
SHORT_BYTES = 96 << 10
CASES = 120
MIB = 1 << 20


@pytest.fixture
def short_segments(monkeypatch):
    """Segments are short, so that vectors of several of them cost little."""
    for name, module in list(sys.modules.items()):
        if name.startswith("syncvar.") and hasattr(module, "SEGMENT_BYTES"):
            monkeypatch.setattr(module, "SEGMENT_BYTES", SHORT_BYTES)


LAYOUTS = {
    "arena": {"shared": True},
    "full": {"shared": True, "arena_bytes": 64 * MIB},  # the arena of rank 1 is
    "python": {"shared": True, "config": CONFIG.replaced(kernel="python")},
    "links": {},
    "hosts": {"shared": True, "hosts": 2},
}


def make_calls(layout, size, seed, *, cases=0, pairs=()):
    """Make random cases on every rank of a world, or calls in every pair of manners."""

    def fn():
        rank = Rank(seed)
        held = []
        if layout == "full":
            sv.all_reduce(np.zeros(100_000))  # takes the memory for segments, without which there are no long calls
            held = fill_the_arena() if sv.rank() == 1 else []
        rank.run(cases)
        rank.run_pairs(pairs)
        return rank.number, bool(held)

    register_ops()
    done = run_ranks(size, fn, config=CONFIG, timeout_s=600, **LAYOUTS[layout])
    errors = [one for one in done if isinstance(one, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    assert done[0][0] >= max(1, cases)
    assert done == [(done[0][0], layout == "full" and rank == 1) for rank in range(size)]


@pytest.mark.parametrize(("layout", "size"), [("arena", 2), ("arena", 3), ("arena", 4), ("full", 2), ("links", 2), ("hosts", 3)])
def test_random_calls(short_segments, layout, size):
    make_calls(layout, size, 20261122, cases=12)


@pytest.mark.parametrize(("layout", "size", "collectives"), [("arena", 2, PREPARED), ("full", 2, PREPARED[:1])])
def test_every_pair_of_manners(short_segments, layout, size, collectives):
    make_calls(layout, size, 1, pairs=collectives)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layout", "size"), [("arena", 2), ("arena", 3), ("arena", 4), ("full", 2), ("full", 3), ("links", 2), ("links", 3), ("hosts", 3), ("hosts", 4)]
)
def test_thousands_of_random_calls(short_segments, layout, size, seed):
    make_calls(layout, size, seed, cases=CASES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "size"), [("arena", 3), ("arena", 4), ("full", 3), ("links", 2), ("hosts", 3), ("hosts", 4)])
def test_every_pair_of_manners_in_every_layout(short_segments, layout, size):
    make_calls(layout, size, 2, pairs=PREPARED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
def test_with_segments_as_they_are(size):
    make_calls("arena", size, 3, cases=60, pairs=PREPARED[:1])


def make_everyday_calls(layout, size, seed, cases):
    """Make random calls of what programs write in every step on every rank of a world."""

    def fn():
        rank = Everyday(seed)
        rank.run(cases)
        return rank.number

    assert everywhere(size, fn, timeout_s=600, **{"config": CONFIG, **LAYOUTS[layout]}) == [cases] * size


@pytest.mark.parametrize(("layout", "size"), [("arena", 2), ("arena", 3), ("links", 2), ("hosts", 3)])
def test_numbers_and_writes_in_every_context(layout, size):
    make_everyday_calls(layout, size, 20261122, 12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "size"), [("arena", 2), ("arena", 3), ("arena", 4), ("python", 2), ("links", 2), ("hosts", 3)])
def test_many_numbers_and_writes(layout, size):
    make_everyday_calls(layout, size, size, CASES)
