"""A sample of the programs on real processes: one launch for each number of replicas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import LENIENT
from tests.support.paths import PROFILE, REPOSITORY

PROGRAMS = 50


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        (2, "zmq"),
        (4, "auto"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((2, "auto"), (3, "auto"), (3, "zmq"))
        ),
    ],
)
def test_a_sample_on_real_processes(size, transport):
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--config",
        str(PROFILE),
        "--workers",
        str(size),
        "--start-method",
        "fork",
        str(Path(__file__).with_name("program_sample.py")),
        str(size * 10_000),
        str(PROGRAMS),
    ]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | LENIENT | {"SYNCVAR_TRANSPORT": transport, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count(f"{PROGRAMS} programs") == size
