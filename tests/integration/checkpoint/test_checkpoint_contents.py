"""What a checkpoint holds, and how each kind is restored: on any number of replicas, into any mode, later, all or nothing."""

import functools
import json
import logging
import os
import threading

import numpy as np
import pytest
import safetensors.numpy

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from tests.support.harness import caught

CONFIG = RuntimeConfig(collective_timeout_s=60.0)


def world(count, fn, *arguments):
    results = run_ranks(count, fn, *arguments, config=CONFIG, timeout_s=120.0)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def some(name, rng, shape=(7, 3)):
    dtype = dtype_from_index(DTYPE_NAMES.index(name))
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name.startswith(("int", "uint")):
        return rng.integers(0, 100, shape).astype(dtype)
    made = rng.standard_normal(shape)
    return (
        (made + 1j * rng.standard_normal(shape)).astype(dtype)
        if name.startswith("complex")
        else made.astype(dtype)
    )


# -- dtypes, shapes, sizes -------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (4, 1), (1, 3)])
def test_every_dtype_and_shape_on_another_number_of_replicas(tmp_path, before, after):
    rng = np.random.default_rng(3)
    values = {name: some(name, rng) for name in DTYPE_NAMES}
    values |= {
        "scalar": np.float64(2.5),
        "empty": np.zeros((0, 4), np.float32),
        "big": rng.standard_normal(100_003),
    }
    values["special"] = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324])

    def save():
        made = {
            name: sv.Variable(value, name=name, dtype=value.dtype) for name, value in values.items()
        }
        sv.Checkpoint(**made).save(tmp_path / "c")

    def restore():
        made = {
            name: sv.Variable(np.zeros_like(value), name=name, dtype=value.dtype)
            for name, value in values.items()
        }
        sv.Checkpoint(**made).restore(tmp_path / "c")
        return {name: (v.numpy().tobytes(), v.shape, v.dtype) for name, v in made.items()}

    world(before, save)
    for found in world(after, restore):
        for name, value in values.items():
            assert found[name] == (value.tobytes(), value.shape, value.dtype), name
    sizes = [
        os.path.getsize(tmp_path / "c" / name)
        for name in os.listdir(tmp_path / "c")
        if name.startswith("shard")
    ]
    assert len(sizes) == before
    assert max(sizes) - min(sizes) < 4000, "everybody writes as much"


def test_other_tools_can_read_a_shard(tmp_path):
    rng = np.random.default_rng(4)
    values = {name: some(name, rng) for name in DTYPE_NAMES}
    sv.Checkpoint(**{name: sv.Variable(v, dtype=v.dtype) for name, v in values.items()}).save(
        tmp_path
    )
    (shard,) = tmp_path.glob("*.safetensors")
    with safetensors.safe_open(shard, "np") as file:
        assert set(file.keys()) == set(values)
        assert file.metadata()["format"] == "syncvar.checkpoint"
    del values["bfloat16"]  # its reader for NumPy does not know it
    for name, value in values.items():
        with safetensors.safe_open(shard, "np") as file:
            read = file.get_tensor(name)
        assert read.shape == ((*value.shape, 2) if value.dtype.kind == "c" else value.shape)
        assert read.tobytes() == value.tobytes()


MODES = [
    ("ON_WRITE", "SUM"),
    ("ON_READ", "SUM"),
    ("ON_READ", "MEAN"),
    ("ON_READ", "ONLY_FIRST_REPLICA"),
    ("ON_READ", "NONE"),
    ("NONE", "NONE"),
]
COPIES = {3: [0.1, 0.7, 1.9]}


@pytest.mark.parametrize("target", MODES, ids=" ".join)
@pytest.mark.parametrize("source", MODES, ids=" ".join)
def test_any_mode_into_any_other(tmp_path, source, target):
    def make(mode, value):
        return sv.Variable(
            value, dtype="float64", name="v", synchronization=mode[0], aggregation=mode[1]
        )

    def save():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = make(source, 0.0)
        if source[0] == "ON_WRITE":
            with strategy.scope():
                v.assign(0.3)
        else:
            strategy.run(lambda: v.assign(COPIES[3][sv.rank()]))
        sv.Checkpoint(v=v).save(tmp_path / "c")
        return float(v) if source != ("ON_READ", "NONE") else None

    def restore():
        v = make(target, 50.0)
        sv.Checkpoint(v=v).restore(tmp_path / "c", restore_policy="cycle")
        return float(v.local_value()), (float(v) if target != ("ON_READ", "NONE") else None)

    read = world(3, save)[0]
    is_own = source in (("ON_READ", "NONE"), ("NONE", "NONE"))
    for count in (1, 2, 4):
        found = world(count, restore)
        for rank, (copy, value) in enumerate(found):
            if target in (("ON_READ", "NONE"), ("NONE", "NONE")):
                assert copy == (COPIES[3][rank % 3] if is_own else read)
            else:
                assert value == (COPIES[3][0] if is_own else read), "to the last bit"


def test_none_variables_may_exist_on_some_ranks_only_and_differ(tmp_path):
    def make():
        objects = {"w": sv.Variable(1.0, name="w")}
        if sv.rank() != 1:
            objects["own"] = sv.Variable(
                np.full(sv.rank() + 1, 0.0), name="own", synchronization="NONE"
            )
        return objects

    def save():
        objects = make()
        if "own" in objects:
            objects["own"].assign(np.full(sv.rank() + 1, sv.rank() + 10.0))
        sv.Checkpoint(**objects).save(tmp_path / "c")

    def restore():
        objects = make()
        sv.Checkpoint(**objects).restore(tmp_path / "c")
        return objects["own"].numpy().tolist() if "own" in objects else None

    world(3, save)
    assert world(3, restore) == [[10.0], None, [12.0, 12.0, 12.0]]


# -- other objects ---------------------------------------------------------------------------------


class Cursor:
    """As an iterator has it."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "order": np.arange(self.at), "seed": 1 << 90}

    def load_state_dict(self, state):
        if state["at"] == 13:
            raise ValueError("thirteen")
        assert state["seed"] == 1 << 90
        assert state["order"].tolist() == list(range(state["at"]))
        self.at = state["at"]


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_go_on_where_they_were(tmp_path, kind):
    make = getattr(np.random, kind)

    def save():
        same, own = np.random.Generator(make(1)), np.random.Generator(make(sv.rank()))
        same.random(3), own.random(5)
        sv.Checkpoint(same=same, own=own).save(tmp_path / "c")
        return same.random(4).tolist(), own.random(4).tolist()

    def restore():
        same, own = np.random.Generator(make(9)), np.random.Generator(make(9))
        sv.Checkpoint(same=same, own=own).restore(tmp_path / "c", restore_policy="cycle")
        return same.random(4).tolist(), own.random(4).tolist()

    saved = world(2, save)
    assert world(2, restore) == saved
    assert world(3, restore) == [*saved, saved[0]]
    entries = json.loads((tmp_path / "c" / "manifest.json").read_text())["entries"]
    assert "value" in entries["same"], "all ranks had the same"
    assert set(entries["own"]["copies"]) == {"0", "1"}


def test_a_generator_of_another_kind_is_refused(tmp_path):
    sv.Checkpoint(rng=np.random.Generator(np.random.Philox(1))).save(tmp_path)
    with pytest.raises(sv.CheckpointError, match=r"'Philox'.* PCG64"):
        sv.Checkpoint(rng=np.random.default_rng(1)).restore(tmp_path)


def test_states_and_plain_data(tmp_path):
    data = {
        "list": [1, 2.5, None, "text", b"bytes"],
        "tuple": (1 << 100, True),
        "nested": {"array": np.arange(3)},
    }

    def save():
        sv.Checkpoint(same=Cursor(5), own=Cursor(sv.rank() + 2), epoch=3, name="x", data=data).save(
            tmp_path / "c"
        )

    def restore():
        checkpoint = sv.Checkpoint(same=Cursor(), own=Cursor(), epoch=0, name="", data=None)
        checkpoint.restore(tmp_path / "c")
        read = checkpoint.data
        assert read["nested"]["array"].tolist() == [0, 1, 2]
        assert (read["list"], read["tuple"]) == (data["list"], data["tuple"])
        return checkpoint.same.at, checkpoint.own.at, checkpoint.epoch, checkpoint.name

    world(2, save)
    assert world(2, restore) == [(5, 2, 3, "x"), (5, 3, 3, "x")]
    assert world(3, restore)[2] == (5, 0, 3, "x"), "a replica that was not there keeps what it has"


def test_nested_checkpoints_and_containers(tmp_path):
    def make(value):
        layers = [{"w": sv.Variable(np.full(2, value)), "b": sv.Variable(value)} for _ in range(2)]
        return sv.Checkpoint(model=sv.Checkpoint(layers=layers, scale=value), again=sv.Checkpoint())

    make(3.0).save(tmp_path)
    entries = json.loads((tmp_path / "manifest.json").read_text())["entries"]
    assert sorted(entries) == [
        "model/layers/0/b",
        "model/layers/0/w",
        "model/layers/1/b",
        "model/layers/1/w",
        "model/scale",
    ]
    other = make(0.0)
    other.restore(tmp_path)
    assert other.model.layers[1]["w"].numpy().tolist() == [3.0, 3.0]
    assert other.model.scale == 3.0
    part = sv.Checkpoint()
    part.restore(tmp_path)
    part.model = sv.Checkpoint(scale=0.0)
    assert part.model.scale == 3.0
    part.model.layers = [{"w": sv.Variable(np.zeros(2)), "b": sv.Variable(0.0)} for _ in range(2)]
    assert part.model.layers[0]["b"].numpy() == 3.0, "nested ones wait too"


def test_an_optimizer_whose_slots_are_made_later(tmp_path):
    def step(strategy, optimizer, w, times):
        for number in range(times):
            strategy.run(
                lambda n=number: optimizer.apply_gradients([(np.full(3, n + 1.0 + sv.rank()), w)])
            )

    def make():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w = sv.Variable(np.ones(3), name="w", aggregation="MEAN")
        return strategy, w, sv.optimizers.Adam(0.1)

    def whole():
        strategy, w, optimizer = make()
        step(strategy, optimizer, w, 3)
        sv.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "c")
        step(strategy, optimizer, w, 2)
        return w.numpy().tobytes(), optimizer.iterations

    def resumed(add):
        strategy, w, optimizer = make()
        checkpoint = sv.Checkpoint(w=w) if add else sv.Checkpoint(w=w, optimizer=optimizer)
        checkpoint.restore(tmp_path / "c")
        if add:
            step(
                strategy,
                sv.optimizers.Adam(0.1, name="other"),
                sv.Variable(np.zeros(3), aggregation="MEAN"),
                0,
            )
            checkpoint.optimizer = optimizer
        assert not optimizer.tracked()
        step(strategy, optimizer, w, 2)
        return w.numpy().tobytes(), optimizer.iterations

    expected = world(2, whole)
    assert world(2, resumed, False) == expected
    assert world(2, resumed, True) == expected


# -- deferred, partial, all or nothing -------------------------------------------------------------


def test_entries_wait_for_their_objects(tmp_path, caplog):
    def save():
        sv.Checkpoint(
            a=sv.Variable(1.0),
            b=sv.Variable([2.0, 3.0]),
            epoch=4,
            own=sv.Variable(sv.rank() + 0.5, synchronization="NONE"),
        ).save(tmp_path / "c")

    def restore():
        checkpoint = sv.Checkpoint()
        checkpoint.restore(tmp_path / "c")
        found = [caught(setattr, checkpoint, "a", sv.Variable(np.zeros(3)))]
        assert not hasattr(checkpoint, "a"), "what was refused is not added"
        checkpoint.a = sv.Variable(0.0)
        checkpoint.b = sv.Variable([0.0, 0.0], synchronization="ON_READ", aggregation="SUM")
        checkpoint.epoch = 0
        assert checkpoint.epoch == 4
        checkpoint.epoch = 9
        assert checkpoint.epoch == 9, "an entry is restored once"
        if sv.rank() == 1:  # sends nothing, so one rank may do it alone
            checkpoint.own = sv.Variable(0.0, synchronization="NONE")
            assert float(checkpoint.own) == 1.5
        checkpoint.save(tmp_path / "d")
        return [float(checkpoint.a), *checkpoint.b.numpy().tolist()], [
            type(error) for error in found
        ]

    world(2, save)
    with caplog.at_level(logging.WARNING, "syncvar"):
        assert world(2, restore) == [([1.0, 2.0, 3.0], [sv.CheckpointError])] * 2
    assert any("wait for their objects" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("partial", [False, True])
def test_entries_without_objects_are_told_by_the_restore_and_by_the_first_save_unless_meant(
    tmp_path, caplog, partial
):
    def save():
        w, optimizer = sv.Variable(np.zeros(3), name="w"), sv.optimizers.Adam(0.1)
        optimizer.apply_gradients([(np.ones(3), w)])
        sv.Checkpoint(w=w, optimizer=optimizer, epoch=4).save(tmp_path / "c")

    def restore():
        checkpoint = sv.Checkpoint(w=sv.Variable(np.zeros(3)))
        checkpoint.restore(tmp_path / "c", partial=partial)
        for name in ("d", "e", "f"):
            checkpoint.save(tmp_path / name)
        other = sv.Checkpoint(
            w=sv.Variable(np.zeros(3)), optimizer=sv.optimizers.Momentum(0.1), epoch=0
        )
        error = caught(other.restore, tmp_path / "c", partial=partial)
        return str(error), other.epoch, other.optimizer.iterations

    world(2, save)
    with caplog.at_level(logging.WARNING, "syncvar"):
        for error, epoch, steps in world(2, restore):
            assert ("has the state of Adam" in error, epoch, steps) == (not partial, 4 * partial, 0)
    told = [line for line in caplog.messages if "epoch" in line]
    expected = [
        ["have no object in this program and are not restored"],
        [f"are not part of {tmp_path / 'd'}"],
    ]
    assert len(told) == (0 if partial else 2), told
    for line, words in zip(told, expected, strict=False):
        assert all(word in line for word in words), told


def test_an_entry_of_a_checkpoint_that_was_replaced_does_not_come_late(tmp_path):
    sv.Checkpoint(a=1, b=2).save(tmp_path)
    checkpoint = sv.Checkpoint(a=0)
    checkpoint.restore(tmp_path)
    sv.Checkpoint(a=5, b=6).save(tmp_path)
    with pytest.raises(sv.NotFound, match="has been replaced"):
        checkpoint.b = 0


def test_what_has_no_entry(tmp_path):
    sv.Checkpoint(a=1).save(tmp_path)
    checkpoint = sv.Checkpoint(a=0, b=2)
    with pytest.raises(sv.CheckpointError, match="nothing for 'b'; it has 'a'"):
        checkpoint.restore(tmp_path)
    assert checkpoint.a == 0
    checkpoint.restore(tmp_path, partial=True)
    assert (checkpoint.a, checkpoint.b) == (1, 2)


@pytest.mark.parametrize(
    "bad",
    [np.zeros(3, np.float32), np.zeros((2, 2), np.float32), np.zeros(2), np.zeros(2, np.int32)],
)
def test_wrong_shape_or_dtype_names_both_sides_on_every_rank(tmp_path, bad):
    def save():
        sv.Checkpoint(a=sv.Variable(1.0), b=sv.Variable([1.0, 2.0])).save(tmp_path / "c")

    def restore():
        a, b = sv.Variable(7.0), sv.Variable(bad, dtype=bad.dtype, name="mine")
        found = [caught(sv.Checkpoint(a=a, b=b).restore, tmp_path / "c")]
        assert float(a) == 7.0
        return found

    world(2, save)
    for (error,) in world(2, restore):
        assert type(error) is sv.CheckpointError
        assert "float32[2]" in str(error)
        assert f"'mine' is {bad.dtype.name}{list(bad.shape)}" in str(error)


def test_one_rank_that_cannot_is_enough(tmp_path):
    """Rank 1 has a variable of another shape under NONE, so only it sees the difference."""

    def make(shape):
        return {
            "w": sv.Variable(0.0, name="w"),
            "own": sv.Variable(np.zeros(shape), name="own", synchronization="NONE"),
        }

    def save():
        sv.Checkpoint(**make(2)).save(tmp_path / "c")

    def restore():
        objects = make(3 if sv.rank() == 1 else 2)
        objects["w"].assign(7.0)
        found = [caught(sv.Checkpoint(**objects).restore, tmp_path / "c")]
        assert float(objects["w"]) == 7.0
        assert float(sv.all_reduce(1.0)) == 3.0
        return found

    world(3, save)
    assert [type(error) for (error,) in world(3, restore)] == [sv.CheckpointError] * 3


def test_an_object_that_refuses_takes_everything_back(tmp_path):
    def save():
        sv.Checkpoint(
            a=sv.Variable(1.0), cursor=Cursor(13 if sv.rank() == 1 else 4), z=sv.Variable(2.0)
        ).save(tmp_path / "c")

    def restore():
        checkpoint = sv.Checkpoint(a=sv.Variable(0.0), cursor=Cursor(1), z=sv.Variable(0.0))
        found = [caught(checkpoint.restore, tmp_path / "c")]
        return (
            [float(checkpoint.a), checkpoint.cursor.at, float(checkpoint.z)],
            [type(error) for error in found],
            str(found),
        )

    world(2, save)
    for values, errors, words in world(2, restore):
        assert values == [0.0, 1, 0.0]
        assert errors == [sv.CheckpointError]
        assert "thirteen" in words


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"save": 1}, "method"),
        ({"_a": 1}, "not a name"),
        ({"a/b": 1}, "not a name"),
        ({"": 1}, "not a name"),
        ({"a": object()}, "cannot hold"),
        ({"a": np.random.RandomState(1)}, "default_rng"),
        ({"a": print}, "cannot hold"),
    ],
)
def test_what_a_checkpoint_cannot_hold(objects, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.Checkpoint(**objects)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2, [("a", "f4")]), "cannot be communicated"),
        ([object()], "cannot hold"),
        ({"v": np.array([object()])}, "'a' cannot be saved"),
        ([np.random.default_rng(1), 3], "its own name"),
        ({3: np.random.default_rng(1)}, "names as keys"),
        (np.array(["text"]), "cannot be communicated"),
        (np.array(["2020-01-01"], "M8[D]"), "cannot be communicated"),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_written(tmp_path, value, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.Checkpoint(a=value).save(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_holds_itself():
    checkpoint = sv.Checkpoint(a=1)
    checkpoint.inner = sv.Checkpoint(outer=checkpoint)
    with pytest.raises(sv.ConfigError, match="holds itself"):
        checkpoint.save("x")


def test_a_bool_sum_cannot_be_saved(tmp_path):
    v = sv.Variable(True, synchronization="ON_READ", aggregation="SUM")
    with pytest.raises(sv.ConfigError, match="no sum to save"):
        sv.Checkpoint(v=v).save(tmp_path)


@pytest.mark.parametrize("keywords", [{"restore_policy": "first"}, {"partial": 1}, {"timeout": -1}])
def test_wrong_arguments_of_restore(tmp_path, keywords):
    sv.Checkpoint(a=1).save(tmp_path)
    with pytest.raises(sv.ConfigError):
        sv.Checkpoint(a=1).restore(tmp_path, **keywords)


def test_ranks_that_do_not_save_the_same(tmp_path):
    def fn():
        rank = sv.rank()
        v = sv.Variable(1.0, name="v")
        found = [caught(sv.Checkpoint(v=v).save, tmp_path / f"c{rank}")]
        found.append(caught(sv.Checkpoint(**({"v": v} if rank else {"w": v})).save, tmp_path / "c"))
        bad = sv.Checkpoint(v=v, x=[1])
        if rank:
            bad.x.append(object)  # found out when it is saved
        found.append(caught(bad.save, tmp_path / "c"))
        found.append(caught(bad.restore, tmp_path / "c"))
        found.append(caught(sv.Checkpoint(v=v).save, b"bytes" if rank else tmp_path / "c"))
        found.append(caught(sv.Checkpoint(v=v).restore, None if rank else tmp_path / "c"))
        found.append(caught(sv.Checkpoint(v=v).save, tmp_path / "c", timeout=-1 if rank else None))
        assert float(sv.all_reduce(1.0)) == 2.0
        return [type(error).__name__ for error in found]

    first, second = world(2, fn)
    assert first[:2] == second[:2] == ["MismatchError", "MismatchError"]
    assert (first[2:], second[2:]) == (["MismatchError"] * 5, ["ConfigError"] * 5)
    assert not (tmp_path / "c" / "manifest.json").exists()
    assert not (tmp_path / "c" / "lock.json").exists()


def test_not_found_on_every_rank(tmp_path):
    (tmp_path / "empty").mkdir()

    def fn(path):
        return [caught(sv.Checkpoint(a=1).restore, path)]

    for path in (tmp_path / "none", tmp_path / "empty"):
        for (error,) in world(2, fn, path):
            assert type(error) is sv.NotFound
            assert isinstance(error, FileNotFoundError)


# -- contexts, groups, calls -----------------------------------------------------------------------


def test_saving_is_right_in_every_context_and_keeps_calls_aligned(tmp_path):
    def fn():
        strategy, other = sv.MirroredStrategy(), sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(0.0, name="v", synchronization="ON_READ", aggregation="SUM")
        checkpoint = sv.Checkpoint(v=v)
        strategy.run(lambda: v.assign(sv.rank() + 1.0))
        begun = current().world.next_call, strategy.communicator.next_call

        def replica():
            checkpoint.save(tmp_path / "replica")
            sv.get_replica_context().merge_call(lambda _: checkpoint.save(tmp_path / "merge"))

        strategy.run(replica)
        with strategy.scope():
            checkpoint.save(tmp_path / "cross")
        with other.scope():
            checkpoint.save(tmp_path / "foreign")
        checkpoint.save(tmp_path / "outside")
        found = []
        for path in ("replica", "merge", "cross", "foreign", "outside"):
            strategy.run(lambda: v.assign(0.0))
            with other.scope():
                checkpoint.restore(tmp_path / path)
            found.append(float(v))
        assert begun != (current().world.next_call, strategy.communicator.next_call)
        return found, strategy.communicator.next_call

    results = world(2, fn)
    assert results[0] == results[1]
    assert results[0][0] == [3.0] * 5


def test_a_group_saves_without_the_others_and_the_widest_group_with_all(tmp_path):
    def fn():
        group = sv.new_group([0, 2])
        if group.is_member:
            with sv.MultiWorkerMirroredStrategy(group).scope():
                part = sv.Variable(0.0, synchronization="ON_READ", aggregation="NONE", name="part")
            part.strategy.run(lambda: part.assign(group.rank + 1.0))
            sv.Checkpoint(part=part).save(tmp_path / "part")
        whole = sv.Variable(5.0, name="whole")
        objects = {"whole": whole} | ({"part": part} if group.is_member else {})
        sv.Checkpoint(**objects).save(tmp_path / "both")
        whole.assign(0.0)
        if group.is_member:
            part.strategy.run(lambda: part.assign(0.0))
        sv.Checkpoint(**objects).restore(tmp_path / "both")
        return float(whole), float(part.local_value()) if group.is_member else None

    assert world(3, fn) == [(5.0, 1.0), (5.0, None), (5.0, 2.0)]
    entry = json.loads((tmp_path / "both" / "manifest.json").read_text())["entries"]["part"]
    assert (entry["replicas"], set(entry["copies"])) == (2, {"0", "1"})
    assert json.loads((tmp_path / "part" / "manifest.json").read_text())["world_size"] == 2


def test_a_lone_caller_gets_a_verdict(tmp_path):
    config = RuntimeConfig(collective_timeout_s=1.0)

    def fn():
        checkpoint = sv.Checkpoint(v=sv.Variable(1.0))
        found = caught(checkpoint.save, tmp_path / "c") if sv.rank() == 0 else caught(sv.barrier)
        return type(found).__name__

    for result in run_ranks(2, fn, config=config, timeout_s=120.0):
        assert result == "MismatchError"
    assert not (tmp_path / "c" / "lock.json").exists()


# -- beside the program ----------------------------------------------------------------------------


def test_an_asynchronous_save_holds_what_was_there_when_it_began(tmp_path):
    def fn():
        v = sv.Variable(np.arange(50_000.0), name="v")
        own = sv.Variable(float(sv.rank()), name="own", synchronization="NONE")
        checkpoint = sv.Checkpoint(v=v, own=own)
        pending = checkpoint.save(tmp_path / "c", async_op=True)
        v.assign(np.zeros(50_000))
        own.assign(-1.0)
        assert float(sv.all_reduce(1.0)) == 2.0, "the writer sends nothing, and nobody waits for it"
        path = pending.wait()
        assert pending.done()
        assert pending.wait() == path
        assert pending.exception() is None
        checkpoint.restore(path)
        return v.numpy().tolist() == list(range(50_000)), float(own)

    assert world(2, fn) == [(True, 0.0), (True, 1.0)]


def test_the_next_save_and_a_restore_commit_what_is_pending(tmp_path):
    def fn():
        checkpoint = sv.Checkpoint(n=1, v=sv.Variable(0.0))
        checkpoint.save(tmp_path / "a", async_op=True)
        checkpoint.n = 2
        checkpoint.save(tmp_path / "b", async_op=True)
        checkpoint.restore(tmp_path / "a")
        first = checkpoint.n
        checkpoint.restore(tmp_path / "b")
        return first, checkpoint.n

    assert world(2, fn) == [(1, 2)] * 2


def test_an_error_of_the_writer_reaches_wait_on_every_rank(tmp_path, monkeypatch):
    from syncvar.checkpoint.folder import Disk

    def write(descriptor, data, original=Disk.write):
        if threading.current_thread().name == "syncvar-checkpoint-1":
            raise OSError(28, "No space left on device")
        return original(descriptor, data)

    monkeypatch.setattr(Disk, "write", staticmethod(write))

    def fn():
        pending = sv.Checkpoint(
            v=sv.Variable(1.0), own=sv.Variable(1.0, synchronization="NONE")
        ).save(tmp_path / "c", async_op=True)
        first = caught(pending.wait)
        assert caught(pending.wait) is first is pending.exception()
        return [first]

    for (error,) in world(2, fn):
        assert type(error) is sv.CheckpointError
        assert "No space left" in str(error)
    assert os.listdir(tmp_path / "c") == []


def test_a_save_that_is_pending_when_the_job_is_left_leaves_nothing(tmp_path):
    def fn():
        pending = sv.Checkpoint(v=sv.Variable(1.0)).save(tmp_path / "c", async_op=True)
        pending._thread.join()
        sv.shutdown()
        return [caught(pending.wait)]

    for (error,) in world(2, fn):
        assert type(error) is sv.UsageError
        assert "left the job" in str(error)
    assert os.listdir(tmp_path / "c") == []


def test_a_save_that_nobody_commits_leaves_nothing(tmp_path, caplog):
    checkpoint = sv.Checkpoint(n=1)
    checkpoint.save(tmp_path / "c", async_op=True)
    del checkpoint
    assert os.listdir(tmp_path / "c") == []
    assert "was never committed" in caplog.text


# -- the manager -----------------------------------------------------------------------------------


def test_a_manager_keeps_the_latest_and_the_best(tmp_path):
    def fn():
        v = sv.Variable(0.0, name="v")
        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path, keep=2, best="max") as manager:
            assert manager.restore_latest() is None
            assert (manager.latest, manager.best, manager.checkpoints) == (None, None, [])
            for step, metric in enumerate([0.5, 0.9, 0.2, float("nan"), 0.3]):
                v.assign(float(step))
                manager.save(metric=metric) if step != 4 else manager.save(10, metric)
            sv.barrier()
            names = [os.path.basename(path) for path in manager.checkpoints]
            manager._checkpoint.restore(manager.best)
            best = float(v)
            assert manager.restore_latest() == manager.latest
            return names, best, float(v), os.path.basename(manager.latest)

    for names, best, latest, name in world(2, fn):
        assert names == ["step-0000000001", "step-0000000003", "step-0000000010"]
        assert (best, latest, name) == (1.0, 4.0, "step-0000000010")
    assert sorted(os.listdir(tmp_path)) == [
        "step-0000000001",
        "step-0000000003",
        "step-0000000010",
    ], "the lock is given back"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_return_to_lower_steps_keeps_the_latest_saves(tmp_path, caplog, is_async):
    def fn():
        v = sv.Variable(0.0, name="v")

        def save(manager, step):
            v.assign(float(step))
            path = manager.save(step, async_op=is_async)
            return path.wait() if is_async else path

        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path, keep=2) as manager:
            seen = [manager.checkpoints for step in (90, 100, 50, 51, 100) if save(manager, step)]
            sv.barrier()
        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path, keep=2) as manager:
            v.assign(0.0)
            assert manager.restore_latest() == manager.latest
            restored = float(v)
            save(manager, 7)
            sv.barrier()
            assert manager.latest.endswith("7")
        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path, keep=2) as manager:
            assert manager.save().endswith("8"), "one more than the latest save"
        return seen, restored

    for seen, restored in world(2, fn):
        names = [[int(path[-3:]) for path in paths] for paths in seen]
        # One rank may look when rank 0 has not yet removed.
        assert [name[-2:] for name in names] == [[90], [90, 100], [100, 50], [50, 51], [51, 100]]
        assert restored == 100.0
    assert sorted(os.listdir(tmp_path)) == ["step-0000000007", "step-0000000008"]
    warned = [
        line for line in caplog.messages if "Checkpoints are ordered by time of saving" in line
    ]
    assert len(warned) == 3, "once for each manager, on rank 0"
    assert warned[0].startswith(f"step 50 is saved in {tmp_path}, which already has step 100")


def test_times_of_files_play_no_part_in_the_order_of_saving(tmp_path):
    with sv.CheckpointManager(sv.Checkpoint(n=0), tmp_path) as manager:
        paths = [manager.save(step) for step in (3, 2, 1)]
        for days, path in enumerate(paths):
            os.utime(os.path.join(path, "manifest.json"), (86400 * (9 - days),) * 2)
            os.utime(path, (86400 * (9 - days),) * 2)
        assert manager.checkpoints == paths


def test_checkpoints_of_earlier_versions_keep_the_order_of_steps_and_come_first(tmp_path):
    for step in (30, 10, 20):
        sv.Checkpoint(n=step).save(tmp_path / f"step-{step:010d}")
    checkpoint = sv.Checkpoint(n=0)
    with sv.CheckpointManager(checkpoint, tmp_path, keep=3) as manager:
        assert [int(path[-2:]) for path in manager.checkpoints] == [10, 20, 30]
        assert manager.restore_latest().endswith("30")
        assert checkpoint.n == 30
        manager.save(15)
        assert [int(path[-2:]) for path in manager.checkpoints] == [20, 30, 15]


def test_a_save_without_a_step_counts_one_that_is_being_written(tmp_path):
    with sv.CheckpointManager(sv.Checkpoint(n=0), tmp_path) as manager:
        for _ in range(3):
            manager.save(async_op=True)
        manager.restore_latest()
        assert [int(path[-2:]) for path in manager.checkpoints] == [0, 1, 2]


def test_a_manager_saves_beside_the_program(tmp_path):
    with sv.CheckpointManager(sv.Checkpoint(n=0), tmp_path, keep=1) as manager:
        first = manager.save(0, async_op=True)
        second = manager.save(1, async_op=True)
        assert first.done()
        assert [os.path.basename(path) for path in manager.checkpoints] == ["step-0000000000"]
        second.wait()
        assert [os.path.basename(path) for path in manager.checkpoints] == ["step-0000000001"]


def test_asking_whether_to_stop_commits_what_all_have_written(tmp_path):
    gate = threading.Event()

    def fn():
        v = sv.Variable(np.arange(9.0), name="v")
        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path) as manager:
            pending = manager.save(3, async_op=True)
            before = [manager.should_stop(), manager.latest]
            sv.barrier()
            gate.set()
            pending._thread.join()
            after = [manager.should_stop(), manager.latest == pending.path]
            return before, after, pending.wait() == pending.path

    from syncvar.checkpoint.folder import Disk

    with pytest.MonkeyPatch.context() as patch:

        def sync(descriptor, original=Disk.sync):
            if threading.current_thread().name == "syncvar-checkpoint-1":
                assert gate.wait(20)
            original(descriptor)

        patch.setattr(Disk, "sync", staticmethod(sync))
        assert world(2, fn) == [([False, None], [False, True], True)] * 2


def test_a_manager_removes_only_what_is_its_own(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-x").mkdir()
    with sv.CheckpointManager(sv.Checkpoint(n=0), tmp_path, keep=1) as manager:
        manager.save(0)
        (tmp_path / "step-0000000000" / "mine.txt").write_text("mine")
        torn = tmp_path / "step-0000000007"  # of a save that was killed
        torn.mkdir()
        (torn / "shard-00112233aabbccdd-00000-of-00001.safetensors").write_text("")
        (torn / "lock.json").write_text("{}")
        manager.save(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-0000000000",
        "step-0000000001",
        "step-x",
    ]
    assert os.listdir(tmp_path / "step-0000000000") == ["mine.txt"]


def test_ranks_that_do_not_pass_the_same_step_or_metric(tmp_path):
    def fn(**different):
        with sv.CheckpointManager(sv.Checkpoint(v=sv.Variable(0.0)), tmp_path) as manager:
            return type(
                caught(manager.save, **{key: value[sv.rank()] for key, value in different.items()})
            )

    assert world(2, functools.partial(fn, step=(1, 2))) == [sv.MismatchError] * 2
    assert world(2, functools.partial(fn, metric=(0.1, 0.2))) == [sv.MismatchError] * 2
    assert world(2, functools.partial(fn, step=(1, -1))) == [sv.MismatchError, sv.ConfigError]
    assert world(2, functools.partial(fn, metric=(0.1, "low"))) == [
        sv.MismatchError,
        sv.ConfigError,
    ]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep": 0},
        {"keep": True},
        {"best": "least"},
        {"on_preemption": 1},
        {"check_every": 0},
        {"checkpoint": 3},
        {"directory": 4},
    ],
)
def test_wrong_arguments_of_a_manager(tmp_path, arguments):
    with pytest.raises(sv.ConfigError):
        sv.CheckpointManager(**({"checkpoint": sv.Checkpoint(), "directory": tmp_path} | arguments))


def test_all_ranks_stop_at_the_same_step(tmp_path):
    def fn():
        v = sv.Variable(0.0, name="v")
        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path, check_every=3) as manager:
            for step in range(20):
                if sv.rank() == 1 and step == 7:
                    manager.request_stop()
                v.assign(float(step))
                if manager.should_stop():
                    assert manager.should_stop()
                    manager.save(step)
                    return step
        return None

    assert world(3, fn) == [8] * 3, "the first call that is a multiple of check_every"


def test_the_end_of_a_block_commits_a_save_that_nobody_has_waited_for(tmp_path):
    def rank():
        checkpoint = sv.Checkpoint(v=sv.Variable(np.arange(3.0)), step=7)
        with sv.CheckpointManager(checkpoint, tmp_path) as manager:
            manager.save(7, async_op=True)
        with sv.CheckpointManager(checkpoint, tmp_path) as manager:
            return manager.latest is not None and manager.restore_latest() is not None

    assert run_ranks(2, rank) == [True, True]


def test_state_that_differed_between_ranks_is_told_when_another_number_restores_it(
    tmp_path, caplog
):
    class Model:
        def __init__(self, seen):
            self.seen = seen

        def state_dict(self):
            return {"weights": np.ones(2), "seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    run_ranks(2, lambda: sv.Checkpoint(model=Model(sv.rank())).save(tmp_path / "a"))

    def restore():
        model = Model(-1)
        sv.Checkpoint(model=model).restore(tmp_path / "a")
        return model.seen

    assert run_ranks(3, restore) == [0, 1, -1]
    told = [
        record.getMessage() for record in caplog.records if "keeps its own" in record.getMessage()
    ]
    assert told == [next(iter(told))]
    assert (
        "'model' differed between the 2 ranks that saved it, and rank 2 keeps its own. restore_policy='cycle'"
        in told[0]
    )
