"""Asks the script of `--host-discovery` for the hosts that an elastic job may use.

The script prints one host a line, as a host file has them: NAME, NAME:SLOTS or NAME slots=N. It
runs beside the loop of the launcher, which never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError
from syncvar_launcher.local.worker_start import child_of
from syncvar_launcher.options.hostfile import parse_hostfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncvar_launcher.options.hostfile import Host

_LONGEST_S = 60.0
_NBYTES_MAX = 1 << 16
_PAUSE_S = 0.2
_OPTION = "--host-discovery"


class HostDiscovery:
    """The discovery script, asked every `interval_s` seconds."""

    def __init__(self, script: Path, interval_s: float) -> None:
        self._script, self._interval_s = script, interval_s
        self._process: subprocess.Popen[bytes] | None = None
        self._began = -float("inf")
        self._output = b""
        self._messages: list[str] = []
        self._last_failure = ""

    def first(self, fewest: int, limit_s: float, show: Callable[[str], None]) -> tuple[Host, ...]:
        """Return the hosts at the start: wait until they have `fewest` slots, or raise."""
        until, has_shown = time.monotonic() + limit_s, False
        while True:
            found = self.ask()
            slots = sum(host.slots or 1 for host in found or ())
            if found and slots >= fewest:
                return found
            if time.monotonic() > until:
                self.close()
                reason = self._last_failure or f"it names {slots} slots, and {fewest} are needed"
                raise ConfigError(f"{_OPTION} {self._script}: {reason}, for {limit_s:g} s")
            if found is not None and not has_shown:
                has_shown = True
                show(f"waiting for hosts: {_OPTION} names {slots} of at least {fewest} slots")
            time.sleep(_PAUSE_S)

    def ask(self) -> tuple[Host, ...] | None:
        """Return the hosts if a run of the script has just ended, else None; start the next one."""
        now = time.monotonic()
        if self._process is None:
            if now - self._began >= self._interval_s or self._last_failure:
                self._start(now)
            return None
        self._read()
        status = self._process.poll()
        if status is None:
            if now - self._began > _LONGEST_S:
                _kill_session(self._process)
            return None
        self._read()
        self.close()
        return self._parse(status)

    def take_messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        """End a run of the script. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                _kill_session(process)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    # -- inside ------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        self._began, self._output = now, b""
        try:
            self._process = subprocess.Popen(
                [str(self._script)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=child_of(os.getpid()),  # noqa: PLW1509  (this process has no Python threads)
            )
        except OSError as error:
            self._fail(f"it cannot be started: {error.strerror}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while len(self._output) < _NBYTES_MAX:
                data = os.read(self._process.stdout.fileno(), _NBYTES_MAX)
                if not data:
                    break
                self._output += data

    def _parse(self, status: int) -> tuple[Host, ...] | None:
        if status:
            self._fail(f"it ended with status {status}")
            return None
        try:
            found = parse_hostfile(self._output, _OPTION).hosts if self._output.strip() else ()
        except ConfigError as error:
            self._fail(str(error))
            return None
        self._last_failure = ""
        return tuple(host._replace(slots=host.slots or 1) for host in found)

    def _fail(self, reason: str) -> None:
        if reason != self._last_failure:
            name = shlex.quote(str(self._script))
            self._messages.append(f"{_OPTION} {name}: {reason}; the hosts stay as they are")
        self._last_failure = reason


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a script that runs, and the commands that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
