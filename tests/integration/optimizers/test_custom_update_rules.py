"""Update rules of programs: the same function steps copies on ranks, and variables on servers, whole and by rows."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.parameter_server.session import LocalServers
from syncvar.testing import run_ranks
from tests.support.rank_scripts import user_update_rules as rules

ONES = np.ones(4, np.float32)
GRADIENTS = [np.array([1, -2, 3, 0], np.float32), np.array([0.5, 0, -1, 8], np.float32)]


def stepped(optimizer, gradients, *, strategy=None, value=ONES):
    """Return what a variable is after some steps."""
    with (strategy or sv.get_strategy()).scope():
        variable = sv.Variable(value)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    return variable.numpy()


def servers(**options):
    return sv.ParameterServerStrategy(**options)


@pytest.mark.parametrize("staleness", [0, 3, None])
def test_the_same_rule_steps_copies_and_variables_on_servers(staleness):
    def make():
        return sv.optimizers.Custom(rules.adagrad, 0.1, epsilon=1e-3)

    here = stepped(make(), GRADIENTS)
    total, value = np.full(4, 0.5, np.float32), np.ones(4, np.float32)
    for gradient in GRADIENTS:
        total = total + gradient * gradient
        value = value - 0.1 * gradient / (np.sqrt(total) + 1e-3)
    assert np.allclose(here, value)
    assert np.array_equal(here, stepped(make(), GRADIENTS, strategy=servers(staleness=staleness)))
    cut = servers(variable_partitioner=sv.partitioners.FixedShards(2), staleness=staleness)
    assert np.array_equal(here, stepped(make(), GRADIENTS, strategy=cut))


@pytest.mark.parametrize("staleness", [0, None])
def test_of_rows_the_rule_sees_those_that_are_named_and_their_slots(staleness):
    table = np.ones((6, 2), np.float32)
    steps = [
        ((np.array([4, 1, 4]), np.ones((3, 2), np.float32))),
        ((np.array([1]), np.full((1, 2), 3, np.float32))),
    ]
    found = stepped(
        sv.optimizers.Custom(rules.picky), steps, strategy=servers(staleness=staleness), value=table
    )
    assert found.tolist() == [[1, 1], [-3, -3], [1, 1], [1, 1], [-1, -1], [1, 1]]


def test_a_rule_is_told_the_step_of_the_variable():
    for strategy in (None, servers(staleness=None)):
        assert (
            stepped(
                sv.optimizers.Custom(f"{rules.__name__}:counted"), GRADIENTS, strategy=strategy
            ).tolist()
            == [4] * 4
        )


def test_half_types_are_stepped_as_float32():
    value = np.ones(4, np.float16)
    found = stepped(
        sv.optimizers.Custom(rules.picky),
        [np.full(4, 2**-12, np.float32)] * 8,
        strategy=servers(staleness=None),
        value=value,
    )
    assert found.dtype == np.float16
    assert found.tolist() == [float(np.float16(1 - 2**-9))] * 4


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("rows", [False, True])
def test_a_rule_that_raises_fails_its_push_and_nothing_else(staleness, rows):
    strategy = servers(staleness=staleness)
    with strategy.scope():
        one, other = sv.Variable(np.ones(3, np.float32)), sv.Variable(np.zeros(3, np.float32))
    optimizer = sv.optimizers.Custom(rules.picky)
    bad = np.array([1, np.nan, np.inf], np.float32)
    gradient = (np.arange(3), bad) if rows else bad
    with pytest.raises(sv.ConfigError, match="2 elements of the gradient are not finite") as raised:
        with strategy.transaction():
            optimizer.apply_gradients([(gradient, one)])
            if staleness is None:
                other.assign_add(np.ones(3, np.float32))
        strategy.tick()
        strategy.tick()
    assert "raise ArithmeticError(f" in str(raised.value)
    assert "user_update_rules.py" in str(raised.value)
    assert (one.numpy().tolist(), other.numpy().tolist()) == ([1] * 3, [0] * 3)
    optimizer.apply_gradients([(np.ones(3, np.float32), one)])
    strategy.tick()
    assert one.numpy().tolist() == [0] * 3


def test_on_ranks_a_rule_raises_what_it_raises_and_leaves_the_variable():
    variable, optimizer = sv.Variable([1.0, 2.0]), sv.optimizers.Custom(rules.picky)
    with pytest.raises(ArithmeticError, match="2 elements"):
        optimizer.apply_gradients([([np.nan, np.nan], variable)])
    assert variable.numpy().tolist() == [1, 2]
    optimizer.apply_gradients([([1.0, 1.0], variable)])
    assert variable.numpy().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rule", "kind", "words"),
    [
        (rules.writes, ValueError, "read-only"),
        (rules.wrong_shape, sv.ConfigError, r"a value of float64\[3\] where float32\[4\]"),
        (rules.unknown_slot, sv.ConfigError, "slots that it has not: momentum"),
    ],
)
def test_a_rule_that_does_not_keep_to_its_form_is_told_so(rule, kind, words):
    with pytest.raises(kind, match=words):
        stepped(sv.optimizers.Custom(rule), GRADIENTS)
    strategy = servers(staleness=None)
    with pytest.raises(sv.SyncvarError, match=words):
        stepped(sv.optimizers.Custom(rule), GRADIENTS, strategy=strategy)
    strategy.tick()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (rules.unregistered, "write @sv.optimizers.update_rule before its def"),
        ("no_such_module:rule", "cannot be imported.*put it beside the script"),
        (f"{rules.__name__}:unregistered", "registers no update rule 'unregistered'"),
        ("adagrad", "named 'module:function'"),
    ],
)
def test_what_is_no_registered_rule_is_refused_with_the_remedy(rule, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.optimizers.Custom(rule)


def test_numbers_and_slots_are_checked():
    with pytest.raises(sv.ConfigError, match="epsilon must be a finite number"):
        sv.optimizers.Custom(rules.adagrad, epsilon="small")
    with pytest.raises(sv.ConfigError, match="cannot be a number of an update rule"):
        sv.optimizers.Custom(rules.adagrad, step=3)
    with pytest.raises(sv.ConfigError, match="a slot is named by small letters"):
        sv.optimizers.update_rule(slots={"Sum": 0})(rules.unregistered)
    with pytest.raises(sv.ConfigError, match="top level of a module"):
        sv.optimizers.update_rule(lambda value: value)


def test_rules_of_all_workers_are_combined_as_gradients_are():
    def work():
        found, rank = [], sv.rank()
        for strategy in (
            sv.MirroredStrategy(reproducible=True),
            sv.ParameterServerStrategy(staleness=0),
        ):
            with strategy.scope():
                variable = sv.Variable(np.ones(4, np.float32), name=type(strategy).__name__)
            optimizer = sv.optimizers.Custom(rules.adagrad, 0.1, epsilon=1e-3)
            for gradient in GRADIENTS:
                strategy.run(
                    lambda g=gradient, v=variable, o=optimizer: o.apply_gradients(
                        [(g * (rank + 1), v)]
                    )
                )
                if isinstance(strategy, sv.ParameterServerStrategy):
                    strategy.tick()
            found.append(variable.numpy().tolist())
        return found

    (first, second), (third, fourth) = run_ranks(2, work, servers=LocalServers(2, 2), timeout_s=120)
    assert first == second == third == fourth
