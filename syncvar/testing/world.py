"""A whole world inside one process: each rank is a thread with its own context.

Data goes over an in-memory network, or through shared memory that all ranks share.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.context import ProcessContext
from syncvar.bootstrap.process import use
from syncvar.core.environment import HostMap, RankEnvironment, split_evenly
from syncvar.core.errors import SharedMemoryUnavailable, error_line
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.coordinator import Coordinator
from syncvar.runtime.arithmetic import gil_monitor
from syncvar.shm.segment import SharedSegment
from syncvar.shm.segment_file import create
from syncvar.transports.in_memory import Faults, MemoryControl, MemoryNetwork, MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncvar.parameter_server.session import LocalServers
    from syncvar.shm.segment_file import CreatedSegment

_SHM_BYTES = 64 << 30  # virtual; pages are allocated at first use
_SWITCH_S = 5e-6  # with Python's 5 ms, calls in which ranks wait take ten times as long
_counting = threading.Lock()
_intervals: list[float] = []  # switch interval before each world that is running


def run_ranks(  # noqa: PLR0913  (public signature)
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    faults: Faults | None = None,
    config: RuntimeConfig | None = None,
    timeout_s: float = 60.0,
    shared: bool = False,
    shm_bytes: int = _SHM_BYTES,
    hosts: int = 1,
    servers: LocalServers | None = None,
) -> list[Any]:
    """Run `fn(*args)` as every rank of an in-process world and return the results by rank.

    The other ranks learn of an exception in a rank as they would from the launcher.

    Args:
        world_size: Number of ranks.
        fn: Function to call once for each rank; `sv.rank()` and all collectives work in it.
        args: Arguments of `fn`.
        faults: Faults of the network.
        config: Deadlines and limits.
        timeout_s: Time after which the call gives up, in seconds.
        shared: Whether ranks share memory, as on one host; otherwise data goes over the network.
        shm_bytes: Size of the shared memory, in bytes.
        hosts: Number of simulated hosts; each has its own shared memory.
        servers: Servers for the variables of a ParameterServerStrategy.

    Returns:
        For each rank its result, or the exception that it raised.

    Raises:
        TimeoutError: A rank did not end in time.
        SharedMemoryUnavailable: Ranks cannot share memory on this machine.

    Example:
        >>> import syncvar as sv
        >>> run_ranks(3, lambda: int(sv.all_reduce(sv.rank())))
        [3, 3, 3]
    """
    config = (config or RuntimeConfig()).consistent()
    network = MemoryNetwork(world_size, faults, Coordinator(world_size, "memory", config))
    results: list[Any] = [None] * world_size
    places = HostMap(split_evenly(world_size, hosts))
    segments = [_create_shm(shm_bytes, size) if shared else None for size in places.sizes]

    def body(rank: int) -> None:
        host, local = places.host_of(rank), places.local_rank(rank)
        me = RankEnvironment(
            rank,
            world_size,
            local,
            places.sizes[host],
            host,
            hosts,
            0,
            "memory://",
            "memory",
            host=f"host{host}" if hosts > 1 else "localhost",
        )
        context: ProcessContext | None = None
        try:
            shm = _attach(segments[host], local, checks=config.check_shm == "on")
            context = _context_of(me, config, network, shm, servers)
            with use(context):
                results[rank] = fn(*args)
            context.close(orderly=True)
        except BaseException as error:  # noqa: BLE001  (the result of this rank)
            results[rank] = error
            for segment in filter(None, segments):
                segment.abort()  # first of all, as the launcher does
            network.ended(rank, f"uncaught {error_line(error)}")
            if context is not None:
                context.close(orderly=False)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"syncvar-rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        with _expected_thread(), _short_switches(needed=any(shm is not None for shm in segments)):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout_s)
    finally:
        for segment in filter(None, segments):
            segment.close()
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise TimeoutError(f"ranks {late} did not end within {timeout_s:g} s")
    return results


def _context_of(
    me: RankEnvironment,
    config: RuntimeConfig,
    network: MemoryNetwork,
    shm: SharedSegment | str,
    servers: LocalServers | None,
) -> ProcessContext:
    links = MemoryTransport(network, me.rank), MemoryControl(network, me.rank)
    context = ProcessContext(me, config, *links, shm=shm)
    if servers is not None:
        context.extras["servers"] = servers
    if context.engine is not None:
        context.engine.around = partial(use, context)
    return context


@contextlib.contextmanager
def _expected_thread() -> Iterator[None]:
    """Tell `gil_monitor` that the waiting thread does not compete.

    Several worlds may run at once.
    """
    beside = int(threading.current_thread() is not threading.main_thread())  # main counts already
    with _counting:
        gil_monitor.usual_threads += beside
    try:
        yield
    finally:
        with _counting:
            gil_monitor.usual_threads -= beside


@contextlib.contextmanager
def _short_switches(*, needed: bool) -> Iterator[None]:
    """Switch threads often, so that a rank that polls shared memory does not block the writer."""
    if not needed:
        yield
        return
    with _counting:
        _intervals.append(sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        with _counting:
            sys.setswitchinterval(_intervals[0] if len(_intervals) == 1 else _SWITCH_S)
            _intervals.pop()


def _create_shm(shm_bytes: int, world_size: int) -> CreatedSegment | None:
    if world_size == 1:
        return None
    shm, reason = create(shm_bytes, world_size, 1)  # threads take turns, as on one core
    if shm is None:
        raise SharedMemoryUnavailable(reason)
    return shm


def _attach(shm: CreatedSegment | None, rank: int, *, checks: bool) -> SharedSegment | str:
    """Map shared memory for a rank as its own process would."""
    if shm is None:
        return "ranks of an in-process world have links between them"
    return SharedSegment.attach(os.dup(shm.fd), rank, checks=checks)
