"""Every persistent call gives what the plain one gives, wherever the arrays of the ranks lie. See random_collectives.py."""

import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.collectives.dispatch import never_persistent
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import block_transfer
from syncvar.testing import run_ranks
from tests.support.harness import everywhere
from tests.support.rank_scripts.random_collectives import PREPARED, Rank, fill_the_shm, register_ops
from tests.support.rank_scripts.repeated_calls import Everyday

CONFIG = RuntimeConfig(collective_timeout_s=30.0, shutdown_timeout_s=1.0, check_shm="on")
SHORT_BYTES = 96 << 10
CASES = 120
DEADLINE_S = 1800  # more than ten times what the longest world takes beside other tests
MIB = 1 << 20


@pytest.fixture
def short_segments(monkeypatch):
    """Segments are short, so that vectors of several of them cost little."""
    for name, module in list(sys.modules.items()):
        if name.startswith("syncvar.") and hasattr(module, "SEGMENT_BYTES"):
            monkeypatch.setattr(module, "SEGMENT_BYTES", SHORT_BYTES)
    monkeypatch.setattr(
        block_transfer, "_READ_BYTES", 2 * SHORT_BYTES
    )  # and blocks of two of them are read where they lie


LAYOUTS = {
    "shm": {"shared": True},
    "kernel": {
        "shared": True,
        "config": CONFIG.replaced(check_shm="off"),
    },  # where shared memory is checked, Python runs all
    "full": {"shared": True, "shm_bytes": 64 * MIB},  # shared memory of rank 1 is
    "python": {"shared": True, "config": CONFIG.replaced(call_runner="python")},
    "links": {},
    "hosts": {"shared": True, "hosts": 2},
}


def make_calls(layout, size, seed, *, cases=0, pairs=()):
    """Make random cases on every rank of a world, or calls in every pair of manners."""

    def fn():
        rank = Rank(seed)
        held = []
        if layout == "full":
            sv.all_reduce(
                np.zeros(100_000)
            )  # takes the memory for segments, without which there are no long calls
            held = fill_the_shm() if sv.rank() == 1 else []
        rank.run(cases)
        rank.run_pairs(pairs)
        return rank.number, bool(held)

    register_ops()
    done = run_ranks(size, fn, timeout_s=DEADLINE_S, **{"config": CONFIG, **LAYOUTS[layout]})
    errors = [one for one in done if isinstance(one, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    assert done[0][0] >= max(1, cases)
    assert done == [(done[0][0], layout == "full" and rank == 1) for rank in range(size)]


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("kernel", 3),
        pytest.param("shm", 2, marks=pytest.mark.slow),
        ("shm", 3),
        ("shm", 4),
        ("full", 2),
        ("links", 2),
        ("hosts", 3),
    ],
)
def test_random_calls(short_segments, layout, size):
    make_calls(layout, size, 20261122, cases=12)


@pytest.mark.parametrize(
    ("layout", "size", "collectives"), [("shm", 2, PREPARED[:1]), ("full", 2, PREPARED[:1])]
)
def test_every_pair_of_manners(short_segments, layout, size, collectives):
    make_calls(layout, size, 1, pairs=collectives)


@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_long_means_of_which_some_ranks_make_a_prepared_call(short_segments, dtype):
    def fn():
        made = []
        for turn in range(6):
            x = np.full(30_000, sv.rank() + 1, dtype)
            if turn % 3 == sv.rank():
                made.append(sv.reduce(x, "mean", root=1, async_op=True).wait())
            else:
                made.append(sv.reduce(x, "mean", root=1))
            sums = [
                sv.scan(x, "mean", async_op=True).wait()
                if turn % 3 == sv.rank()
                else sv.scan(x, "mean")
            ]
            sums.append(
                sv.exscan(x, "mean", async_op=True).wait()
                if turn % 3 == sv.rank()
                else sv.exscan(x, "mean")
            )
            assert [set(one.tolist()) for one in sums] == [
                {1 + sv.rank() / 2},
                {[0.0, 1.0, 1.5][sv.rank()]},
            ]
        return [None if one is None else sorted(set(one.tolist())) for one in made]

    for layout in ("shm", "python"):
        done = run_ranks(3, fn, timeout_s=60, **{"config": CONFIG, **LAYOUTS[layout]})
        assert done == [[None] * 6, [[2.0]] * 6, [None] * 6]


@pytest.mark.parametrize("layout", ["kernel", "python"])
def test_vectors_of_few_cells_of_which_some_ranks_make_a_prepared_call(layout):
    """Where the cells of such a vector begin, a rank tells as a page; who is not prepared, or brings an array with gaps, puts none."""

    def fn():
        rank, chance = sv.rank(), np.random.default_rng(3)
        for turn in range(40):
            count = int(chance.integers(16_500, 140_000))
            x = (np.arange(2 * count) % 7 + rank).astype(np.float32)
            mine = x[::2] if turn % 3 == rank else np.ascontiguousarray(x[::2])
            way = chance.integers(3)
            if way == 0:
                resident = sv.empty(count, np.float32)
                resident[...] = mine
                mine = resident if turn % 2 == rank else mine
            made = (
                sv.all_reduce(mine, async_op=True).wait()
                if turn % 5 == rank
                else sv.all_reduce(mine)
            )
            assert np.array_equal(
                made,
                sum((np.arange(2 * count) % 7 + one).astype(np.float32)[::2] for one in range(2)),
            ), (turn, count)

    everywhere(2, fn, timeout_s=60, **{"config": CONFIG, **LAYOUTS[layout]})


LONG_LISTS = [
    (30_000, 5),
    (70_000, 40_000),
    (1, 0, 90_001),
]  # elements of the arrays: together, each by itself, and an empty one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("kernel", 2),
        ("python", 3),
        ("hosts", 3),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("shm", 2), ("shm", 3), ("full", 2), ("links", 2))
        ),
    ],
)
def test_long_arrays_in_lists_of_which_some_ranks_make_a_prepared_call(
    short_segments, layout, size
):
    def fn():
        chance = np.random.default_rng(sv.rank())
        held = []
        if layout == "full":
            sv.all_reduce(np.zeros(100_000))
            held = fill_the_shm() if sv.rank() == 1 else []
        for counts in LONG_LISTS:
            for dtype, op in (
                ("f8", "sum"),
                ("f4", "mean"),
                ("i4", "mean"),
                ("f2", "sum"),
                ("c16", "sum"),
                ("i2", "max"),
            ):
                x = [(chance.standard_normal(count) * 100).astype(dtype) for count in counts]
                if len(x) == 2:
                    x[0], x[1] = np.repeat(x[0], 2)[::2], np.asfortranarray(x[1].reshape(-1, 5))
                plain = sv.all_reduce(x, op, async_op=True).wait()
                for turn in range(size + 1):
                    for kind in (
                        list,
                        tuple,
                        lambda leaves: dict(zip("abc", leaves, strict=False)),
                    ):
                        value = kind(x)
                        is_plain = turn == sv.rank()
                        made = (
                            sv.all_reduce(value, op, async_op=True).wait()
                            if is_plain
                            else sv.all_reduce(value, op)
                        )
                        assert type(made) is type(value)
                        for one, other in zip(
                            made.values() if isinstance(made, dict) else made, plain, strict=True
                        ):
                            assert (one.dtype, one.shape, one.tobytes()) == (
                                other.dtype,
                                other.shape,
                                other.tobytes(),
                            )
                            assert one.base is None or one.base.base is None
        ways = [
            made
            for key, made in current().world.persistent_calls.items()
            if len(key) == 4 and key[2] is None
        ]  # of lists and dicts
        return bool(ways) and never_persistent not in ways, bool(held)

    is_prepared = layout in ("kernel", "shm", "python", "full")
    made = everywhere(size, fn, timeout_s=60, **{"config": CONFIG, **LAYOUTS[layout]})
    assert [prepared for prepared, _ in made] == [is_prepared] * size


@pytest.mark.parametrize("kernel", ["auto", "python"])
@pytest.mark.parametrize("collective", [sv.reduce, sv.scan, sv.exscan])
def test_a_first_long_call_that_finds_no_room_is_refused_and_the_group_goes_on(kernel, collective):
    def fn():
        sv.barrier()  # calls are prepared from here on
        held = fill_the_shm() if sv.rank() == 1 else []
        found = []
        for _ in range(2):
            try:
                collective(np.ones(100_000))
            except sv.SyncvarError as error:
                found.append(type(error).__name__)
        held.clear()
        return [
            *found,
            float(sv.all_reduce(1.0)),
            None if collective(np.ones(100_000)) is None else "made",
        ]

    done = run_ranks(
        2,
        fn,
        shared=True,
        shm_bytes=64 * MIB,
        config=CONFIG.replaced(call_runner=kernel),
        timeout_s=60,
    )
    last = None if collective is sv.reduce else "made"
    assert done == [["MismatchError"] * 2 + [2.0, "made"], ["SharedMemoryFull"] * 2 + [2.0, last]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", pytest.param("exscan", marks=pytest.mark.slow)])
def test_scans_in_place_of_several_ranks(short_segments, name):
    make_calls("python", 3, 1, pairs=(name,))


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))]
)
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("kernel", 2),
        ("kernel", 4),
        ("shm", 2),
        ("shm", 3),
        ("shm", 4),
        ("full", 2),
        ("full", 3),
        ("links", 2),
        ("links", 3),
        ("hosts", 3),
        ("hosts", 4),
    ],
)
def test_thousands_of_random_calls(short_segments, layout, size, seed):
    make_calls(layout, size, seed, cases=CASES)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("shm", 2),
        ("hosts", 3),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("kernel", 2),
                ("kernel", 4),
                ("shm", 3),
                ("shm", 4),
                ("full", 2),
                ("full", 3),
                ("links", 2),
                ("hosts", 4),
            )
        ),
    ],
)
def test_every_pair_of_manners_in_every_layout(short_segments, layout, size):
    make_calls(layout, size, 2, pairs=PREPARED)


@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("size", [2, 3])
def test_with_segments_as_they_are(size):
    make_calls("shm", size, 3, cases=60, pairs=PREPARED[:1])


def make_everyday_calls(layout, size, seed, cases):
    """Make random calls of what programs write in every step on every rank of a world."""

    def fn():
        rank = Everyday(seed)
        rank.run(cases)
        return rank.number

    assert (
        everywhere(size, fn, timeout_s=DEADLINE_S, **{"config": CONFIG, **LAYOUTS[layout]})
        == [cases] * size
    )


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("kernel", 2),
        pytest.param("shm", 2, marks=pytest.mark.slow),
        ("shm", 3),
        ("links", 2),
        ("hosts", 3),
    ],
)
def test_numbers_and_writes_in_every_context(layout, size):
    make_everyday_calls(layout, size, 20261122, 12)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("kernel", 3),
        ("python", 2),
        ("links", 2),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("kernel", 2),
                ("kernel", 4),
                ("shm", 2),
                ("shm", 3),
                ("shm", 4),
                ("hosts", 3),
            )
        ),
    ],
)
def test_many_numbers_and_writes(layout, size):
    make_everyday_calls(layout, size, size, CASES)
