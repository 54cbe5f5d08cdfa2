"""Hosts whose clocks differ by minutes: waits are compared on one clock, and records say how exactly."""

import json
import re
import subprocess
import sys

import pytest
from test_several_hosts import at, start

from tests.support.host_testbed import Hosts

pytestmark = pytest.mark.slow

AHEAD_S = 500
SLOW = """
    import time
    import numpy as np
    import probe, syncvar as sv
    begin = time.monotonic()
    while True:
        time.sleep(0.1 if sv.rank() == 1 else 0.01)
        if sv.all_reduce(time.monotonic() - begin > 4, op="and"):
            break
"""


@pytest.fixture
def apart(tmp_path_factory):
    """Two hosts; the clock of the second one is ahead."""
    made = Hosts(tmp_path_factory.mktemp("apart"), 2, {1: AHEAD_S})
    yield made
    left = made.await_quiet()
    made.close()
    assert not left, left


def syncvar(*words):
    line = [sys.executable, "-m", "syncvar", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_times_of_two_hosts_compare(apart, tmp_path):
    traces = tmp_path / "traces"
    job = start(
        apart,
        tmp_path,
        SLOW,
        at(apart, 1, 1),
        env={"SYNCVAR_TRACE": str(traces), "SYNCVAR_OBSERVE_INTERVAL_S": "0.5"},
    )
    assert job.wait() == 0, str(job)
    records = [json.loads((traces / f"flight-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert records[0]["boot"] != records[1]["boot"]
    assert records[0]["clock_offset_ns"] == records[0]["clock_error_ns"] == 0
    error_ns = records[1]["clock_error_ns"]
    assert 0 < error_ns < 1e9
    assert abs(records[1]["clock_offset_ns"] + AHEAD_S * 10**9) <= error_ns
    assert re.search(r"rank 1 on \S+ is late: each other rank waited for it", job.report), str(job)
    merged = syncvar("trace", "merge", str(traces), "-o", str(tmp_path / "trace.json"))
    names = " ".join(sorted(record["host"] for record in records)).replace(" ", ", ")
    assert re.search(
        rf"times of hosts {names} are those of one clock, within \S+ [um]?s", merged.stderr
    ), merged
    assert re.search(r"^ +rank 0 .* [4-9]\d %$", merged.stdout, re.MULTILINE), merged.stdout
    clocks = json.loads((tmp_path / "trace.json").read_text())["otherData"]["clocks"]
    assert clocks[0] in merged.stderr
