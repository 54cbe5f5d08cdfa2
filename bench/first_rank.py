"""Starts a benchmark script as the ranks of a job, and prints what rank 0 prints."""

from __future__ import annotations

import subprocess
import sys


def run_as_ranks(script: str, workers: int, *arguments: str) -> int:
    """Start the ranks, print the lines of rank 0 without its number, and return the exit code."""
    launcher = ["-m", "syncvar_launcher", "--output", "first", "--workers", str(workers)]
    line = [sys.executable, *launcher, script, *arguments]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout.replace("[0] ", ""), end="")
    return done.returncode
