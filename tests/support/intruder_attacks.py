"""A job that sums while strangers are at its ports: what is the same on one machine and on several hosts."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.launching import await_true
from tests.support.paths import RANK_SCRIPTS

STRANGERS = RANK_SCRIPTS / "intruders.py"
GROWTH_MAX = 16 << 20
LASTING = {
    "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "90"
}  # of a job under siege: who waits for the others waits until all strangers are there

SUMS = """
    import os
    import numpy as np
    import probe
    import syncvar as sv

    if probe.RANK == 0:
        secret = os.pread(int(os.environ["SYNCVAR_KEY_FD"]), 32, 0)
        probe.note("about", secret=secret.hex(), job=os.environ["SYNCVAR_JOB_ID"], meeting=os.environ["SYNCVAR_RENDEZVOUS"].removeprefix("tcp://"))
    else:
        probe.gate("meet", 90)
    sv.init()
    x = np.arange(20_000.0) * (sv.rank() + 1)
    expected = np.arange(20_000.0) * sum(range(1, sv.world_size() + 1))
    count, is_over = 0, False
    while not is_over:
        assert (sv.all_reduce(x) == expected).all()
        count += 1
        if count % 100 == 0:
            probe.note("summing")
        is_over = bool(sv.all_reduce(int(os.path.exists(os.path.join(probe.FOLDER, "gate-end")))))
    probe.note("right", count=count)
"""


def rss(pid):
    """Return the memory that a process has in use, in bytes."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


@contextlib.contextmanager
def strangers(folder, kinds, count, about, targets, prefix=()):
    """Let strangers come to ports, all of them, before the block begins; they go when it ends. Yield what they say."""
    path = folder / "about.json"
    path.write_text(json.dumps(about))
    line = [*prefix, sys.executable, str(STRANGERS), kinds, str(count), str(path), *targets]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as them:
        try:
            said = them.stdout.readline()
            yield said or them.communicate(timeout=120)[1]
        finally:
            with contextlib.suppress(OSError):
                them.stdin.close()
            them.wait(120)


def besiege(
    job, folder, kinds, count, targets, *, size, prefix=(), more=tuple, while_meeting=False
):
    """Send strangers to the ports of a job of `SUMS`, and check that they are refused, cost nothing, and change nothing.

    Args:
        job: The job; nobody has opened its gate "meet".
        folder: For a file.
        kinds: Of strangers, with commas.
        count: How many, where that matters.
        targets: Returns the ports that there are, as address:port.
        size: Ranks of the job.
        prefix: What starts the strangers.
        more: Returns processes beside the ranks whose memory counts.
        while_meeting: They come while rank 0 waits for the others, else while all sum.
    """
    (about,) = job.await_events("about", limit_s=120)
    job.await_events(
        "began", size, limit_s=120
    )  # from here on no host listens to prove that others reach it
    if not while_meeting:
        job.open_gate("meet")
        job.await_events("summing", size, limit_s=120)
    places = await_true(targets, 60, "somebody who listens")
    pids = [*job.pids().values(), *more()]
    before = {pid: rss(pid) for pid in pids}
    with strangers(folder, kinds, count, about, places, prefix) as said:
        assert said == "done\n", f"{said}\n{job}"
        grown = {pid: rss(pid) - before[pid] for pid in pids}
        job.open_gate("meet")  # from here on those who had not met need memory of their own
        job.await_events(
            "summing", len(job.events("summing")) + size, limit_s=120
        )  # those who stay are there
        if not while_meeting:
            grown = {pid: max(grown[pid], rss(pid) - before[pid]) for pid in pids}
        job.open_gate("end")
        assert job.wait(120) == 0, job
    assert len(job.events("right")) == size, job
    print(
        f"{kinds} at {len(places)} ports: memory has grown by {max(grown.values()) >> 10} KiB at most"
    )
    assert all(one < GROWTH_MAX for one in grown.values()), (kinds, grown)
    assert " was refused (" in job.err, job
    return places
