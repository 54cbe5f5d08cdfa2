"""Flight records of several ranks, by hand: what `syncvar explain` and `syncvar trace merge` make of them."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

import syncvar
from syncvar.cli.commands import main
from syncvar.cli.explain import divergences, explain_records
from syncvar.cli.flight_commands import merge_records
from syncvar.cli.record_files import as_record, calls_of, load
from syncvar.cli.wait_analysis import critical_path
from syncvar.core.errors import ConfigError, MismatchError, PeerLost, error_line
from syncvar.core.process_ids import SERVER_0
from syncvar.runtime.call_record import COLUMNS, CallInfo, ErrorFields, Event, error_fields
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import Communicator, begin_epochs
from syncvar.runtime.recorder import FORMAT, Recorder, RecordIdentity, record_name
from tests.support.paths import GOLDEN

PACKAGE = str(Path(syncvar.__file__).parent)
MS = 1_000_000
SUM, MAX, BARRIER = (
    ("all_reduce(sum, float32[12])", 11),
    ("all_reduce(max, float32[12])", 12),
    ("barrier", 13),
)
LOST = PeerLost(1, "box", "signal 9", status=-9)


def call(number, what, began, ended, state="done", *, group=0, error=None, thread=1):
    """Make an event; times in milliseconds."""
    words, digest = what
    fields = ErrorFields() if error is None else error_fields(error)
    return Event(
        words,
        group,
        number,
        digest,
        48,
        "shm direct",
        int(began * MS),
        int(ended * MS),
        state,
        thread,
        collective=words.partition("(")[0],
        **fields._asdict(),
    )


def data(rank, events, *, world=3, groups=None, reason="", boot="b", **changes):
    return {
        "format": FORMAT,
        "rank": rank,
        "world_size": world,
        "generation": 0,
        "job": "0123456789abcdef",
        "host": "box",
        "boot": boot,
        "process": 100 + rank,
        "reason": reason,
        "is_final": True,
        "clock_offset_ns": 0,
        "written_ns": 200 * MS,
        "written_wall_ns": 0,
        "is_whole": True,
        "groups": {
            str(group): members
            for group, members in ({0: list(range(world))} | (groups or {})).items()
        },
        "threads": {"1": {"name": "MainThread", "site": f"train.py:{10 + rank} in main"}},
        "columns": list(COLUMNS),
        "events": [list(event) for event in events],
    } | changes


def records(*each):
    return [as_record(one) for one in each]


def same(rank, count, first=0):
    """Return calls that every rank makes; rank r comes r ms late."""
    return [call(n, SUM, 10 * n + rank, 10 * n + 5) for n in range(first, count)]


def told():
    return MismatchError(
        "all_reduce(sum, float32[12]) (call 7): the ranks do not make the same call",
        {
            0: "all_reduce(sum, float32[12]) (call 7) at train.py:8 in <module>",
            1: "barrier (call 7) at train.py:6 in <module>",
        },
    )


def mismatch():
    failed = {"state": "failed", "error": told()}
    return [
        data(
            0,
            [*same(0, 6), call(6, SUM, 60, 65, **failed)],
            reason="uncaught MismatchError: no\nrank 0",
        ),
        data(
            1,
            [*same(1, 6), call(6, BARRIER, 61, 65, **failed)],
            reason="uncaught MismatchError: no\nrank 0",
        ),
        data(
            2,
            [*same(2, 6), call(6, SUM, 62, 65, **failed)],
            reason="uncaught MismatchError: no\nrank 0",
        ),
    ]


def exception():
    failed = {"state": "failed", "error": PeerLost(1, reason="uncaught ValueError: no")}
    return [
        data(0, [*same(0, 2), call(2, SUM, 20, 90, **failed)], reason="PeerLost: rank 1 was lost"),
        data(1, same(1, 2), reason="uncaught ValueError: no"),
        data(2, [*same(2, 2), call(2, SUM, 22, 90, **failed)], reason="PeerLost: rank 1 was lost"),
    ]


def killed():
    """Rank 1 was killed in call 3: rank 0 was past it, rank 2 was not."""
    failed = {"state": "failed", "error": LOST}
    return [
        data(0, [*same(0, 3), call(3, SUM, 30, 90, **failed)], reason=error_line(LOST)),
        data(2, [*same(2, 2), call(2, SUM, 22, 91, **failed)], reason=error_line(LOST)),
    ]


def ended():
    """Rank 1 has ended in order; the others wait in a call, and rank 0 in another one for its message."""
    failed = {
        "state": "failed",
        "error": PeerLost(
            1,
            "box",
            "finished",
            "it ended before all_reduce(sum, float32[12]) (call 3)",
            status=0,
        ),
    }
    message = ("recv(from rank 1, tag 0)", 9)
    pair = 9552367009143471357
    return [
        data(
            0,
            [
                *same(0, 2),
                call(2, SUM, 20, 90, **failed),
                call(0, message, 95, 96, group=pair, **failed),
            ],
            groups={pair: [1, 0]},
        ),
        data(2, [*same(2, 2), call(2, SUM, 22, 90, **failed)]),
    ]


def crossed():
    """Ranks 0 and 1 wait for each other in two groups."""
    groups = {3: [0, 1], 4: [0, 1]}
    return [
        data(0, [*same(0, 1), call(0, SUM, 20, 0, "started", group=3)], world=2, groups=groups),
        data(1, [*same(1, 1), call(0, BARRIER, 21, 0, "started", group=4)], world=2, groups=groups),
    ]


def waiting_in_a_ring(*, is_deadlock=True):
    """Each of three ranks waits for a message of the next one."""
    groups = {10 + rank: sorted([rank, (rank + 1) % 3]) for rank in range(3)}
    made = [(f"recv(from rank {(rank + 1) % 3}, tag 0)", 9) for rank in range(3)]
    error = MismatchError(f"{made[0][0]} (call 1): no", is_deadlock=is_deadlock)
    return [
        data(
            rank,
            [
                *same(rank, 1),
                call(0, made[rank], 22 - rank, 90, "failed", group=10 + rank, error=error),
            ],
            groups={group: groups[group] for group in groups if rank in groups[group]},
        )
        for rank in range(3)
    ]


def test_ranks_that_wait_for_one_another_have_not_parted():
    text, has_diverged = explain_records(records(*waiting_in_a_ring()))
    assert has_diverged
    assert (
        "deadlock: rank 0 waits for a message of rank 1, rank 1 for a message of rank 2, and rank 2 for a message of rank 0\n"
        in text
    )
    assert "divergence" not in text
    assert "also:" not in text
    for other in (waiting_in_a_ring(is_deadlock=False), waiting_in_a_ring()[:2]):
        assert "deadlock: rank" not in explain_records(records(*other))[0]


def skipped():
    """Rank 1 left a block of calls early."""
    first = [call(0, SUM, 1, 2), call(1000000, SUM, 10, 11)]
    gaps = [[1000000, 999999], [2000000, 1999998]]
    no = {"state": "failed", "error": MismatchError("no")}
    return [
        data(0, [*first, call(1000001, MAX, 20, 90, **no)], world=2, gaps={"0": gaps[:1]}),
        data(1, [*first, call(2000000, BARRIER, 30, 90, **no)], world=2, gaps={"0": gaps}),
    ]


def refused():
    return [
        data(
            0,
            [*same(0, 1), call(1, SUM, 10, 20, "failed", error=MismatchError("rank 1 refused"))],
            world=2,
        ),
        data(
            1,
            [
                *same(1, 1),
                call(1, ("all_reduce", 0), 11, 11, "failed", error=ConfigError("unknown op 'sun'")),
            ],
            world=2,
        ),
    ]


CASES = {
    "mismatch": (mismatch, 1),
    "exception": (exception, 1),
    "killed": (killed, 0),
    "ended": (ended, 1),
    "crossed": (crossed, 1),
    "skipped": (skipped, 1),
    "refused": (refused, 1),
    "agreed": (lambda: [data(rank, same(rank, 4)) for rank in range(3)], 0),
}


def write(folder, *each):
    for one in each:
        (folder / record_name(one["rank"], one["generation"])).write_text(json.dumps(one))


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_ended_without_a_call_has_parted_from_those_who_made_it(status):
    lost = PeerLost(1, "vm#1", "its end", "while in all_reduce", status=status)
    left = records(data(0, [*same(0, 2), call(2, SUM, 20, 90, "failed", error=lost)], world=2))
    assert [(one.call, one.absent) for one in divergences(left)] == [(2, (1,))]
    text, has_diverged = explain_records(left)
    assert has_diverged
    assert f"rank 1: ended (exit {status}) without call 3" in text


def test_a_rank_that_was_told_to_end_is_told_of_with_its_place():
    waits = data(
        0,
        [*same(0, 1), call(1, SUM, 10, 90, "failed", error=SystemExit(143))],
        world=2,
        reason="SystemExit: 143",
    )
    stack = [["/home/load.py", 7, "read"], ["/home/train.py", 49, "<module>"]]
    threads = {"1": {"name": "MainThread", "site": "a place unknown"}}  # its last call is over
    text, _ = explain_records(
        records(
            waits,
            data(1, same(1, 1), world=2, reason="SystemExit: 143", stack=stack, threads=threads),
        )
    )
    assert (
        "rank 1: never entered it; its call 1 was all_reduce(sum, float32[12]), done; it made no other call: ended by SIGTERM"
        in text
    )
    assert "done at 5.000 ms; it stood in user code, /home/load.py:7 < /home/train.py:49\n" in text
    assert "it stood at train.py:10 in main" in text, "the call it waits in"


def test_a_thread_that_waits_for_the_end_of_the_interpreter_is_no_place_in_a_program():
    site = "/usr/lib/python3.11/threading.py:1139 in _wait_for_tstate_lock"
    threads = {"1": {"name": "MainThread", "site": site}}
    stacks = ([["train.py", 7, "step"]], [["/usr/lib/python3.11/threading.py", 1139, "_shutdown"]])
    each = [
        data(rank, same(rank, 2), world=2, reason="SystemExit: 143", stack=stack, threads=threads)
        for rank, stack in enumerate(stacks)
    ]
    text, _ = explain_records(records(*each))
    assert text.count("it stood") == 1
    assert "it stood in user code, train.py:7" in text


@pytest.mark.parametrize("name", CASES)
def test_explain_says_what_happened(name, tmp_path, capsys):
    make, code = CASES[name]
    write(tmp_path, *make())
    assert main(["explain", str(tmp_path)]) == code
    text = capsys.readouterr().out
    golden = GOLDEN / f"explain_{name}.txt"
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"if this is right, write it to {golden}:\n{text}"
    assert main(["explain", *map(str, sorted(tmp_path.glob("*.json"), reverse=True))]) == code
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("make", "group", "number", "absent"),
    [
        (mismatch, 0, 6, ()),
        (exception, 0, 2, (1,)),
        (crossed, 3, 0, (1,)),
        (skipped, 0, 1000001, (1,)),
        (refused, 0, 1, ()),
    ],
)
def test_the_first_divergence(make, group, number, absent):
    first = divergences(records(*make()))[0]
    assert (first.group, first.call, first.absent) == (group, number, absent)


def test_who_is_held_up_by_the_lost_rank_has_an_excuse():
    assert divergences(records(*killed())) == []


def test_who_is_held_up_in_another_group_has_an_excuse():
    failed = {"state": "failed", "error": LOST}
    groups = {3: [1, 2]}
    each = [
        data(0, [*same(0, 1), call(1, SUM, 10, 90, **failed)], groups=groups),
        data(2, [*same(2, 1), call(0, SUM, 11, 91, **failed, group=3)], groups=groups),
    ]
    assert divergences(records(*each)) == []


def test_a_message_that_nobody_has_fetched_comes_last():
    each = mismatch()
    each[0]["events"].insert(1, list(call(0, ("send to rank 1, tag 0", 9), 7, 8, group=5)))
    for one in each[:2]:
        one["groups"]["5"] = [0, 1]
    assert [(one.group, one.call) for one in divergences(records(*each))] == [(0, 6), (5, 0)]


def test_what_lies_before_a_full_ring_is_not_known():
    each = [
        data(0, same(0, 9)),
        data(1, same(1, 9, 6), is_whole=False),
        data(2, same(2, 9, 8), is_whole=False),
    ]
    assert divergences(records(*each)) == []


def test_a_call_after_a_full_ring_was_not_entered():
    each = [
        data(0, [*same(0, 9), call(9, SUM, 95, 0, "started")], world=2),
        data(1, same(1, 9, 6), world=2, is_whole=False),
    ]
    assert [(one.call, one.absent) for one in divergences(records(*each))] == [(9, (1,))]


def test_a_record_of_the_middle_of_a_run_says_nothing_of_later():
    early = data(1, same(1, 2), world=2, is_final=False, written_ns=16 * MS)
    assert divergences(records(data(0, same(0, 5), world=2), early)) == []
    assert divergences(records(data(0, same(0, 5), world=2), early | {"is_final": True})) != []


def test_the_last_generation_is_explained():
    text, has_diverged = explain_records(records(*mismatch(), data(0, same(0, 1), generation=1)))
    assert not has_diverged
    assert "generation 1" in text


# -- the trace -------------------------------------------------------------------------------------


def test_the_trace_has_every_rank_operation_and_name():
    trace = json.loads(json.dumps(merge_records(records(*mismatch()))))
    events = trace["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"the world"}
    operations = [e for e in events if e.get("cat") == "operation"]
    assert len(operations) == 21
    first = min(operations, key=lambda e: e["ts"])
    assert (first["ph"], first["pid"], first["ts"], first["dur"]) == ("X", 0, 0.0, 5000.0)
    assert first["args"]["what"] == SUM[0]
    assert first["args"]["bytes"] == 48


def test_arrows_lead_from_the_last_to_come_to_the_ends_of_those_who_waited():
    events = merge_records(records(*[data(rank, same(rank, 1)) for rank in range(3)]))[
        "traceEvents"
    ]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == sum(e["ph"] == "s" for e in events)
    assert all(isinstance(ident, int) for ident in starts)  # Perfetto refuses other names
    assert set(starts) == set(ends)
    assert sorted((starts[key]["pid"], ends[key]["pid"]) for key in starts) == [(2, 0), (2, 1)]
    slices = [e for e in events if e.get("cat") == "operation"]
    for arrow in (*starts.values(), *ends.values()):
        around = [e for e in slices if e["pid"] == arrow["pid"] and e["tid"] == arrow["tid"]]
        assert any(e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] for e in around)
    assert all(starts[key]["ts"] <= ends[key]["ts"] for key in starts)
    waits = {e["pid"]: e["dur"] for e in events if e.get("cat") == "wait"}
    assert waits == {0: 2000.0, 1: 1000.0}


def test_calls_that_overlap_have_rows_of_their_own():
    overlapping = [
        call(0, SUM, 0, 10),
        call(1, SUM, 1, 9),
        call(2, SUM, 11, 12),
        call(0, SUM, 2, 3, group=5),
    ]
    events = merge_records(records(data(0, overlapping, groups={5: [0, 1]})))["traceEvents"]
    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append(event)
    assert len(rows) == 3
    for slices in rows.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(slices))


def test_what_has_not_ended_lasts_until_the_record_was_made():
    events = merge_records(records(*crossed()))["traceEvents"]
    assert [
        e["dur"] for e in events if e.get("cat") == "operation" and e["args"]["state"] == "started"
    ] == [180e3, 179e3]


def test_clocks_of_other_hosts_are_moved_and_said():
    far = data(1, same(1, 1), world=2, boot="c", host="far", clock_offset_ns=-5 * MS)
    each = records(data(0, same(0, 1), world=2), far)
    assert calls_of(each)[0][0][1].began_ns == -4 * MS
    assert (
        "the clocks of hosts box, far may differ: nobody has compared them"
        in explain_records(each)[0]
    )
    near = data(0, same(0, 1), world=2, clock_error_ns=0)
    far = data(1, same(1, 1), world=2, boot="c", host="far", clock_error_ns=20_000)
    more = data(2, same(2, 1), world=2, boot="c", host="far", clock_error_ns=10_000)
    text = explain_records(records(near, far, more))[0]
    assert "times of hosts box, far are those of one clock, within 10.0 us" in text


def test_merge_writes_a_file_at_once_or_none(tmp_path, capsys):
    write(tmp_path, *mismatch())
    assert main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "t.json")]) == 0
    assert "21 events of 3 ranks" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["job"] == "0123456789abcdef"
    assert main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if "flight" not in path.name) == [
        "t.json"
    ]


# -- files -----------------------------------------------------------------------------------------


def test_files_that_are_no_records_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="there is no flight record"):
        load([str(tmp_path)])
    with pytest.raises(ConfigError, match="No such file"):
        load([str(tmp_path / "x.json")])
    for text in (
        "",
        "{",
        "[]",
        "3",
        "{}",
        json.dumps({"format": "another"}),
        json.dumps(data(0, []) | {"events": [[1]]}),
    ):
        (tmp_path / "flight-rank0.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a flight record"):
            load([str(tmp_path)])


def test_records_of_two_jobs_are_not_mixed(tmp_path):
    write(tmp_path, data(0, []), data(1, [], job="f" * 32))
    with pytest.raises(ConfigError, match="of 2 jobs"):
        load([str(tmp_path)])


def test_the_later_of_two_records_of_a_rank_counts(tmp_path):
    (tmp_path / "a").mkdir()
    write(tmp_path, data(0, same(0, 2)))
    write(tmp_path / "a", data(0, same(0, 1), written_ns=1))
    assert len(load([str(tmp_path), str(tmp_path / "a")])[0].events) == 2


def test_columns_may_come_in_any_order_and_more_may_come():
    plain = data(0, same(0, 1))
    turned = plain | {
        "columns": ["new", *reversed(plain["columns"])],
        "events": [[0, *reversed(plain["events"][0])]],
    }
    assert as_record(turned) == as_record(plain)


def test_files_of_before_the_column_of_variables_can_be_read():
    plain = data(0, [one._replace(variable="w") for one in same(0, 1)])
    at = plain["columns"].index("variable")
    for row in (plain["columns"], *plain["events"]):
        del row[at]
    assert [event.variable for event in as_record(plain).events] == [""]


def test_servers_are_told_of_beside_ranks_and_part_from_nobody(tmp_path, capsys):
    served = [
        call(-1, ("push of rank 0", 0), 1, 2, group=-1),
        call(-1, ("pull of rank 1", 0), 3, 0, "started", group=-1),
    ]
    stack = [
        ["/x/syncvar/parameter_server/server/replicated_state.py", 5, "execute"],
        [f"{PACKAGE}/parameter_server/server_main.py", 9, "run"],
    ]
    left = [
        *mismatch(),
        data(SERVER_0, served[:1], groups={}, reason="rank 1 was lost: signal 9"),
        data(SERVER_0 + 1, served, groups={}, stack=stack),
    ]
    alone, _ = explain_records(records(*mismatch()))
    text, has_diverged = explain_records(records(*left))
    assert has_diverged
    assert text.splitlines()[0].startswith(
        "flight records of ranks 0-2 and servers 0, 1 of job 01234567, 3 ranks in the world"
    )
    at = text.splitlines().index("at the end")
    assert (
        alone.splitlines()[1 : alone.splitlines().index("at the end")]
        == text.replace("left none", "").splitlines()[1:at]
    )
    assert (
        "  server 0: after a request, push of rank 0, done at 2.000 ms\n    reason of its record: rank 1 was lost: signal 9\n"
        in text
    )
    assert (
        "  server 1: in a request, pull of rank 1, for 197.000 ms; it stood at a request, in /x/syncvar/parameter_server/server/replicated_state.py:5\n"
        in text
    )
    for one in left:
        (tmp_path / record_name(one["rank"])).write_text(json.dumps(one))
    (tmp_path / "flight-ready.json").write_text("not ours")
    assert sorted(record.rank for record in load([str(tmp_path)])) == [
        0,
        1,
        2,
        SERVER_0,
        SERVER_0 + 1,
    ]
    assert main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "t.json")]) == 0
    assert "24 events of 3 ranks and 2 servers" in capsys.readouterr().out
    names = [
        event["args"]["name"]
        for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    ]
    assert names == ["rank 0", "rank 1", "rank 2", "server 0", "server 1"]


def test_an_empty_record_is_explained():
    text, has_diverged = explain_records(records(data(0, [], world=1)))
    assert not has_diverged
    assert "rank 0: no operation" in text
    assert merge_records(records(data(0, [], world=1)))["traceEvents"]


@pytest.mark.parametrize("before", [0, 3, 1_500_000])
def test_the_last_complete_step_is_a_run_however_many_calls_were_made_before(before):
    records = []
    for rank in range(2):
        recorder, clock = Recorder(RecordIdentity(rank, 2)), 1_000
        group = Communicator(0, (0, 1), recorder, None)
        group.next_call = before

        def make(name, group=group):
            nonlocal clock
            info = CallInfo(CollectiveSpec(name), 0, (0, 1))
            group.recorder.add((info, group.next_call, clock, clock + 10, 1))
            group.next_call += 1
            clock += 20

        make("gather")
        for _ in range(3):
            begin_epochs([group], is_run=True)
            make("all_reduce")
            make("broadcast")
            begin_epochs([group], is_run=False)
            make("barrier")
        begin_epochs([group], is_run=True)  # without a call
        begin_epochs([group], is_run=False)
        make("barrier")
        records.append(as_record(json.loads(json.dumps(recorder.record()))))
    path = critical_path(records)
    assert path.title == "the last complete step"
    assert {part.label for part in path.parts} == {
        "all_reduce",
        "broadcast",
        "rank 1 outside of calls",
    }
    assert path.nanoseconds == 40
