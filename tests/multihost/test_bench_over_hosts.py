"""The benches over two hosts, as short as they can be: what they start runs, and each byte crosses once a host."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import BENCH


@pytest.mark.slow
def test_the_parts_over_two_hosts(tmp_path):
    command = [
        sys.executable,
        str(BENCH / "compare.py"),
        "--hosts",
        "--libraries",
        "syncvar",
        "--rounds",
        "1",
        "--seconds",
        "0.01",
        "--json",
        "found.json",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    times, started = found["hosts"], found["hosts-launch"]
    assert times["problems"] == started["problems"] == {}
    assert {
        f"syncvar, 2 x {each}, {size}"
        for each in (1, 2)
        for size in (8, 64 << 10, 1 << 20, 16 << 20)
    } <= times.keys()
    assert times["syncvar, 2 x 1, 16777216"][1] > 120_000, (
        "16 MiB both ways take 134 ms of a link of 1 Gbit/s"
    )
    assert set(started["seconds"]) == {"syncvar", "syncvar, --start-method spawn"}
    verdicts = {one["what"]: one["verdict"] for one in found["bounds"]}
    assert verdicts.pop("all_reduce over 2 hosts x 2 workers: bytes that a host sends") == "reached"
    assert set(verdicts.values()) == {"not measured"}, "nobody to compare with"
