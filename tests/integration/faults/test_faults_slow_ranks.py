"""Ranks that are stopped for long and go on (F08), hold Python's lock in C (F10), or are slow (F11)."""

import re
import signal
import subprocess
import sys
import time

import pytest

from syncvar.core.errors import HandshakeError
from syncvar.core.exit_status import error_exit_code
from tests.support.fault_table import bound_s
from tests.support.launching import PATIENT, check_bound, last_exception, line_of

WOKEN = """
import numpy as np
import probe, syncvar as sv

variable = sv.Variable(np.zeros(1000), name="v", synchronization="ON_WRITE", aggregation="SUM")
resident = sv.empty(1000)
x = np.full(1000, probe.RANK + 1.0)
steps = 0
try:
    while True:
        variable.assign_add(x)
        sv.all_reduce(x, out=resident)
        assert resident.tolist() == [6.0] * 1000
        steps += 1
        if steps == 20:
            probe.note("ready")
            if probe.RANK == 0:
                probe.gate("stopped")  # holds the call back: rank 1 is stopped inside it
except sv.SyncvarError as error:
    before = variable.local_value().copy()
    probe.raised(error)
    probe.gate("woken")
    told = probe.failure(sv.all_reduce, 1)
    kept = bool((variable.local_value() == before).all()) and bool((before == before[0]).all())
    probe.note("kept", kept=kept, value=float(before[0]), steps=steps, told=type(told).__name__)
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_f08_a_rank_that_wakes_when_it_has_been_given_up_is_fenced(launch, transport):
    job = launch(
        WOKEN, workers=3, env={"SYNCVAR_TRANSPORT": transport, "SYNCVAR_ABORT_GRACE_S": "20"}
    )
    job.await_events("ready", 3)
    stopped = job.kill_rank(1, signal.SIGSTOP)
    job.open_gate("stopped")
    job.await_events("raised", 2)
    last, raised = last_exception(job, [0, 2])
    (began,) = (event["at"] for event in job.events("began", rank=1))
    check_bound(f"F08-{transport}", last - stopped, bound_s("F08"))
    for event in raised.values():
        assert (event["error"], event["lost"]) == ("PeerLost", 1), str(job)
        lasted = float(re.match(r"silent for (\S+) s: ", event["reason"])[1])
        # Its last sign of life may have come some time before it was stopped.
        assert 1.5 <= lasted <= event["at"] - began, f"the limit is 1.5 s or more\n{job}"
    woken = job.kill_rank(1, signal.SIGCONT)
    (fenced,) = job.await_events("raised", 1, rank=1)
    job.open_gate("woken")
    assert job.wait() == 70, str(job)
    check_bound(f"F08-{transport} fenced", fenced["at"] - woken, bound_s("F08"))
    assert fenced["error"] == "HandshakeError", str(job)
    assert "rank 1 was given up, silent for" in fenced["text"], str(job)
    assert error_exit_code(HandshakeError("")) == 76
    kept = {event["rank"]: event for event in job.events("kept")}
    assert set(kept) == {0, 1, 2}, str(job)
    for rank in (0, 2):
        assert kept[rank]["kept"], str(job)
        assert kept[rank]["value"] in (
            6.0 * kept[rank]["steps"],
            6.0 * kept[rank]["steps"] + 6.0,
        ), str(job)
    assert {event["told"] for event in kept.values()} == {"GroupBroken"}, str(job)
    first = job.report.split("syncvar: rank 1 on ")[-1].split("\n")[0]
    assert ": silent for" in first, f"what it said when it woke is no cause\n{job}"


NO_LINK_YET = """
import numpy as np
import probe, syncvar as sv

sv.init()
probe.note("ready")
probe.gate("stopped", 60)
for step in range(1, 4):
    assert sv.all_reduce(np.full(300_000, float(step))).tolist() == [3.0 * step] * 300_000
probe.note("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "hosts", "stopped_s"),
    [
        ("zmq", 2, 2.0),
        ("zmq", 1, 4.0),
        ("auto", 1, 4.0),
        ("zmq", 2, 4.0),
        ("auto", 2, 4.0),
    ],
)
def test_f07_a_rank_that_is_stopped_answers_new_links_when_it_goes_on(
    launch, transport, hosts, stopped_s
):
    """The deadline of a handshake with a stranger is shorter, and says nothing of a rank."""
    limits = {
        "SYNCVAR_LOST_AFTER_S": "60",
        "SYNCVAR_SUSPECT_AFTER_S": "50",
        "SYNCVAR_HANDSHAKE_TIMEOUT_S": "0.3",
    }
    patience = {
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
        "SYNCVAR_STALL_WARNING_S": "60",
        "SYNCVAR_TRANSPORT": transport,
    }
    job = launch(
        NO_LINK_YET, workers=3, options=["--fake-hosts", str(hosts)], env={**limits, **patience}
    )
    job.await_events("ready", 3)
    job.kill_rank(1, signal.SIGSTOP)
    job.open_gate("stopped")
    time.sleep(stopped_s)
    job.kill_rank(1, signal.SIGCONT)
    assert job.wait(120) == 0, str(job)
    assert len(job.events("right")) == 3, str(job)


HOLDING = """
import ctypes, itertools, sys
import probe, syncvar as sv

sv.all_reduce(1, timeout=60.0)
if probe.RANK == 1:
    probe.note("inject")
    if "busy" in sys.argv:
        sum(itertools.repeat(1))  # for ever, in C
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # for ever, with Python's lock; a sleep would end when the rank is asked where it is
probe.note("enter")
try:
    sv.all_reduce([1.0, 2.0])
except Exception as error:
    probe.raised(error)
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "busy"])
def test_f10_a_rank_that_holds_pythons_lock(launch, how):
    job = launch(HOLDING, workers=3, arguments=[how], env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "3.5"})
    assert job.wait() == 70, str(job)
    last, raised = last_exception(job, [0, 2])
    for event in raised.values():
        assert event["error"] == "DeadlineExceeded", str(job)
        assert "rank 1" in event["text"], str(job)
    check_bound(
        f"F10-{how}", last - min(event["at"] for event in job.events("enter")), bound_s("F10")
    )
    said = [
        line
        for line in job.report.split("\n")
        if line.startswith("syncvar: rank 1: no Python thread answers since")
    ]
    assert len(said) == 1, str(job)
    place = line_of(HOLDING, "for ever, in C" if how == "busy" else "asked where it is")
    state = f"CPU {how} (state {'R' if how == 'busy' else 'S'})"
    where = f", in user code, script.py:{place}"
    # The launcher waits a moment for the place. On a slow machine only the block has it.
    assert said[0].endswith((state, state + where)), str(job)
    assert where.removeprefix(", ") in job.report.split("others:")[1], str(job)
    assert "no Python thread answers" in job.report.split("others:")[1], f"in the block too\n{job}"


SLOWLY = """
import time
import numpy as np
import probe, syncvar as sv

total = np.zeros(1000)
for step in range(40):
    time.sleep(0.16 if probe.RANK == 1 else 0.04)
    total += sv.all_reduce(np.full(1000, step * (probe.RANK + 1.0)))
assert (total == 6.0 * sum(range(40))).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_f11_a_rank_four_times_as_slow(launch, tmp_path, transport):
    job = launch(
        SLOWLY,
        workers=3,
        env={
            **PATIENT,
            "SYNCVAR_STALL_WARNING_S": "5",  # less than the others wait in all
            "SYNCVAR_OBSERVE_INTERVAL_S": "0",  # or it is named as late on a slow machine
            "SYNCVAR_TRACE": str(tmp_path / "trace"),
            "SYNCVAR_TRANSPORT": transport,
        },
    )
    assert job.wait() == 0, str(job)
    assert job.report.strip() == "", f"nobody is warned of what is no stall\n{job}"
    line = [
        sys.executable,
        "-c",
        "import sys; from syncvar.cli.commands import main; sys.exit(main())",
        "trace",
        "merge",
        str(tmp_path / "trace"),
        "-o",
        str(tmp_path / "trace.json"),
    ]
    said = subprocess.run(
        line, capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    head = next(index for index, line in enumerate(said) if line.startswith("        for "))
    late = re.findall(r"rank \d", said[head]).index("rank 1")
    waits = [re.findall(r"\d+(?= %)|-", line)[late] for line in said[head + 1 : head + 4]]
    assert waits[1] == "-", said
    assert all(int(waits[rank]) > 20 for rank in (0, 2)), said
    path = said[next(index for index, line in enumerate(said) if line.startswith("critical")) + 1]
    assert path.endswith("  rank 1 outside of calls"), said


@pytest.mark.slow
def test_f09_a_rank_that_only_computes_answers(launch):
    job = launch(
        """
        import time
        import numpy as np, probe, syncvar as sv
        sv.all_reduce(1)
        if probe.RANK == 1:
            until = time.monotonic() + 3
            while time.monotonic() < until:
                pass
        sv.all_reduce(1)
        """
    )
    assert job.wait() == 0, str(job)
    assert "rank 0 has been waiting" in job.report, str(job)
    assert "no Python thread answers" not in job.report, str(job)
