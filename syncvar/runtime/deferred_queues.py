"""Queues of deferred writes, as the runtime sees them: a call that may wait sends them first.

So a replica that waits in any call has sent its writes before. A replica that needs the writes of
all others gets them when they wait, write again or end a run.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Queued(Protocol):
    """The queue of one group."""

    identity: int
    writer: threading.Thread  # the thread that wrote last

    def begin_beside(self) -> None:
        """Start to send from a thread other than the writer, unless the writer is sending."""

    def start(self) -> Any:
        """Start to send; return the `Work`, or None if the queue is empty."""

    def finish(self, work: Any) -> None:
        """Wait for the work, and apply the received writes."""

    def send(self) -> None:
        """Start and finish."""


def send_queued(waiting: list[Queued], also: Queued | None = None) -> None:
    """Send everything that this thread has deferred; all groups at once, so their order is free.

    Writes of other threads are started, but not waited for: on another rank, the thread that writes
    there may wait for this one.

    Args:
        waiting: The engine's `queues`; a queue that becomes empty removes itself.
        also: A queue to wait for, whichever thread has written.

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
