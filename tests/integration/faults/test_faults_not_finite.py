"""One rank brings NaN or infinity (F32): with `check_finite` that rank and the variable are named; without it all ranks get the same bytes."""

import pytest

from tests.support.fault_table import bound_s
from tests.support.launching import check_bound

CALLS = """
import sys
import numpy as np
import probe, syncvar as sv

sv.init()
odd = probe.RANK == 1
bad = np.float32("nan") if "nan" in sys.argv else np.float32("-inf")
x = np.ones((4, 5), np.float32)
if odd:
    x[2, 3] = bad
    x.view(np.uint32)[2, 3] |= 0x123 if "nan" in sys.argv else 0  # a payload that has to be the same everywhere, or nowhere
strategy = sv.MirroredStrategy()
with strategy.scope():
    mirrored = sv.Variable(np.zeros((4, 5), np.float32), name="mirrored", synchronization="ON_WRITE", aggregation="SUM")
    counted = sv.Variable(np.zeros((4, 5), np.float32), name="counted", synchronization="ON_READ", aggregation="SUM")
    auto = sv.Variable(np.zeros((4, 5), np.float32), name="auto", aggregation="SUM")
CALLS = {
    "all_reduce": lambda: sv.all_reduce(x),
    "structure": lambda: sv.all_reduce({"a": 1.0, "b": x}, "mean"),
    "reduce": lambda: sv.reduce(x),
    "reduce_scatter": lambda: sv.reduce_scatter(x),
    "scan": lambda: sv.scan(x),
    "mirrored": lambda: strategy.run(lambda: mirrored.assign_add(x)),
    "auto": lambda: strategy.run(lambda: auto.assign_add(x)),
}
for name, call in CALLS.items():
    for turn in range(4):  # also when a call like it has been prepared
        sv.barrier()
        probe.note("enter", case=name)
        try:
            call()
            probe.note("told", case=name, error="", text="")
        except sv.SyncvarError as error:
            probe.note("told", case=name, error=type(error).__name__, text=str(error))
total = sv.all_reduce(np.ones(3))
assert total.tolist() == [2.0] * 3, total
digest = [sv.all_reduce(x).tobytes().hex(), sv.all_reduce(x, "max").tobytes().hex(), mirrored.local_value().tobytes().hex()] if "off" in sys.argv else []
if digest:
    assert sv.all_gather_object(digest) == [digest] * 2
try:
    strategy.run(lambda: counted.assign_add(x))
    probe.note("told", case="counted", error="", text="")
except sv.SyncvarError as error:
    probe.note("told", case="counted", error=type(error).__name__, text=str(error))
"""
NAMED = {
    "all_reduce": "all_reduce",
    "structure": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "scan": "scan",
    "mirrored": "assign_add of variable 'mirrored'",
    "auto": "assign_add of variable 'auto'",
    "counted": "assign_add of variable 'counted'",
}


@pytest.mark.parametrize(
    ("mode", "what", "transport"),
    [
        ("raise", "nan", "auto"),
        ("warn", "inf", "auto"),
        ("off", "nan", "auto"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("raise", "inf", "zmq"), ("off", "nan", "zmq"))
        ),
    ],
)
def test_f32_what_is_not_finite(launch, mode, what, transport):
    job = launch(
        CALLS,
        workers=2,
        arguments=[what, mode],
        env={"SYNCVAR_CHECK_FINITE": mode, "SYNCVAR_TRANSPORT": transport},
    )
    assert job.wait() == 0, str(job)
    told = job.events("told")
    for name, words in NAMED.items():
        here = [event for event in told if event["case"] == name]
        own, other = ([event for event in here if event["rank"] == rank] for rank in (1, 0))
        assert own, str(job)
        assert other, str(job)
        if mode != "raise":
            assert {event["error"] for event in here} == {""}, f"{name}: {job}"
            continue
        assert {event["error"] for event in own} == {"ConfigError"}, f"{name}: {job}"
        for event in own:
            assert (
                f"1 of 20 elements of rank 1's input are not finite in {words}; the first one, at [2, 3]"
                in event["text"]
            ), f"{name}: {event}"
        if name != "counted":  # that is this rank's own copy: no other takes part
            assert {event["error"] for event in other} == {"MismatchError"}, f"{name}: {job}"
            entered = [event["at"] for event in job.events("enter") if event["case"] == name]
            check_bound(
                f"F32-{name}", max(event["at"] for event in here) - max(entered), bound_s("F32")
            )
            for event in other:
                assert "rank 1" in event["text"], f"{name}: {event}"
                assert "not finite" in event["text"], f"{name}: {event}"
    said = [line for line in job.err.split("\n") if "input are not finite" in line]
    if mode == "warn":
        assert {line.split("not finite in ")[1].split(";")[0] for line in said} == set(
            NAMED.values()
        ), str(job)
        assert len(said) == len(set(said)), f"each of them once in half a minute\n{job}"
        assert all("of rank 1's input" in line for line in said), str(job)
    if mode == "off":
        assert not said, str(job)
