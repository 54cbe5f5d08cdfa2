"""Ranks that do not make the same calls: every rank is told within the bound, by rank, call and file:line.

F09 a rank that is late, F30 the same call with other arguments, F31 other calls.
"""

import re

import pytest

from tests.support.launching import check_bound

BOUND_S = 0.5
ARBITER_S = 1.0


@pytest.fixture(params=["auto", "zmq"], autouse=True)
def path(request, monkeypatch):
    """Each of these tests, in shared memory and over links."""
    monkeypatch.setenv("SYNCVAR_TRANSPORT", request.param)


ARGUMENTS = """
import numpy as np
import probe, syncvar as sv

rank = sv.rank()
odd = rank == 1
strategy = sv.MirroredStrategy()
with strategy.scope():
    first, second = (
        sv.Variable(0.0, name=name, synchronization=sv.VariableSynchronization.ON_WRITE,
                    aggregation=sv.VariableAggregation.SUM)
        for name in ("first", "second")
    )
x = np.arange(12, dtype=np.float32)

CASES = {
    "op": lambda: sv.all_reduce(x, "max" if odd else "sum"),
    "dtype": lambda: sv.all_reduce(x.astype(np.float64) if odd else x),
    "count": lambda: sv.all_reduce(x[:11] if odd else x),
    "shape": lambda: sv.all_reduce(x.reshape(3, 4) if odd else x.reshape(4, 3)),
    "root": lambda: sv.broadcast(x, root=1 if odd else 0),
    "name": lambda: strategy.run(lambda: (second if odd else first).assign_add(1.0)),
    "collective": lambda: sv.barrier() if odd else sv.all_reduce(x),
    "broadcast-shape": lambda: sv.broadcast(x[:11] if odd else x),
    "argument": lambda: sv.all_reduce(x, "sun" if odd else "sum"),
    "gather-dtype": lambda: sv.all_gather(x.astype(np.int32) if odd else x),
    "reduce": lambda: sv.reduce(x[:11] if odd else x, root=2),  # the part of rank 0 needs nobody
    "scan": lambda: sv.scan(x[:11] if odd else x),
}
for name, call in CASES.items():
    sv.barrier()
    probe.note("enter", case=name)
    try:
        call()
        probe.note("told", case=name, error="nothing", text="", table={})
    except sv.SyncvarError as error:
        table = {str(key): words for key, words in getattr(error, "table", {}).items()}
        probe.note("told", case=name, error=type(error).__name__, text=str(error), table=table)
    total = sv.all_reduce(x + rank)
    assert total.tolist() == (3 * x + 3).tolist(), (name, total)
    values = [float(first.local_value()), float(second.local_value())]
    assert sv.all_gather_object(values) == [values] * 3, name
probe.note("values", values=values)
"""

DIFFERENT = {
    "op": ("all_reduce(sum, float32[12])", "all_reduce(max, float32[12])"),
    "dtype": ("float32", "float64"),
    "count": ("float32[12]", "float32[11]"),
    "shape": ("[4, 3]", "[3, 4]"),
    "root": ("broadcast(root 0", "broadcast(root 1"),
    "name": ("first", "second"),
    "collective": ("all_reduce", "barrier"),
    "broadcast-shape": ("[12]", "[11]"),
    "gather-dtype": ("float32", "int32"),
    "reduce": ("float32[12]", "float32[11]"),
    "scan": ("float32[12]", "float32[11]"),
}


def test_f30_other_arguments(launch):
    job = launch(ARGUMENTS, workers=3)
    assert job.wait() == 0, str(job)
    told = job.events("told")
    for name, (common, odd) in DIFFERENT.items():
        here = {event["rank"]: event for event in told if event["case"] == name}
        assert set(here) == {0, 1, 2}, str(job)
        for event in here.values():
            assert event["error"] == "MismatchError", f"{name}: {event}\n{job}"
            assert set(event["table"]) == {"0", "1", "2"}, f"{name}: {event}"
            assert common in event["table"]["0"], f"{name}: {event}"
            assert common in event["table"]["2"], f"{name}: {event}"
            assert odd in event["table"]["1"], f"{name}: {event}"
        entered = max(event["at"] for event in job.events("enter") if event["case"] == name)
        check_bound(f"F30-{name}", max(event["at"] for event in here.values()) - entered, BOUND_S)
    for event in job.events("values"):
        assert event["values"] == [0.0, 0.0], "a refused write changed a variable"
    # An argument that is wrong in itself is refused where it is given, and the others hear of it.
    here = {event["rank"]: event for event in job.events("told") if event["case"] == "argument"}
    assert here[1]["error"] == "ConfigError", str(job)
    assert "'sun'" in here[1]["text"], str(job)
    for rank in (0, 2):
        assert here[rank]["error"] == "MismatchError", str(job)
        assert "rank 1" in here[rank]["text"], str(job)
        assert "'sun'" in here[rank]["text"], str(job)


CALLS = """
import numpy as np
import probe, syncvar as sv

rank = sv.rank()
x = np.arange(12, dtype=np.float32)


def attempt(case, *calls):
    sv.barrier()
    probe.note("enter", case=case)
    for number, call in enumerate(calls):
        try:
            call()
            probe.note("told", case=case, number=number, error="nothing", text="", table={})
        except sv.SyncvarError as error:
            table = {str(key): words for key, words in getattr(error, "table", {}).items()}
            probe.note("told", case=case, number=number, error=type(error).__name__, text=str(error), table=table)
    assert sv.all_reduce(1) == 3, case


order = sv.new_group([0, 1, 2])
reduce, wait = (lambda: sv.all_reduce(x, group=order)), (lambda: sv.barrier(group=order))
attempt("order", *((wait, reduce) if rank == 1 else (reduce, wait)))
assert sv.all_reduce(1, group=order) == 3

skip = sv.new_group([0, 1, 2])
reduce, wait = (lambda: sv.all_reduce(x, group=skip)), (lambda: sv.barrier(group=skip))
attempt("skip", *((wait,) if rank == 1 else (reduce,)))

left, right = sv.new_group([0, 1]), sv.new_group([1, 0])
a, b = (lambda: sv.all_reduce(x, group=left)), (lambda: sv.all_reduce(x, group=right))
attempt("two groups", *{0: (a, b), 1: (b, a), 2: ()}[rank])
if rank < 2:
    assert sv.all_reduce(1, group=left) == 2
    assert sv.all_reduce(1, group=right) == 2

pairs = [sv.new_group([0, 1]), sv.new_group([1, 2]), sv.new_group([2, 0])]
attempt("three ranks", lambda: sv.barrier(group=pairs[rank]))

between, everyone = sv.new_group([0, 1]), sv.new_group([0, 1, 2])
attempt("small and large", lambda: sv.barrier(group=between if rank == 0 else everyone))
"""


def test_f31_other_calls(launch):
    job = launch(CALLS, workers=3)
    assert job.wait() == 0, str(job)
    told = job.events("told")

    def case(name, ranks, number=0, named=None):
        here = {
            event["rank"]: event
            for event in told
            if event["case"] == name and event["number"] == number
        }
        assert set(here) == set(ranks), f"{name}: {job}"
        for event in here.values():
            assert event["error"] == "MismatchError", f"{name}: {event}\n{job}"
            for rank in named or ranks:
                assert "script.py:" in event["table"][str(rank)], f"{name}: {event}"
                assert "(call " in event["table"][str(rank)], f"{name}: {event}"
        if number == 0:
            entered = max(event["at"] for event in job.events("enter") if event["case"] == name)
            check_bound(
                f"F31-{name}", max(event["at"] for event in here.values()) - entered, ARBITER_S
            )
        return here

    for name in ("order", "skip"):
        here = case(name, (0, 1, 2))
        assert all("all_reduce" in event["table"]["0"] for event in here.values()), str(job)
        assert all("barrier" in event["table"]["1"] for event in here.values()), str(job)
    case("order", (0, 1, 2), 1)
    for name, ranks in (("two groups", (0, 1)), ("three ranks", (0, 1, 2))):
        here = case(name, ranks)
        assert all("deadlock" in event["text"] for event in here.values()), str(job)
    case("two groups", (0, 1), 1)
    case(
        "small and large", (0, 1, 2), named=(0, 1)
    )  # rank 2 waits too, but is not part of the circle


EXTRA = """
import probe, syncvar as sv

sv.all_reduce(1)
probe.open_gate(f"done-{probe.RANK}")
for rank in range(3):  # nobody goes on while another one is still in the first call
    probe.gate(f"done-{rank}")
if sv.rank() == 1:
    probe.note("finishing")
else:
    probe.note("enter")
    try:
        sv.all_reduce(1)
    except Exception as error:
        probe.raised(error)
        probe.open_gate(f"told-{probe.RANK}")
        probe.gate(f"told-{2 - probe.RANK}")  # each hears of rank 1, not of the other one that ends because of it
        raise
"""


def test_f31_an_extra_call_at_the_end(launch):
    job = launch(EXTRA, workers=3)
    assert job.wait() == 70, str(job)
    raised = job.events("raised")
    assert {event["rank"] for event in raised} == {0, 2}, str(job)
    for event in raised:
        assert (event["error"], event["lost"], event["reason"]) == ("PeerLost", 1, "finished"), str(
            job
        )
        assert "all_reduce" in event["text"], str(job)
    begun = max(event["at"] for event in job.events() if event["what"] in ("finishing", "enter"))
    check_bound("F31-extra call", raised[-1]["at"] - begun, ARBITER_S)


LATE = """
import time
import probe, syncvar as sv

sv.all_reduce(1, timeout=60.0)
if sv.rank() == 1:
    time.sleep(30)
probe.note("enter")
try:
    sv.all_reduce([1.0, 2.0])
except Exception as error:
    probe.note("missing", missing=list(error.missing))
    probe.raised(error)
    raise
"""


def test_f09_a_late_rank(launch):
    job = launch(LATE, workers=3, env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "1.8"})
    assert job.wait() == 70, str(job)
    raised = {event["rank"]: event for event in job.events("raised")}
    assert set(raised) == {0, 2}, str(job)
    for event in raised.values():
        assert event["error"] == "DeadlineExceeded", str(job)
        assert "rank 1" in event["text"], str(job)
        assert "all_reduce(sum, float64[2]) (call 2)" in event["text"], str(job)
    assert all(event["missing"] == [1] for event in job.events("missing")), str(job)
    entered = min(event["at"] for event in job.events("enter"))
    last = max(event["at"] for event in raised.values()) - entered
    assert last > 1.7
    check_bound("F09-late rank", last, 2.0)
    warning = [line for line in job.report.split("\n") if re.search("ha(s|ve) been waiting", line)]
    assert len(warning) == 1, str(job)
    assert re.search(
        r"ranks? (0|2|0, 2) ha(s|ve) been waiting 1 s in all_reduce\(sum, float64\[2\]\) \(call 2\)",
        warning[0],
    ), str(job)
    assert "script.py:" in warning[0], str(job)
    assert "rank 1" in warning[0], str(job)
    assert re.search("ha(s|ve) been waiting", job.report).start() < job.report.index("evidence"), (
        str(job)
    )
