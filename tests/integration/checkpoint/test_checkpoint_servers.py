"""Checkpoints of variables on servers: one version of all, by one worker, into any number of servers, and into other strategies."""

import os

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.checkpoint.checkpoint_reader import read_manifest
from syncvar.checkpoint.folder import CheckpointFolder
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.discovery import (
    PushCounter,
    put_tallies,
    take_tallies,
    tally_path,
)
from syncvar.parameter_server.session import LocalServers, ServerConnection
from syncvar.testing import run_ranks
from tests.support.harness import caught

CONFIG = RuntimeConfig(collective_timeout_s=60.0)


def workers(count, fn, *arguments, servers=2, config=CONFIG):
    """Run `fn(*arguments)` in every worker of a job; return the results by rank."""
    results = run_ranks(
        count, fn, *arguments, servers=LocalServers(count, servers), timeout_s=120, config=config
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def begun(shards=2, staleness=0, dtype="float32", optimizer=lambda: sv.optimizers.Adam(0.1)):
    """Make a table, a bias, an optimizer and a checkpoint of them."""
    strategy = sv.ParameterServerStrategy(
        sv.partitioners.FixedShards(shards) if shards else None, staleness=staleness
    )
    with strategy.scope():
        table = sv.Variable(
            np.linspace(-1, 1, 14).reshape(7, 2), name="table", dtype=dtype, aggregation="MEAN"
        )
        bias = sv.Variable(1.0, name="bias", dtype=dtype, aggregation="MEAN")
    made = optimizer()
    return strategy, table, bias, made, sv.Checkpoint(table=table, bias=bias, made=made, epoch=0)


def step(number, table, bias, optimizer):
    noise = np.random.default_rng([number, sv.rank()])
    pairs = [(noise.normal(size=table.shape).astype(np.float32), table), (noise.normal(), bias)]
    table.strategy.run(lambda: optimizer.apply_gradients(pairs))


OPTIMIZERS = {
    "Adam": lambda: sv.optimizers.Adam(0.1),
    "Momentum": lambda: sv.optimizers.Momentum(0.1),
    "SGD": lambda: sv.optimizers.SGD(0.1),
    "Adagrad": lambda: sv.optimizers.Adagrad(0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Adam", "float32"),
        ("Adam", "float16"),
        ("Momentum", "float64"),
        ("Adagrad", "float32"),
        ("SGD", "float32"),
    ],
)
def test_what_goes_on_from_a_checkpoint_has_the_bits_of_what_never_stopped(tmp_path, name, dtype):
    """Four steps, against two steps, a checkpoint, and two more with another number of servers and shards."""

    def bits(table, bias):
        sv.barrier()
        return table.numpy().tobytes(), bias.numpy().tobytes()

    def through():
        _, table, bias, made, _ = begun(dtype=dtype, optimizer=OPTIMIZERS[name])
        for number in range(4):
            step(number, table, bias, made)
        return bits(table, bias)

    def first():
        _, table, bias, made, checkpoint = begun(dtype=dtype, optimizer=OPTIMIZERS[name])
        for number in range(2):
            step(number, table, bias, made)
        checkpoint.epoch = 2
        sv.barrier()
        assert checkpoint.save(tmp_path / "c") == str(tmp_path / "c")
        sv.barrier()

    def second(shards):
        _, table, bias, made, checkpoint = begun(shards, dtype=dtype, optimizer=OPTIMIZERS[name])
        checkpoint.restore(tmp_path / "c")
        assert (checkpoint.epoch, made.iterations) == (2, 2)
        for number in range(2, 4):
            step(number, table, bias, made)
        return bits(table, bias)

    wanted = workers(2, through)
    workers(2, first)
    assert workers(2, second, 2) == wanted
    assert workers(2, second, 3, servers=3) == wanted
    assert workers(2, second, 0, servers=1) == wanted


@pytest.mark.parametrize("name", ["Adam", "Momentum"])
def test_a_checkpoint_goes_between_servers_and_copies(tmp_path, name):
    """Each has a step more than the one before; the last one has the bits of three steps in one job."""

    def mirrored():
        with sv.MirroredStrategy(reproducible=True).scope():
            table = sv.Variable(np.linspace(-1, 1, 14).reshape(7, 2), name="table", dtype="float32")
            bias = sv.Variable(1.0, name="bias", dtype="float32")
        made = OPTIMIZERS[name]()
        return None, table, bias, made, sv.Checkpoint(table=table, bias=bias, made=made, epoch=0)

    def part(make, number, *, restores):
        _, table, bias, made, checkpoint = make()
        if restores:
            checkpoint.restore(tmp_path / "c")
            assert checkpoint.epoch == number
        step(number, table, bias, made)
        assert made.iterations == number + 1
        checkpoint.epoch = number + 1
        sv.barrier()
        checkpoint.save(tmp_path / "c")
        sv.barrier()
        return table.numpy().tobytes(), bias.numpy().tobytes()

    def through():
        _, table, bias, made, _ = mirrored()
        for number in range(3):
            step(number, table, bias, made)
        return table.numpy().tobytes(), bias.numpy().tobytes()

    workers(2, lambda: part(lambda: begun(optimizer=OPTIMIZERS[name]), 0, restores=False))
    workers(2, lambda: part(mirrored, 1, restores=True))
    assert workers(
        2, lambda: part(lambda: begun(optimizer=OPTIMIZERS[name]), 2, restores=True)
    ) == workers(2, through)


def test_a_checkpoint_is_of_one_version_though_workers_go_on(tmp_path):
    """Two workers move what `a` and `b` hold from the one to the other, in transactions; their sum is 0 in every checkpoint."""
    steps = 150

    def program():
        strategy = sv.ParameterServerStrategy(staleness=None)
        with strategy.scope():
            a, b, done = (
                sv.Variable(0, name="a"),
                sv.Variable(0, name="b"),
                sv.Variable(np.zeros(3, np.int64), name="done"),
            )
        checkpoint = sv.Checkpoint(a=a, b=b)
        if sv.rank() == 0:
            found = set()
            while sum(done.numpy()) < 2 * steps:
                checkpoint.save(tmp_path / "c")
                saved = sv.save(tmp_path / "f", {"a": a, "b": b})
                found.add((*_values(tmp_path / "c"),))
                found.add(tuple(int(one) for one in sv.load(saved).values()))
            return found
        for _ in range(steps):
            with strategy.transaction():
                a.assign_add(1)
                b.assign_sub(1)
                done.scatter_add([sv.rank()], [1])
            strategy.tick()
        return set()

    found = workers(3, program)[0]
    assert all(a == -b for a, b in found), found
    assert len(found) > 1


def _values(path):
    from safetensors.numpy import load_file

    (shard,) = [name for name in os.listdir(path) if name.startswith("shard")]
    found = load_file(os.path.join(path, shard))
    return int(found["a"]), int(found["b"])


def test_what_does_not_fit_is_refused_on_every_worker_and_nothing_changes(tmp_path):
    def program():
        strategy, table, bias, made, checkpoint = begun(staleness=None)
        if sv.rank() == 0:
            step(0, table, bias, made)
            checkpoint.save(tmp_path / "c")
        sv.barrier()
        with strategy.scope():
            other = sv.Variable(np.full((8, 2), 5.0), name="other", dtype="float32")
        before = table.numpy().tobytes()
        made_of_wrong_shape = sv.Checkpoint(table=other, bias=bias, made=made, epoch=7)
        more = sv.Checkpoint(table=table, bias=bias, made=made, epoch=7, more=other)
        errors = [
            caught(made_of_wrong_shape.restore, tmp_path / "c"),
            caught(more.restore, tmp_path / "c"),
            caught(checkpoint.restore, tmp_path / "nothing"),
        ]
        assert (
            table.numpy().tobytes(),
            float(other.numpy()[0, 0]),
            made_of_wrong_shape.epoch,
            more.epoch,
        ) == (before, 5.0, 7, 7)
        more.restore(tmp_path / "c", partial=True)
        assert (more.epoch, float(other.numpy()[0, 0])) == (0, 5.0)
        return [(type(one).__name__, str(one)) for one in errors]

    for rank, ((first, shapes), (second, names), (third, _)) in enumerate(workers(2, program)):
        assert (first, second, third) == ("CheckpointError", "CheckpointError", "NotFound"), rank
        assert "float32[7, 2]" in shapes
        assert "float32[8, 2]" in shapes
        assert "'more'" in names


def test_a_state_that_is_refused_leaves_the_servers_alone(tmp_path):
    class Refusing:
        number = 1

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            if state["number"] == 1:
                raise ValueError("not this one")

    strategy = sv.ParameterServerStrategy()
    with strategy.scope():
        v = sv.Variable(1)
    checkpoint = sv.Checkpoint(v=v, refusing=Refusing())
    checkpoint.save(tmp_path / "c")
    v.assign(2)
    checkpoint.refusing.number = 2
    with pytest.raises(sv.CheckpointError, match="refused its state: ValueError: not this one"):
        checkpoint.restore(tmp_path / "c")
    assert int(v) == 2


def test_rank_0_saves_and_other_workers_go_on(tmp_path):
    def program():
        _, _, _, _, checkpoint = begun()
        manager = sv.CheckpointManager(checkpoint, tmp_path / "m")
        if sv.rank():
            assert checkpoint.save(tmp_path / "c") == str(tmp_path / "c")  # rank 0 never calls it
            assert checkpoint.save(tmp_path / "c", async_op=True).wait() == str(tmp_path / "c")
            return [
                os.path.exists(tmp_path / "c"),
                os.path.basename(manager.save(3)),
                str(caught(manager.save)),
            ]
        return manager.save(3, async_op=True).wait()

    there, name, error = workers(2, program)[1]
    assert (there, name) == (False, "step-0000000003")
    assert "manager.save(step)" in error


def test_a_worker_waits_for_rank_0_to_restore_and_is_told_when_it_does_not(tmp_path):
    def program():
        _, _, _, _, checkpoint = begun(staleness=None)
        if sv.rank() == 0:
            return ""
        return str(caught(checkpoint.restore, tmp_path / "c", timeout=0.2))

    assert "rank 0" in workers(2, program)[1]

    def disagree():
        _, _, _, _, checkpoint = begun(staleness=None)
        if sv.rank() == 0:
            checkpoint.save(tmp_path / "0")
            checkpoint.restore(tmp_path / "0")
            return None
        return [caught(checkpoint.restore, tmp_path / "1")]

    (error,) = workers(2, disagree)[1]
    assert isinstance(error, sv.MismatchError)
    assert str(tmp_path / "0") in str(error)


def test_a_worker_that_is_started_again_alone_takes_nothing_back(tmp_path):
    """Its program restores the latest checkpoint at its beginning: there was none, or an older one, when the first process did."""

    def program(local, found_some):
        def restarted(incarnation):
            here = ServerConnection(local.session(sv.rank(), 10.0, incarnation), sv.rank(), 2)
            current().extras["servers_here"] = here
            strategy, table, _, _, checkpoint = begun(staleness=None)
            manager = sv.CheckpointManager(checkpoint, tmp_path / str(found_some))
            return strategy, table, checkpoint, manager, manager.restore_latest()

        strategy, table, checkpoint, manager, first = restarted(0)
        assert (first is None) == (not found_some)
        sv.barrier()
        if sv.rank() == 0:
            checkpoint.epoch = 9
            manager.save(8)
        sv.barrier()
        with manager:
            table.assign_add(np.ones((7, 2)))
            strategy.tick()
        sv.barrier()
        before = table.numpy().tobytes()
        _, table, checkpoint, _, again = restarted(1)
        sv.barrier()
        assert again == first
        return table.numpy().tobytes() == before, checkpoint.epoch

    for found_some in (False, True):
        local = LocalServers(2, 2)
        if found_some:
            workers(1, lambda: _one_checkpoint(tmp_path / "True"))
        results = run_ranks(
            2, program, local, found_some, servers=local, timeout_s=120, config=CONFIG
        )
        assert results == [(True, 4 * found_some)] * 2, results


def _one_checkpoint(directory):
    _, _, _, _, checkpoint = begun(staleness=None)
    checkpoint.epoch = 4
    with sv.CheckpointManager(checkpoint, directory) as manager:
        manager.save(1)


@pytest.mark.parametrize("damaged", [1, 2])
def test_all_workers_take_the_checkpoint_before_a_damaged_one_or_learn_that_there_is_none(
    tmp_path, damaged
):
    def program(restores):
        _, _, _, _, checkpoint = begun(staleness=None)
        manager = sv.CheckpointManager(checkpoint, tmp_path)
        if restores:
            error = caught(manager.restore_latest)
            return checkpoint.epoch, str(error)
        for checkpoint.epoch in (1, 2):
            manager.save(checkpoint.epoch)
        manager.close()
        return None

    workers(1, program, False)
    for step in (2, 1)[:damaged]:
        (tmp_path / f"step-000000000{step}" / "manifest.json").write_text("{")
    for epoch, error in workers(2, program, True):
        assert epoch == 2 - damaged
        assert ("no checkpoint in " in error) == (damaged == 2), error


def test_variables_on_servers_beside_copies_of_workers(tmp_path):
    def program(restores):
        strategy = sv.ParameterServerStrategy(staleness=None)
        with strategy.scope():
            v = sv.Variable(0, name="v")
            own = sv.Variable(0, name="own", synchronization="NONE")
        checkpoint = sv.Checkpoint(v=v, own=own, epoch=1)
        if restores:
            checkpoint.epoch = 0
            checkpoint.restore(tmp_path / "c")
            sv.barrier()
            return int(v), int(own), checkpoint.epoch
        own.assign(10 + sv.rank())
        v.assign_add(1)
        sv.barrier()
        checkpoint.save(tmp_path / "c")
        return None

    workers(2, program, False)
    assert workers(2, program, True) == [(2, 10, 1), (2, 11, 1)]


def test_an_entry_waits_for_its_variable_and_slots_of_unknown_variables_are_not_lost_in_silence(
    tmp_path,
):
    _, table, bias, made, checkpoint = begun()
    step(0, table, bias, made)
    checkpoint.save(tmp_path / "c")
    wanted = table.numpy().tobytes()
    step(1, table, bias, made)
    with pytest.raises(sv.ConfigError, match="made=made, bias="):
        sv.Checkpoint(made=made).save(tmp_path / "d")
    with pytest.raises(sv.ConfigError, match="state on servers for variable 'table'"):
        sv.Checkpoint(bias=bias, made=made).save(tmp_path / "d")
    later = sv.Checkpoint(bias=bias)
    later.restore(tmp_path / "c")
    later.table = table
    assert table.numpy().tobytes() == wanted


def test_rows_that_an_optimizer_has_stepped_go_on_from_where_they_were(tmp_path):
    """Only the first of three parts was ever stepped; the others have what slots begin with."""
    _, table, _, made, checkpoint = begun(3, staleness=None, optimizer=OPTIMIZERS["Adagrad"])
    rows = ([0, 2], np.ones((2, 2), np.float32))
    made.apply_gradients([(rows, table)])
    checkpoint.save(tmp_path / "c")
    assert sv.load(sv.save(tmp_path / "f", made))[f"{table.name}/squares"][:, 0].tolist() == [
        1.5,
        0.5,
        1.5,
        0.5,
        0.5,
        0.5,
        0.5,
    ]
    made.apply_gradients([(rows, table)])
    made.apply_gradients([(([6], np.ones((1, 2), np.float32)), table)])
    wanted = table.numpy().tobytes()
    checkpoint.restore(tmp_path / "c")
    made.apply_gradients([(rows, table)])
    made.apply_gradients([(([6], np.ones((1, 2), np.float32)), table)])
    assert table.numpy().tobytes() == wanted


def test_pushes_are_counted_through_checkpoints_and_what_is_lost_is_said_once(tmp_path, caplog):
    """A worker has made 4 pushes, of which 3 are in the checkpoint; one that begins anew with other servers knows that there were 4."""

    def pushed(value, times):
        for _ in range(times):
            with value.strategy.transaction():  # one push, though to several servers
                value.assign_add(np.ones(3))
        value.strategy.tick()

    def made():
        strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
        with strategy.scope():
            return strategy, sv.Variable(np.zeros(3), name="v")

    def first():
        _, v = made()
        pushed(v, 3)
        sv.barrier()
        sv.Checkpoint(v=v).save(tmp_path / "c")
        sv.barrier()
        pushed(v, 1)
        return v.strategy.here.session.client.pushes

    def second():
        strategy, v = made()
        strategy.here.session.pushes_before = 4  # as the launcher keeps it
        checkpoint = sv.Checkpoint(v=v)
        for _ in range(2):
            checkpoint.restore(tmp_path / "c")
        pushed(v, 2)
        sv.barrier()
        checkpoint.save(tmp_path / "d")
        sv.barrier()
        with CheckpointFolder(tmp_path / "d") as folder:
            return strategy.here.session.client.pushes, read_manifest(folder).pushes

    assert workers(2, first) == [4, 4]
    with caplog.at_level("WARNING", "syncvar"):
        assert workers(2, second) == [(5, {0: 5, 1: 5})] * 2
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        f"rank {rank} goes on from {tmp_path / 'c'}: 1 of the 4 pushes that it had made are lost, number 4 and later"
        for rank in range(2)
    ]


def test_a_tally_outlives_its_process_but_not_its_own_start(tmp_path):
    counts = [
        (0, None, 7),
        (0, 0, 9),
        (1, 9, 2),
        (1, 0, 3),
    ]  # generation, what was counted before it, what is counted
    for generation, before, count in counts:
        tally = PushCounter(tally_path(str(tmp_path), 3), generation)
        assert tally.before == (before or 0)
        tally.count(count)
        tally.close()
    (tmp_path / "other").mkdir()
    put_tallies(take_tallies(tmp_path), tmp_path / "other")
    tally = PushCounter(tally_path(str(tmp_path / "other"), 3), 2)
    assert tally.before == 3
    tally.close()
