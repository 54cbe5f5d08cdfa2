"""What a terminal shows while hosts join, and while ranks start."""

import subprocess
import sys

import pytest

from tests.support.terminal_screen import run_in_terminal

LAUNCHER = [sys.executable, "-m", "syncvar_launcher"]
SLOW_START = """
import os, time
if os.environ.get("SYNCVAR_RANK") == "1":
    time.sleep(2.5)
"""


class Joiners:
    """Starts hosts that join, one for each state of the launcher's line."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []

    def react(self, lines):
        text = " ".join(lines)
        where = text.partition("--join ")[2].partition(" ")[0]
        if (where and len(self.processes) == 0 and "; 0 joined" in text) or (
            len(self.processes) == 1 and "; 1 joined" in text
        ):
            self.start(where)

    def start(self, where):
        self.processes.append(
            subprocess.Popen(
                [*LAUNCHER, "--join", where, "--key-file", str(self.folder / "key")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )


@pytest.mark.slow
def test_hosts_that_join_are_counted(tmp_path):
    (tmp_path / "script.py").write_text("import syncvar as sv; print('rank', sv.rank())")
    joiners = Joiners(tmp_path)
    options = ["--listen", "127.0.0.1", "--hosts", "2", "--fake-hosts", "2", "--workers", "2"]
    options += ["--key-file", str(tmp_path / "key"), "--color", "never", "script.py"]
    try:
        code, screen = run_in_terminal(
            [*LAUNCHER, *options], cwd=tmp_path, react=joiners.react, columns=200
        )
    finally:
        for one in joiners.processes:
            if one.poll() is None and code:
                one.kill()
            one.wait(60)
    assert code == 0, screen.lines()
    seen = {line for lines in screen.seen for line in lines}
    assert "syncvar: waiting for 2 hosts; 0 joined" in seen
    assert "syncvar: waiting for 2 hosts; 1 joined" in seen
    assert not [line for line in screen.lines() if "; 0 joined" in line or "; 1 joined" in line]
    assert [line for line in screen.lines() if line.endswith("rank 0")]


@pytest.mark.slow
def test_ranks_that_start_late_are_named(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW_START)
    (tmp_path / "script.py").write_text("import syncvar as sv; sv.barrier(); print('done')")
    code, screen = run_in_terminal(
        [*LAUNCHER, "--color", "never", "--start-method", "spawn", "--workers", "2", "script.py"],
        cwd=tmp_path,
        environ={"PYTHONPATH": str(site)},
    )
    assert code == 0, screen.lines()
    seen = {line for lines in screen.seen for line in lines}
    assert "syncvar: 1 of 2 processes have reached their script; missing: rank 1" in seen
    assert not [line for line in screen.lines() if "processes have reached" in line]
