"""The process of `--dashboard`: it serves the page of the job, and ends with the launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from syncvar.cli.dashboard import new_token, open_listener, page_url
from syncvar_launcher.options.option_table import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

_END_S = 5.0


class DashboardProcess:
    """The dashboard of a job at an address; raises ConfigError if nothing can listen there.

    Its process asks the launcher only over the socket of `syncvar status`. The pipe to its standard
    input hands over the token, and closes when the launcher ends, even if it is killed.
    """

    def __init__(self, address: str) -> None:
        self._host, port = parse_address(address)
        self._listener = open_listener(self._host, port)
        self._token = new_token()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, show: Callable[[str], None]) -> None:
        """Start the process, and show the URL; later attempts of the job change nothing."""
        if self._process is not None:
            return
        descriptor = self._listener.fileno()
        words = [str(descriptor), self._host, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "syncvar.cli.dashboard", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(self._token.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            show(f"the dashboard cannot be started: {error.strerror}")
        else:
            show(f"dashboard: {page_url(self._listener, self._token)}")
        self._listener.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._listener.close()
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
