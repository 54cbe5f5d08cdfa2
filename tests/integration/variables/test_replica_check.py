"""The replica checker: one flipped bit is found, named and placed; nothing else is ever found."""

import contextlib
import gc
import re

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from syncvar.variables.replica_check import compare
from syncvar.variables.storage import BLOCK_BYTES


@pytest.fixture(params=["links", "shm"])
def ranks(request):
    def run(size, fn, *, may_fail=False, config=None):
        results = run_ranks(size, fn, shared=request.param == "shm", config=config, timeout_s=60)
        for result in results:
            if isinstance(result, BaseException) and not may_fail:
                raise result
        return results

    return run


def flip(variable, element, bit=0):
    """Flip a bit of this replica's copy behind the library's back."""
    array = variable._state.storage.array
    flat = array.reshape(-1).view(np.uint8)
    flat[element * array.dtype.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)


def found_by(strategy, runs, step, faults=None):
    """Run, with a fault before some runs; return (run, error) of the first error."""
    for number in range(1, runs + 1):
        for fault in (faults or {}).get(number, ()):
            fault()
        try:
            strategy.run(step)
        except sv.MismatchError as error:
            return number, error
    return None


def parsed(error):
    text = str(error)
    name, who, first, last = re.search(
        r"copies of variable '(\S+)' .*?: (rank.*? differ)s? .*elements (\d+) to (\d+) of", text
    ).groups()
    good, bad = re.search(r"after run (\d+) and not later than run (\d+)", text).groups()
    return (
        name,
        [int(one) for one in re.findall(r"\d+", who)],
        (int(first), int(last)),
        (int(good), int(bad)),
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_flipped_bit_is_reported_with_variable_window_minority_and_place(ranks, size):
    def fn():
        strategy = sv.MultiWorkerMirroredStrategy()
        strategy.check_every = 10
        with strategy.scope():
            weights = [
                sv.Variable(np.ones((30, 40), np.float32), name=f"w{number}") for number in range(4)
            ]
            total = sv.Variable(0.0, aggregation="SUM")
        plant = {24: [lambda: flip(weights[2], 777, 13)] if sv.rank() == size - 1 else []}
        run, error = found_by(strategy, 60, lambda: total.assign_add(1.0), plant)
        values = {
            rank: re.search(r"is (\S+) \(bytes (\w+)\)", row).groups()
            for rank, row in error.table.items()
        }
        is_marked = [rank for rank, row in error.table.items() if row.endswith("differs")]
        weights[2].assign(weights[0].numpy())
        usable = found_by(strategy, 20, lambda: total.assign_add(1.0))
        return (
            run,
            parsed(error),
            is_marked,
            values,
            "no majority" in str(error),
            usable,
            float(total),
        )

    found = ranks(size, fn)
    assert all(one == found[0] for one in found)
    run, (name, minority, elements, window), is_marked, values, is_tie, usable, total = found[0]
    assert (run, name, minority, elements, window) == (30, "w2", [size - 1], (777, 777), (20, 30))
    assert is_marked == [size - 1]
    assert is_tie == (size == 2)
    assert values[0] == ("1.0", "0000803f")
    assert values[size - 1] == ("1.0009766", "0020803f")
    assert usable is None
    assert total == 50 * size


def test_a_range_of_elements_over_several_blocks_and_two_variables(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 5
        with strategy.scope():
            a = sv.Variable(np.zeros(3), name="a")
            b = sv.Variable(np.zeros(50_000), name="b")
            c = sv.Variable(np.zeros(3), name="c")

        def fault():
            b._state.storage.array[11:40_001] = 1.0
            c._state.storage.array[1] = 2.0

        del a
        run, error = found_by(strategy, 30, lambda: None, {1: [fault] if sv.rank() == 0 else []})
        return run, parsed(error), "Further variables that differ: 'c'." in str(error)

    assert ranks(3, fn) == [(5, ("b", [0], (11, 40_000), (0, 5)), True)] * 3


def test_a_large_model_is_compared_whole_at_every_check(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 10
        with strategy.scope():
            w = sv.Variable(np.zeros(70 * BLOCK_BYTES // 4, np.float32), name="w")
            small = sv.Variable(np.float16(1.0), name="small")
        del small
        place = 69 * BLOCK_BYTES // 4 + 5  # in the last block
        run, error = found_by(
            strategy, 60, lambda: None, {35: [lambda: flip(w, place)] if sv.rank() else []}
        )
        return run, parsed(error)

    assert (
        ranks(2, fn)
        == [(40, ("w", [1], (place := 69 * BLOCK_BYTES // 4 + 5, place), (30, 40)))] * 2
    )


def _optimizers_step(v):
    optimizer = sv.optimizers.Momentum(0.5)
    return lambda: optimizer.apply_gradients([(np.full(v.shape, 0.25, np.float32), v)])


WRITES = {
    "assign": lambda v: lambda: v.assign(np.full(v.shape, 3.0, np.float32)),
    "assign_add": lambda v: lambda: v.assign_add(np.full(v.shape, 0.125, np.float32)),
    "scatter_add": lambda v: lambda: v.scatter_add([0], np.ones((1, *v.shape[1:]), np.float32)),
    "assign_add_all": lambda v: (
        lambda: sv.assign_add_all([(v, np.full(v.shape, 0.125, np.float32))])
    ),
    "optimizer": _optimizers_step,
}


@pytest.mark.parametrize(
    "counts",
    [(10, 20_000), pytest.param((1_000, 100_000, 1_000_000), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("way", WRITES)
def test_a_flipped_bit_is_found_before_a_write_covers_it_up_or_spreads_it(ranks, way, counts):
    cases = [(count, rank) for count in counts for rank in range(3)]

    def fn():
        made = []
        for number, (count, stranger) in enumerate(cases):
            strategy = sv.MirroredStrategy()
            strategy.check_every = 1
            with strategy.scope():
                v = sv.Variable(
                    np.ones(count, np.float32),
                    name=f"v{number}",
                    aggregation="SUM",
                    synchronization="ON_WRITE",
                )
            write = WRITES[way](v)
            # In the part that the stranger owns where ranks share memory, and before the write in the middle of a run.
            place = count * stranger // 3 + 1
            fault = (
                (lambda v=v, place=place: flip(v, place))
                if sv.rank() == stranger
                else (lambda: None)
            )
            for _ in range(2):
                strategy.run(write)
            before = v.local_value().copy()

            def step(fault=fault, write=write):
                fault()
                write()

            with pytest.raises(sv.MismatchError) as caught:
                strategy.run(step)
            changed = np.flatnonzero(v.local_value() != before).tolist()
            assert changed == ([place] if sv.rank() == stranger else []), "nothing has been written"
            name, minority, elements, window = parsed(caught.value)
            made.append((name, minority, elements, window))
            strategy.run(lambda v=v: v.assign(np.ones(v.shape, np.float32)))  # mends it
        return made

    expected = [
        (f"v{number}", [rank], (count * rank // 3 + 1,) * 2, (2, 3))
        for number, (count, rank) in enumerate(cases)
    ]
    assert ranks(3, fn) == [expected] * 3


@pytest.mark.parametrize("count", [10, 20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_writes_between_checks_leave_a_difference_where_it_is(ranks, count):
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 10
        with strategy.scope():
            v = sv.Variable(
                np.ones(count, np.float32), name="v", aggregation="SUM", synchronization="ON_WRITE"
            )
        x = np.full(count, 0.5, np.float32)
        found = []
        for stranger in range(3):
            place = count * stranger // 3 + 1
            faults = {3: [lambda place=place: flip(v, place, 20)] if sv.rank() == stranger else []}
            run, error = found_by(strategy, 10, lambda: v.assign_add(x), faults)
            found.append((run, parsed(error)[1:3]))
            strategy.run(lambda: v.assign(np.ones(count, np.float32)))
            for _ in range(9):
                strategy.run(lambda: None)
        return found

    assert ranks(3, fn) == [[(10, ([rank], (count * rank // 3 + 1,) * 2)) for rank in range(3)]] * 3


def test_outside_runs_all_copies_are_compared_before_every_so_manieth_write(ranks):
    def fn():
        sv.get_strategy().check_every = 4
        v, w = (
            sv.Variable(np.ones(3), name="v", aggregation="SUM"),
            sv.Variable(np.ones(30_000), name="w", aggregation="SUM"),
        )
        found = []
        for number in range(1, 21):
            if number == 10 and sv.rank() == 1:
                flip(w, 20_000, 50)
            try:
                v.assign_add(np.ones(3))
            except sv.MismatchError as error:
                found.append((number, str(error).partition(". Memory")[0]))
                w.assign(np.ones(30_000))
        return found, v.numpy().tolist()

    words = (
        "the copies of variable 'w' are not the same on all replicas: rank 1 differs from the majority, in elements 20000 to "
        "20000 of the flat array. They parted after write 8 and not later than write 12"
    )
    assert ranks(3, fn) == [([(12, words)], [1 + 3.0 * 19] * 3)] * 3


def model_of(strategy):
    """Return variables of 3 MiB together, the largest of more than one, and what steps them all."""
    sizes = [300_000, *[100_000] * 4, 7, 90_000]
    with strategy.scope() if not strategy.is_default else contextlib.nullcontext():
        made = [
            sv.Variable(np.ones(size, np.float32), name=f"w{number}", aggregation="SUM")
            for number, size in enumerate(sizes)
        ]
    optimizer = sv.optimizers.SGD(0.5)
    optimizer.build(made)
    gradients = [np.full(v.shape, 0.25, np.float32) for v in made]
    return made, lambda: optimizer.apply_gradients(zip(gradients, made, strict=True))


def test_a_run_that_an_exception_has_left_does_not_move_the_comparisons_outside_runs(ranks):
    def fn():
        strategy = sv.MultiWorkerMirroredStrategy()
        strategy.check_every = 2
        with strategy.scope():
            v = sv.Variable(0.0, aggregation="SUM", name="v")

        def step(number):
            v.assign_add(1.0)
            if number == 2 and sv.rank() == 0:
                raise ValueError("bad batch")
            v.assign_add(1.0)

        for number in range(1, 4):  # the second is due
            with contextlib.suppress(ValueError, sv.MismatchError):
                strategy.run(step, (number,))
        with strategy.scope():
            for value in range(5):
                v.assign(float(value))
        return float(v)

    assert ranks(2, fn) == [4.0, 4.0]


@pytest.mark.parametrize("way", ["run", "spmd", "spmd, one by one"])
def test_every_variable_is_compared_once_in_a_hundred_steps_and_never_much_of_it_in_one(
    ranks, way, monkeypatch
):
    compared = {}

    def noted(owner, pairs, now, **words):
        compared.setdefault(sv.rank(), []).append(
            (now, [(entry.name, entry.nbytes) for entry, _ in pairs])
        )
        return compare(owner, pairs, now, **words)

    monkeypatch.setattr("syncvar.variables.registry.compare", noted)

    def fn():
        strategy = sv.MirroredStrategy() if way == "run" else sv.get_strategy()
        assert strategy.check_every == 100
        made, step = model_of(strategy)
        ones = [np.ones(v.shape, np.float32) for v in made]
        if way == "spmd, one by one":

            def step():
                for v, x in zip(made, ones, strict=True):
                    v.assign_add(x)

        registry = strategy.registry
        for number in range(1, 201):  # where nothing is compared, nothing need be written
            if any(entry.lot == -number % 100 for entry in registry.entries.values()):
                strategy.run(step) if way == "run" else step()
            elif way == "run":
                strategy.run(lambda: None)
            else:
                for v in registry.living().values():
                    v.tally.steps += 1
                registry.writes += 1
        return [v.name for v in made]

    names = ranks(2, fn)[0]
    for rank in range(2):
        for block in range(2):
            steps = [
                step
                for step in compared[rank]
                if step[1] and (int(step[0].split()[1]) - 1) // 100 == block
            ]
            seen = [name for step in steps for name, _ in step[1] if name in names]
            assert sorted(seen) == sorted(names * 2 if way == "run" else names), (
                "in a run before the write, and at its end"
            )
            assert max(sum(nbytes for _, nbytes in step[1]) for step in steps) <= 1_200_004
            assert len({step[0] for step in steps}) >= 3


@pytest.mark.parametrize("way", ["run", "spmd"])
def test_by_default_a_flip_in_a_large_variable_is_found_within_a_hundred_steps(ranks, way):
    def fn():
        strategy = sv.MirroredStrategy() if way == "run" else sv.get_strategy()
        assert strategy.check_every == 100
        made, step = model_of(strategy)
        for number in range(1, 101):
            if number == 5 and sv.rank() == 1:
                flip(made[0], 123_456, 20)
            try:
                strategy.run(step) if way == "run" else step()
            except sv.MismatchError as error:
                return number, str(error)
        return None

    what = "run" if way == "run" else "write"
    for number, text in ranks(2, fn):
        assert number <= 100
        assert "copies of variable 'w0' are not the same on all replicas: rank 1 differs" in text
        assert "elements 123456 to 123456 of the flat array" in text
        assert f"They parted after {what} 0 and not later than {what} {number}." in text


def test_no_false_alarm_over_thousands_of_random_steps(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 6
        common, own = np.random.default_rng(1), np.random.default_rng(sv.rank())
        dtypes = ["float32", "float16", ml_dtypes.bfloat16, "float64", "int8", "complex64"]
        with strategy.scope():
            variables = [
                sv.Variable(
                    np.zeros(common.integers(0, 40), dtype),
                    dtype=dtype,
                    aggregation="SUM",
                    synchronization=mode,
                )
                for dtype in dtypes
                for mode in ("AUTO", "ON_WRITE")
            ]
            sv.Variable(np.arange(3.0) + 0, aggregation="SUM", synchronization="ON_READ")
        variables[0].pin("deferred")

        def step(chosen, kinds):
            for number, kind in zip(chosen, kinds, strict=True):
                v = variables[number]
                x = own.integers(-100, 100, v.shape).astype(v.dtype)
                if kind == 0 and v.dtype.kind != "i":
                    x = np.where(own.random(v.shape) < 0.01, np.asarray(np.nan, v.dtype), x).astype(
                        v.dtype
                    )
                with np.errstate(all="ignore"):
                    (v.assign, v.assign_add, v.assign_sub)[kind](x)

        for _ in range(1000):
            strategy.run(
                step,
                args=(
                    common.integers(0, len(variables), 2).tolist(),
                    common.integers(0, 3, 2).tolist(),
                ),
            )
        return any(
            np.isnan(v.numpy()).any() for v in variables if v.dtype == np.float32
        ), strategy.registry.entries[variables[0].name].good

    found = ranks(2, fn)
    assert found[0] == found[1]
    assert found[0][1] == "run 996"


def test_copies_that_may_differ_are_not_compared(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 1
        with strategy.scope():
            sums = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            own = sv.Variable(0.0, synchronization="NONE")
        return found_by(strategy, 5, lambda: (sums.assign_add(sv.rank()), own.assign(sv.rank())))

    assert ranks(2, fn) == [None, None]


def test_a_variable_that_one_replica_has_dropped_is_left_out(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 2
        with strategy.scope():
            variables = [sv.Variable(np.ones(4), name=f"v{number}") for number in range(4)]
        strategy.run(lambda: None)
        if sv.rank() == 1:
            del variables[0]
            gc.collect()
        found = found_by(
            strategy,
            20,
            lambda: None,
            {5: [lambda: flip(variables[-1], 2)] if sv.rank() == 1 else []},
        )
        return found[0], parsed(found[1]), sorted(strategy.registry.entries)

    assert ranks(2, fn) == [(5, ("v3", [1], (2, 2), (4, 6)), ["v1", "v2", "v3"])] * 2


def test_zero_turns_it_off_and_the_setting_sets_it(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        before = strategy.check_every
        with strategy.scope():
            v = sv.Variable(np.ones(4))
        if sv.rank():
            flip(v, 1)
        calls = strategy.communicator
        strategy.check_every = 0
        off = found_by(strategy, 20, lambda: None), calls.next_call % 10**6
        strategy.check_every = 7
        on = found_by(strategy, 20, lambda: None)
        for bad in (-1, 1.5, True, None):
            with pytest.raises(sv.ConfigError, match="check_every must be a whole number of runs"):
                strategy.check_every = bad
        return before, off, on[0]

    assert ranks(2, fn, config=RuntimeConfig(check_every=13)) == [(13, (None, 0), 1)] * 2


def test_one_replica_has_nothing_to_compare():
    def fn():
        strategy = sv.MirroredStrategy()
        strategy.check_every = 1
        with strategy.scope():
            sv.Variable(np.ones(4))
        return found_by(strategy, 5, lambda: None), strategy.registry

    assert run_ranks(1, fn) == [(None, None)]
