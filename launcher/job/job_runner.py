"""Run a job: start the fork server, then import what starts and watches ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from syncvar_launcher.job.start_clock import clock

if TYPE_CHECKING:
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.local.worker_start import ForkServer


def run_job(job: Job, ahead: ForkServer | None = None) -> int:
    """Run a job, with restarts, and return the exit code.

    `ahead` is a fork server that was started before the options were read, and may fit.
    """
    with contextlib.ExitStack() as stack:
        clock.enter("starts the process that workers are forked from")
        server = job.fork_server(ahead)
        if server is not None:
            stack.enter_context(server)
        clock.enter("imports what starts ranks")
        from syncvar_launcher.job import restart_loop  # meanwhile the fork server imports NumPy

        return restart_loop.run(job, server)
