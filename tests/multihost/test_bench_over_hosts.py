"""The benches over two hosts, as short as they can be: what they start runs, and each byte crosses once a host."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import BENCH


@pytest.mark.nightly
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
        "--scenes",
        "2x1@1",
        "--json",
        "found.json",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    times, started = found["hosts"], found["hosts-launch"]
    assert times["problems"] == started["problems"] == {}
    us = {(row["collective"], row["size"]): row["us"] for row in times["rows"]}
    assert len(us) == 26
    assert all(found.keys() == {"syncvar", "unencrypted", "links"} for found in us.values())
    for column in ("syncvar", "unencrypted", "links"):
        assert us["all_reduce", 16 << 20][column][1] > 120_000, (
            "16 MiB both ways take 134 ms of a link of 1 Gbit/s"
        )
    assert set(started["seconds"]) == {"syncvar", "syncvar, --start-method spawn"}
    verdicts = {one["what"]: one["verdict"] for one in found["bounds"]}
    assert verdicts.pop("all_reduce over 2 hosts x 2 workers: bytes a host sends") == "reached"
    unrivalled = {what for what, verdict in verdicts.items() if verdict == "not measured"}
    assert {what for what in verdicts if "links" not in what} == unrivalled, "no peer was measured"
