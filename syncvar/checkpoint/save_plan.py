"""What all ranks bring to a save, compared; and who writes what. Data in, data out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.checkpoint.manifest import ManifestEntry, Piece, ShardFile, Stored
from syncvar.checkpoint.safetensors_header import itemsize_of
from syncvar.core.errors import CheckpointError, Corrupt, MismatchError, NotFound, SyncvarError

if TYPE_CHECKING:
    from collections.abc import Sequence


class LeafHeader(NamedTuple):
    """What a rank has under one key.

    Args:
        kind: "variable", "generator", "state" or "value".
        mode: Synchronization and aggregation of a variable, else an empty text.
        dtype: As in NumPy.
        shape: Of the value.
        replica: This rank's number among those that have it.
        members: Ranks of the save that have it.
        own: Each replica keeps its own; None where that depends on whether all are equal.
        digest: Of the bytes, where `own` is None; else an empty text.
    """

    kind: str
    mode: str
    dtype: str
    shape: tuple[int, ...]
    replica: int
    members: tuple[int, ...]
    own: bool | None
    digest: str = ""

    @property
    def words(self) -> str:
        """In words, for tables."""
        mode = f" {self.mode}" if self.mode else ""
        return f"{self.kind}{mode} {self.dtype}{list(self.shape)}"


class ElementRange(NamedTuple):
    """A range of a value's elements, counted through in C order, and the rank that writes it."""

    key: str
    rank: int
    start: int
    stop: int


class SaveLayout(NamedTuple):
    """Who writes what.

    Args:
        brought: Under each key, what each rank has.
        own: Keys of which each replica keeps its own.
        parts: Of the values that all have.
    """

    brought: dict[str, dict[int, LeafHeader]]
    own: frozenset[str]
    parts: tuple[ElementRange, ...]


def shares(values: Sequence[tuple[str, int, int]], ranks: Sequence[int]) -> list[ElementRange]:
    """Split values, laid side by side, into one range of bytes for each rank, even up to an element.

    Args:
        values: (key, elements, bytes of an element) of each; one without elements has no part.
        ranks: Who writes.

    Example:
        >>> shares([("a", 3, 4), ("b", 5, 4)], [0, 1])
        [ElementRange(key='a', rank=0, start=0, stop=3), ElementRange(key='b', rank=0, start=0, stop=1), ElementRange(key='b', rank=1, start=1, stop=5)]
    """
    total = sum(count * itemsize for _, count, itemsize in values)
    bounds = [total * index // len(ranks) for index in range(len(ranks) + 1)]
    made, offset = [], 0
    for key, count, itemsize in values:
        edges = [min(max(-(-(bound - offset) // itemsize), 0), count) for bound in bounds]
        edges[-1] = count
        made += [
            ElementRange(key, rank, start, stop)
            for rank, start, stop in zip(ranks, edges, edges[1:], strict=False)
            if start < stop
        ]
        offset += count * itemsize
    return made


def lay_out(everyone: list[dict[str, LeafHeader]], table_ranks: tuple[int, ...]) -> SaveLayout:
    """Compare what the ranks bring, and say who writes what.

    Args:
        everyone: By rank of the save, what it brings under each key.
        table_ranks: Their ranks in the world, for messages.

    Raises:
        MismatchError: They bring different things where they must be the same.
    """
    brought: dict[str, dict[int, LeafHeader]] = {}
    for rank, mine in enumerate(everyone):
        for key, one in mine.items():
            brought.setdefault(key, {})[rank] = one
    own: set[str] = set()
    values: dict[tuple[int, ...], list[tuple[str, LeafHeader]]] = {}
    for key, by_rank in sorted(brought.items()):
        first = next(iter(by_rank.values()))
        is_own = (
            len({one.digest for one in by_rank.values()}) > 1 if first.own is None else first.own
        )
        same = {_alike(one, is_own=is_own) for one in by_rank.values()}
        complete = first.own is True or set(by_rank) == set(first.members)
        if len(same) > 1 or not complete:
            raise MismatchError(
                f"the ranks do not save the same under {key!r}; nothing was written. Every rank has to make the same "
                f"sv.Checkpoint(…)",
                {
                    world: by_rank[rank].words if rank in by_rank else "has nothing of this name"
                    for rank, world in enumerate(table_ranks)
                    if rank in by_rank or rank in first.members
                },
            )
        if is_own:
            own.add(key)
        else:
            values.setdefault(tuple(sorted(by_rank)), []).append((key, first))
    parts: list[ElementRange] = []
    for ranks, group in values.items():
        parts += shares(
            [(key, math.prod(one.shape), itemsize_of(one.dtype)) for key, one in group], ranks
        )
    return SaveLayout(brought, frozenset(own), tuple(parts))


def _alike(one: LeafHeader, *, is_own: bool) -> tuple[Any, ...]:
    """Return what must be the same on all ranks: of a replica's own things neither shape nor dtype."""
    return (
        (one.kind, one.own)
        if is_own
        else (one.kind, one.mode, one.own, one.dtype, one.shape, one.members, one.digest)
    )


def entries_of(layout: SaveLayout, digests: list[dict[str, str]]) -> dict[str, ManifestEntry]:
    """Return the entries of the manifest.

    Args:
        layout: Who wrote what.
        digests: By rank, the digest of what it wrote under each key.
    """
    pieces: dict[str, list[Piece]] = {}
    for part in layout.parts:
        digest = digests[part.rank][part.key]
        pieces.setdefault(part.key, []).append(Piece(part.rank, part.start, part.stop, digest))
    made = {}
    for key, by_rank in layout.brought.items():
        first = next(iter(by_rank.values()))
        replicas = len(first.members)
        if key not in layout.own:
            value = Stored(first.dtype, first.shape, tuple(pieces.get(key, ())))
            made[key] = ManifestEntry(first.kind, first.mode, replicas, value)
            continue
        copies = {}
        for rank, one in by_rank.items():
            count = math.prod(one.shape)
            whole = (Piece(rank, 0, count, digests[rank][key]),) if count else ()
            copies[one.replica] = Stored(one.dtype, one.shape, whole)
        made[key] = ManifestEntry(first.kind, first.mode, replicas, None, copies)
    return made


# -- failures of single ranks, told to all ---------------------------------------------------------


def failure_of(error: SyncvarError) -> list[str]:
    """Return an error as data."""
    if isinstance(error, Corrupt):
        return ["Corrupt", error.key, error.expected, error.actual, error.detail]
    return ["NotFound" if isinstance(error, NotFound) else "CheckpointError", str(error)]


def raise_failures(failures: dict[int, list[str]], mine: CheckpointError | None, what: str) -> None:
    """Raise on every rank if one has failed: its own error there, the same kind of error with its words elsewhere.

    Args:
        failures: By rank of the world.
        mine: This rank's own error.
        what: What was done, and what that means now.

    Raises:
        CheckpointError: A rank has failed.
    """
    if not failures:
        return
    if mine is not None:
        raise mine
    rank, (kind, *words) = min(failures.items())
    if kind == "Corrupt":
        key, expected, actual, detail = words
        raise Corrupt(key, expected, actual, f"rank {rank}: {detail}" if detail else f"rank {rank}")
    shown = f"rank {rank}: {words[0]} ({what})"
    raise NotFound(shown) if kind == "NotFound" else CheckpointError(shown)


def shard_of(record: list[Any]) -> ShardFile | None:
    """Return the shard that a rank says to have written, None if it had nothing to write."""
    return ShardFile(int(record[0]), str(record[1])) if record else None
