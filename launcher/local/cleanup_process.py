"""A tiny process that outlives a killed launcher just long enough to clean up after it.

The launcher starts it by path, without site-packages. It blocks on standard input, a pipe whose
write end only the launcher has. Lines: "+pid start" a worker began, "-pid" it ended and its session
is empty, "." the job is over. If the input ends without ".", the launcher was killed. Then this
process kills the workers' sessions and removes the private directory.
"""

from __future__ import annotations

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

from process_sessions import kill_sessions  # type: ignore[import-not-found,unused-ignore]  # noqa: E402


def main() -> None:
    """Wait for the end of the launcher, and clean up if it was killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    directory = sys.argv[1]
    sessions: dict[int, int] = {}
    with os.fdopen(0, "r", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("+"):
                pid, started = line[1:].split()
                sessions[int(pid)] = int(started)
            elif line.startswith("-"):
                sessions.pop(int(line[1:]), None)
            elif line.startswith("."):
                os._exit(
                    0
                    # the launcher waits, and there is nothing here that an
                    # interpreter's own end would tidy up
                )
    kill_sessions(sessions)
    import shutil  # a slow import, and most launchers end cleanly

    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
