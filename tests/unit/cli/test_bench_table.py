import argparse
from dataclasses import astuple, replace

import numpy as np
import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.cost_model import LINKS, SHM, predicted_seconds
from syncvar.algorithms.selection import choose
from syncvar.cli.bench import fit_constants
from syncvar.cli.bench_options import add_options, make_plan
from syncvar.cli.bench_table import (
    Half,
    Row,
    format_number,
    header,
    line,
    parse_size,
    rate,
    sizes,
    summary,
)
from syncvar.collectives.collective_registry import COLLECTIVES
from syncvar.core.errors import ConfigError
from syncvar.runtime.call_record import BUS_FACTORS


def chosen(*arguments):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("8", 8),
        ("4K", 4096),
        ("4k", 4096),
        ("64M", 1 << 26),
        ("1G", 1 << 30),
        ("2T", 2 << 40),
        ("64MB", 1 << 26),
        ("64MiB", 1 << 26),
        ("64mib", 1 << 26),
        ("1.5K", 1536),
        (" 16 ", 16),
        ("100B", 100),
    ],
)
def test_a_size(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "K", "-8", "8X", "8 8", "1e3", "0.3", "1.0001K", "0x10", "8iK", "٨"]
)
def test_no_size(text):
    if text == "٨":  # digits of other scripts are numbers to Python, and to us
        assert parse_size(text) == 8
        return
    with pytest.raises(ConfigError):
        parse_size(text)


def test_sizes_end_at_the_last_that_is_not_larger():
    assert sizes(8, 100) == [8, 16, 32, 64]
    assert sizes(8, 100, factor=10) == [8, 80]
    assert sizes(8, 11, factor=1.1) == [8, 9, 10, 11], "each is larger than the one before"
    assert sizes(0, 100, step=50) == [0, 50, 100]
    assert sizes(64, 64) == [64]
    assert sizes(8, 64 << 20, factor=2)[-1] == 64 << 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"factor": 1},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"step": 0},
        {"step": -1},
        {"factor": 2, "step": 8},
    ],
)
def test_sizes_that_never_get_there(wrong):
    with pytest.raises(ConfigError):
        sizes(8, 64, **wrong)


def test_the_first_size_is_not_larger_than_the_last():
    with pytest.raises(ConfigError, match="larger"):
        sizes(64, 8)


@pytest.mark.parametrize(
    ("name", "on_two", "on_eight"),
    [
        ("all_reduce", 1.0, 1.75),
        ("reduce_scatter", 0.5, 0.875),
        ("all_gather", 0.5, 0.875),
        ("all_to_all", 0.5, 0.875),
        ("gather", 0.5, 0.875),
        ("scatter", 0.5, 0.875),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
        ("send_recv", 1, 1),
    ],
)
def test_factors_of_the_bus_bandwidth(name, on_two, on_eight):
    factor = BUS_FACTORS[COLLECTIVES[name].bus]
    assert factor(2) == on_two
    assert factor(8) == on_eight


def test_what_is_shown_of_the_times_of_the_ranks():
    seconds = [3e-6, 1e-6, 8e-6]
    shown = [rate(seconds, 8000, 0.5, 0, 20, which) for which in range(4)]
    assert [half.time for half in shown] == [3, 4, 1, 8]
    assert [half.alg_bw for half in shown] == pytest.approx([8 / 3, 2, 8, 1])
    assert [half.bus_bw for half in shown] == pytest.approx([4 / 3, 1, 4, 0.5])
    assert {half.times for half in shown} == {shown[0].times}
    assert shown[0].times == pytest.approx((3, 4, 1, 8))


HALF = Half(123.456, 12.3456, 6.1728, 0, (123.0, 123.456, 120.0, 130.0), 20)
WRONG = Half(12.0, 2.0, 1.0, 17, (12.0, 12.0, 12.0, 12.0), 20)
UNCHECKED = Half(1.5, 0.0, 0.0, None, (1.5, 1.5, 1.5, 1.5), 20)


def test_the_heads_stand_above_the_columns():
    above, names, units = header(predicted=True).split("\n")
    row = line(Row(1 << 20, 1 << 18, "float32", "sum", -1, HALF, WRONG, 100.0), predicted=True)
    assert names.split() == [
        "#",
        "size",
        "count",
        "type",
        "redop",
        "root",
        *(["time", "algbw", "busbw", "#wrong"] * 2),
        "model",
    ]
    assert row.split() == [
        "1048576",
        "262144",
        "float32",
        "sum",
        "-1",
        "123.46",
        "12.35",
        "6.17",
        "0",
        "12.00",
        "2.00",
        "1.00",
        "17",
        "100.00",
    ]
    assert len(row) == len(names) == len(units)
    assert above.split() == ["#", "out-of-place", "in-place"]


def test_what_was_not_measured_has_no_number():
    row = line(Row(8, 2, "float32", "none", 0, UNCHECKED))
    assert row.split()[5:] == ["1.50", "0.00", "0.00", "N/A", "-", "-", "-", "N/A"]
    assert len(line(Row(8, 2, "float32", "none", 0, HALF, WRONG))) == len(row)


@pytest.mark.parametrize(
    "value", [0.0, 0.001, 9.994, 99.99, 9999.4, 12345.6, 99999.9, 1234567.0, 1.2e9, 3.4e15]
)
@pytest.mark.parametrize("width", [6, 7])
def test_a_number_fits_its_column(value, width):
    text = format_number(value, width)
    assert len(text) <= width + 1  # nearly a power of ten: rounding adds a digit
    assert float(text) == pytest.approx(value, rel=0.2, abs=0.005)


def test_the_summary():
    rows = [
        Row(8, 2, "float32", "sum", -1, HALF, WRONG),
        Row(8, 2, "float32", "sum", -1, UNCHECKED),
    ]
    wrong, average = summary(rows)
    assert wrong == 17
    assert average == pytest.approx((6.1728 + 1 + 0) / 3)


def test_names_of_dtypes_and_ops():
    assert make_plan(chosen("all_reduce", "-d", "float,double,half", "-o", "avg")).kinds == (
        ("float32", "mean"),
        ("float64", "mean"),
        ("float16", "mean"),
    )
    assert ("bool", "max") in make_plan(chosen("all_reduce", "-d", "all", "-o", "all")).kinds
    assert make_plan(chosen("broadcast", "-d", "int8")).kinds == (("int8", ""),)
    assert make_plan(chosen("all_reduce", "-b", "8", "-e", "4K", "-f", "8")).sizes == (
        8,
        64,
        512,
        4096,
    )
    assert make_plan(chosen("barrier")).sizes == (0,)
    assert make_plan(chosen("sendrecv")).collective.name == "send_recv"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all_reduc"], "did you mean all_reduce"),
        (["all_gather_object"], "unknown collective"),
        (["all_reduce", "-d", "float33"], "did you mean float32"),
        (["all_reduce", "-d", "bool"], "does not take op 'sum'"),
        (["all_reduce", "-o", "summ"], "did you mean sum"),
        (["all_reduce", "-n", "0"], "-n must be at least 1"),
        (["all_reduce", "-r", "x"], "-r must be a rank"),
        (["all_reduce", "-G", "1"], "no graphs"),
        (["all_reduce", "-b", "8Q"], "a size is"),
        (["all_reduce", "-b", "64", "-e", "8"], "larger"),
        (["broadcast", "--reproducible"], "for all_reduce"),
        (
            ["broadcast", "--algorithm", "owners"],
            "broadcast has no algorithm 'owners'; it has direct",
        ),
    ],
)
def test_options_that_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(chosen(*arguments))


@pytest.mark.parametrize("start", [LINKS, SHM])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    "collective", ["all_reduce", "broadcast", "all_gather", "all_to_all", "scatter", "exscan"]
)
def test_the_constants_behind_two_times_are_found(collective, size, start):
    behind = replace(
        start,
        latency=start.latency * 0.3,
        per_byte=start.per_byte * 4,
        per_reduced_byte=start.per_reduced_byte * 4,
        per_copied_byte=start.per_copied_byte * 4,
    )

    def predictor(count):
        chosen = choose(collective, count * 4, size, shared=start.shared).algorithm
        plans = build_all(collective, chosen, size, count=count)
        return lambda constants: predicted_seconds(plans, 4, constants)

    points = [(predict, predict(behind)) for predict in (predictor(2), predictor(1_000_000))]
    assert astuple(fit_constants(points, start)) == pytest.approx(astuple(behind), rel=1e-6)


def test_times_that_no_constants_explain():
    small, large = (lambda c: c.latency + 8 * c.per_byte), (lambda c: c.latency + 1e6 * c.per_byte)
    assert fit_constants([(small, 5e-3), (large, 1e-3)], LINKS) is None, "the larger is faster"
    assert fit_constants([(small, 5e-3), (small, 5e-3)], LINKS) is None, "the same twice"
    assert fit_constants([(small, 5e-3)], LINKS) is None


def test_a_picture_needs_a_package(monkeypatch):
    monkeypatch.setattr("syncvar.cli.bench_table.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        make_plan(chosen("all_reduce", "--plot", "x.png"))


def test_sizes_are_rounded_up_to_whole_pieces():
    assert COLLECTIVES["all_reduce"].shape(5, 4) == (5,)
    assert COLLECTIVES["all_gather"].shape(5, 4) == (2,)
    assert COLLECTIVES["reduce_scatter"].shape(5, 4) == (8,)
    assert COLLECTIVES["barrier"].shape(5, 4) == (0,)
    assert all(np.prod(one.shape(0, 3)) == 0 for one in COLLECTIVES.values())
