"""Much output at once (F55), and a receiver that does not read (F57): memory stays small, and what comes is right."""

import re
import signal
import time
from pathlib import Path

import pytest

WRITING = """
import os, sys
import probe, syncvar as sv

sv.all_reduce(1)
lines, long, raw = (int(text) for text in sys.argv[1:])
if probe.RANK == 0:
    block = b"".join(b"%06d %s\\n" % (number, b"x" * 92) for number in range(1000))
    for _ in range(lines // 1000):
        os.write(1, block) if len(block) < 4096 else sys.stdout.buffer.write(block)
    sys.stdout.flush()
if probe.RANK == 1:
    sys.stdout.buffer.write(b"y" * long + b"\\n")
    sys.stdout.flush()
if probe.RANK == 2:
    for _ in range(raw):
        sys.stdout.buffer.write(bytes(range(256)) + b"\\n")
    sys.stdout.flush()
probe.note("written")
sv.barrier()
probe.gate("looked")
"""


@pytest.mark.parametrize(
    ("lines", "long", "raw"),
    [
        (50_000, 10_000_000, 2_000),
        pytest.param(500_000, 50_000_000, 20_000, marks=pytest.mark.slow),
    ],
)
def test_f55_much_output_long_lines_and_raw_bytes(launch, lines, long, raw):
    job = launch(
        WRITING,
        workers=3,
        arguments=[str(lines), str(long), str(raw)],
        env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "100"},
    )
    job.await_events("written", 3, limit_s=120)
    most = int(
        Path(f"/proc/{job.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    )
    job.open_gate("looked")
    assert job.wait(120) == 0, str(job)[:5000]
    assert most < 64 << 10, f"the launcher has used {most} KiB"
    wanted = {b"[0] %06d %s" % (number, b"x" * 92) for number in range(1000)}
    counts, ys = [0, 0, 0], 0
    with (job.folder / "launcher.out").open("rb") as file:
        for line in file:
            text = line.rstrip(b"\n")
            begins = re.match(
                rb"\[(\d)\+?\] ", text
            )  # with a plus: a further piece of the same line
            assert begins, text[:80]
            rank = int(begins[1])
            counts[rank] += 1
            if rank == 0:
                assert text in wanted, text[:200]
            elif rank == 1:
                ys += text.count(b"y")
    assert counts[0] == lines
    assert ys == long, "a line that is too long comes in pieces, and whole"
    assert counts[2] >= raw


RECEIVER = """
import sys
import numpy as np
import probe, syncvar as sv

x = np.full(8 << 20, probe.RANK + 1.0)  # 64 MiB
sv.all_reduce(np.ones(10))
probe.note("ready")
if probe.RANK == 1:
    probe.gate("reads")
else:
    probe.gate("stopped")
    probe.note("enter")
assert sv.all_reduce(x, out=x) is x
assert (x == 3.0).all()
probe.note("done")
"""


LEAVING = """
import numpy as np
import probe, syncvar as sv

x = np.full(8 << 20, probe.RANK + 1.0)  # 64 MiB, all of it on its way at once
sv.broadcast(np.ones(10))
sv.broadcast(x, out=x)
assert (x == 1.0).all()
probe.note("done")
"""


def test_who_leaves_with_much_still_on_its_way_is_not_lost(launch):
    env = {
        "SYNCVAR_TRANSPORT": "zmq",
        "SYNCVAR_WINDOW_BYTES": str(64 << 20),
        "SYNCVAR_SEGMENT_BYTES": str(64 << 10),
        "SYNCVAR_SHUTDOWN_TIMEOUT_S": "20",
    }
    job = launch(LEAVING, workers=2, env=env)
    assert job.wait(120) == 0, str(job)
    assert len(job.events("done")) == 2, str(job)


def resident_mib(pid):
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("stopped_s", [1.5, 5.0])
def test_f57_a_receiver_that_does_not_read_costs_its_sender_no_more_than_the_window(
    launch, stopped_s
):
    """A call makes one copy of what it works on, 64 MiB. Segments of 64 KiB are copied again when they are sent: with a window
    of 64 MiB the sender had 95 MiB more than before, while nobody read, and without credit it would have 128.
    """
    window, segment = 4 << 20, 64 << 10
    env = {
        "SYNCVAR_TRANSPORT": "zmq",
        "SYNCVAR_WINDOW_BYTES": str(window),
        "SYNCVAR_SEGMENT_BYTES": str(segment),
        "SYNCVAR_SUSPECT_AFTER_S": "30",
        "SYNCVAR_LOST_AFTER_S": "60",
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
    }
    job = launch(RECEIVER, workers=2, env=env)
    job.await_events("ready", 2)
    before = resident_mib(job.pids()[0])
    job.kill_rank(1, signal.SIGSTOP)
    job.open_gate("stopped")
    job.await_events("enter", rank=0)
    most, until = 0.0, time.monotonic() + stopped_s
    while time.monotonic() < until:
        most = max(most, resident_mib(job.pids()[0]))
        time.sleep(0.01)
    assert not job.events("done"), "it waits"
    job.kill_rank(1, signal.SIGCONT)
    job.open_gate("reads")
    assert job.wait(120) == 0, str(job)
    assert len(job.events("done")) == 2, str(job)
    print(f"{before:.1f} MiB before, {most:.1f} MiB at most")
    assert most - before < 64 + 2 * window / (1 << 20) + 6, (
        f"{before:.1f} MiB before, {most:.1f} MiB while nobody read"
    )
