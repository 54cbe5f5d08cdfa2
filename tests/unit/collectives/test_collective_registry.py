"""The table of collectives against the functions and a reference of its own."""

import inspect
import re
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

import syncvar as sv
from syncvar.algorithms.builders import SCHEDULES, Combination
from syncvar.cli.printed_tables import signature_of
from syncvar.cli.selftest import (
    SelfTestResult,
    compare_results,
    different_array,
    outcome_lines,
)
from syncvar.collectives.collective_registry import (
    COLLECTIVES,
    PERIOD,
    Case,
    CollectiveKind,
    available,
    ops_of,
)
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.reduce_ops import OPS
from syncvar.runtime.call_record import BUS_FACTORS


def public_functions():
    """Return the public functions of the room that take a deadline, by name."""
    return {
        name: value
        for name in sv.__all__
        if not isinstance(value := getattr(sv, name), type)
        and getattr(value, "__module__", "").startswith("syncvar.collectives")
        and "timeout" in inspect.signature(value).parameters
    }


def test_every_collective_is_registered():
    registered = {function for one in available() for function in one.functions}
    others = {sv.new_group, sv.mesh, sv.shared_array}
    assert set(public_functions().values()) - others == registered


@pytest.mark.parametrize("one", available(), ids=lambda one: one.name)
def test_a_record_is_complete(one):
    assert COLLECTIVES[one.name] is one
    assert not one.bus or one.bus in BUS_FACTORS
    assert one.layout in ("vector", "cut", "blocks")
    for cell in (one.gives, one.gets, one.cost):
        assert 0 < len(cell.split()) <= 20, "a cell of a table is short"
    assert set(one.schedules) <= set(SCHEDULES), "a key of the registry of schedules"
    assert bool(one.schedules) != (one.name in SCHEDULES) or one.kind is CollectiveKind.MESSAGE
    assert all(signature_of(name).startswith(f"{name}(") for name in one.names)
    assert one.takes("op") == (one.kind is CollectiveKind.REDUCE)
    if one.name in SCHEDULES:
        assert one.takes("op") == (SCHEDULES[one.name].combines is not Combination.NONE)
        assert one.takes("root") == SCHEDULES[one.name].has_root


def test_only_the_header_round_has_schedules_and_no_function():
    assert set(SCHEDULES) - set(COLLECTIVES) == {"header_exchange"}


def test_every_op_has_a_reference():
    for op in OPS:
        assert Case(0, 2, (3,), "uint8", op).combined() is not None


# -- contributions and what must come of them ------------------------------------------------------


def exact(value):
    return complex(value) if np.iscomplexobj(value) else Fraction(float(value))


@pytest.mark.parametrize("dtype", [name for name in DTYPE_NAMES if name != "bool"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_sums_and_means_are_the_exact_ones(dtype, size):
    for op in ("sum", "mean"):
        case = Case(0, size, (40,), dtype, op)
        parts = [case.part(rank) for rank in range(size)]
        totals = [sum(exact(one[place]) for one in parts) for place in range(40)]
        if op == "mean":
            totals = [total / size for total in totals]
        got = case.combined()
        if got.dtype.kind == "u" or got.dtype.name == "int8":
            totals = [int(total) % 256 if got.dtype.itemsize == 1 else total for total in totals]
            got = got.astype(np.int64) % 256 if got.dtype.itemsize == 1 else got
        assert [exact(one) for one in got] == totals


@pytest.mark.parametrize(
    ("dtype", "size"),
    [*product(["float16", "bfloat16", "int8", "uint8", "complex64", "float64"], [2, 5, 64])],
)
def test_products_stay_small(dtype, size):
    total = Case(0, size, (PERIOD,), dtype, "prod").combined().astype(np.complex128)
    assert set(np.abs(total)) == {2.0}


def test_the_ranks_of_extremes_are_the_lowest():
    case = Case(0, 4, (200,), "int32", "minloc")
    values, ranks = case.combined()
    for place in range(200):
        every = [int(case.part(rank)[place]) for rank in range(4)]
        assert values[place] == min(every)
        assert ranks[place] == every.index(min(every))


def test_the_identity_changes_nothing():
    for dtype in DTYPE_NAMES:
        for op in ops_of(COLLECTIVES["exscan"], dtype):
            if op == "mean":
                continue
            case = Case(0, 3, (50,), dtype, op)
            neutral = case.combined(0)
            value = case.part(1)
            assert neutral.dtype == value.dtype
            folds = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
            fold = folds.get(op) or getattr(np, f"bitwise_{op}")
            assert (fold(neutral, value) == value).all(), (dtype, op)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_ranks_and_places_bring_different_values(dtype):
    case = Case(0, 4, (2 * PERIOD + 3,), dtype)
    parts = [case.part(rank) for rank in range(4)]
    for one, other in product(range(4), repeat=2):
        assert (one == other) == bool((parts[one] == parts[other]).all())
    assert not (parts[0][:PERIOD] == parts[0][1 : PERIOD + 1]).all()


def pieces(value, size):
    return [Case(rank, size, ()).piece(value) for rank in range(size)]


def test_pieces_are_those_of_the_collectives():
    assert [one.tolist() for one in pieces(np.arange(7), 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [one.size for one in pieces(np.arange(2), 4)] == [1, 1, 0, 0]
    assert [len(one) for one in pieces(np.zeros((4, 3)), 3)] == [2, 1, 1]
    pairs = pieces((np.arange(3), np.arange(3) * 2), 2)
    assert [[one.tolist() for one in pair] for pair in pairs] == [[[0, 1], [0, 2]], [[2], [4]]]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_spoiled_array_has_nothing_right(dtype):
    case = Case(0, 2, (PERIOD,), dtype, "max" if dtype == "bool" else "sum")
    wanted = case.part(0)
    assert compare_results(different_array(wanted), wanted)[0] == wanted.size


RIGHT = np.array([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("got", "wanted", "words", "wrong"),
    [
        (RIGHT, RIGHT, "", 0),
        (None, None, "", 0),
        (RIGHT + np.array([[0, 0], [0, 1]]), RIGHT, r"index \(1, 1\) is 5.0 instead of 4.0", 1),
        (RIGHT + 1, RIGHT, r"index \(0, 0\) is 2.0 instead of 1.0 \(4 of 4 are wrong\)", 4),
        (RIGHT.astype("float32"), RIGHT, r"float32\[2, 2\] instead of float64\[2, 2\]", 4),
        (RIGHT[0], RIGHT, r"float64\[2\] instead of float64\[2, 2\]", 4),
        (RIGHT, None, "a ndarray instead of None", 1),
        (None, RIGHT, "a NoneType instead of an array", 4),
        (None, RIGHT[:0], "a NoneType instead of an array", 1),
        ([RIGHT, RIGHT], [RIGHT, RIGHT], "", 0),
        ([RIGHT, RIGHT + 1], [RIGHT, RIGHT], "array 1: index", 4),
        ([RIGHT], [RIGHT, RIGHT], "1 arrays instead of 2", 8),
        (RIGHT, [RIGHT], "a ndarray instead of 1 arrays", 4),
        (np.array([np.nan]), np.array([1.0]), "index 0 is nan instead of 1.0", 1),
    ],
)
def test_what_is_wrong_is_found_and_counted(got, wanted, words, wrong):
    count, text = compare_results(got, wanted)
    assert re.match(words or "$", text)
    assert count == wrong


def test_the_lines_of_the_test():
    paths = {
        "shm": [
            SelfTestResult("all_reduce", "the combination", 12),
            SelfTestResult("barrier", "nobody leaves", 3),
        ],
        "zmq": [
            SelfTestResult(
                "all_reduce",
                "the combination",
                12,
                failures=[f"rank {rank}: wrong" for rank in range(5)],
            )
        ],
    }
    lines, is_good = outcome_lines(paths)
    assert not is_good
    assert lines == [
        "all_reduce         FAIL  the combination; 12 calls over shm and zmq",
        "    zmq: rank 0: wrong",
        "    zmq: rank 1: wrong",
        "    zmq: rank 2: wrong",
        "    and 2 more",
        "barrier            OK    nobody leaves; 3 calls over shm",
    ]
    assert outcome_lines({"shm": paths["shm"]})[1]
