"""Distributed datasets over in-memory worlds: splits, uneven ends, exact metrics, disagreements, saved positions."""

import threading
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError, MismatchError, UsageError
from syncvar.testing import run_ranks


class Pair(NamedTuple):
    x: Any
    y: Any


def outcomes(size, fn, **keywords):
    began = time.monotonic()
    results = run_ranks(size, fn, timeout_s=200, **keywords)
    assert time.monotonic() - began < 150, "nobody waited for a deadline"
    return results


def everywhere(size, fn, **keywords):
    results = outcomes(size, fn, **keywords)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def lists(batches):
    return [batch.tolist() for batch in batches]


# -- global batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_global_batches_are_cut_evenly_and_lose_nothing(size, shared):
    data = {"x": np.arange(22).reshape(11, 2), "y": np.arange(11, dtype=np.int8)}

    def program():
        dataset = sv.data.from_arrays(data, batch_size=5, shuffle=True, seed=3).prefetch(2)
        distributed = sv.MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)
        assert len(distributed) == 3
        return [list(distributed) for _ in range(2)]

    parts = everywhere(size, program, shared=shared)
    whole = sv.data.from_arrays(data, batch_size=5, shuffle=True, seed=3)
    for epoch in range(2):
        for step, batch in enumerate(whole):
            mine = [part[epoch][step] for part in parts]
            assert np.concatenate([one["x"] for one in mine]).tolist() == batch["x"].tolist()
            assert np.concatenate([one["y"] for one in mine]).tolist() == batch["y"].tolist()
            rows = [len(one["y"]) for one in mine]
            assert max(rows) - min(rows) <= 1
            assert rows == sorted(rows, reverse=True)
            assert {(one["y"].dtype.name, one["x"].shape[1:]) for one in mine} == {("int8", (2,))}


def test_the_order_of_an_epoch_does_not_depend_on_what_one_rank_reads_besides():
    def program():
        dataset = sv.data.from_arrays(np.arange(8), batch_size=4, shuffle=True)
        if sv.rank() == 1:
            list(dataset)
        return lists(sv.get_strategy().experimental_distribute_dataset(dataset))

    one, other = everywhere(2, program)
    assert sorted(sum(one + other, [])) == list(range(8))  # noqa: RUF017


def test_any_iterable_of_batches_and_named_tuples():
    def program():
        strategy = sv.MirroredStrategy()
        once = (np.arange(3) + step for step in range(2))
        distributed = strategy.experimental_distribute_dataset(once)
        first = lists(distributed)
        with pytest.raises(UsageError, match="can be read once"):
            list(distributed)
        pairs = strategy.experimental_distribute_dataset([Pair(np.zeros(1), [np.array(["a"])])])
        (pair,) = list(pairs)
        return first, type(pair).__name__, pair.x.shape, pair.y[0].dtype.kind

    assert everywhere(2, program) == [
        ([[0, 1], [1, 2]], "Pair", (1,), "U"),
        ([[2], [3]], "Pair", (0,), "U"),
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_an_element_without_a_first_axis(size):
    def program():
        distributed = sv.get_strategy().experimental_distribute_dataset([np.float64(1.0)])
        with pytest.raises(ConfigError, match=r"has no first axis.*batch_size=32"):
            next(iter(distributed))
        return float(sv.all_reduce(1.0))

    assert everywhere(size, program) == [size] * size


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            lambda rank: [np.zeros(4)] * (3 - (rank == 1)),
            "has ended on some replicas and not on others",
        ),
        (lambda rank: [np.zeros(4 + (rank == 1))], "differ in length"),
        (lambda rank: [np.zeros((4, 1 + (rank == 1)))], "differ in structure, dtype or shape"),
        (
            lambda rank: [np.zeros(4, np.float32 if rank == 1 else float)],
            "differ in structure, dtype or shape",
        ),
        (
            lambda rank: [{"a": np.zeros(4)} if rank == 1 else [np.zeros(4)]],
            "differ in structure, dtype or shape",
        ),
    ],
)
def test_global_batches_that_differ_are_told_to_all(batches, words):
    def program():
        distributed = sv.MirroredStrategy().experimental_distribute_dataset(batches(sv.rank()))
        iterator = iter(distributed)
        with pytest.raises(MismatchError, match=words) as caught:
            list(iterator)
        assert "the same global batches" in str(caught.value)
        assert set(caught.value.table) == {0, 1, 2}
        with pytest.raises(UsageError, match="failed earlier"):
            next(iterator)
        return float(sv.all_reduce(1.0)), caught.value.table

    results = everywhere(3, program)
    assert {total for total, _ in results} == {3.0}, "the group stays usable"
    assert results[0][1] == results[1][1] == results[2][1]
    assert results[0][1][1] != results[0][1][0]


def test_different_contents_are_said_and_under_strict_refused():
    def program():
        rows = np.arange(6) + sv.rank()
        # Warnings are the process's: rank 0 watches for all, from before the first batch until all have gone on.
        with (
            pytest.warns(RuntimeWarning, match="examples are lost or counted twice")
            if sv.rank() == 0
            else nullcontext()
        ):
            parts = lists(sv.MirroredStrategy().experimental_distribute_dataset([rows, rows]))
            sv.barrier()
        with pytest.raises(MismatchError, match="one seed everywhere") as caught:
            list(sv.MirroredStrategy(strict=True).experimental_distribute_dataset([rows]))
        return parts, len(set(caught.value.table.values()))

    assert everywhere(2, program) == [([[0, 1, 2]] * 2, 2), ([[4, 5, 6]] * 2, 2)]


# -- a dataset of each replica ---------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", [[2], [3, 1], [0, 2], [1, 0, 3], [0, 0, 2, 1], [0, 0]])
def test_uneven_datasets_end_together(lengths, shared):
    def make(context):
        rank = context.input_pipeline_id
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (
            len(lengths),
            len(lengths),
        )
        return [
            {"x": np.full((2, 3), 10 * rank + step, np.float32), "n": np.full(2, rank)}
            for step in range(lengths[rank])
        ]

    def program():
        distributed = sv.MirroredStrategy().distribute_datasets_from_function(make)
        first, second = list(distributed), list(distributed)
        assert len(first) == len(second)
        with pytest.raises(TypeError, match="longest"):
            len(distributed)
        return first

    for rank, batches in enumerate(everywhere(len(lengths), program, shared=shared)):
        assert len(batches) == max(lengths)
        for step, batch in enumerate(batches):
            rows = 2 if step < lengths[rank] else 0
            assert (batch["x"].shape, batch["x"].dtype, batch["n"].shape) == (
                (rows, 3),
                np.float32,
                (rows,),
            )
            assert batch["n"].dtype == np.int64
            assert not rows or (batch["x"] == 10 * rank + step).all()


def test_a_kind_of_batch_that_changes_is_told_to_those_who_have_ended():
    def make(context):
        long = [
            np.zeros((1, 4)),
            np.zeros((1, 4)),
            np.zeros((1, 7), np.int16),
            np.zeros((1, 7), np.int16),
        ]
        return long if context.input_pipeline_id == 1 else long[:1]

    def program():
        distributed = sv.get_strategy().distribute_datasets_from_function(make)
        return [(batch.shape, batch.dtype.name) for batch in distributed]

    own, other = everywhere(2, program)
    assert other == [((1, 4), "float64")] * 2 + [((1, 7), "int16")] * 2
    assert own == [((1, 4), "float64"), ((0, 4), "float64"), ((0, 7), "int16"), ((0, 7), "int16")]


def test_containers_are_kept_where_they_have_been_seen():
    def make(context):
        return [Pair(np.ones(1), np.array(["text"]))] * (
            2 if context.input_pipeline_id == 0 else context.input_pipeline_id - 1
        )

    def program():
        return [
            type(batch).__name__
            for batch in sv.get_strategy().distribute_datasets_from_function(make)
        ]

    assert everywhere(3, program) == [["Pair", "Pair"], ["tuple", "tuple"], ["Pair", "Pair"]]


@pytest.mark.parametrize(
    "other",
    [np.zeros((2, 3)), np.zeros((2, 4), np.float32), [np.zeros((2, 4))], {"x": np.zeros((2, 4))}],
)
def test_batches_that_do_not_fit_together_are_told_to_all(other):
    def program():
        make = lambda context: [other if context.input_pipeline_id == 1 else np.zeros((2, 4))]
        with pytest.raises(
            MismatchError, match="differ in structure, dtype or shape of a row"
        ) as caught:
            list(sv.MirroredStrategy().distribute_datasets_from_function(make))
        assert "float64[rows, 4], 2 rows" in caught.value.table[2]
        return float(sv.all_reduce(1.0))

    assert everywhere(3, program) == [3.0] * 3


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_exception_while_reading_is_told_to_all(ahead):
    def program():
        fails = sv.rank() == 1

        def elements():
            yield np.zeros(2)
            if fails:
                raise OSError("the disk is gone")
            yield np.zeros(2)

        dataset = sv.data.from_generator(elements)
        strategy = sv.MirroredStrategy()
        iterator = iter(
            strategy.distribute_datasets_from_function(
                lambda _: dataset.prefetch(ahead) if ahead else dataset
            )
        )
        next(iterator)
        with pytest.raises(OSError if fails else MismatchError, match="the disk is gone") as caught:
            next(iterator)
        assert fails or "rank 1" in str(caught.value)
        # The quotation is cut: with the rows of ranks that were in the call, it may end sooner.
        told = "the disk is gone" if fails else "the disk is gone|rank 1 refused its own call"
        with pytest.raises(UsageError, match=told):
            next(iterator)
        return float(sv.all_reduce(1.0))

    assert everywhere(3, program) == [3.0] * 3


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda rank: (lambda _: 5) if rank == 1 else (lambda _: []),
            ConfigError,
            "an iterable of batches, not int",
        ),
        (lambda rank: 7 if rank == 1 else (lambda _: []), ConfigError, "fn must be a function"),
        (
            lambda rank: (lambda _: 1 // 0) if rank == 1 else (lambda _: []),
            ZeroDivisionError,
            "ZeroDivisionError|division",
        ),
    ],
)
def test_a_function_that_fails_on_one_replica(make, error, words):
    def program():
        strategy = sv.MirroredStrategy()
        with pytest.raises(error if sv.rank() == 1 else MismatchError, match=words):
            strategy.distribute_datasets_from_function(make(sv.rank()))
        with pytest.raises(
            ConfigError if sv.rank() == 1 else MismatchError, match="iterable of batches"
        ):
            strategy.experimental_distribute_dataset(3 if sv.rank() == 1 else [])
        return float(sv.all_reduce(1.0))

    assert everywhere(2, program) == [2.0] * 2


def test_a_replica_that_does_not_read_is_named_not_waited_for():
    def program():
        strategy = sv.MirroredStrategy()
        iterator = iter(strategy.distribute_datasets_from_function(lambda _: [np.zeros(1)] * 2))
        next(iterator)
        with pytest.raises(MismatchError, match="next batch of a distributed dataset") as caught:
            strategy.reduce("SUM", 1.0, axis=None) if sv.rank() == 1 else next(iterator)
        return sorted(caught.value.table)

    assert everywhere(2, program) == [[0, 1]] * 2


def test_where_input_is_distributed():
    def program():
        strategy, other = sv.MirroredStrategy(), sv.MirroredStrategy()
        seen = []
        with strategy.scope():
            seen.append(lists(strategy.experimental_distribute_dataset([np.arange(4)])))
            for call in (
                other.experimental_distribute_dataset,
                other.distribute_datasets_from_function,
            ):
                with pytest.raises(UsageError, match="under another strategy"):
                    call([])
        with pytest.raises(
            UsageError, match="experimental_distribute_dataset is called inside run"
        ):
            strategy.run(lambda: strategy.experimental_distribute_dataset([]))
        iterator = iter(strategy.experimental_distribute_dataset([np.arange(4)]))
        seen.append(strategy.run(lambda: next(iterator).tolist()))
        half = sv.new_group([0])
        if half.is_member:
            seen.append(
                lists(sv.MirroredStrategy(half).experimental_distribute_dataset([np.arange(4)]))
            )
        else:
            with pytest.raises(UsageError, match="not a member"):
                sv.MirroredStrategy(half).experimental_distribute_dataset([])
        return seen

    assert everywhere(2, program) == [[[[0, 1]], [0, 1], [[0, 1, 2, 3]]], [[[2, 3]], [2, 3]]]


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", [[7], [3, 9], [0, 5, 12], [4, 0, 1, 8]])
def test_training_over_uneven_data_is_exact(lengths, shared):
    # Integers in float64: sums are exact in any order, so results are compared with ==.
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    x = np.random.default_rng(0).integers(-8, 8, (total, 3)).astype(float)
    y = np.random.default_rng(1).integers(-8, 8, total).astype(float)

    def make(context):
        mine = slice(starts[context.input_pipeline_id], starts[context.input_pipeline_id + 1])
        return sv.data.from_arrays((x[mine], y[mine]), batch_size=2)

    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w = sv.Variable(np.zeros(3), aggregation="MEAN", dtype=np.float64)
            loss, seen = (
                sv.Variable(0.0, dtype=np.float64, synchronization="ON_READ", aggregation="SUM")
                for _ in range(2)
            )
            largest = sv.Variable(
                -1.0, dtype=np.float64, synchronization="ON_READ", aggregation="MEAN"
            )

        def step(batch):
            rows, wanted = batch
            error = rows @ w.read_value() - wanted
            loss.assign_add((error**2).sum())
            seen.assign_add(len(wanted))
            largest.assign_add(1.0)
            weight = float(len(wanted))
            mean = rows.T @ error / max(weight, 1.0)
            # Twice the same: a mean weighted by examples, and sums with their number of examples.
            gradient = sv.all_reduce(mean * 1.0, "mean", weight=weight)
            sums = sv.get_replica_context().all_reduce("SUM", [rows.T @ error, weight])
            assert np.allclose(gradient, sums[0] / sums[1], rtol=1e-12, atol=1e-12)
            w.assign_sub(np.round(sums[0] / sums[1]))
            return error

        means = []
        for batch in strategy.distribute_datasets_from_function(make):
            error = strategy.run(step, args=(batch,))
            means.append(strategy.reduce("MEAN", error, axis=0).item())
        with strategy.scope():
            return w.numpy().tolist(), float(loss), float(seen), float(largest), means

    results = everywhere(len(lengths), program, shared=shared)
    assert all(result == results[0] for result in results)
    w, loss, means = np.zeros(3), 0.0, []
    steps = -(-max(lengths) // 2)
    for step in range(steps):
        rows = [
            row
            for rank, length in enumerate(lengths)
            for row in range(starts[rank] + 2 * step, starts[rank] + min(length, 2 * step + 2))
        ]
        error = x[rows] @ w - y[rows]
        loss += (error**2).sum()
        w = w - np.round(x[rows].T @ error / len(rows))
        means.append(error.sum() / len(rows))
    assert results[0] == (w.tolist(), loss, float(total), steps - 1.0, means)


def test_metrics_over_short_global_batches_are_exact():
    values = np.arange(1.0, 12.0)

    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            total = sv.Variable(0.0, dtype=np.float64, synchronization="ON_READ", aggregation="SUM")
            count = sv.Variable(0, synchronization="ON_READ", aggregation="SUM")
        dataset = strategy.experimental_distribute_dataset(
            sv.data.from_arrays(values, batch_size=5)
        )

        def step(batch):
            total.assign_add(batch.sum())
            count.assign_add(len(batch))
            return batch

        means = [
            strategy.reduce("MEAN", strategy.run(step, (batch,)), axis=0).item()
            for batch in dataset
        ]
        return means, float(total.sync()), int(count.sync())

    for size in (1, 2, 4):
        assert everywhere(size, program) == [([3.0, 8.0, 11.0], 66.0, 11)] * size


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 4)])
def test_a_position_is_restored_on_another_number_of_replicas(before, after):
    def dataset():
        return sv.data.from_arrays(np.arange(23), batch_size=5, shuffle=True, seed=8).prefetch(1)

    def first():
        distributed = sv.get_strategy().experimental_distribute_dataset(dataset())
        list(distributed)
        iterator = iter(distributed)
        seen = [next(iterator) for _ in range(2)]
        return iterator.state_dict(), seen

    states = everywhere(before, first)
    state = states[0][0]
    assert all(one == state for one, _ in states)
    assert state == {"input": "global batches", "epoch": 1, "position": 2, "seed": "8"}
    assert all(type(value) in (int, str) for value in state.values())

    def second():
        distributed = sv.get_strategy().experimental_distribute_dataset(dataset())
        iterator = iter(distributed)
        iterator.load_state_dict(state)
        rest, next_epoch = list(iterator), list(distributed)
        assert iterator.state_dict()["position"] == 5
        return rest, next_epoch

    whole = dataset()
    epochs = [[batch.tolist() for batch in whole.at(epoch)] for epoch in range(3)]
    parts = everywhere(after, second)
    for place, expected in ((0, epochs[1][2:]), (1, epochs[2])):
        steps = zip(*(part[place] for part in parts), strict=True)
        assert [np.concatenate(step).tolist() for step in steps] == expected


def test_a_position_in_datasets_of_each_replica_and_in_lists():
    lengths = [1, 4]

    def make(context):
        rank = context.input_pipeline_id
        return [np.array([10 * rank + step]) for step in range(lengths[rank])]

    def program():
        strategy = sv.MirroredStrategy()
        distributed = strategy.distribute_datasets_from_function(make)
        iterator = iter(distributed)
        for _ in range(2):
            next(iterator)
        state = iterator.state_dict()
        again = iter(strategy.distribute_datasets_from_function(make))
        again.load_state_dict(state)
        whole = strategy.experimental_distribute_dataset([np.arange(2)])
        with pytest.raises(
            ConfigError,
            match="input 'batches from a function', this iterator has 'global batches'",
        ):
            iter(whole).load_state_dict(state)
        return state["position"], lists(again), lists(iterator)

    assert everywhere(2, program) == [(2, [[], []], [[], []]), (2, [[12], [13]], [[12], [13]])]


def test_a_checkpoint_continues_on_another_number_of_replicas(tmp_path):
    data = np.arange(1.0, 24.0)
    path = str(tmp_path / "middle")

    def make():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            total = sv.Variable(
                0.0, dtype=np.float64, synchronization="ON_READ", aggregation="SUM", name="total"
            )
        dataset = sv.data.from_arrays(data, batch_size=4, shuffle=True, seed=2).prefetch(1)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        return strategy, total, iterator, sv.Checkpoint(total=total, input=iterator)

    def first():
        strategy, total, iterator, checkpoint = make()
        for _ in range(3):
            strategy.run(lambda batch: total.assign_add(batch.sum()), (next(iterator),))
        checkpoint.save(path)
        iterator.close()

    def second():
        strategy, total, iterator, checkpoint = make()
        checkpoint.restore(path)
        for batch in iterator:
            strategy.run(lambda batch: total.assign_add(batch.sum()), (batch,))
        return float(total.sync()), iterator.state_dict()["position"]

    everywhere(3, first)
    for size in (1, 2, 4):
        assert everywhere(size, second) == [(float(data.sum()), 6)] * size


def test_replicas_at_different_positions_are_told():
    def program():
        iterator = iter(sv.get_strategy().experimental_distribute_dataset([np.zeros(2)] * 3))
        if sv.rank() == 1:
            iterator.load_state_dict(iterator.state_dict() | {"position": 1})
        with pytest.raises(MismatchError, match="at different places") as caught:
            next(iterator)
        return caught.value.table[1]

    assert everywhere(2, program) == ["epoch 0, batch 1: float64[rows], 2 rows"] * 2


def test_closing_and_dropping_end_the_threads():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "syncvar-prefetch"]

    def program():
        dataset = sv.data.from_arrays(np.arange(40), batch_size=2).prefetch(3)
        strategy = sv.get_strategy()
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        one = next(iterator).tolist()
        iterator.close()
        two = next(iterator).tolist()
        for _ in strategy.experimental_distribute_dataset(dataset):
            break
        del iterator
        return one, two

    assert everywhere(2, program) == [([0], [2]), ([1], [3])]
    assert not threads()


def test_the_input_context():
    assert sv.InputContext(2, 1, 4).get_per_replica_batch_size(12) == 3
    with pytest.raises(
        ConfigError, match="13 rows cannot be shared evenly by 4 replicas; take 12 or 16"
    ):
        sv.InputContext(2, 1, 4).get_per_replica_batch_size(13)
    for wrong in (-4, 8.0, True, None):
        with pytest.raises(ConfigError, match="global_batch_size"):
            sv.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(wrong)
    with pytest.raises(AttributeError):
        sv.InputContext().num_input_pipelines = 3
