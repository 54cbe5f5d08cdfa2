"""Processes by session, from /proc; as a program, the cleanup process of a launcher.

The cleanup process outlives a killed launcher just long enough to clean up after it. The launcher
starts this file by path, without site-packages, so it imports nothing of the package. The process
blocks on standard input, a pipe whose write end only the launcher has. A line "+pid start" means
that a worker began, "-pid" that it ended and its session is empty, "." that the job is over. If the
input ends without ".", the launcher was killed. Then the process kills the workers' sessions and
removes the private directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_STAT_MAX = 4096  # numbers, and a name of at most 64 bytes


def _fields(pid: int) -> list[str]:
    try:
        # Not open(), which makes three times as many system calls.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(descriptor, _STAT_MAX).decode("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return []
    finally:
        os.close(descriptor)


def process_state(pid: int) -> str:
    """Return the state letter of a process ("R", "S", "D", "T", …); empty after its end."""
    fields = _fields(pid)
    return fields[0] if fields else ""


def busy_ticks(pid: int) -> int:
    """Return the processor time of all threads of a process in clock ticks; -1 after its end."""
    fields = _fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else -1


def resident_pages(pid: int) -> int:
    """Return the resident memory of a process in pages; 0 after its end."""
    fields = _fields(pid)
    return max(0, int(fields[21])) if fields else 0


def start_time(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; -1 after its end."""
    fields = _fields(pid)
    return int(fields[19]) if fields else -1


def members(sessions: dict[int, int]) -> list[int]:
    """Return the processes of sessions.

    `sessions` maps the leader's process id to its start time. A process that started before its
    leader does not count: the system has reused the number.
    """
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and _may_be_of(sessions, int(name)):
            fields = _fields(int(name))
            if fields and fields[0] != "Z":
                started = sessions.get(int(fields[3]))
                if started is not None and int(fields[19]) >= started:
                    found.append(int(name))
    return found


def _may_be_of(sessions: dict[int, int], pid: int) -> bool:
    """Return whether a process may be in a session; much faster than reading its state."""
    try:
        return os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    except OSError:  # a security policy forbids the call; /proc still shows the session
        return True


def groups(leaders: list[int]) -> dict[int, list[int]]:
    """Return by leader the processes of the process groups that they lead, the leaders included."""
    found: dict[int, list[int]] = {leader: [] for leader in leaders}
    for name in os.listdir("/proc") if found else ():  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError):
                group = os.getpgid(int(name))
                if group in found:
                    found[group].append(int(name))
    return found


def expects(pid: int, number: int) -> bool:
    """Return whether a process handles, ignores or blocks a signal, so that it survives it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    kinds = (b"SigBlk:", b"SigIgn:", b"SigCgt:")
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(kinds)]
    return any(mask >> (number - 1) & 1 for mask in masks)


def signal_sessions(sessions: dict[int, int], number: int) -> set[int]:
    """Send a signal once to every process of these sessions, new ones included; return them.

    Stopped processes get no SIGSTOP: another program may have stopped them, and may want them to
    stay so.
    """
    reached: set[int] = set()
    for _ in range(20):
        new = [
            pid
            for pid in members(sessions)
            if pid not in reached and (number != signal.SIGSTOP or process_state(pid) != "T")
        ]
        if not new:
            break
        for pid in new:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
            reached.add(pid)
    return reached


def kill_sessions(sessions: dict[int, int]) -> int:
    """Send SIGKILL to every process of these sessions until none is left; return how many."""
    return len(signal_sessions(sessions, signal.SIGKILL))


def clean_up() -> None:
    """Wait for the end of the launcher, and clean up if it was killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions: dict[int, int] = {}
    with os.fdopen(0, "r", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("+"):
                pid, started = line[1:].split()
                sessions[int(pid)] = int(started)
            elif line.startswith("-"):
                sessions.pop(int(line[1:]), None)
            elif line.startswith("."):
                os._exit(0)  # the launcher waits, and an interpreter's own end takes longer
    kill_sessions(sessions)
    import shutil  # a slow import, and most launchers end cleanly

    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    clean_up()
