"""One other host, seen from the launcher: the process that leads to its agent, and what goes through its pipes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from syncvar.errors import WireError
from syncvar_launcher.children import child_of
from syncvar_launcher.messages import Message, Reader, pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.hostfile import Host

__all__ = ["RemoteHost"]

_CHUNK = 1 << 18
_WORDS_MAX = 8192
_TAKEN_AT_ONCE = 8  # reads, so that a host that says much does not keep the launcher from the others


class RemoteHost:
    """The way to the agent of a host. It never blocks: its owner polls the descriptors.

    Args:
        host: Which one.
        argv: What leads there: ssh, or the agent itself on this machine.
        environ: Its environment; None for the launcher's own.

    Attributes:
        began: When it was begun to log in, in seconds of the monotonic clock.
        is_late: It was given up because it did not answer in time.
        facts: What its agent said of it; empty until then.
        heard: When something came last, in seconds of the monotonic clock.
        why_gone: Why nothing more will come, in words; empty while it may.
    """

    def __init__(self, host: Host, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.host = host
        self.began = time.monotonic()
        self.is_late = False
        self.argv = list(argv)
        self.facts: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.why_gone = ""
        self._words = bytearray()
        self._reader = Reader(awaits_greeting=True)
        self._unsent: deque[memoryview] = deque()
        self.process = subprocess.Popen(
            self.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the launcher's
            env=None if environ is None else dict(environ),
            preexec_fn=child_of(os.getpid()),  # noqa: PLW1509  (one that hangs before it reads its input ends with us too)
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._in, self._out, self._err = (one.fileno() for one in (self.process.stdin, self.process.stdout, self.process.stderr))
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._open = {self._out, self._err}

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return list(self._open)

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [self._in] if self._unsent and not self.why_gone else []

    def send(self, kind: str, **fields: Any) -> None:
        """Say something to the agent; nothing where it is gone."""
        if not self.why_gone:
            self._unsent.append(memoryview(pack(kind, **fields)))
            self.flush()

    def flush(self) -> None:
        """Send what has not been sent, as far as it goes."""
        while self._unsent and not self.why_gone:
            try:
                count = os.write(self._in, self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the end of its output says why
                return
            self._unsent[0] = self._unsent[0][count:]
            if not self._unsent[0]:
                self._unsent.popleft()

    def readable(self, descriptor: int) -> list[Message]:
        """Handle a descriptor that poll reported; others are not looked at."""
        if descriptor not in self._open:
            return []
        messages: list[Message] = []
        for _ in range(_TAKEN_AT_ONCE):
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if descriptor == self._err:
                self._words += data
                del self._words[:-_WORDS_MAX]
            if not data:
                self._open.discard(descriptor)
                if descriptor == self._out:
                    self._end("its agent has ended")
                break
            if descriptor == self._out:
                self.heard = time.monotonic()
                try:
                    messages += self._reader.feed(data)
                except WireError as error:
                    self.refuse(str(error))
                    break
        return messages

    def words(self) -> str:
        """Return the last of what ssh, the remote shell and the agent wrote on their standard error."""
        for _ in range(_TAKEN_AT_ONCE):
            if self._err in self._open:
                self.readable(self._err)
        before = self._reader.before if not self._reader.has_greeted else b""
        return (before + bytes(self._words)).decode("utf-8", "replace").strip()

    def give_up(self) -> None:
        """End the way to an agent that does not answer in time."""
        self.is_late = True
        self._end("it does not answer in time")
        self.kill()

    def refuse(self, why: str) -> None:
        """End the way to an agent that says what it must not."""
        self._end(f"its agent is not understood: {why}")
        self.kill()

    def drain(self) -> None:
        """Read what has come while nobody looked: the end of the agent perhaps."""
        for descriptor in list(self._open):
            self.readable(descriptor)

    def end_input(self) -> None:
        """Let the agent end, by the end of its input."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def kill(self) -> None:
        """End the process that leads to the agent; the end of its input is the agent's end."""
        if self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Let go: the agent ends when its input does."""
        for one in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                if one is not None:
                    one.close()
        self._open.clear()
        self._unsent.clear()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def status(self, timeout_s: float = 1.0) -> int | None:
        """Return how the process that leads to the agent ended, waiting a moment for it; None where it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def _end(self, why: str) -> None:
        self.why_gone = self.why_gone or why
        self._unsent.clear()
