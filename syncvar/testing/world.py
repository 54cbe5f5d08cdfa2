"""A whole world inside one process: each rank a thread with its own context, over the in-memory network."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from syncvar.config import RuntimeConfig
from syncvar.env import RankEnvironment
from syncvar.runtime.context import Context, use
from syncvar.transports.memory import Faults, MemoryControl, MemoryNetwork, MemoryTransport
from syncvar.wire import Coordinator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_ranks"]


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    faults: Faults | None = None,
    config: RuntimeConfig | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run `fn(*args)` as every rank of an in-process world and return the results by rank.

    An exception in a rank is reported to the others as the launcher would do it.

    Args:
        world_size: Ranks.
        fn: Called once for each rank; `sv.rank()` and all collectives work in it.
        args: Passed to `fn`.
        faults: What the network does to frames.
        config: Deadlines and limits.
        timeout_s: Seconds after which the world is given up.

    Returns:
        For each rank its result, or the exception it raised.

    Raises:
        TimeoutError: A rank did not end in time.

    Example:
        >>> import syncvar as sv
        >>> run_ranks(3, lambda: int(sv.all_reduce(sv.rank())))
        [3, 3, 3]
    """
    config = (config or RuntimeConfig()).consistent()
    network = MemoryNetwork(world_size, faults, Coordinator(world_size, "memory", config))
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        me = RankEnvironment(rank, world_size, rank, world_size, 0, 1, 0, "memory://", "memory")
        context: Context | None = None
        try:
            context = Context(me, config, MemoryTransport(network, rank), MemoryControl(network, rank))
            with use(context):
                results[rank] = fn(*args)
            context.close(orderly=True)
        except BaseException as error:  # noqa: BLE001  (the result of this rank)
            results[rank] = error
            network.ended(rank, f"uncaught {type(error).__name__}: {error}")
            if context is not None:
                context.close(orderly=False)

    threads = [threading.Thread(target=body, args=(rank,), name=f"syncvar-rank-{rank}", daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise TimeoutError(f"ranks {late} did not end within {timeout_s:g} s")
    return results
