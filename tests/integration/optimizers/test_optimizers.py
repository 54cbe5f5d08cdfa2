"""Optimizers on several replicas: contexts, modes, refusals, accumulation, weights, clipping, slots."""

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.parameter_server.session import LocalServers
from syncvar.testing import run_ranks
from syncvar.variables.grouped_writes import replace_copy

OPT = sv.optimizers
MAKERS = {
    "SGD": lambda **options: OPT.SGD(0.5, **options),
    "Momentum": lambda **options: OPT.Momentum(0.5, **options),
    "Nesterov": lambda **options: OPT.Nesterov(0.5, **options),
    "RMSProp": lambda **options: OPT.RMSProp(0.5, **options),
    "Adam": lambda **options: OPT.Adam(0.5, **options),
    "AdamW": lambda **options: OPT.AdamW(0.5, **options),
    "Adagrad": lambda **options: OPT.Adagrad(0.5, **options),
    "LAMB": lambda **options: OPT.LAMB(0.5, **options),
}
START = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)


def everywhere(size, fn, **options):
    results = run_ranks(size, fn, timeout_s=120, **options)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def reference(maker, gradients, **options):
    """What one replica that has the combined gradients gets."""
    v = sv.Variable(START)
    optimizer = maker(**options)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, v)])
    return v.numpy()


def own(step, rank):
    return (np.arange(4, dtype=np.float32).reshape(2, 2) - 1 + step) * (rank + 1)


@pytest.mark.parametrize("way", ["links", "shm"])
@pytest.mark.parametrize("context", ["replica", "spmd", "cross"])
def test_every_copy_makes_the_same_step(context, way):
    kinds = [(name, mode) for name in MAKERS for mode in ("ON_WRITE", "AUTO", "NONE")]

    def run(name, mode):
        strategy = sv.get_strategy() if context == "spmd" else sv.MirroredStrategy()
        if context == "spmd":
            v = sv.Variable(START, synchronization=mode)
        else:
            with strategy.scope():
                v = sv.Variable(START, synchronization=mode)
        optimizer = MAKERS[name]()
        for step in range(3):
            gradient = own(step, 0 if context == "cross" else sv.rank())
            if context == "replica":
                strategy.run(optimizer.apply_gradients, args=([(gradient, v)],))
            elif context == "cross":
                with strategy.scope():
                    optimizer.apply_gradients([(gradient, v)])
            else:
                optimizer.apply_gradients([(gradient, v)])
        slots = {slot.synchronization.name for slot in optimizer.variables}
        assert slots == {"NONE" if mode == "NONE" else "ON_WRITE"}
        assert all(slot.shape in ((2, 2), ()) for slot in optimizer.variables)
        assert optimizer.iterations == 3
        return v.local_value().tobytes()

    made = everywhere(2, lambda: [run(*kind) for kind in kinds], shared=way == "shm")
    for rank, values in enumerate(made):
        for (name, mode), value in zip(kinds, values, strict=True):
            factor = 1 if context == "cross" else (1, 2)[rank] if mode == "NONE" else 1.5
            expected = reference(
                MAKERS[name], [own(step, 0) * np.float32(factor) for step in range(3)]
            )
            assert value == expected.tobytes(), (name, mode)


def test_none_variables_never_send_a_message():
    def fn():
        v = sv.Variable(START, synchronization="NONE")
        optimizer = OPT.Adam(clip_norm=1.0, accumulate=2)
        before = current().world.next_call
        for step in range(4 + 2 * sv.rank()):  # each replica as often as it likes
            optimizer.apply_gradients([(own(step, sv.rank()), v)])
        return current().world.next_call - before, optimizer.iterations

    assert everywhere(2, fn) == [(0, 2), (0, 3)]


def test_one_step_is_one_call_for_all_variables():
    def fn():
        vs = [
            sv.Variable(np.zeros(3, dtype), name=f"v{number}")
            for number, dtype in enumerate(["float32", "float16", "float64", "float32"])
        ]
        apart = sv.Variable(np.zeros(3), synchronization="NONE")
        optimizer = OPT.Adam(0.5, epsilon=0.0)
        counts = []
        for _ in range(3):
            before = current().world.next_call
            optimizer.apply_gradients([(np.full(3, sv.rank() + 1.0), v) for v in [*vs, apart]])
            counts.append(current().world.next_call - before)
        return counts[1:], [v.numpy()[0].item() for v in [*vs, apart]]

    for counts, values in everywhere(2, fn):
        assert counts == [1, 1]
        np.testing.assert_allclose(values, -1.5, rtol=1e-3)


def test_sum_and_none():
    def fn():
        v = sv.Variable([1.0])
        optimizer = OPT.SGD(1.0)
        optimizer.apply_gradients([([float(sv.rank())], v)], reduce="sum")
        optimizer.apply_gradients([([1.0], v)], reduce=None)
        optimizer.apply_gradients([([1.0 + sv.rank()], v)], reduce=sv.ReduceOp.SUM)
        with pytest.raises(sv.MismatchError, match="as given must be the same"):
            optimizer.apply_gradients([([float(sv.rank())], v)], reduce=None)
        return v.numpy().item(), optimizer.iterations

    assert everywhere(3, fn) == [(1.0 - 3 - 1 - 6, 3)] * 3


def test_cross_gradients_are_compared_unless_the_strategy_says_no():
    def fn():
        made = []
        for check in (True, False):
            strategy = sv.MirroredStrategy(check_cross_writes=check)
            with strategy.scope():
                v = sv.Variable([1.0])
                optimizer = OPT.SGD(1.0)
                optimizer.apply_gradients([([1.0], v)])
                before = strategy.communicator.next_call
                try:
                    optimizer.apply_gradients([([1.0 + sv.rank()], v)])
                except sv.MismatchError:
                    made.append("told")
                made += [v.local_value().item(), strategy.communicator.next_call - before]
        return made

    assert everywhere(2, fn) == [["told", 0.0, 1, -1.0, 0], ["told", 0.0, 1, -2.0, 0]]


def test_inside_merge_call_gradients_are_reduced_first():
    def fn():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable([1.0])
        optimizer = OPT.SGD(1.0)

        def merged(strategy, gradient):
            with pytest.raises(sv.UsageError, match="reduce it first"):
                optimizer.apply_gradients([(gradient, v)])
            optimizer.apply_gradients([(strategy.reduce("MEAN", gradient, axis=None), v)])

        strategy.run(
            lambda: sv.get_replica_context().merge_call(
                merged, args=(np.array([float(sv.rank())], np.float32),)
            )
        )
        return v.numpy().item()

    assert everywhere(2, fn) == [0.5, 0.5]


BAD = [
    (lambda g, v, w: [(np.zeros(3, np.float32), v), (g, w)], sv.ConfigError, "shape"),
    (lambda g, v, w: [(g.astype(complex), v), (g, w)], sv.ConfigError, "complex"),
    (lambda g, v, w: [(g, v), ("text", w)], sv.ConfigError, "text"),
    (lambda g, v, w: [(v, g)], sv.ConfigError, "gradient first"),
    (lambda g, v, w: [(g, v, w)], sv.ConfigError, "pairs"),
    (lambda g, v, w: 7, sv.ConfigError, "pairs"),
    (lambda g, v, w: [(g, v), (g, v)], sv.ConfigError, "named twice"),
    (lambda g, v, w: [(None, v), (None, w)], sv.ConfigError, "no gradient at all"),
    (lambda g, v, w: [], sv.ConfigError, "no gradient at all"),
    (lambda g, v, w: [(g, v), (sv.PerReplica(g), w)], sv.UsageError, "reduce it first"),
    (lambda g, v, w: [(g * np.nan, v), (g, w)], sv.ConfigError, "infinity or NaN"),
]


@pytest.mark.parametrize("way", ["links", "shm"])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_bad_gradient_changes_nothing_anywhere(when, way):
    def attempt(bad, error, words):
        v, w = sv.Variable(START), sv.Variable(START)
        optimizer = OPT.Adam(0.5, nonfinite="error")
        g = np.ones((2, 2), np.float32)
        if when == "later":
            optimizer.apply_gradients([(g, v), (g, w)])
        before = v.numpy().tolist(), w.numpy().tolist(), optimizer.iterations
        if sv.rank() == 1:
            with pytest.raises(error, match=words):
                optimizer.apply_gradients(bad(g, v, w))
        else:
            with pytest.raises(sv.MismatchError, match="rank 1"):
                optimizer.apply_gradients([(g, v), (g, w)])
        same = before == (v.numpy().tolist(), w.numpy().tolist(), optimizer.iterations)
        optimizer.apply_gradients([(g, v), (g, w)])  # the group stays usable
        return same, optimizer.iterations, v.numpy().tobytes()

    made = everywhere(2, lambda: [attempt(*one) for one in BAD], shared=way == "shm")
    assert made[0] == made[1]
    assert [one[:2] for one in made[0]] == [(True, 2 if when == "later" else 1)] * len(BAD)


@pytest.mark.parametrize("way", ["links", "shm"])
def test_replicas_that_do_not_make_the_same_step_are_told(way):
    def fn():
        v, w = sv.Variable(START, name=f"v{way}"), sv.Variable(START, name=f"w{way}")
        optimizer = OPT.Momentum(0.5)
        g = np.ones((2, 2), np.float32)
        optimizer.apply_gradients([(g, v), (g, w)])
        rank = sv.rank()
        wrong = [
            lambda: optimizer.apply_gradients([(g, v), (g, w)][:: 1 - 2 * rank]),
            lambda: optimizer.apply_gradients([(g, v), (g if rank else None, w)]),
            lambda: optimizer.apply_gradients([(g, v), (g, w)], reduce=("sum", "mean")[rank]),
            lambda: optimizer.apply_gradients([(g, v), (g, w)], weight=(None, 2.0)[rank]),
        ]
        for call in wrong:
            with pytest.raises(sv.MismatchError):
                call()
        optimizer.learning_rate = 0.5 + rank
        with pytest.raises(sv.MismatchError, match=r"learning_rate=1\.5"):
            optimizer.apply_gradients([(g, v), (g, w)])
        optimizer.learning_rate = lambda step: 0.25 * step
        optimizer.apply_gradients([(g, v), (g, w)])
        return v.numpy().tolist(), optimizer.iterations, optimizer.learning_rate

    expected = START - 0.5 - 0.25 * 1.9
    for value, iterations, rate in everywhere(2, fn, shared=way == "shm"):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert (iterations, rate) == (2, 0.5)


def test_different_optimizers_are_told_at_the_first_step():
    def fn():
        v = sv.Variable(START)
        optimizer = (OPT.SGD, OPT.Momentum)[sv.rank()](0.5)
        with pytest.raises(sv.MismatchError, match="SGD"):
            optimizer.apply_gradients([(START, v)])
        return (v.numpy() == START).all()

    assert everywhere(2, fn) == [True, True]


def test_a_none_gradient_leaves_its_variable_and_its_slots():
    def fn():
        v, w = sv.Variable([1.0]), sv.Variable([1.0], name="w")
        optimizer = OPT.Adam(0.5, epsilon=0.0)
        for _ in range(3):
            optimizer.apply_gradients([([1.0], v), (None, w)])
        slots = [key for key in optimizer.tracked() if key.startswith("w/")]
        optimizer.apply_gradients(
            [([1.0], v), ([1.0], w)]
        )  # its first step is corrected as a first step
        return (
            slots,
            v.numpy().item(),
            w.numpy().item(),
            int(optimizer.tracked()["w/steps"].numpy()),
        )

    for slots, v, w, steps in everywhere(2, fn):
        assert slots == []
        assert v == pytest.approx(-1.0, rel=1e-5)
        assert w == pytest.approx(0.5, rel=1e-5)
        assert steps == 1


@pytest.mark.parametrize(
    ("mode", "dtype", "error"),
    [
        ("ON_READ", "float32", "ON_READ"),
        ("ON_WRITE", "int64", "int64"),
        ("ON_WRITE", "complex64", "complex64"),
    ],
)
def test_what_cannot_be_stepped(mode, dtype, error):
    v = sv.Variable(np.zeros(2, dtype), synchronization=mode)
    with pytest.raises(sv.ConfigError, match=error):
        OPT.SGD().apply_gradients([(np.zeros(2), v)])
    with pytest.raises(sv.ConfigError, match=error):
        OPT.SGD().build([v])


def test_one_optimizer_keeps_to_one_strategy_and_one_family():
    v, apart = sv.Variable([1.0]), sv.Variable([1.0], synchronization="NONE")
    with sv.MirroredStrategy().scope():
        other = sv.Variable([1.0])
    with pytest.raises(sv.UsageError, match="different strategies"):
        OPT.SGD().apply_gradients([([1.0], v), ([1.0], other)])
    optimizer = OPT.SGD(0.5)
    optimizer.apply_gradients([([1.0], v), ([1.0], apart)])
    with pytest.raises(sv.UsageError, match="NONE variables alone"):
        optimizer.apply_gradients([([1.0], apart)])
    with pytest.raises(sv.UsageError, match="another strategy"):
        optimizer.apply_gradients([([1.0], other)])
    with pytest.raises(sv.ConfigError, match="at least one"):
        optimizer.build([])
    assert (v.numpy().item(), apart.numpy().item(), optimizer.iterations) == (0.5, 0.5, 1)


def test_an_explicit_strategys_variables_outside_its_scope_are_in_cross_context():
    def fn():
        with sv.MirroredStrategy().scope():
            v = sv.Variable([1.0])
        optimizer = OPT.Momentum(1.0)
        optimizer.apply_gradients([([1.0], v)])
        return v.numpy().item(), optimizer.variables[1].strategy is v.strategy

    assert everywhere(2, fn) == [(0.0, True)] * 2


# -- accumulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["links", "shm"])
def test_three_calls_are_one_step(way):
    def fn():
        v = sv.Variable([8.0], name=f"v{way}")
        apart = sv.Variable([8.0], synchronization="NONE")
        made = []
        for reduce in ("mean", "sum"):
            optimizer = OPT.SGD(1.0, accumulate=3)
            for call in range(6):
                before = current().world.next_call
                optimizer.apply_gradients(
                    [([call * (1.0 + sv.rank())], v), ([1.0 + call], apart)], reduce=reduce
                )
                if call:  # the first call makes the slots
                    made.append((current().world.next_call - before, optimizer.iterations))
        return made, v.numpy().item(), apart.numpy().item()

    for made, v, apart in everywhere(2, fn, shared=way == "shm"):
        assert made == [(0, 0), (1, 1), (0, 1), (0, 1), (1, 2)] * 2
        assert v == 8.0 - 1.5 * (1 + 4) - 3 * (3 + 12)
        assert apart == 8.0 - (2 + 5) - (6 + 15)


def test_a_refused_call_of_several_is_told_at_the_last_one():
    def fn():
        v = sv.Variable([8.0])
        optimizer = OPT.SGD(1.0, accumulate=3)
        optimizer.build([v])
        optimizer.apply_gradients([([1.0], v)])
        if sv.rank() == 1:
            with pytest.raises(sv.ConfigError, match="shape"):
                optimizer.apply_gradients([([1.0, 2.0], v)])
            with pytest.raises(sv.ConfigError, match=r"earlier call of this step failed.*shape"):
                optimizer.apply_gradients([([1.0], v)])
        else:
            optimizer.apply_gradients([([1.0], v)])
            with pytest.raises(sv.MismatchError, match="rank 1"):
                optimizer.apply_gradients([([1.0], v)])
        before = v.numpy().item()
        for _ in range(3):
            optimizer.apply_gradients([([1.0], v)])
        return before, v.numpy().item(), optimizer.iterations

    assert everywhere(2, fn) == [(8.0, 7.0, 1)] * 2


def test_calls_with_and_without_a_weight_are_no_one_step():
    v = sv.Variable([8.0])
    optimizer = OPT.SGD(1.0, accumulate=2)
    optimizer.apply_gradients([([1.0], v)], weight=3)
    with pytest.raises(sv.ConfigError, match="must all have a weight"):
        optimizer.apply_gradients([([1.0], v)])
    optimizer.apply_gradients([([1.0], v)], weight=3)
    optimizer.apply_gradients([([4.0], v)], weight=1)
    assert v.numpy().item() == 8.0 - 7 / 4


def test_the_calls_of_one_step_name_the_same_variables():
    v, w = sv.Variable([8.0]), sv.Variable([8.0])
    optimizer = OPT.SGD(1.0, accumulate=2)
    optimizer.apply_gradients([([1.0], v), ([1.0], w)])
    with pytest.raises(sv.ConfigError, match="must name the same variables"):
        optimizer.apply_gradients([([1.0], v), (None, w)])
    for gradients in ([1.0], [3.0]):
        optimizer.apply_gradients([(gradients, v), (None, w)])
    assert (v.numpy().item(), w.numpy().item()) == (6.0, 8.0)


def test_none_variables_step_with_shared_ones_that_have_no_gradient_at_first():
    def fn():
        shared, apart = sv.Variable([1.0]), sv.Variable([1.0], synchronization="NONE")
        optimizer = OPT.SGD(1.0)
        optimizer.apply_gradients([(None, shared), ([1.0 + sv.rank()], apart)])
        if sv.rank() == 0:
            with pytest.raises(sv.MismatchError):
                optimizer.apply_gradients([(None, shared), ([1.0], apart)])
        else:
            with pytest.raises(sv.MismatchError):
                optimizer.apply_gradients([([1.0], shared), ([1.0], apart)])
        optimizer.apply_gradients([([1.0], shared), ([1.0], apart)])
        return shared.numpy().item(), apart.numpy().item(), optimizer.iterations

    assert everywhere(2, fn) == [(0.0, -1.0, 2), (0.0, -2.0, 2)]


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["links", "shm"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_uneven_and_empty_batches_weigh_right(way, accumulate):
    counts = [5, 0, 3]
    examples = np.arange(8.0)

    def fn():
        v = sv.Variable([1.0], name=f"v{way}{accumulate}")
        w = sv.Variable(np.ones(2), name=f"w{way}{accumulate}")
        apart = sv.Variable([1.0], synchronization="NONE")
        start = sum(counts[: sv.rank()])
        mine = examples[start : start + counts[sv.rank()]]
        optimizer = OPT.SGD(1.0, accumulate=accumulate)
        for batch in np.array_split(mine, accumulate):
            with np.errstate(invalid="ignore"):
                mean = np.float32(batch.sum()) / np.float32(len(batch))  # NaN where there is none
            optimizer.apply_gradients(
                [([mean], v), ([mean, -mean], w), ([mean], apart)], weight=len(batch)
            )
        return v.numpy().item(), w.numpy().tolist(), apart.numpy().item()

    made = everywhere(3, fn, shared=way == "shm")
    for rank, (v, w, apart) in enumerate(made):
        assert v == pytest.approx(1 - 3.5, rel=1e-6)
        assert w == pytest.approx([1 - 3.5, 1 + 3.5], rel=1e-6)
        assert apart == pytest.approx([1 - 2, 1, 1 - 6][rank], rel=1e-6)


def test_a_step_without_any_example_is_none():
    def fn():
        v = sv.Variable([1.0])
        optimizer = OPT.Adam(1.0)
        optimizer.apply_gradients([([np.nan], v)], weight=0)
        return v.numpy().item(), optimizer.iterations

    assert everywhere(2, fn) == [(1.0, 0)] * 2


@pytest.mark.parametrize("weight", [-1, float("nan"), "2", True])
def test_a_weight_must_be_a_number(weight):
    v = sv.Variable([1.0])
    with pytest.raises(sv.ConfigError, match="weight"):
        OPT.SGD().apply_gradients([([1.0], v)], weight=weight)


def test_a_weight_belongs_to_the_mean():
    v = sv.Variable([1.0])
    for reduce in ("sum", None):
        with pytest.raises(sv.ConfigError, match="belongs to the mean"):
            OPT.SGD().apply_gradients([([1.0], v)], weight=1, reduce=reduce)
    with pytest.raises(sv.ConfigError, match="did you mean"):
        OPT.SGD().apply_gradients([([1.0], v)], reduce="meen")


# -- clipping and what is not finite ---------------------------------------------------------------


def test_the_norm_is_that_of_the_combined_gradients():
    def fn():
        v, w = sv.Variable([0.0]), sv.Variable(np.zeros(1))
        apart = sv.Variable([0.0], synchronization="NONE")
        optimizer = OPT.SGD(1.0, clip_norm=1.0)
        # means 3 and 4: norm 5; the NONE variable counts apart
        optimizer.apply_gradients(
            [([6.0 * sv.rank()], v), ([8.0 * sv.rank()], w), ([0.5 + sv.rank()], apart)]
        )
        return v.numpy().item(), w.numpy().item(), apart.numpy().item()

    made = everywhere(2, fn)
    for rank, values in enumerate(made):
        assert values == pytest.approx((-0.6, -0.8, (-0.5, -1.0)[rank]), rel=1e-6)


def test_skip_leaves_a_step_out_on_all_replicas():
    def fn():
        v = sv.Variable([1.0])
        optimizer = OPT.Momentum(1.0, nonfinite="skip")
        for bad in (np.inf, np.nan, 1.0):
            optimizer.apply_gradients([([bad if sv.rank() else 1.0], v)])
        return v.numpy().item(), optimizer.iterations

    assert everywhere(2, fn) == [(0.0, 1)] * 2


def test_allow_lets_them_through():
    v = sv.Variable([1.0, 1.0])
    OPT.SGD(1.0).apply_gradients([([np.nan, 1.0], v)])
    assert np.isnan(v.numpy()[0])
    assert v.numpy()[1] == 0.0


# -- slots and what a program sees -----------------------------------------------------------------


def test_slots_can_be_made_before_the_first_step():
    def fn():
        v = sv.Variable(START, name="w")
        half = sv.Variable(START.astype(np.float16), name="half")
        optimizer = OPT.Adam(accumulate=2)
        optimizer.build([v, half])
        optimizer.build([v])
        tracked = optimizer.tracked()
        assert [
            slot is tracked[key] for key, slot in zip(tracked, optimizer.variables, strict=True)
        ] == [True] * len(tracked)
        return sorted(
            (key, slot.name, slot.dtype.name, slot.synchronization.name, slot.trainable)
            for key, slot in tracked.items()
        )

    rows = everywhere(2, fn)[0]
    assert [row[0] for row in rows] == [
        "accumulated_replicas",
        "accumulated_weight",
        "calls",
        "half/accumulated",
        "half/m",
        "half/master",
        "half/steps",
        "half/v",
        "iterations",
        "w/accumulated",
        "w/m",
        "w/steps",
        "w/v",
    ]
    assert {row[0]: row[1] for row in rows}["w/m"] == "w/Adam/m"
    assert {
        row[2] for row in rows if row[0].startswith("half") and not row[0].endswith("steps")
    } == {"float32"}
    assert {row[3] for row in rows if "accumulated" in row[0]} == {"ON_READ"}
    assert not any(row[4] for row in rows)


def test_build_is_told_when_replicas_differ():
    def fn():
        v, w = sv.Variable([1.0]), sv.Variable([1.0])
        with pytest.raises(sv.MismatchError, match="slots of SGD"):
            OPT.SGD().build([v, w][:: 1 - 2 * sv.rank()])
        bad = sv.Variable([1], synchronization="NONE") if sv.rank() else v
        if sv.rank():
            with pytest.raises(sv.ConfigError, match="int64"):
                OPT.SGD().build([v, bad])
        else:
            with pytest.raises(sv.MismatchError, match="int64"):
                OPT.SGD().build([v, w])
        return True

    assert everywhere(2, fn) == [True, True]


def test_state_put_into_another_optimizer_goes_on_where_the_first_one_stopped():
    def run(optimizer, v, steps):
        for step in steps:
            optimizer.apply_gradients([(own(step, sv.rank()), v)])

    def fn():
        v = sv.Variable(START, name="w")
        first = OPT.Adam(0.1, accumulate=2)
        run(first, v, range(5))  # in the middle of a step
        w = sv.Variable(v, name="w")
        second = OPT.Adam(0.1, accumulate=2)
        second.build([w])
        names = [key.replace("w/", f"{w.name}/") for key in first.tracked()]
        for name, slot in zip(names, first.tracked().values(), strict=True):
            second.tracked()[name].assign(slot.local_value())
        run(first, v, range(5, 9))
        run(second, w, range(5, 9))
        return v.numpy().tobytes() == w.numpy().tobytes(), first.iterations, second.iterations

    assert everywhere(2, fn) == [(True, 4, 4)] * 2


@pytest.mark.parametrize("way", ["links", "shm"])
def test_a_checkpoint_restored_before_the_slots_exist_goes_on_with_the_same_bits(way, tmp_path):
    def run(restore):
        w, half = (
            sv.Variable(START, name="w"),
            sv.Variable(np.ones((2, 2), np.float16), name="half"),
        )
        optimizer = OPT.Adam(0.1, accumulate=2)
        checkpoint = sv.Checkpoint(w=w, half=half, optimizer=optimizer)

        def steps(numbers):
            for number in numbers:
                optimizer.apply_gradients(
                    [(own(number, sv.rank()), w), (own(number, sv.rank()).astype(np.float16), half)]
                )

        if restore:
            checkpoint.restore(tmp_path / "saved")
        else:
            steps(range(5))  # in the middle of the third step
            checkpoint.save(tmp_path / "saved")
        steps(range(5, 9))
        return w.numpy().tobytes(), half.numpy().tobytes(), optimizer.iterations

    through = everywhere(2, lambda: run(restore=False), shared=way == "shm")
    resumed = everywhere(2, lambda: run(restore=True), shared=way == "shm")
    assert through == resumed
    assert through[0][2] == 4


@pytest.mark.parametrize("way", ["links", "shm"])
@pytest.mark.parametrize("kind", ["mean", "sum", "weight", "given"])
def test_accumulated_gradients_survive_any_change_of_the_world(kind, way, tmp_path):
    examples = np.random.default_rng(5).normal(
        size=(4, 60, 2)
    )  # four calls to a step, cut evenly over any world

    def run(calls, *, restore=None, save=None):
        rank, size = sv.rank(), sv.world_size()
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w, half = (
                sv.Variable(np.ones(2), name="w"),
                sv.Variable(np.ones(2, np.float16), name="half"),
            )
        optimizer = OPT.SGD(0.5, accumulate=4)
        checkpoint = sv.Checkpoint(w=w, half=half, optimizer=optimizer)
        if not calls:
            optimizer.build([w, half])
        if restore is not None:
            checkpoint.restore(tmp_path / restore)

        def step(rows):
            mine = np.array_split(rows, size)[rank]
            gradient, options = mine.mean(axis=0), {}
            if kind == "sum":
                gradient, options = mine.sum(axis=0) / 60, {"reduce": "sum"}
            elif kind == "weight":
                mine = (
                    rows[rank:] if rank == size - 1 else rows[rank : rank + 1]
                )  # one each, the last has the others
                gradient, options = mine.mean(axis=0), {"weight": len(mine)}
            elif kind == "given":
                gradient = rows.mean(axis=0)
            optimizer.apply_gradients([(gradient, w), (gradient, half)], **options)

        for call in calls:
            if kind == "given":
                with strategy.scope():
                    step(examples[call])
            else:
                strategy.run(step, args=(examples[call],))
        if save is not None:
            checkpoint.save(tmp_path / save)
        return w.numpy().tolist(), half.numpy().tolist(), optimizer.iterations

    def on(size, *arguments, **options):
        results = everywhere(
            size, lambda: run(*arguments, **options), shared=way == "shm" and size > 1
        )
        assert results == results[:1] * size
        return results[0]

    through = on(3, range(4))
    factor = 4 if kind == "sum" else 1  # the calls of a step are added up as the replicas are
    assert through[0] == pytest.approx(
        (1 - 0.5 * factor * examples.mean(axis=(0, 1))).tolist(), rel=1e-6
    )
    on(3, range(2), save="3")
    assert on(3, range(2, 4), restore="3") == through, "the same world goes on with the same bits"
    for size in (1, 2, 4, 5):
        w, half, steps = on(size, range(2, 4), restore="3")
        assert w == pytest.approx(through[0], rel=1e-6)
        assert half == pytest.approx(through[1], rel=2e-3)
        assert steps == 1
    on(2, [], restore="3", save="2")  # and from world to world within a step
    on(5, [2], restore="2", save="5")
    assert on(4, [3], restore="5")[0] == pytest.approx(through[0], rel=1e-6)


def test_what_has_been_read_does_not_change():
    v = sv.Variable(START)
    kept = v.numpy()
    optimizer = OPT.Momentum(0.5)
    optimizer.apply_gradients([(START, v)])
    slot = optimizer.variables[1].numpy()
    optimizer.apply_gradients([(START, v)])
    assert (kept == START).all()
    assert (slot == START).all()


def test_gradients_are_not_changed():
    v = sv.Variable(START)
    for maker in MAKERS.values():
        gradient = np.full((2, 2), 3.0, np.float32)
        maker(clip_norm=0.1, weight_decay=0.5).apply_gradients([(gradient, v)])
        assert (gradient == 3.0).all()


def test_long_names_leave_room_for_the_slots():
    v = sv.Variable([1.0], name="n" * 128)
    optimizer = OPT.Adam(name="o" * 64)
    optimizer.apply_gradients([([1.0], v)])
    assert [len(slot.name) for slot in optimizer.variables] == [
        64 + len("/iterations"),
        128,
        128,
        128,
    ]
    assert list(optimizer.tracked())[1] == f"{v.name}/m"
    assert repr(OPT.SGD(0.5)) == "<sv.optimizers.SGD learning_rate=0.5 iterations=0>"


def test_a_shared_and_a_none_variable_may_have_one_name():
    shared = sv.Variable([1.0])
    apart = sv.Variable([1.0], synchronization="NONE", name=shared.name)
    optimizer = OPT.Momentum(0.5)
    optimizer.apply_gradients([([1.0], shared), ([2.0], apart)])
    tracked = optimizer.tracked()
    assert sorted(tracked) == sorted(
        ["iterations", f"{shared.name}/momentum", f"NONE:{shared.name}/momentum"]
    )
    assert [
        float(tracked[f"{where}{shared.name}/momentum"].numpy()[0]) for where in ("", "NONE:")
    ] == [1.0, 2.0]


def test_the_shm_keeps_gradients_and_steps_without_growing():
    def fn():
        v = sv.Variable(np.zeros(50_000, np.float32))
        optimizer = OPT.Adam(0.1)
        gradient = np.ones(50_000, np.float32)
        optimizer.apply_gradients([(gradient, v)])
        plan = next(iter(optimizer._plans.values()))
        places = [v._state.storage.array.ctypes.data, plan.shared[0].whole.ctypes.data]
        for _ in range(3):
            optimizer.apply_gradients([(gradient, v)])
        return places == [
            v._state.storage.array.ctypes.data,
            plan.shared[0].whole.ctypes.data,
        ], len(optimizer._plans)

    assert everywhere(2, fn, shared=True) == [(True, 1)] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OPT.SGD(-1), "learning_rate"),
        (lambda: OPT.SGD("0.1"), "learning_rate"),
        (lambda: OPT.SGD(float("nan")), "learning_rate"),
        (lambda: OPT.SGD(True), "learning_rate"),
        (lambda: OPT.Momentum(0.1, 1.0), "momentum < 1"),
        (lambda: OPT.Momentum(nesterov=1), "nesterov"),
        (lambda: OPT.Adam(beta_1=1.0), "beta_1"),
        (lambda: OPT.Adam(beta_2=-0.1), "beta_2"),
        (lambda: OPT.Adam(epsilon=-1), "epsilon"),
        (lambda: OPT.RMSProp(rho=2), "rho"),
        (lambda: OPT.RMSProp(centered=None), "centered"),
        (lambda: OPT.Adagrad(initial_accumulator_value=-1), "initial"),
        (lambda: OPT.SGD(weight_decay=-1), "weight_decay"),
        (lambda: OPT.SGD(clip_norm=0), "clip_norm"),
        (lambda: OPT.SGD(clip_value="x"), "clip_value"),
        (lambda: OPT.SGD(accumulate=0), "accumulate"),
        (lambda: OPT.SGD(accumulate=1.5), "accumulate"),
        (lambda: OPT.SGD(nonfinite="skipp"), "did you mean skip"),
        (lambda: setattr(OPT.SGD(), "learning_rate", None), "learning_rate"),
        (lambda: OPT.SGD(name="a b"), "name of an optimizer"),
    ],
)
def test_wrong_numbers(make, words):
    with pytest.raises(sv.ConfigError, match=words):
        make()


def test_an_unknown_option_is_a_type_error_with_our_word():
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipnorm': write clip_norm="):
        OPT.SGD(clipnorm=1.0)


def test_a_schedule_that_gives_no_number_is_told():
    def fn():
        v = sv.Variable([1.0])
        optimizer = OPT.SGD(lambda step: 0.5 if step == 0 or sv.rank() == 0 else "x")
        optimizer.apply_gradients([([1.0], v)])
        with pytest.raises(
            sv.MismatchError if sv.rank() == 0 else sv.ConfigError, match="learning_rate"
        ):
            optimizer.apply_gradients([([1.0], v)])
        return v.numpy().item()

    assert everywhere(2, fn) == [0.5, 0.5]


# -- equal bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["links", "shm"])
def test_1_2_and_4_workers_end_with_the_same_bits(way):
    shards = np.random.default_rng(3).normal(size=(3, 4, 2, 2)) * np.array(
        [1e-3, 1.0, 1e3, 7.0]
    ).reshape(4, 1, 1)
    shards = shards.astype(np.float32)

    def run(name):
        strategy = sv.MirroredStrategy(reproducible=True)
        with strategy.scope():
            v = sv.Variable(START)
        optimizer = MAKERS[name](clip_norm=3.0)
        share = 4 // sv.world_size()

        def step(parts):
            mine = parts[sv.rank() * share : (sv.rank() + 1) * share]
            optimizer.apply_gradients([(sv.tree_sum(list(mine)), v)], reduce="sum")

        for parts in shards:
            strategy.run(step, args=(parts,))
        return v.numpy().tobytes()

    made = [
        value
        for size in (1, 2, 4)
        for value in everywhere(size, lambda: tuple(map(run, MAKERS)), shared=way == "shm")
    ]
    assert len(made) == 7
    assert len(set(made)) == 1


PATHS = {"links": {}, "shm": {"shared": True}, "hosts": {"shared": True, "hosts": 2}}


@pytest.mark.parametrize("way", PATHS)
def test_any_number_of_workers_steps_by_shards_to_the_same_bits(way):
    draw = np.random.default_rng(3)
    steps = [
        [
            {"v": draw.normal(size=(2, 2)) * 10.0 ** draw.integers(-3, 3), "h": draw.normal(size=5)}
            for _ in range(7)
        ]
        for _ in range(3)
    ]

    def run(name):
        strategy = sv.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v, wide = sv.Variable(START), sv.Variable(np.ones(5))
            half = sv.Variable(np.ones(5, np.float16))
        optimizer = MAKERS[name](clip_norm=3.0)

        def step(parts):
            mine = [
                one for one in range(7) if (one * one) % sv.world_size() == sv.rank()
            ]  # some have none
            pairs = [
                ({one: parts[one][key].astype(np.float32) for one in mine}, to)
                for key, to in (("v", v), ("h", half))
            ]
            optimizer.apply_gradients(
                [*pairs, ({one: parts[one]["h"] for one in mine}, wide)], shards=True
            )

        for parts in steps:
            strategy.run(step, args=(parts,))
        return v.numpy().tobytes(), half.numpy().tobytes(), wide.numpy().tobytes()

    sizes = {"links": (1, 3), "shm": (2, 5), "hosts": (4,)}[way]
    made = [
        value
        for size in sizes
        for value in everywhere(size, lambda: tuple(map(run, MAKERS)), **PATHS[way])
    ]
    assert len(set(made)) == 1
    assert made[0] == everywhere(1, lambda: tuple(map(run, MAKERS)))[0]


def test_the_mean_of_shards_is_over_shards():
    def fn():
        mean, total = sv.Variable([8.0]), sv.Variable([8.0])
        mine = {0: [1.0], 1: [2.0], 2: [6.0]} if sv.rank() == 1 else {3: [3.0]}
        OPT.SGD(1.0).apply_gradients([(mine, mean)], shards=True)
        OPT.SGD(1.0).apply_gradients([(mine, total)], shards=True, reduce="sum")
        return mean.numpy().item(), total.numpy().item()

    assert everywhere(2, fn) == [(5.0, -4.0)] * 2


@pytest.mark.parametrize(
    ("pairs", "options", "words"),
    [
        (lambda v: [([1.0], v)], {}, "must be a dict of id -> gradient, not list"),
        (lambda v: [({0: [1.0, 2.0]}, v)], {}, "shard 0 of the gradient of variable 'v"),
        (lambda v: [({-1: [1.0]}, v)], {}, "0 or more, not -1"),
        (
            lambda v: [({0: [1.0]}, v), ({1: [1.0]}, sv.Variable([1.0], name="w"))],
            {},
            r"variable 'w' is of the shards \[1\]",
        ),
        (lambda v: [({0: [1.0]}, v)], {"weight": 2.0}, "weight belongs to a replica"),
        (lambda v: [({0: [1.0]}, v)], {"reduce": None}, "inside strategy.run or outside"),
        (lambda v: [({0: [1.0]}, v)], {"accumulate": 2}, "accumulate takes no shards"),
        (lambda v: [({0: [np.inf]}, v)], {"nonfinite": "error"}, "infinity or NaN"),
        (lambda v: [({0: [1.0]}, sv.Variable([1.0], synchronization="NONE"))], {}, "NONE"),
    ],
)
def test_gradients_of_shards_that_are_refused(pairs, options, words):
    v = sv.Variable([8.0], name="v")
    own = {key: options.pop(key) for key in ("accumulate", "nonfinite") if key in options}
    with pytest.raises(sv.ConfigError, match=words):
        OPT.SGD(1.0, **own).apply_gradients(pairs(v), shards=True, **options)
    assert v.numpy().item() == 8.0


@pytest.mark.parametrize("way", PATHS)
def test_shards_that_do_not_fit_together_change_nothing(way):
    def fn():
        v = sv.Variable([8.0])
        optimizer = OPT.SGD(1.0)
        rank = sv.rank()
        for mine, words in [
            ({0: [1.0]}, "ranks 0 and 1 both have"),
            ({2 * rank: [1.0]}, "no rank has shard 1"),
        ]:
            with pytest.raises(sv.MismatchError, match=words):
                optimizer.apply_gradients([(mine, v)], shards=True)
        with pytest.raises(sv.MismatchError if rank else sv.ConfigError):
            optimizer.apply_gradients([({rank: [1.0] if rank else [1.0, 1.0]}, v)], shards=True)
        with pytest.raises(sv.MismatchError):
            optimizer.apply_gradients([({rank: [1.0]} if rank else [1.0], v)], shards=rank != 0)
        assert optimizer.iterations == 0
        optimizer.apply_gradients([({rank: [1.0 + rank]}, v)], shards=True)
        return v.numpy().item()

    assert everywhere(2, fn, **PATHS[way]) == [6.5, 6.5]


# -- with other writes, and when a replica does not come -------------------------------------------


@pytest.mark.parametrize("way", ["links", "shm"])
@pytest.mark.parametrize("pace", ["eager", "deferred"])
def test_a_step_comes_after_the_writes_before_it(pace, way):
    def fn():
        v = sv.Variable([8.0], aggregation="SUM")
        v.pin(pace)
        optimizer = OPT.SGD(
            1.0, weight_decay=0.5
        )  # what a step does depends on the value before it
        for _ in range(2):
            v.assign_add([1.0 + sv.rank()])
            optimizer.apply_gradients([([0.0], v)])
        return v.numpy().item()

    assert everywhere(2, fn, shared=way == "shm") == [((8 + 3) / 2 + 3) / 2] * 2


def test_the_strategys_timeout_holds():
    late = threading.Barrier(2)

    def fn():
        strategy = sv.MirroredStrategy(timeout=50.0)
        with strategy.scope():
            v = sv.Variable([1.0])
            optimizer = OPT.SGD(1.0)
            optimizer.build([v])
            strategy.timeout = 0.2  # what comes before has time
            if sv.rank() == 0:
                with pytest.raises(sv.DeadlineExceeded, match="apply_gradients"):
                    optimizer.apply_gradients([([1.0], v)])
            late.wait(120)
            return v.local_value().item(), optimizer.iterations

    assert everywhere(2, fn) == [(1.0, 0)] * 2


def test_an_optimizer_is_the_first_that_a_program_touches():
    """No variable has been made, so nothing but the optimizer brings the strategies in."""
    program = """
import syncvar as sv
try:
    sv.optimizers.SGD().apply_gradients([])
except sv.ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "got no gradient at all" in done.stdout


# -- copies of optimizers --------------------------------------------------------------------------


class Model:
    """What programs copy: variables and their optimizer, in either order."""

    def __init__(self, rule, *, is_optimizer_first):
        weights = [sv.Variable(np.zeros(3, dtype), name=dtype) for dtype in ("float32", "float16")]
        weights.append(sv.Variable(np.zeros(3), name="own", synchronization="NONE"))
        parts = [
            ("weights", weights),
            ("optimizer", rule()),
        ]  # a copy is made in the order of attributes
        self.__dict__.update(reversed(parts) if is_optimizer_first else parts)

    def step(self, *numbers):
        for number in numbers:
            pairs = [(np.full(3, number + 1.5 + sv.rank(), one.dtype), one) for one in self.weights]
            self.optimizer.apply_gradients(pairs)

    def bits(self):
        return [one.local_value().tobytes() for one in (*self.weights, *self.optimizer.variables)]


@pytest.mark.parametrize("is_optimizer_first", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        lambda: sv.optimizers.Adam(0.1),
        lambda: sv.optimizers.Momentum(0.1, accumulate=2),
        lambda: sv.optimizers.SGD(0.1),
    ],
)
def test_a_deep_copy_of_a_model_makes_the_steps_of_the_model(rule, is_optimizer_first):
    def program():
        model = Model(rule, is_optimizer_first=is_optimizer_first)
        fresh = copy.deepcopy(model)
        model.step(0, 1, 2)  # the third is half a step of Momentum
        fresh.step(0, 1, 2)
        made = copy.deepcopy(model)
        again = copy.deepcopy(made)  # before it has made a step
        assert made.optimizer.iterations == model.optimizer.iterations
        before = model.bits()
        for one in (made, again):
            one.step(3, 4)
        assert model.bits() == before, "they share nothing"
        model.step(3, 4)
        fresh.step(3, 4)
        assert made.bits() == again.bits() == model.bits() == fresh.bits()
        return [v.name for v in made.weights]

    assert everywhere(2, program) == [["float32_2", "float16_2", "own_2"]] * 2


def test_a_deep_copy_of_an_optimizer_alone_steps_the_same_variables():
    def program():
        model = Model(
            lambda: sv.optimizers.Adam(lambda step: 0.1 / (step + 1)), is_optimizer_first=False
        )
        model.step(0, 1, 2)
        values = [one.local_value() for one in model.weights]
        kept = copy.deepcopy(model.optimizer)
        shallow = copy.copy(model.optimizer)
        model.step(3, 4)
        wanted = model.bits()
        assert shallow.iterations == 5, "a shallow copy shares the slots"
        for one, value in zip(model.weights, values, strict=True):
            replace_copy(one, value)
        assert (kept.iterations, kept.learning_rate) == (3, 0.1 / 4)
        model.optimizer = kept
        model.step(3, 4)
        assert model.bits() == wanted

    everywhere(2, program)


def test_a_deep_copy_of_a_checkpoint_saves_and_restores_its_optimizer(tmp_path):
    w, optimizer = sv.Variable(np.zeros(3), name="w"), sv.optimizers.Momentum(0.1)
    optimizer.apply_gradients([(np.ones(3), w)])
    made = copy.deepcopy(sv.Checkpoint(optimizer=optimizer, w=w))
    made.save(tmp_path / "c")
    optimizer.apply_gradients([(np.ones(3), w)])
    expected = w.numpy()
    sv.Checkpoint(optimizer=optimizer, w=w).restore(tmp_path / "c")
    optimizer.apply_gradients([(np.ones(3), w)])
    assert w.numpy().tolist() == expected.tolist()


def test_optimizers_are_pickled_before_their_first_step_and_not_after_it():
    optimizer = sv.optimizers.Adam(0.25, clip_norm=1.0)
    made = pickle.loads(pickle.dumps(optimizer))
    w = sv.Variable(np.zeros(3))
    made.apply_gradients([(np.ones(3), w)])
    assert made.learning_rate == 0.25
    for refused in (made, sv.get_strategy(), sv.MirroredStrategy(), sv.new_group([0])):
        with pytest.raises(TypeError, match=r"belong to this process|live in several processes"):
            pickle.dumps(refused)


def test_an_optimizer_of_variables_on_servers_is_not_copied():
    def program():
        with sv.ParameterServerStrategy(staleness=None).scope():
            w = sv.Variable(np.zeros(3), name="w", aggregation="MEAN")
        optimizer = sv.optimizers.Adam(0.1)
        optimizer.apply_gradients([(np.ones(3), w)])
        with pytest.raises(TypeError, match="its slots are on servers"):
            copy.deepcopy(optimizer)
        return True

    assert run_ranks(1, program, servers=LocalServers(1, 1), timeout_s=60) == [True]


# -- gradients of rows -----------------------------------------------------------------------------


class IndexedSlices(NamedTuple):
    """As TensorFlow's gradients of an embedding."""

    values: Any
    indices: Any
    dense_shape: Any = None


@pytest.mark.parametrize(
    "kind",
    [
        lambda indices, values: (indices, values),
        lambda indices, values: IndexedSlices(values, indices),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("float16", {"accumulate": 2}), ("float64", {"clip_norm": 1.0})],
)
def test_gradients_that_name_rows_are_those_with_zeros_elsewhere(kind, dtype, options):
    def program():
        table, twin = (
            sv.Variable(np.ones((4, 2), dtype), name=name, aggregation="MEAN")
            for name in ("a", "b")
        )
        optimizers = [OPT.Adam(0.1, **options) for _ in range(2)]
        rank = sv.rank()
        for step in range(4):
            indices = np.array([rank, 3, rank])
            values = np.arange(6.0).reshape(3, 2) + step
            dense = np.zeros((4, 2))
            np.add.at(dense, indices, values)
            optimizers[0].apply_gradients([(kind(indices, values.astype("float32")), table)])
            optimizers[1].apply_gradients([(dense.astype("float32"), twin)])
        assert table.numpy().tobytes() == twin.numpy().tobytes()
        return table.numpy().tolist()

    first, second = everywhere(2, program)
    assert first == second


def test_gradients_of_rows_of_shards():
    def program():
        table, twin = (
            sv.Variable(np.ones((4, 2)), name=name, aggregation="MEAN") for name in ("a", "b")
        )
        rank, value = sv.rank(), np.full((1, 2), 2.0)
        dense = np.zeros((4, 2))
        dense[rank] = 2.0
        OPT.SGD(0.5).apply_gradients([({rank: ([rank], value)}, table)], shards=True)
        OPT.SGD(0.5).apply_gradients([({rank: dense}, twin)], shards=True)
        return table.numpy().tolist(), twin.numpy().tolist()

    for made, wanted in everywhere(2, program):
        assert made == wanted == [[0.5, 0.5]] * 2 + [[1.0, 1.0]] * 2


def test_a_tuple_of_two_values_for_two_rows_is_no_gradient_of_rows():
    v, w = sv.Variable([1.0, 1.0]), sv.Variable(np.ones((2, 2)))
    OPT.SGD(1.0).apply_gradients([((1.0, 2.0), v), (([1.0, 2.0], [3.0, 4.0]), w)])
    assert v.numpy().tolist() == [0.0, -1.0]
    assert w.numpy().tolist() == [[0.0, -1.0], [-2.0, -3.0]]


def test_as_many_indices_as_a_row_of_two_has_elements_name_rows():
    table = sv.Variable(np.ones((2, 2)))
    OPT.SGD(1.0).apply_gradients([(([1, 1], [[1.0, 2.0], [3.0, 4.0]]), table)])
    assert table.numpy().tolist() == [[1.0, 1.0], [-3.0, -5.0]]
    with pytest.raises(sv.ConfigError, match="values"):
        OPT.SGD(1.0).apply_gradients([(([1, 1], [[1.0], [3.0, 4.0]]), table)])


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (([4], np.ones((1, 2))), "row 4 is outside the variable's rows 0 to 3"),
        (([0.5], np.ones((1, 2))), "indices must be integers, not float64"),
        (
            ([0, 1], np.ones((1, 2))),
            r"gradient of variable 'v': values: the value has shape \(1, 2\)",
        ),
    ],
)
def test_wrong_gradients_of_rows_change_nothing_anywhere(gradient, words):
    def program():
        v = sv.Variable(np.ones((4, 2)), name="v")
        optimizer = OPT.SGD(0.5)
        mine = gradient if sv.rank() else ([0], np.ones((1, 2)))
        with pytest.raises(
            sv.ConfigError if sv.rank() else sv.MismatchError, match=words if sv.rank() else None
        ):
            optimizer.apply_gradients([(mine, v)])
        optimizer.apply_gradients([(([0], np.ones((1, 2))), v)])
        return v.numpy().tolist()

    assert everywhere(2, program) == [[[0.5, 0.5]] + [[1.0, 1.0]] * 3] * 2


def test_a_gradient_of_rows_that_is_not_finite_is_named():
    v = sv.Variable(np.ones((4, 2)), name="v")
    with pytest.raises(sv.ConfigError, match=r"gradient of variable 'v\w*': it holds an infinity"):
        OPT.SGD(0.5, nonfinite="error").apply_gradients([(([1], np.full((1, 2), np.nan)), v)])
