"""`bucket_bytes=` and `first_bucket_bytes=`: of all-reduces of lists, and of optimizers."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.collectives import buckets
from syncvar.collectives.reduce_args import BucketLimits
from syncvar.testing import run_ranks

SLOW = pytest.mark.slow
FEW_WORLDS = [
    pytest.param({"shared": True}, id="shm", marks=SLOW),
    pytest.param({}, id="links", marks=SLOW),
    pytest.param({"hosts": 2}, id="hosts"),
]
SHAPES = [(40,), (10, 10), (), (0,), (300,), (7, 3)]
SIZES = [
    {"bucket_bytes": 1},
    {"bucket_bytes": 500},
    {"bucket_bytes": 1200, "first_bucket_bytes": 100},
]
COMPRESSORS = [None, "float16", "int8", "topk", "powersgd"]


def arrays(dtype=np.float32):
    rng = np.random.default_rng(sv.rank())
    return [rng.normal(size=shape).astype(dtype) for shape in SHAPES]


class Recorder:
    """A compressor that changes nothing, and records what it encodes."""

    name, in_pieces, keeps_error = "recorder", False, False

    def __init__(self, fails_at=None):
        self.counts, self._fails_at = [], fails_at

    def encoded_bytes(self, count):
        return 4 * count

    def encode(self, values):
        if values.size == self._fails_at:
            raise ArithmeticError("cannot encode")
        self.counts.append(values.size)
        return values.view(np.uint8)

    def decode(self, data, count):
        return data.view(np.float32)[:count].copy()


def sums(options):
    """Return the sums of lists, with and without buckets."""
    mixed = {"half": arrays(np.float16), "whole": [np.arange(9), *arrays()]}
    outs = [np.empty(shape, np.float32) for shape in SHAPES]
    found = [
        sv.all_reduce(arrays(), **options),
        sv.all_reduce(arrays(), **options),  # a repeated call
        sv.all_reduce(arrays(), out=outs, **options),
        sv.all_reduce(arrays(), async_op=True, **options).wait(),
    ]
    expected = sv.all_reduce(arrays())
    for one in found:
        assert all(map(np.array_equal, one, expected))
    assert all(map(np.array_equal, outs, expected))
    dicts = sv.all_reduce(mixed, **options), sv.all_reduce(mixed)
    for key in mixed:
        assert all(map(np.array_equal, dicts[0][key], dicts[1][key]))
    assert np.array_equal(sv.all_reduce(np.ones(9), **options), np.full(9, 2.0))
    return b"".join(one.tobytes() for one in expected)


@pytest.mark.parametrize("options", SIZES)
@pytest.mark.parametrize("world", FEW_WORLDS)
def test_buckets_do_not_change_the_sums_of_two_ranks(world, options):
    first, second = run_ranks(2, sums, options, **world)
    assert isinstance(first, bytes), first
    assert first == second


def test_a_list_travels_in_buckets(monkeypatch):
    found = []
    divided = buckets._divided

    def spy(*arguments):
        result = divided(*arguments)
        found.append([places for _, places in result])
        return result

    monkeypatch.setattr(buckets, "_divided", spy)
    run_ranks(2, lambda: sv.all_reduce(arrays(), bucket_bytes=1200, first_bucket_bytes=300))
    assert found == [[[0], [1, 2, 3], [4], [5]]] * 2  # 160, 404, 1200 and 84 bytes


def compressed_sums(kind, options):
    errors = []
    for x in (arrays(), arrays(np.float64)):
        total = sv.all_reduce(x, "mean", compress=kind, **options)
        exact = sv.all_reduce(x, "mean")
        errors += [float(np.abs(a - b).max(initial=0)) for a, b in zip(total, exact, strict=True)]
        everyone = sv.all_gather(np.concatenate([one.reshape(-1) for one in total])[np.newaxis])
        assert all(np.array_equal(one, everyone[0]) for one in everyone)
    return max(errors)


@pytest.mark.parametrize("options", SIZES)
@pytest.mark.parametrize("kind", COMPRESSORS[1:])
def test_compressed_buckets_are_equal_on_all_ranks(kind, options):
    for error in run_ranks(3, compressed_sums, kind, options):
        assert isinstance(error, float), error
        assert error < {"float16": 0.01, "int8": 0.1}.get(kind, 4.0)


def recorded():
    one = Recorder()
    x = arrays()
    total = sv.all_reduce(x, compress=one, bucket_bytes=1200, first_bucket_bytes=300)
    assert all(map(np.allclose, total, sv.all_reduce(x)))
    return one.counts


def test_each_bucket_is_encoded_by_itself():
    assert run_ranks(2, recorded) == [[40, 101, 300, 21]] * 2


def refused():
    with pytest.raises(Exception, match="cannot encode"):
        sv.all_reduce(arrays(), compress=Recorder(fails_at=300), bucket_bytes=1200)
    return True


def test_an_error_of_the_thread_that_encodes_reaches_the_caller():
    results = run_ranks(2, refused)
    assert any(one is True for one in results)


def mismatch(compress):
    try:
        sv.all_reduce(arrays(), compress=compress, bucket_bytes=100 * (1 + sv.rank()))
    except sv.MismatchError:
        return True
    return False


@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize("world", FEW_WORLDS)
def test_ranks_with_other_sizes_raise(world, compress):
    assert run_ranks(2, mismatch, compress, **world) == [True, True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be an integer of at least 1, not 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be an integer"),
        ({"bucket_bytes": True}, "bucket_bytes must be an integer"),
        ({"bucket_bytes": 5, "first_bucket_bytes": -1}, "first_bucket_bytes must be an integer"),
        ({"first_bucket_bytes": 5}, "needs bucket_bytes"),
    ],
)
def test_wrong_sizes(options, text):
    for call in (sv.all_reduce, lambda x, **sizes: sv.all_reduce(x, compress="int8", **sizes)):
        with pytest.raises(sv.ConfigError, match=text):
            call([np.ones(3)], **options)
    with pytest.raises(sv.ConfigError, match=text):
        sv.optimizers.SGD(0.1, **options)


def test_an_array_is_never_cut():
    limits = BucketLimits.checked(10, None)
    assert limits.divide([]) == []
    assert limits.divide([(100, "f"), (4, "f"), (6, "f"), (1, "f")]) == [[0], [1, 2], [3]]


def weights(compress, sizes, weight):
    """Make steps; return the bytes of the weights."""
    dtypes = [np.float32, np.float32, np.float64, np.float16, np.float32, np.float64]
    made = [
        sv.Variable(np.zeros(shape, dtype), name=f"w{index}")
        for index, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
    ]
    optimizer = sv.optimizers.Adam(0.1, clip_value=1.0, compress=compress, **sizes)
    for step in range(3):
        gradients = [one * (step + 1) for one in arrays()]
        optimizer.apply_gradients(zip(gradients, made, strict=True), weight=weight)
    return b"".join(one.numpy().tobytes() for one in made)


@pytest.mark.parametrize("compress", COMPRESSORS)
@pytest.mark.parametrize("weight", [None, pytest.param(2.0, marks=SLOW)])
@pytest.mark.parametrize("world", FEW_WORLDS)
def test_optimizers_send_buckets(world, weight, compress):
    found = run_ranks(2, weights, compress, SIZES[2], weight, **world)
    assert isinstance(found[0], bytes), found[0]
    assert found[0] == found[1]
    if compress in (None, "float16"):  # each element is encoded by itself
        assert found == run_ranks(2, weights, compress, {}, weight, **world)


def test_a_diloco_refuses_buckets_of_the_outer_optimizer():
    inner, outer = sv.optimizers.SGD(0.1), sv.optimizers.SGD(0.1, bucket_bytes=10)
    with pytest.raises(sv.ConfigError, match="its compress and bucket_bytes"):
        sv.optimizers.DiLoCo(inner, outer, steps=2)
