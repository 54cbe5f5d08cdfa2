"""The replica checker: variables that are kept equal are compared by digests, a part of them each time.

A check reads at most `BYTES_PER_RUN` for each run since the last one, going round all blocks of all variables, so that its
share of a step does not grow with the model: of T bytes in all, each is looked at in every ceil(T / (BYTES_PER_RUN *
check_every)) checks. Where a part differs, everything is compared at once, to say what, where and since which run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives._headers import exchange_bytes
from syncvar.errors import MismatchError
from syncvar.runtime.group import Request, fingerprint
from syncvar.variables.digests import BLOCK_BYTES, block_bytes, block_digests, combined

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.group import Communicator
    from syncvar.runtime.operation import Stage
    from syncvar.variables.places import Owner
    from syncvar.variables.roster import Entry
    from syncvar.variables.variable import Variable

__all__ = ["BYTES_PER_RUN", "Checker"]

BYTES_PER_RUN = 16 << 10
_BYTES_FOR_A_BLOCK = 16 << 10  # what looking at any block costs besides, in bytes that could be read in that time
_WHAT = "comparison of the replicas' copies"


class Part(NamedTuple):
    """Blocks of a variable that are compared."""

    entry: Entry
    variable: Variable
    start: int
    stop: int


class Parted(NamedTuple):
    """Where copies differ.

    Args:
        part: The first variable in which they do.
        blocks: Numbers of its blocks that differ.
        others: Names of further variables.
        strangers: Replicas that are in the minority.
        has_majority: More than half of the replicas agree.
        first: First element that differs.
        last: Last one.
        values: By replica, the bytes of the first element.
    """

    part: Part
    blocks: list[int]
    others: list[str]
    strangers: list[int]
    has_majority: bool
    first: int
    last: int
    values: list[bytes]


class Checker:
    """Goes round the variables of a strategy."""

    def __init__(self) -> None:
        self._cursor = (0, 0)  # number of the entry and of the block that come next

    def check(self, owner: Owner, variables: Sequence[tuple[Entry, Variable]], run: int) -> None:
        """Compare some blocks of the copies. Collective.

        Args:
            owner: The strategy.
            variables: All that live on every replica, in order of creation.
            run: Number of the run that ends.

        Raises:
            MismatchError: Copies differ; on all replicas.

        Cost: an exchange of 8 bytes.
        """
        parts = self._chosen(variables, BYTES_PER_RUN * max(owner.check_every, 1))
        if not parts:
            return
        communicator = owner.communicator

        def request() -> Request:
            everything = [Part(entry, variable, 0, entry.good.size) for entry, variable in variables]
            return Request(_WHAT, fingerprint(_WHAT), _body(communicator, parts, everything))

        found: Parted | None = communicator.perform(_WHAT, request, owner.timeout)
        if found is not None:
            raise _error(communicator, found, run)
        for part in parts:
            part.entry.good[part.start : part.stop] = run

    def _chosen(self, variables: Sequence[tuple[Entry, Variable]], budget: int) -> list[Part]:
        """Return the parts that come next, and move on; the same on all replicas."""
        parts: list[Part] = []
        number, block = self._cursor
        first = next((place for place, (entry, _) in enumerate(variables) if entry.number >= number), 0)
        for place in range(len(variables)):
            entry, variable = variables[(first + place) % len(variables)]
            start = block if place == 0 and entry.number == number else 0
            blocks = entry.good.size
            stop = start
            while stop < blocks and budget > 0:
                budget -= min(BLOCK_BYTES, entry.nbytes - stop * BLOCK_BYTES) + _BYTES_FOR_A_BLOCK
                stop += 1
            if stop > start:
                parts.append(Part(entry, variable, start, stop))
            self._cursor = (entry.number, stop) if stop < blocks else (entry.number + 1, 0)
            if budget <= 0:
                break
        return parts


def _digests(parts: Sequence[Part]) -> NDArray[np.uint64]:
    return np.concatenate([block_digests(_copy(one), one.start, one.stop) for one in parts])


def _body(
    communicator: Communicator, parts: Sequence[Part], everything: Sequence[Part]
) -> Generator[Stage, None, Parted | None]:
    digests = _digests(parts)
    told = yield from exchange_bytes(communicator, combined(digests).to_bytes(8, "little"))
    if all(one == told[0] for one in told):
        return None
    everyone = yield from exchange_bytes(communicator, _digests(everything).tobytes())
    table = np.array([np.frombuffer(one, np.uint64) for one in everyone])
    differs = (table != table[0]).any(axis=0)
    found: Part | None = None
    blocks: list[int] = []
    rows: Any = None
    others: list[str] = []
    place = 0
    for one in everything:
        here = slice(place, place + one.stop)
        place = here.stop
        if not differs[here].any():
            continue
        if found is None:
            found, rows, blocks = one, table[:, here], np.flatnonzero(differs[here]).tolist()
        else:
            others.append(one.entry.name)
    assert found is not None  # the combination of equal digests is equal
    counts = Counter(row.tobytes() for row in rows)
    usual, count = counts.most_common(1)[0]  # of equally many: the one that is met first, that is, by lower ranks
    strangers = [replica for replica, row in enumerate(rows) if row.tobytes() != usual]
    copy = _copy(found)
    size = copy.dtype.itemsize
    first, last, values = -1, -1, [b""] * communicator.size
    for block in dict.fromkeys((blocks[0], blocks[-1])):
        contents = yield from exchange_bytes(communicator, block_bytes(copy, block).tobytes())
        bytes_of = np.array([np.frombuffer(one, np.uint8) for one in contents])
        places = np.flatnonzero((bytes_of != bytes_of[0]).any(axis=0))
        last = (block * BLOCK_BYTES + int(places[-1])) // size
        if first < 0:
            first = (block * BLOCK_BYTES + int(places[0])) // size
            begin = first * size - block * BLOCK_BYTES
            values = [one[max(begin, 0) : begin + size] for one in contents]
    return Parted(found, blocks, others, strangers, count * 2 > communicator.size, first, last, values)


def _copy(part: Part) -> NDArray[Any]:
    copy: NDArray[Any] = part.variable._storage.array  # noqa: SLF001  (the other half of the variable)
    return copy


def _error(communicator: Communicator, found: Parted, run: int) -> MismatchError:
    entry, blocks = found.part.entry, found.blocks
    dtype = _copy(found.part).dtype
    good = min(int(entry.good[block]) for block in blocks)
    ranks = [communicator.members[replica] for replica in found.strangers]
    table = {}
    for replica, member in enumerate(communicator.members):
        value = np.frombuffer(found.values[replica], dtype)[0] if len(found.values[replica]) == dtype.itemsize else "?"
        is_stranger = replica in found.strangers
        table[member] = f"element {found.first} is {value!s} (bytes {found.values[replica].hex()}){', differs' if is_stranger else ''}"
    which = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} differ"
    whom = "from the majority" if found.has_majority else "from the lowest rank (no majority can tell who is right)"
    names = ", ".join(map(repr, found.others[:8])) + (", …" if len(found.others) > 8 else "")
    more = f" Further variables that differ: {names}." if found.others else ""
    return MismatchError(
        f"the copies of variable {entry.name!r} are not the same on all replicas: {which} {whom}, in elements {found.first} to "
        f"{found.last} of the flat array. They parted after run {good} and not later than run {run}.{more} Memory or hardware "
        f"may have failed, or the program has changed copies by itself. Go on from a checkpoint that was saved by run {good}, or "
        f"write v.assign(value) with one value on every replica",
        table,
    )
