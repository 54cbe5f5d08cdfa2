"""Collectives over several hosts, composed of schedules inside each host and between hosts.

A collective is a sequence of **stages**. In a stage each rank takes part in a schedule of its
host's ranks (shared memory), in a schedule of ranks of several hosts (links), or in none. Each
schedule works on a chunk of WORK.

A long vector is cut into **shards**. Rank k of each host carries shard k between the hosts, so
that several links work at once, and each byte crosses once for a host.

The tests write the stages of all ranks as one schedule, prove it, and count what crosses.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.builders import SCHEDULES, Combination, build, build_all, sums_by_the_tree
from syncvar.algorithms.changed_schedules import (
    common_chunk,
    exchange_steps,
    relocated,
    without_peers,
)
from syncvar.algorithms.cost_model import BY_RULES, BetweenHosts
from syncvar.algorithms.schedule import (
    Chunk,
    Copy,
    Schedule,
    ScheduleArgs,
    consecutive_chunks,
    even_chunks,
    exchange_blocks,
)
from syncvar.algorithms.selection import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncvar.algorithms.schedule import Round


_EACH_NBYTES = 16 * 1024
"""Up to this size of all copies, all ranks of a host send what one rank could send for them.

So no rank waits until the first one has passed on what arrived. Measured with 2 and 4 ranks a host,
such calls take 0.5 to 0.8 of the time. The copies take 0.1 ms at 1 Gbit/s.
"""

_ONE_LINK_NBYTES = 64 * 1024
"""Up to this size one link between hosts carries all.

Measured for 64 KiB, more links take 0.8 to 1.1 of the time with 2 ranks a host, 1.0 to 1.7 with 4.
"""

_BUNDLED_NBYTES = 64 * 1024
"""Up to this size the blocks for a host travel in one frame; else each goes from rank to rank.

A bundle takes two more passes through shared memory. Measured for 64 KiB, with 2 and 4 ranks a host
both ways take the same time, and with 8 the bundle takes 0.8 of it. For 1 MiB it takes 1.3 times.
"""

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


class HostStages(NamedTuple):
    """The stages of one rank, in order; as many on every rank."""

    parts: tuple[StagePart, ...]
    room: int = 0  # elements behind WORK that the stages share


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
    between: BetweenHosts = BY_RULES,
) -> HostStages | None:
    """Return the part of a rank in each stage of a collective over several hosts.

    `sizes` are the ranks of the group on each host, in the group's order; `args` are those of
    `build`. All ranks have the same number of stages. `between` chooses what happens between hosts.
    The result is None if `reproducible` demands a tree that no composition keeps.

    Cost: an all-reduce on h hosts with s ranks and s links each costs a reduce-scatter and an
        all-gather of the vector in shared memory. Each link carries 2(h-1)/h of the vector's s-th
        part. Other collectives send each byte once to a host that needs it. Up to 64 KiB one link
        carries all, and small blocks travel together in one frame. For 16 KiB and less each rank
        sends for itself, which takes one stage less.
    Order: the tree on each host, then the order of the schedule between the hosts. Bytes are equal
        on all ranks.
    Source: Karonis et al. 2000 ("Exploiting Hierarchy in Parallel Computer Networks to Optimize
        Collective Operation Performance"), multilevel collectives; Jia et al. 2018 (section 3.3),
        the two-level all-reduce.
    """
    combines = SCHEDULES[collective].combines is Combination.ALL
    if combines and reproducible and not keeps_the_tree(sizes):
        return None
    composer = _Composer(tuple(sizes), args, itemsize, reproducible=combines and reproducible)
    composer.between = between
    return HostStages(_COMPOSITIONS[collective](composer), composer.room)


class _Composer:
    """Makes the stages of one rank; a method for each collective."""

    def __init__(
        self, sizes: tuple[int, ...], args: ScheduleArgs, itemsize: int, *, reproducible: bool
    ) -> None:
        self.sizes = sizes
        self.args = args
        self.rank = args.rank
        self.itemsize = itemsize
        self.reproducible = reproducible
        self.between = BY_RULES
        self.order = tuple(range(len(sizes)))  # the host of each rank of a schedule between hosts
        self.room = 0
        self.starts = (0, *accumulate(sizes[:-1]))
        self.host = self._host_of(self.rank)
        self.local = self.rank - self.starts[self.host]
        self.neighbours = self._ranks_on(self.host)
        self.is_even = len(set(sizes)) == 1  # all hosts have as many ranks
        # The ranks of the group at this place of their hosts, if each host has one.
        self.column = tuple(start + self.local for start in self.starts)
        self.counts = args.counts or (args.count,) * args.world_size
        self.blocks = consecutive_chunks(self.counts)
        self.own_blocks = [self.blocks[rank] for rank in self.neighbours]  # those of this host
        self.own_counts = tuple(block.count for block in self.own_blocks)
        self.home = self._host_of(args.root)  # the root's host
        # The root's place on its host; on other hosts the first rank stands for the root.
        self.place = args.root - self.starts[self.home] if self.host == self.home else 0
        # The rank of each host that sends and receives, if there is one link.
        self.heads = tuple(
            args.root if host == self.home else start for host, start in enumerate(self.starts)
        )

    # -- collectives that combine ------------------------------------------------------------------

    def all_reduce(self) -> tuple[StagePart, ...]:
        whole = Chunk(0, self.args.count)
        if self._is_sent_by_each(whole.count):
            between = self._between("all_reduce", whole.count)
            return (
                self._on_host("all_reduce", whole),
                self._among(self.column, "all_reduce", between, whole),
            )
        shards = even_chunks(whole.count, self._links(whole.count))
        counts = self._owned(shards)
        between = self._between("all_reduce", shards[0].count)
        return (
            self._on_host("reduce_scatter", whole, counts=counts),
            self._on_links("all_reduce", between, shards),
            self._on_host("all_gather", whole, counts=counts),
        )

    def reduce(self) -> tuple[StagePart, ...]:
        whole = Chunk(0, self.args.count)
        shards = even_chunks(whole.count, self._links(whole.count))
        # Two hosts: one sends its sum to the other, and no byte crosses twice.
        is_pair = len(self.sizes) == 2
        between = "tree" if is_pair else self._between("reduce", shards[0].count)
        if len(shards) == 1:
            return (
                self._on_host("reduce", whole, root=self.place),
                self._among(self.heads, "reduce", between, whole, root=self.home),
            )
        counts = self._owned(shards)
        last = StagePart(on_host=True)
        if self.host == self.home:
            last = self._on_host("gather", whole, counts=counts, root=self.place)
        return (
            self._on_host("reduce_scatter", whole, counts=counts),
            self._on_links("reduce", between, shards, root=self.home),
            last,
        )

    def reduce_scatter(self) -> tuple[StagePart, ...]:
        regions = self._regions()
        whole = Chunk(0, regions[-1].stop)
        own, mine = regions[self.host], self.own_counts
        links = self._links(whole.count)
        between = self._between("reduce_scatter", whole.count)
        if self.is_even:  # each link carries the blocks of one rank of each host
            size = self.sizes[0]
            pieces = self._pieces(regions, size, by_blocks=True)
            nbytes = whole.count * self.itemsize
            if choose("all_reduce", nbytes, size, shared=True).algorithm == "direct":
                sums = [self._on_host("all_reduce", whole)]  # one pass instead of one for each host
            else:
                sums = self._sums(regions, pieces)
            return (*sums, self._on_links_by_piece("reduce_scatter", between, pieces))
        if links == 1:
            counts = tuple(region.count for region in regions)
            return (
                self._on_host("reduce", whole),
                self._among(self.starts, "reduce_scatter", between, whole, counts=counts),
                self._on_host("scatter", own, counts=mine),
            )
        pieces = self._pieces(regions, links, by_blocks=False)
        return (
            *self._sums(regions, pieces),
            self._on_links_by_piece("reduce_scatter", between, pieces),
            self._redistribute(pieces[self.host], self.own_blocks),
        )

    # -- collectives that move ---------------------------------------------------------------------

    def broadcast(self) -> tuple[StagePart, ...]:
        whole = Chunk(0, self.args.count)
        shards = even_chunks(whole.count, self._links(whole.count))
        between = self._between("broadcast", shards[0].count)
        if len(shards) == 1:  # the root itself sends to the first ranks of the other hosts
            return (
                self._among(self.heads, "broadcast", between, whole, root=self.home),
                self._on_host("broadcast", whole, root=self.place),
            )
        counts = self._owned(shards)
        spread = StagePart(on_host=True)
        if self.host == self.home:
            spread = self._on_host("scatter", whole, counts=counts, root=self.place)
        return (
            spread,
            self._on_links("broadcast", between, shards, root=self.home),
            self._on_host("all_gather", whole, counts=counts),
        )

    def barrier(self) -> tuple[StagePart, ...]:
        nothing, between = Chunk(0, 0), self._between("barrier", 0)
        enter = self._on_host("barrier", nothing)
        if self._is_sent_by_each(0):
            return enter, self._among(self.column, "barrier", between, nothing)
        return (
            enter,
            self._among(self.starts, "barrier", between, nothing),
            self._on_host("broadcast", nothing),
        )

    def all_gather(self) -> tuple[StagePart, ...]:
        regions = self._regions()
        own, total = regions[self.host], regions[-1].stop
        counts = tuple(region.count for region in regions)
        links = self._links(total)
        if links == 1:
            is_even = len(set(counts)) == 1
            between, whole = self._between("all_gather", total, even=is_even), Chunk(0, total)
            first = self._on_host("all_gather", own, counts=self.own_counts)
            if self._is_sent_by_each(total):
                return first, self._among(self.column, "all_gather", between, whole, counts=counts)
            return (
                first,
                self._among(self.starts, "all_gather", between, whole, counts=counts),
                *self._missing(own, total),
            )
        # Equal blocks need no exchange on the host before they cross.
        by_blocks = self.is_even and len(set(self.counts)) == 1
        pieces = self._pieces(regions, links, by_blocks=by_blocks)
        first = StagePart(on_host=True)
        if not by_blocks:
            first = self._on_host("all_gather", own, counts=self.own_counts)
        last = [
            self._on_host("all_gather", region, counts=self._owned(some))
            if by_blocks or region is not own
            else StagePart(on_host=True)
            for region, some in zip(regions, pieces, strict=True)
        ]
        # A ring sends each piece alone; other algorithms need the pieces side by side.
        return (first, self._on_links_by_piece("all_gather", "ring", pieces), *last)

    def gather(self) -> tuple[StagePart, ...]:
        return self._with_root("gather")

    def scatter(self) -> tuple[StagePart, ...]:
        return self._with_root("scatter")[::-1]

    def _with_root(self, collective: str) -> tuple[StagePart, StagePart]:
        """Return the stage on the hosts, and that between them."""
        total, regions = self.blocks[-1].stop, self._regions()
        own, mine = regions[self.host], self.own_counts
        counts = tuple(region.count for region in regions)
        between = self._between(collective, total)
        if self._is_bundled(total):
            return (
                self._on_host(collective, own, counts=mine, root=self.place),
                self._among(self.heads, collective, between, Chunk(0, total), counts, self.home),
            )
        at_home = StagePart(on_host=True)
        if self.host == self.home:
            at_home = self._on_host(collective, own, counts=mine, root=self.place)
        return at_home, self._crossing(collective)

    def all_to_all(self) -> tuple[StagePart, ...]:
        matrix = self.args.matrix or (self.counts,) * self.args.world_size
        mean = sum(map(sum, matrix)) // self.args.world_size
        if not self._is_bundled(mean) or not self.is_even:
            plans = [self._exchanged(matrix, rank) for rank in self.neighbours]
            whole = Chunk(0, plans[self.local].work_count)
            return self._with_plans(tuple(plans), whole), self._crossing("all_to_all")
        # Rank k of a host collects the blocks of its host for rank k of each host, and sends them
        # together. What arrives lies in the order of the sources, as the result must.
        hosts = range(len(self.sizes))
        bundles = tuple(
            tuple(
                sum(matrix[source][start + self.local] for source in self._ranks_on(host))
                for start in self.starts
            )
            for host in hosts
        )
        plans = [self._collected(matrix, rank) for rank in self.neighbours]
        work_count, self.room = plans[self.local].work_count, sum(bundles[self.host])
        work_count -= self.room
        even = len({count for row in bundles for count in row}) == 1
        between = self._between("all_to_all", sum(bundles[self.host]), even=even)
        args = ScheduleArgs(self.host, len(self.sizes), matrix=bundles)
        arrivals = Chunk(work_count - sum(row[self.host] for row in bundles), work_count)
        parts = (Chunk(work_count, work_count + self.room), arrivals)
        plan = relocated(build("all_to_all", between, args), parts)
        whole = Chunk(0, work_count + self.room)
        return (
            self._with_plans(tuple(plans), whole),
            StagePart(on_host=False, members=self.column, chunk=whole, plan=plan),
        )

    # -- what several collectives share ------------------------------------------------------------

    def _host_of(self, rank: int) -> int:
        return max(host for host, start in enumerate(self.starts) if start <= rank)

    def _ranks_on(self, host: int) -> range:
        return range(self.starts[host], self.starts[host] + self.sizes[host])

    def _regions(self) -> list[Chunk]:
        """Return the blocks of each host, which are adjacent."""
        ends = [self._ranks_on(host) for host in range(len(self.sizes))]
        return [Chunk(self.blocks[one[0]].start, self.blocks[one[-1]].stop) for one in ends]

    def _links(self, count: int) -> int:
        """Return how many ranks of each host carry a vector between the hosts."""
        return 1 if count * self.itemsize <= _ONE_LINK_NBYTES else min(self.sizes)

    def _is_sent_by_each(self, count: int) -> bool:
        """Return whether each rank of a host sends the same elements to a rank of other hosts."""
        return self.is_even and count * self.itemsize * self.sizes[0] <= _EACH_NBYTES

    def _is_bundled(self, count: int) -> bool:
        return count * self.itemsize <= _BUNDLED_NBYTES

    def _pieces(
        self, regions: Sequence[Chunk], links: int, *, by_blocks: bool
    ) -> list[list[Chunk]]:
        """Return for each host what each link carries of its blocks."""
        if by_blocks:
            return [
                [self.blocks[rank] for rank in self._ranks_on(host)]
                for host in range(len(self.sizes))
            ]
        return [
            [
                Chunk(region.start + chunk.start, region.start + chunk.stop)
                for chunk in even_chunks(region.count, links)
            ]
            for region in regions
        ]

    def _owned(self, shards: Sequence[Chunk]) -> tuple[int, ...]:
        """Return the counts that each rank of this host owns; late ranks own nothing."""
        return tuple(shard.count for shard in shards) + (0,) * (self.sizes[self.host] - len(shards))

    def _between(self, collective: str, count: int, *, even: bool = False) -> str:
        """Return the algorithm between the hosts, and take its order of the hosts."""
        hosts = len(self.sizes)
        root = self.home if SCHEDULES[collective].has_root else 0
        found, self.order, _ = self.between.choose(
            collective,
            count * self.itemsize,
            hosts,
            root=root,
            reproducible=self.reproducible,
            even=even,
        )
        assert not self.reproducible or sums_by_the_tree(collective, found, hosts)
        return found

    def _sums(self, regions: Sequence[Chunk], pieces: Sequence[Sequence[Chunk]]) -> list[StagePart]:
        """Return stages in which the ranks of this host combine their pieces of each region."""
        return [
            self._on_host("reduce_scatter", region, counts=self._owned(some))
            for region, some in zip(regions, pieces, strict=True)
        ]

    def _missing(self, own: Chunk, total: int) -> tuple[StagePart, ...]:
        """Return the stages in which the first rank passes on what came from other hosts."""
        before, after = Chunk(0, own.start), Chunk(own.stop, total)
        idle = StagePart(on_host=True)
        return (
            self._on_host("broadcast", before) if before.count else idle,
            self._on_host("broadcast", after) if after.count or not before.count else idle,
        )

    def _on_host(
        self, collective: str, chunk: Chunk, counts: tuple[int, ...] = (), root: int = 0
    ) -> StagePart:
        count = 0 if counts else chunk.count
        size = self.sizes[self.host]
        return self._with_plans(_direct_plans(collective, size, count, counts, root), chunk)

    def _with_plans(self, plans: tuple[Schedule, ...], chunk: Chunk) -> StagePart:
        """Return a stage on this host; `plans` are those of its ranks."""
        if not any(steps for plan in plans for steps in plan.rounds):
            return StagePart(on_host=True)
        return StagePart(
            on_host=True,
            members=tuple(self.neighbours),
            chunk=chunk,
            plan=plans[self.local],
            plans=plans,
        )

    def _redistribute(self, held: Sequence[Chunk], wanted: Sequence[Chunk]) -> StagePart:
        """Return a stage in which each rank of this host gets what it wants from who holds it."""
        size, whole = self.sizes[self.host], Chunk(0, self.blocks[-1].stop)
        held = [*held, *[_NOWHERE] * (size - len(held))]
        plans = []
        for rank in range(size):
            sent = [common_chunk(held[rank], one) for one in wanted]
            places = [common_chunk(one, wanted[rank]) for one in held]
            rounds = (tuple(exchange_steps(rank, sent, places)),)
            plans.append(Schedule("scatter", "direct", rank, size, whole.stop, 0, rounds))
        return self._with_plans(tuple(plans), whole)

    def _exchanged(self, matrix: Sequence[Sequence[int]], rank: int) -> Schedule:
        """Return the schedule by which a rank of this host exchanges blocks with the others."""
        outgoing, incoming = exchange_blocks(matrix, rank)
        first, size = self.neighbours[0], self.sizes[self.host]
        sent, places = (blocks[first : first + size] for blocks in (outgoing, incoming))
        rounds = (tuple(exchange_steps(rank - first, sent, places)),)
        return Schedule("all_to_all", "direct", rank - first, size, incoming[-1].stop, 0, rounds)

    def _collected(self, matrix: Sequence[Sequence[int]], rank: int) -> Schedule:
        """Return the schedule by which a rank of this host collects blocks behind its WORK.

        Round k collects those for host k. They lie there by destination, then by source.
        """
        local, size = rank - self.neighbours[0], self.sizes[self.host]
        outgoing, incoming = exchange_blocks(matrix, rank)
        free = incoming[-1].stop
        rounds: list[Round] = []
        for start in self.starts:
            counts = [matrix[source][start + local] for source in self.neighbours]
            places = consecutive_chunks(counts, start=free)
            free = places[-1].stop
            sent = outgoing[start : start + size]
            rounds.append((*exchange_steps(local, sent, places), Copy(sent[local], places[local])))
        return Schedule("all_to_all", "direct", local, size, free, 0, tuple(rounds))

    def _crossing(self, collective: str) -> StagePart:
        """Return what crosses from rank to rank, and the copies of this rank."""
        plan = build(collective, "direct", self.args)
        everyone = tuple(range(self.args.world_size))
        whole = Chunk(0, plan.work_count)
        crossing = without_peers(plan, self.neighbours)
        return StagePart(on_host=False, members=everyone, chunk=whole, plan=crossing)

    def _on_links(
        self, collective: str, algorithm: str, shards: Sequence[Chunk], root: int = 0
    ) -> StagePart:
        """Return the schedule of one shard among the ranks that own it on their hosts."""
        if self.local >= len(shards):
            return StagePart(on_host=False)
        return self._among(self.column, collective, algorithm, shards[self.local], root=root)

    def _on_links_by_piece(
        self, collective: str, algorithm: str, pieces: Sequence[Sequence[Chunk]]
    ) -> StagePart:
        """Return the schedule of one piece of each host, among the ranks that carry them."""
        if self.local >= len(pieces[0]):
            return StagePart(on_host=False)
        mine = [some[self.local] for some in pieces]
        counts = tuple(piece.count for piece in mine)
        args = ScheduleArgs(self.host, len(self.sizes), counts=counts)
        plan = relocated(build(collective, algorithm, args), mine)
        whole = Chunk(0, self.blocks[-1].stop)
        return StagePart(on_host=False, members=self.column, chunk=whole, plan=plan)

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
        members = tuple(members[host] for host in self.order)
        place, root = self.order.index(self.host), self.order.index(root)
        args = ScheduleArgs(place, len(members), count, counts, root)
        plan = build(collective, algorithm, args)
        return StagePart(on_host=False, members=members, chunk=chunk, plan=plan)


@lru_cache(maxsize=256)
def _direct_plans(
    collective: str, size: int, count: int, counts: tuple[int, ...], root: int
) -> tuple[Schedule, ...]:
    """Return the schedules of the ranks of a host; the same object for equal stages."""
    return tuple(build_all(collective, "direct", size, count=count, counts=counts, root=root))


_COMPOSITIONS: Mapping[str, Callable[[_Composer], tuple[StagePart, ...]]] = {
    "all_reduce": _Composer.all_reduce,
    "all_gather": _Composer.all_gather,
    "all_to_all": _Composer.all_to_all,
    "barrier": _Composer.barrier,
    "broadcast": _Composer.broadcast,
    "gather": _Composer.gather,
    "header_exchange": _Composer.all_gather,
    "reduce": _Composer.reduce,
    "reduce_scatter": _Composer.reduce_scatter,
    "scatter": _Composer.scatter,
}

COMPOSED = tuple(_COMPOSITIONS)
"""The composed collectives; others go over links as if each rank were alone on its host."""
