"""Jobs for tests: a script text becomes a launched job, whose output, events, processes and end can be asked for.

Scripts record events with `probe.note("name", key=value)`. Each event carries CLOCK_MONOTONIC, which is the same clock in
all processes of a host, so that a bound "from injection to the last survivor's exception" is a difference of two events.
"""

import contextlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.support.paths import PROFILE

LIMIT_S = 120.0  # against hanging, where nothing is said of how long: it takes a machine that is very slow to come near
# Settings under which nothing is said of a rank that gets no core for a while.
PATIENT = {
    "SYNCVAR_SUSPECT_AFTER_S": "20",
    "SYNCVAR_LOST_AFTER_S": "40",
    "SYNCVAR_STALL_WARNING_S": "60",
}
# In place of the short ones of the profile, for a machine on which others take the cores: for ranks to start and to meet,
# to be heard of, to come to a call, and for survivors to end by themselves. The last is below what scripts sleep that are
# to be ended.
LENIENT = {
    "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "60",
    "SYNCVAR_HANDSHAKE_TIMEOUT_S": "10",
    "SYNCVAR_MISSING_REPORT_S": "20",
    "SYNCVAR_SUSPECT_AFTER_S": "1.5",
    "SYNCVAR_LOST_AFTER_S": "4",
    "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
    "SYNCVAR_ABORT_GRACE_S": "2",
}

PROBE = '''
import json, os, time

RANK = int(os.environ.get("SYNCVAR_RANK", "-1"))
FOLDER = os.path.dirname(os.path.abspath(__file__))
_file = os.open(os.path.join(FOLDER, f"events-{RANK}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(what, **fields):
    """Record an event with the time."""
    line = json.dumps({"rank": RANK, "pid": os.getpid(), "what": what, "at": time.monotonic(), **fields})
    os.write(_file, line.encode() + b"\\n")


def raised(error):
    """Record an exception."""
    note("raised", error=type(error).__name__, text=str(error), lost=getattr(error, "rank", -1),
         reason=getattr(error, "reason", ""), table={str(k): v for k, v in getattr(error, "table", {}).items()})


def failure(function, *arguments, **keywords):
    """Call and return the exception, recorded; None where there was none."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        raised(error)
        return error
    return None


def gate(name, limit_s=120.0):
    """Wait until the test or a rank opens a gate. The wait is one line: the stacks of all who wait are alike."""
    path, until = os.path.join(FOLDER, f"gate-{name}"), time.monotonic() + limit_s
    while not os.access(path, os.F_OK) and time.monotonic() < until: time.sleep(0.005)
    if not os.access(path, os.F_OK):
        raise SystemExit(f"gate {name} stayed shut")


def open_gate(name):
    """Let everybody who waits at a gate go on."""
    with open(os.path.join(FOLDER, f"gate-{name}"), "w"):
        pass


note("began")
'''


def state(pid):
    """Return the state letter of a process, or an empty text when it is gone; a zombie is gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


def await_true(ask, limit_s=LIMIT_S, what="the condition"):
    """Ask until the answer is true; return it."""
    until = time.monotonic() + limit_s
    while not (answer := ask()):
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not come true within {limit_s:g} s")
        time.sleep(0.005)
    return answer


def free_ports(count=1):
    """Return the first of so many ports that are free, one after the other.

    The system gives none of these to a connection by itself, as it may do with those that a program asks it for: a job that is
    told one and listens on it a second later may find a stranger's connection there.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        first = random.randrange(first_given - 10_000, first_given - count)
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
            for port in range(first, first + count):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no port is free")


def line_of(text, comment):
    """Return the number of the line of a script that ends with a comment."""
    (number,) = [
        number for number, line in enumerate(text.split("\n"), 1) if line.endswith(comment)
    ]
    return number


class Job:
    """One launched job.

    Args:
        folder: An empty folder of its own.
        script: Text of the script (indented as you like); None to give the target in `target`.
        workers: How many ranks.
        options: Further options of the launcher.
        target: The target instead of a script, for instance ["-m", "module"].
        arguments: Arguments of the script.
        env: Variables to set for the launcher (and so for the ranks).
        config: The settings; the test profile by default.
        stdin: Bytes for the launcher's standard input; None gives /dev/null.
        prefix: A command to start the launcher with.
        start: How workers begin. "fork" takes a third to a half of the processor time of "spawn", which is the launcher's
            own default: a test of how workers start names it, all others only need them started.
    """

    def __init__(
        self,
        folder,
        script=None,
        *,
        workers=2,
        options=(),
        target=None,
        arguments=(),
        env=None,
        config=PROFILE,
        stdin=None,
        prefix=(),
        start="fork",
    ):
        self.folder = Path(folder)
        self.workers = workers
        (self.folder / "probe.py").write_text(PROBE)
        if script is not None:
            (self.folder / "script.py").write_text(textwrap.dedent(script))
            target = [str(self.folder / "script.py")]
        begin = () if "--no-python" in target else ("--start-method", start)
        self.line = [
            *prefix,
            sys.executable,
            "-m",
            "syncvar_launcher",
            "--config",
            str(config),
            "--no-timestamps",
            "--workers",
            str(workers),
            *begin,
            *options,
            *target,
            *arguments,
        ]
        if stdin is not None:
            (self.folder / "stdin").write_bytes(stdin)
        self.began = time.monotonic()
        variables = {
            **os.environ,
            "XDG_STATE_HOME": str(self.folder / "state"),
            **(LENIENT if config == PROFILE and "SYNCVAR_TEST_BOUNDS" not in os.environ else {}),
            **(env or {}),
        }
        with (
            (self.folder / "launcher.out").open("wb") as out,
            (self.folder / "launcher.err").open("wb") as err,
            (self.folder / "stdin" if stdin is not None else Path(os.devnull)).open("rb") as source,
        ):
            self.process = subprocess.Popen(
                self.line,
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=variables,
            )
        self.ended = None

    # -- what it wrote -----------------------------------------------------------------------------

    @property
    def out(self):
        return (self.folder / "launcher.out").read_text(errors="replace")

    @property
    def err(self):
        return (self.folder / "launcher.err").read_text(errors="replace")

    def lines(self, rank, text=None):
        """Return the lines of a rank on the standard output (or in `text`), without their prefix."""
        prefix = f"[{rank}] "
        lines = (self.out if text is None else text).split("\n")
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]

    @property
    def report(self):
        """The launcher's own words, the failure block included."""
        return "\n".join(line for line in self.err.split("\n") if not re.match(r"\[\d+\] ", line))

    # -- events ------------------------------------------------------------------------------------

    def events(self, what=None, rank=None):
        """Return the events, in order of time."""
        found = []
        for path in self.folder.glob("events-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        found.sort(key=lambda event: event["at"])
        return [e for e in found if what in (None, e["what"]) and rank in (None, e["rank"])]

    def await_events(self, what, count=1, rank=None, limit_s=LIMIT_S):
        """Wait until so many events of a kind have been recorded; return them."""

        def ask():
            found = self.events(what, rank)
            if len(found) < count and self.process.poll() is not None:
                found = self.events(what, rank)
                assert len(found) >= count, f"the job ended before {count} x {what!r}"
            return found if len(found) >= count else None

        try:
            return await_true(ask, limit_s, f"{count} x {what!r}")
        except AssertionError as error:
            error.add_note(repr(self))
            raise

    def open_gate(self, name):
        (self.folder / f"gate-{name}").touch()

    def pids(self):
        """Return rank -> process id of every rank that has begun."""
        return {event["rank"]: event["pid"] for event in self.events("began")}

    # -- ends --------------------------------------------------------------------------------------

    def send(self, number):
        """Send a signal to the launcher; return when."""
        now = time.monotonic()
        self.process.send_signal(number)
        return now

    def kill_rank(self, rank, number=signal.SIGKILL):
        """Send a signal to a rank; return when."""
        pid = self.pids()[rank]
        now = time.monotonic()
        os.kill(pid, number)
        return now

    def wait(self, limit_s=LIMIT_S):
        """Wait for the end; return the launcher's exit code."""
        if self.process.poll() is None:  # `Popen.wait` with a limit asks again every 50 ms
            end = os.pidfd_open(self.process.pid)
            try:
                select.select([end], [], [], limit_s)
            finally:
                os.close(end)
        code = self.process.poll()
        if code is None:
            raise AssertionError(f"the job did not end within {limit_s:g} s:\n{self}")
        if self.ended is None:
            self.ended = time.monotonic()
        return code

    def close(self):
        """End the job if it still runs, the hard way: the guardian and parent-death signals do the rest."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)

    def __repr__(self):
        shown = f"--- {' '.join(self.line[1:])}\n--- exit {self.process.returncode}\n--- out\n{self.out}\n--- err\n{self.err}"
        return shown + "\n--- events\n" + "\n".join(map(str, self.events()))


def last_exception(job, ranks):
    """Return when the last of these ranks recorded its exception, and all those events by rank."""
    events = {event["rank"]: event for event in job.events("raised") if event["rank"] in ranks}
    assert set(events) == set(ranks), (
        f"only ranks {sorted(events)} of {sorted(ranks)} recorded an exception:\n{job}"
    )
    return max(event["at"] for event in events.values()), events


def check_bound(name, seconds, bound_s):
    """Note a measured time, and fail where it has nothing to do with its bound any more.

    The bound is that of the fault matrix, for a machine that has nothing else to do. `fault_bounds.py` compares it with
    the median of several times. A test asserts a deadline only, which no load of a machine comes near.
    """
    print(f"BOUND {name}: {seconds:.3f} s, bound {bound_s:g} s")
    measured = os.environ.get("SYNCVAR_TEST_BOUNDS")
    if measured:
        with Path(measured).open("a") as file:
            file.write(f"{name}\t{seconds:.3f}\t{bound_s:g}\n")
    deadline_s = max(LIMIT_S, 10 * bound_s)
    assert seconds <= deadline_s, (
        f"{name} took {seconds:.3f} s; the bound is {bound_s:g} s, the deadline {deadline_s:g} s"
    )
