"""Run a command in a process group of its own, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Finished", "run"]

GRACE_S = 10.0
SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended.

    Args:
        code: Its exit code; negative for a signal, None when it took too long, 127 when it could
            not be started.
        stdout: Its standard output.
        stderr: Its standard error.
        seconds: How long it ran.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def failure(self) -> str | None:
        """Return how it failed and the last lines it said, or None."""
        if self.code == 0:
            return None
        how = (
            f"not done after {self.seconds:.0f} s"
            if self.code is None
            else f"exit code {self.code}"
        )
        lines = [
            line.rstrip()
            for line in (self.stderr or self.stdout).splitlines()
            if line.strip(" -=\n")
        ]
        return " | ".join([how, *lines[-SHOWN_LINES:]])


def run(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Finished:
    """Run a command to its end, or until it has taken too long: then its process group is ended."""
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as problem:
        return Finished(127, "", str(problem), 0.0)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = _end(process)
        return Finished(None, stdout, stderr, time.monotonic() - begin)
    except BaseException:
        _end(process)
        raise
    return Finished(process.returncode, stdout, stderr, time.monotonic() - begin)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ask the group of a process to end, then make it end; a launcher takes its own workers along."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return "", "its output was held open by a process that outlived it"
