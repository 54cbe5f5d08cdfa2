"""The launcher's connection to the agent of another host: a process such as ssh, and its pipes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from typing import IO, TYPE_CHECKING, Any, Protocol

from syncvar.core.errors import WireError
from syncvar_launcher.hosts.agent_protocol import Message, Reader, checked_facts, pack
from syncvar_launcher.hosts.pipe_outbox import PipeOutbox
from syncvar_launcher.local.worker_start import child_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.options.hostfile import Host

NOT_UNDERSTOOD = "its agent is not understood"

_CHUNK = 1 << 18
_WORDS_MAX = 8192
_TAKEN_AT_ONCE = (
    8  # reads, so that a host that says much does not keep the launcher from the others
)


class AgentProcess(Protocol):
    """The process that leads to an agent, or an object with the same three pipes."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Takes messages of the launcher."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Yields messages of the agent."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """Yields other text."""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status after its end."""

    def kill(self) -> None:
        """Kill it."""


def start_agent(
    argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ssh, or an agent on this machine; `environ` None passes our own environment."""
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is the launcher's
        env=None if environ is None else dict(environ),
        preexec_fn=child_of(os.getpid()),  # noqa: PLW1509  (one that hangs before it reads its input ends with us too)
    )


class RemoteHost:
    """The connection to the agent of a host. It never blocks: its owner polls the descriptors.

    Args:
        host: The host.
        process: The process that leads to the agent.
        known: Facts that override those of the agent: the addresses of a host that has joined.

    Attributes:
        began: When the login began, in seconds of the monotonic clock.
        facts: The facts that the agent has sent; empty before.
        heard: When a message last came, in seconds of the monotonic clock.
        why_gone: Why no more messages will come; empty while they may.
        staged: The folder with the copy of the script's folder; empty without one.
        is_ended: Whether the launcher ended the connection, so that the exit status tells nothing.
    """

    def __init__(
        self, host: Host, process: AgentProcess, known: Mapping[str, Any] | None = None
    ) -> None:
        self.host = host
        self.process = process
        self.known = dict(known or {})
        self.began = time.monotonic()
        self.facts: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.loss_reason = ""
        self.is_ended = False
        self.staged = ""
        self._words = bytearray()
        self._reader = Reader(awaits_greeting=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        to_agent, self._out, self._err = (one.fileno() for one in pipes)
        for descriptor in (to_agent, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._outbox = PipeOutbox(to_agent)
        self._open = {self._out, self._err}

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return list(self._open)

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return self._outbox.descriptors()

    @property
    def unsent_nbytes(self) -> int:
        """The number of bytes that wait to be sent."""
        return self._outbox.nbytes

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the agent, unless it is gone."""
        if not self.loss_reason:
            self._outbox.add(pack(kind, **fields))
            self.flush()

    def flush(self) -> None:
        """Send waiting bytes, as far as the pipe takes them.

        The output of a process that reads no more shows the reason at its end.
        """
        self._outbox.flush()

    def readable(self, descriptor: int) -> list[Message]:
        """Handle a descriptor that poll reported; ignore others."""
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
                    self._lose("its agent has ended")
                break
            if descriptor == self._out:
                self.heard = time.monotonic()
                try:
                    messages += self._reader.feed(data)
                except WireError as error:
                    self.end(f"{NOT_UNDERSTOOD}: {error}")
                    break
        return messages

    def learn(self, facts: Message) -> None:
        """Keep the facts that the agent sends."""
        self.facts = {**checked_facts(facts), **self.known}

    def words(self) -> str:
        """Return the last text of ssh, the remote shell and the agent on standard error."""
        for _ in range(_TAKEN_AT_ONCE):
            if self._err in self._open:
                self.readable(self._err)
        before = self._reader.before if not self._reader.has_greeted else b""
        return (before + bytes(self._words)).decode("utf-8", "replace").strip()

    def end(self, why: str) -> None:
        """End the connection and so the agent; `why` is the reason in words."""
        self._lose(why)
        self.is_ended = True
        self.kill()

    def drain(self) -> None:
        """Read messages that have arrived unread, perhaps the agent's end."""
        for descriptor in list(self._open):
            self.readable(descriptor)

    def end_input(self) -> None:
        """Let the agent end by closing its input."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def kill(self) -> None:
        """Kill the process that leads to the agent; the end of its input ends the agent."""
        if self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Release the connection; the agent ends with its input."""
        for one in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                if one is not None:
                    one.close()
        self._open.clear()
        self._outbox.clear()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def status(self, timeout_s: float = 1.0) -> int | None:
        """Return the exit status of the process that leads to the agent; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def _lose(self, why: str) -> None:
        self.loss_reason = self.loss_reason or why
        self._outbox.clear()


def poll_hosts(
    remotes: Sequence[RemoteHost], timeout_s: float, others: Sequence[int] = ()
) -> tuple[list[list[Message]], list[int]]:
    """Wait for messages, or for room to send; return the messages of each host.

    Args:
        remotes: The hosts.
        timeout_s: The longest wait, in seconds.
        others: More descriptors to poll for reading; it returns those that are ready.
    """
    poller = select.poll()
    for one in remotes:
        for descriptor in one.descriptors():
            poller.register(descriptor, select.POLLIN)
        for descriptor in one.unsent():
            poller.register(descriptor, select.POLLOUT)
    for descriptor in others:
        poller.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]
    said: list[list[Message]] = []
    for one in remotes:
        one.flush()
        said.append([message for descriptor in ready for message in one.readable(descriptor)])
    return said, [descriptor for descriptor in others if descriptor in ready]
