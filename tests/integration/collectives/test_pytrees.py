"""Lists, tuples and dicts of arrays in worlds of one process, see pytree_calls.py; test_persistent_calls.py has them in jobs."""

import gc
import weakref

import numpy as np
import pytest
from test_persistent_equals_plain import CONFIG, LAYOUTS

import syncvar as sv
from syncvar.collectives.groups import communicator_of
from syncvar.runtime import shm_reduce
from syncvar.runtime.arithmetic import gil_monitor
from syncvar.runtime.communicator import Communicator
from tests.support.harness import everywhere
from tests.support.rank_scripts.pytree_calls import (
    KINDS,
    LONG,
    SMALL,
    check_arrays_of_several_kinds,
    check_every_structure,
    check_results_over_other_arrays,
    in_order,
)
from tests.support.rank_scripts.random_collectives import fill_the_shm

DEADLINE_S = 600  # more than ten times what the longest world takes beside other tests
LONG_TEST = pytest.mark.timeout(DEADLINE_S + 60)


@LONG_TEST
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("kernel", 2),
        ("python", 2),
        pytest.param("shm", 3, marks=pytest.mark.slow),
        pytest.param("kernel", 4, marks=pytest.mark.slow),
        pytest.param("python", 4, marks=pytest.mark.slow),
        pytest.param("full", 2, marks=pytest.mark.slow),
    ],
)
def test_structures_wherever_their_arrays_lie(monkeypatch, layout, size):
    monkeypatch.setattr(shm_reduce, "_SEPARATE_BYTES", 128 << 10)

    def fn():
        held = []
        if layout == "full":
            sv.all_reduce(np.zeros(100_000))
            held = fill_the_shm() if sv.rank() == 1 else []
        check_every_structure(7, SMALL, 4)
        check_every_structure(8, LONG, 4)
        return bool(held)

    everywhere(size, fn, timeout_s=DEADLINE_S, **{"config": CONFIG, **LAYOUTS[layout]})


@LONG_TEST
@pytest.mark.parametrize(
    ("layout", "size", "turns"),
    [("kernel", 2, 30), ("python", 3, 10), pytest.param("kernel", 4, 100, marks=pytest.mark.slow)],
)
def test_results_lie_over_other_arrays(layout, size, turns):
    everywhere(
        size,
        lambda: check_results_over_other_arrays(9, turns),
        timeout_s=DEADLINE_S,
        **{"config": CONFIG, **LAYOUTS[layout]},
    )


@LONG_TEST
@pytest.mark.parametrize(
    ("layout", "size", "turns"),
    [
        ("kernel", 2, 40),
        ("python", 3, 20),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("shm", 2, 60),
                ("links", 3, 40),
                ("hosts", 4, 40),
            )
        ),
        *(pytest.param("kernel", size, 300, marks=pytest.mark.nightly) for size in (3, 4)),
    ],
)
def test_arrays_of_several_kinds(monkeypatch, layout, size, turns):
    monkeypatch.setattr(shm_reduce, "_SEPARATE_BYTES", 128 << 10)
    everywhere(
        size,
        lambda: check_arrays_of_several_kinds(11, turns),
        timeout_s=DEADLINE_S,
        **{"config": CONFIG, **LAYOUTS[layout]},
    )


@LONG_TEST
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))]
)
@pytest.mark.parametrize("size", [2, 4])
def test_many_structures(monkeypatch, size, seed):
    monkeypatch.setattr(shm_reduce, "_SEPARATE_BYTES", 128 << 10)
    everywhere(
        size,
        lambda: check_every_structure(100 + seed, SMALL + LONG, 12),
        timeout_s=DEADLINE_S,
        **{"config": CONFIG, **LAYOUTS["kernel"]},
    )


@pytest.fixture
def never_crowded(monkeypatch):
    """A call that took long, since the machine is busy, is no reason to keep Python's lock, as it is in a world of threads."""
    monkeypatch.setattr(gil_monitor, "is_alert", False)
    monkeypatch.setattr(gil_monitor, "note", lambda _seconds, _nbytes: None)


@pytest.mark.needs_c_extension
@pytest.mark.usefixtures("never_crowded")
@pytest.mark.parametrize("counts", [(3, 4), (70_000, 2, 80_000), (2, 70_000, 3, 4, 20_000)])
def test_structures_are_reduced_in_c_once_they_are_prepared(monkeypatch, counts):
    calls = []
    plain = shm_reduce.reduce_shared
    monkeypatch.setattr(
        "syncvar.runtime.persistent_reduce.reduce_shared",
        lambda *given: calls.append(given) or plain(*given),
    )
    general = Communicator.perform
    monkeypatch.setattr(
        Communicator,
        "perform",
        lambda *given, **options: calls.append(given[1]) or general(*given, **options),
    )

    def fn():
        sv.all_reduce(np.zeros(100_000))  # takes the memory for segments
        sv.barrier()
        calls.clear()
        sv.barrier()
        x = [
            np.ones(count, np.float64 if len(counts) > 3 and count < 9 else np.float32)
            for count in counts
        ]
        for kind in KINDS:
            for out in (None, kind(x)):
                for _ in range(3):
                    sv.all_reduce(kind(x), "mean", out=out)
        return [
            type(one).__name__
            for key, one in communicator_of(None).persistent_calls.items()
            if len(key) == 4 and key[2] is None
        ]

    assert everywhere(2, fn, shared=True) == [["NativeCall"] * len(KINDS)] * 2
    assert not calls


@pytest.mark.parametrize("layout", ["kernel", "python", "shm"])
@pytest.mark.parametrize("kind", [list, lambda leaves: {"a": leaves[0]}])
def test_a_long_array_of_the_shm_that_is_alone_in_its_structure(layout, kind):
    """It is one vector, like an array, and told as such: C had told as of several arrays, and its place was taken for another."""

    def fn():
        made = []
        for where in ("x", "out", "both"):
            for turn in range(4):
                x = sv.empty(100_000) if where != "out" else np.empty(100_000)
                x[...] = sv.rank() + turn
                out = x if where == "both" else sv.empty(100_000) if where == "out" else None
                result = in_order(
                    sv.all_reduce(kind([x]), out=None if out is None else kind([out]))
                )[0]
                made.append(bool((result == 1 + 2 * turn).all()))
        return made

    assert everywhere(2, fn, **{"config": CONFIG, **LAYOUTS[layout]}) == [[True] * 12] * 2


@pytest.mark.parametrize("layout", ["kernel", "python"])
def test_no_array_of_a_call_is_kept_for_the_next(layout):
    def fn():
        gone = []
        for counts in ((3, 4), (90_000, 5)):
            for kind in (list, lambda leaves: {"b": leaves[0], "a": [leaves[1], 3]}):
                arrays = [np.ones(count, np.float32) for count in counts]
                gone += map(weakref.ref, arrays)
                for _ in range(3):
                    sv.all_reduce(kind(arrays))
                sv.all_reduce(kind(arrays), async_op=True).wait()
                del arrays
        sv.barrier()
        gc.collect()
        return [one() is None for one in gone]

    assert everywhere(2, fn, **{"config": CONFIG, **LAYOUTS[layout]}) == [[True] * 8] * 2


def test_what_only_looks_like_a_structure_is_none():
    """Nobody's code runs while a persistent call looks at what it is given: not the names of a dict, and not what has `arrays`."""
    nested = []

    class Name(str):
        __slots__ = ()

        def __eq__(self, other):
            nested.append(other)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    class Holder:
        @property
        def arrays(self):
            nested.append(self)
            return [np.empty(2), np.empty(2)]

    def fn():
        for _ in range(3):
            sv.all_reduce([np.ones(2), np.ones(2)])
            sv.all_reduce({"a": np.ones(2), "b": np.ones(2)})
        made = sv.all_reduce({Name("a"): np.ones(2), "b": np.ones(2)})
        with pytest.raises(sv.ConfigError, match="same structure"):
            sv.all_reduce([np.ones(2), np.ones(2)], out=Holder())
        return sorted(type(name).__name__ for name in made), [
            array.tolist() for array in made.values()
        ]

    assert (
        everywhere(2, fn, **{"config": CONFIG, **LAYOUTS["kernel"]})
        == [(["Name", "str"], [[2.0, 2.0]] * 2)] * 2
    )
    assert not any(isinstance(one, Holder) for one in nested)


@pytest.mark.needs_c_extension
def test_numbers_of_several_kinds_are_reduced_in_c():
    def fn():
        for turn in range(3):
            made = sv.all_reduce({"loss": 1.5, "n": 3, "ok": [np.ones(2, np.float16), turn]})
        prepared = communicator_of(None).persistent_calls.values()
        return (
            [type(one).__name__ for one in prepared],
            float(made["loss"]),
            int(made["n"]),
            made["ok"][0].tolist(),
            int(made["ok"][1]),
        )

    assert everywhere(2, fn, shared=True) == [(["NativeCall"], 3.0, 6, [2.0, 2.0], 4)] * 2


@pytest.mark.needs_c_extension
@pytest.mark.usefixtures("never_crowded")
@pytest.mark.parametrize("where", ["both", "source", "target"])
def test_arrays_of_the_shm_are_reduced_in_c_where_they_lie(monkeypatch, where):
    """Where cells begin on a page, and where an array lies, was told by one word: of such arrays the C runner then found no cells."""
    calls = []
    plain = shm_reduce.reduce_shared
    monkeypatch.setattr(
        "syncvar.runtime.persistent_reduce.reduce_shared",
        lambda *given: calls.append(given) or plain(*given),
    )

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


@pytest.mark.parametrize("layout", ["kernel", "python"])
@pytest.mark.parametrize("count", [1_500, 3_000, 16_000, 40_000])
def test_one_rank_goes_the_general_way_while_the_others_are_prepared(layout, count):
    """Up to 64 KiB a prepared rank puts what it brings into a slot that it tells: the general way has to look there."""

    def fn():
        made = []
        for turn in range(9):
            x = np.full(count, 2.0**turn + sv.rank(), np.float32)
            x = x.astype(">f4") if turn % 3 == sv.rank() else x
            given = [x, {"a": x}, x][turn // 3]
            result = (
                sv.all_reduce(given, async_op=True).wait() if turn > 5 else sv.all_reduce(given)
            )  # noqa: PLR2004
            made.append(np.array_equal(in_order(result)[0], np.full(count, 2 * 2.0**turn + 1)))
        return made

    assert everywhere(2, fn, **{"config": CONFIG, **LAYOUTS[layout]}) == [[True] * 9] * 2
