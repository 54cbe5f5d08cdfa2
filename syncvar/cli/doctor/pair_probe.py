"""The program that `syncvar doctor` runs as every rank: it measures what only a real job shows.

Rank 0 prints one line of JSON, which begins with `MARK`. It has the checks of each host, the time
offset of each rank, and the latency and bandwidth of pairs of ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import syncvar as sv
from syncvar.bootstrap.host_probe import MeasuringLimits, measure_pair
from syncvar.bootstrap.process import current
from syncvar.cli.doctor.machine_checks import machine_checks, package_versions
from syncvar.core.environment import PREFIX
from syncvar.shm.channel_table import ProbeCell, ProcessReader
from syncvar.transports.lane_transport import path_between_hosts

MARK = "syncvar doctor 1 "
ENVIRONMENT_CHECKS = ("settings", "BLAS threads", "launcher around this process")
_HOSTS_MAX = (
    8  # of which all pairs are measured; of more hosts, neighbours and pairs with the first
)
_ROUNDS = 8
_LIMITS = MeasuringLimits(200, 1 << 23, is_sure=False)
_PAIR_S = 1.0


class RankPair(NamedTuple):
    """What was measured between two ranks."""

    first: int
    second: int
    latency_s: float  # one way, of 8 bytes
    bytes_per_s: float  # one way


def pairs_to_measure(hosts: list[str]) -> list[tuple[int, int]]:
    """Return pairs of ranks: the first two ranks of a host, and the first ranks of two hosts.

    `hosts` has the host of each rank.

    Example:
        >>> pairs_to_measure(["a", "a", "b", "b"])
        [(0, 1), (2, 3), (0, 2)]
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    inside = [(some[0], some[1]) for some in ranks.values() if len(some) > 1]
    firsts = [some[0] for some in ranks.values()]
    between = [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 :]]
    if len(firsts) > _HOSTS_MAX:
        chosen = {*pairwise(firsts), *((firsts[0], one) for one in firsts[1:])}
        between = [pair for pair in between if pair in chosen]
    return inside + between


def main() -> int:
    """Measure as one rank."""
    host = os.environ.get(f"{PREFIX}HOST", "localhost")
    hosts = sv.all_gather_object(host)
    mine: dict[str, Any] = {
        "rank": sv.rank(),
        "host": host,
        "transport": current().transport if sv.world_size() > 1 else "",
        "path": path_between_hosts(current().config),
        "versions": package_versions(),
        "reads_memory_of": _readable_ranks(hosts),
        "checks": [],
    }
    if hosts.index(host) == sv.rank():
        checks = machine_checks(os.environ)
        mine["checks"] = [one._asdict() for one in checks if one.name not in ENVIRONMENT_CHECKS]
    mine["offset_ns"], mine["error_ns"] = _clock_offset()
    rates = [rate for a, b in pairs_to_measure(hosts) if (rate := _measure(a, b)) is not None]
    mine["pairs"] = [rate._asdict() for rate in rates]
    every = sv.all_gather_object(mine)
    if sv.rank() == 0:
        sys.stdout.write(f"{MARK}{json.dumps(every)}\n")
        sys.stdout.flush()
    return 0


def _readable_ranks(hosts: list[str]) -> dict[str, bool]:
    """Return for each other rank of this host whether its memory can be read."""
    cell = ProbeCell()
    cell.permit_reading()
    cells = sv.all_gather_object([cell.process, cell.address, cell.number])
    reader = ProcessReader([process for process, _, _ in cells])
    found = {
        str(rank): reader.finds(rank, address, number)
        for rank, (_, address, number) in enumerate(cells)
        if rank != sv.rank() and hosts[rank] == hosts[sv.rank()]
    }
    sv.barrier()  # the cells stay until all have read
    return found


def _clock_offset() -> tuple[int, int]:
    """Return by how much this rank's clock is ahead of rank 0's, and the error, in nanoseconds."""
    offset, error = 0, 0
    for rank in range(1, sv.world_size()):
        if sv.rank() == 0:
            best = None
            for _ in range(_ROUNDS):
                begin = time.time_ns()
                sv.send(np.int64(0), rank)
                theirs = int(sv.recv(rank))
                end = time.time_ns()
                if best is None or end - begin < best[1]:
                    best = theirs - (begin + end) // 2, end - begin
            assert best is not None
            sv.send(np.array([best[0], best[1] // 2]), rank)
        elif sv.rank() == rank:
            for _ in range(_ROUNDS):
                sv.recv(0)
                sv.send(np.int64(time.time_ns()), 0)
            offset, error = (int(one) for one in sv.recv(0))
    sv.barrier()
    return offset, error


class _Messages:
    """Messages to another rank, which answers them in `_answer`."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._until = time.monotonic() + _PAIR_S

    def ask(self, nbytes: int) -> float | None:
        """Send so many bytes, at least 8; return the seconds until the answer."""
        if self.left_s() <= 0:
            return None
        data = np.zeros(max(8, nbytes), np.uint8)
        begin = time.perf_counter()
        sv.send(data, self._peer)
        sv.recv(self._peer)
        return time.perf_counter() - begin

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._until - time.monotonic()


def _answer(peer: int) -> None:
    """Answer messages with 8 bytes, until an empty one."""
    short = np.zeros(8, np.uint8)
    while sv.recv(peer).size:
        sv.send(short, peer)


def _measure(a: int, b: int) -> RankPair | None:
    """Measure a pair while all other ranks wait; return None on all but rank `a`."""
    found = None
    if sv.rank() == a:
        rate = measure_pair(_Messages(b), _LIMITS)
        sv.send(np.zeros(0, np.uint8), b)
        if rate is not None:
            found = RankPair(a, b, rate.latency_ns / 1e9, rate.bytes_per_ms * 1e3)
    elif sv.rank() == b:
        _answer(a)
    sv.barrier()
    return found


if __name__ == "__main__":
    sys.exit(main())
