"""`syncvar plan --program RANK`: the shared-memory program of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.shm_rounds import publications
from syncvar.runtime.programs.block_transfer import cells_of_blocks, fits_slots, is_worth_reading
from syncvar.runtime.programs.compile_reduce import (
    BufferPlacement,
    ResultPlacement,
    lower_reduce,
    lower_small,
)
from syncvar.runtime.programs.compile_rounds import lower_rounds
from syncvar.runtime.programs.compile_transfer import Move, TransferPath, lower_move
from syncvar.runtime.programs.instructions import program_text
from syncvar.runtime.programs.shm_reduce import cells_of, is_direct
from syncvar.shm.channel_table import SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from syncvar.runtime.programs.instructions import Program


_REDUCED = ("all_reduce", "reduce", "scan", "exscan")
_MOVED = ("all_gather", "broadcast", "reduce_scatter", "all_to_all")


def program_lines(
    collective: str,
    algorithm: str,
    rank: int,
    size: int,
    count: int,
    itemsize: int,
    root: int,
    *,
    is_demanded: bool,
    most: int | None,
) -> list[str]:
    """Return the program of a rank in shared memory."""
    about, program = _program(collective, algorithm, rank, size, count, itemsize, root, is_demanded)
    head = f"The program of rank {rank} in shared memory{about}:"
    return ["", head, *(f"  {line}" for line in program_text(program, most).splitlines())]


def _program(
    collective: str,
    algorithm: str,
    rank: int,
    size: int,
    count: int,
    itemsize: int,
    root: int,
    is_demanded: bool,
) -> tuple[str, Program]:
    if collective in _REDUCED and algorithm in ("direct", "owners"):
        ends = ResultPlacement(collective, root)
        if is_direct(count * itemsize, size) or not count:
            return "", lower_small(rank, size, count, ends=ends)
        cells, block = cells_of(size, itemsize, are_native=True)
        return ", of ordinary arrays, with the C extension", lower_reduce(
            rank, size, count, cells, BufferPlacement(), block, ends
        )
    if collective in _MOVED and not is_demanded:
        return _move(collective, rank, size, count, itemsize, root)
    rounds = publications(build_all(collective, algorithm, size, count=count, root=root), rank)
    return "", lower_rounds(rounds, rank, SEGMENT_BYTES // itemsize, SMALL_BYTES // itemsize)


def _move(
    collective: str, rank: int, size: int, count: int, itemsize: int, root: int
) -> tuple[str, Program]:
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
