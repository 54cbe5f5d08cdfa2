"""Options and events that all ZeroMQ sockets share: limits, heartbeats, monitors."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import ConfigError
from syncvar.protocol.frame import FRAMING_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.core.settings import RuntimeConfig

_MONITORED = struct.Struct("=Hi")  # zmq_socket_monitor(3): event, and its value
_UNIX_PATH_MAX = 107


def job_nonce(job_id: str) -> bytes:
    """Return the short hash of a job for the identities of its processes."""
    import hashlib  # it loads OpenSSL, which the launcher does not need

    return hashlib.blake2b(job_id.encode(), digest_size=8).digest()


def set_family(socket: Any, endpoint: str) -> None:
    """Enable IPv6 on a socket if its address needs it; an IPv4 address would change its meaning."""
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))


def bind_in_folder(socket: Any, folder: str, name: str) -> str:
    """Bind a socket for this user's processes on this host, in a private folder.

    Return its endpoint.

    Raises:
        ConfigError: The folder's path is too long.
        ZMQError: The system refuses.
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

    The connecting end sends heartbeats, and tells the other end how long to wait for one. If a
    heartbeat, then another message, then silence follows, the other end has no time limit (libzmq
    4.3.5). So there the system probes the connection.
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
