"""Hosts that join a job, for tests: `syncvar-launch --listen` with the processes of `syncvar-launch --join`."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.launching import Job, await_true
from tests.support.paths import PROFILE


class Joined(Job):
    """A job that listens, and what joins it.

    Args:
        folder: An empty folder of its own.
        script: Text of the script.
        hosts: How many join; None for as many as offer slots for all workers.
        address: Where the launcher listens. On loopback one machine poses as all.
        options: Further options of the launcher.
        named: As for `Job`.
    """

    def __init__(self, folder, script, hosts=2, *options, address="127.0.0.1", **named):
        self.key = Path(folder) / "key"
        self.joiners = []
        count = () if hosts is None else ("--hosts", str(hosts))
        posing = ("--fake-hosts", str(hosts or 9)) if address == "127.0.0.1" else ()
        super().__init__(
            folder,
            script,
            options=("--listen", address, *count, *posing, "--key-file", str(self.key), *options),
            **named,
        )

    @property
    def where(self):
        """The address and port that the launcher tells."""
        found = await_true(
            lambda: (
                re.search(r"--join (\S+) --key-file", self.err) or self.process.poll() is not None
            ),
            what="the command to join",
        )
        assert found is not True, self
        return found[1]

    def join(self, *options, prefix=(), key=None, where=None, program=None):
        """Join with one more host; return its process, whose standard error is in `joiner-<number>.err`."""
        where = where or self.where
        path = self.folder / f"joiner-{len(self.joiners)}.err"
        with path.open("wb") as err:
            one = subprocess.Popen(
                [
                    *prefix,
                    *(program or (sys.executable, "-m", "syncvar_launcher")),
                    "--config",
                    str(PROFILE),
                    "--join",
                    where,
                    "--key-file",
                    str(key or self.key),
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                cwd=self.folder,
                env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state")},
            )
        one.words = lambda: path.read_text(errors="replace")
        self.joiners.append(one)
        return one

    def codes(self, limit_s=120.0):
        """Wait for the ends of all that joined; return their exit codes."""
        return [one.wait(limit_s) for one in self.joiners]

    def close(self):
        super().close()
        for one in self.joiners:
            if one.poll() is None:
                one.kill()
            one.wait(120)

    def __repr__(self):
        return super().__repr__() + "".join(
            f"\n--- joiner {place} ({one.poll()})\n{one.words()}"
            for place, one in enumerate(self.joiners)
        )


def agents(of):
    """Return the agents that a process has started."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if (
                    int(fields[1]) == of.pid
                    and b"agent_main" in Path(f"/proc/{entry}/cmdline").read_bytes()
                ):
                    found.append(int(entry))
    return found


def interrupt(process):
    process.send_signal(signal.SIGINT)
