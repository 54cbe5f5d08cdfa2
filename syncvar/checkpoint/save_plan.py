"""The save plan: compares the leaves of all ranks and decides which rank writes which elements.

It also turns the failure of one rank into the errors of all. Pure: data in, data out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.checkpoint.checkpoint_format import (
    ManifestEntry,
    Piece,
    ShardFile,
    Stored,
    itemsize_of,
)
from syncvar.core.errors import (
    CheckpointError,
    Corrupt,
    MismatchError,
    NotFound,
    SyncvarError,
    error_message,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class LeafHeader(NamedTuple):
    """Description of one leaf on one rank, exchanged before a save."""

    kind: str  # "variable", "generator", "state" or "value"
    mode: str  # synchronization and aggregation of a variable; "" otherwise
    dtype: str  # NumPy name
    shape: tuple[int, ...]  # shape of the value
    replica: int  # number of this rank among the ranks that have the leaf
    members: tuple[int, ...]  # ranks of the save that have the leaf
    own: bool | None  # whether each replica saves its own value; None: only if the values differ
    digest: str = ""  # digest of the bytes if `own` is None; "" otherwise

    @property
    def words(self) -> str:
        """Type, mode, dtype and shape, for tables of errors."""
        mode = f" {self.mode}" if self.mode else ""
        return f"{self.kind}{mode} {self.dtype}{list(self.shape)}"


class ElementRange(NamedTuple):
    """A range of a value's elements in C order, and the rank that writes it."""

    key: str
    rank: int
    start: int
    stop: int


class SaveLayout(NamedTuple):
    """Assignment of elements to ranks."""

    headers: dict[str, dict[int, LeafHeader]]  # key -> rank -> header
    own: frozenset[str]  # keys whose values each replica saves for itself
    parts: tuple[ElementRange, ...]  # ranges of the shared values


def shares(values: Sequence[tuple[str, int, int]], ranks: Sequence[int]) -> list[ElementRange]:
    """Split values, laid side by side, into one byte range for each rank, rounded to elements."""
    total = sum(count * itemsize for _, count, itemsize in values)
    bounds = [total * index // len(ranks) for index in range(len(ranks) + 1)]
    ranges, offset = [], 0
    for key, count, itemsize in values:
        cuts = [min(max(-(-(bound - offset) // itemsize), 0), count) for bound in bounds]
        cuts[-1] = count
        for rank, start, stop in zip(ranks, cuts, cuts[1:], strict=False):
            if start < stop:
                ranges.append(ElementRange(key, rank, start, stop))
        offset += count * itemsize
    return ranges


def lay_out(everyone: list[dict[str, LeafHeader]], table_ranks: tuple[int, ...]) -> SaveLayout:
    """Compare the headers of all ranks and assign elements to ranks."""
    headers: dict[str, dict[int, LeafHeader]] = {}
    for rank, mine in enumerate(everyone):
        for key, one in mine.items():
            headers.setdefault(key, {})[rank] = one
    own: set[str] = set()
    values: dict[tuple[int, ...], list[tuple[str, LeafHeader]]] = {}
    for key, by_rank in sorted(headers.items()):
        first = next(iter(by_rank.values()))
        digests = {one.digest for one in by_rank.values()}
        is_own = len(digests) > 1 if first.own is None else first.own
        same = {_alike(one, is_own=is_own) for one in by_rank.values()}
        complete = first.own is True or set(by_rank) == set(first.members)
        if len(same) > 1 or not complete:
            table = {
                world: by_rank[rank].words if rank in by_rank else "has no object of this name"
                for rank, world in enumerate(table_ranks)
                if rank in by_rank or rank in first.members
            }
            raise MismatchError(
                f"the ranks do not save the same under {key!r}; nothing was written. Every rank "
                f"must make the same sv.Checkpoint(…)",
                table,
            )
        if is_own:
            own.add(key)
        else:
            values.setdefault(tuple(sorted(by_rank)), []).append((key, first))
    parts: list[ElementRange] = []
    for ranks, group in values.items():
        sizes = [(key, math.prod(one.shape), itemsize_of(one.dtype)) for key, one in group]
        parts += shares(sizes, ranks)
    return SaveLayout(headers, frozenset(own), tuple(parts))


def _alike(one: LeafHeader, *, is_own: bool) -> tuple[Any, ...]:
    """Return what must be equal on all ranks; own values may differ in shape and dtype."""
    if is_own:
        return one.kind, one.own
    return one.kind, one.mode, one.own, one.dtype, one.shape, one.members, one.digest


def entries_of(layout: SaveLayout, digests: list[dict[str, str]]) -> dict[str, ManifestEntry]:
    """Return the manifest entries. `digests` has, for each rank, a digest for each key it wrote."""
    pieces: dict[str, list[Piece]] = {}
    for part in layout.parts:
        digest = digests[part.rank][part.key]
        pieces.setdefault(part.key, []).append(Piece(part.rank, part.start, part.stop, digest))
    entries = {}
    for key, by_rank in layout.headers.items():
        first = next(iter(by_rank.values()))
        replicas = len(first.members)
        if key not in layout.own:
            value = Stored(first.dtype, first.shape, tuple(pieces.get(key, ())))
            entries[key] = ManifestEntry(first.kind, first.mode, replicas, value)
            continue
        copies = {}
        for rank, one in by_rank.items():
            count = math.prod(one.shape)
            whole = (Piece(rank, 0, count, digests[rank][key]),) if count else ()
            copies[one.replica] = Stored(one.dtype, one.shape, whole)
        entries[key] = ManifestEntry(first.kind, first.mode, replicas, None, copies)
    return entries


# -- the failure of one rank as errors of all ------------------------------------------------------


def failure_of(error: SyncvarError) -> list[str]:
    """Return an error as data for the other ranks."""
    if isinstance(error, Corrupt):
        return ["Corrupt", error.key, error.expected, error.actual, error.detail]
    return ["NotFound" if isinstance(error, NotFound) else "CheckpointError", error_message(error)]


def raise_failures(
    failures: dict[int, list[str]], mine: CheckpointError | None, outcome: str
) -> None:
    """Raise if a rank has failed: its own error on that rank, an equivalent error on all others."""
    if not failures:
        return
    if mine is not None:
        raise mine
    rank, (kind, *words) = min(failures.items())
    if kind == "Corrupt":
        key, expected, actual, detail = words
        raise Corrupt(key, expected, actual, f"rank {rank}: {detail}" if detail else f"rank {rank}")
    shown = f"rank {rank}: {words[0]} ({outcome})"
    raise NotFound(shown) if kind == "NotFound" else CheckpointError(shown)


def shard_of(record: list[Any]) -> ShardFile | None:
    """Return the shard file described by a rank's record, None if the record is empty."""
    return ShardFile(int(record[0]), str(record[1])) if record else None
