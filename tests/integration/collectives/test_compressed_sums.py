"""`sv.all_reduce(..., compress=...)`: bounds of the error, equal bytes on all ranks, mismatches and wrong arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncvar as sv
from syncvar.testing import run_ranks

WORLDS = [{"shared": True}, {}, {"hosts": 2}]
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 254}


class Ternary:
    """A compressor of a program: the sign of large elements, times their mean."""

    name, in_pieces, keeps_error = "ternary", True, True

    def __init__(self, fails_on=None):
        self.fails_on = fails_on

    def encoded_bytes(self, count):
        return 4 + count

    def encode(self, values):
        if self.fails_on == sv.rank():
            return values
        scale = np.abs(values).mean(keepdims=True).astype(np.float32)
        signs = (np.sign(values) * (np.abs(values) > scale / 2)).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), signs.view(np.uint8)])

    def decode(self, data, count):
        scale = np.frombuffer(data[:4].tobytes(), np.float32)
        return data[4 : 4 + count].view(np.int8).astype(np.float32) * scale


def inputs(dtype, shape):
    rng = np.random.default_rng(sv.rank())
    return (rng.normal(size=shape) * 3).astype(dtype)


def check_bounds():
    """Return the bytes of all results of this rank, after a check of their errors."""
    results = []
    size = sv.world_size()
    for compress, epsilon in EPSILON.items():
        for dtype in (np.float32, np.float64, np.float16):
            for shape in ((), (1,), (37, 21), (5, 0)):
                x = inputs(dtype, shape)
                everyone = np.stack(sv.all_gather(x[None] if x.ndim else x.reshape(1, 1)))
                exact = everyone.astype(np.float64).sum(axis=0).reshape(shape)
                total = sv.all_reduce(x, compress=compress)
                assert total.dtype == dtype
                assert total.shape == shape
                largest = np.abs(everyone).max(initial=0.0)
                rounding = 2.0**-10 if dtype == np.float16 else 2.0**-20
                bound = (epsilon + rounding) * (2 * size * largest) * (1 + epsilon)
                assert np.all(np.abs(total - exact) <= bound)
                mean = sv.all_reduce(x, "mean", compress=compress)
                assert np.all(np.abs(mean - exact / size) <= bound)
                results += [total.tobytes(), mean.tobytes()]
    return results


@pytest.mark.parametrize("world", WORLDS, ids=["shm", "links", "hosts"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_errors_are_within_their_bounds_and_bytes_equal_on_all_ranks(world, size):
    if size == 1 and "hosts" in world:
        world = {}
    results = run_ranks(size, check_bounds, **world)
    assert isinstance(results[0], list), results[0]
    assert all(one == results[0] for one in results)


def reduce_columns(columns, compress):
    return sv.all_reduce(np.array(columns[sv.rank()], np.float32), compress=compress).tobytes()


NUMBERS = st.floats(width=32) | st.floats(-8, 8, width=32)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda count: st.lists(
            st.lists(NUMBERS, min_size=count, max_size=count), min_size=2, max_size=3
        )
    ),
    st.sampled_from(["float16", "bfloat16", "int8", "topk"]),
)
def test_any_values_give_equal_bytes_on_all_ranks(columns, compress):
    results = run_ranks(len(columns), reduce_columns, columns, compress)
    assert isinstance(results[0], bytes), results[0]
    assert len(set(results)) == 1


def call_forms():
    x = inputs(np.float32, (6, 5))
    plain = sv.all_reduce(x, compress="int8")
    out = np.empty_like(x)
    assert sv.all_reduce(x, out=out, compress="int8") is out
    assert np.array_equal(out, plain)
    work = sv.all_reduce(x, async_op=True, compress="int8")
    x_before = x.copy()
    x[:] = -1
    assert np.array_equal(work.wait(), plain)
    x[:] = x_before
    assert np.array_equal(sv.all_reduce(x, out=x, compress="int8"), plain)
    tree = {"a": x_before, "b": [np.float64(0.5), x_before[0].astype(np.float16)]}
    result = sv.all_reduce(tree, "mean", compress=sv.compressors.Float16())
    assert result["a"].dtype == np.float32
    assert result["b"][1].dtype == np.float16
    assert float(result["b"][0]) == 0.5
    halves = sv.new_group([0, 1])
    if halves.is_member:
        pair = sv.all_reduce(x_before, group=halves, compress=Ternary())
        assert pair.shape == x_before.shape
    nothing = sv.all_reduce({}, compress="int8")
    assert nothing == {}
    return plain.tobytes()


@pytest.mark.parametrize("world", WORLDS, ids=["shm", "links", "hosts"])
def test_every_form_of_the_call(world):
    results = run_ranks(3, call_forms, **world)
    assert isinstance(results[0], bytes), results[0]
    assert len(set(results)) == 1


def nonfinite():
    x = np.zeros(600, np.float32)
    x[0], x[300], x[599] = np.nan, np.inf if sv.rank() else 1, 2
    return {
        name: sv.all_reduce(x, compress=name)[[0, 300, 599]].tolist()
        for name in ("float16", "bfloat16", "int8", "topk")
    }


def test_what_becomes_of_nan_and_infinity():
    (found, _) = run_ranks(2, nonfinite)
    assert isinstance(found, dict), found
    assert found["float16"][1:] == found["bfloat16"][1:] == found["topk"][1:] == [np.inf, 4]
    assert np.isnan(found["int8"][1])
    assert found["int8"][2] == 4
    assert all(np.isnan(one[0]) for one in found.values())


def errors_of(cases):
    errors = []
    for x, options in cases:
        mine = options[sv.rank()] if isinstance(options, list) else options
        try:
            sv.all_reduce(x, **mine)
        except sv.SyncvarError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("")
    assert float(sv.all_reduce(1.0)) == sv.world_size()  # the group stays usable
    return errors


@pytest.mark.parametrize("world", WORLDS, ids=["shm", "links", "hosts"])
def test_ranks_with_other_compressors_raise(world):
    x = np.ones(4, np.float32)
    cases = [
        (x, [{"compress": "float16"}, {"compress": "bfloat16"}]),
        (x, [{"compress": sv.compressors.Int8(64)}, {"compress": "int8"}]),
        (x, [{"compress": "int8"}, {}]),
    ]
    results = run_ranks(2, errors_of, cases, **world)
    assert isinstance(results[0], list), results[0]
    for errors in results:
        assert all(error.startswith("MismatchError") for error in errors)
        assert "compress int8(block=64)" in errors[1]


WRONG = [
    (np.arange(3), {"compress": "float16"}, "int64 is exact"),
    (np.ones(3, complex), {"compress": "int8"}, "complex128"),
    ([np.ones(2), np.array([True, False])], {"compress": "int8"}, "bool is exact"),
    (np.ones(3), {"compress": "int8", "op": "max"}, "goes with op 'sum' or 'mean'"),
    (np.ones(3), {"compress": "int3"}, "compress must be one of"),
    (np.ones(3), {"compress": "int8", "weight": 0.5}, "not go together with weight"),
    (np.ones(3), {"compress": "int8", "reproducible": True}, "together with reproducible"),
    (np.ones(3), {"compress": "int8", "out": np.ones(4)}, "out"),
    (np.ones(3), {"compress": Ternary(fails_on=1)}, "must encode 2 elements as uint8[6]"),
]


def test_wrong_arguments_are_errors_before_anything_is_sent():
    good = {"compress": "int8"}
    cases = [
        (x, [good if x.dtype.kind == "f" else {}, wrong])
        for x, wrong, _ in WRONG
        if isinstance(x, np.ndarray) and "fails" not in str(wrong)
    ]
    results = run_ranks(2, errors_of, [(x, [wrong, wrong]) for x, wrong, _ in WRONG])
    assert isinstance(results[1], list), results[1]
    for error, (_, _, text) in zip(results[1], WRONG, strict=True):
        assert error.startswith("ConfigError")
        assert text in error
    results = run_ranks(2, errors_of, cases)
    assert all(error.startswith("MismatchError") for error in results[0])
    assert all(error.startswith("ConfigError") for error in results[1])


PROGRAM = """
import hashlib
import numpy as np, syncvar as sv

rank, size = sv.rank(), sv.world_size()
digest = hashlib.sha256()
whole = np.random.default_rng(0).normal(size=(4, 120_000)).astype(np.float32)
mine = whole[rank::size].sum(axis=0).reshape(300, 400)
for compress in ("float16", "bfloat16", "int8", "topk", "powersgd"):
    for _ in range(2):
        total = sv.all_reduce(mine, compress=compress)
        digest.update(total.tobytes())
    if compress in ("float16", "bfloat16", "int8"):
        error = np.abs(total.reshape(-1) - whole.sum(axis=0)).max()
        assert error < 0.2, (compress, error)
every = sv.all_gather_object(digest.hexdigest())
assert len(set(every)) == 1, every
print("hosts", sv.host_count(), "sha256", digest.hexdigest())
"""


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_real_workers_get_the_same_bytes_on_every_way(launch, workers):
    digests = set()
    for options, environment in (
        ([], {}),
        ([], {"SYNCVAR_TRANSPORT": "zmq"}),
        (["--fake-hosts", "2"], {}),
    ):
        job = launch(PROGRAM, workers=workers, options=options, env=environment)
        assert job.wait() == 0, str(job)
        assert job.out.count("sha256") == workers
        digests |= {line.split()[-1] for line in job.out.splitlines() if "sha256" in line}
    assert workers > 2 or len(digests) == 1
