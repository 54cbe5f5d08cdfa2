"""Totals of calls: counted by rank in classes of size, put together by the launcher, shown in few lines."""

import json

import pytest

from syncvar.collectives.collective_registry import COLLECTIVES
from syncvar.runtime.call_record import (
    BUS_FACTORS,
    CallInfo,
    Totals,
    bus_factor,
    size_class,
    size_of,
)
from syncvar.runtime.collective_spec import CollectiveSpec, spec_of
from syncvar.runtime.recorder import RING, Recorder, RecordIdentity
from syncvar_launcher.job.job_files import merge_totals, read_totals, totals_table


def told(what, nbytes=0, members=(0, 1), path="shm", group=0):
    return CallInfo(spec_of(what), group, members, 1, nbytes, path)


def label(collective, op="", size=-1):
    return CollectiveSpec(collective, op, size=size, text=lambda spec: f"{spec.collective}(...)")


@pytest.mark.parametrize(
    ("call", "nbytes", "size"),
    [
        (told(label("all_reduce", "sum", 8), 8), 8, 8),
        (told(label("all_reduce", "sum", 6)), 999, 6),
        (told(label("all_reduce", "max", 40), path="hosts"), 120, 40),
        (told(label("all_to_all", size=4000), 2000), 2000, 4000),
        (told(label("all_gather"), 4000), 4000, 8000),
        (told(label("all_gather")), 8240, 8240),
        (told(label("all_gather"), path="hosts"), 65920, -1),
        (told("barrier"), 0, 0),
    ],
)
def test_the_size_of_a_call_is_as_nccl_tests_counts_it(call, nbytes, size):
    assert size_of(call, nbytes) == size


def test_classes_of_sizes():
    assert [size_class(n) for n in (0, 1, 16, 18, 257, 1 << 20, (1 << 20) + 120, 1 << 60)] == [
        0,
        16,
        16,
        256,
        256,
        1 << 20,
        1 << 20,
        1 << 32,
    ]


def test_the_factors_are_those_of_the_bench():
    for name, one in COLLECTIVES.items():
        function = one.names[0]
        assert bus_factor(function, 6) == (BUS_FACTORS[one.bus](6) if one.bus else 0.0), name
        assert bus_factor(function, 0) == 0.0


def test_works_that_have_not_ended_are_looked_at_a_few_times_only():
    looks = 0

    class Started:
        info = told("barrier")

        @property
        def state(self):
            nonlocal looks
            looks += 1
            return "started"

    totals = Totals()
    for _ in range(5_000):
        totals.add(Started())
    assert looks < 2 * 5_000
    assert totals.rows() == []


def test_more_calls_are_counted_than_the_ring_holds(tmp_path):
    recorder = Recorder(RecordIdentity(1, 2, 3), stats=str(tmp_path))
    small = told(label("all_reduce", "sum", 8), 8)
    for number in range(RING + 952):
        recorder.add((small, number, 100, 150, 0))
    waiting = recorder.begin(told(label("broadcast", size=4000)), 1)
    done = recorder.begin(told("barrier"), 2)
    done.end()
    failed = recorder.begin(told(label("all_reduce", "sum", 8)), 3)
    failed.end(ValueError("x"))
    recorder.note("joined")
    for number in range(600):  # others are put together meanwhile
        recorder.begin(told(label("send", size=8), path="links"), number).end()
    waiting.end()
    recorder.closed()
    rows = {
        (row["call"], row["class"]): row
        for row in json.loads((tmp_path / "stats-1.3.json").read_text())["rows"]
    }
    assert set(rows) == {("all_reduce(sum)", 16), ("broadcast", 4096), ("barrier", 0), ("send", 16)}
    assert rows["all_reduce(sum)", 16]["calls"] == 3001
    assert rows["all_reduce(sum)", 16]["nbytes"] == 8 * 3001
    assert rows["all_reduce(sum)", 16]["failed"] == 1
    assert rows["all_reduce(sum)", 16]["ns"] >= 3000 * 50
    assert rows["send", 16]["calls"] == 600
    assert len(recorder.events()) == RING, "the ring is as ever"


def test_nothing_is_counted_where_nobody_asks():
    recorder = Recorder()
    assert type(recorder.add).__name__ == "builtin_function_or_method", "the ring's own, as ever"


def row(rank, call="all_reduce(sum)", ns=10**9, calls=10, nbytes=10 * 10**9, end=1 << 32, **more):
    return {
        "call": call,
        "group": 0,
        "ranks": "0-3",
        "size": 4,
        "class": end,
        "calls": calls,
        "nbytes": nbytes,
        "ns": ns,
        "failed": 0,
    } | more


def test_ranks_are_put_together():
    rows = merge_totals(
        {
            rank: [
                row(rank, ns=(1 if rank == 2 else 3) * 10**9),
                row(rank, "barrier", 1000, nbytes=0, end=0),
            ]
            for rank in range(4)
        }
    )
    assert [one["call"] for one in rows] == ["all_reduce(sum)", "barrier"]
    first, barrier = rows
    assert (first["calls"], first["nbytes"], first["min_s"], first["mean_s"], first["max_s"]) == (
        10,
        10**10,
        1.0,
        2.5,
        3.0,
    )
    assert first["waiting"] == pytest.approx(0.6)
    assert (first["algbw"], first["busbw"]) == (pytest.approx(4.0), pytest.approx(6.0))
    assert barrier["algbw"] is barrier["busbw"] is None
    twice = merge_totals({0: [row(0), row(0)]})
    assert (twice[0]["calls"], twice[0]["waiting"]) == (20, None), (
        "a rank that met anew; nobody to compare with"
    )
    unknown = merge_totals({0: [row(0, nbytes=-1)], 1: [row(1)]})[0]
    assert (unknown["nbytes"], unknown["algbw"]) == (None, None)


def test_the_table_has_at_most_twenty_lines():
    told_by = {
        rank: [row(rank, f"call{number}", ns=number) for number in range(40)] for rank in range(2)
    }
    lines = totals_table(merge_totals(told_by), [2, 3]).splitlines()
    assert len(lines) <= 20
    assert "26 more kinds" in lines[-3]
    assert lines[-1] == "  ranks 2, 3 sent no totals"
    assert totals_table([]) == "syncvar: no calls to add up\n"
    assert totals_table([], [0, 1]) == "syncvar: no totals: ranks 0, 1 ended before writing them\n"


def test_files_that_are_none_are_left_out(tmp_path):
    (tmp_path / "stats-0.0.json").write_text(json.dumps({"rank": 0, "rows": [row(0)]}))
    for number, text in enumerate(
        (
            "",
            "[]",
            "{}",
            '{"rank": 1, "rows": [{}]}',
            '{"rank": "x", "rows": []}',
            '{"rank": 1, "rows": 5}',
            "\x00",
        )
    ):
        (tmp_path / f"stats-9.{number}.json").write_text(text)
    assert list(read_totals(tmp_path)) == [0]
    text = totals_table(merge_totals({0: [row(0, call="\x1b[2J" * 50, ranks="\x1b")]}))
    assert "\x1b" not in text
