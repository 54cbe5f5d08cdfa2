"""Tensors of other libraries: such tensors come out where such went in, and `out=` is written where it lies."""

import datetime as dt
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.collectives.collective_registry import (
    COLLECTIVES,
    Case,
    CollectiveKind,
    available,
)
from syncvar.core.errors import WireError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.testing import run_ranks
from tests.support.fake_tensors import Tensor, TensorOfAnyDtype, TensorOfOldDLPack, fake_torch

SOON = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
LAYOUTS = {"links": {}, "shm": {"shared": True}}


def everywhere(fn, layout="shm", size=2):
    out = run_ranks(size, fn, config=SOON, timeout_s=60, **LAYOUTS[layout])
    errors = [one for one in out if isinstance(one, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return out


def message(x, async_op=False, out=None):
    """A message from oneself, and one from the other rank, which is the result."""
    other = 1 - sv.rank()
    sent = sv.send(x, other, async_op=True)
    got = sv.recv(other, out=Tensor(np.empty(8)) if out is None else out, async_op=async_op)
    assert sent.wait() is None
    return got


def case():
    """The case of a call with the registry's inputs, on this rank of two."""
    return Case(sv.rank(), 2, (8,), "float64")


def registered(one, x, **options):
    """Make the call of a collective of the registry, with this input."""
    return one.bound(case(), x, **options)()


def operand(name):
    """The input of a call: that of the registry, where the call is one of it."""
    one = COLLECTIVES.get(name)
    return case().part(sv.rank()) if one is None else one.inputs(case(), sv.rank())


def takes(name, parameter):
    one = COLLECTIVES.get(name)
    if one is not None:
        return one.takes(parameter)
    return parameter in signature(CALLS[name]).parameters


CALLS = {
    **{
        one.name: partial(registered, one)
        for one in available()
        if one.kind in (CollectiveKind.REDUCE, CollectiveKind.MOVE)
    },
    "all_reduce, mean": partial(sv.all_reduce, op="MEAN"),
    "all_reduce, weighted": partial(sv.all_reduce, op=sv.ReduceOp.MEAN, weight=0.5),
    "all_reduce, minloc": partial(sv.all_reduce, op="minloc"),
    "send": message,
    "strategy.reduce": lambda x, **_: sv.MirroredStrategy().reduce(
        "SUM", sv.PerReplica(x), axis=None
    ),
    "strategy.reduce along an axis": lambda x, **_: sv.MirroredStrategy().reduce(
        "MEAN", {"x": [x]}, axis=0
    )["x"][0],
    "strategy.gather": lambda x, **_: sv.MirroredStrategy().gather(sv.PerReplica(x), axis=0),
    "in run": lambda x, **_: sv.MirroredStrategy().run(
        lambda y: sv.get_replica_context().all_reduce("SUM", y), args=(sv.PerReplica(x),)
    ),
}
LISTS = {
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "all_reduce_shards",
    "strategy.reduce",
}


def plain(value):
    """A result with arrays in place of tensors, and how many were replaced."""
    if isinstance(value, Tensor):
        return value.array, 1
    if isinstance(value, list | tuple):
        parts = [plain(part) for part in value]
        return [part for part, _ in parts], sum(count for _, count in parts)
    return value, 0


def same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, list):
        for one, other in zip(got, wanted, strict=True):
            same(one, other)
    elif wanted is not None:
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_gives_tensors_for_tensors(layout):
    def fn():
        for name, call in CALLS.items():
            x = operand(name)
            # twice: then it is prepared
            options = [{}, {}, {"async_op": True}] if takes(name, "async_op") else [{}]
            for option in options:
                made, wanted = call(Tensor(x), **option), call(x, **option)
                if option:
                    made, wanted = made.wait(), wanted.wait()
                got, count = plain(made)
                same(got, plain(wanted)[0])
                assert (count > 0) == (wanted is not None), name
            if name in LISTS:
                got, count = plain(call([Tensor(x), Tensor(x)]))
                wanted = plain(call([x, x]))[0]
                same(got, wanted)
                assert count == (
                    0 if wanted is None else len(wanted) if isinstance(wanted, list) else 1
                ), name

    everywhere(fn, layout)


def test_every_collective_is_among_them():
    names = {
        name
        for name in sv.__all__
        if callable(getattr(sv, name)) and not isinstance(getattr(sv, name), type)
    }
    takes = {
        name
        for name in names
        if "async_op" in signature(getattr(sv, name)).parameters and "object" not in name
    }
    assert takes - {"recv", "recv_any", "barrier"} <= {name.split(",")[0] for name in CALLS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Tensor, TensorOfAnyDtype])
def test_out_is_written_where_it_lies(layout, kind):
    """Contiguous or not; the tensor itself is the result, also for NumPy arrays, and where the value lies in it."""

    def fn():
        for make in (np.zeros, lambda shape: np.zeros((*shape, 3))[..., 1]):
            for name, call in CALLS.items():
                if name in {"all_to_all", "all_reduce, minloc"} or not takes(name, "out"):
                    continue
                x = operand(name)
                wanted = call(x)
                for given in (Tensor(x), x):
                    for option in ({}, {"async_op": True}):
                        memory = make((8,) if wanted is None else plain(wanted)[0].shape)
                        out = kind(memory)
                        got = call(given, out=out, **option)
                        got = got.wait() if option else got
                        assert got is (None if wanted is None else out), name
                        assert wanted is None or np.array_equal(memory, plain(wanted)[0]), name
        gradient = kind(np.full((4, 5), float(sv.rank())))
        assert sv.all_reduce(gradient, "mean", out=gradient) is gradient
        assert (gradient.array == 0.5).all()
        outs = {"w": kind(np.zeros(2)), "b": np.zeros(3)}
        got = sv.all_reduce({"w": np.ones(2), "b": Tensor(np.ones(3))}, out=outs)
        assert got["w"] is outs["w"]
        assert got["b"] is outs["b"]
        assert [outs["w"].array.tolist(), outs["b"].tolist()] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
        out = kind(np.zeros(4))
        got = sv.all_to_all(np.arange(4.0), out=out)
        assert [type(one) for one in got] == [Tensor, Tensor]
        assert out.array.tolist() == [2.0 * sv.rank(), 2.0 * sv.rank() + 1] * 2
        outs = [kind(np.zeros(2)), np.zeros(2)]
        got = sv.all_to_all(Tensor(np.arange(4.0)), out=outs)
        assert got[0] is outs[0]
        assert got[1] is outs[1]

    everywhere(fn, layout)


def test_bfloat16_goes_in_and_comes_out():
    def fn():
        x = TensorOfAnyDtype(np.ones(3, ml_dtypes.bfloat16))
        got = sv.all_reduce(x)
        assert type(got) is Tensor
        assert got.array.dtype == ml_dtypes.bfloat16
        assert got.array.tolist() == [2.0, 2.0, 2.0]

    everywhere(fn)


def test_what_may_not_be_written_is_refused_as_out():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for out in (Tensor(frozen), TensorOfOldDLPack(np.zeros(2))):
        with pytest.raises(sv.ConfigError, match="out is read-only: pass a writable array"):
            sv.all_reduce(np.ones(2), out=out)
    with pytest.raises(sv.ConfigError, match=r"out has shape \(3,\)"):
        sv.all_reduce(Tensor(np.ones(2)), out=Tensor(np.zeros(3)))
    assert sv.all_reduce(TensorOfOldDLPack(np.ones(2))).array.tolist() == [1.0, 1.0]


def test_tensors_of_other_devices_are_refused_and_the_others_are_told():
    """Before anything is sent, whatever the call; the group stays usable."""

    def fn():
        far, near = Tensor(np.ones(4), device="cuda:0"), Tensor(np.ones(4))
        calls = [
            lambda x: sv.all_reduce(x),
            lambda x: sv.all_reduce({"a": 1.0, "b": [x]}),
            lambda x: sv.broadcast(x),
            lambda x: sv.all_gather(x),
            lambda x: sv.all_to_all([x, x]),
            lambda x: sv.scan(x),
            lambda x: sv.all_reduce(np.ones(4), out=x),
            lambda x: sv.all_to_all(np.ones(4), out=x),
        ]
        for call in calls:
            error, match = (
                (sv.ConfigError, r"on the device 'cuda:0'.*pass x\.cpu\(\)")
                if sv.rank() == 0
                else (sv.MismatchError, "cuda:0")
            )
            with pytest.raises(error, match=match):
                call(far if sv.rank() == 0 else near)
            assert float(sv.all_reduce(1.0)) == 2.0

    everywhere(fn)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    weights: Any
    point: Any = 0.0


@dataclass
class Checked:
    total: Any
    count: Any = field(init=False, default=3)

    def __post_init__(self):
        self.made = "by __post_init__"
        assert not isinstance(self.total, np.ndarray), "it is not made a second time"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dataclasses_and_named_tuples_are_structures(layout):
    def fn():
        value = Frozen(Tensor(np.arange(2.0)), [Point(1.0, {"a": sv.rank()})])
        for call, rank in (
            (sv.all_reduce, None),
            (sv.reduce, 0),
            (sv.broadcast, None),
            (sv.all_gather, None),
            (sv.gather, 0),
        ):
            for option in ({}, {"async_op": True}):
                got = call(value, **option)
                got = got.wait() if option else got
                if rank not in (None, sv.rank()):
                    assert got is None
                    continue
                assert type(got) is Frozen
                assert type(got.weights) is Tensor
                assert type(got.point[0]) is Point
                wanted = {sv.all_reduce: 1, sv.reduce: 1, sv.broadcast: 0}.get(call, [0, 1])
                assert np.array_equal(got.point[0].y["a"], wanted)
        got = sv.all_reduce(Checked(2))
        assert (type(got), float(got.total), float(got.count), got.made) == (
            Checked,
            4.0,
            6.0,
            "by __post_init__",
        )
        assert sv.all_reduce(Point(1.0, 2.0)) == Point(2.0, 4.0)
        out = Frozen(np.zeros(2), np.zeros(()))
        assert sv.all_reduce(Frozen(np.ones(2)), out=out).weights is out.weights
        assert out.weights.tolist() == [2.0, 2.0]
        got = sv.all_reduce_shards({sv.rank(): Point(1.0, np.ones(2))})
        assert type(got) is Point
        strategy = sv.MirroredStrategy()
        per_replica = Frozen(sv.PerReplica(np.ones(2)), Point(sv.PerReplica(1.0), 2.0))
        got = strategy.reduce("SUM", per_replica, axis=None)
        assert (type(got), got.weights.tolist(), got.point) == (Frozen, [2.0, 2.0], Point(2.0, 4.0))
        got = strategy.run(lambda one: Frozen(one.weights * 2, one.point.x), args=(per_replica,))
        assert (type(got), got.weights.tolist(), got.point) == (Frozen, [2.0, 2.0], 1.0)
        (local,) = strategy.experimental_local_results(per_replica)
        assert local.point == Point(1.0, 2.0)

    everywhere(fn, layout)


def test_what_is_no_array_in_a_dataclass_is_refused_by_name():
    with pytest.raises(
        sv.ConfigError, match=r"x\['a'\]\.point\.y must be an array or a number, not 'text'"
    ):
        sv.all_reduce({"a": Frozen(1.0, Point(1.0, "text"))})
    with pytest.raises(sv.ConfigError, match=r"x\.weights must be an array or a number, not None"):
        sv.broadcast(Frozen(None))

    def fn():
        value = Frozen(1.0) if sv.rank() == 0 else None
        with pytest.raises(
            sv.MismatchError,
            match=r"Frozen\(weights=array, point=array\), and classes of dataclasses are not sent.*on rank 1, which passes None",
        ):
            sv.broadcast(value)
        with pytest.raises(
            sv.MismatchError,
            match="classes of dataclasses are not sent, so every rank must have a shard",
        ):
            sv.all_reduce_shards({0: {"a": value}} if sv.rank() == 0 else {})
        got = sv.all_reduce_shards({0: Point(Tensor(np.ones(2)), 1.0)} if sv.rank() == 0 else {})
        assert type(got[0]) is (
            Tensor if sv.rank() == 0 else np.ndarray
        )  # as documented: who brings none gets NumPy arrays
        with pytest.raises(sv.MismatchError, match=r"Frozen\(weights=array, point=array\)"):
            sv.all_reduce(Frozen(1.0) if sv.rank() == 0 else Checked(1.0))
        return float(sv.all_reduce(1.0))

    assert everywhere(fn) == [2.0, 2.0]


@dataclass
class Unset:
    total: Any
    made: Any = field(init=False)


class Refusing(Tensor):
    def __dlpack__(self, **options):
        raise KeyError("no such device")


class Closed(list):
    def __iter__(self):
        raise OSError("it is closed")


def endless(one):
    one.append(one)
    return one


def endless_dict():
    made = {"a": Tensor(np.ones(2))}
    made["b"] = made
    return made


UNTAKEN = [
    lambda: Unset(1.0),
    lambda: [Tensor(np.ones(2)), Unset(1.0)],
    lambda: Refusing(np.ones(2)),
    lambda: [Refusing(np.ones(2)), Tensor(np.ones(2))],
    lambda: endless([]),
    lambda: endless([Tensor(np.ones(2))]),
    endless_dict,
    lambda: Closed([1.0]),
    lambda: [Tensor(np.ones(2)), Closed([Tensor(np.ones(2))])],
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_be_looked_through_is_refused_with_the_calls_number_and_the_others_are_told(
    layout,
):
    """Whatever the caller's own classes raise: the next calls of both ranks are the same ones."""

    def fn():
        for make in UNTAKEN:
            for call in (
                "all_reduce",
                "broadcast",
                "all_gather",
                "gather",
                "reduce",
                "reduce_scatter",
                "scatter",
                "all_to_all",
                "scan",
            ):
                with pytest.raises(
                    (sv.ConfigError, OSError) if sv.rank() == 0 else sv.MismatchError
                ):
                    CALLS[call](make() if sv.rank() == 0 else np.ones(2))
                assert float(sv.all_reduce(1.0)) == 2.0
            if sv.rank() == 0:
                with pytest.raises(sv.ConfigError):
                    sv.all_reduce(np.ones(2), out=make())
            else:
                with pytest.raises(sv.MismatchError):
                    sv.all_reduce(np.ones(2))
            assert float(sv.all_reduce(1.0)) == 2.0

    everywhere(fn, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_been_started_does_not_look_at_the_callers_containers_again(layout):
    def fn():
        def outs():
            return {"a": Tensor(np.zeros(2)), "b": [np.zeros(2), Tensor(np.zeros(2))]}

        for out in (None, outs()):
            value = {"a": Tensor(np.ones(2)), "b": [np.ones(2), Tensor(np.ones(2))]}
            work = sv.all_reduce(value, out=out, async_op=True)
            for container in (value, out):
                if container is not None:
                    container["b"].pop()
                    container.clear()
            got = work.wait()
            assert [type(one) for one in (got["a"], *got["b"])] == [Tensor, np.ndarray, Tensor]
            assert [plain(one)[0].tolist() for one in (got["a"], *got["b"])] == [[2.0, 2.0]] * 3
        made = [Tensor(np.ones(2)), Tensor(np.ones(2))]
        work = sv.all_to_all(made, async_op=True)
        made.clear()
        assert [type(one) for one in work.wait()] == [Tensor, Tensor]

    everywhere(fn, layout)


def test_variables_take_tensors():
    v = sv.Variable(Tensor(np.ones(3)))
    v.assign_add(Tensor(np.ones(3)))
    assert v.numpy().tolist() == [2.0, 2.0, 2.0]


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_tensors_of_pytorch_by_its_own_functions(torch):
    """Those that require a gradient are detached; bfloat16 goes by int16; backward is told what was written."""
    x = torch.Tensor(np.ones(3), requires_grad=True)
    got = sv.all_reduce(x)
    assert (type(got), got.array.tolist()) == (torch.Tensor, [1.0, 1.0, 1.0])
    assert sv.all_reduce(np.arange(3.0), out=x) is x
    assert (x.array.tolist(), x._version) == ([0.0, 1.0, 2.0], 1)
    half = torch.Tensor(np.ones(2, ml_dtypes.bfloat16).view("int16"), dtype="bfloat16")
    got = sv.all_gather(half)
    assert (type(got), got.dtype, got.array.view(ml_dtypes.bfloat16).tolist()) == (
        torch.Tensor,
        "bfloat16",
        [1.0, 1.0],
    )
    with pytest.raises(sv.ConfigError, match=r"on the device.*'meta'.*no data"):
        sv.all_reduce(torch.Tensor(np.ones(3), device="meta"))


def test_tensors_in_objects_and_checkpoints_stay_tensors(torch, tmp_path):
    """Of one library into the same one; OrderedDicts, sets and dates stay what they are, on another number of workers."""
    when = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)

    def state(number):
        weights = torch.Tensor(np.full((2, 3), number), requires_grad=True)
        half = torch.Tensor(np.full(2, number, ml_dtypes.bfloat16).view("int16"), dtype="bfloat16")
        return OrderedDict(
            weights=weights, half=half, seen={when, "x"}, options={"lr": 0.5, 3: (None, when)}
        )

    def looked(found):
        assert type(found) is OrderedDict
        assert list(found) == ["weights", "half", "seen", "options"]
        assert type(found["weights"]) is type(found["half"]) is torch.Tensor
        assert (found["half"].dtype, found["seen"], found["options"]) == (
            "bfloat16",
            {when, "x"},
            {"lr": 0.5, 3: (None, when)},
        )
        return float(found["weights"].array[1, 2]), float(
            found["half"].array.view(ml_dtypes.bfloat16)[0]
        )

    class Module:
        def __init__(self, number):
            self.held = state(number)

        def state_dict(self):
            return self.held

        def load_state_dict(self, given):
            self.held["weights"].array[...] = given["weights"].array  # in place, as PyTorch does
            if float(given["weights"].array[0, 0]) < 0:
                raise RuntimeError("negative weights")
            self.held = given

    def send():
        got = [looked(one) for one in sv.all_gather_object(state(sv.rank() + 1))]
        return [*got, looked(sv.broadcast_object(state(7) if sv.rank() else None, root=1))]

    assert everywhere(send) == [[(1.0, 1.0), (2.0, 2.0), (7.0, 7.0)]] * 2

    def save():
        sv.Checkpoint(model=Module(3.0), state=state(4.0), day=when).save(tmp_path / "c")
        sv.Checkpoint(model=Module(-3.0), state=state(4.0), day=when).save(tmp_path / "bad")

    everywhere(save, size=2)

    def restore():
        checkpoint = sv.Checkpoint(model=Module(0.0), state=state(0.0), day=None)
        checkpoint.restore(tmp_path / "c")
        with pytest.raises(sv.CheckpointError, match="negative weights"):
            checkpoint.restore(tmp_path / "bad")
        return looked(checkpoint.model.held), looked(checkpoint.state), checkpoint.day

    assert everywhere(restore, size=3) == [((3.0, 3.0), (4.0, 4.0), when)] * 3


def test_what_an_object_was_is_noted_as_data_and_nothing_of_it_is_copied_by_its_own_way(
    torch, tmp_path
):
    """PyTorch refuses to deepcopy tensors that were computed, and a copied variable is made with all replicas."""

    def refuse(tensor, memo):
        raise RuntimeError(
            "Only Tensors created explicitly by the user support the deepcopy protocol"
        )

    torch.Tensor.__deepcopy__ = refuse

    class Module:
        def __init__(self, number):
            self.held = {"w": torch.Tensor(np.full(2, number))}

        def state_dict(self):
            return self.held

        def load_state_dict(self, given):
            self.held["w"].array[...] = given["w"].array  # in place, as PyTorch does
            if float(given["w"].array[0]) < 0:
                raise RuntimeError("negative weights")

    def fn():
        sv.Checkpoint(model=Module(3.0)).save(tmp_path / "c")
        sv.Checkpoint(model=Module(-3.0)).save(tmp_path / "bad")
        checkpoint = sv.Checkpoint(model=Module(0.0))
        checkpoint.restore(tmp_path / "c")
        with pytest.raises(
            sv.CheckpointError, match="'model' refused its state: RuntimeError: negative weights"
        ):
            checkpoint.restore(tmp_path / "bad")
        values = checkpoint.model.held["w"].array.tolist()
        own = sv.Variable(1.0)
        if sv.rank() == 0:
            checkpoint.model.held["v"] = own
        with pytest.raises(sv.CheckpointError, match=r"'model'.*Variable, which cannot travel"):
            checkpoint.restore(tmp_path / "c")
        return values, float(sv.all_reduce(1.0))

    assert everywhere(fn) == [([3.0, 3.0], 2.0)] * 2


def test_a_tensor_that_cannot_be_packed_is_refused_by_its_place(torch, monkeypatch):
    """Whatever its library raises; the others are told."""

    def refuse(tensor):
        raise KeyError("no such storage")

    monkeypatch.setattr(torch.Tensor, "detach", refuse)

    def fn():
        with pytest.raises(
            sv.ConfigError if sv.rank() == 0 else sv.MismatchError,
            match=r"value\['w'\] of type Tensor cannot travel: KeyError",
        ):
            sv.broadcast_object({"w": torch.Tensor(np.ones(2))} if sv.rank() == 0 else None)
        return float(sv.all_reduce(1.0))

    assert everywhere(fn) == [2.0, 2.0]


def test_tensors_of_libraries_without_a_name_do_not_travel_as_objects():
    with pytest.raises(
        sv.ConfigError,
        match=r"value\[0\] is a tests\.support\.fake_tensors\.Tensor, which cannot travel: write np\.from_dlpack\(x\)",
    ):
        sv.broadcast_object([Tensor(np.ones(2))])


def test_a_library_that_is_not_here_is_named(torch, monkeypatch):
    packed = pack_object([torch.Tensor(np.ones(2))])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WireError, match="tensors of torch, which cannot be imported here"):
        unpack_object(packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_libraries_take_variables_by_dlpack(layout):
    """As a copy: what they make of it may be written to, and the variable's value may not."""

    def fn():
        v = sv.Variable(np.arange(3.0) + 1)
        taken = np.from_dlpack(v)
        given = TensorOfOldDLPack(0.0)
        given.array = v
        old = np.from_dlpack(given)
        assert (v.__dlpack_device__(), taken.tolist(), old.tolist()) == (
            (1, 0),
            [1.0, 2.0, 3.0],
            [1.0, 2.0, 3.0],
        )
        taken[...] = 0.0
        counted = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        counted.assign_add(1.0)
        assert float(np.from_dlpack(counted)) == 2.0  # reads as NumPy does, with all
        assert v.numpy().tolist() == [1.0, 2.0, 3.0]
        with pytest.raises(BufferError, match="as a copy only"):
            np.from_dlpack(v, copy=False)
        with pytest.raises(BufferError, match="does not know bfloat16"):
            np.from_dlpack(sv.Variable(np.ones(2, ml_dtypes.bfloat16)))
        return type(sv.all_reduce(v)) is np.ndarray

    assert everywhere(fn, layout) == [True, True]
