"""Writes that wait in queues, as the runtime sees them: every call that may wait sends them first.

A replica that waits in any call has told its writes to the others before; so a replica that reads, and needs the
writes of all up to its own last one, gets them as soon as the others wait for anything, write again, or end a run.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Queued", "send_queued"]


class Queued(Protocol):
    """A queue of one group."""

    identity: int

    def start(self) -> Any:
        """Start to send what the replicas have in common, and return its `Work`; None where nothing waits."""

    def finish(self, work: Any) -> None:
        """Wait for it, and write what has come."""

    def send(self) -> None:
        """Start and finish."""


def send_queued(waiting: list[Queued]) -> None:
    """Send all that waits in this process's queues: those of several groups at once, so that their order is free.

    Args:
        waiting: The engine's `queues`; a queue that has nothing left leaves them.

    Raises:
        MismatchError: The replicas have made different writes.
    """
    while waiting:
        queues = sorted(waiting, key=lambda queue: queue.identity)
        if len(queues) == 1:
            queues[0].send()
            continue
        started = [(queue, queue.start()) for queue in queues]
        for queue, work in started:
            if work is not None:
                queue.finish(work)
