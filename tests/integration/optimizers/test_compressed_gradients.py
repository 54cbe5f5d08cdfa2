"""Optimizers with `compress=`: accuracy, what compression has lost, checkpoints, and errors."""

import copy

import numpy as np
import pytest

import syncvar as sv
from syncvar.examples import digits
from syncvar.testing import run_ranks

COMPRESSORS = {
    "none": lambda: None,
    "float16": lambda: "float16",
    "bfloat16": lambda: "bfloat16",
    "int8": lambda: "int8",
    "topk": lambda: sv.compressors.TopK(0.05),
    "powersgd": lambda: "powersgd",
}
KEEP_ERROR = ("topk", "powersgd")
WORLDS = [{"shared": True}, {}, {"hosts": 2}]
ROWS = 120  # of a step, on all ranks
MARGIN = 0.02
SHAPES = {"w": (12, 9), "b": (5,)}


def accuracy_of(kind):
    """Train on the digits; return the test accuracy and the bytes of the weights."""
    data = digits.load()
    rng = np.random.default_rng(1)
    shapes = [(64, 64), (64,), (64, 10), (10,)]
    weights = [sv.Variable(rng.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]
    optimizer = sv.optimizers.SGD(0.3, compress=COMPRESSORS[kind]())
    size, rank = sv.world_size(), sv.rank()
    for _ in range(8):
        order = rng.permutation(len(data.train_labels))
        for start in range(0, len(order) - ROWS + 1, ROWS):
            mine = order[start + rank : start + ROWS : size]
            images, labels = data.train_images[mine], data.train_labels[mine]
            found, _, _ = digits.gradients([one.numpy() for one in weights], images, labels)
            found = [one * np.float32(digits.ROWS / len(mine)) for one in found]
            optimizer.apply_gradients(zip(found, weights, strict=True))
    _, likely = digits.forward([one.numpy() for one in weights], data.test_images)
    right = float(np.mean(likely.argmax(axis=1) == data.test_labels))
    return right, b"".join(one.numpy().tobytes() for one in weights)


@pytest.fixture(scope="module")
def exact():
    """The accuracy without compression."""
    ((accuracy, _),) = run_ranks(1, accuracy_of, "none")
    return accuracy


@pytest.mark.slow
@pytest.mark.parametrize("kind", [one for one in COMPRESSORS if one != "none"])
def test_digits_reach_the_same_accuracy(kind, exact):
    results = run_ranks(2, accuracy_of, kind)
    assert isinstance(results[0], tuple), results[0]
    assert results[0][1] == results[1][1]
    assert results[0][0] >= exact - MARGIN
    assert exact > 0.9


def variables():
    return {name: sv.Variable(np.zeros(shape), name=name) for name, shape in SHAPES.items()}


def gradients(step):
    rng = np.random.default_rng([step, sv.rank()])
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]


def accounts(kind, reduce):
    """Return the largest difference of what was applied or is kept from the exact gradients."""
    made = variables()
    optimizer = sv.optimizers.SGD(1.0, compress=COMPRESSORS[kind]())
    exact = [np.zeros(shape) for shape in SHAPES.values()]
    for step in range(6):
        mine = gradients(step)
        optimizer.apply_gradients(zip(mine, made.values(), strict=True), reduce=reduce)
        exact = [one + sv.all_reduce(g, reduce) for one, g in zip(exact, mine, strict=True)]
    slots = optimizer.tracked()
    worst = []
    for (name, variable), total in zip(made.items(), exact, strict=True):
        slot = slots.get(f"{name}/compression_error")
        mine = np.zeros(SHAPES[name]) if slot is None else slot.local_value()
        owed = sv.all_reduce(mine, reduce)
        worst.append(float(np.abs(variable.numpy() + total - owed).max()))
    return max(worst), np.concatenate([one.numpy().reshape(-1) for one in made.values()]).tobytes()


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("kind", KEEP_ERROR)
@pytest.mark.parametrize("world", WORLDS, ids=["shm", "links", "hosts"])
def test_what_does_not_travel_is_kept_to_the_last_bit_that_counts(world, kind, reduce):
    results = run_ranks(3, accounts, kind, reduce, **world)
    assert isinstance(results[0], tuple), results[0]
    assert len({weights for _, weights in results}) == 1
    assert max(difference for difference, _ in results) < 1e-4


def steps_with_checkpoint(kind, path, first, last, source):
    """Make steps, after a restore from `source` and before a save to `path`."""
    made = variables()
    optimizer = sv.optimizers.Momentum(0.1, compress=COMPRESSORS[kind]())
    checkpoint = sv.Checkpoint(optimizer=optimizer, **made)
    if source:
        checkpoint.restore(source)
    for step in range(first, last):
        optimizer.apply_gradients(zip(gradients(step), made.values(), strict=True))
    if path:
        checkpoint.save(path)
    slots = {name: one.local_value().mean() for name, one in optimizer.tracked().items()}
    return [one.numpy().tobytes() for one in made.values()], slots


@pytest.mark.parametrize("kind", KEEP_ERROR)
def test_errors_survive_a_checkpoint(kind, tmp_path):
    path = str(tmp_path / "saved")
    straight = run_ranks(2, steps_with_checkpoint, kind, None, 0, 7, None)
    run_ranks(2, steps_with_checkpoint, kind, path, 0, 4, None)
    resumed = run_ranks(2, steps_with_checkpoint, kind, None, 4, 7, path)
    assert isinstance(resumed[0], tuple), resumed[0]
    assert resumed == straight


def test_another_number_of_replicas_takes_the_mean_of_the_errors(tmp_path):
    path = str(tmp_path / "saved")
    saved = run_ranks(2, steps_with_checkpoint, "topk", path, 0, 4, None)
    expected = np.mean([slots["w/compression_error"] for _, slots in saved])
    resumed = run_ranks(3, restored_errors, path)
    assert isinstance(resumed[0], float), resumed[0]
    assert resumed == pytest.approx([expected] * 3, abs=1e-6)


def restored_errors(path):
    made = variables()
    optimizer = sv.optimizers.Momentum(0.1, compress=COMPRESSORS["topk"]())
    sv.Checkpoint(optimizer=optimizer, **made).restore(path)
    optimizer.build(made.values())
    return float(optimizer.tracked()["w/compression_error"].local_value().mean())


def other_forms():
    made = variables()
    optimizer = sv.optimizers.SGD(1.0, compress="int8", accumulate=2, nonfinite="skip")
    for step in range(2):
        pairs = list(zip(gradients(step), made.values(), strict=True))
        optimizer.apply_gradients(pairs, weight=sv.rank())
    exact = (gradients(0)[0] + gradients(1)[0]) / 2
    exact = sv.broadcast(exact, 1)  # the other rank has weight 0
    assert np.abs(made["w"].numpy() + exact).max() < 0.05
    before = made["w"].numpy()
    for _ in range(2):
        optimizer.apply_gradients([(np.full(SHAPES["w"], np.nan), made["w"]), (None, made["b"])])
    assert np.array_equal(made["w"].numpy(), before)
    other = copy.deepcopy(optimizer)
    assert other.iterations == 1
    half = sv.Variable(np.zeros(3, np.float16))
    own = sv.Variable(np.zeros(3), synchronization="NONE")
    mixed = sv.optimizers.Adam(0.1, compress=COMPRESSORS["topk"]())
    mixed.apply_gradients(
        [(np.ones(3), half), (np.ones(3), own), (np.ones((2, 3)), sv.Variable(np.zeros((2, 3))))]
    )
    assert half.numpy().dtype == np.float16
    return made["w"].numpy().tobytes()


@pytest.mark.parametrize("world", WORLDS, ids=["shm", "links", "hosts"])
def test_weights_accumulation_and_kinds_of_variables(world):
    results = run_ranks(2, other_forms, **world)
    assert isinstance(results[0], bytes), results[0]
    assert results[0] == results[1]


def mismatch(kinds):
    made = variables()
    optimizer = sv.optimizers.SGD(1.0, compress=kinds[sv.rank()])
    try:
        optimizer.apply_gradients(zip(gradients(0), made.values(), strict=True))
    except sv.MismatchError as error:
        return str(error), float(np.abs(made["w"].numpy()).max())
    return None


def test_replicas_with_other_compressors_raise_and_nothing_changes():
    for result in run_ranks(2, mismatch, ["int8", "float16"]):
        assert isinstance(result, tuple), result
        assert result[1] == 0


def test_what_compress_does_not_go_with():
    w = sv.Variable(np.zeros(3))
    with pytest.raises(sv.ConfigError, match="compress must be one of"):
        sv.optimizers.SGD(0.1, compress="zip")
    optimizer = sv.optimizers.SGD(0.1, compress="int8")
    with pytest.raises(sv.ConfigError, match="leave out one of them"):
        optimizer.apply_gradients([({0: np.ones(3)}, w)], shards=True)
