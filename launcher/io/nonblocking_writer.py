"""Where the launcher writes, without ever waiting for a reader.

A reader may stop for good: a pager, a terminal after Ctrl-S, a stuck collector of logs. The loop that supervises the ranks
must not stop with it. So each outlet has a queue; what it does not take at once waits there, and the loop polls it for
writing. While the queue is full, the pipes of the ranks are left unread, and who writes much waits in its own `write`.

O_NONBLOCK belongs to an open file, which we share with the shell and with every other program on the terminal: it is
never set on what we were given. How a write is kept from blocking depends on what the outlet is:

pipe, terminal
    It is opened once more through /proc, which makes an open file of our own. (`poll` alone is not enough: a terminal that
    has room for one byte can be written, and a write of two blocks.) Where that is refused, as for the terminal of
    another user after `su` or in a container, /dev/tty serves for the terminal that controls us; else each write follows a
    poll and has at most PIPE_BUF bytes, which a pipe that can be written takes whole. That holds as long as nobody else
    writes to the same pipe, and leaves a terminal of another user that does not control us as the one that can block.
socket
    Each send is told not to wait.
file, /dev/null and other devices
    It takes what it is given. A file server that does not answer blocks us as it blocks everybody.
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
    """A descriptor that we were given to write to, and what it has not taken yet.

    Args:
        given: The descriptor; it stays open, and blocking.

    Attributes:
        taken: How many bytes it has taken.
        dropped: How many bytes were given up since `renew`.
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
        """Close what was opened for it. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._own != self._given:
            os.close(self._own)
            self._own = self._given

    @property
    def is_full(self) -> bool:
        """So much waits that nothing more should be read for it."""
        return len(self._queue) >= QUEUE_NBYTES

    @property
    def descriptor(self) -> int:
        """The descriptor to poll for writing, or -1 where nothing waits."""
        if not self._queue:
            return -1
        return self._own if self._socket is None else self._socket.fileno()

    def write(self, data: bytes, /) -> int:
        """Take all of `data`; what the reader does not take now waits."""
        if self._is_given_up:
            self.dropped += len(data)
        else:
            self._queue += data
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Write as much as the reader takes now. Raises as `write` does."""
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
        """Drop what waits, and whatever is still to come."""
        with contextlib.suppress(OSError):
            self.flush()
        self._is_given_up = True
        self.dropped += len(self._queue)
        self._queue.clear()

    def give_up_after(self, patience_s: float, now: float) -> float:
        """Give up where the reader has taken nothing for so long; it is called again and again.

        Args:
            patience_s: Seconds, which count from the first call that names a finite number; infinite never gives up.
            now: The monotonic clock, in seconds.

        Returns:
            When to call again, on the same clock; infinite where there is nothing to wait for.
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
        """Write again after having given up; return how many bytes have been dropped."""
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
    """The standard output and the standard error of the launcher.

    Where both are the same pipe, terminal or socket they share one queue, so that what is written to them keeps its order.

    Args:
        out: Descriptor of the standard output.
        err: Descriptor of the standard error.

    Attributes:
        patience_s: How long a reader may take nothing before it is given up, in seconds. Infinite while a job goes on: a
            pager may wait for its user as long as it likes. Who ends a job makes it finite.
    """

    def __init__(self, out: int, err: int) -> None:
        self.patience_s = float("inf")
        self.out = NonblockingWriter(out)
        is_shared = os.path.sameopenfile(out, err) and not stat.S_ISREG(os.fstat(out).st_mode)
        self.err = self.out if is_shared else NonblockingWriter(err)

    def close(self) -> None:
        """Close what was opened for them. Idempotent."""
        self.out.close()
        self.err.close()

    def has_room(self) -> bool:
        """Return whether none is full."""
        return not any(outlet.is_full for outlet in self._each())

    def is_full(self, stream: str) -> bool:
        """Return whether nothing more should be read for a stream, "out" or "err"."""
        return (self.out if stream == "out" else self.err).is_full

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [outlet.descriptor for outlet in self._each() if outlet.descriptor >= 0]

    def give_up_late(self, now: float) -> float:
        """Give up each whose reader is too late; return when to look again, on the same clock."""
        return min(outlet.give_up_after(self.patience_s, now) for outlet in self._each())

    def renew(self) -> int:
        """Write again, with endless patience; return how many bytes have been dropped."""
        self.patience_s = float("inf")
        return sum(outlet.renew() for outlet in self._each())

    def are_empty(self) -> bool:
        """Return whether nothing waits."""
        return not self.descriptors()

    @property
    def dropped(self) -> int:
        """How many bytes were given up since `renew`."""
        return sum(outlet.dropped for outlet in self._each())

    def _each(self) -> list[NonblockingWriter]:
        return [self.out] if self.out is self.err else [self.out, self.err]


def patience_s(config: RuntimeConfig) -> float:
    """Return how long a reader may take nothing while a job ends, in seconds.

    Half of the time between SIGTERM and SIGKILL: a rank that waits in `print` for a reader who never comes back gets the
    other half to end in order, for what it writes is read and dropped then.
    """
    return config.term_grace_s / 2


def await_readers(
    forwarder: OutputForwarder,
    outlets: Outlets,
    watch: SignalWatch,
    is_enough: Callable[[], bool],
    limit: float,
) -> None:
    """Wait until the readers have taken enough, or are given up: after the patience, at once for a signal or at the limit.

    Args:
        forwarder: What writes to the outlets.
        outlets: What is waited for.
        watch: Its signals stay pending, for the caller to act on.
        is_enough: Asked after each step; true where nothing waits.
        limit: When the job's time is over, on the clock of `watch`.
    """
    while not is_enough():
        now = watch.now()
        if watch.pending or now >= limit:
            outlets.patience_s = 0.0
        due = min(outlets.give_up_late(now), limit)
        if not is_enough():
            wait(forwarder, outlets, watch, due - now)


def wait(forwarder: OutputForwarder, outlets: Outlets, watch: SignalWatch, seconds: float) -> None:
    """Wait for a signal or a reader, at most so many seconds (which may be infinite), and write what can be written."""
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
    """Return a descriptor of an open file of our own on the same pipe or terminal, which does not block; -1 where refused."""
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # another user's, or a pipe that nobody can read any more
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    with contextlib.suppress(OSError):
        if os.isatty(descriptor) and os.fstat(descriptor).st_rdev == _controlling_terminal():
            return os.open("/dev/tty", flags)
    return -1


def _controlling_terminal() -> int:
    """Return the number of the terminal that controls this process, as `st_rdev` has it, or 0."""
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
        number = int(file.read().rpartition(b")")[2].split()[4])
    # The kernel writes 12 bits of the major number between 8 and 12 more of the minor one.
    return os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00) if number else 0
