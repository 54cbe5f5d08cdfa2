"""Start workers through the launcher as a child, for `syncvar bench` and `syncvar test`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from syncvar.bootstrap.worker_entry import command_of
from syncvar.core.environment import PREFIX, RankEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_RANK_VARIABLES = tuple(RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "").to_mapping())
_STATUS = PREFIX + "STATUS_FD"


def is_launched() -> bool:
    """Return whether the launcher started this process."""
    return PREFIX + "RANK" in os.environ


def start_workers(
    module: str,
    arguments: Sequence[str],
    *,
    workers: str,
    timeout_s: float | None = None,
    settings: Mapping[str, str] | None = None,
) -> int:
    """Run a module as every rank of a new job; return the launcher's exit code.

    `--report-to` gives rank 0 a descriptor: text written there appears on our standard output
    without the prefix of the rank. The job ends with this process.
    """
    options = ["--workers", workers]
    if timeout_s is not None:
        options += ["--timeout", str(timeout_s)]
    sys.stdout.flush()
    report = os.dup(1)
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    removed = (*_RANK_VARIABLES, _STATUS)
    environ = {name: value for name, value in os.environ.items() if name not in removed}
    environ |= settings or {}
    environ |= {"SYNCVAR_PASS_FDS": str(report), "SYNCVAR_PARENT_FD": str(alive_read)}
    command = [*command_of("syncvar_launcher.main"), *options, "-m", module]
    command += ["--report-to", str(report), *arguments]
    try:
        # Its own session shields it from Ctrl-C in a terminal; we forward the signal ourselves.
        process = subprocess.Popen(  # noqa: S603
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            pass_fds=(report, alive_read),
            start_new_session=True,
        )
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
            else:
                return code if code >= 0 else 128 - code
    finally:
        for descriptor in (report, alive_read, alive_write):
            os.close(descriptor)
