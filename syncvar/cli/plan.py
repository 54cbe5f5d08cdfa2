"""`syncvar plan`: a schedule as a figure, its messages and predicted time, and why it is chosen.

An interpreter of schedules moves a clock instead of data. Over links a rank has one port to send
and one to receive, used at the same time. A message of b bytes occupies both ports for
latency + b * per_byte; a rank sends in the order of its schedule. Reductions and copies follow
after the transfers of the round. This is the single-port, full-duplex alpha-beta-gamma model
(Hockney 1994; Chan et al. 2007, section 2); formulas of papers test it.

In shared memory a round is a phase: all ranks publish, wait for each other, and read. It costs the
latency, the copies of the slowest rank, and its reductions. The constants are rough measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.algorithms.builders import (
    ALGORITHMS,
    SCHEDULES,
    WorkLayout,
    build_all,
    folds_vectors,
    sums_by_the_tree,
    unsuited,
)
from syncvar.algorithms.compile_schedule import publications
from syncvar.algorithms.schedule import Copy, Recv, RecvReduce, Reduce, Send, schedule_text
from syncvar.algorithms.selection import choose, parse_forced, suited
from syncvar.cli.bench_table import parse_size
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.errors import ConfigError
from syncvar.runtime.block_transfer import (
    Move,
    TransferPath,
    cells_of_blocks,
    fits_slots,
    is_worth_reading,
    lower_move,
)
from syncvar.runtime.compile_reduce import (
    BufferPlacement,
    ResultPlacement,
    lower_reduce,
    lower_small,
)
from syncvar.runtime.instructions import program_text
from syncvar.runtime.planner import lower_rounds
from syncvar.runtime.shm_reduce import cells_of, is_direct
from syncvar.shm.channel_table import SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from syncvar.algorithms.schedule import Schedule, Step
    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.instructions import Program

_INSTRUCTIONS = 24  # of a program
_SHORT = 8  # ranks, rounds and steps of a figure
_RANKS_MAX = 1024  # plans are built for all ranks and all algorithms
_MOVED = ("all_gather", "broadcast", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of a path."""

    latency: float  # seconds of a message, or of a phase in shared memory, whatever its size
    per_byte: float  # seconds per byte of a message; in shared memory per byte copied out or in
    per_reduced_byte: float  # seconds per byte of a reduction's result
    per_copied_byte: float  # seconds per byte of a local copy
    shared: bool = False  # whether rounds are phases in shared memory

    def text(self) -> str:
        """Return the constants in words."""
        unit = "phase" if self.shared else "message"
        return (
            f"{self.latency * 1e6:.0f} us per {unit}, {self.per_byte * 1e9:.2f} ns per byte, "
            f"{self.per_reduced_byte * 1e9:.2f} ns per byte reduced"
        )


LINKS = CostModel(latency=45e-6, per_byte=0.4e-9, per_reduced_byte=0.1e-9, per_copied_byte=0.1e-9)
"""Unix sockets between processes of one host: a message of Python and libzmq, 2.5 GB/s."""

SHM = CostModel(
    latency=10e-6, per_byte=0.1e-9, per_reduced_byte=0.1e-9, per_copied_byte=0.1e-9, shared=True
)
"""Memory that the ranks of one host share: a wait for all, and copies at 10 GB/s."""


def predicted_seconds(plans: Sequence[Schedule], itemsize: int, model: CostModel = LINKS) -> float:
    """Return the seconds from a common start to the end of the last rank."""
    one_round = _phase if model.shared else _round
    now = [0.0] * len(plans)
    for number in range(max(len(plan.rounds) for plan in plans)):
        steps = [plan.rounds[number] if number < len(plan.rounds) else () for plan in plans]
        now = one_round(steps, now, itemsize, model)
    return max(now)


def _round(
    steps: Sequence[tuple[Step, ...]], now: Sequence[float], itemsize: int, model: CostModel
) -> list[float]:
    """Return when each rank ends a round over links that it begins at `now`."""
    queues = [[step for step in reversed(mine) if isinstance(step, Send)] for mine in steps]
    out_free, in_free, ends = list(now), list(now), list(now)
    heap = [(now[rank], rank) for rank, queue in enumerate(queues) if queue]
    heapify(heap)
    while heap:
        start, rank = heap[0]
        send = queues[rank][-1]
        possible = max(out_free[rank], in_free[send.peer])
        if possible > start:
            heapreplace(heap, (possible, rank))
            continue
        queues[rank].pop()
        end = start + model.latency + send.chunk.count * itemsize * model.per_byte
        out_free[rank] = in_free[send.peer] = end
        ends[rank], ends[send.peer] = max(ends[rank], end), max(ends[send.peer], end)
        if queues[rank]:
            heapreplace(heap, (end, rank))
        else:
            heappop(heap)
    return [end + _local(mine, itemsize, model) for end, mine in zip(ends, steps, strict=True)]


def _phase(
    steps: Sequence[tuple[Step, ...]], now: Sequence[float], itemsize: int, model: CostModel
) -> list[float]:
    """Return when each rank ends a phase; no rank reads before all have published."""
    published = [
        sum(chunk.count for chunk in {step.chunk for step in mine if isinstance(step, Send)})
        for mine in steps
    ]
    received = [sum(step.chunk.count for step in mine if isinstance(step, Recv)) for mine in steps]
    per_element = itemsize * model.per_byte
    ready = model.latency + max(
        begin + count * per_element for begin, count in zip(now, published, strict=True)
    )
    return [
        ready + count * per_element + _local(mine, itemsize, model)
        for count, mine in zip(received, steps, strict=True)
    ]


def _local(steps: tuple[Step, ...], itemsize: int, model: CostModel) -> float:
    seconds = 0.0
    for step in steps:
        if isinstance(step, RecvReduce):
            seconds += step.chunk.count * itemsize * model.per_reduced_byte
        elif isinstance(step, Reduce):
            seconds += step.target.count * itemsize * model.per_reduced_byte
        elif isinstance(step, Copy):
            seconds += step.target.count * itemsize * model.per_copied_byte
    return seconds


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Traffic of schedules."""

    rounds: int  # rounds in which some rank sends
    messages: tuple[int, ...]  # messages sent by each rank
    elements: tuple[int, ...]  # elements sent by each rank


def traffic(plans: Sequence[Schedule]) -> TrafficReport:
    """Count rounds, messages and elements of the schedules of all ranks."""
    sends = [
        [step for steps in plan.rounds for step in steps if isinstance(step, Send)]
        for plan in plans
    ]
    sending_rounds = {
        number
        for plan in plans
        for number, steps in enumerate(plan.rounds)
        if any(isinstance(step, Send) for step in steps)
    }
    return TrafficReport(
        rounds=len(sending_rounds),
        messages=tuple(len(steps) for steps in sends),
        elements=tuple(sum(step.chunk.count for step in steps) for steps in sends),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add = parser.add_argument
    add("collective", choices=sorted(ALGORITHMS))
    add("--ranks", type=int, default=4, help="ranks of the group (4)")
    size = parser.add_mutually_exclusive_group()
    nbytes = "bytes of the vector, or of all blocks; of all_to_all, of what a rank sends; 64K, 1M"
    size.add_argument("--bytes", help=nbytes)
    elements = "elements of the vector, or of each block (8)"
    size.add_argument("--count", type=int, default=8, help=elements)
    dtype = "of the elements (float32)"
    add("--dtype", choices=DTYPE_NAMES, default="float32", metavar="DTYPE", help=dtype)
    add("--root", type=int, default=0, help="root of a broadcast, reduce, gather or scatter (0)")
    paths = "sockets, or shared memory as in a job on one host (shared memory)"
    add("--path", choices=("links", "shm"), help=paths)
    other = "show this one instead of SYNCVAR_ALGORITHM's, or the one that would be chosen"
    add("--algorithm", help=other)
    add("--reproducible", action="store_true", help="reduce by the fixed tree")
    program = "also show what this rank does in shared memory, instruction by instruction"
    add("--program", type=int, metavar="RANK", help=program)
    add("--full", action="store_true", help="show all ranks and rounds of a long plan")


class _PlanQuery(NamedTuple):
    """The call that a command line asks about, checked."""

    collective: str
    ranks: int
    elements: int  # of the array, or of a block
    itemsize: int
    nbytes: int  # of the whole call
    is_shared: bool


def _plan_query(chosen: argparse.Namespace, config: RuntimeConfig) -> _PlanQuery:
    n, collective = chosen.ranks, chosen.collective
    if not 1 <= n <= _RANKS_MAX:
        raise ConfigError(f"--ranks must be 1 to {_RANKS_MAX}, not {n}")
    itemsize = _itemsize(chosen.dtype)
    work = SCHEDULES[collective].work
    blocks = n if work in (WorkLayout.BLOCKS, WorkLayout.PAIRS) else 1
    count = chosen.count
    if chosen.bytes is not None:
        count = -(-parse_size(chosen.bytes) // (itemsize * blocks))
    if count < 0:
        raise ConfigError(f"--count must not be negative, not {count}")
    is_shared = (chosen.path or ("links" if config.transport == "zmq" else "shm")) == "shm"
    nbytes = 0 if work is WorkLayout.NOTHING else count * blocks * itemsize
    return _PlanQuery(collective, n, count, itemsize, nbytes, is_shared)


def text(chosen: argparse.Namespace, config: RuntimeConfig) -> str:
    """Return the output of the command."""
    query = _plan_query(chosen, config)
    n, collective, is_shared = query.ranks, query.collective, query.is_shared
    algorithm, lines, is_demanded = _choice(chosen, config, query)
    plans = {
        name: build_all(collective, name, n, count=query.elements, root=chosen.root)
        for name in ALGORITHMS[collective]
        if unsuited(collective, name, n, even=True) is None
    }
    program = _program_lines(chosen, query, algorithm, is_demanded=is_demanded)
    figure = schedule_text(plans[algorithm], most=None if chosen.full else _SHORT)
    lines += ["", figure.rstrip("\n"), ""]
    model = SHM if is_shared else LINKS
    lines += _table(collective, plans, query.itemsize, model, algorithm)
    place = "in shared memory" if is_shared else "over links"
    lines += [*program, ""]
    lines.append(f"Predicted {place} with {model.text()}: for comparison, no promise.")
    if chosen.path is None:
        other = "SYNCVAR_TRANSPORT=zmq: over sockets; --path shm shows jobs that share memory."
        same = "Jobs on one host share memory; --path links shows those over sockets."
        lines.append(same if is_shared else other)
    if any(sums_by_the_tree(collective, name, n) for name in plans):
        lines.append("tree: sums by the fixed tree over the ranks, as reproducible=True demands.")
    return "".join(f"{line}\n" for line in lines)


def _choice(
    chosen: argparse.Namespace, config: RuntimeConfig, query: _PlanQuery
) -> tuple[str, list[str], bool]:
    """Return the algorithm, the reasons for it, and whether a setting or an option names it."""
    n, collective = query.ranks, query.collective
    fixed = chosen.reproducible
    setting = parse_forced(config.algorithm).get(collective)
    demanded = suited(collective, setting, n, even=True, reproducible=fixed)
    named = chosen.algorithm or demanded
    options: dict[str, Any] = {"reproducible": fixed, "shared": query.is_shared, "even": True}
    choice = choose(collective, query.nbytes, n, forced=named, **options)
    usual = choose(collective, query.nbytes, n, **options)
    by_setting = f"{demanded}: SYNCVAR_ALGORITHM names it"
    reasons = [by_setting if demanded and not chosen.algorithm else choice.reason]
    if usual.algorithm != choice.algorithm:
        reasons.append(f"else {usual.reason}")
    return choice.algorithm, reasons, bool(named)


def _program_lines(
    chosen: argparse.Namespace, query: _PlanQuery, algorithm: str, *, is_demanded: bool
) -> list[str]:
    """Return the program of a rank, if the command line asks for one."""
    rank, n = chosen.program, query.ranks
    if rank is None:
        return []
    if not (query.is_shared and 0 <= rank < n and n > 1):
        raise ConfigError(
            f"--program must be a rank from 0 to {n - 1} of a group of 2 or more that shares "
            f"memory (--path shm), not {rank}"
        )
    about, program = _program(query, rank, chosen.root, algorithm, is_demanded=is_demanded)
    shown = program_text(program, None if chosen.full else _INSTRUCTIONS).splitlines()
    return [
        "",
        f"The program of rank {rank} in shared memory{about}:",
        *(f"  {line}" for line in shown),
    ]


def _table(
    collective: str, plans: dict[str, list[Schedule]], itemsize: int, model: CostModel, chosen: str
) -> list[str]:
    """Return the algorithms by predicted time, with their messages."""
    seconds = {
        algorithm: predicted_seconds(some, itemsize, model) for algorithm, some in plans.items()
    }
    rows: list[tuple[str, ...]] = [
        ("", "algorithm", "predicted", "rounds", "messages", "sent by a rank", "scratch", "tree")
    ]
    for algorithm in sorted(plans, key=lambda name: (seconds[name], name != chosen)):
        some = plans[algorithm]
        sent = traffic(some)
        mark = "*" if algorithm == chosen else ""
        tree = "yes" if sums_by_the_tree(collective, algorithm, len(some)) else ""
        counts = str(sent.rounds), str(sum(sent.messages))
        elements = max(sent.elements), max(plan.scratch_count for plan in some)
        sizes = [_size(count * itemsize) for count in elements]
        rows.append((mark, algorithm, _duration(seconds[algorithm]), *counts, *sizes, tree))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return lines


def _duration(seconds: float) -> str:
    """Format a time."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(nbytes: int) -> str:
    """Format a number of bytes."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _itemsize(name: str) -> int:
    """Return the bytes of an element, which the name of its dtype contains."""
    digits = "".join(character for character in name if character.isdigit())
    return int(digits) // 8 if digits else 1


def _program(
    query: _PlanQuery, rank: int, root: int, algorithm: str, *, is_demanded: bool
) -> tuple[str, Program]:
    """Return the program of a rank, and what to say about it."""
    collective, size, count, itemsize = query[:4]
    if folds_vectors(collective, algorithm):
        ends = ResultPlacement(collective, root)
        if is_direct(count * itemsize, size) or not count:
            return "", lower_small(rank, size, count, ends=ends)
        cells, block = cells_of(size, itemsize, are_native=True)
        program = lower_reduce(rank, size, count, cells, BufferPlacement(), block, ends)
        return ", of ordinary arrays, with the C extension", program
    if collective in _MOVED and not is_demanded:
        return _move(query, rank, root)
    rounds = publications(build_all(collective, algorithm, size, count=count, root=root), rank)
    return "", lower_rounds(rounds, rank, SEGMENT_BYTES // itemsize, SMALL_BYTES // itemsize)


def _move(query: _PlanQuery, rank: int, root: int) -> tuple[str, Program]:
    collective, size, count, itemsize = query[:4]
    has_block_each = collective in ("reduce_scatter", "all_to_all")  # one block for each peer
    is_root = collective == "broadcast" and rank == root
    peers = [peer for peer in range(size) if peer != rank]
    if collective == "broadcast":
        peers = [] if is_root else [root]
    takes = tuple((peer, (rank - (rank > peer)) if has_block_each else 0) for peer in peers)
    puts = size - 1 if has_block_each else int(is_root or collective == "all_gather")
    most = size - 1 if has_block_each else 1
    move = Move(
        rank,
        count,
        *cells_of_blocks(count, itemsize, most, size, are_native=True),
        most,
        puts,
        takes,
        keeps=is_root or collective != "broadcast",
        folds=collective == "reduce_scatter",
    )
    if fits_slots(count * itemsize * most, are_native=True):
        return ", side by side", lower_move(move, TransferPath.SLOTS)
    readers = 1 if collective == "broadcast" else size - 1
    if not move.folds and is_worth_reading(count * itemsize, most, readers, are_native=True):
        return ", of blocks that peers read in place", lower_move(move, TransferPath.DIRECT)
    return ", of ordinary arrays, with the C extension", lower_move(move, TransferPath.CELLS)
