"""The ledger: calls counted by kind and line, waiting, merging, files, tables and comparisons."""

import json

import pytest

from syncvar.core.errors import ConfigError
from syncvar.runtime import call_ledger
from syncvar.runtime.call_ledger import FORMAT, Ledger, compare_ledgers
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.recorder import Recorder, RecordIdentity

SUM = CollectiveSpec("all_reduce", "sum", size=8)
WRITE = CollectiveSpec("assign of variable 'w'", size=80, variable="w", access="assign")


def info(spec, members=(0, 1), nbytes=0):
    return CallInfo(spec, 0, members, 1, nbytes, "shm")


def call(recorder, about, ns=100, **_):
    """Make a call from a line of this function."""
    recorder.add((about, 1, 1000, 1000 + ns, 5))


def opened(rank=0):
    recorder, ledger = Recorder(), Ledger([rank])
    recorder.attach(ledger.counter)
    return recorder, ledger


def rows(ledger):
    return [(row.variable, row.collective, row.calls, row.nbytes) for row in ledger.rows]


def test_calls_are_counted_by_variable_collective_and_line():
    recorder, ledger = opened()
    small, write = info(SUM), info(WRITE)
    for _ in range(3):
        call(recorder, small)
        call(recorder, write)
    recorder.add((small, 1, 0, 50, 5))
    assert rows(ledger) == [
        ("w", "assign", 3, 240),
        ("", "all_reduce(sum)", 3, 24),
        ("", "all_reduce(sum)", 1, 8),
    ]
    first, _, here = ledger.rows
    assert first.site.startswith("tests/unit/runtime/test_call_ledger.py:")
    assert (first.function, here.function) == (
        "call",
        test_calls_are_counted_by_variable_collective_and_line.__name__,
    )
    assert first.ranks == "0, 1"
    assert [row.calls for row in ledger.by("variable")] == [3, 4]
    assert [(row.collective, row.calls) for row in ledger.by("call")] == [
        ("assign", 3),
        ("all_reduce(sum)", 4),
    ]
    assert sorted(row.calls for row in ledger.by("site")) == [1, 6]
    assert (ledger.totals().calls, ledger.totals().nbytes) == (7, 272)
    with pytest.raises(ConfigError, match="variable, site, call"):
        ledger.by("rank")


def test_a_started_call_belongs_to_the_line_that_started_it():
    recorder, ledger = opened()
    code = test_a_started_call_belongs_to_the_line_that_started_it.__code__
    recorder.add((info(SUM), 1, 0, 10, 5, code, 0))
    recorder.add((info(SUM), 1, 0, 10, 5, "", None))
    assert sorted(row.function for row in ledger.rows) == ["", code.co_name]
    assert len(recorder.events()) == 2


def test_calls_are_counted_while_a_ledger_is_open_and_cost_nothing_after():
    recorder = Recorder(stats="unused")
    plain = recorder.add
    slot = recorder.add_slot
    one, two = Ledger(), Ledger()
    recorder.attach(one.counter)
    recorder.attach(two.counter)
    assert slot[0] == recorder.add == two.counter.add
    call(recorder, info(SUM))
    recorder.detach(one.counter)
    call(recorder, info(SUM))
    pending = recorder.begin(info(WRITE), 3)
    assert two.totals().calls == 2
    recorder.detach(two.counter)
    assert recorder.add == plain == slot[0]
    call(recorder, info(SUM))
    pending.end()
    assert (one.totals().calls, two.totals().calls) == (1, 3)
    assert len(recorder.events()) == 4


def test_what_is_no_call_is_not_counted_and_failures_are():
    recorder, ledger = opened()
    recorder.note("joined")
    recorder.begin(CallInfo(CollectiveSpec("a question")), -1).end()
    recorder.begin(CallInfo(WRITE), -1).end()
    recorder.begin(info(SUM), 1).end(ValueError("x"))
    assert (ledger.totals().calls, ledger.totals().failed) == (2, 1)
    assert "1 failed" in str(ledger)


def test_waiting_is_the_time_beyond_the_fastest_call_of_the_kind():
    recorder, ledger = opened()
    about = info(SUM)
    for ns in (100, 400, 600):
        call(recorder, about, ns)
    call(recorder, info(WRITE), 10**9)
    waits = {row.collective: row.waiting_s for row in ledger.rows}
    assert waits == {"all_reduce(sum)": pytest.approx(800e-9), "assign": None}
    other_recorder, other = opened(1)
    for ns in (40, 40, 40):
        call(other_recorder, about, ns)
    merged = ledger.merge(other)
    row = next(row for row in merged.rows if row.collective == "all_reduce(sum)")
    assert merged.ranks == (0, 1)
    assert (row.calls, row.seconds) == (6, pytest.approx(1220e-9))
    assert row.waiting_s == pytest.approx((1220 - 6 * 40) * 1e-9)
    assert ledger.totals().calls == 4, "merging leaves the parts alone"


def test_calls_of_ever_new_sizes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(call_ledger, "_ENTRIES_MAX", 10)
    recorder, ledger = opened()
    for size in range(50):
        call(recorder, info(SUM._replace(size=size)))
    assert (ledger.totals().calls, ledger.totals().nbytes) == (50, sum(range(50)))
    assert len(ledger.counter.entries) <= 11


def test_a_ledger_in_a_file_is_the_same(tmp_path):
    recorder, ledger = opened(3)
    call(recorder, info(SUM))
    call(recorder, info(WRITE, members=(0, 1, 2)))
    ledger.save(tmp_path / "x.json")
    again = Ledger.load(tmp_path / "x.json")
    assert (again.rows, again.ranks, str(again)) == (ledger.rows, (3,), str(ledger))
    assert Ledger().merge(again, again).totals().calls == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "TypeError"),
        ('{"format": "y"}', "its format is 'y'"),
        (json.dumps({"format": FORMAT, "ranks": [0], "columns": [], "entries": []}), "not in list"),
    ],
)
def test_a_file_that_is_none_is_an_error(tmp_path, text, reason):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=f"is not a ledger: .*{reason}"):
        Ledger.load(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="No such file"):
        Ledger.load(tmp_path / "y.json")


def test_ledgers_are_compared_by_function_and_not_by_line():
    old_recorder, old = opened()
    new_recorder, new = opened()
    for recorder, count in ((old_recorder, 2), (new_recorder, 3)):
        for _ in range(count):
            call(recorder, info(WRITE))
    old_recorder.add((info(SUM), 1, 0, 10, 5))
    changes = {
        (one.variable, one.collective, one.function, one.unit): (one.old, one.new)
        for one in compare_ledgers(old, new)
    }
    here = test_ledgers_are_compared_by_function_and_not_by_line.__name__
    assert changes == {
        ("w", "assign", "call", "calls"): (2, 3),
        ("w", "assign", "call", "bytes"): (160, 240),
        ("", "all_reduce(sum)", here, "calls"): (1, 0),
        ("", "all_reduce(sum)", here, "bytes"): (8, 0),
    }


def test_a_rank_writes_its_ledger_at_the_end(tmp_path):
    recorder = Recorder(RecordIdentity(1, 2), ledger=str(tmp_path / "ledgers"))
    call(recorder, info(SUM))
    recorder.closed()
    ledger = Ledger.load(tmp_path / "ledgers" / "ledger-rank1.json")
    assert (ledger.ranks, ledger.totals().calls) == ((1,), 1)


def test_a_long_table_is_cut():
    recorder, ledger = opened()
    for number in range(40):
        call(recorder, info(WRITE._replace(variable=f"v{number}")))
    lines = str(ledger).splitlines()
    assert len(lines) == 34
    assert lines[-2] == "  10 more rows"
