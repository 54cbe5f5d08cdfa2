"""The state of optimizers in checkpoints: whose it is, what refuses it, and where it waits."""

import logging

import numpy as np
import pytest

import syncvar as sv
from syncvar.checkpoint.checkpoint_format import MANIFEST, Manifest
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.session import LocalServers
from syncvar.testing import run_ranks
from tests.support.harness import caught

CONFIG = RuntimeConfig(collective_timeout_s=60.0)
RULES = {
    "Momentum": lambda: sv.optimizers.Momentum(0.1),
    "Adam": lambda: sv.optimizers.Adam(0.1),
    "Adam of calls": lambda: sv.optimizers.Adam(0.1, accumulate=2),
}


def world(count, fn, *arguments, servers=None):
    """Run `fn(*arguments)` on every rank; return the results by rank."""
    there = {} if servers is None else {"servers": LocalServers(count, servers)}
    results = run_ranks(count, fn, *arguments, config=CONFIG, timeout_s=60.0, **there)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def variable(dtype="float32", **options):
    return sv.Variable(np.zeros(3, dtype), **{"aggregation": "MEAN", **options})


def train(optimizer, variables, steps):
    """Make steps with gradients that differ by variable, step and rank."""
    for step in steps:
        pairs = [
            (np.full(3, (place + 1) * (step + 1) * 10.0**place + sv.rank(), one.dtype), one)
            for place, one in enumerate(variables)
        ]
        optimizer.apply_gradients(pairs)


def bits(*variables):
    return [one.numpy().tobytes() for one in variables]


@pytest.mark.parametrize("rule", RULES)
def test_state_goes_to_the_variable_with_the_same_key(tmp_path, rule):
    """The program that restores makes its variables in another order, under other names."""

    def whole():
        first, second, half = variable(), variable(), variable("float16", name="half")
        optimizer = RULES[rule]()
        train(optimizer, (first, second, half), range(5))
        checkpoint = sv.Checkpoint(
            first=first, parts={"second": second, "half": half}, optimizer=optimizer
        )
        checkpoint.save(tmp_path / "c")
        train(optimizer, (first, second, half), range(5, 10))
        return bits(first, second, half), optimizer.iterations

    def resumed():
        half = variable("float16", name="other")
        variable(), variable()
        second, first = variable(), variable(name="half")
        optimizer = RULES[rule]()
        sv.Checkpoint(
            optimizer=optimizer, parts={"second": second, "half": half}, first=first
        ).restore(tmp_path / "c")
        train(optimizer, (first, second, half), range(5, 10))
        return bits(first, second, half), optimizer.iterations

    expected = world(2, whole)
    assert world(2, resumed) == expected


def test_state_of_variables_on_servers_goes_by_key_too(tmp_path):
    def run(names, *, restores):
        strategy = sv.ParameterServerStrategy(staleness=0)
        with strategy.scope():
            made = {name: variable(name=name) for name in names}
        first, second = (made[name] for name in sorted(names, key=names.get))
        optimizer = sv.optimizers.Momentum(0.1)
        checkpoint = sv.Checkpoint(first=first, second=second, optimizer=optimizer)

        def step(numbers):
            for number in numbers:
                pairs = [(np.full(3, number + 1.0), first), (np.full(3, -5.0 * number), second)]
                strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))

        if restores:
            checkpoint.restore(tmp_path / "c")
            assert optimizer.iterations == 3
        else:
            step(range(3))
            sv.barrier()
            checkpoint.save(tmp_path / "c")
            sv.barrier()
        step(range(3, 6))
        sv.barrier()
        return bits(first, second)

    expected = world(2, lambda: run({"a": 1, "b": 2}, restores=False), servers=2)
    assert world(2, lambda: run({"a": 2, "b": 1}, restores=True), servers=2) == expected


def test_state_without_an_owner_is_an_error_that_names_it(tmp_path):
    def save():
        one, two = variable(), variable()
        optimizer = sv.optimizers.Momentum(0.1)
        train(optimizer, (one, two), range(3))
        sv.Checkpoint(one=one, two=two, optimizer=optimizer).save(tmp_path / "c")
        return bits(one)

    def restore():
        one, optimizer = variable(), sv.optimizers.Momentum(0.1)
        checkpoint = sv.Checkpoint(one=one, optimizer=optimizer)
        refused = caught(checkpoint.restore, tmp_path / "c")
        before = bits(one), optimizer.iterations
        checkpoint.restore(tmp_path / "c", partial=True)
        late = checkpoint.two = variable()
        train(optimizer, (one, late), ())
        state = checkpoint.optimizer.slots.saved_slots(late)["momentum"].local_value().tolist()
        return type(refused), str(refused), before, bits(one), optimizer.iterations, state

    saved = world(2, save)
    for kind, text, before, after, iterations, state in world(2, restore):
        assert kind is sv.CheckpointError
        assert "'optimizer/two/momentum'" in text
        assert "partial=True" in text
        assert before == ([bytes(12)], 0), "a restore that is refused changes nothing"
        assert (after, iterations) == (saved[0], 3)
        assert all(state), "state that waited goes to its variable when that is added"


def test_state_that_an_earlier_version_saved_by_names_is_refused_late_too(tmp_path):
    def fn():
        w, optimizer = variable(name="w"), sv.optimizers.Momentum(0.1)
        train(optimizer, [w], range(3))
        sv.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "c")
        if sv.rank() == 0:  # earlier versions had no such entry
            path = tmp_path / "c" / MANIFEST
            manifest = Manifest.from_bytes(path.read_bytes())
            del manifest.entries["optimizer/rule"]
            path.write_bytes(manifest.to_bytes())
        sv.barrier()
        results = []
        for partial in (False, True):
            again, late = variable(name="again"), sv.optimizers.Momentum(0.1)
            checkpoint = sv.Checkpoint(w=again)
            checkpoint.restore(tmp_path / "c", partial=partial)
            refused = caught(setattr, checkpoint, "optimizer", late)
            results.append((type(refused), str(refused), late.iterations, bits(again) == bits(w)))
        return results

    for refused, left_out in world(2, fn):
        assert refused[0] is sv.CheckpointError
        assert "'optimizer/rule'" in refused[1]
        assert refused[2:] == (0, True)
        assert left_out == (type(None), "None", 0, True)


@pytest.mark.parametrize(
    ("saved", "restored"), [("Adam", "Momentum"), ("SGD", "Momentum"), ("Adam", "SGD")]
)
def test_state_of_another_kind_of_optimizer_is_an_error(tmp_path, saved, restored):
    def save():
        w, optimizer = variable(), getattr(sv.optimizers, saved)(0.1)
        train(optimizer, [w], range(3))
        sv.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "c")

    def restore():
        w, optimizer = variable(), getattr(sv.optimizers, restored)(0.1)
        checkpoint = sv.Checkpoint(w=w, optimizer=optimizer)
        refused = caught(checkpoint.restore, tmp_path / "c")
        before = bits(w)
        checkpoint.restore(tmp_path / "c", partial=True)
        return type(refused), str(refused), before, bits(w) != before, optimizer.iterations

    world(2, save)
    for kind, text, before, is_restored, iterations in world(2, restore):
        assert kind is sv.CheckpointError
        assert "'optimizer'" in text
        assert saved in text
        assert restored in text
        assert before == [bytes(12)]
        assert (is_restored, iterations) == (True, 0), "partial=True restores the variable only"


def test_a_save_without_a_stepped_variable_is_refused(tmp_path):
    def fn():
        w, optimizer = variable(name="forgotten"), sv.optimizers.Momentum(0.1)
        train(optimizer, [w], range(2))
        refused = caught(sv.Checkpoint(optimizer=optimizer).save, tmp_path / "c")
        return type(refused), str(refused)

    for kind, text in world(2, fn):
        assert kind is sv.ConfigError
        assert "'forgotten'" in text
    assert not (tmp_path / "c").exists()


def test_entries_without_an_object_are_named_in_the_log(tmp_path, caplog):
    def fn(**options):
        w, optimizer = variable(), sv.optimizers.Momentum(0.1)
        train(optimizer, [w], range(2))
        sv.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "c")
        sv.Checkpoint(w=w).restore(tmp_path / "c", **options)

    with caplog.at_level(logging.WARNING, "syncvar"):
        world(2, lambda: fn(partial=True))
        assert not caplog.records
        world(2, fn)
    (record,) = caplog.records
    assert "optimizer/w/momentum" in record.getMessage()


@pytest.mark.parametrize("rule", RULES)
def test_state_waits_at_the_optimizer(tmp_path, rule):
    """Each way restores into an optimizer that has not stepped; 7 calls are in the middle of a step of 2."""

    def make():
        w, half = variable(name="w"), variable("float16", name="half")
        optimizer = RULES[rule]()
        return w, half, optimizer, sv.Checkpoint(w=w, half=half, optimizer=optimizer)

    def whole():
        w, half, optimizer, checkpoint = make()
        optimizer.learning_rate = lambda step: 0.1 / (step + 1)
        train(optimizer, (w, half), range(7))
        checkpoint.save(tmp_path / "c")
        made = optimizer.iterations, optimizer.learning_rate
        train(optimizer, (w, half), range(7, 11))
        return made, bits(w, half)

    def resumed(through):
        w, half, optimizer, checkpoint = make()
        optimizer.learning_rate = lambda step: 0.1 / (step + 1)
        checkpoint.restore(tmp_path / "c")
        del checkpoint
        if through is not None:  # saved again before the first step, and restored from that
            sv.Checkpoint(w=w, half=half, optimizer=optimizer).save(tmp_path / through)
            w, half, optimizer, checkpoint = make()
            optimizer.learning_rate = lambda step: 0.1 / (step + 1)
            checkpoint.restore(tmp_path / through)
            del checkpoint
        made = optimizer.iterations, optimizer.learning_rate
        train(optimizer, (w, half), range(7, 11))
        return made, bits(w, half)

    expected = world(2, whole)
    assert world(2, resumed, None) == expected
    assert world(2, resumed, "d") == expected


def test_a_checkpoint_from_before_the_first_step_takes_state_away(tmp_path):
    def fn():
        w, optimizer = variable(), sv.optimizers.Adam(0.1)
        checkpoint = sv.Checkpoint(w=w, optimizer=optimizer)
        checkpoint.save(tmp_path / "c")
        results = []
        for _ in range(2):
            train(optimizer, [w], range(4))
            results.append((bits(w), optimizer.iterations))
            checkpoint.restore(tmp_path / "c")
            assert optimizer.iterations == 0
        return results

    for first, second in world(2, fn):
        assert first == second


def test_state_of_variables_of_each_replica_waits_too(tmp_path):
    def make():
        w = variable(synchronization="NONE", aggregation="NONE", name="own")
        optimizer = sv.optimizers.Momentum(0.1)
        return w, optimizer, sv.Checkpoint(w=w, optimizer=optimizer)

    def whole():
        w, optimizer, checkpoint = make()
        train(optimizer, [w], range(2 + sv.rank()))
        checkpoint.save(tmp_path / "c")
        train(optimizer, [w], range(3))
        return w.local_value().tobytes(), optimizer.iterations

    def resumed():
        w, optimizer, checkpoint = make()
        checkpoint.restore(tmp_path / "c")
        checkpoint.save(tmp_path / "d")
        w, optimizer, checkpoint = make()
        checkpoint.restore(tmp_path / "d")
        assert optimizer.iterations == 2 + sv.rank()
        train(optimizer, [w], range(3))
        return w.local_value().tobytes(), optimizer.iterations

    assert world(2, whole) == world(2, resumed)


def test_sv_save_has_state_that_waits(tmp_path):
    w, optimizer = variable(name="kept"), sv.optimizers.Momentum(0.1)
    train(optimizer, [w], range(2))
    sv.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "c")
    expected = sv.load(sv.save(tmp_path / "a", optimizer))
    again, restored = variable(name="again"), sv.optimizers.Momentum(0.1)
    sv.Checkpoint(w=again, optimizer=restored).restore(tmp_path / "c")
    found = sv.load(sv.save(tmp_path / "b", restored))
    assert found["iterations"] == expected["iterations"] == 2
    assert found["again/momentum"].tolist() == expected["kept/momentum"].tolist()
