"""How members agree which commit they share, and how one of them sends it to the others.

The sender first sends the description of its values. The arrays follow, one after another, in few
large broadcasts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.broadcast import BroadcastCall
from syncvar.collectives.stage_builders import gather_objects
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import InternalError
from syncvar.elastic.snapshot import HeldValue
from syncvar.protocol.elastic_membership import Tag, common_commit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from syncvar.elastic.snapshot import StateSnapshot
    from syncvar.runtime.communicator import Communicator

NEVER = -1  # the tag of a state that nobody has committed or synchronized
_HOLDERS = "holders of sv.elastic.State"
_CONTENTS = "contents of sv.elastic.State"
_VALUES = "values of sv.elastic.State"
_TOGETHER_BYTES = 64 << 20


class Holding(NamedTuple):
    """A snapshot of one rank, as all ranks see it."""

    identity: tuple[int, int]  # generation and number
    ranks: int  # size of the world in which it was taken
    own: frozenset[str] | None  # keys of plain data that differ; None if nobody has compared it
    plain: dict[str, str]  # digests of plain data


class RankHoldings(NamedTuple):
    """What one rank has."""

    tag: int
    snapshots: list[Holding]  # the newest last


class TakeOver(NamedTuple):
    """The commit that all members take, and who has it."""

    common: tuple[int, int]  # generation and number
    ranks: int  # size of the world in which it was taken
    having: list[int]  # ranks that have it
    own: frozenset[str]  # keys of plain data that each rank keeps for itself

    @property
    def source(self) -> int:
        """The rank that sends it."""
        return self.having[0]


class Contents(NamedTuple):
    """The description of a commit and of its variables."""

    values: dict[str, HeldValue]  # shared values and parts; on other ranks with any content
    pins: dict[str, str | None]  # paces that the program has fixed, by key of the variable


def exchange_holdings(
    world: Communicator, tag: int, snapshots: list[StateSnapshot]
) -> list[RankHoldings]:
    """Return what all ranks have, by rank. Collective."""
    mine = [
        tag,
        [
            [*one.identity, one.ranks, None if one.own is None else sorted(one.own), one.plain()]
            for one in snapshots
        ],
    ]
    return [
        RankHoldings(
            theirs,
            [
                Holding((generation, number), ranks, None if own is None else frozenset(own), plain)
                for generation, number, ranks, own, plain in found
            ],
        )
        for theirs, found in gather_objects(world, _HOLDERS, lambda: mine, None)
    ]


def choose_commit(everyone: list[RankHoldings]) -> TakeOver:
    """Return the commit that all members take: the newest that every holder has.

    Example:
        >>> old, new = (Holding((0, number), 2, frozenset(), {}) for number in (7, 8))
        >>> ranks = [RankHoldings(-1, [new]), RankHoldings(0, [old, new]), RankHoldings(0, [old])]
        >>> choose_commit(ranks)[:3]
        ((0, 7), 2, [1, 2])
    """
    tags = [Tag(one.tag, one.snapshots[-1].identity[1]) for one in everyone]
    holders, number = common_commit(tags)
    if not holders:  # each rank has the objects as it has made them
        chosen = everyone[0].snapshots[-1]
        plain = [one.snapshots[-1].plain for one in everyone]
        return TakeOver(chosen.identity, chosen.ranks, [0], _differing(plain))
    at_holder = everyone[holders[0]].snapshots
    same_number = [one for one in at_holder if one.identity[1] == number]
    if not same_number:
        raise InternalError(f"rank {holders[0]} lacks commit {number}, which another holder has")
    chosen = same_number[0]
    found = {
        rank: one
        for rank, held in enumerate(everyone)
        for one in held.snapshots
        if one.identity == chosen.identity
    }
    # A rank below the first holder may have it as well, but only holders are sure to be complete.
    having = sorted(found, key=lambda rank: (rank not in holders, rank))
    known = [one.own for one in found.values() if one.own is not None]
    if known:
        return TakeOver(chosen.identity, chosen.ranks, having, known[0])
    # Nobody has completed it, so perhaps nobody lives who could show a difference.
    before = [one.own for rank in holders for one in everyone[rank].snapshots if one.own]
    own = _differing([found[rank].plain for rank in having]).union(*before)
    return TakeOver(chosen.identity, chosen.ranks, having, own)


def exchange_contents(
    world: Communicator, source: int, snapshot: StateSnapshot | None, pins: dict[str, str | None]
) -> Contents:
    """Return the description of the source's snapshot. Collective; others pass None."""
    mine: list[Any] = []
    if snapshot is not None and world.member_rank == source:
        described = {
            key: [*one[:2], one.array.dtype.name, list(one.array.shape), one.is_part, one.digest]
            for key, one in {**snapshot.shared(), **snapshot.parts()}.items()
        }
        mine = [described, pins]
    described, pins = gather_objects(world, _CONTENTS, lambda: mine, None)[source]
    values = {}
    for key, (kind, mode, dtype, shape, is_part, digest) in described.items():
        array = np.zeros(shape, dtype_from_index(DTYPE_NAMES.index(dtype)))
        values[key] = HeldValue(kind, mode, array, is_part, is_part, digest)
    return Contents(values, pins)


def broadcast_values(
    world: Communicator, source: int, contents: Contents, snapshot: StateSnapshot | None
) -> None:
    """Fill the shared values of the description from the source's snapshot. Collective."""
    shared = {key: one for key, one in contents.values.items() if not one.is_part}
    for keys in _batches(shared):
        nbytes = sum(shared[key].array.nbytes for key in keys)
        if snapshot is not None and world.member_rank == source:
            together = np.concatenate([_bytes_of(snapshot.values[key].array) for key in keys])
        else:
            together = np.empty(nbytes, np.uint8)
        check = partial(BroadcastCall, world, together, root=source, name=_VALUES)
        received = world.perform(_VALUES, check, None)
        start = 0
        for key in keys:
            target = _bytes_of(shared[key].array)
            target[...] = received[start : start + target.size]
            start += target.size


def _differing(everyone: list[dict[str, str]]) -> frozenset[str]:
    """Return the keys that not all have alike."""
    keys = frozenset().union(*everyone)
    return frozenset(key for key in keys if len({one.get(key) for one in everyone}) > 1)


def _batches(values: dict[str, HeldValue]) -> Iterator[list[str]]:
    keys: list[str] = []
    nbytes = 0
    for key, one in values.items():
        keys.append(key)
        nbytes += one.array.nbytes
        if nbytes >= _TOGETHER_BYTES:
            yield keys
            keys, nbytes = [], 0
    if keys:
        yield keys


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return flat
