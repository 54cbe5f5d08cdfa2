"""Wakeup: ends the waits of a transport, which polls descriptors, from any thread."""

from __future__ import annotations

import contextlib
import os
import select


class Wakeup:
    """Two signals: one for the driver, one for the thread that waits idle beside it.

    Attributes:
        driver: Descriptor of the driver's signal; -1 once closed.
        arrivals: Polls this signal and all watched descriptors.
        idle: Polls the idle thread's signal and the same descriptors.
    """

    def __init__(self) -> None:
        self.driver = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._idler = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.arrivals, self.idle = select.poll(), select.poll()
        self.arrivals.register(self.driver, select.POLLIN)
        self.idle.register(self._idler, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let arrivals at a descriptor end both waits."""
        self.arrivals.register(descriptor, select.POLLIN)
        self.idle.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        """End both waits, from any thread."""
        with contextlib.suppress(OSError, ValueError):  # closed: no thread waits
            os.eventfd_write(self.driver, 1)
            os.eventfd_write(self._idler, 1)

    def watch_idle(self, descriptor: int) -> None:
        """Let arrivals at a descriptor end the idle wait, also a running one."""
        self.idle.register(descriptor, select.POLLIN)
        os.eventfd_write(self._idler, 1)

    def take(self) -> None:
        """Clear the driver's signal."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.driver)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait as the idle thread; return whether there was any signal or arrival."""
        ready = self.idle.poll(max(0.0, timeout_s) * 1000)
        for descriptor, _ in ready:
            if descriptor == self._idler:
                with contextlib.suppress(OSError):
                    os.eventfd_read(descriptor)
        return bool(ready)

    def close(self) -> None:
        """Close the signals; later wakes do nothing."""
        os.close(self.driver)
        os.close(self._idler)
        self.driver = self._idler = -1
