"""`syncvar-launch --join HOST:PORT`: this host joins a job, and runs an agent for it.

The agent reads and writes its pipes as under ssh. One encrypted ZeroMQ connection carries their
bytes to the launcher, which turns them into pipes again. When the connection ends, so does the
agent's input, and with it the workers here.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq

import syncvar
from syncvar.bootstrap.worker_entry import command_of
from syncvar.core import exit_status
from syncvar.core.errors import (
    ConfigError,
    HandshakeError,
    HostUnreachable,
    RendezvousError,
    with_code,
)
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar.transports.curve import link_keys
from syncvar.transports.zeromq_sockets import (
    address_towards,
    bound_messages,
    events_of,
    monitor_of,
    resolve_host,
    set_family,
    tcp_endpoint,
)
from syncvar_launcher.hosts.agent_connection import AGENT, start_agent
from syncvar_launcher.hosts.agent_protocol import (
    FRAME_NBYTES,
    FRAMES_QUEUED,
    Hello,
    JoinFrame,
    PipeOutbox,
)
from syncvar_launcher.io.output import escape
from syncvar_launcher.io.standard_streams import SignalWatch
from syncvar_launcher.join.join_rendezvous import join_secret
from syncvar_launcher.options.option_table import parse_address
from syncvar_launcher.options.worker_environment import inherited_variables

if TYPE_CHECKING:
    from collections.abc import Container

    from syncvar_launcher.options.launch_options import LaunchOptions

_TRIES = 3  # handshakes that fail, one after another: a listener that is busy may close one
_RECONNECT_MS = 200
_END_S = 10.0
_LINGER_MS = 1000
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def join(chosen: LaunchOptions) -> int:
    """Join a job, serve it until it ends, and return its exit code."""
    assert chosen.join.address is not None
    host, port = parse_address(chosen.join.address)
    secret = join_secret(chosen.join.key_file)
    address = _address_of(host, chosen.runtime.rendezvous_timeout_s)
    with SignalWatch(os.environ) as watch:
        host_joins = _Host(chosen, address, port, secret, watch)
        try:
            return host_joins.serve()
        finally:
            host_joins.close()


def _address_of(host: str, limit_s: float) -> str:
    """Return the address of a host; the name of a pod resolves once the pod runs."""
    with contextlib.suppress(RendezvousError):
        return resolve_host(host, 0.0)
    _show(f"the name {host} is unknown; waiting for it for up to {limit_s:g} s")
    try:
        return resolve_host(host, limit_s)
    except RendezvousError as error:
        raise ConfigError(f"--join {host}: its name is unknown: {error.__cause__}") from None


class _Host:
    """The connection of this host to the launcher, before and after it has joined."""

    def __init__(
        self, chosen: LaunchOptions, address: str, port: int, secret: bytes, watch: SignalWatch
    ) -> None:
        self._chosen = chosen
        self._watch = watch
        self._place = chosen.join.address or ""
        self._agent: _Agent | None = None
        self._unsent: list[bytes] = []
        self._failures = self._notice = 0
        self._has_joined = self._is_cut = False
        self._code: int | None = None
        self._heard = time.monotonic()
        own = ""
        with contextlib.suppress(OSError):
            own = address_towards(address, port)
        self._hello = Hello(
            socket.gethostname(),
            own,
            chosen.join.slots,
            None if chosen.origin["cwd"] == "default" else str(chosen.program.cwd),
            syncvar.__version__,
            PROTOCOL_VERSION,
            platform.python_version(),
            sys.byteorder,
        )
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        place = tcp_endpoint(address, port)
        bound_messages(self._socket, FRAME_NBYTES + 1, FRAMES_QUEUED)
        set_family(self._socket, place)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Not IMMEDIATE: with it a lost connection drops the frames that have arrived.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        link_keys(secret).connect(self._socket)
        self._monitor = monitor_of(self._context, self._socket, _EVENTS)
        self._socket.connect(place)

    def serve(self) -> int:
        """Serve the job until this host no longer belongs to it; return the exit code."""
        limit_s = self._chosen.runtime.rendezvous_timeout_s
        until = time.monotonic() + limit_s
        _show(f"joining {self._place}, for up to {limit_s:g} s")
        while self._code is None:
            self._poll()
            if self._watch.pending:
                self._handle_signal(self._watch.pending.popleft())
            elif not self._has_joined and time.monotonic() >= until:
                raise HostUnreachable(
                    f"no syncvar-launch --listen answers at {self._place} since {limit_s:g} s; is "
                    "it running, and can it be reached?"
                )
            elif self._agent is None and self._has_joined:
                silence_s = self._chosen.runtime.host_silence_s
                if time.monotonic() - self._heard > silence_s:
                    self._lose(f"nothing has come from the launcher for {silence_s:g} s")
        return self._code

    def close(self) -> None:
        """End the agent and the connection. Idempotent."""
        if self._agent is not None:
            self._agent.close(_END_S)
            self._agent = None
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    def _poll(self) -> None:
        """Wait for the launcher, the agent or a signal, and handle what has come."""
        ready = dict(self._poller().poll(500))
        for descriptor in self._watch.descriptors():
            if descriptor in ready:
                self._watch.readable(descriptor)
        if self._monitor in ready:
            self._handle_events()
        if self._agent is not None:
            self._take_output(self._agent, ready)
        self._send()
        self._receive()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        agent = self._agent
        takes = zmq.POLLIN if agent is None or not agent.sinks() else 0
        if takes or self._unsent:
            poller.register(self._socket, takes | (zmq.POLLOUT if self._unsent else 0))
        for descriptor in self._watch.descriptors():
            poller.register(descriptor, zmq.POLLIN)
        if agent is not None:
            for descriptor in agent.sinks():
                poller.register(descriptor, zmq.POLLOUT)
            for descriptor in () if self._unsent else agent.sources():
                poller.register(descriptor, zmq.POLLIN)
        return poller

    def _take_output(self, agent: _Agent, ready: Container[Any]) -> None:
        """Queue what the agent has written, and its exit status after the last of it."""
        agent.flush()
        if not self._unsent:
            for descriptor in agent.sources():
                if descriptor in ready:
                    self._unsent += agent.read(descriptor)
        if not agent.sources() and not self._unsent:
            if self._notice:
                self._leave(self._notice)
            else:
                self._unsent.append(JoinFrame.EXITED + str(agent.close(_END_S)).encode())
                self._agent = None

    def _receive(self) -> None:
        """Handle frames of the launcher, unless the agent still has to read the last one."""
        is_cut = self._is_cut
        for _ in range(FRAMES_QUEUED):
            is_agent_busy = self._agent is not None and bool(self._agent.sinks())
            if self._code is not None or (is_agent_busy and not is_cut):
                break
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if is_cut:  # and all frames from before have been handled
                    self._lose("the connection to the launcher is lost")
                break
            self._handle_frame(data[:1], data[1:])

    def _send(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.pop(0)

    def _handle_frame(self, kind: bytes, data: bytes) -> None:
        self._heard = time.monotonic()
        if kind == JoinFrame.START:
            if not self._has_joined:
                _show(f"joined {self._place}; waiting for the job to begin, and until it ends")
            self._has_joined = True
            if self._agent is not None:
                self._agent.close(0.0)
            self._agent = _Agent()
        elif kind == JoinFrame.STDIN and self._agent is not None:
            self._agent.write(data)
        elif kind == JoinFrame.STDIN_END and self._agent is not None:
            self._agent.end_input()
        elif kind == JoinFrame.REJECTED:
            _show(f"refused by the launcher at {self._place}: {data.decode('utf-8', 'replace')}")
            self._code = exit_status.RENDEZVOUS
        elif kind == JoinFrame.JOB_ENDED:
            self._code = int(data) if data.isdigit() and len(data) < 4 else exit_status.INTERNAL
            if self._code:
                _show(f"the job has ended with {self._code}; the launcher shows the reason")

    def _handle_events(self) -> None:
        for event, _ in events_of(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failures = 0
                if not self._has_joined:
                    self._unsent = [JoinFrame.HELLO + self._hello.pack()]
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_cut = self._has_joined
            else:
                self._failures += 1
                if self._failures >= _TRIES and not self._has_joined:
                    refusal = (
                        f"the program that listens at {self._place} does not accept the key of "
                        f"{self._chosen.join.key_file}: it is another key than that of "
                        f"syncvar-launch --listen there (copy the file), or another program"
                    )
                    _show(with_code(refusal, HandshakeError.code))
                    self._code = exit_status.KEY

    def _lose(self, reason: str) -> None:
        if self._code is None:
            _show(f"{reason}; its workers here are ended")
            self._code = exit_status.INTERNAL

    def _handle_signal(self, number: int) -> None:
        """Forward the first SIGTERM to the agent; other signals end the workers.

        On SIGTERM the agent lets its workers save and end.
        """
        if number == signal.SIGTERM and self._agent is not None and not self._notice:
            self._notice = number
            _show(
                "SIGTERM is forwarded to the workers here, which may save; the next one ends them"
            )
            self._agent.send(number)
        else:
            self._leave(number)

    def _leave(self, number: int) -> None:
        name = exit_status.signal_name(number)
        _show(f"ended by {name}")
        self._code = 128 + number
        if self._has_joined:
            status = self._agent.close(_END_S) if self._agent is not None else -number
            self._agent = None
            self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
            self._unsent += [
                JoinFrame.STDERR + f"it was ended there by {name}\n".encode(),
                JoinFrame.EXITED + str(status).encode(),
            ]
            self._send()


class _Agent:
    """The agent on this host."""

    def __init__(self) -> None:
        self._process = start_agent(
            command_of(AGENT), inherited_variables(os.environ, is_clear=False)
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        for descriptor in (self._process.stdin.fileno(), self._out, self._err):
            os.set_blocking(descriptor, False)
        self._outbox = PipeOutbox(self._process.stdin.fileno())
        self._open = {self._out: JoinFrame.STDOUT, self._err: JoinFrame.STDERR}

    def sources(self) -> list[int]:
        return list(self._open)

    def sinks(self) -> list[int]:
        return self._outbox.descriptors()

    def flush(self) -> None:
        self._outbox.flush()

    def write(self, data: bytes) -> None:
        self._outbox.add(data)
        self._outbox.flush()

    def read(self, descriptor: int) -> list[bytes]:
        """Return messages of the agent, ready to be sent; show its standard error here, too."""
        try:
            data = os.read(descriptor, FRAME_NBYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            del self._open[descriptor]
            return []
        if descriptor == self._err:
            sys.stderr.write(data.decode("utf-8", "replace"))
            sys.stderr.flush()
        return [self._open[descriptor] + data]

    def send(self, number: int) -> None:
        """Send a signal to the agent."""
        self._process.send_signal(number)

    def end_input(self) -> None:
        """Let the agent end by closing its input."""
        self._outbox.clear()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self, limit_s: float) -> int:
        """Let the agent end, or kill it; return its status. Idempotent."""
        self.end_input()
        for one in (self._process.stdout, self._process.stderr):
            if one is not None:
                one.close()  # a process that writes to a closed pipe ends sooner
        self._open.clear()
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # its cleanup process kills the workers
            return self._process.wait()


def _show(sentence: str) -> None:
    sys.stderr.write(f"syncvar-launch: {escape(sentence)}\n")
    sys.stderr.flush()
