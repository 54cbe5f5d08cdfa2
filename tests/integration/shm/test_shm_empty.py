"""sv.empty and sv.zeros, and the memory of variables: resident, in place, never under a reader, given back."""

import gc
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.testing import run_ranks
from syncvar.variables.storage import Storage


def everywhere(size, program):
    results = run_ranks(size, program, shared=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# -- sv.empty and sv.zeros -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), 0, 5, (2, 3), [4, 0], (np.int64(2), 2)])
@pytest.mark.parametrize("dtype", [np.float64, "float32", "bool", np.complex128, "int8"])
def test_an_array_has_the_shape_and_dtype_asked_for(shape, dtype):
    def program():
        made = sv.zeros(shape, dtype)
        return made.shape, made.dtype, bool((made == 0).all()), current().shm.locate(made) > 0

    wanted = np.zeros(shape, dtype)
    assert everywhere(2, program) == [(wanted.shape, wanted.dtype, True, True)] * 2


@pytest.mark.parametrize("shape", [1 << 60, 1 << 50, (1 << 40, 1 << 40)])
def test_more_than_any_machine_has_is_the_same_error_on_every_path(shape):
    def program():
        with pytest.raises(sv.SharedMemoryFull, match=r"TiB of (shared|private) memory"):
            sv.empty(shape)

    everywhere(2, program)
    assert run_ranks(2, program) == [None, None]


def test_without_an_shm_it_is_an_ordinary_array():
    made = sv.zeros((2, 2), "float32")
    assert made.dtype == np.float32
    assert made.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        (-1, "float32", "negative"),
        ((2, -3), "float32", "negative"),
        (2.5, "float32", "must be an integer"),
        ("ab", "float32", "must be an integer"),
        (2, "nonsense", "must name a NumPy dtype"),
        (2, object, "references"),
    ],
)
def test_a_wrong_argument_is_refused(shape, dtype, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.empty(shape, dtype)


def test_arrays_are_reduced_in_place():
    def program():
        x = sv.empty(100_000, np.float32)
        place = current().shm.locate(x)
        results = []
        for number in range(3):
            x[...] = number + sv.rank()
            results.append(sv.all_reduce(x, out=x) is x)
            results.append(float(x[0]) == 3 * number + 3 and bool((x == x[0]).all()))
        return all(results) and current().shm.locate(x) == place

    assert everywhere(3, program) == [True] * 3


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("size", [2, 3])
def test_repeated_calls_of_one_segment_and_barriers(size, op):
    count = 50_001

    def program():
        wanted = {"sum": np.sum, "mean": np.mean, "max": np.max}[op](
            [np.arange(count) % 9 + rank for rank in range(size)], axis=0
        )
        private, out, resident = np.empty(count), np.empty(count), sv.empty(count, np.float64)
        for turn in range(8):
            x = resident if (turn + sv.rank()) % 3 == 0 else private
            x[...] = np.arange(count) % 9 + sv.rank()
            made = sv.all_reduce(
                x, op, out=[None, out, x, resident][turn % 4] if x is private else out
            )
            if not np.array_equal(made, wanted):
                return turn
            sv.barrier()
        return "right"

    assert everywhere(size, program) == ["right"] * size


def test_a_barrier_beside_another_call_is_a_mismatch():
    def program():
        for _ in range(3):
            sv.barrier()
        try:
            sv.barrier() if sv.rank() else sv.all_reduce(np.empty(0, np.uint8))
        except sv.MismatchError:
            sv.barrier()
            return "told"
        return "nothing"

    assert everywhere(2, program) == ["told"] * 2


def test_resident_and_private_arrays_meet_in_one_call():
    def program():
        shape = (300, 500)
        x = sv.empty(shape, np.float64) if sv.rank() == 0 else np.empty(shape)
        out = x if sv.rank() < 2 else sv.empty(shape, np.float64)
        x[...] = sv.rank() + 1
        made = sv.all_reduce(x, out=out)
        return made is out and bool((out == 6).all())

    assert everywhere(3, program) == [True] * 3


def test_an_array_outlives_the_job():
    kept = []

    def program():
        made = sv.zeros(1000)
        made += 1
        if sv.rank() == 0:
            kept.append(made)

    everywhere(2, program)
    assert kept[0].sum() == 1000.0
    kept[0][0] = 5.0
    assert kept[0][0] == 5.0


# -- the memory of variables -----------------------------------------------------------------------


def test_a_variable_is_written_in_place():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(np.zeros(50_000, np.float32), aggregation="SUM")
        places = set()
        for _ in range(4):
            strategy.run(lambda: v.assign_add(np.full(50_000, sv.rank() + 1, np.float32)))
            places.add(current().shm.locate(v._state.storage.array))
        return len(places), float(v.read_value(copy=False)[-1])

    assert everywhere(2, program) == [(1, 12.0)] * 2


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ", "NONE"])
@pytest.mark.parametrize("take", ["read_value", "numpy", "local_value", "slice", "asarray"])
def test_what_was_read_does_not_change(synchronization, take):
    ways = {
        "read_value": lambda v: v.read_value(),
        "numpy": lambda v: v.numpy(),
        "local_value": lambda v: v.local_value(),
        "slice": lambda v: v[1:3][:1],
        "asarray": np.asarray,
    }

    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(
                np.arange(4.0),
                synchronization=synchronization,
                aggregation="SUM",
                name=f"{synchronization}{take}",
            )

        def step():
            seen = ways[take](v)
            before = seen.tolist()
            v.assign_add(np.ones(4))
            v.scatter_add([0], [5.0])
            return seen.tolist() == before, seen.flags.writeable, v.local_value().tolist() != before

        return strategy.run(step)

    assert everywhere(2, program) == [(True, False, True)] * 2


def test_a_view_that_is_gone_costs_no_new_memory():
    def program():
        storage = Storage(current(), np.zeros(1000))
        place = current().shm.locate(storage.array)
        seen = storage.expose()
        kept = seen[10:20]
        del seen
        moved = current().shm.locate(storage.writable()) != place
        place = current().shm.locate(storage.array)
        kept = storage.expose()
        del kept
        return (
            moved,
            current().shm.locate(storage.writable()) == place,
            storage.view is storage.view,
        )

    assert everywhere(2, program) == [(True, True, True)] * 2


@pytest.mark.parametrize(
    "part",
    [
        lambda seen: seen,
        lambda seen: seen[1:],
        lambda seen: seen.reshape(2, 2).T,
        lambda seen: seen.base,
        lambda seen: seen.base.base,
        memoryview,
    ],
)
def test_whatever_is_kept_of_a_view_keeps_its_memory(part):
    def program():
        storage = Storage(current(), np.arange(4.0))
        kept = part(storage.expose())
        before, is_exposed = bytes(np.asarray(kept)), storage.is_exposed
        storage.writable()[...] = 9.0
        same = bytes(np.asarray(kept)) == before
        del kept
        return is_exposed, same, storage.is_exposed

    assert everywhere(2, program) == [(True, True, False)] * 2


def test_new_memory_holds_what_the_old_held():
    storage = Storage(current(), np.arange(5.0))
    seen = storage.expose()
    storage.writable()[0] = 9.0
    assert seen.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert storage.view.tolist() == [9.0, 1.0, 2.0, 3.0, 4.0]


def test_a_write_that_fails_leaves_a_variable_as_it_was():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(np.ones(3, np.float32), aggregation="SUM")
        seen = v.read_value()  # the write would go to new memory

        def step():
            with pytest.raises((sv.MismatchError, sv.ConfigError)):
                v.assign(np.ones(3) if sv.rank() == 0 else np.ones(4))

        strategy.run(step)
        return seen.tolist() == v.numpy().tolist() == [1.0, 1.0, 1.0]

    assert everywhere(2, program) == [True] * 2


def test_dropped_variables_give_their_memory_back():
    def program():
        shm = current().shm
        for number in range(40):
            v = sv.Variable(np.zeros(1 << 18, np.float32), name=f"drop{number}")
        gone = weakref.ref(v)
        del v
        gc.collect()
        shm.empty(1, np.uint8)  # what was freed is taken in by the next request
        return (
            gone() is None,
            shm._extents.used_bytes < 12 << 20,
        )  # the channels and their segments

    assert everywhere(2, program) == [(True, True)] * 2
