"""Options and events of all ZeroMQ sockets, reasons of disconnections, and addresses of hosts.

ZeroMQ only says that a connection has ended. A copy of its descriptor (`ConnectionCopy`) outlives
ZeroMQ's own, and the system tells from it whether the other process closed the connection, or was
silent for too long. Connections within a host are closed and never silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from syncvar.core.errors import ConfigError, RendezvousError
from syncvar.protocol.frame import FRAMING_NBYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from syncvar.core.settings import RuntimeConfig

_MONITORED = struct.Struct("=Hi")  # zmq_socket_monitor(3): event, and its value
_UNIX_PATH_MAX = 107
_PAUSE_S = 0.02
_ANY_PORT = 9
_ANYWHERE = "192.0.2.1"  # an address of no host (RFC 5737); its route is the default route


def job_nonce(job_id: str) -> bytes:
    """Return the short hash of a job for the identities of its processes."""
    import hashlib  # it loads OpenSSL, which the launcher does not need

    return hashlib.blake2b(job_id.encode(), digest_size=8).digest()


def set_family(socket: Any, endpoint: str) -> None:
    """Enable IPv6 on a socket if its address needs it; an IPv4 address would change its meaning."""
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))


def bind_in_folder(socket: Any, folder: str, name: str) -> str:
    """Bind a socket for this user's processes in a private folder; return its endpoint.

    Raises ConfigError if the path is too long, and ZMQError if the system refuses.
    """
    path = os.path.join(folder, name)  # noqa: PTH118
    if len(path) > _UNIX_PATH_MAX:
        raise ConfigError(
            f"the socket path {path!r} has {len(path)} bytes, the system allows {_UNIX_PATH_MAX}: "
            f"set XDG_RUNTIME_DIR or TMPDIR to a shorter directory"
        )
    socket.bind(f"ipc://{path}")
    # Not by umask, which all threads share. Until now the folder, 0700, keeps others out.
    os.chmod(path, 0o600)
    return f"ipc://{path}"


def limit_frames(socket: Any, nbytes: int) -> None:
    """Make a socket close each connection that announces a longer payload."""
    socket.setsockopt(zmq.MAXMSGSIZE, nbytes + FRAMING_NBYTES)


def bound_messages(socket: Any, nbytes: int, count: int) -> None:
    """Limit the length of received messages, and the queue in each direction."""
    limit_frames(socket, nbytes)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, count)


def monitor_of(context: zmq.Context[Any], socket: Any, events: int) -> Any:
    """Return a socket that receives the events of another one.

    It has no queue limit, unlike those of pyzmq's function: with a full queue ZeroMQ's own thread
    would block, and all sockets with it. Clients that come and go while a rank computes must not
    cause that.
    """
    place = f"inproc://events-{os.urandom(8).hex()}"
    socket.monitor(place, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(place)
    return monitor


def events_of(monitor: Any) -> Iterator[tuple[int, int]]:
    """Yield the events of a monitor, each with its value.

    pyzmq's own function is in a module that imports asyncio, which takes 30 ms in every worker.
    """
    while True:
        try:
            event: tuple[int, int] = _MONITORED.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        yield event


def close_monitor(socket: Any, monitor: Any) -> None:
    """Stop the events of an open socket."""
    with contextlib.suppress(zmq.ZMQError):
        socket.disable_monitor()
    monitor.close(linger=0)


def ask_for_signs_of_life(socket: Any, config: RuntimeConfig) -> None:
    """Make both ends close a tcp connection that is silent for longer than `lost_after_s`.

    The connecting end sends heartbeats, each with a time limit for the next one. After a heartbeat,
    another message and silence, the other end has no time limit (libzmq 4.3.5). So there the system
    probes the connection.
    """
    silence = milliseconds(config.link_silence_s)
    socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds(config.heartbeat_interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence)
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(silence, 6_553_500))
    look_for_silence(socket, config)


def look_for_silence(socket: Any, config: RuntimeConfig) -> None:
    """Make the system close tcp connections whose other end answers no probes."""
    silence = milliseconds(config.link_silence_s)
    if silence:
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 1),
            (zmq.TCP_KEEPALIVE_INTVL, 1),
            (zmq.TCP_KEEPALIVE_CNT, 1 + silence // 1000),
            (zmq.TCP_MAXRT, silence),
        ):
            socket.setsockopt(option, value)


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds; an infinite or huge time becomes 0, ZeroMQ's "off"."""
    return 0 if seconds > 1e6 else max(1, int(seconds * 1000))


# -- reasons of disconnections ---------------------------------------------------------------------

CLOSED = "it closed the connection without a goodbye"
_ENDED_HERE = "this rank closed the connection: what came on it was late, or no message of this job"

# tcp_info: state (numbers of tcp_states.h), retransmits, probes, milliseconds since data came.
_INFO = struct.Struct("=BxBB48xI")
_ACKNOWLEDGED = struct.Struct("=120xQ")  # tcp_info: acknowledged bytes
_ESTABLISHED, _CLOSE = 1, 7
_IPPROTO_TCP, _TCP_INFO = 6, 11


class Sent(NamedTuple):
    """The bytes written to a connection: those that the other host has acknowledged, and the rest.

    It `is_steady` if the system would take more, and no acknowledgement came during the look.
    """

    acknowledged: int = 0
    held: int = 0
    is_steady: bool = True

    @property
    def written(self) -> int:
        """Bytes written."""
        return self.acknowledged + self.held


class ConnectionCopy:
    """A copy of the descriptor of a tcp connection; empty for another type, or an ended one."""

    __slots__ = ("_socket",)

    def __init__(self, descriptor: int) -> None:
        import socket  # ranks of one host start faster without it

        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError), contextlib.ExitStack() as undoing:
            number = os.dup(descriptor)
            undoing.callback(os.close, number)
            copy = socket.socket(fileno=number)
            undoing.pop_all()
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                self._socket = copy
            else:
                copy.close()

    def reason(self, config: RuntimeConfig) -> str:
        """Return why the connection has ended, and close the copy. Call it after ZeroMQ's event."""
        if self._socket is None:
            return CLOSED
        reason = CLOSED
        with contextlib.suppress(OSError, struct.error):
            info = self._socket.getsockopt(_IPPROTO_TCP, _TCP_INFO, _INFO.size)
            state, retransmits, probes, idle_ms = _INFO.unpack(info)
            is_late = idle_ms >= 1000 * config.lost_after_s
            if is_late and (state == _ESTABLISHED or (state == _CLOSE and (retransmits or probes))):
                silence_s = idle_ms / 1000
                reason = f"silent for {silence_s:.1f} s: nothing came from it on its connection"
            elif state == _ESTABLISHED:  # the other end has not closed it
                reason = _ENDED_HERE
        self.close()
        return reason

    def sent(self) -> Sent:
        """Return the state of the written bytes; all zero without a connection."""
        if self._socket is None:
            return Sent()
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        try:
            before = self._acknowledged()
            held = fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0")
            is_steady = self._acknowledged() == before and bool(writable.poll(0))
        except (OSError, struct.error):  # the connection has ended
            return Sent()
        return Sent(before, struct.unpack("=i", held)[0], is_steady)

    def _acknowledged(self) -> int:
        assert self._socket is not None
        info = self._socket.getsockopt(_IPPROTO_TCP, _TCP_INFO, _ACKNOWLEDGED.size)
        count: int = _ACKNOWLEDGED.unpack(info)[0]
        return count

    def close(self) -> None:
        """Close the copy. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def unanswered(seconds: float) -> str:
    """Return the reason for a process that did not answer a new connection for so long."""
    return f"silent for {seconds:.1f} s: it did not answer a new connection"


# -- addresses of hosts ----------------------------------------------------------------------------


def bracket_ipv6(address: str) -> str:
    """Return an address as it is written before a port."""
    return f"[{address}]" if ":" in address else address


def tcp_endpoint(address: str, port: int | str | None = None) -> str:
    """Return an address in ZeroMQ's form."""
    host = f"tcp://{bracket_ipv6(address)}"
    return host if port is None else f"{host}:{port}"


def resolve_host(address: str, timeout_s: float) -> str:
    """Return the address of a host name, IPv4 if there is one, so that all hosts get the same.

    It waits up to `timeout_s` seconds: the name of a Kubernetes pod resolves once the pod runs.
    Then it raises RendezvousError.
    """
    import socket

    until = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)
            return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
        except OSError as error:
            is_pending = error.errno in (socket.EAI_NONAME, socket.EAI_AGAIN)
            if time.monotonic() > until or "." not in address or not is_pending:
                raise RendezvousError(
                    f"the address of rank 0, {address!r}, cannot be found: {error}"
                ) from error
        time.sleep(_PAUSE_S)


def address_towards(address: str, port: int = 0) -> str:
    """Return this host's address on the route to another host; raise OSError without a route."""
    import socket

    found = socket.getaddrinfo(address, port or _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_towards_any(names: list[str]) -> str:
    """Return the address from which this host reaches the first of `names` that can be found.

    If none can, it returns the address of the default route, or raises RendezvousError.
    """
    import socket

    for name in (*names, socket.gethostname(), _ANYWHERE):
        with contextlib.suppress(OSError):
            address = address_towards(name)
            if name in names or not address.startswith("127."):
                return address
    raise RendezvousError(
        f"rank 0 has no address by which {', '.join(names)} could reach it; set MASTER_ADDR and "
        f"MASTER_PORT, and SYNCVAR_KEY_FILE"
    )
