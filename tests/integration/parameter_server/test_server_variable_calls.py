"""Variables on servers as programs use them: pushes, pulls, rows, steps of optimizers, ticks, snapshots."""

import threading
import types

import numpy as np
import pytest

import syncvar as sv
from syncvar.parameter_server.request_client import RequestBuilder
from syncvar.parameter_server.session import LocalServers
from syncvar.parameter_server.shard import Spec
from syncvar.testing import run_ranks


def workers(count, fn, *, servers=2, replicas=0):
    """Run `fn(local servers)` in every worker of a job; return the results by rank."""
    local = LocalServers(count, servers, replicas)
    results = run_ranks(count, fn, local, servers=local, timeout_s=120)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def made(value, *, partitioner=None, staleness=None, **options):
    strategy = sv.ParameterServerStrategy(partitioner, staleness=staleness)
    with strategy.scope():
        return strategy, sv.Variable(value, **options)


def test_every_push_is_in_what_is_read_after_a_barrier():
    def program(_local):
        _, v = made(np.zeros(5, np.int64), name="v")
        for _ in range(20):
            v.assign_add(np.arange(5) * (sv.rank() + 1))
        sv.barrier()
        return v.numpy().tolist()

    assert workers(3, program) == [[0, 120, 240, 360, 480]] * 3


@pytest.mark.parametrize("staleness", [0, None])
def test_a_push_of_one_worker_alone_is_seen_by_all_after_a_barrier(staleness):
    def program(_local):
        _, v = made(0, staleness=staleness)
        if sv.rank() == 1:
            v.assign_add(7)
        sv.barrier()
        return int(v)

    assert workers(3, program) == [7, 7, 7]


def test_rows_are_looked_up_in_the_order_of_the_request_and_duplicates_are_combined():
    def program(_local):
        _, table = made(
            np.arange(14.0).reshape(7, 2),
            partitioner=sv.partitioners.FixedShards(3),
            dtype="float64",
        )
        assert isinstance(table, sv.ShardedVariable)
        assert (table.num_shards, table.row_ranges, table.shape) == (
            3,
            [[0, 3], [3, 5], [5, 7]],
            (7, 2),
        )
        looked = table.lookup([[6, 0], [6, 4]])
        sv.barrier()
        if sv.rank() == 0:
            table.scatter_add([4, 0, 4], [[1, 1], [2, 2], [10, 10]])
            table.scatter_update([1, 1], [[5, 5], [6, 6]])
            table.scatter_max([2], [[100, 0]])
        sv.barrier()
        return looked.tolist(), table.numpy().tolist(), table[4].tolist(), len(list(table))

    for looked, value, row, count in workers(2, program):
        assert looked == [[[12, 13], [0, 1]], [[12, 13], [8, 9]]]
        assert value == [[2, 3], [6, 6], [100, 5], [6, 7], [19, 20], [10, 11], [12, 13]]
        assert (row, count) == ([19, 20], 7)


def test_bad_input_is_refused_before_anything_is_sent():
    strategy, table = made(np.zeros((4, 2), np.float32), partitioner=sv.partitioners.FixedShards(2))
    for call, error in (
        (lambda: table.lookup([4]), sv.RowOutOfRange),
        (lambda: table.lookup([0.5]), sv.ConfigError),
        (lambda: table.scatter_add([-1], np.zeros((1, 2))), sv.RowOutOfRange),
        (lambda: table.assign_add(np.zeros(3)), sv.ConfigError),
        (lambda: table.set_staleness(-1), sv.ConfigError),
        (lambda: sv.ParameterServerStrategy(staleness=True), sv.ConfigError),
        (lambda: sv.ParameterServerStrategy(7), sv.ConfigError),
        (lambda: strategy.snapshot([1]), sv.ConfigError),
        (lambda: table.pin("eager"), sv.UsageError),
        (lambda: table.read_from(1), sv.ConfigError),
        (lambda: sv.ShardedVariable(1.0), sv.UsageError),
    ):
        with pytest.raises(error):
            call()
    assert not table.numpy().any()


def test_several_workers_without_servers_are_told_how_to_start_some():
    results = run_ranks(2, sv.ParameterServerStrategy, timeout_s=120)
    assert all(isinstance(one, sv.UsageError) and "--servers 1" in str(one) for one in results)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: sv.optimizers.SGD(0.1),
        lambda: sv.optimizers.Momentum(0.1, 0.5),
        lambda: sv.optimizers.Nesterov(0.1),
        lambda: sv.optimizers.Adagrad(0.1),
        lambda: sv.optimizers.Adam(0.1, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_staleness_0_gives_the_bits_of_synchronous_training(optimizer, dtype):
    start = np.linspace(-1, 1, 33).astype(dtype)

    def train(strategy, tick):
        with strategy.scope():
            w = sv.Variable(start, name="w", aggregation="MEAN")
        stepper = optimizer()
        noise = np.random.default_rng(sv.rank())
        for _ in range(5):
            x = noise.normal(size=33).astype(np.float32)
            strategy.run(
                lambda x=x: stepper.apply_gradients([(w.read_value() * np.float32(0.1) + x, w)])
            )
            tick()
        assert stepper.iterations == 5
        return w.numpy().tobytes()

    def program(_local):
        servers = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=0)
        return train(servers, servers.tick), train(
            sv.MirroredStrategy(reproducible=True), lambda: None
        )

    for on_servers, synchronous in workers(3, program):
        assert on_servers == synchronous


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_increments_with_staleness_0_give_the_bits_of_synchronous_ones(aggregation):
    def train(strategy):
        with strategy.scope():
            v = sv.Variable(np.zeros(17, np.float32), aggregation=aggregation)
        noise = np.random.default_rng(sv.rank())
        for _ in range(4):
            strategy.run(
                lambda: v.assign_add(
                    noise.normal(size=17).astype(np.float32) * 1e3 + v.read_value()
                )
            )
        return v.numpy().tobytes()

    def program(_local):
        return train(sv.ParameterServerStrategy(staleness=0)), train(
            sv.MirroredStrategy(reproducible=True)
        )

    for on_servers, synchronous in workers(3, program):
        assert on_servers == synchronous


def test_the_step_of_some_rows_leaves_the_others_and_their_slots():
    _, table = made(np.ones((5, 2), np.float32), partitioner=sv.partitioners.FixedShards(2))
    optimizer = sv.optimizers.Momentum(0.5, 0.5)
    gradient = np.ones((3, 2), np.float32)
    optimizer.apply_gradients([((np.array([4, 1, 4]), gradient), table)])
    slices = types.SimpleNamespace(
        indices=np.array([1]), values=gradient[:1]
    )  # as a tf.IndexedSlices
    optimizer.apply_gradients([(slices, table)])
    assert table.numpy()[:, 0].tolist() == [1.0, 1 - 0.5 - 0.75, 1.0, 1.0, 0.0]
    with pytest.raises(sv.ConfigError, match="clip_norm"):
        sv.optimizers.SGD(0.1, clip_norm=1.0).apply_gradients([(table.numpy(), table)])


def test_a_tuple_of_two_values_for_two_rows_names_no_rows():
    _, v = made(np.ones(2))
    sv.optimizers.SGD(1.0).apply_gradients([((1.0, 2.0), v)])
    assert v.numpy().tolist() == [0.0, -1.0]


def test_a_read_waits_for_those_that_are_further_behind_than_its_bound():
    may_tick = threading.Event()

    def program(_local):
        strategy, v = made(0, staleness=2)
        if sv.rank() == 0:
            for _ in range(3):
                v.assign_add(1)
                strategy.tick()
            ticket = threading.Thread(target=read, args=(v,))
            ticket.start()
            assert not done.wait(0.3)  # it waits: the other has not ended its first step
            may_tick.set()
            ticket.join(20)
            assert done.is_set()
            assert strategy.staleness_counts() == {2: 1}
            return seen[0]
        v.assign_add(100)
        assert may_tick.wait(20)
        strategy.tick()
        return None

    seen, done = [], threading.Event()

    def read(v):
        seen.append(int(v))
        done.set()

    assert workers(2, program)[0] == 103


def test_a_snapshot_never_sees_a_half_of_a_transaction():
    def program(_local):
        strategy = sv.ParameterServerStrategy(staleness=None)
        with strategy.scope():
            a, b = sv.Variable(0, name="a"), sv.Variable(0, name="b")
        assert a.server_of(0) != b.server_of(0)
        if sv.rank() == 0:
            for _ in range(200):
                with strategy.transaction():
                    a.assign_add(1)
                    b.assign_add(1)
            sv.barrier()
            return [int(a), int(b)]
        seen = [strategy.snapshot([a, b]) for _ in range(200)]
        assert all(int(x) == int(y) for x, y in seen), seen
        sv.barrier()
        return [int(one) for one in strategy.snapshot([a, b])]

    assert workers(2, program) == [[200, 200]] * 2


def test_nothing_is_sent_of_a_transaction_that_an_exception_leaves():
    strategy, v = made(1)
    with pytest.raises(KeyError), strategy.transaction():
        v.assign_add(1)
        raise KeyError
    with (
        pytest.raises(sv.UsageError, match="inside another"),
        strategy.transaction(),
        strategy.transaction(),
    ):
        pass
    sv.assign_add_all([(v, 5)])
    assert int(v) == 6


def test_a_lost_server_is_replaced_by_its_mirror_and_nothing_is_lost():
    def program(local):
        _, v = made(np.zeros(6, np.int64), partitioner=sv.partitioners.FixedShards(3))
        for step in range(30):
            v.assign_add(np.ones(6, np.int64))
            if step == 10 and sv.rank() == 0:
                local.lose(1)
        sv.barrier()
        return v.numpy().tolist()

    assert workers(2, program, servers=3, replicas=1) == [[60] * 6] * 2


def test_a_lost_server_without_a_mirror_is_named():
    def program(local):
        _, v = made([1.0, 2.0])
        sv.barrier()
        if sv.rank() == 0:
            local.lose(0)
        sv.barrier()
        with pytest.raises(sv.PeerLost) as error:
            v.numpy()
        with pytest.raises(sv.PeerLost):
            v.numpy()
        return str(error.value)

    texts = workers(2, program, servers=1)
    assert all("signal 9" in text for text in texts)


def test_a_fenced_incarnation_is_refused():
    local = LocalServers(1)
    first = local.session(0, 5.0)
    asking = RequestBuilder()
    asking.create(0, "v", Spec((), "int64", "SUM", (), 0), None, np.zeros((), np.int64))
    first.wait(first.request(asking.parts()), "making")
    local.lose_worker(0, 0)
    asking = RequestBuilder()
    asking.push(0, "v", "assign_add", np.ones((), np.int64))
    with pytest.raises(sv.GroupBroken, match="given this worker up"):
        first.wait(first.request(asking.parts()), "a late push")
    second = local.session(0, 5.0, incarnation=1)
    asking = RequestBuilder()
    at = asking.pull(0, "v")
    assert int(second.wait(second.request(asking.parts()), "reading").array(*at)) == 0


def test_other_kinds_of_variables_are_each_workers_own():
    def program(_local):
        strategy = sv.ParameterServerStrategy(staleness=None)
        with strategy.scope():
            own = sv.Variable(0, synchronization="ON_READ", aggregation="SUM")
            apart = sv.Variable(sv.rank(), synchronization="NONE")
        strategy.run(lambda: own.assign_add(sv.rank() + 1))
        with strategy.scope():
            return int(own), int(apart), int(strategy.reduce("SUM", 1, axis=None))

    assert workers(2, program) == [(3, 0, 2), (3, 1, 2)]


def test_only_the_chief_calls_a_callable():
    calls = []

    def program(_local):
        _, v = made(
            lambda: calls.append(sv.rank()) or np.arange(6.0),
            partitioner=sv.partitioners.FixedShards(2),
        )
        return v.num_shards, v.shape, v.numpy().tolist()

    assert workers(2, program) == [(2, (6,), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])] * 2
    assert calls == [0]


def test_workers_that_ask_for_different_variables_are_told():
    def program(_local):
        strategy = sv.ParameterServerStrategy()
        with strategy.scope():
            return sv.Variable(np.zeros(2 + sv.rank()), name="v")

    results = run_ranks(2, program, LocalServers(2), servers=LocalServers(2), timeout_s=120)
    assert isinstance(results[1], sv.MismatchError), results
    assert "'v/0'" in str(results[1])
