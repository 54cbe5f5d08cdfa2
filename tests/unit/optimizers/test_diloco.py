"""DiLoCo against its definition in plain NumPy, its checks, copies and checkpoints."""

import copy
import threading
from functools import partial

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.core.settings import RuntimeConfig
from syncvar.optimizers import SGD, AdamW, DiLoCo, Momentum, Nesterov
from syncvar.optimizers.outer_slots import divided
from syncvar.testing import run_ranks

SHAPES = {"w": (3, 4), "b": (5,), "s": ()}
RATE, OUTER_RATE, MOMENTUM = 0.1, 0.7, 0.9


def start_of(name):
    return np.random.default_rng(len(name) + ord(name[0])).normal(size=SHAPES[name])


def gradient(name, rank, step):
    draw = np.random.default_rng([ord(name[0]), rank, step])
    return np.asarray(draw.normal(size=SHAPES[name]), np.float32)


def new_variables(dtype=np.float32, names="wbs", strategy=None):
    with (strategy or sv.MirroredStrategy(reproducible=True)).scope():
        return [
            sv.Variable(
                (start_of(name) + sv.rank()).astype(dtype), name=name, synchronization="NONE"
            )
            for name in names
        ]


def train(optimizer, variables, steps, first=0):
    for step in range(first, first + steps):
        pairs = [(gradient(one.name[0], sv.rank(), step), one) for one in variables]
        optimizer.apply_gradients(pairs)


def reference(ranks, total, steps, delay=0, fragments=("wbs",), dtype=np.float32):
    """Return the weights of each rank, and the shared ones, after each inner step."""
    weights = [{name: start_of(name).astype(dtype) for name in SHAPES} for _ in range(ranks)]
    shared = {name: value.copy() for name, value in weights[0].items()}
    velocity = {name: np.zeros_like(value) for name, value in shared.items()}
    on_the_way = {}
    history = []

    def receive(names, sent_at, sent):
        for name in names:
            changes = [shared[name] - one[name] for one in sent]
            while len(changes) > 1:  # the tree of reproducible sums
                changes = [sum(changes[at : at + 2]) for at in range(0, len(changes), 2)]
            mean = changes[0] / ranks
            velocity[name] = velocity[name] * MOMENTUM + mean
            moved = (mean + velocity[name] * MOMENTUM) * OUTER_RATE
            shared[name] = shared[name] - moved
            for mine, one in zip(weights, sent, strict=True):
                mine[name] = shared[name] + (mine[name] - one[name] if number > sent_at else 0)

    for number in range(1, total + 1):
        for rank, mine in enumerate(weights):
            for name in SHAPES:
                mine[name] = mine[name] - gradient(name, rank, number - 1).astype(dtype) * RATE
        for names, (sent_at, _) in list(on_the_way.items()):
            if number == sent_at + delay:
                receive(names, *on_the_way.pop(names))
        for place, names in enumerate(fragments):
            if number % steps == (place + 1) * steps // len(fragments) % steps:
                sent = [{name: mine[name] for name in names} for mine in weights]
                if delay:
                    on_the_way[names] = number, sent
                else:
                    receive(names, number, sent)
        history.append(([dict(mine) for mine in weights], dict(shared)))
    return history


def outer():
    return Nesterov(OUTER_RATE, momentum=MOMENTUM)


def shared_of(optimizer, variable):
    return optimizer.tracked()[f"NONE:{variable.name}/outer_anchor"].numpy()


def follow(ranks, options, total, names, dtype):
    variables = new_variables(dtype)
    optimizer = DiLoCo(SGD(RATE), outer(), 4, **options)
    history = reference(ranks, total, 4, options.get("delay", 0), names, dtype)
    for step in range(total):
        train(optimizer, variables, 1, step)
        weights, shared = history[step]
        for one in variables:
            here = f"{one.name} on rank {sv.rank()} after step {step + 1}"
            assert one.numpy().tobytes() == weights[sv.rank()][one.name].tobytes(), here
            assert shared_of(optimizer, one).tobytes() == shared[one.name].tobytes(), here
    return optimizer.iterations


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_blocking_form_is_that_of_numpy_to_the_bit(ranks, dtype):
    assert run_ranks(ranks, follow, ranks, {}, 13, ("wbs",), dtype) == [13] * ranks


@pytest.mark.parametrize("delay", [1, 3, 4])
def test_the_delayed_form_is_its_definition_to_the_bit(delay):
    assert run_ranks(2, follow, 2, {"delay": delay}, 14, ("wbs",), np.float32) == [14] * 2


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_fragments_travel_at_their_own_steps(delay):
    options = {"delay": delay, "fragments": 2}
    assert run_ranks(2, follow, 2, options, 14, ("w", "bs"), np.float32) == [14] * 2


def test_the_exchange_works_in_shared_memory_and_over_two_hosts():
    for options in ({"shared": True}, {"shared": True, "hosts": 2}):
        run_ranks(4, follow, 4, {"delay": 2}, 9, ("wbs",), np.float32, **options)


def follow_in_runs(make_strategy, options):
    """Train inside strategy.run, where the copies of the anchors are compared before each run."""
    strategy = make_strategy()
    variables = new_variables(strategy=strategy)
    optimizer = DiLoCo(SGD(RATE), outer(), 4, **options)

    def step(number):
        train(optimizer, variables, 1, number)

    for number in range(14):
        strategy.run(step, args=(number,))
    weights, _ = reference(2, 14, 4, options.get("delay", 0))[-1]
    return [one.numpy().tobytes() == weights[sv.rank()][one.name].tobytes() for one in variables]


@pytest.mark.parametrize("options", [{}, {"delay": 2}], ids=str)
@pytest.mark.parametrize("kind", [sv.MultiWorkerMirroredStrategy, sv.CentralStorageStrategy])
def test_steps_inside_run_are_the_same(kind, options):
    config = RuntimeConfig(check_every=1)
    found = run_ranks(2, follow_in_runs, kind, options, shared=True, config=config)
    assert found == [[True] * 3] * 2


def ahead(passed):
    variables = new_variables()
    optimizer = DiLoCo(SGD(0.1), None, 4, delay=2)
    if sv.rank() == 0:
        train(optimizer, variables, 5)  # sends after the fourth
        passed.set()
    else:
        train(optimizer, variables, 3)
        assert passed.wait(50), "rank 0 waited for rank 1 before the mean was due"
        train(optimizer, variables, 2, 3)
    train(optimizer, variables, 1, 5)
    optimizer.finish()
    return [one.numpy().tobytes() for one in variables]


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_goes_on_while_its_change_travels(shared):
    first, second = run_ranks(2, ahead, threading.Event(), shared=shared)
    assert isinstance(first, list)
    assert first == second


def test_fragments_have_about_equal_bytes():
    sizes = lambda parts: [[one.name for one in part] for part in parts]  # noqa: E731
    small = [sv.Variable(np.zeros(1), name=f"a{one}", synchronization="NONE") for one in range(4)]
    large = sv.Variable(np.zeros(100), name="z", synchronization="NONE")
    assert sizes(divided(small, 2)) == [["a0", "a1"], ["a2", "a3"]]
    assert sizes(divided([large, *small], 2)) == [["z"], ["a0", "a1", "a2", "a3"]]
    assert sizes(divided([*small, large], 3)) == [["a0", "a1", "a2"], ["a3"], ["z"]]
    assert sizes(divided(small, 4)) == [["a0"], ["a1"], ["a2"], ["a3"]]


def several_dtypes(delay):
    import ml_dtypes

    strategy = sv.MirroredStrategy()
    kinds = [np.float16, np.dtype(ml_dtypes.bfloat16), np.float32, np.float64]
    with strategy.scope():
        variables = [
            sv.Variable(np.ones(3, kind), name=f"v{place}", synchronization="NONE")
            for place, kind in enumerate(kinds)
        ]
    optimizer = DiLoCo(AdamW(0.01), None, steps=3, delay=delay)
    for step in range(8):
        value = np.full(3, 1.0 + sv.rank() * (step % 2))
        strategy.run(optimizer.apply_gradients, args=([(value, one) for one in variables],))
    strategy.run(optimizer.finish)
    exact = variables[3].numpy()
    for one in variables[:3]:
        np.testing.assert_allclose(one.numpy().astype(float), exact, rtol=2e-2)
        assert shared_of(optimizer, one).dtype == np.float32
    assert exact.max() < 0.95
    for one in variables:
        assert one.numpy().tobytes() == shared_of(optimizer, one).astype(one.dtype).tobytes()
    return [one.numpy().tobytes() for one in variables]


@pytest.mark.parametrize("delay", [0, 2])
def test_several_dtypes_at_once_end_with_equal_bytes(delay):
    first, *others = run_ranks(3, several_dtypes, delay)
    assert others == [first] * 2


def small_steps():
    (v,) = new_variables(np.float16, "b")
    v.assign(np.ones(5, np.float16))
    optimizer = DiLoCo(SGD(1e-5), SGD(1.0), 10)
    for _ in range(1000):  # a step is a fiftieth of the distance to the next float16 below 1
        optimizer.apply_gradients([(np.ones(5), v)])
    return np.abs(v.numpy().astype(float) - 0.99).max() < 5e-4


def test_half_weights_gather_steps_smaller_than_their_last_place():
    assert run_ranks(2, small_steps) == [True] * 2


def finished(steps, delay):
    variables = new_variables()
    optimizer = DiLoCo(Momentum(0.1), outer(), 4, delay=delay)
    optimizer.finish()  # before the first step: nothing
    for _ in range(2):
        train(optimizer, variables, steps)
        optimizer.finish()
        optimizer.finish()  # without inner steps since then: nothing changes
        for one in variables:
            assert one.numpy().tobytes() == shared_of(optimizer, one).tobytes()
    return [one.numpy().tobytes() for one in variables], int(optimizer._outer.iterations)


@pytest.mark.parametrize("delay", [0, 3])
def test_finish_gives_all_ranks_the_same_weights(delay):
    first, *others = run_ranks(3, finished, 6, delay)
    assert others == [first] * 2
    assert first[1] == 4  # at 4 and at the end, twice
    assert run_ranks(2, finished, 8, 0)[0][1] == 4  # none at the end
    assert run_ranks(2, finished, 8, 2)[0][1] == 4


def dropped():
    (w,) = new_variables(names="w")
    skipping = Nesterov(0.5, momentum=0.5, nonfinite="skip")
    optimizer = DiLoCo(SGD(1.0), skipping, 2, delay=1)
    optimizer.build([w])
    before = shared_of(optimizer, w)
    bad = np.full((3, 4), np.nan if sv.rank() else 0.0, np.float32)
    for value in (bad, np.ones((3, 4)), np.ones((3, 4))):
        optimizer.apply_gradients([(value, w)])
    return np.array_equal(w.numpy(), before), np.array_equal(shared_of(optimizer, w), before)


def test_a_change_that_is_not_finite_is_dropped():
    assert run_ranks(2, dropped) == [(True, True)] * 2


# -- errors ----------------------------------------------------------------------------------------


def failure(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def test_wrong_arguments_are_refused():
    used = SGD(0.1)
    used.apply_gradients([(1.0, sv.Variable(1.0))])
    taken = SGD(0.1)
    DiLoCo(SGD(0.1), taken)
    for arguments, options, text in [
        ((0.1,), {}, "inner must be an optimizer"),
        ((SGD(1.0), DiLoCo(SGD(0.1))), {}, "outer must be an optimizer"),
        ((SGD(1.0), used), {}, "is in use"),
        ((used, used), {}, "is in use"),
        ((SGD(1.0), taken), {}, "is in use"),
        ((SGD(1.0), SGD(1.0, accumulate=2)), {}, "leave out its accumulate"),
        ((SGD(1.0), SGD(1.0, compress="int8")), {}, "its compress"),
        ((SGD(1.0), SGD(1.0, nonfinite="error")), {}, "nonfinite='error'"),
        ((SGD(1.0),), {"steps": 0}, "steps must be an integer of at least 1"),
        ((SGD(1.0),), {"steps": 4, "delay": 5}, "delay must be an integer from 0 to steps=4"),
        ((SGD(1.0),), {"steps": 4, "delay": -1}, "delay must be an integer"),
        ((SGD(1.0),), {"steps": 4, "delay": True}, "delay must be an integer"),
        ((SGD(1.0),), {"steps": 2, "fragments": 3}, "fragments must be an integer from 1 to"),
    ]:
        kind, found = failure(DiLoCo, *arguments, **options)
        assert kind is ConfigError, (arguments, options)
        assert text in found
    kind, text = failure(DiLoCo(SGD(1.0)).apply_gradients, [(1.0, sv.Variable(1.0))])
    assert kind is ConfigError
    assert "synchronization='NONE'" in text
    v, w = (sv.Variable(1.0, synchronization="NONE") for _ in range(2))
    kind, text = failure(DiLoCo(SGD(1.0), fragments=2).apply_gradients, [(1.0, v)])
    assert "choose fewer fragments" in text
    optimizer = DiLoCo(SGD(1.0))
    optimizer.apply_gradients([(1.0, v)])
    assert "was not in the first call" in failure(optimizer.apply_gradients, [(1.0, w)])[1]
    assert failure(optimizer.apply_gradients, [({}, v)], shards=True)[0] is ConfigError


def other_settings(option):
    changed = {
        "steps": {"steps": 4 + sv.rank()},
        "delay": {"steps": 4, "delay": 1 + sv.rank()},
        "outer": {"steps": 4, "outer": Nesterov(0.7, momentum=0.5 + 0.1 * sv.rank())},
        "wrong": {"steps": 4},
    }[option]
    variables = new_variables()
    pairs = [(gradient("w", 0, 0), variables[0])]
    if option == "wrong" and sv.rank() == 1:
        pairs.append((1.0, "no variable"))
    optimizer = DiLoCo(SGD(0.1), **changed)
    before = [one.numpy().tobytes() for one in variables]
    result = failure(optimizer.apply_gradients, pairs)
    assert [one.numpy().tobytes() for one in variables] == before
    return result


@pytest.mark.parametrize("option", ["steps", "delay", "outer", "wrong"])
def test_ranks_with_other_settings_all_raise(option):
    found = run_ranks(2, other_settings, option)
    assert found[0][0] is MismatchError
    assert found[1][0] is (ConfigError if option == "wrong" else MismatchError)
    if option == "steps":
        for _, text in found:
            assert "steps=4" in text
            assert "steps=5" in text
            assert "rank" in text


def uneven(delay):
    variables = new_variables()
    optimizer = DiLoCo(SGD(0.1), None, 4, delay=delay)
    train(optimizer, variables, 6 if sv.rank() == 1 else 7)
    shared = [shared_of(optimizer, one) for one in variables]
    result = failure(optimizer.finish)
    assert all(
        np.array_equal(shared_of(optimizer, one), value)
        for one, value in zip(variables, shared, strict=True)
    )
    return result


@pytest.mark.parametrize("delay", [0, 1])
def test_an_uneven_number_of_inner_steps_names_the_ranks(delay):
    for kind, text in run_ranks(3, uneven, delay):
        assert kind is MismatchError
        assert "after 7 inner steps" in text
        assert "after 6 inner steps" in text
        for rank in range(3):
            assert str(rank) in text


def uneven_at_an_outer_step():
    variables = new_variables()
    optimizer = DiLoCo(SGD(0.1), None, 4)
    train(optimizer, variables, 3)
    return failure(train, optimizer, variables, 1, 3) if sv.rank() else failure(optimizer.finish)


def test_a_rank_that_ends_early_is_named_too():
    for kind, text in run_ranks(2, uneven_at_an_outer_step):
        assert kind is MismatchError
        assert "outer step 0 after 4 inner steps" in text
        assert "finish of DiLoCo after 3 inner steps" in text


# -- state -----------------------------------------------------------------------------------------


def with_copies(delay):
    variables = new_variables()
    optimizer = DiLoCo(AdamW(0.1), outer(), 4, delay=delay)
    train(optimizer, variables, 5)  # inside a delay
    others, other = copy.deepcopy((variables, optimizer))
    for chosen, stepped in ((optimizer, variables), (other, others)):
        train(chosen, stepped, 6, 5)
        chosen.finish()
    assert len(other.tracked()) == len(optimizer.tracked())
    return [one.numpy().tobytes() for one in variables] == [one.numpy().tobytes() for one in others]


@pytest.mark.parametrize("delay", [0, 3])
def test_a_deep_copy_goes_on_in_the_same_way(delay):
    assert run_ranks(2, with_copies, delay) == [True] * 2


def saved(path, at, options, restores_live):
    variables = new_variables()
    make = partial(DiLoCo, AdamW(0.1, accumulate=options.pop("accumulate", 1)), outer(), 4)
    optimizer = make(**options)
    everything = {one.name: one for one in variables}
    train(optimizer, variables, at)
    sv.Checkpoint(optimizer=optimizer, **everything).save(path)
    train(optimizer, variables, 9, at)
    optimizer.finish()
    expected = [one.numpy().tobytes() for one in variables], optimizer.iterations
    if restores_live:  # into the optimizer that has gone on
        train(optimizer, variables, 3)
        again, variables_again = optimizer, variables
    else:
        variables_again = new_variables(names="wbs")
        for one in variables_again:
            one.assign(np.zeros(one.shape, np.float32))
        again = DiLoCo(
            AdamW(0.1, accumulate=make.args[0].gradient_step.accumulate), outer(), 4, **options
        )
    names = dict(zip(everything, variables_again, strict=True))
    sv.Checkpoint(optimizer=again, **names).restore(path)
    train(again, variables_again, 9, at)
    again.finish()
    return expected == ([one.numpy().tobytes() for one in variables_again], again.iterations)


@pytest.mark.parametrize(("at", "restores_live"), [(0, True), (3, False), (5, False), (6, True)])
@pytest.mark.parametrize(
    "options",
    [{}, {"delay": 2}, {"delay": 4, "fragments": 3}, {"accumulate": 2, "delay": 1}],
    ids=str,
)
def test_a_checkpoint_at_any_step_continues_to_the_bit(tmp_path, options, at, restores_live):
    found = run_ranks(2, lambda: saved(tmp_path / "c", at, dict(options), restores_live))
    assert found == [True] * 2


def save_five(path):
    variables = new_variables()
    optimizer = DiLoCo(SGD(0.1), outer(), 4, delay=3)
    train(optimizer, variables, 5)
    sv.Checkpoint(optimizer=optimizer, **{one.name: one for one in variables}).save(path)
    return [shared_of(optimizer, one).tobytes() for one in variables]


def restore_on_others(path):
    variables = new_variables()
    optimizer = DiLoCo(SGD(0.1), outer(), 4, delay=3)
    sv.Checkpoint(optimizer=optimizer, **{one.name: one for one in variables}).restore(path)
    assert "before finish" in failure(optimizer.finish)[1]
    optimizer.build(variables)
    found = [one.numpy().tobytes() for one in variables]
    train(optimizer, variables, 9)
    optimizer.finish()
    return found, [one.numpy().tobytes() for one in variables]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_continue_with_the_shared_weights(tmp_path, ranks):
    shared = run_ranks(2, save_five, tmp_path / "c")[0]
    first, *others = run_ranks(ranks, restore_on_others, tmp_path / "c")
    assert first[0] == shared
    assert others == [first] * (ranks - 1)


def test_the_slots_have_names_and_the_optimizer_a_text():
    w = sv.Variable([1.0], name="w", synchronization="NONE")
    optimizer = DiLoCo(AdamW(0.25), SGD(1.0), 4, delay=1)
    assert optimizer.learning_rate == 0.25
    optimizer.learning_rate = 0.5
    optimizer.build([w])
    assert sorted(optimizer.tracked()) == [
        *("NONE:w/m", "NONE:w/outer_anchor", "NONE:w/outer_sent", "NONE:w/steps", "NONE:w/v"),
        *("iterations", "outer_inner_steps", "outer_iterations", "outer_replicas"),
        *("outer_running", "outer_sent_at"),
    ]
    assert "learning_rate=0.5" in repr(optimizer)
    assert "steps=4 delay=1 fragments=1" in repr(optimizer)
    assert len(optimizer.variables) == 11


def saved_in_a_file(path):
    w = sv.Variable([1.0, 2.0], name="w", synchronization="NONE")
    optimizer = DiLoCo(AdamW(0.25), SGD(1.0), 4)
    optimizer.build([w])
    sv.save(path, {"optimizer": optimizer})
    return sv.load(path)["optimizer"]


def test_a_file_of_one_rank_holds_the_slots(tmp_path):
    (state,) = run_ranks(1, saved_in_a_file, tmp_path / "f")
    assert state["NONE:w/outer_anchor"].tolist() == [1.0, 2.0]
    assert {"NONE:w/m", "outer_inner_steps", "iterations"} <= set(state)


class Tensor:
    """A gradient of another library, as NumPy sees it."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype)


def with_foreign_gradients(wrap):
    w = sv.Variable(np.zeros((3, 4), np.float32), name="w", synchronization="NONE")
    optimizer = DiLoCo(SGD(0.1), outer(), 2, delay=1)
    for step in range(5):
        optimizer.apply_gradients(pair for pair in [(wrap(gradient("w", sv.rank(), step)), w)])
    optimizer.finish()
    return w.numpy().tobytes()


def test_gradients_may_be_arrays_of_other_libraries():
    expected = run_ranks(2, with_foreign_gradients, np.asarray)
    assert isinstance(expected[0], bytes)
    assert run_ranks(2, with_foreign_gradients, Tensor) == expected
