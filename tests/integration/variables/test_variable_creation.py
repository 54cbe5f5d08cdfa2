"""Making variables: names, dtypes, the chief's value, and what happens when replicas disagree."""

import copy
import warnings

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.testing import run_ranks
from tests.support.harness import caught


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, "float32"),
        (1, "int64"),
        (True, "bool"),
        ([1.0, 2.0], "float32"),
        ([1, 2], "int64"),
        (1j, "complex128"),
        (np.float64(1), "float64"),
        (np.zeros(2, np.int16), "int16"),
        (np.float16(1), "float16"),
        ((1, 2.5), "float32"),
    ],
)
def test_dtype_of_the_initial_value(value, dtype):
    def program():
        return sv.Variable(value).dtype.name, sv.Variable(value, synchronization="NONE").dtype.name

    assert everywhere(2, program) == [(dtype, dtype)] * 2


def test_a_given_dtype():
    def program():
        assert sv.Variable(1, dtype="float64").dtype == np.float64
        assert sv.Variable(np.zeros(2), dtype=np.float32).dtype == np.float32
        assert sv.Variable([300], dtype=np.uint16).numpy().tolist() == [300]
        for value, dtype in (
            (1.5, "int32"),
            (np.zeros(2), "int64"),
            (300, "uint8"),
            (1e300, "float32"),
            (1, "bool"),
        ):
            with pytest.raises(ConfigError):
                sv.Variable(value, dtype=dtype)
        return float(sv.Variable(1.0, aggregation="SUM").assign_add(1.0))

    assert everywhere(2, program) == [3.0, 3.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_value": None},
        {"initial_value": "text"},
        {"initial_value": 0.0, "name": "sp ace"},
        {"initial_value": 0.0, "name": ""},
        {"initial_value": 0.0, "name": "x" * 129},
        {"initial_value": 0.0, "synchronization": "SOMETIMES"},
        {"initial_value": 0.0, "aggregation": "MEDIAN"},
        {"initial_value": 0, "aggregation": "MEAN"},
        {"initial_value": True, "aggregation": "MEAN"},
        {"initial_value": 0.0, "trainable": "yes"},
        {"initial_value": 0.0, "dtype": "nonsense"},
        {"initial_value": np.array(["a"])},
    ],
)
def test_wrong_arguments_raise_there_and_mismatch_elsewhere(wrong):
    def program():
        with pytest.raises(ConfigError):
            sv.Variable(**wrong)
        if sv.rank() == 1:
            with pytest.raises(ConfigError):
                sv.Variable(**wrong)
        else:
            error = caught(lambda: sv.Variable(0.0))
            assert "ConfigError" in error.table[1]
        v = sv.Variable(0.0, aggregation="SUM")
        assert v.name == "Variable"
        return float(v.assign_add(1.0))

    assert everywhere(3, program) == [3.0] * 3


def test_names():
    def program():
        names = [
            sv.Variable(0.0, name=name).name
            for name in ("w", "w", "w", "w_1", None, None, "a/b.c-d_E9")
        ]
        apart = [sv.Variable(0.0, name="w", synchronization="NONE").name for _ in range(2)]
        return names, apart

    expected = ["w", "w_1", "w_2", "w_1_1", "Variable", "Variable_1", "a/b.c-d_E9"], ["w", "w_1"]
    assert everywhere(2, program) == [expected] * 2


@pytest.mark.parametrize(
    "different",
    [
        {"name": "other"},
        {"initial_value": np.zeros(2)},
        {"initial_value": 1},
        {"synchronization": "ON_READ"},
        {"aggregation": "MEAN"},
        {"trainable": False},
    ],
)
def test_replicas_that_ask_for_different_variables(different):
    def program():
        same = {"initial_value": 0.0, "name": "v"}
        wish = {**same, **different} if sv.rank() == 1 else same
        error = caught(lambda: sv.Variable(**wish))
        assert set(error.table) == {0, 1, 2}
        assert error.table[0] != error.table[1]
        assert error.table[0] == error.table[2]
        return sv.Variable(**same).name

    assert everywhere(3, program) == ["v"] * 3


def test_every_replica_takes_the_chiefs_value_with_one_warning():
    def program():
        v = sv.Variable(float(sv.rank()), name="seeded")
        return float(v)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert everywhere(3, program) == [0.0] * 3
    assert len(seen) == 1
    assert "variable 'seeded': the initial value of replica 1, 2 differs" in str(seen[0].message)
    assert seen[0].filename == __file__


def test_strict_makes_a_different_initial_value_an_error():
    def program():
        strategy = sv.MirroredStrategy(strict=True)
        with strategy.scope():
            error = caught(lambda: sv.Variable(float(sv.rank()), name="seeded"))
            assert set(error.table) == {0, 1}
            return float(sv.Variable(2.0, name="seeded"))

    assert everywhere(2, program) == [2.0, 2.0]


def test_a_callable_is_called_once_on_the_chief():
    def program():
        calls = []

        def initial():
            calls.append(1)
            return np.full(3, sv.rank() + 5)

        v = sv.Variable(initial, aggregation="SUM")
        w = sv.Variable(initial, synchronization="NONE")
        return len(calls), v.numpy().tolist(), w.numpy().tolist()

    assert everywhere(2, program) == [(2, [5] * 3, [5] * 3), (1, [5] * 3, [6] * 3)]


def test_a_callable_that_fails_on_the_chief():
    def program():
        def initial():
            raise RuntimeError("no data")

        with pytest.raises(RuntimeError if sv.rank() == 0 else MismatchError, match="no data"):
            sv.Variable(initial)
        return float(sv.Variable(1.0))

    assert everywhere(3, program) == [1.0] * 3


def test_options_of_the_strategy_are_compared():
    def program():
        strategy = sv.MirroredStrategy(reproducible=sv.rank() == 1)
        with strategy.scope():
            error = caught(lambda: sv.Variable(0.0))
        return "reproducible=True" in error.table[1]

    assert everywhere(2, program) == [True, True]


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ", "NONE"])
def test_a_copy_is_independent(synchronization):
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(6.0, synchronization=synchronization, aggregation="SUM", name="v")
        if synchronization != "ON_WRITE":
            strategy.run(lambda: v.assign(sv.rank() + 1.0))
        made = copy.deepcopy(v)
        assert (made.name, made.synchronization, made.aggregation) == (
            "v_1",
            v.synchronization,
            v.aggregation,
        )
        assert made.strategy is strategy
        assert made.local_value() == v.local_value()
        with strategy.scope():
            v.assign(100.0)
        return float(made.local_value())

    expected = [6.0, 6.0] if synchronization == "ON_WRITE" else [1.0, 2.0]
    assert everywhere(2, program) == expected


def test_a_variable_as_initial_value_counts_with_its_value():
    def program():
        v = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM", dtype="float64")
        v.assign(2.0)
        w = sv.Variable(v)
        return w.dtype.name, float(w)

    assert everywhere(3, program) == [("float64", 6.0)] * 3


@pytest.mark.parametrize("mode", ["NONE", "ON_READ", "ON_WRITE", "AUTO"])
def test_a_loop_of_temporaries_leaves_nothing(mode):
    def program():
        def make(count):
            for _ in range(count):
                v = sv.Variable(np.zeros(3), synchronization=mode, aggregation="SUM")
                del v

        make(30)
        names = sum(len(one) for one in current().extras["names_of_variables"].values())
        entries = len(sv.get_strategy().registry.entries)
        make(60)
        last = sv.Variable(0.0, synchronization=mode, aggregation="SUM").name
        return (
            last,
            sum(len(one) for one in current().extras["names_of_variables"].values()) - names,
            len(sv.get_strategy().registry.entries) - entries,
        )

    assert everywhere(2, program) == [("Variable_90", 0, 0)] * 2


def test_what_is_dropped_on_one_replica_only_is_told_to_all():
    def program():
        kept = [sv.Variable(0.0, aggregation="SUM", name=f"w{number}") for number in range(4)]
        if sv.rank() == 0:
            del kept[1]
        else:
            del kept[2]
        sv.Variable(0.0, aggregation="SUM", name="more")
        return sorted(sv.get_strategy().registry.entries)

    assert everywhere(2, program) == [["more", "w0", "w3"]] * 2
