"""Collectives over several hosts, composed of schedules inside each host and between hosts.

A collective is a sequence of **stages**. In a stage each rank takes part in a schedule of its
host's ranks (shared memory), in a schedule of one rank from each host (links), or in none. Each
schedule works on a chunk of WORK.

The tests write the stages of all ranks as one schedule, and prove it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.builders import build, build_all, sums_by_the_tree
from syncvar.algorithms.schedule import Chunk, Schedule, ScheduleArgs, even_chunks
from syncvar.algorithms.selection import choose

if TYPE_CHECKING:
    from collections.abc import Sequence


COMPOSED = ("all_reduce", "all_gather", "broadcast", "barrier", "header_exchange")
"""The composed collectives; others go over links as if each rank were alone on its host."""

_ONE_LINK_NBYTES = 64 * 1024
"""Up to this size one link between hosts carries all: more links would not reduce the latency."""

_NOWHERE = Chunk(0, 0)


class StagePart(NamedTuple):
    """The part of one rank in one stage."""

    # Whether the members are ranks of this rank's host; else they are ranks of different
    # hosts.
    on_host: bool
    # Ranks of the group in the order of the schedule's ranks; empty if this rank is idle.
    members: tuple[int, ...] = ()
    chunk: Chunk = _NOWHERE  # the elements of WORK that are the schedule's WORK
    plan: Schedule | None = None  # the schedule of this rank; None if it is idle
    # On a host the schedules of all members, from which publications follow.
    plans: tuple[Schedule, ...] = ()


def keeps_the_tree(sizes: Sequence[int]) -> bool:
    """Return whether T(0, n) is a tree on each host, and a tree over the hosts' results.

    That holds if all hosts but the last have the same power of two of ranks, and the last has no
    more: then the blocks of the hosts are subtrees.

    Example:
        >>> keeps_the_tree((4, 4, 3)), keeps_the_tree((3, 3)), keeps_the_tree((2, 4))
        (True, False, False)
    """
    first = sizes[0]
    return first & (first - 1) == 0 and set(sizes[:-1]) <= {first} and sizes[-1] <= first


def stages(
    collective: str,
    sizes: Sequence[int],
    args: ScheduleArgs,
    *,
    itemsize: int = 1,
    reproducible: bool = False,
) -> tuple[StagePart, ...] | None:
    """Return the part of a rank in each stage of a collective over several hosts.

    `sizes` are the ranks of the group on each host, in the group's order; `args` are those of
    `build`. All ranks have the same number of stages. The result is None if `reproducible` demands
    a tree that no composition keeps.

    Cost: an all-reduce on h hosts with s ranks and s links each costs a reduce-scatter and an
        all-gather of the vector in shared memory. Each link carries 2(h-1)/h of the vector's s-th
        part. Up to 64 KiB one link carries all.
    Order: the tree on each host, then the order of the schedule between the hosts. Bytes are equal
        on all ranks.
    Source: Karonis et al. 2000 ("Exploiting Hierarchy in Parallel Computer Networks to Optimize
        Collective Operation Performance"), multilevel collectives; Jia et al. 2018 (section 3.3),
        the two-level all-reduce.
    """
    composer = _Stages(tuple(sizes), args.rank, itemsize)
    if collective == "all_reduce":
        return composer.all_reduce(args.count, reproducible=reproducible)
    if collective == "broadcast":
        return composer.broadcast(args.count, args.root)
    if collective == "barrier":
        return composer.barrier()
    return composer.all_gather(args.counts or (args.count,) * args.world_size)


class _Stages:
    def __init__(self, sizes: tuple[int, ...], rank: int, itemsize: int) -> None:
        self.sizes = sizes
        self.rank = rank
        self.itemsize = itemsize
        self.starts = (0, *accumulate(sizes[:-1]))
        self.host = max(host for host, start in enumerate(self.starts) if start <= rank)
        self.local = rank - self.starts[self.host]
        start = self.starts[self.host]
        self.neighbours = tuple(range(start, start + sizes[self.host]))

    def all_reduce(self, count: int, *, reproducible: bool) -> tuple[StagePart, ...] | None:
        if reproducible and not keeps_the_tree(self.sizes):
            return None
        shards = self._shards(count)
        counts = self._blocks(shards)
        total = max(shard.count for shard in shards) * self.itemsize
        between = choose("all_reduce", total, len(self.sizes), reproducible=reproducible).algorithm
        assert not reproducible or sums_by_the_tree("all_reduce", between, len(self.sizes))
        return (
            self._on_host("reduce_scatter", Chunk(0, count), counts=counts),
            self._across("all_reduce", between, shards),
            self._on_host("all_gather", Chunk(0, count), counts=counts),
        )

    def broadcast(self, count: int, root: int) -> tuple[StagePart, ...]:
        whole = Chunk(0, count)
        shards = self._shards(count)
        home = max(host for host, start in enumerate(self.starts) if start <= root)
        place = root - self.starts[home]
        total = shards[0].count * self.itemsize
        between = choose("broadcast", total, len(self.sizes)).algorithm
        if len(shards) == 1:  # the root itself sends to the first ranks of the other hosts
            heads = tuple(root if host == home else start for host, start in enumerate(self.starts))
            return (
                self._among(heads, "broadcast", between, whole, root=home),
                self._on_host("broadcast", whole, root=place if self.host == home else 0),
            )
        counts = self._blocks(shards)
        spread = StagePart(on_host=True)
        if self.host == home:
            spread = self._on_host("scatter", whole, counts=counts, root=place)
        return (
            spread,
            self._across("broadcast", between, shards, root=home),
            self._on_host("all_gather", whole, counts=counts),
        )

    def barrier(self) -> tuple[StagePart, ...]:
        between = choose("barrier", 0, len(self.sizes)).algorithm
        nothing = Chunk(0, 0)
        return (
            self._on_host("barrier", nothing),
            self._among(self.starts, "barrier", between, nothing),
            self._on_host("broadcast", nothing),
        )

    def all_gather(self, counts: tuple[int, ...]) -> tuple[StagePart, ...]:
        hosts = zip(self.starts, self.sizes, strict=True)
        per_host = tuple(sum(counts[start : start + size]) for start, size in hosts)
        total = sum(per_host)
        begin = sum(per_host[: self.host])
        even = len(set(per_host)) == 1
        between = choose("all_gather", total * self.itemsize, len(self.sizes), even=even).algorithm
        own = Chunk(begin, begin + per_host[self.host])
        mine = tuple(counts[rank] for rank in self.neighbours)
        return (
            self._on_host("all_gather", own, counts=mine),
            self._among(self.starts, "all_gather", between, Chunk(0, total), counts=per_host),
            self._on_host("broadcast", Chunk(0, own.start)),
            self._on_host("broadcast", Chunk(own.stop, total)),
        )

    def _shards(self, count: int) -> list[Chunk]:
        """Cut WORK into as many parts as links work at once."""
        links = 1 if count * self.itemsize <= _ONE_LINK_NBYTES else min(self.sizes)
        return even_chunks(count, links)

    def _blocks(self, shards: list[Chunk]) -> tuple[int, ...]:
        """Return the counts of WORK that each rank of this host owns; late ranks own none."""
        return tuple(shard.count for shard in shards) + (0,) * (self.sizes[self.host] - len(shards))

    def _on_host(
        self, collective: str, chunk: Chunk, counts: tuple[int, ...] = (), root: int = 0
    ) -> StagePart:
        size = self.sizes[self.host]
        if size == 1:
            return StagePart(on_host=True)
        count = 0 if counts else chunk.count
        plans = tuple(build_all(collective, "direct", size, count=count, counts=counts, root=root))
        return StagePart(
            on_host=True, members=self.neighbours, chunk=chunk, plan=plans[self.local], plans=plans
        )

    def _across(
        self, collective: str, algorithm: str, shards: list[Chunk], root: int = 0
    ) -> StagePart:
        """Return the schedule of one shard among the ranks that own it on their hosts."""
        if self.local >= len(shards):
            return StagePart(on_host=False)
        members = tuple(start + self.local for start in self.starts)
        return self._among(members, collective, algorithm, shards[self.local], root=root)

    def _among(
        self,
        members: tuple[int, ...],
        collective: str,
        algorithm: str,
        chunk: Chunk,
        counts: tuple[int, ...] = (),
        root: int = 0,
    ) -> StagePart:
        if self.rank not in members:
            return StagePart(on_host=False)
        count = 0 if counts or collective == "barrier" else chunk.count
        args = ScheduleArgs(self.host, len(members), count, counts, root)
        plan = build(collective, algorithm, args)
        return StagePart(on_host=False, members=members, chunk=chunk, plan=plan)
