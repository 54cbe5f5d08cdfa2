"""The kernel kills a rank because the memory of its control group ran out: the others and the report say so (F05)."""

import contextlib
import os
import uuid
from pathlib import Path

import pytest

import syncvar as sv
from tests.support.fault_table import bound_s
from tests.support.launching import await_true, check_bound, last_exception

LIMIT_MIB = 300

SCRIPT = """
import os, signal, sys
import numpy as np
import probe, syncvar as sv

phase, has_limit, folder = sys.argv[1], sys.argv[2] == "limit", sys.argv[3]


def hog(*_):
    kept = []
    if has_limit:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # this one, and no other that asks for memory while it is being ended
    while has_limit:
        probe.note("inject")  # the last one counts
        kept.append(np.ones(1 << 20))
    probe.note("inject")
    os.kill(os.getpid(), signal.SIGKILL)


checkpoint = sv.Checkpoint(v=sv.Variable(1.0, name="v"), own=sv.Variable(np.zeros(1000), name="own", synchronization="NONE"))
if phase == "K":
    checkpoint.save(folder)
sv.barrier()
try:
    if probe.RANK == 1:
        if phase == "C":
            hog()
        if phase == "X":
            signal.signal(signal.SIGALRM, hog)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        if phase == "K":
            from syncvar.checkpoint.folder import Disk
            Disk.write = staticmethod(hog)
    if phase == "K":
        checkpoint.save(folder)
    if probe.RANK == 0 and phase == "X":
        probe.gate("never")  # holds the call back: rank 1 is hit inside it
    sv.all_reduce(np.ones(1000))
except Exception as error:
    probe.raised(error)
    raise
"""


@pytest.fixture
def limited():
    """Return what starts a command in a control group of its own that may use 300 MiB, or None where none can be made."""
    path = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        for top, limit in (
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ):
            if ("memory" in controllers.split(",")) == (top != "/sys/fs/cgroup") and path is None:
                made = Path(f"{top}{own}", f"syncvar-test-{uuid.uuid4().hex[:8]}")
                with contextlib.suppress(OSError):
                    made.mkdir()
                    if os.access(made / limit, os.W_OK):
                        (made / limit).write_text(str(LIMIT_MIB << 20))
                        path = made
                    else:
                        made.rmdir()
    yield (
        None
        if path is None
        else (
            "sh",
            "-c",
            f'echo $$ > {path}/cgroup.procs; echo -1000 2> /dev/null > /proc/self/oom_score_adj; exec "$@"',
            "sh",
        )
    )
    if path is not None:
        await_true(
            lambda: not (path / "cgroup.procs").read_text().split(),
            60,
            "the end of the group's processes",
        )
        path.rmdir()


@pytest.mark.parametrize(
    "phase", ["X", *(pytest.param(phase, marks=pytest.mark.slow) for phase in "CK")]
)
def test_f05_a_rank_that_the_kernel_kills_for_memory(launch, tmp_path, limited, phase):
    """Where this machine lets us make no group, a rank is killed all the same, and nothing may be said of memory."""
    folder = tmp_path / "checkpoint"
    has_limit = "limit" if limited else "kill"
    ranks = 3 if phase == "X" else 2
    job = launch(
        SCRIPT, workers=ranks, arguments=[phase, has_limit, str(folder)], prefix=limited or ()
    )
    assert job.wait() == 137, str(job)
    inject = job.events("inject")[-1]
    others = [2] if phase == "X" else [0]
    last, raised = last_exception(job, others)
    for event in raised.values():
        assert (event["error"], event["lost"]) == ("PeerLost", 1), str(job)
        assert ("out of memory (kernel)" in event["reason"]) == bool(limited), str(job)
    check_bound(f"F05-{phase}", last - inject["at"], bound_s("F05"))
    first = job.report.split("syncvar: rank 1 on ", 1)[1].split("\n")[0]
    assert "was killed by signal 9 (SIGKILL)" in first, str(job)
    assert first.endswith("out of memory (kernel)") == bool(limited), str(job)
    if phase == "K":
        v = sv.Variable(0.0, name="v")
        sv.Checkpoint(v=v).restore(folder, partial=True)
        assert float(v) == 1.0, "the checkpoint before is whole"
