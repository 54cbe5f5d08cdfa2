"""With PyTorch and JAX themselves: `pytest -m tensors`, after `pip install -e '.[test,torch,jax]'`.

What can be told by a small stand-in is in test_tensors.py, which every run has.
"""

import importlib
import warnings
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks

pytestmark = pytest.mark.tensors
SOON = RuntimeConfig(collective_timeout_s=30.0, shutdown_timeout_s=1.0)
LAYOUTS = {"links": {}, "shm": {"shared": True}, "hosts": {"shared": True, "hosts": 2}}
NUMPY_ONLY = {"uint16", "uint32", "uint64"}  # of which PyTorch has little more than the names


def imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def torch():
    module = imported("torch")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="module")
def jax():
    module = imported("jax")
    module.config.update("jax_platforms", "cpu")
    imported("jax.numpy").zeros(1)  # its threads are there from now on
    return module


def everywhere(fn, layout="shm", size=2):
    out = run_ranks(size, fn, config=SOON, timeout_s=100, **LAYOUTS[layout])
    errors = [one for one in out if isinstance(one, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return out


CALLS = {
    "all_reduce": sv.all_reduce,
    "reduce": sv.reduce,
    "broadcast": sv.broadcast,
    "all_gather": sv.all_gather,
    "gather": sv.gather,
    "reduce_scatter": sv.reduce_scatter,
    "scatter": sv.scatter,
    "all_to_all": sv.all_to_all,
    "scan": sv.scan,
    "exscan": sv.exscan,
}
MOVES = {"broadcast", "all_gather", "gather", "scatter", "all_to_all"}


def check(library, kind, made, wanted, text):
    """Look whether a result is of the library, and of the dtype and value of NumPy's."""
    if wanted is None:
        assert made is None, text
    elif isinstance(wanted, list | tuple):
        for one, other in zip(made, wanted, strict=True):
            check(library, kind, one, other, text)
    else:
        assert isinstance(made, kind), text
        assert str(made.dtype).removeprefix("torch.") == wanted.dtype.name, text
        same = library.asarray(wanted.astype(np.float64) if wanted.dtype.kind == "V" else wanted)
        assert bool(
            (made.double() == same).all()
            if hasattr(made, "double") and wanted.dtype.kind == "V"
            else (made == same).all()
        ), text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_of_every_dtype_of_pytorch(torch, layout):
    def fn():
        for name in DTYPE_NAMES:
            dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
            x = (np.arange(8) % 2 if name == "bool" else np.arange(8) + sv.rank()).astype(dtype)
            mine = torch.tensor(x.astype(np.float64) if name == "bfloat16" else x).to(
                getattr(torch, name)
            )
            for call, function in CALLS.items():
                if name == "bool" and call not in MOVES:
                    function = partial(function, op="or")  # noqa: PLW2901
                for option in ({}, {}, {"async_op": True}):
                    made, wanted = function(mine, **option), function(x, **option)
                    if option:
                        made, wanted = made.wait(), wanted.wait()
                    if name not in NUMPY_ONLY or wanted is None:
                        check(torch, torch.Tensor, made, wanted, f"{call} of {name}")

    everywhere(fn, layout)


def test_memory_is_shared_with_pytorch_in_both_directions(torch):
    def fn():
        out = torch.zeros(1000)
        x = torch.full((1000,), 2.0)
        assert sv.all_reduce(x, out=out) is out
        assert (out == 4).all()
        gradient = torch.nn.Parameter(torch.full((3, 4), float(sv.rank())))
        assert sv.all_reduce(gradient, "mean", out=gradient) is gradient
        assert (gradient == 0.5).all()
        columns = torch.zeros(4, 3)
        got = sv.all_reduce(torch.ones(4), out=columns[:, 1])
        assert columns.sum() == 8
        assert got.data_ptr() == columns[:, 1].data_ptr()
        half = torch.zeros(4, dtype=torch.bfloat16)
        assert sv.all_reduce(torch.ones(4, dtype=torch.bfloat16), "sum", out=half) is half
        assert half.tolist() == [2.0] * 4
        got = sv.all_reduce({"w": x, "b": [torch.ones((), requires_grad=True), 1.0]})
        assert type(got["b"][0]) is torch.Tensor
        assert not got["b"][0].requires_grad
        assert type(got["b"][1]) is np.ndarray
        sv.send(x, 1 - sv.rank(), async_op=True)
        assert sv.recv(1 - sv.rank(), out=out) is out
        assert (out == 2).all()
        complexes = torch.arange(3.0) * 1j
        assert (sv.all_reduce(complexes.conj()) == 2 * complexes.conj()).all()
        values, ranks = sv.all_reduce(torch.tensor([float(sv.rank())]), "maxloc")
        assert (values.tolist(), ranks.tolist()) == ([1.0], [1])

    everywhere(fn)


def test_backward_refuses_what_was_computed_from_the_values_before(torch):
    weights = torch.nn.Parameter(torch.ones(3))
    loss = (weights * weights).sum()
    sv.all_reduce(np.zeros(3, np.float32), out=weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_taken_is_refused(torch):
    for x, words in (
        (torch.ones(2, device="meta"), r"on the device 'meta'"),
        (torch.ones(2, 2).to_sparse(), "[Ss]parse"),
        (torch.ones(2).to(torch.float8_e4m3fn), "Float8"),
    ):
        for call in (
            lambda x: sv.all_reduce(x),
            lambda x: sv.all_gather([x]),
            lambda x: sv.Variable(x),
            lambda x: sv.broadcast_object(x),
        ):
            with pytest.raises(sv.ConfigError, match=words):
                call(x)
    with pytest.raises(sv.ConfigError, match="on the device 'meta'"):
        sv.all_reduce(np.ones(2, np.float32), out=torch.ones(2, device="meta"))


class Pair(NamedTuple):
    a: Any
    b: Any


def trained(torch, model, optimizer, schedule, steps):
    """Train a little, with gradients averaged where they lie; returns the losses."""
    losses = []
    for step in range(steps):
        x = torch.linspace(0, 1, 6).reshape(3, 2) + step
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            sv.all_reduce(parameter.grad, "mean", out=parameter.grad)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_modules_optimizers_and_schedules_are_restored_on_another_number_of_workers(
    torch, tmp_path
):
    """Everything that training needs: what follows a restore is what would have followed without one, to the bit."""

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 3),
            torch.nn.BatchNorm1d(3),
            torch.nn.Linear(3, 1, dtype=torch.float32),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
        return model, optimizer, schedule

    def save():
        if sv.rank() == 0:  # one at a time, for the generator is the process's
            model, optimizer, schedule = made = make(0)
        sv.barrier()
        if sv.rank() == 1:
            model, optimizer, schedule = made = make(0)
        trained(torch, *made, 2)
        state = model.state_dict()
        sv.Checkpoint(
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            state=state,
            pair=[torch.ones(2).to(torch.bfloat16)],
        ).save(tmp_path / "c")
        return trained(torch, *made, 3)

    after = everywhere(save, size=2)
    assert after[0] == after[1]

    def restore():
        made = []
        for turn in range(3):
            if sv.rank() == turn:
                made = make(turn + 5)
            sv.barrier()
        model, optimizer, schedule = made
        checkpoint = sv.Checkpoint(
            model=model, optimizer=optimizer, schedule=schedule, state=None, pair=None
        )
        checkpoint.restore(tmp_path / "c")
        state = checkpoint.state
        assert type(state) is OrderedDict
        assert all(type(one) is torch.Tensor for one in state.values())
        assert {name: one.dtype for name, one in state.items()} == {
            name: one.dtype for name, one in model.state_dict().items()
        }
        assert state._metadata == model.state_dict()._metadata
        assert all(torch.equal(one, model.state_dict()[name]) for name, one in state.items())
        assert checkpoint.pair[0].dtype is torch.bfloat16
        other = torch.nn.Linear(9, 9)
        with pytest.raises(sv.CheckpointError, match="refused its state"):
            sv.Checkpoint(model=other).restore(tmp_path / "c", partial=True)
        return trained(torch, model, optimizer, schedule, 3)

    assert everywhere(restore, size=3) == [after[0]] * 3


def test_state_of_modules_in_objects(torch):
    def fn():
        state = OrderedDict(
            weight=torch.full((2, 2), float(sv.rank())), bias=torch.nn.Parameter(torch.ones(2))
        )
        got = sv.broadcast_object(state if sv.rank() else None, root=1)
        assert type(got) is OrderedDict
        assert [type(one) for one in got.values()] == [torch.Tensor] * 2
        got["weight"].add_(1)  # its memory is its own
        assert [one["weight"].sum().item() for one in sv.all_gather_object(state)] == [0.0, 4.0]
        pair = sv.all_reduce(Pair(torch.ones(2), 1.0))
        assert type(pair) is Pair
        assert pair.a.tolist() == [2.0, 2.0]
        strategy = sv.MirroredStrategy()
        total = strategy.reduce(
            "MEAN", sv.PerReplica({"loss": torch.tensor(float(sv.rank()))}), axis=None
        )
        assert total["loss"] == torch.tensor(0.5)
        v = sv.Variable(torch.ones(3, requires_grad=True))
        v.assign_add(torch.ones(3))
        taken = torch.from_dlpack(v)
        taken += 5
        assert v.numpy().tolist() == [2.0] * 3

    everywhere(fn)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jax_arrays_in_give_jax_arrays_out(jax, layout):
    jnp = jax.numpy

    def fn():
        for name in (
            "bool",
            "int8",
            "int32",
            "uint8",
            "float16",
            "float32",
            "bfloat16",
            "complex64",
        ):
            x = np.asarray(jnp.arange(8).astype(name)) if name != "bool" else np.arange(8) % 2 == 0
            for call, function in CALLS.items():
                if name == "bool" and call not in MOVES:
                    function = partial(function, op="or")  # noqa: PLW2901
                for option in ({}, {}, {"async_op": True}):
                    made, wanted = function(jnp.asarray(x), **option), function(x, **option)
                    if option:
                        made, wanted = made.wait(), wanted.wait()
                    check(jnp, jax.Array, made, wanted, f"{call} of {name}")
        with pytest.raises(sv.ConfigError, match="out is read-only"):
            sv.all_reduce(np.ones(2, np.float32), out=jnp.zeros(2))
        float(sv.all_reduce(1.0))
        got = sv.broadcast_object({"w": jnp.ones(2, jnp.bfloat16)})
        assert isinstance(got["w"], jax.Array)
        assert got["w"].dtype == jnp.bfloat16
        assert isinstance(sv.all_reduce({"a": [jnp.ones(2)]})["a"][0], jax.Array)
        assert jnp.from_dlpack(sv.Variable([1.0, 2.0])).tolist() == [1.0, 2.0]

    everywhere(fn, layout)


def diloco_steps(wrap):
    w = sv.Variable(np.ones(6, np.float32), synchronization="NONE")
    optimizer = sv.optimizers.DiLoCo(sv.optimizers.AdamW(0.1), steps=2, delay=1)
    for step in range(5):
        gradient = np.arange(6, dtype=np.float32) + step * sv.rank()
        optimizer.apply_gradients([(wrap(gradient), w)])
    optimizer.finish()
    return w.numpy().tobytes()


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_an_outer_optimizer_takes_gradients_of_both(library, request):
    module = request.getfixturevalue(library)
    wrap = module.from_numpy if library == "torch" else imported("jax.numpy").asarray
    expected = everywhere(lambda: diloco_steps(np.asarray))
    assert everywhere(lambda: diloco_steps(wrap)) == expected
