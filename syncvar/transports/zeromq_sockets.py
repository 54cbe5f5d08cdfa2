"""What all sockets of ZeroMQ here have in common: limits, signs of life, and the events of a connection."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import ConfigError
from syncvar.protocol.message_limits import FRAMING_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.core.settings import RuntimeConfig

__all__ = [
    "ask_for_signs_of_life",
    "bind_in_folder",
    "bound_messages",
    "close_monitor",
    "events_of",
    "job_nonce",
    "limit_frames",
    "look_for_silence",
    "milliseconds",
    "monitor_of",
    "set_family",
]

_MONITORED = struct.Struct("=Hi")  # zmq_socket_monitor(3): event, and its value
_UNIX_PATH_MAX = 107


def job_nonce(job_id: str) -> bytes:
    """Return what stands for a job in the identities of its processes."""
    import hashlib  # it loads OpenSSL, which the launcher does without

    return hashlib.blake2b(job_id.encode(), digest_size=8).digest()


def set_family(socket: Any, endpoint: str) -> None:
    """Let a socket speak IPv6 where its address is one; an IPv4 address would become another one by that."""
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))


def bind_in_folder(socket: Any, folder: str, name: str) -> str:
    """Let a socket listen for this user's processes on this host, in a private folder; return its endpoint.

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
    os.chmod(
        path, 0o600
    )  # a umask would be that of all threads; until now the folder, 0700, has kept others out
    return f"ipc://{path}"


def limit_frames(socket: Any, nbytes: int) -> None:
    """Let a socket close each connection on which a frame with a longer payload is announced; see `syncvar.protocol.message_limits`."""
    socket.setsockopt(zmq.MAXMSGSIZE, nbytes + FRAMING_NBYTES)


def bound_messages(socket: Any, nbytes: int, count: int) -> None:
    """Bound how long a message that comes may be, and how many may wait in each direction."""
    limit_frames(socket, nbytes)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, count)


def monitor_of(context: zmq.Context[Any], socket: Any, events: int) -> Any:
    """Return a socket on which the events of another one come.

    ZeroMQ's own thread would wait for whoever takes no events, and everything else with it: strangers who come and go while a
    rank computes must not get there. So they have no limit, unlike those of pyzmq's function.
    """
    place = f"inproc://events-{os.urandom(8).hex()}"
    socket.monitor(place, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(place)
    return monitor


def events_of(monitor: Any) -> Iterator[tuple[int, int]]:
    """Take the events, each with its value, that have come on a monitor so far.

    pyzmq has a function for it, in a module that imports asyncio, which costs every worker 30 ms.
    """
    while True:
        try:
            event: tuple[int, int] = _MONITORED.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        yield event


def close_monitor(socket: Any, monitor: Any) -> None:
    """End the events of a socket, which is still open."""
    with contextlib.suppress(zmq.ZMQError):
        socket.disable_monitor()
    monitor.close(linger=0)


def ask_for_signs_of_life(socket: Any, config: RuntimeConfig) -> None:
    """Let a tcp connection that is silent for longer than `lost_after_s` be closed at both ends.

    The end that connects asks for signs of life, and says how long the other may wait for such a question. A question that is
    followed by any other message, and that by silence, leaves the other end without a limit (libzmq 4.3.5): there the system
    looks whether the peer's still answers.
    """
    silence = milliseconds(config.link_silence_s)
    socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds(config.heartbeat_interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence)
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(silence, 6_553_500))
    look_for_silence(socket, config)


def look_for_silence(socket: Any, config: RuntimeConfig) -> None:
    """Let the system close tcp connections whose other end does not answer its probes, or acknowledge what it is sent."""
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
    """Return whole milliseconds; an infinite or huge time becomes 0, which ZeroMQ takes as "off"."""
    return 0 if seconds > 1e6 else max(1, int(seconds * 1000))
