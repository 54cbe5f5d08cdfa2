"""One rank of three is lost, in every way and phase; the others learn it in time, and the launcher names the culprit.

Each row is fault x phase: F01 exception, F02 `os._exit(0)`, F03 SIGKILL, F06 SIGSTOP for ever. Phases: S spawn, R roll
call (rank 0 waits, rank 2 comes when rank 1 is lost), H handshake (rank 1 has heard where the others are and has reached
none), C computing, X inside a collective, V writing a variable, K writing its part of a checkpoint, E end. Rank 1 is the
culprit. In X rank 0 holds the call back, so that the culprit is hit inside it; rank 0 then learns of the loss in a group
of its own. An exception while a checkpoint is written is a CheckpointError on all ranks, and nobody is lost.
"""

import signal
import time
from dataclasses import dataclass, replace

import pytest

import syncvar as sv
from tests.support.launching import PATIENT, check_bound, last_exception

SCRIPT = """
import os, signal, sys, time
import probe

how, phase, culprit = sys.argv[1], sys.argv[2], 1
rank = probe.RANK


def fail():
    if how == "raise":
        probe.note("inject")
        raise ValueError("planted failure")
    if how == "leave":
        probe.note("inject")
        os._exit(0)
    probe.note("ready")
    time.sleep(60)


def fail_inside(call):
    if how in ("raise", "leave"):
        signal.signal(signal.SIGALRM, lambda *_: fail())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        probe.note("ready")
    call()


def body():
    if phase == "S" and rank == culprit:
        fail()
    import numpy as np
    import syncvar as sv

    if phase == "R":
        import syncvar.bootstrap.process, syncvar.transports.zeromq_links, syncvar.transports.zeromq_transport  # so that joining takes no time

        if rank == culprit:
            probe.gate("joining-0")
            probe.gate("joining-2")
            probe.open_gate("failing")
            fail()
        probe.open_gate(f"joining-{rank}")
        if rank == 2:  # comes when rank 1 is lost already
            probe.gate("failing")
            time.sleep(0.05)
    if phase == "H" and rank == culprit:
        from syncvar.transports.zeromq_transport import ZeromqTransport

        ZeromqTransport.open = lambda *_: fail()
    sv.init()
    assert sv.all_reduce(1) == 3
    solo = sv.new_group([0])
    variable = None
    if phase == "V":
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            variable = sv.Variable(
                0.0, synchronization=sv.VariableSynchronization.ON_WRITE, aggregation=sv.VariableAggregation.SUM
            )

        def step():
            if rank == culprit:
                time.sleep(0.2)
                fail()
            variable.assign(1.0)

        strategy.run(step)
    if phase == "C":
        if rank == culprit:
            time.sleep(0.2)
            fail()
        sv.all_reduce(np.ones(1000))
    if phase == "X":
        if rank == culprit:
            fail_inside(lambda: sv.all_reduce(np.ones(1000)))
        if rank == 0:
            while True:  # computes; a call that needs nobody tells it of the loss
                sv.barrier(group=solo)
                time.sleep(0.01)
        sv.all_reduce(np.ones(1000))
    if phase == "K":
        from syncvar.checkpoint.folder import Disk

        checkpoint = sv.Checkpoint(n=1, own=sv.Variable(np.full(1000, float(rank)), name="own", synchronization="NONE"))
        checkpoint.save(sys.argv[3])
        checkpoint.n = 2
        if rank == culprit:
            Disk.write = staticmethod(lambda *_: fail())
        checkpoint.save(sys.argv[3])
    if phase == "E":
        sv.barrier()
        if rank == culprit:
            fail()


try:
    body()
except Exception as error:
    if rank != culprit:
        probe.raised(error)
    raise
"""


@dataclass(frozen=True)
class Row:
    """One fault in one phase.

    Args:
        fault: Its number in the fault matrix.
        how: What happens to rank 1: "raise", "leave", or the name of a signal that it gets.
        phase: When.
        exit_code: Of the launcher.
        reason: Words that every survivor's PeerLost has.
        bound_s: From the fault to the last survivor's exception, with the deadlines of the test profile.
        transport: "auto": shared memory; "zmq": links.
    """

    fault: str
    how: str
    phase: str
    exit_code: int
    reason: str
    bound_s: float
    transport: str = "auto"

    def __str__(self):
        return f"{self.fault}-{self.how}-{self.phase}" + (
            "" if self.transport == "auto" else f"-{self.transport}"
        )


SHM = (
    *(
        Row("F01", "raise", phase, 74 if phase == "K" else 1, "ValueError", 0.5)
        for phase in "SRHCXVKE"
    ),
    *(
        Row("F02", "leave", phase, 70, "left with status 0 before shutdown", 0.5)
        for phase in "CXVKE"
    ),
    *(Row("F03", "SIGKILL", phase, 137, "signal 9", 0.5) for phase in "SRHCXVKE"),
    *(Row("F06", "SIGSTOP", phase, 70, "silent", 2.0) for phase in "RHCXVKE"),
)


ROWS = (
    *SHM,
    *(
        replace(row, transport="zmq")
        for row in SHM
        if row.phase == "X" or (row.how, row.phase) == ("SIGKILL", "V")
    ),
)

# Every fault, every phase and both transports are in the default run; a fault in each phase and a phase with each fault, not
# always each pair.
SLOW = {
    "F01-raise-C",
    "F01-raise-X-zmq",
    "F02-leave-V",
    "F02-leave-E",
    "F02-leave-X-zmq",
    "F03-SIGKILL-C",
    "F03-SIGKILL-E",
    "F03-SIGKILL-V-zmq",
    "F06-SIGSTOP-C",
    "F06-SIGSTOP-R",
    "F06-SIGSTOP-X-zmq",
    "F06-SIGSTOP-V",
    "F06-SIGSTOP-E",
    "F01-raise-H",
    "F02-leave-K",
    "F03-SIGKILL-K",
    "F06-SIGSTOP-H",
    "F06-SIGSTOP-X",
    "F06-SIGSTOP-K",
}


# Nothing waits for these where rank 1 is not stopped: the others hear of it, and end by themselves.
UNHURRIED = {**PATIENT, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60", "SYNCVAR_ABORT_GRACE_S": "20"}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow if str(row) in SLOW else ()) for row in ROWS],
    ids=str,
)
def test_a_lost_rank(launch, tmp_path, row):
    folder = tmp_path / "checkpoint"
    job = launch(
        SCRIPT,
        workers=3,
        arguments=[row.how, row.phase, str(folder)],
        env={"SYNCVAR_TRANSPORT": row.transport, **({} if row.how == "SIGSTOP" else UNHURRIED)},
    )
    if row.how.startswith("SIG"):
        job.await_events("ready")
        if row.phase == "X":
            time.sleep(0.2)
        injected = job.kill_rank(1, getattr(signal, row.how))
    else:
        injected = job.await_events("inject")[0]["at"]
    code = job.wait()
    assert code == row.exit_code, str(job)
    if row.phase == "K":
        whole = sv.Checkpoint(n=0)
        whole.restore(folder)
        assert whole.n == 1, "the checkpoint before is whole"
    if (row.how, row.phase) == ("raise", "K"):
        last, raised = last_exception(job, [0, 2])
        for event in raised.values():
            assert event["error"] == "CheckpointError", str(job)
            assert "rank 1: writing" in event["text"], str(job)
            assert "ValueError: planted failure" in event["text"], str(job)
        check_bound(str(row), last - injected, row.bound_s)
        return
    for event in job.events("raised"):
        if row.phase in "SE":
            assert event["error"] == "PeerLost", str(job)
    if (
        row.phase not in "SE"
    ):  # at S the others may not have joined yet, at E they may have finished
        last, raised = last_exception(job, [0, 2])
        for event in raised.values():
            if row.how == "raise" and row.phase == "V" and event["error"] == "MismatchError":
                assert "planted failure" in event["text"], (
                    job
                )  # the exception that left strategy.run told itself
                continue
            assert event["error"] == "PeerLost", str(job)
            assert event["lost"] == 1, str(job)
            assert row.reason in event["reason"], str(job)
        check_bound(str(row), last - injected, row.bound_s)
    check_bound(f"{row} to the end of the job", job.ended - injected, row.bound_s + 2.5)
    what = job.report.split("syncvar: rank 1 on ", 1)
    assert len(what) == 2, str(job)
    if row.how == "raise":
        assert "ValueError: planted failure" in job.report, str(job)
        assert "script.py" in job.report, str(job)
        assert job.report.count("Traceback") == 1, str(job)
    if row.how == "leave":
        assert "left with status 0 before shutdown" in job.report, str(job)
    if row.how == "SIGKILL":
        assert "was killed by signal 9 (SIGKILL)" in job.report, str(job)
    if row.how == "SIGSTOP":
        assert "suspect: silent for" in job.report, str(job)
        assert ": silent for" in what[1].rsplit("syncvar: rank 1 on ", 1)[-1].split("\n")[0], str(
            job
        )
        assert "state T" in job.report, str(job)
        assert job.report.index("suspect") < job.report.index("evidence"), str(job)
