"""A coordinator and the workers that it gives functions: results, errors, datasets, workers that are lost."""

import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.parameter_server.replicated_state import TaskQueue, TaskResult
from syncvar.parameter_server.session import LocalServers
from syncvar.testing import run_ranks

seen = {}
mine = threading.local()  # workers are threads here


def double(x):
    return 2 * x


def add(x):
    assert mine.strategy.num_replicas_in_sync == 1
    mine.strategy.run(lambda: mine.v.assign_add(x))


def fail(text):
    raise KeyError(text)


class Foreign(ValueError):
    def __init__(self, number):
        super().__init__(f"number {number}")
        self.number = number


def fail_with_a_value(number):
    raise Foreign(number)


def returns_what_cannot_travel():
    return object()


def take(rows):
    return next(rows)


def rows():
    return iter(range(100))


def waits(which):
    seen["calls"].append(which)
    if which == "first" and seen["calls"].count("first") == 1:
        seen["begun"].set()
        assert seen["may_go_on"].wait(20)
    return which


def job(workers, program, servers=2):
    """Run a program on rank 0, its coordinator made; the others serve it."""
    local = LocalServers(workers, servers)

    def each():
        strategy = sv.ParameterServerStrategy(staleness=None)
        with strategy.scope():
            mine.strategy, mine.v = strategy, sv.Variable(np.zeros(3, np.int64))
        coordinator = sv.ClusterCoordinator(strategy)
        try:
            return program(coordinator, local)
        finally:
            coordinator._close()

    results = run_ranks(workers, each, servers=local, timeout_s=120)
    assert not [one for one in results[1:] if not isinstance(one, SystemExit)], results
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_functions_run_and_errors_are_told_once(workers):
    def program(coordinator, _local):
        values = [coordinator.schedule(double, (np.arange(k),)) for k in range(6)]
        for _ in range(5):
            coordinator.schedule(add, ([1, 2, 3],))
        coordinator.join()
        assert coordinator.done()
        assert [one.tolist() for one in coordinator.fetch(values)] == [
            [2 * one for one in range(k)] for k in range(6)
        ]
        assert coordinator.fetch({"a": (values[2], 7)})["a"][1] == 7
        assert mine.v.numpy().tolist() == [5, 10, 15]
        with pytest.raises(KeyError, match="no such thing"):
            coordinator.schedule(fail, ("no such thing",))
            coordinator.join()
        coordinator.join()
        with pytest.raises(Foreign, match="number 4") as raised:
            coordinator.schedule(fail_with_a_value, (4,)).fetch()
        assert raised.value.number == 4
        if workers > 1:
            with pytest.raises(sv.ConfigError, match="what the function returned cannot travel"):
                coordinator.schedule(returns_what_cannot_travel).fetch()
        assert coordinator.schedule(double, (4,)).fetch() == 8
        with pytest.raises(sv.ConfigError, match="top level"):
            coordinator.schedule(lambda: 1)
        with pytest.raises(sv.ConfigError, match="RemoteValue"):
            coordinator.schedule(double, (values[0],))
        dataset = coordinator.create_per_worker_dataset(rows)
        taken = coordinator.fetch([coordinator.schedule(take, (dataset,)) for _ in range(6)])
        assert min(taken) == 0
        assert len(taken) == 6

    job(workers, program)


@pytest.mark.parametrize("workers", [1, 3])
def test_iter_of_a_per_worker_dataset_begins_anew_on_each_worker(workers):
    def program(coordinator, _local):
        dataset = coordinator.create_per_worker_dataset(rows)
        for _ in range(2):
            iterator = iter(dataset)
            assert iter(iterator) is iterator
            values = [coordinator.schedule(take, args=(iterator,)) for _ in range(6)]
            values += [coordinator.schedule(take, kwargs={"rows": iterator}) for _ in range(6)]
            taken = coordinator.fetch(values)
            assert min(taken) == 0
            assert max(taken) >= 12 / workers - 1
            assert len(set(taken)) >= 12 / max(1, workers - 1)
        with pytest.raises(sv.UsageError, match=r"schedule\(fn, args=\(iterator,\)\)"):
            next(iterator)
        with pytest.raises(sv.ConfigError, match="RemoteValue"):
            coordinator.schedule(take, kwargs={"rows": values[0]})

    job(workers, program)


def test_the_function_of_a_lost_worker_is_run_by_another_one():
    seen.update(calls=[], begun=threading.Event(), may_go_on=threading.Event())

    def program(coordinator, local):
        first = coordinator.schedule(waits, ("first",))
        assert seen["begun"].wait(20)
        (assigned,) = (rank for rank in local._servers[0].primaries[0].ledger.queue.assigned)
        local.lose_worker(assigned)
        result = first.fetch(20)  # of the other one
        seen["may_go_on"].set()
        return result, seen["calls"]

    local = LocalServers(3)

    def each():
        coordinator = sv.ClusterCoordinator(sv.ParameterServerStrategy(staleness=None))
        try:
            return program(coordinator, local)
        finally:
            coordinator._close()

    results = run_ranks(3, each, servers=local, timeout_s=120)
    assert results[0] == ("first", ["first", "first"]), results
    kinds = sorted(type(one).__name__ for one in results[1:])
    assert kinds == ["GroupBroken", "SystemExit"], results


def test_a_coordinator_wants_variables_without_common_steps():
    with pytest.raises(sv.ConfigError, match="staleness=None"):
        sv.ClusterCoordinator(sv.ParameterServerStrategy())


def test_a_board_gives_tasks_in_order_and_a_lost_workers_first():
    queue = TaskQueue()
    for task in range(3):
        queue.put(task, np.zeros(1, np.uint8))
    queue.ask(1)
    queue.ask(2)
    assert {rank: task for rank, (task, _) in queue.assigned.items()} == {1: 0, 2: 1}
    queue.lose(1)
    queue.finish(1, 0, TaskResult(False, np.zeros(0, np.uint8)))  # late, and not its own any more
    queue.ask(3)
    assert queue.assigned[3][0] == 0
    assert not queue.is_over(2)
    assert queue.cancel() == [2]
    assert queue.is_over(2)
    queue.finish(2, 1, TaskResult(True, np.zeros(0, np.uint8)))
    queue.finish(3, 0, TaskResult(False, np.zeros(0, np.uint8)))
    assert queue.is_drained
    assert sorted(queue.outcomes) == [0, 1]
