"""The process that `syncvar-launch --dashboard` starts: `python -m syncvar.cli.dashboard`.

Its arguments are a descriptor that listens, the host as the user wrote it, and the process number
of the launcher. The first line of the standard input is the token. The input's end is the end of
the job: the launcher has closed it, or has been killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from syncvar.cli.dashboard import NICENESS


def main() -> None:
    """Serve the page of the launcher's job until the job ends."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: they concern the launcher
        signal.signal(number, signal.SIG_IGN)
    from syncvar.cli.dashboard.http_server import AccessRules, serve
    from syncvar.cli.dashboard.job_poller import JobPoller

    descriptor, host, launcher = sys.argv[1:]
    token = os.read(0, 256).decode().strip()
    if token:
        with socket.socket(fileno=int(descriptor)) as listener:
            access = AccessRules(token, listener, host)
            serve(listener, access, JobPoller(int(launcher)), end=0)


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of slow readers end with the process
