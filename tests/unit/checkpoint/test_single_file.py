"""sv.save and sv.load: one rank writes a file by itself, whole or not at all, and reads it again to the bit."""

import os

import numpy as np
import pytest
import safetensors.numpy

import syncvar as sv
from syncvar.checkpoint.folder import Disk
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from tests.support.harness import caught, everywhere


def equal(one, other):
    """Compare two values to the bit."""
    if isinstance(one, np.ndarray):
        return (
            type(other) is np.ndarray
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def everything():
    rng = np.random.default_rng(1)
    arrays = {
        name: (rng.standard_normal((3, 2)) * 10).astype(dtype_from_index(DTYPE_NAMES.index(name)))
        for name in DTYPE_NAMES
    }
    return {
        **arrays,
        "nested": [
            {"a/b": np.arange(3), "a": {"b": np.zeros(2)}},
            (np.float32(2.5), None, b"x", 1 << 100, 1j),
            [],
        ],
        "special": np.array([np.nan, -0.0, np.inf]),
        "scalar": np.array(7),
        "empty": np.zeros((0, 4), np.int8),
        3: "a key that is no text",
        "turned": np.arange(6).reshape(2, 3).T,
    }


def test_what_was_saved_comes_back_to_the_bit_and_other_tools_read_it(tmp_path):
    value = everything()
    path = tmp_path / "made" / "all.safetensors"
    assert sv.save(path, value) == str(path)
    value["turned"] = np.ascontiguousarray(value["turned"])
    assert equal(value, sv.load(path))
    assert os.listdir(path.parent) == ["all.safetensors"]
    theirs = safetensors.numpy.load_file(path)
    assert theirs["nested/0/a/b"].tolist() == [0, 1, 2]
    assert theirs["nested/0/a/b#2"].tolist() == [0.0, 0.0]
    assert theirs["special"].tobytes() == value["special"].tobytes()
    for one in (np.float64([1, 2]), [1, {"x": 2}], None):
        sv.save(path, one)
        assert equal(one, sv.load(path))
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "theirs")
    assert equal({"w": np.ones(3, np.float32)}, sv.load(tmp_path / "theirs"))


@pytest.mark.parametrize("shm", [1 << 26, 0])
def test_one_rank_saves_while_the_others_do_not_even_know(tmp_path, shm):
    path = str(tmp_path / "model.safetensors")

    def program():
        w = sv.Variable([1.0, 2.0], name="w", aggregation="SUM")
        own = sv.Variable(sv.rank(), synchronization="NONE", name="own")
        seen = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM", name="seen")
        first = sv.Variable(
            3.0, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA", name="first"
        )
        optimizer = sv.optimizers.Momentum(0.5)
        optimizer.apply_gradients([([2.0, 4.0], w)])
        if sv.rank() == 1:  # no other rank makes any call meanwhile
            sv.save(
                path,
                {
                    "w": w,
                    "own": own,
                    "optimizer": optimizer,
                    "seen": seen.local_value(),
                    "rng": np.random.default_rng(5),
                },
            )
            errors = [
                str(caught(lambda one=one: sv.save(path, {"deep": [one]})))
                for one in (seen, first, sv.Checkpoint(w=w), object())
            ]
        else:
            errors = []
            if sv.rank() == 0:
                sv.save(path + "-first", first)
        w.assign_add([1.0, 1.0])
        if sv.rank() == 1:
            rng = np.random.default_rng()
            loaded = sv.load(path)
            rng.bit_generator.state = loaded["rng"]
            assert rng.random() == np.random.default_rng(5).random()
        sv.barrier()
        loaded = sv.load(path)
        w.assign(loaded["w"])
        return errors, w.numpy().tolist(), loaded

    results = everywhere(3, program, shm_bytes=shm)
    for _, values, loaded in results:
        assert values == [0.0, 0.0] == loaded["w"].tolist()
        assert loaded["own"].tolist() == 1
        assert loaded["seen"].tolist() == 0.0
        assert loaded["optimizer"]["iterations"].tolist() == 1
        assert loaded["optimizer"]["w/momentum"].tolist() == [2.0, 4.0]
    assert sv.load(path + "-first").tolist() == 3.0
    seen, first, checkpoint, anything = results[1][0]
    assert "value['deep'][0] is the ON_READ variable 'seen' (SUM)" in seen
    assert "seen.local_value()" in seen
    assert "ONLY_FIRST_REPLICA" in first
    assert "checkpoint.save(path)" in checkpoint
    assert "value['deep'][0] cannot be saved" in anything


@pytest.mark.parametrize("step", ["create", "write", "sync", "close", "rename"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, step):
    path = tmp_path / "model"
    sv.save(path, {"w": np.arange(4)})

    done = getattr(Disk, step)

    def fail(*arguments):
        if step == "close":
            done(*arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, step, staticmethod(fail))
    with pytest.raises(sv.CheckpointError, match="No space left"):
        sv.save(path, {"w": np.zeros(4)})
    assert sv.load(path)["w"].tolist() == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["model"]


def test_damaged_files_and_wrong_arguments_are_refused(tmp_path):
    path = tmp_path / "model"
    value, loaded = {"w": np.arange(40.0), "name": "a text"}, []
    sv.save(path, value)
    data = path.read_bytes()
    rng = np.random.default_rng(2)
    for _ in range(200):
        place = int(rng.integers(len(data)))
        path.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << int(rng.integers(8)))]) + data[place + 1 :]
        )
        error = caught(lambda: loaded.append(sv.load(path)))
        assert isinstance(error, sv.CheckpointError) or equal(loaded.pop(), value), place
    for length in (0, 4, 8, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(sv.CheckpointError):
            sv.load(path)
    with pytest.raises(sv.NotFound):
        sv.load(tmp_path / "nothing")
    with pytest.raises(sv.NotFound):
        sv.load(tmp_path / "no folder" / "nothing")
    with pytest.raises(sv.CheckpointError, match="is a folder"):
        sv.load(tmp_path)
    with pytest.raises(sv.ConfigError, match=r"is a folder; sv\.save writes one file"):
        sv.save(tmp_path, {})
    with pytest.raises(sv.ConfigError, match=r"write sv\.save"):
        sv.save(7, {})
    endless = {}
    endless["self"] = endless
    with pytest.raises(sv.ConfigError, match="holds itself"):
        sv.save(path, endless)


class Text(str):
    __slots__ = ()


class Number(int):
    pass


def test_keys_that_are_not_found_again_depth_and_subclasses_are_refused_by_their_place(tmp_path):
    def deep(levels):
        value = np.ones(2)
        for _ in range(levels):
            value = [value]
        return value

    path = tmp_path / "model"
    kept = {
        (1, "a"): np.ones(2),
        2.5: np.zeros(1),
        b"x": 1,
        None: {np.int64(3): 4, frozenset({1}): np.ones(1)},
    }
    sv.save(path, [kept, deep(61)])
    assert equal([kept, deep(61)], sv.load(path))
    nan = float("nan")
    cases = [
        ({nan: np.ones(2)}, r"^value has the key nan, which differs after a save"),
        ({"a": [{(1, nan): 1.0}]}, r"^value\['a'\]\[0\] has the key \(1, nan\)"),
        ({"a": {Text("b"): 1}}, r"^value\['a'\] has the key 'b', which cannot be saved"),
        ({"a": Text("b")}, r"^value\['a'\] cannot be saved: .*Text"),
        ({"a": [0, Number(1)]}, r"^value\['a'\]\[1\] cannot be saved: .*Number"),
        ({"a": "\ud800"}, r"^value\['a'\] cannot be saved: .*encoded"),
        ({"a": np.str_("b")}, r"^value\['a'\] cannot be saved"),
        (deep(64), r"^value(\[0\]){63} is nested more than 63 deep"),
        (deep(3000), r"is nested more than 63 deep"),
    ]
    for value, words in cases:
        with pytest.raises(sv.ConfigError, match=words):
            sv.save(tmp_path / "refused", value)
    assert os.listdir(tmp_path) == ["model"]
