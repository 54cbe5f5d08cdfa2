"""`syncvar plan`: a schedule as a figure, its messages and predicted time, and why it is chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
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
from syncvar.algorithms.cost_model import (
    LINKS,
    SHM,
    BetweenHosts,
    HostNetwork,
    PairRate,
    predicted_seconds,
)
from syncvar.algorithms.schedule import Send, schedule_text
from syncvar.algorithms.selection import AlgorithmChoice, choose, parse_forced, suited
from syncvar.cli.bench_table import parse_size
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.errors import ConfigError, error_line
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
from syncvar.transports.lane_transport import path_between_hosts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from syncvar.algorithms.schedule import Schedule
    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.instructions import Program

_INSTRUCTIONS = 24  # of a program
_SHORT = 8  # ranks, rounds and steps of a figure
_RANKS_MAX = 1024  # plans are built for all ranks and all algorithms
_MOVED = ("all_gather", "broadcast", "reduce_scatter", "all_to_all")


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
    links = "choose between hosts, one for each rank, by the links that syncvar doctor --json found"
    add("--measured", metavar="FILE", help=links)
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
    has_links = config.transport == "zmq" or chosen.measured is not None
    is_shared = (chosen.path or ("links" if has_links else "shm")) == "shm"
    nbytes = 0 if work is WorkLayout.NOTHING else count * blocks * itemsize
    return _PlanQuery(collective, n, count, itemsize, nbytes, is_shared)


def text(chosen: argparse.Namespace, config: RuntimeConfig) -> str:
    """Return the output of the command."""
    query = _plan_query(chosen, config)
    n, collective, is_shared = query.ranks, query.collective, query.is_shared
    network = None if chosen.measured is None else _network(chosen.measured, n)
    algorithm, lines, is_demanded = _choice(chosen, config, query, network)
    plans = {
        name: build_all(collective, name, n, count=query.elements, root=chosen.root)
        for name in ALGORITHMS[collective]
        if unsuited(collective, name, n, even=True) is None
    }
    program = _program_lines(chosen, query, algorithm, is_demanded=is_demanded)
    figure = schedule_text(plans[algorithm], most=None if chosen.full else _SHORT)
    lines += ["", figure.rstrip("\n"), ""]
    model = SHM if is_shared else LINKS
    seconds = {
        name: predicted_seconds(some, query.itemsize, model, network)
        for name, some in plans.items()
    }
    lines += _table(query, plans, seconds, algorithm)
    lines += [*program, ""]
    lines += _notes(chosen, config, is_shared=is_shared)
    if any(sums_by_the_tree(collective, name, n) for name in plans):
        lines.append("tree: sums by the fixed tree over the ranks, as reproducible=True demands.")
    return "".join(f"{line}\n" for line in lines)


def _notes(chosen: argparse.Namespace, config: RuntimeConfig, *, is_shared: bool) -> list[str]:
    """Return what the prediction assumes, and which path data take between hosts."""
    place = "in shared memory" if is_shared else "over links"
    known = (SHM if is_shared else LINKS).text()
    if chosen.measured is not None:
        known = f"what {chosen.measured} says"
    lines = [f"Predicted {place} with {known}: for comparison, no promise."]
    if not is_shared:
        lines.append(f"Between hosts data take {path_between_hosts(config)}.")
    if chosen.path is None and chosen.measured is None:
        other = "SYNCVAR_TRANSPORT=zmq: over sockets; --path shm shows jobs that share memory."
        same = "Jobs on one host share memory; --path links shows those over sockets."
        lines.append(same if is_shared else other)
    return lines


def _choice(
    chosen: argparse.Namespace,
    config: RuntimeConfig,
    query: _PlanQuery,
    network: HostNetwork | None,
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
    if network is not None and not named and config.algorithm_choice != "rules":
        between = BetweenHosts(network, config.algorithm_choice != "measured")
        found = between.choose(collective, query.nbytes, n, reproducible=fixed, even=True)
        choice = AlgorithmChoice(found.algorithm, found.reason)
    by_setting = f"{demanded}: SYNCVAR_ALGORITHM names it"
    reasons = [by_setting if demanded and not chosen.algorithm else choice.reason]
    if usual.algorithm != choice.algorithm:
        reasons.append(f"else {usual.reason}")
    return choice.algorithm, reasons, bool(named)


def _network(path: str, ranks: int) -> HostNetwork:
    """Return the network between hosts that a file of `syncvar doctor --json` has."""
    try:
        checks = json.loads(Path(path).read_text("utf-8"))["checks"]
        links = [one for one in checks if one["name"] == "link"]
        rates = {tuple(one["host"].split(" to ")): PairRate(*one["numbers"]) for one in links}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--measured {path} cannot be read ({error_line(error)}): it must be the output of "
            "syncvar doctor --json with --hostfile or -H"
        ) from error
    hosts = list(dict.fromkeys(name for pair in rates for name in pair))
    pairs = {(hosts.index(a), hosts.index(b)): rate for (a, b), rate in rates.items()}
    found = HostNetwork.of_pairs(len(hosts), pairs)
    if found is None or len(hosts) != ranks:
        raise ConfigError(
            f"--measured {path} has the links of {len(hosts)} hosts: --ranks must be as many, one "
            "for each host"
        )
    return found


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
    query: _PlanQuery,
    plans: Mapping[str, list[Schedule]],
    seconds: Mapping[str, float],
    chosen: str,
) -> list[str]:
    """Return the algorithms by predicted time, with their messages."""
    collective, itemsize = query.collective, query.itemsize
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
