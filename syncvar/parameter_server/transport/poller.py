"""Waiting until one of several sockets has something, in one system call."""

from __future__ import annotations

import select
from typing import Any

import zmq


class Watching:
    """What to wait for: sockets of ZeroMQ, other sockets and descriptors.

    The descriptor of a ZeroMQ socket tells of what comes after the last look at the socket, and a call of the socket is a look. So
    whoever has sent on one says so (`touch`), and it counts as ready until it was found empty (`is_empty`). Whoever leaves
    something in a socket touches it too.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ones: dict[int, Any] = {}
        self._touched: dict[int, Any] = {}

    def add(self, one: Any) -> None:
        """Wait for something too: a socket, or a descriptor."""
        descriptor = _descriptor(one)
        self._ones[descriptor] = one
        self._epoll.register(descriptor, select.EPOLLIN)
        if isinstance(one, zmq.Socket):
            self._touched[descriptor] = one

    def remove(self, one: Any) -> None:
        """Wait for it no more; before it is closed."""
        descriptor = _descriptor(one)
        if self._ones.pop(descriptor, None) is not None:
            self._touched.pop(descriptor, None)
            self._epoll.unregister(descriptor)

    def write(self, one: Any, *, waits: bool) -> None:
        """Wait until a socket takes more bytes too, or no more for that."""
        self._epoll.modify(_descriptor(one), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def touch(self, socket: Any) -> None:
        """Let a socket count as ready."""
        self._touched[_descriptor(socket)] = socket

    def is_empty(self, socket: Any) -> None:
        """Note that nothing more is in a socket."""
        if self._touched:
            self._touched.pop(_descriptor(socket), None)

    def wait(self, timeout_s: float) -> list[Any]:
        """Return what may have something, after at most so many seconds; what is returned may turn out to be empty."""
        if self._touched:
            descriptors = dict.fromkeys(
                [*self._touched, *(descriptor for descriptor, _ in self._epoll.poll(0.0))]
            )
            return [
                self._ones[descriptor] for descriptor in descriptors if descriptor in self._ones
            ]
        return [
            self._ones[descriptor]
            for descriptor, _ in self._epoll.poll(max(0.0, timeout_s))
            if descriptor in self._ones
        ]

    def close(self) -> None:
        """Let go."""
        self._epoll.close()


def _descriptor(one: Any) -> int:
    if isinstance(one, zmq.Socket):
        return int(one.getsockopt(zmq.FD))
    return one if isinstance(one, int) else int(one.fileno())
