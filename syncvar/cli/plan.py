"""`syncvar plan`: a schedule as a figure, its messages and predicted time, and why it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.algorithms.builders import ALGORITHMS, build_all, sums_by_the_tree, unsuited
from syncvar.algorithms.compile_schedule import publications
from syncvar.algorithms.render import schedule_text
from syncvar.algorithms.selection import choose, parse_forced, suited
from syncvar.cli.bench_table import parse_size
from syncvar.cli.plan_cost import LINKS, SHM, predicted_seconds, traffic
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

    from syncvar.algorithms.schedule import Schedule
    from syncvar.cli.plan_cost import CostModel
    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.instructions import Program


_INSTRUCTIONS = 24  # of a program
_SHORT = 8  # ranks, rounds and steps of a figure
_RANKS_MAX = 1024  # plans are built for all ranks and all algorithms
_OF_BLOCKS = ("all_gather", "header_exchange", "gather", "scatter", "reduce_scatter", "all_to_all")


_REDUCED = ("all_reduce", "reduce", "scan", "exscan")
_MOVED = ("all_gather", "broadcast", "reduce_scatter", "all_to_all")


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


def text(chosen: argparse.Namespace, config: RuntimeConfig) -> str:
    """Return the output of the command."""
    n, collective = chosen.ranks, chosen.collective
    if not 1 <= n <= _RANKS_MAX:
        raise ConfigError(f"--ranks must be 1 to {_RANKS_MAX}, not {n}")
    itemsize = _itemsize(chosen.dtype)
    blocks = n if collective in _OF_BLOCKS else 1
    count = chosen.count
    if chosen.bytes is not None:
        count = -(-parse_size(chosen.bytes) // (itemsize * blocks))
    if count < 0:
        raise ConfigError(f"--count must not be negative, not {count}")
    path = chosen.path or ("links" if config.transport == "zmq" else "shm")
    is_shared = path == "shm"
    nbytes = 0 if collective == "barrier" else count * blocks * itemsize
    fixed = chosen.reproducible
    options: dict[str, Any] = {"reproducible": fixed, "shared": is_shared, "even": True}
    setting = parse_forced(config.algorithm).get(collective)
    demanded = suited(collective, setting, n, even=True, reproducible=fixed)
    choice = choose(collective, nbytes, n, forced=chosen.algorithm or demanded, **options)
    reason = choice.reason
    if demanded and not chosen.algorithm:
        reason = f"{demanded}: SYNCVAR_ALGORITHM names it"
    model = SHM if is_shared else LINKS
    plans = {
        algorithm: build_all(collective, algorithm, n, count=count, root=chosen.root)
        for algorithm in ALGORITHMS[collective]
        if unsuited(collective, algorithm, n, even=True) is None
    }
    lines = [reason]
    usual = choose(collective, nbytes, n, **options)
    if usual.algorithm != choice.algorithm:
        lines.append(f"else {usual.reason}")
    if chosen.program is not None and not (is_shared and 0 <= chosen.program < n and n > 1):
        raise ConfigError(
            f"--program must be a rank from 0 to {n - 1} of a group of 2 or more that shares "
            f"memory (--path shm), not {chosen.program}"
        )
    lines += [
        "",
        schedule_text(plans[choice.algorithm], most=None if chosen.full else _SHORT).rstrip("\n"),
        "",
    ]
    lines += _table(collective, plans, itemsize, model, choice.algorithm)
    if chosen.program is not None:
        most = None if chosen.full else _INSTRUCTIONS
        call = _ProgramArgs(collective, chosen.program, n, count, itemsize, chosen.root)
        is_demanded = bool(chosen.algorithm or demanded)
        about, program = _program(call, choice.algorithm, is_demanded=is_demanded)
        lines += ["", f"The program of rank {call.rank} in shared memory{about}:"]
        lines += [f"  {line}" for line in program_text(program, most).splitlines()]
    lines.append("")
    lines.append(
        f"Predicted {'in shared memory' if is_shared else 'over links'} with {model.text()}: for "
        "comparison, no promise."
    )
    if chosen.path is None:
        other = "SYNCVAR_TRANSPORT=zmq: over sockets; --path shm shows jobs that share memory."
        same = "Jobs on one host share memory; --path links shows those over sockets."
        lines.append(same if is_shared else other)
    if any(sums_by_the_tree(collective, algorithm, n) for algorithm in plans):
        lines.append("tree: sums by the fixed tree over the ranks, as reproducible=True demands.")
    return "".join(f"{line}\n" for line in lines)


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


class _ProgramArgs(NamedTuple):
    """A call whose program is shown; `elements` are those of the vector, or of each block."""

    collective: str
    rank: int
    size: int
    elements: int
    itemsize: int
    root: int


def _program(call: _ProgramArgs, algorithm: str, *, is_demanded: bool) -> tuple[str, Program]:
    collective, rank, size, count, itemsize, root = call
    if collective in _REDUCED and algorithm in ("direct", "owners"):
        ends = ResultPlacement(collective, root)
        if is_direct(count * itemsize, size) or not count:
            return "", lower_small(rank, size, count, ends=ends)
        cells, block = cells_of(size, itemsize, are_native=True)
        program = lower_reduce(rank, size, count, cells, BufferPlacement(), block, ends)
        return ", of ordinary arrays, with the C extension", program
    if collective in _MOVED and not is_demanded:
        return _move(call)
    rounds = publications(build_all(collective, algorithm, size, count=count, root=root), rank)
    return "", lower_rounds(rounds, rank, SEGMENT_BYTES // itemsize, SMALL_BYTES // itemsize)


def _move(call: _ProgramArgs) -> tuple[str, Program]:
    collective, rank, size, count, itemsize, root = call
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
