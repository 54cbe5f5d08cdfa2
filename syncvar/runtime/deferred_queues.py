"""Writes that wait in queues, as the runtime sees them: every call that may wait sends them first.

A replica that waits in any call has told its writes to the others before; so a replica that reads, and needs the
writes of all up to its own last one, gets them as soon as the others wait for anything, write again, or end a run.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

__all__ = ["Queued", "send_queued"]


class Queued(Protocol):
    """A queue of one group."""

    identity: int
    writer: threading.Thread
    """Who has written last."""

    def begin_beside(self) -> None:
        """Start to send from another thread than the writer's, unless that one is sending."""

    def start(self) -> Any:
        """Start to send what the replicas have in common, and return its `Work`; None where nothing waits."""

    def finish(self, work: Any) -> None:
        """Wait for it, and write what has come."""

    def send(self) -> None:
        """Start and finish."""


def send_queued(waiting: list[Queued], also: Queued | None = None) -> None:
    """Send all that this thread has in this process's queues: those of several groups at once, so that their order is free.

    What other threads have written is started to be sent, and not waited for: on another rank the thread that writes there may wait
    for what this one writes here.

    Args:
        waiting: The engine's `queues`; a queue that has nothing left leaves them.
        also: A queue that is waited for, whoever has written.

    Raises:
        MismatchError: The replicas have made different writes.
    """
    me = threading.current_thread()
    while waiting:
        queues = []
        for queue in sorted(waiting, key=lambda queue: queue.identity):
            if queue is also or queue.writer is me or not queue.writer.is_alive():
                queues.append(queue)
            else:
                queue.begin_beside()
        if not queues:
            return
        if len(queues) == 1:
            queues[0].send()
            continue
        started = [(queue, queue.start()) for queue in queues]
        for queue, work in started:
            if work is not None:
                queue.finish(work)
