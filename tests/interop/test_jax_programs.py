"""Collectives of `syncvar.jax` inside programs of JAX, in real processes: `pytest -m tensors`."""

import re
import subprocess
import sys

import pytest

from tests.support.launching import line_of

NEEDS_JAX = pytest.mark.tensors
pytestmark = pytest.mark.timeout(900)

VALUES = """
import os

import jax, jax.numpy as jnp, numpy as np
import syncvar as sv
from syncvar import jax as svj

rank, size = sv.rank(), sv.world_size()
ranks = range(size)
shape = (2 * size, 3)
inputs = [np.random.default_rng(one).normal(size=shape).astype(np.float32) for one in ranks]
x = jnp.asarray(inputs[rank])
total, joined = sum(inputs), np.concatenate(inputs)
weights = [np.random.default_rng(100 + one).normal(size=joined.shape).astype(np.float32) for one in ranks]
right, left = (rank + 1) % size, (rank - 1) % size


def same(name, value, wanted):
    value, wanted = np.asarray(value), np.asarray(wanted)
    assert value.shape == wanted.shape, (name, value.shape, wanted.shape)
    np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-5, err_msg=name)


def everywhere(name, function, argument, wanted):
    '''The same eagerly, compiled once and compiled twice.'''
    compiled = jax.jit(function)
    for way, call in {"eager": function, "compiled": compiled, "again": compiled}.items():
        same(f"{name} {way}", call(argument), wanted)


piece = slice(2 * rank, 2 * rank + 2)
w = weights[rank]
everywhere("all_reduce", svj.all_reduce, x, total)
everywhere("mean", lambda x: svj.all_reduce(x, "mean"), x, total / size)
everywhere("max", lambda x: svj.all_reduce(x, "MAX"), x, np.max(inputs, axis=0))
everywhere("mean of integers", lambda x: svj.all_reduce(x, "mean"), jnp.int32(rank), (size - 1) / 2)
everywhere("all_gather", svj.all_gather, x, joined)
everywhere("all_gather 1", lambda x: svj.all_gather(x, axis=-1), x, np.concatenate(inputs, axis=1))
everywhere("all_gather of numbers", svj.all_gather, jnp.float32(rank), np.arange(size))
everywhere("reduce_scatter", svj.reduce_scatter, x, total[piece])
everywhere("reduce_scatter 1", lambda x: svj.reduce_scatter(x.T, axis=1), x, total.T[:, piece])
everywhere("broadcast", lambda x: svj.broadcast(x, size - 1), x, inputs[-1])
everywhere("all_to_all", svj.all_to_all, x, np.concatenate([one[piece] for one in inputs]))
everywhere("sendrecv", lambda x: svj.sendrecv(x, right, left), x, inputs[left])
everywhere("at the end", lambda x: svj.sendrecv(x, right if right else None, left if rank else None),
           x, inputs[left] if rank else np.zeros(shape))

def by_messages(x):
    if rank == 0:
        for one in range(1, size):
            svj.send(x, one, tag=one)
        return x
    return svj.recv(jax.ShapeDtypeStruct(shape, "float32"), 0, tag=rank)

everywhere("send and recv", by_messages, x, inputs[0])

# A pytree is one call.
pair = jax.jit(svj.all_reduce)({"a": x, "b": [x[0], jnp.int32(1)]})
same("pytree", pair["a"], total)
same("pytree", pair["b"][0], total[0])
assert pair["b"][1] == size and pair["b"][1].dtype == jnp.int32
assert svj.all_reduce({}) == {}
same("broadcast of a pytree", svj.broadcast((x, x[0]), 0)[1], inputs[0][0])
svj.barrier()
jax.jit(lambda: svj.barrier())()

if os.environ["SYNCVAR_CALL_RUNNER"] == "python":
    print("all values are right")
    raise SystemExit

# Derivatives: cotangents w of this rank's result.
def gradient(name, function, wanted, w=w):
    everywhere(f"gradient of {name}", jax.grad(lambda x: (function(x) * w).sum()), x, wanted)

own = w[: 2 * size]
gradient("all_reduce", svj.all_reduce, own, own)
gradient("mean", lambda x: svj.all_reduce(x, "mean"), own / size, own)
gradient("sum_gradients", svj.sum_gradients, sum(one[: 2 * size] for one in weights), own)
cut = sum(weights)[2 * size * rank : 2 * size * (rank + 1)]
gradient("all_gather", svj.all_gather, cut)
gradient("reduce_scatter", svj.reduce_scatter, np.concatenate([one[:2] for one in weights]), w[:2])
gradient("mean of pieces", lambda x: svj.reduce_scatter(x, "mean"),
         np.concatenate([one[:2] for one in weights]) / size, w[:2])
at_root = sum(one[: 2 * size] for one in weights) if rank == 1 else np.zeros(shape)
gradient("broadcast", lambda x: svj.broadcast(x, 1), at_root, own)
gradient("all_to_all", svj.all_to_all, np.concatenate([one[: 2 * size][piece] for one in weights]), own)
gradient("sendrecv", lambda x: svj.sendrecv(x, right, left), weights[right][: 2 * size], own)

# Forward mode, and the transpose of the transpose.
tangents = [np.random.default_rng(50 + one).normal(size=shape).astype(np.float32) for one in ranks]
t = jnp.asarray(tangents[rank])
for name, function, wanted in (
    ("all_reduce", svj.all_reduce, sum(tangents)),
    ("all_gather", svj.all_gather, np.concatenate(tangents)),
    ("sendrecv", lambda x: svj.sendrecv(x, right, left), tangents[left]),
):
    same(f"jvp of {name}", jax.jit(lambda x, t: jax.jvp(function, (x,), (t,))[1])(x, t), wanted)
    linear = lambda x: jax.linear_transpose(function, x)
    twice = jax.linear_transpose(lambda y: linear(x)(y)[0], jax.eval_shape(function, x))
    same(f"{name} transposed twice", twice(x)[0], function(x))
loss = lambda w: svj.all_reduce(jnp.sum((svj.sum_gradients(w) * x) ** 2))
everywhere("data parallel", jax.grad(loss), jnp.ones(3), 2 * (np.stack(inputs) ** 2).sum(axis=(0, 1)))

# Batches: the same as a loop over them.
for name, function in (
    ("all_reduce", svj.all_reduce), ("all_gather", svj.all_gather), ("broadcast", svj.broadcast),
    ("reduce_scatter", lambda x: svj.reduce_scatter(x, axis=-1)), ("all_to_all", svj.all_to_all),
    ("sendrecv", lambda x: svj.sendrecv(x, right, left)), ("messages", by_messages),
    ("gradient", jax.grad(lambda x: svj.all_gather(x)[0])),
):
    if name == "messages":
        function = lambda x: (svj.send(x, right), svj.recv(x, left))[1]
    for axis in ((1,) if name in ("broadcast", "all_to_all", "messages", "gradient") else (0, 1)):
        batch = jnp.concatenate([x, x + 1], axis=1).T if axis == 0 else jnp.concatenate([x, x + 1], axis=1)
        loop = jnp.stack([function(one) for one in (batch if axis == 0 else batch.T)])
        same(f"vmap of {name}", jax.vmap(function, axis)(batch), loop)
        same(f"compiled vmap of {name}", jax.jit(jax.vmap(function, axis))(batch), loop)
like = jnp.zeros(2 * size)  # is not a batch
shifted = jax.vmap(lambda x: svj.sendrecv(x, right, left, like=like), 1, 1)(x)
same("vmap of sendrecv with like", shifted, inputs[left])

# Control flow and recomputation.
step = lambda carry, _: (svj.all_reduce(carry, "mean") * 2, carry.sum())
last, sums = jax.jit(lambda x: jax.lax.scan(step, x, None, length=3))(x)
same("scan", last, total / size * 8)
until = jax.jit(lambda v: jax.lax.while_loop(lambda v: v < 100, lambda v: svj.all_reduce(v), v))
same("while", until(1.0), size ** int(np.ceil(np.log(100) / np.log(size))))
everywhere("gradient of a scan", jax.grad(lambda x: jax.lax.scan(step, x, None, length=2)[0].sum()),
           x, np.full(shape, 4 / size**2))
again = jax.checkpoint(lambda x: jnp.sin(svj.all_reduce(x, "mean")))
everywhere("jax.checkpoint", jax.grad(lambda x: again(x).sum()), x, np.cos(total / size) / size)

# Order: many small programs one after another, then the core.
first, second = jax.jit(lambda x: svj.all_reduce(x) / size), jax.jit(lambda x: svj.all_reduce(x, "max"))
value = jnp.ones(200_000)
for _ in range(20):
    value = second(first(value))
jax.effects_barrier()
assert sv.all_reduce(1.0) == size and value[0] == 1

half = sv.new_group([0, 1])
if half.is_member:
    same("group", jax.jit(lambda x: svj.all_reduce(x, group=half))(x), inputs[0] + inputs[1])
print("all values are right")
"""

ERRORS = """
import jax, jax.numpy as jnp, numpy as np
import syncvar as sv
from syncvar import jax as svj

def message(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} raised no {kind}")

x = jnp.ones((3, 2))
assert "only sum and mean have a derivative, not max" in message(
    lambda: jax.grad(lambda x: svj.all_reduce(x, "max").sum())(x), sv.UsageError)
assert "send has no derivative" in message(
    lambda: jax.grad(lambda x: (svj.send(x, 0), x.sum())[1])(x), sv.UsageError)
assert "minloc" in message(lambda: svj.all_reduce(x, "minloc"), sv.ConfigError)
assert "3: pad the array" in message(lambda: svj.reduce_scatter(x), sv.ConfigError)
assert "3: pad the array" in message(lambda: jax.jit(svj.all_to_all)(x), sv.ConfigError)
assert "outside an array" in message(lambda: svj.all_gather(x, axis=2), sv.ConfigError)
assert "from 0 to 1, not 2" in message(lambda: svj.broadcast(x, 2), sv.ConfigError)
assert "make it static" in message(lambda: jax.jit(svj.broadcast)(x, 1), sv.ConfigError)

other = 1 - sv.rank()
sv.send(np.ones(4), other)
assert "float64[4], but the program was traced for float32[3, 2]" in message(
    lambda: svj.recv(x, other), sv.ConfigError)
text = message(lambda: svj.all_reduce(jnp.ones(3 + sv.rank())), sv.MismatchError)
assert "script.py:" in text, text
assert svj.all_reduce(1.0) == 2  # the group stays usable
svj.send(x, other)
sv.recv(other, out=np.empty((3, 2), np.float32))
print("all errors are right")
"""

MISMATCH = """
import jax, jax.numpy as jnp
import syncvar as sv
from syncvar import jax as svj

add = jax.jit(lambda x: svj.all_reduce(x))
most = jax.jit(lambda x: svj.all_reduce(x, "max"))
add(jnp.ones(3))
most(jnp.ones(3))
(add if sv.rank() else most)(jnp.ones(3)).block_until_ready()  # here
"""

LOST = """
import jax, jax.numpy as jnp
import syncvar as sv
from syncvar import jax as svj

add = jax.jit(lambda x: svj.all_reduce(x))
add(jnp.ones(3)).block_until_ready()
if sv.rank() == 1:
    raise ValueError("no labels")
add(jnp.ones(3)).block_until_ready()
"""

NOT_WAITED = """
import jax, jax.numpy as jnp
from syncvar import jax as svj

jax.jit(lambda x: svj.all_reduce(svj.all_reduce(x)))(jnp.ones(500_000))
"""


@NEEDS_JAX
@pytest.mark.parametrize(("workers", "runner"), [(3, "auto"), (2, "python")])
def test_values_derivatives_and_batches(launch, workers, runner):
    env = {"JAX_PLATFORMS": "cpu", "SYNCVAR_CALL_RUNNER": runner}
    job = launch(VALUES, workers=workers, env=env)
    assert job.wait(600) == 0, str(job)
    assert job.out.count("all values are right") == workers


@NEEDS_JAX
def test_errors_before_and_during_a_call(launch):
    job = launch(ERRORS, env={"JAX_PLATFORMS": "cpu"})
    assert job.wait(600) == 0, str(job)
    assert job.out.count("all errors are right") == 2


@NEEDS_JAX
def test_ranks_that_differ_inside_a_compiled_function_end_the_job_with_their_calls(launch):
    job = launch(MISMATCH, env={"JAX_PLATFORMS": "cpu"})
    assert job.wait(600) == 1, str(job)
    line = line_of(MISMATCH, "# here")
    for rank, op in enumerate(("max", "sum")):
        wanted = rf"rank {rank}: all_reduce\({op}, float32\[3\]\) \(call 3\) at .*script.py:{line} "
        assert re.search(wanted, job.report), str(job)


@NEEDS_JAX
def test_a_rank_that_fails_ends_the_wait_of_a_compiled_function(launch):
    job = launch(LOST, env={"JAX_PLATFORMS": "cpu"})
    assert job.wait(600) == 1, str(job)
    assert "rank 1 on" in job.report.split("\n")[0]
    assert "ValueError: no labels" in job.report.split("\n")[0]
    assert "PeerLost: rank 1" in job.report


@NEEDS_JAX
def test_a_program_may_end_while_a_compiled_function_runs(launch):
    job = launch(NOT_WAITED, env={"JAX_PLATFORMS": "cpu"})
    assert job.wait(600) == 0, str(job)
    assert "Error" not in job.err


@NEEDS_JAX
def test_the_examples_in_the_docstrings():
    code = (
        "import doctest, sys; from syncvar.jax import jax_collectives;"
        "result = doctest.testmod(jax_collectives); print(result);"
        "sys.exit(result.failed or result.attempted < 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_jax_the_import_says_what_to_install():
    code = "import sys; sys.modules['jax'] = None; import syncvar.jax"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "pip install 'syncvar[jax]'" in done.stderr.splitlines()[-1]
