"""The standard streams and the signals of the launcher: reading and writing never block its loop.

A reader of the output may stop for good: a pager, a terminal after Ctrl-S, a stuck collector of
logs. The loop that supervises the ranks must not stop with it. So each writer keeps a queue for
bytes that it does not take at once, and the loop polls it for writing. While the queue is full, the
launcher does not read the pipes of the ranks, and a rank that writes much waits in its own `write`.

O_NONBLOCK belongs to an open file, which we share with the shell and other programs on the
terminal, so we never set it on an inherited descriptor. Each kind of file needs another method:

pipe, terminal
    We open it again through /proc, which makes an open file of our own. `poll` alone is not
    enough: a terminal with room for one byte is writable, and a write of two bytes blocks there.
    Opening fails for the terminal of another user after `su` or in a container. Then /dev/tty
    serves if that terminal controls us. Else each write follows a poll and has at most PIPE_BUF
    bytes, which a writable pipe takes whole. That holds while no other program writes to the same
    pipe. Only a terminal of another user that does not control us can still block.
socket
    Each send has the flag MSG_DONTWAIT.
file, /dev/null and other devices
    Writes do not wait. A file server that does not answer blocks us as every other program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import termios
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncvar.core.settings import RuntimeConfig
    from syncvar_launcher.io.output import OutputForwarder

QUEUE_NBYTES = 1 << 20
_PIECE_NBYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_NEVER_IGNORED = (signal.SIGINT, signal.SIGTERM)
_CHUNK = 1 << 16
_UNFED_MAX = 1 << 20
_NO_SIZE = (0, 0)


class NonblockingWriter:
    """An inherited descriptor, which stays open and blocking, and the bytes that wait for it."""

    def __init__(self, descriptor: int) -> None:
        self.written = 0  # bytes
        self.dropped = 0  # bytes given up since `renew`
        self._queue = bytearray()
        self._is_abandoned = False
        # The value of `written` when the reader last took bytes, and that time.
        self._seen: tuple[int, float] | None = None
        self._piece_nbytes = _PIECE_NBYTES
        self._polls = False
        self._socket: socket.socket | None = None
        self._inherited = self._own = descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(descriptor))
        elif stat.S_ISFIFO(mode) or os.isatty(descriptor):
            self._own = _reopen(descriptor)
            if self._own < 0:
                self._own, self._polls = descriptor, True
                self._piece_nbytes = select.PIPE_BUF

    def close(self) -> None:
        """Close our own open file. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._own != self._inherited:
            os.close(self._own)
            self._own = self._inherited

    @property
    def is_full(self) -> bool:
        """Whether the queue is full, so that the launcher should read no more for it."""
        return len(self._queue) >= QUEUE_NBYTES

    @property
    def descriptor(self) -> int:
        """The descriptor to poll for writing, or -1 if no bytes wait."""
        if not self._queue:
            return -1
        return self._own if self._socket is None else self._socket.fileno()

    def write(self, data: bytes, /) -> int:
        """Write `data`; bytes that the reader does not take now wait in the queue."""
        if self._is_abandoned:
            self.dropped += len(data)
        else:
            self._queue += data
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Write as much as the reader takes now. Raises the errors of `write`."""
        try:
            while self._queue:
                with memoryview(self._queue) as view, view[: self._piece_nbytes] as piece:
                    count = self._put(piece)
                del self._queue[:count]
                self.written += count
        except BlockingIOError:
            pass
        except OSError:
            self._queue.clear()
            raise

    def give_up(self) -> None:
        """Drop the queue, and all later bytes."""
        with contextlib.suppress(OSError):
            self.flush()
        self._is_abandoned = True
        self.dropped += len(self._queue)
        self._queue.clear()

    def give_up_after(self, patience_s: float, now: float) -> float:
        """Give up if the reader has taken nothing for too long; return when to call again.

        `patience_s` counts from the first call with a finite number; infinite never gives up.
        """
        if not self._queue or patience_s == float("inf"):
            self._seen = None
            return float("inf")
        if self._seen is None or self._seen[0] != self.written:
            self._seen = self.written, now
        due = self._seen[1] + patience_s
        if now >= due:
            self.give_up()
            return float("inf")
        return due

    def renew(self) -> int:
        """Write again after giving up; return how many bytes were dropped."""
        dropped, self.dropped = self.dropped, 0
        self._is_abandoned, self._seen = False, None
        return dropped

    def _put(self, piece: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(piece, socket.MSG_DONTWAIT)
        if self._polls:
            poller = select.poll()
            poller.register(self._own, select.POLLOUT)
            if not poller.poll(0):
                raise BlockingIOError
        return os.write(self._own, piece)


class Outlets:
    """Standard output and standard error of the launcher.

    If both are the same pipe, terminal or socket, they share one queue, which keeps the order.
    """

    def __init__(self, out: int, err: int) -> None:
        # The seconds until the launcher gives up a reader that takes nothing. They are infinite
        # during a job, because a pager may wait for its user. The end of a job makes them finite.
        self.patience_s = float("inf")
        self.out = NonblockingWriter(out)
        is_shared = os.path.sameopenfile(out, err) and not stat.S_ISREG(os.fstat(out).st_mode)
        self.err = self.out if is_shared else NonblockingWriter(err)

    def close(self) -> None:
        """Close our own open files. Idempotent."""
        self.out.close()
        self.err.close()

    def has_room(self) -> bool:
        """Return whether no queue is full."""
        return not any(writer.is_full for writer in self._each())

    def is_full(self, stream: str) -> bool:
        """Return whether the launcher should read no more for a stream, "out" or "err"."""
        return (self.out if stream == "out" else self.err).is_full

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [writer.descriptor for writer in self._each() if writer.descriptor >= 0]

    def give_up_late(self, now: float) -> float:
        """Give up readers that are too late; return when to look again, on the same clock."""
        return min(writer.give_up_after(self.patience_s, now) for writer in self._each())

    def renew(self) -> int:
        """Write again, with infinite patience; return how many bytes were dropped."""
        self.patience_s = float("inf")
        return sum(writer.renew() for writer in self._each())

    def are_empty(self) -> bool:
        """Return whether no bytes wait."""
        return not self.descriptors()

    @property
    def dropped(self) -> int:
        """The number of bytes given up since `renew`."""
        return sum(writer.dropped for writer in self._each())

    def _each(self) -> list[NonblockingWriter]:
        return [self.out] if self.out is self.err else [self.out, self.err]


def patience_s(config: RuntimeConfig) -> float:
    """Return how many seconds a reader may take nothing while a job ends.

    That is half of the time between SIGTERM and SIGKILL. A rank that waits in `print` gets the
    other half to end cleanly, because the launcher then reads and drops its output.
    """
    return config.term_grace_s / 2


def await_readers(
    forwarder: OutputForwarder,
    outlets: Outlets,
    watch: SignalWatch,
    is_enough: Callable[[], bool],
    limit: float,
) -> None:
    """Wait until the readers have taken enough.

    It gives up readers after the patience, and at once after a signal or at the limit. Signals stay
    pending for the caller. `limit` is on the clock of `watch`.
    """
    while not is_enough():
        now = watch.now()
        if watch.pending or now >= limit:
            outlets.patience_s = 0.0
        due = min(outlets.give_up_late(now), limit)
        if not is_enough():
            wait(forwarder, outlets, watch, due - now)


def wait(forwarder: OutputForwarder, outlets: Outlets, watch: SignalWatch, seconds: float) -> None:
    """Wait at most so many seconds for a signal or a reader, and write waiting bytes."""
    poller = select.poll()
    for descriptor in outlets.descriptors():
        poller.register(descriptor, select.POLLOUT)
    for descriptor in watch.descriptors():
        poller.register(descriptor, select.POLLIN)
    limit_ms = None if seconds == float("inf") else int(max(0.0, seconds) * 1000) + 1
    for descriptor, _ in poller.poll(limit_ms):
        watch.readable(descriptor)
    if watch.is_to_stop:
        watch.stop()
    forwarder.flush()


def _reopen(descriptor: int) -> int:
    """Return a non-blocking descriptor of our own on the same pipe or terminal, or -1."""
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # another user's, or a pipe that nobody can read any more
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    with contextlib.suppress(OSError):
        if os.isatty(descriptor) and os.fstat(descriptor).st_rdev == _controlling_terminal():
            return os.open("/dev/tty", flags)
    return -1


def _controlling_terminal() -> int:
    """Return the device number (`st_rdev`) of the terminal that controls this process, or 0."""
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
        number = int(file.read().rpartition(b")")[2].split()[4])
    # The kernel writes 12 bits of the major number between 8 and 12 more of the minor one.
    return os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00) if number else 0


class SignalWatch:
    """Collects signals inside its `with` block.

    Its handlers only note them; the owner polls and acts.

    Args:
        environ: SYNCVAR_PARENT_FD in it is the read end of a pipe. `sv.run` holds the other end,
            and its end means that the calling program is gone.
        forwarded: The numbers of the signals to forward to the ranks.
    """

    def __init__(self, environ: Mapping[str, str], forwarded: Sequence[int] = ()) -> None:
        # Signals that ask the job to end and are not handled yet, oldest first.
        self.pending: deque[int] = deque()
        # Signals to forward, oldest first.
        self.passing: deque[int] = deque()
        self._forwarded = forwarded
        self.is_to_stop = False  # after Ctrl-Z (SIGTSTP): the owner should call `stop`
        self.is_orphan = False  # the program that called `sv.run` is gone
        self._stopped_s = 0.0
        self._parent = int(environ.get("SYNCVAR_PARENT_FD", "-1"))
        if self._parent >= 0:
            os.set_inheritable(self._parent, False)  # noqa: FBT003  (positional only)
        self._before: dict[int, Any] = {}
        self._read = self._write = self._previous = -1

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # A signal that was ignored at the start stays ignored, such as SIGHUP under nohup; SIGINT
        # and SIGTERM do not.
        for number in (*_SIGNALS, *self._forwarded):
            if number in _NEVER_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._signalled)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._previous)
        for number, handler in self._before.items():
            # Without an error the end of the job is known, and nothing is left to interrupt.
            signal.signal(number, signal.SIG_IGN if error[0] is None else handler)
        os.close(self._read)
        os.close(self._write)

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [self._read, self._parent] if self._parent >= 0 else [self._read]

    def readable(self, descriptor: int) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        if descriptor == self._read:
            os.read(self._read, 4096)
        elif descriptor == self._parent:
            self._parent = -1
            self.is_orphan = True
            self.pending.append(signal.SIGHUP)

    def now(self) -> float:
        """Return the seconds of a clock that stands during `stop`, which counts for no limit."""
        return time.monotonic() - self._stopped_s

    def stop(self) -> float:
        """Stop this process as Ctrl-Z does; return, after it continues, how many seconds it stood.

        In an orphaned process group no shell could continue it, and the system does not stop it.
        """
        self.is_to_stop = False
        began = time.monotonic()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._signalled)
        lasted = time.monotonic() - began
        self._stopped_s += lasted
        while signal.SIGCONT in self.passing:  # it was for us; our caller continues the ranks
            self.passing.remove(signal.SIGCONT)
        return lasted

    def _signalled(self, number: int, _frame: object) -> None:
        if number == signal.SIGTSTP:
            self.is_to_stop = True
        elif number in self._forwarded:
            self.passing.append(number)
        else:
            self.pending.append(number)


class Input:
    """The launcher's standard input, for a rank on another host: rank 0, or the debugged rank.

    It never blocks: its owner polls the descriptors. The debugged rank gets a terminal of its own
    on its host, which edits and echoes lines. Meanwhile the terminal here forwards key by key.
    Ctrl-C and Ctrl-Z reach the launcher as signals, as on one host.

    Args:
        descriptor: The descriptor of the input.
        screen: The descriptor of the rank's output.
        is_debugged: Whether the rank that reads is debugged; it has a terminal if both descriptors
            are one.
    """

    def __init__(self, descriptor: int, screen: int, *, is_debugged: bool) -> None:
        self.unfed = 0  # the number of bytes that were read, and that the rank has not taken
        self._descriptor = descriptor
        self._is_over = False
        self._before: list[int | list[bytes | int]] | None = None
        has_terminal = is_debugged and os.isatty(descriptor) and os.isatty(screen)
        # Rows and columns of the rank's terminal, or None.
        self.size = _size(descriptor) if has_terminal else None

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        is_wanted = not self._is_over and self.unfed < _UNFED_MAX and self._is_ours()
        return [self._descriptor] if is_wanted else []

    def is_at(self, descriptor: int) -> bool:
        """Return whether to read from this descriptor."""
        return descriptor == self._descriptor and not self._is_over

    def read(self) -> bytes | None:
        """Return new bytes: empty at the end, None if there are none."""
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO and os.isatty(self._descriptor):
                return None  # the shell has the terminal again
            data = b""
        self.unfed += len(data)
        self._is_over = not data
        return data

    def fed(self, count: int) -> None:
        """Note that the rank has taken so many bytes."""
        self.unfed = max(0, self.unfed - max(0, count))

    def take(self) -> tuple[int, int] | None:
        """Forward key by key when the terminal is ours; return its size after a change."""
        if self.size is None or self._is_over or not self._is_ours():
            return None
        with contextlib.suppress(termios.error):
            if self._before is None:
                before = termios.tcgetattr(self._descriptor)
                keys = list(before)
                keys[0] &= ~termios.ICRNL
                keys[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, keys)
                self._before = before
        before_size, self.size = self.size, _size(self._descriptor)
        return self.size if self.size != before_size else None

    def let_go(self) -> None:
        """Restore the terminal. Idempotent."""
        before, self._before = self._before, None
        if before is not None and self._is_ours():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)

    def close(self) -> None:
        """Read no more, and restore the terminal. Idempotent."""
        self._is_over = True
        self.let_go()

    def _is_ours(self) -> bool:
        """Return whether we may read: the terminal belongs to the foreground process group."""
        try:
            return not os.isatty(self._descriptor) or os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False


def open_terminal(size: Sequence[int]) -> tuple[int, int]:
    """Return the two ends of a new terminal with these rows and columns: ours, and the rank's."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.ONLCR  # the launcher's terminal does that
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    resize(ours, size)
    return ours, theirs


def resize(terminal: int, size: Sequence[int]) -> None:
    """Set rows and columns of a terminal."""
    rows_and_columns = (max(0, min(one, 0xFFFF)) for one in size[:2])
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *rows_and_columns, 0, 0))


def _size(terminal: int) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(terminal)
        return rows, columns
    return _NO_SIZE
