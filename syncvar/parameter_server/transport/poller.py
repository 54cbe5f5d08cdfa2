"""Wait until one of several sockets or descriptors is readable, in one system call."""

from __future__ import annotations

import select
from typing import Any

import zmq


class SocketPoller:
    """An epoll of ZeroMQ sockets, other sockets and descriptors.

    The descriptor of a ZeroMQ socket only signals what arrives after the last call of the socket.
    So a caller that has sent on the socket, or left messages in it, calls `touch`. The socket then
    counts as readable until `is_empty`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ones: dict[int, Any] = {}
        self._touched: dict[int, Any] = {}

    def add(self, one: Any) -> None:
        """Wait for a socket or descriptor too."""
        descriptor = _descriptor(one)
        self._ones[descriptor] = one
        self._epoll.register(descriptor, select.EPOLLIN)
        if isinstance(one, zmq.Socket):
            self._touched[descriptor] = one

    def remove(self, one: Any) -> None:
        """Stop waiting for it; call this before closing it."""
        descriptor = _descriptor(one)
        if self._ones.pop(descriptor, None) is not None:
            self._touched.pop(descriptor, None)
            self._epoll.unregister(descriptor)

    def write(self, one: Any, *, waits: bool) -> None:
        """Start or stop waiting until a socket takes more bytes."""
        self._epoll.modify(_descriptor(one), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def touch(self, socket: Any) -> None:
        """Count a socket as readable."""
        self._touched[_descriptor(socket)] = socket

    def is_empty(self, socket: Any) -> None:
        """Note that a socket is empty."""
        if self._touched:
            self._touched.pop(_descriptor(socket), None)

    def wait(self, timeout_s: float) -> list[Any]:
        """Return what may be readable, after at most `timeout_s`; some may turn out to be empty."""
        polled = self._epoll.poll(0.0 if self._touched else max(0.0, timeout_s))
        descriptors = dict.fromkeys([*self._touched, *(descriptor for descriptor, _ in polled)])
        return [self._ones[descriptor] for descriptor in descriptors if descriptor in self._ones]

    def close(self) -> None:
        """Close the epoll."""
        self._epoll.close()


def _descriptor(one: Any) -> int:
    if isinstance(one, zmq.Socket):
        return int(one.getsockopt(zmq.FD))
    return one if isinstance(one, int) else int(one.fileno())
