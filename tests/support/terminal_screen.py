"""What a person sees on a terminal: the bytes that a program wrote, read by a terminal emulator."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

import pyte


class TerminalScreen:
    """A screen with its history.

    `seen` has every state of the screen after a piece of bytes, as lists of lines without empty ones.
    """

    def __init__(self, rows=24, columns=100):
        self.columns = columns
        self.seen = []
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self._screen.set_mode(pyte.modes.LNM)  # a terminal device turns "\n" into "\r\n"
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data):
        self._stream.feed(data)
        self.seen.append(self.lines())
        return self

    def lines(self):
        """Return all lines, also those that have left the screen at its top."""
        above = [
            "".join(row[column].data for column in range(self.columns))
            for row in self._screen.history.top
        ]
        return [line.rstrip() for line in (*above, *self._screen.display) if line.strip()]


def shown(data):
    """Return the lines that a terminal shows after these bytes."""
    return TerminalScreen().feed(data).lines()


def run_in_terminal(
    command, *, rows=24, columns=100, cwd=None, environ=None, react=None, limit_s=120.0
):
    """Run a command with a terminal; return its exit code and the screen, which has all states.

    `react` gets the lines of the screen after each change.
    """
    screen = TerminalScreen(rows, columns)
    pid, end = pty.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.chdir(cwd or ".")
            os.execvpe(
                command[0], command, {**os.environ, "TERM": "xterm-256color", **(environ or {})}
            )
        os._exit(126)
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    until = time.monotonic() + limit_s
    try:
        while time.monotonic() < until:
            if select.select([end], [], [], 1.0)[0]:
                try:
                    data = os.read(end, 65536)
                except OSError:  # the other end is closed
                    break
                screen.feed(data)
                if react is not None:
                    react(screen.lines())
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screen
