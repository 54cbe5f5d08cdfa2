"""The standard streams of the launcher, which never wait for a reader.

A reader may stop for good: a pager, a terminal after Ctrl-S, a stuck collector of logs. The loop
that supervises the ranks must not stop with it. So each outlet has a queue for bytes that it does
not take at once, and the loop polls it for writing. While the queue is full, the launcher does not
read the pipes of the ranks, and a rank that writes much waits in its own `write`.

O_NONBLOCK belongs to an open file, which we share with the shell and other programs on the
terminal, so we never set it on an inherited descriptor. Each kind of outlet needs another way:

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
import os
import select
import socket
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.core.settings import RuntimeConfig
    from syncvar_launcher.io.output import OutputForwarder
    from syncvar_launcher.io.signal_watch import SignalWatch

QUEUE_NBYTES = 1 << 20
_PIECE_NBYTES = 1 << 16


class NonblockingWriter:
    """An inherited descriptor, and the bytes that it has not taken yet.

    Args:
        given: The descriptor; it stays open, and blocking.

    Attributes:
        taken: The number of bytes that it has taken.
        dropped: The number of bytes given up since `renew`.
    """

    def __init__(self, given: int) -> None:
        self.taken = self.dropped = 0
        self._queue = bytearray()
        self._is_given_up = False
        self._seen: tuple[int, float] | None = (
            None  # how many bytes had been taken, and since when no more
        )
        self._most = _PIECE_NBYTES
        self._polls = False
        self._socket: socket.socket | None = None
        self._given = self._own = given
        mode = os.fstat(given).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(given))
        elif stat.S_ISFIFO(mode) or os.isatty(given):
            self._own = _opened_again(given)
            if self._own < 0:
                self._own, self._most, self._polls = given, select.PIPE_BUF, True

    def close(self) -> None:
        """Close our own open file. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._own != self._given:
            os.close(self._own)
            self._own = self._given

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
        if self._is_given_up:
            self.dropped += len(data)
        else:
            self._queue += data
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Write as much as the reader takes now. Raises the errors of `write`."""
        try:
            while self._queue:
                with memoryview(self._queue) as view, view[: self._most] as piece:
                    count = self._put(piece)
                del self._queue[:count]
                self.taken += count
        except BlockingIOError:
            pass
        except OSError:
            self._queue.clear()
            raise

    def give_up(self) -> None:
        """Drop the queue, and all later bytes."""
        with contextlib.suppress(OSError):
            self.flush()
        self._is_given_up = True
        self.dropped += len(self._queue)
        self._queue.clear()

    def give_up_after(self, patience_s: float, now: float) -> float:
        """Give up if the reader has taken nothing for too long; return when to call again.

        Args:
            patience_s: The seconds since the first call with a finite number; infinite never gives
                up.
            now: The time of the monotonic clock, in seconds.
        """
        if not self._queue or patience_s == float("inf"):
            self._seen = None
            return float("inf")
        if self._seen is None or self._seen[0] != self.taken:
            self._seen = self.taken, now
        due = self._seen[1] + patience_s
        if now >= due:
            self.give_up()
            return float("inf")
        return due

    def renew(self) -> int:
        """Write again after giving up; return how many bytes were dropped."""
        dropped, self.dropped = self.dropped, 0
        self._is_given_up, self._seen = False, None
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

    Args:
        out: The descriptor of standard output.
        err: The descriptor of standard error.

    Attributes:
        patience_s: The seconds until the launcher gives up a reader that takes nothing. They are
            infinite during a job, because a pager may wait for its user. The end of a job makes
            them finite.
    """

    def __init__(self, out: int, err: int) -> None:
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
        return not any(outlet.is_full for outlet in self._each())

    def is_full(self, stream: str) -> bool:
        """Return whether the launcher should read no more for a stream, "out" or "err"."""
        return (self.out if stream == "out" else self.err).is_full

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [outlet.descriptor for outlet in self._each() if outlet.descriptor >= 0]

    def give_up_late(self, now: float) -> float:
        """Give up readers that are too late; return when to look again, on the same clock."""
        return min(outlet.give_up_after(self.patience_s, now) for outlet in self._each())

    def renew(self) -> int:
        """Write again, with infinite patience; return how many bytes were dropped."""
        self.patience_s = float("inf")
        return sum(outlet.renew() for outlet in self._each())

    def are_empty(self) -> bool:
        """Return whether no bytes wait."""
        return not self.descriptors()

    @property
    def dropped(self) -> int:
        """The number of bytes given up since `renew`."""
        return sum(outlet.dropped for outlet in self._each())

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

    It gives up readers after the patience, and at once after a signal or at the limit.

    Args:
        forwarder: Writes to the outlets.
        outlets: The outlets.
        watch: Its signals stay pending for the caller.
        is_enough: Returns, after each step, whether to stop; true if no bytes wait.
        limit: The end of the job's time limit, on the clock of `watch`.
    """
    while not is_enough():
        now = watch.now()
        if watch.pending or now >= limit:
            outlets.patience_s = 0.0
        due = min(outlets.give_up_late(now), limit)
        if not is_enough():
            wait(forwarder, outlets, watch, due - now)


def wait(forwarder: OutputForwarder, outlets: Outlets, watch: SignalWatch, seconds: float) -> None:
    """Wait for a signal or a reader, at most so many seconds, and write waiting bytes."""
    poller = select.poll()
    for descriptor in outlets.descriptors():
        poller.register(descriptor, select.POLLOUT)
    for descriptor in watch.descriptors():
        poller.register(descriptor, select.POLLIN)
    for descriptor, _ in poller.poll(
        None if seconds == float("inf") else int(max(0.0, seconds) * 1000) + 1
    ):
        watch.readable(descriptor)
    if watch.is_to_stop:
        watch.stop()
    forwarder.flush()


def _opened_again(descriptor: int) -> int:
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
