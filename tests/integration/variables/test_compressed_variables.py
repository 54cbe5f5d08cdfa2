"""Variables with `compress=`: what is lost and kept, checkpoints, deferral, groups, and errors."""

import copy

import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks
from syncvar.variables.variable_state import state_of
from tests.support.elastic_worlds import Workers

ROUNDING = ("float16", "bfloat16", "int8")
KEEPING = {"topk": lambda: sv.compressors.TopK(0.2), "powersgd": lambda: "powersgd"}
SLOW = pytest.mark.slow
WORLDS = [
    pytest.param({"shared": True}, id="shm"),
    pytest.param({}, id="links", marks=SLOW),
    pytest.param({"hosts": 2}, id="hosts"),
]
KINDS = [pytest.param(one, marks=SLOW) for one in ("float16", "bfloat16")] + ["int8", *KEEPING]
SHAPE = (12, 9)


def compressor_of(kind):
    return KEEPING[kind]() if kind in KEEPING else kind


def create(kind, synchronization="ON_WRITE", aggregation="SUM", **options):
    mode = {"synchronization": synchronization, "aggregation": aggregation}
    return sv.Variable(
        np.ones(SHAPE, np.float32), name="w", compress=compressor_of(kind), **mode, **options
    )


def operand(step):
    return np.random.default_rng([step, sv.rank()]).normal(size=SHAPE).astype(np.float32)


def kept_of(variable):
    """Return what this replica keeps; zeros if it keeps nothing."""
    error = state_of(variable).compression.error
    return np.zeros(SHAPE, np.float32) if error is None else error.storage.array.copy()


def are_equal(value):
    everyone = sv.all_gather(np.ascontiguousarray(value)[np.newaxis])
    return all(np.array_equal(one, everyone[0]) for one in everyone)


def writes(kind, synchronization, aggregation):
    """Return the largest distance of copy and kept errors from the exact value, and if equal."""
    w, exact, distances = create(kind, synchronization, aggregation), np.ones(SHAPE), []
    op = aggregation.lower()
    if synchronization == "AUTO":
        w.pin("deferred")
    for step in range(9):
        x = operand(step)
        total = sv.all_reduce(x, op)
        if step == 5:
            w.assign(x)
            exact = total
        elif step % 2:
            w.assign_sub(x)
            exact = exact - total
        else:
            w.assign_add(x)
            exact = exact + total
        if step % 3 == 2 or step == 5:  # deferred writes travel at a read
            value = w.numpy()
            distances.append(np.abs(value + sv.all_reduce(kept_of(w), op) - exact).max())
    return float(max(distances)), are_equal(w.numpy()), float(np.abs(w.numpy() - exact).max())


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_copy_and_what_is_kept_are_the_exact_value(world, kind, aggregation):
    for synchronization in ("ON_WRITE", "AUTO"):
        results = run_ranks(3, writes, kind, synchronization, aggregation, **world)
        assert isinstance(results[0], tuple), results[0]
        bound = 1e-4 if kind in KEEPING else 0.5
        assert all(distance < bound and equal for distance, equal, _ in results), results
        assert all(lost > 0 for *_, lost in results)  # it was compressed


def reads(kind, aggregation):
    v, op = create(kind, "ON_READ", aggregation), aggregation.lower()
    assert np.array_equal(v.numpy(), np.ones(SHAPE, np.float32)) or kind in ROUNDING
    v.assign_add(operand(0))
    distances = []
    for _ in range(8):
        value = v.numpy()
        distances.append(np.abs(value - sv.all_reduce(v.local_value(), op)).max())
        assert are_equal(value)
    before = distances[-1]
    strategy = sv.get_strategy()
    with strategy.scope():
        v.assign(np.full(SHAPE, 7.0))
    assert np.abs(v.numpy() - 7.0).max() < 0.1
    return float(distances[0]), float(before)


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_come_closer_to_the_value(kind, aggregation):
    for first, last in run_ranks(2, reads, kind, aggregation):
        if kind in KEEPING:
            assert last < first / 10
        else:
            assert 0 < first == last < 0.2


def nonfinite():
    v = create("topk", "ON_READ")
    v.assign_add(np.full(SHAPE, np.nan))
    v.numpy()
    v.assign(operand(1))
    for _ in range(9):
        value = v.numpy()
    w = create("topk")
    w.assign_add(np.full(SHAPE, np.inf))
    w.assign(operand(2))
    assert np.isfinite(w.numpy()).all()
    exact = sv.all_reduce(operand(2))
    assert np.abs(w.numpy() + sv.all_reduce(kept_of(w)) - exact).max() < 1e-4
    return np.isfinite(value).all(), np.isfinite(kept_of(w)).all()


def test_infinities_do_not_stay_in_what_is_kept():
    assert run_ranks(2, nonfinite) == [(True, True)] * 2


def steps_with_checkpoint(kind, path, first, last, source):
    """Write, after a restore from `source` and before a save to `path`."""
    w = create(kind, "ON_WRITE", "MEAN")
    v = create(kind, "ON_READ", "SUM")
    checkpoint = sv.Checkpoint(w=w, v=v)
    if source:
        checkpoint.restore(source)
    for step in range(first, last):
        w.assign_add(operand(step))
        v.assign_add(operand(step))
    if path:
        v.numpy()
        checkpoint.save(path)
    return w.numpy().tobytes(), float(kept_of(w).mean()), v.sync()


@pytest.mark.parametrize("kind", KEEPING)
def test_what_is_kept_survives_a_checkpoint(kind, tmp_path):
    path = str(tmp_path / "saved")
    straight = run_ranks(2, steps_with_checkpoint, kind, None, 0, 7, None)
    saved = run_ranks(2, steps_with_checkpoint, kind, path, 0, 4, None)
    resumed = run_ranks(2, steps_with_checkpoint, kind, None, 4, 7, path)
    assert isinstance(resumed[0], tuple), resumed[0]
    assert [one[:2] for one in resumed] == [one[:2] for one in straight]
    (restored, *_) = run_ranks(2, steps_with_checkpoint, kind, None, 4, 4, path)
    np.testing.assert_allclose(restored[2], saved[0][2], rtol=1e-6)  # saved exactly
    wider = run_ranks(3, steps_with_checkpoint, kind, None, 4, 4, path)
    expected = np.mean([kept for _, kept, _ in saved])
    assert [kept for _, kept, _ in wider] == pytest.approx([expected] * 3, abs=1e-6)


def restore_without(path):
    plain = sv.Variable(np.ones(SHAPE, np.float32), name="w", aggregation="SUM")
    sv.Checkpoint(w=plain).save(path)
    w = create("topk")
    w.assign_add(operand(0))
    before = np.abs(kept_of(w)).max()
    sv.Checkpoint(w=w).restore(path)
    return before > 0 and not kept_of(w).any()


def test_a_checkpoint_without_errors_clears_them(tmp_path):
    assert run_ranks(2, restore_without, str(tmp_path / "saved")) == [True, True]


def groups(kind):
    """Write several variables in one call, two of them compressed."""
    plain = sv.Variable(np.zeros(SHAPE, np.float32), aggregation="SUM")
    one, other = create(kind), create(kind, aggregation="MEAN")
    own = sv.Variable(np.zeros(3), synchronization="NONE")
    total = sv.all_reduce(operand(0))
    collectives = one.explain().numbers["collectives"]
    for write in (sv.assign_add_all, sv.assign_all):
        x = operand(0)
        write([(plain, x), (one, x), (other, x), (own, np.ones(3))])
    assert one.explain().numbers["collectives"] == collectives + 2
    assert np.array_equal(plain.numpy(), total)
    errors = [
        np.abs(w.numpy() + sv.all_reduce(kept_of(w), op) - sv.all_reduce(operand(0), op)).max()
        for w, op in ((one, "sum"), (other, "mean"))
    ]
    refused = sv.MismatchError if sv.rank() else sv.ConfigError
    with pytest.raises(refused):
        sv.assign_add_all([(plain, operand(0)), (one, np.ones(SHAPE) if sv.rank() else "x")])
    assert np.array_equal(plain.numpy(), total)
    return float(max(errors)), are_equal(one.numpy()), are_equal(other.numpy())


@pytest.mark.parametrize("kind", ["int8", *KEEPING])
def test_grouped_writes(kind):
    for error, *equal in run_ranks(2, groups, kind):
        assert error < (1e-4 if kind in KEEPING else 0.2)
        assert all(equal)


def cross_writes():
    w = create("topk")
    w.assign_add(operand(0))
    before = kept_of(w)
    strategy = sv.MultiWorkerMirroredStrategy()
    with strategy.scope():
        own = create("topk")
    strategy.run(lambda: own.assign_add(operand(0)))
    assert kept_of(own).any()
    with strategy.scope():
        own.scatter_update([0, 1], np.zeros((2, SHAPE[1])))
        assert not kept_of(own)[:2].any()
        assert kept_of(own)[2:].any()
        own.assign(np.zeros(SHAPE))
    assert not kept_of(own).any()
    copied = copy.deepcopy(w)
    assert np.array_equal(kept_of(copied), before)
    copied.assign_add(operand(1))
    w.assign_add(operand(1))
    assert np.array_equal(copied.numpy(), w.numpy())
    half = sv.Variable(np.zeros(SHAPE, np.float16), aggregation="SUM", compress="int8")
    half.assign_add(np.ones(SHAPE))
    assert half.numpy().dtype == np.float16
    wide = sv.Variable(np.zeros(3), dtype="float64", aggregation="MEAN", compress="topk")
    wide.assign_add([1.0, 2.0, 3.0])
    for mode in ("ON_READ", "ON_WRITE"):
        number = sv.Variable(0.0, synchronization=mode, aggregation="SUM", compress="topk")
        for _ in range(3):
            number.assign_add(1.0)
            total = float(number.numpy())
        assert total == 3 * sv.world_size()
    central = sv.CentralStorageStrategy()  # of the replicas of one host
    with central.scope():
        shared = create("powersgd")
    for _ in range(2):
        central.run(lambda: shared.assign_add(np.eye(*SHAPE)))
    with sv.uneven():
        for _ in range(2 + sv.rank()):
            w.assign_add(operand(2))
    w.assign_add(operand(3))
    return [w.numpy().tobytes(), shared.numpy().tobytes(), wide.numpy().tobytes()]


@pytest.mark.parametrize("world", WORLDS)
def test_contexts_copies_dtypes_and_uneven_loops(world):
    results = run_ranks(2, cross_writes, **world)
    assert isinstance(results[0], list), results[0]
    assert results[0] == results[1]


def mismatch(kinds):
    try:
        create(kinds[sv.rank()])
    except sv.MismatchError as error:
        return str(error)
    return None


def test_replicas_with_other_compressors_raise():
    for text in run_ranks(2, mismatch, ["int8", "float16"]):
        assert "compress int8(block=256)" in text
        assert "compress float16" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compress": "zip", "dtype": "float32"}, "compress must be one of"),
        ({"synchronization": "NONE"}, "NONE nothing travels"),
        ({"aggregation": "NONE"}, "aggregation NONE"),
        ({"aggregation": "ONLY_FIRST_REPLICA"}, "goes with SUM and MEAN"),
        ({"dtype": "int64"}, "int64 is exact or complex"),
        ({"dtype": "complex64"}, "complex64 is exact or complex"),
    ],
)
def test_what_cannot_be_compressed(options, text):
    with pytest.raises(sv.ConfigError, match=text):
        sv.Variable([0, 1], **{"aggregation": "SUM", "compress": "int8", **options})


def test_a_reproducible_strategy_refuses_and_the_rule_names_the_compressor():
    with (
        sv.MirroredStrategy(reproducible=True).scope(),
        pytest.raises(sv.ConfigError, match="reproducible=True"),
    ):
        create("int8")
    v = sv.Variable([0.0], name="rounded", aggregation="SUM", compress="int8")
    assert v.explain().rule.endswith("its sums travel as int8(block=256)")


def refused_once():
    """Rank 1 passes a wrong operand: nothing changes, nothing is lost."""
    w = create("topk")
    w.assign_add(operand(0))
    before, kept = w.numpy(), kept_of(w)
    with pytest.raises(sv.ConfigError if sv.rank() else sv.MismatchError):
        w.assign_add(np.zeros(7) if sv.rank() else operand(1))
    return np.array_equal(before, w.numpy()) and np.array_equal(kept, kept_of(w))


def test_a_refused_write_changes_nothing():
    assert run_ranks(2, refused_once) == [True, True]


def elastic_state():
    return sv.elastic.State(w=create("topk"), v=create("topk", "ON_READ"), step=0)


def elastic_steps(state):
    """Make steps; return the values, which are equal everywhere, and what this replica keeps."""
    for _ in range(2):
        state.w.assign_add(operand(state.step))
        state.v.assign_add(operand(state.step))
        state.step += 1
    before, kept = state.w.numpy(), kept_of(state.w)
    state.commit()
    state.w.assign_add(operand(9))
    state.restore()
    assert np.array_equal(state.w.numpy(), before)
    assert np.array_equal(kept_of(state.w), kept)
    return before.tobytes(), state.v.numpy().tobytes(), kept


def elastic_look(state):
    return state.w.numpy().tobytes(), state.v.numpy().tobytes(), kept_of(state.w)


def test_elastic_jobs_take_along_what_is_kept():
    workers = Workers(3, elastic_state)
    kept = {}
    for members in ([0, 1], [0, 1], [1, 0, 2], [2]):
        before = workers.generation_of(members, elastic_look)
        after = workers.generation_of(members, elastic_steps)
        assert all(one[:2] == before[0][:2] for one in before)
        assert all(one[:2] == after[0][:2] for one in after)
        if kept.keys() == set(members):
            for worker, one in zip(members, before, strict=True):
                assert np.array_equal(kept[worker], one[2])
        kept = {worker: one[2] for worker, one in zip(members, after, strict=True)}
        assert all(one.any() for one in kept.values()) == (len(members) > 1)
