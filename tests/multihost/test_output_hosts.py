"""Much output of one host, and output that nobody reads: no rank waits, the job ends within its bounds, and memory stays bounded."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from test_several_hosts import at, start

from tests.integration.launch.test_unread_output import FULL, unread
from tests.support.launching import await_true, check_bound

pytestmark = pytest.mark.slow

MUCH = """
    import os, time
    import numpy as np
    import probe
    import syncvar as sv

    sv.barrier()
    others = sv.new_group([0, 1, 3])
    if sv.rank() == 2:
        probe.note("writes")
        text = (b"x" * 999 + b"\\n") * 1000
        for _ in range({megabytes}):
            left = memoryview(text)
            while left:
                left = left[os.write(1, left):]
        probe.note("written")
        probe.open_gate("written")
    else:
        longest, count = 0.0, 0
        while True:
            is_over = count >= 50 and os.path.exists(os.path.join(probe.FOLDER, "gate-written"))
            began = time.monotonic()
            is_over = sv.all_reduce(np.int32(is_over), "min", group=others)
            longest, count = max(longest, time.monotonic() - began), count + 1
            if sv.rank() == 3:
                print(f"at {{time.monotonic()}}", flush=True)
            if is_over:
                break
            time.sleep(0.01)
        probe.note("longest", seconds=longest, count=count)
"""


class Reader(threading.Thread):
    """Reads what a launcher writes as fast as it comes, and notes how late the lines of a rank are."""

    def __init__(self, end):
        super().__init__(daemon=True)
        self.end, self.nbytes, self.latest, self.lines = end, 0, 0.0, 0
        os.set_blocking(end, True)

    def run(self):
        rest = b""
        while data := os.read(self.end, 1 << 20):
            now = time.monotonic()
            self.nbytes += len(data)
            data, rest = rest + data, b""
            whole = data.rfind(b"\n") + 1
            rest = data[whole:]
            for found in re.finditer(rb"^\[3\] at ([0-9.]+)$", data[:whole], re.MULTILINE):
                self.lines += 1
                self.latest = max(self.latest, now - float(found[1]))


def peak_nbytes(pid):
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) << 10


def test_300_megabytes_of_one_host_hold_up_nobody(hosts, tmp_path):
    with unread("pipe", tmp_path) as (prefix, end):
        job = start(hosts, tmp_path, MUCH.format(megabytes=300), at(hosts, 2, 1, 1), prefix=prefix)
        (began,) = job.await_events("writes", rank=2, limit_s=120)
        reader = Reader(end)
        reader.start()
        (ended,) = job.await_events("written", rank=2, limit_s=120)
        pids = {
            "launcher": job.process.pid,
            **{f"agent {index}": hosts.agent(index) for index in range(1, 3)},
        }
        peaks = {name: peak_nbytes(pid) for name, pid in pids.items()}
        assert job.wait(120) == 0, job
        reader.join(20)
    print(
        f"{300 / (ended['at'] - began['at']):.0f} MB/s; {peaks}; lines late by {reader.latest:.3f} s"
    )
    assert reader.nbytes > 300e6
    assert max(peaks.values()) < 100 << 20, (
        "what nobody has read stays with the rank that writes it"
    )
    longest = job.events("longest")
    assert len(longest) == 3
    assert min(event["count"] for event in longest) <= reader.lines, "each of its lines has come"
    check_bound(
        "a call beside much output of another host", max(event["seconds"] for event in longest), 2.0
    )
    check_bound("a line beside much output of another host", reader.latest, 2.0)


def test_f13_in_the_middle_of_much_output(hosts, tmp_path):
    with unread("pipe", tmp_path) as (prefix, end):
        job = start(
            hosts, tmp_path, MUCH.format(megabytes=1_000_000), at(hosts, 2, 1, 1), prefix=prefix
        )
        job.await_events("writes", rank=2, limit_s=120)
        reader = Reader(end)
        reader.start()
        await_true(lambda: reader.nbytes > 10e6, 60, "much output")
        sent = job.send(signal.SIGINT)
        assert job.wait(120) == 130, job
        check_bound("F13 beside much output", job.ended - sent, 3.0)
        reader.join(20)


def full(hosts, tmp_path, prefix):
    """Start a job on two other hosts, and wait until rank 0 cannot write any more."""
    job = start(hosts, tmp_path, FULL, at(hosts, 0, 2, 1), prefix=prefix, arguments=["1", "plain"])
    job.await_events("full", rank=0, limit_s=120)
    job.await_events("quiet", 2)
    return job


def test_f03_rank_of_another_host_killed_while_nobody_reads(hosts, tmp_path):
    with unread("pipe", tmp_path) as (prefix, _):
        job = full(hosts, tmp_path, prefix)
        killed = job.kill_rank(2)
        (lost,) = job.await_events("raised", rank=1)
        assert (lost["error"], lost["lost"]) == ("PeerLost", 2), str(job)
        check_bound("F03 over hosts, full", lost["at"] - killed, 0.5)
        assert job.wait() == 137, str(job)
        check_bound("F03 over hosts, full, end", job.ended - killed, 0.5 + 2.0)
        assert {event["rank"] for event in job.events("cleaned")} == {0, 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_f13_launcher_told_to_end_while_nobody_reads(hosts, tmp_path, number):
    with unread("pipe", tmp_path) as (prefix, _):
        job = full(hosts, tmp_path, prefix)
        sent = job.send(number)
        assert job.wait() == 128 + number, str(job)
        check_bound(f"F13-{number.name} over hosts, full", job.ended - sent, 3.0)
        assert {event["rank"] for event in job.events("cleaned")} == {0, 1, 2}, str(job)
