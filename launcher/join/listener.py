"""The address at which hosts join a job, and the connection of each agent to the launcher.

It admits hosts with the key. For the launcher, a host that has joined looks like one that ssh leads
to: three pipes and an exit status. A thread carries their bytes over one encrypted ZeroMQ socket.
It takes no more on one side than the other side reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from syncvar.core.errors import ConfigError, WireError, error_message
from syncvar.transports.curve import Gate, link_keys
from syncvar.transports.zeromq_sockets import (
    bound_messages,
    bracket_ipv6,
    events_of,
    monitor_of,
    set_family,
    tcp_endpoint,
)
from syncvar_launcher.hosts.agent_protocol import (
    FRAME_NBYTES,
    FRAMES_QUEUED,
    Hello,
    JoinFrame,
    PipeOutbox,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

_PING_S = 0.25  # a lost host shows when a frame cannot be sent to it
_RETRY_S = 0.005
_HELD_MAX = 16 << 20
_MESSAGES_MAX = 16  # in _REPEAT_S
_REPEAT_S = 60.0
_LINGER_MS = 1000
_LOST = 255  # the exit status of a lost connection, as ssh has it
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_OTHER_KEY = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


class JoinedHost(NamedTuple):
    """A host that has joined: its greeting, its address, and the connection to its agent."""

    hello: Hello
    address: str
    pipe: AgentPipe


class AgentPipe:
    """The connection to the agent of a host that has joined; it looks like a process.

    `refuse` sends the host the reason why the job rejects it, and disconnects it. `again` starts
    another agent there; it returns None if the host is gone.
    """

    def __init__(
        self,
        refuse: Callable[[str], None],
        again: Callable[[], AgentPipe | None],
        kill: Callable[[AgentPipe], None],
    ) -> None:
        self.refuse, self.again, self._kill = refuse, again, kill
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        self.inner = ends[0][0], ends[1][1], ends[2][1]
        for descriptor in self.inner:
            os.set_blocking(descriptor, False)
        self.stdin = open(ends[0][1], "wb", buffering=0)  # noqa: SIM115
        self.stdout = open(ends[1][0], "rb", buffering=0)  # noqa: SIM115
        self.stderr = open(ends[2][0], "rb", buffering=0)  # noqa: SIM115
        self._has_ended = threading.Event()
        self._status: int | None = None

    def ended(self, status: int) -> None:
        """Note the exit status; only the first one counts."""
        if not self._has_ended.is_set():
            self._status = status
            self._has_ended.set()

    def poll(self) -> int | None:
        """Return the exit status, or None while the agent runs."""
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status after the agent's end."""
        if not self._has_ended.wait(timeout) or self._status is None:
            raise subprocess.TimeoutExpired("the agent of a host that has joined", timeout or 0.0)
        return self._status

    def kill(self) -> None:
        """End the agent."""
        self._kill(self)


class _HostLink:
    """A host that has joined, as the thread of the listener sees it."""

    def __init__(self, identity: bytes, name: str) -> None:
        self.identity = identity
        self.name = name
        self.unsent: deque[bytes] = deque()
        self.pipe: AgentPipe | None = None
        self._source = -1
        self._outboxes: list[tuple[int, PipeOutbox]] = []
        self._status: int | None = None

    def begin(self, pipe: AgentPipe) -> None:
        """Adopt the connection to a new agent."""
        self.end(_LOST)
        self.let_go()
        self.pipe, self._status = pipe, None
        self._source, *sinks = pipe.inner
        self._outboxes = [(descriptor, PipeOutbox(descriptor)) for descriptor in sinks]

    def sources(self) -> list[int]:
        return [self._source] if self._source >= 0 and not self.unsent else []

    def sinks(self) -> list[int]:
        return [descriptor for _, outbox in self._outboxes for descriptor in outbox.descriptors()]

    @property
    def held_nbytes(self) -> int:
        return sum(outbox.nbytes for _, outbox in self._outboxes)

    def write(self, number: int, data: bytes) -> None:
        """Forward output (0) or standard error (1) of the agent."""
        if self._outboxes and self._status is None:
            self._outboxes[number][1].add(data)
            self._outboxes[number][1].flush()

    def read(self) -> bytes | None:
        """Return bytes for the agent: empty at the end, None if there are none yet."""
        try:
            data = os.read(self._source, FRAME_NBYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._close_source()
        return data

    def end(self, status: int) -> None:
        """Note that the agent has ended; the rest of its output is still forwarded."""
        if self.pipe is not None and self._status is None:
            self._status = status
            self._close_source()
        self.settle()

    def settle(self) -> None:
        """Forward what is held, and then the end."""
        for _, outbox in self._outboxes:
            outbox.flush()
        if self._status is not None and not self.held_nbytes:
            self.let_go()

    def let_go(self) -> None:
        """Close everything, and drop what is held."""
        self._close_source()
        for descriptor, _ in self._outboxes:
            os.close(descriptor)
        self._outboxes = []
        pipe, self.pipe = self.pipe, None
        if pipe is not None:
            pipe.ended(_LOST if self._status is None else self._status)

    def _close_source(self) -> None:
        if self._source >= 0:
            os.close(self._source)
            self._source = -1


class Listener:
    """Listens for hosts that join, in one thread, until `close`."""

    def __init__(self, address: str, port: int, secret: bytes, places: int) -> None:
        self._places = places
        self._links: dict[bytes, _HostLink] = {}
        self._arrived: deque[JoinedHost] = deque()
        self._messages: deque[str] = deque()
        self._actions: deque[Callable[[], None]] = deque()
        self._shown_at: dict[str, float] = {}
        self._peers: dict[int, str] = {}
        self._is_other_key = self._is_over = False
        self._exit_code: int | None = None
        keys = link_keys(secret)
        self._context: zmq.Context[Any] = zmq.Context()
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._context.term)
        try:
            gate = Gate(self._context, keys)
            self._stack.callback(gate.close)
            self._socket: Any = self._context.socket(zmq.ROUTER)
            self._stack.callback(lambda: self._socket.close(linger=_LINGER_MS))
            place = tcp_endpoint(address, port or "*")
            bound_messages(self._socket, FRAME_NBYTES + 1, FRAMES_QUEUED)
            set_family(self._socket, place)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            keys.listen(self._socket)
            self._monitor = monitor_of(self._context, self._socket, _EVENTS)
            self._stack.callback(self._monitor.close, 0)
            self._stack.callback(self._socket.disable_monitor)
            try:
                self._socket.bind(place)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"--listen {bracket_ipv6(address)}:{port}: nothing can listen there: "
                    f"{error.strerror}"
                ) from None
            endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self.port = int(endpoint.rpartition(":")[2])  # the port on which it listens
            gate.guard(endpoint)
            self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._news = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for descriptor in (*self._wake, *self._news):
                self._stack.callback(os.close, descriptor)
        except BaseException:
            self._stack.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="syncvar-join", daemon=True)
        self._thread.start()

    def descriptor(self) -> int:
        """Return the descriptor to poll for reading: `take` or `take_messages` has something."""
        return self._news[0]

    def take(self) -> list[JoinedHost]:
        """Return the hosts that have joined since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._news[0], 4096)
        return list(_drain(self._arrived))

    def take_messages(self) -> list[str]:
        """Return the sentences to show since the last call."""
        return list(_drain(self._messages))

    def set_places(self, places: int) -> None:
        """Set the most hosts that may be connected at once."""
        self._places = places

    def close(self, exit_code: int | None) -> None:
        """Send all hosts the exit code of the job, and stop listening. Idempotent.

        Without an exit code the hosts report that the launcher is lost.
        """
        if self._thread.is_alive():
            self._exit_code = exit_code
            self._run_in_thread(self._finish)
            self._thread.join()
        for one in self._arrived:
            for file in (one.pipe.stdin, one.pipe.stdout, one.pipe.stderr):
                file.close()
        self._arrived.clear()
        self._stack.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run_in_thread(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"!")

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._news[1], b"!")

    def _finish(self) -> None:
        self._is_over = True

    def _serve(self) -> None:
        ping_at = time.monotonic() + _PING_S
        while not self._is_over:
            ready = self._poll(ping_at)
            if self._wake[0] in ready:
                os.read(self._wake[0], 4096)
            for action in _drain(self._actions):
                action()
            if self._socket in ready:
                self._receive()
            if self._monitor in ready and self._handle_events():
                ping_at = 0.0
            is_due = time.monotonic() >= ping_at
            for one in list(self._links.values()):  # sending removes hosts that are lost
                self._serve_host(one, ready, is_ping_due=is_due)
            if is_due:
                ping_at = time.monotonic() + _PING_S
        for one in list(self._links.values()):
            one.let_go()
            if self._exit_code is not None:
                self._send(one, JoinFrame.JOB_ENDED + str(self._exit_code).encode())
        self._links.clear()

    def _poll(self, ping_at: float) -> dict[Any, int]:
        """Wait until there is something to read or to write, or until the next ping."""
        links = list(self._links.values())
        poller = zmq.Poller()
        poller.register(self._wake[0], zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if all(one.held_nbytes < _HELD_MAX for one in links):
            poller.register(self._socket, zmq.POLLIN)
        for one in links:
            for descriptor in one.sources():
                poller.register(descriptor, zmq.POLLIN)
            for descriptor in one.sinks():
                poller.register(descriptor, zmq.POLLOUT)
        wait_s = max(0.0, ping_at - time.monotonic())
        if any(one.unsent for one in links):
            wait_s = _RETRY_S
        return dict(poller.poll(int(wait_s * 1000) + 1))

    def _serve_host(self, link: _HostLink, ready: Container[Any], *, is_ping_due: bool) -> None:
        """Forward what the agent of a host gets and writes; retry unsent frames, or ping."""
        if any(descriptor in ready for descriptor in link.sources()):
            data = link.read()
            if data is not None:
                self._send(link, JoinFrame.STDIN + data if data else JoinFrame.STDIN_END)
        link.settle()
        if link.unsent or is_ping_due:
            self._send(link, b"" if link.unsent else JoinFrame.PING)

    def _receive(self) -> None:
        for _ in range(FRAMES_QUEUED):
            try:
                identity, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(rest) != 1:
                continue
            data = rest[0].bytes
            link = self._links.get(identity.bytes)
            if link is None:
                self._accept(identity.bytes, data, rest[0].get("Peer-Address"))
            elif data[:1] in (JoinFrame.STDOUT, JoinFrame.STDERR):
                link.write(data[:1] == JoinFrame.STDERR, data[1:])
            elif data[:1] == JoinFrame.EXITED:
                text = data[1:]
                link.end(int(text) if len(text) < 8 and text.lstrip(b"-").isdigit() else _LOST)

    def _accept(self, identity: bytes, data: bytes, address: str) -> None:
        if data[:1] != JoinFrame.HELLO:
            return
        try:
            hello = Hello.read(data[1:])
        except WireError as error:
            self._refuse(identity, address, error_message(error))
            return
        name = f"{hello.name} ({address})"
        if len(self._links) >= self._places:
            here = ", ".join(one.name for one in self._links.values())
            reason = f"all {self._places} hosts that the job waits for have joined: {here}"
            self._refuse(identity, name, reason)
            return
        link = self._links[identity] = _HostLink(identity, name)
        self._arrived.append(JoinedHost(hello, address, self._start_agent(link)))
        self._notify()

    def _start_agent(self, link: _HostLink) -> AgentPipe:
        """Return the connection to a new agent.

        The thread or a caller that waits for it calls this.
        """

        def refuse(reason: str) -> None:
            self._run_in_thread(lambda: self._dismiss(link, reason))

        def again() -> AgentPipe | None:
            if link.identity not in self._links:
                return None
            pipe = AgentPipe(refuse, again, kill)
            self._run_in_thread(lambda: begin(pipe))
            return pipe

        def kill(pipe: AgentPipe) -> None:
            self._run_in_thread(lambda: self._end_agent(link, pipe))

        def begin(pipe: AgentPipe) -> None:
            link.begin(pipe)
            if link.identity in self._links:
                self._send(link, JoinFrame.START)
            else:
                link.let_go()

        pipe = AgentPipe(refuse, again, kill)
        begin(pipe)
        return pipe

    def _dismiss(self, link: _HostLink, reason: str) -> None:
        if self._links.pop(link.identity, None) is not None:
            link.let_go()
            self._refuse(link.identity, link.name, reason)

    def _refuse(self, identity: bytes, name: str, reason: str) -> None:
        self._add_message(f"{name} was refused: {reason}")
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(
                [identity, JoinFrame.REJECTED + reason.encode("utf-8", "replace")], zmq.NOBLOCK
            )

    def _end_agent(self, link: _HostLink, pipe: AgentPipe) -> None:
        if link.pipe is pipe:
            link.let_go()
            self._send(link, JoinFrame.STDIN_END)

    def _send(self, link: _HostLink, data: bytes) -> None:
        """Send a frame to a host after unsent ones; without a frame try those again."""
        if data:
            link.unsent.append(data)
        while link.unsent:
            try:
                self._socket.send_multipart([link.identity, link.unsent[0]], zmq.NOBLOCK)
            except zmq.Again:
                if link.unsent[-1] == JoinFrame.PING:
                    link.unsent.pop()
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._drop_lost(link)
                return
            link.unsent.popleft()

    def _drop_lost(self, link: _HostLink) -> None:
        self._links.pop(link.identity, None)
        link.unsent.clear()
        link.write(1, b"the connection to it is lost\n")
        link.end(_LOST)
        link.let_go()

    def _handle_events(self) -> bool:
        """Handle connection events of the socket; return whether a connection has ended."""
        has_ended = False
        for event, value in events_of(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._peers[value] = _peer_of(value)
            elif event == zmq.EVENT_DISCONNECTED:
                has_ended = True
                peer = self._peers.pop(value, "somewhere")
                if self._is_other_key:
                    self._add_message(
                        f"who came from {peer} was refused: it has another key than that of "
                        "--key-file"
                    )
                self._is_other_key = False
            else:
                self._is_other_key = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _OTHER_KEY
        return has_ended

    def _add_message(self, sentence: str) -> None:
        now = time.monotonic()
        self._shown_at = {each: at for each, at in self._shown_at.items() if now - at < _REPEAT_S}
        if sentence not in self._shown_at and len(self._shown_at) < _MESSAGES_MAX:
            self._shown_at[sentence] = now
            self._messages.append(sentence)
            self._notify()


def _peer_of(descriptor: int) -> str:
    """Return the peer address of a connection that ZeroMQ has accepted, and may have closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        return str(one.getpeername()[0])
    return "somewhere"


def _drain(queue: deque[Any]) -> Iterator[Any]:
    while queue:
        yield queue.popleft()
