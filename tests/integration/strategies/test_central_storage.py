"""One copy on each host: written once, read by all, and what was read never changes."""

import gc

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import MismatchError, SharedMemoryFull, UsageError
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from syncvar.variables.storage import SharedCopy
from tests.support.harness import caught

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05)
WORLDS = [{"shared": True}, {"shared": True, "hosts": 2}, {}]


def ranks(size, fn, **world):
    results = run_ranks(size, fn, config=SOON, timeout_s=120, **world)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results


def place(v):
    """Where a variable's copy lies in shared memory; 0 where it does not."""
    shm = current().shm
    offset = (
        0 if shm is None else v._state.storage.array.__array_interface__["data"][0] - shm.address
    )
    return offset if shm is not None and 0 <= offset < shm.shm_bytes else 0


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_all_replicas_of_a_host_read_the_same_memory_and_a_write_counts_once(world):
    def fn():
        strategy = sv.CentralStorageStrategy()
        with strategy.scope():
            v = sv.Variable(np.arange(10.0), aggregation="SUM")
            own = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            apart = sv.Variable(0.0, synchronization="NONE")
        rank = float(sv.rank())

        def step():
            v.assign_add(np.full(10, rank + 1))
            own.assign_add(rank)
            apart.assign_add(rank)

        strategy.run(step)
        strategy.run(step)
        shared = [isinstance(one._state.storage, SharedCopy) for one in (v, own, apart)]
        return sv.host_index(), place(v), v.numpy().tolist(), shared, float(apart), float(own)

    results = ranks(4, fn, **world)
    for host, _, value, shared, apart, own in results:
        assert value == (np.arange(10.0) + 20).tolist()
        assert shared == [True, False, False]
        assert own == 12.0
        del host, apart
    assert [one[4] for one in results] == [0.0, 2.0, 4.0, 6.0]
    if world:
        for host in {one[0] for one in results}:
            places = {one[1] for one in results if one[0] == host}
            assert len(places) == 1
            assert places.pop() > 0


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_was_read_never_changes_and_a_view_shows_the_next_write(world):
    def fn():
        strategy = sv.CentralStorageStrategy()
        with strategy.scope():
            v = sv.Variable(np.zeros(1000), aggregation="MEAN")
        read, array, view = v.read_value(), np.asarray(v), v.read_value(copy=False)
        local = v.local_value()
        with pytest.raises(ValueError, match="read-only"):
            read[0] = 1.0
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1.0
        for number in range(3):
            strategy.run(lambda n=number: v.assign(np.full(1000, n + sv.rank() + 1.0)))
        assert not read.any()
        assert not array.any()
        assert not local.any()
        return float(view[0]), float(view[-1]), float(v.numpy()[500])

    assert ranks(4, fn, **world) == [(4.5, 4.5, 4.5)] * 4


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_way_of_writing(world):
    def fn():
        strategy = sv.CentralStorageStrategy(reproducible=True)
        free = sv.CentralStorageStrategy(check_cross_writes=False)
        with strategy.scope():
            v = sv.Variable(np.zeros(7), aggregation="SUM")
            w = sv.Variable(np.ones(3, np.float32), aggregation="ONLY_FIRST_REPLICA")
            with pytest.raises(UsageError):
                strategy.run(lambda: sv.Variable(1.0).assign(1.0))
        with free.scope():
            f = sv.Variable(5.0)
        strategy.run(lambda: v.assign_add(v))  # its own value as operand
        strategy.run(lambda: v.assign_add(np.arange(7.0)))
        strategy.run(lambda: v.assign_add(v))
        strategy.run(lambda: w.assign_sub(np.full(3, sv.rank() + 1.0, np.float32)))
        strategy.run(lambda: v.scatter_add([0, 0], [1.0, sv.rank()]))
        with strategy.scope():
            sv.assign_add_all([(v, np.ones(7)), (w, np.ones(3))])
            v.assign_sub(np.ones(7))
        strategy.run(lambda: sv.assign_add_all([(v, np.ones(7)), (w, np.ones(3))]))
        for _ in range(5):
            with free.scope():
                f.assign_add(1.0)
        with strategy.scope():
            v.pin("deferred")
        strategy.run(lambda: [v.assign_add(np.ones(7)) for _ in range(3)])
        return v.numpy().tolist(), w.numpy().tolist(), float(f)

    for size in (1, 3):
        if size < world.get("hosts", 1):
            continue
        n = size
        first = np.arange(7.0) * n * (1 + n)
        first[0] += n + sum(range(n))
        wanted = first + n + 3 * n
        for v, w, f in ranks(size, fn, **world):
            assert v == wanted.tolist()
            assert w == [2.0] * 3
            assert f == 10.0


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_an_optimizer_steps_once_on_each_host(world):
    def train(make):
        strategy = make()
        with strategy.scope():
            v = sv.Variable(np.ones(5, np.float64), aggregation="MEAN")
            optimizer = sv.optimizers.Momentum(0.5, momentum=0.9)
        for _ in range(3):
            strategy.run(lambda: optimizer.apply_gradients([(np.full(5, sv.rank() + 1.0), v)]))
        return v.numpy().tobytes()

    def fn():
        return train(sv.CentralStorageStrategy), train(sv.MultiWorkerMirroredStrategy)

    for central, mirrored in ranks(4, fn, **world):
        assert central == mirrored


def test_memory_is_given_back_when_all_replicas_have_let_go():
    def fn():
        strategy = sv.CentralStorageStrategy()
        seen = []
        with strategy.scope():
            for _ in range(6):
                v = sv.Variable(np.zeros(100_000), aggregation="SUM")
                seen.append(place(v))
                del v
                gc.collect()
                sv.barrier()
        return seen

    for seen in ranks(3, fn, shared=True):
        assert len(set(seen)) < 4, "the memory of variables that are gone is used again"


def test_a_variable_that_one_replica_keeps_stays_whole():
    def fn():
        strategy = sv.CentralStorageStrategy()
        with strategy.scope():
            v = sv.Variable(np.full(1000, 7.0), aggregation="SUM")
            kept = v.read_value(copy=False) if sv.rank() == 2 else None
            del v
            gc.collect()
            sv.barrier()
            others = [
                sv.Variable(np.full(1000, float(number)), aggregation="SUM") for number in range(5)
            ]
        sv.barrier()
        del others
        return None if kept is None else bool((kept == 7.0).all())

    assert ranks(3, fn, shared=True) == [None, None, True]


def test_where_there_is_no_room_each_replica_has_a_copy():
    def fn():
        strategy = sv.CentralStorageStrategy()
        if sv.rank() == 0:
            shm = current().shm

            def deny(shape, dtype):
                del shm.empty
                raise SharedMemoryFull("planted")

            shm.empty = deny
        with strategy.scope():
            v = sv.Variable(np.zeros(10), aggregation="SUM")
        strategy.run(lambda: v.assign_add(np.ones(10)))
        return place(v), v.numpy().tolist()

    assert ranks(3, fn, shared=True) == [(0, [3.0] * 10)] * 3


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_refused_write_changes_nothing_anywhere(world):
    def fn():
        strategy = sv.CentralStorageStrategy()
        with strategy.scope():
            v = sv.Variable(np.zeros(10), aggregation="SUM")
        errors = []
        for shape in (9, 10):
            x = np.ones(shape if sv.rank() == 1 else 10)
            errors.append(type(caught(strategy.run, lambda x=x: v.assign_add(x))).__name__)
        return errors, v.numpy().tolist()

    for rank, (errors, value) in enumerate(ranks(4, fn, **world)):
        assert errors == ["ConfigError" if rank == 1 else MismatchError.__name__, "NoneType"]
        assert value == [4.0] * 10
