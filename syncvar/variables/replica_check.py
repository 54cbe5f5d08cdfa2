"""The replica check: compare the copies of replicated variables by digests of all bytes.

`CheckSchedule` says when which variables are compared; the registry calls `compare`. If digests
differ, the replicas exchange them block by block. So the error names the variable, the elements,
the replicas, and the last good point of the program.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import agree
from syncvar.collectives.stage_builders import exchange_bytes
from syncvar.core.errors import MismatchError
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.variables.block_digests import (
    BLOCK_BYTES,
    block_bytes,
    block_count,
    block_digests,
    combined,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import RegistryEntry, VariableState

    Pair = tuple[RegistryEntry, VariableState]

NEVER = 1 << 62
_LOT_BYTES = 1 << 20  # comparing so much takes 0.1 to 0.2 ms, and as much again at the end of a run
_WHAT = "comparison of the replicas' copies"
_MASK = (1 << 64) - 1


class CheckSchedule:
    """Assigns variables to lots of about 1 MiB, and each lot to runs (outside runs: to steps).

    In every `check_every` runs each lot is compared once. A model of several lots is compared one
    lot in a run, so that no run takes much longer than others.
    """

    def __init__(self, entries: Mapping[str, RegistryEntry]) -> None:
        self._entries = entries
        self._nbytes = 0  # of all variables that ever existed
        self._lots: dict[int, list[RegistryEntry]] = {}  # by the remainder of their run numbers
        self._period = 0  # the `check_every` of these lots; 0 if they have to be rebuilt

    def next_lot(self, nbytes: int) -> int:
        """Return the lot of a new variable."""
        lot = self._nbytes // _LOT_BYTES
        self._nbytes += nbytes
        return lot

    def invalidate(self) -> None:
        """Rebuild the lots before their next use."""
        self._period = 0

    def due_at(self, number: int, check_every: int) -> list[RegistryEntry]:
        """Return the entries that are compared in a run or step; the same on all replicas."""
        if check_every <= 0:
            return []
        if self._period != check_every:
            self._period = check_every
            self._lots.clear()
            for entry in self._entries.values():
                self._lots.setdefault(-entry.lot % check_every, []).append(entry)
        return self._lots.get(number % check_every, [])

    def next_after(self, number: int, check_every: int) -> int:
        """Return the next run or step after `number` that compares something."""
        if check_every <= 0:
            return NEVER
        self.due_at(number, check_every)  # builds the lots
        waits = [(lot - number - 1) % check_every + 1 for lot in self._lots]
        return number + min(waits, default=NEVER)


class ReplicaMismatch(NamedTuple):
    """A difference between copies.

    Args:
        entry: The first variable whose copies differ.
        state: Its state.
        others: Names of further such variables.
        strangers: Replicas in the minority.
        has_majority: More than half of the replicas agree.
        first: First element that differs.
        last: Last one.
        values: Bytes of the first element, by replica.
    """

    entry: RegistryEntry
    state: VariableState
    others: list[str]
    strangers: list[int]
    has_majority: bool
    first: int
    last: int
    values: list[bytes]


def compare(
    owner: VariableOwner,
    pairs: Sequence[Pair],
    now: str,
    *,
    good: str | None = None,
    before: str = "",
) -> None:
    """Compare the copies of variables. Collective.

    Args:
        owner: The strategy.
        pairs: Variables that exist on every replica, with their entries, in the same order.
        now: The point of the program: "run 7".
        good: The point at which the present values were last written, if the copies are equal; None
            for now.
        before: Description of the write that follows.

    Cost: each byte is read once, 0.1 to 0.2 ns each; an all-reduce of 16 bytes.
    """
    if not pairs:
        return
    communicator = owner.communicator
    what = _WHAT + before

    digests = _digests(pairs)
    mine = combined(digests)
    # The largest and the smallest are equal exactly if all are.
    most, least = agree(
        communicator,
        _WHAT,
        "max",
        np.array([mine, mine ^ _MASK], np.uint64),
        owner.timeout,
        (what, fingerprint(what)),
    ).tolist()
    if most != least ^ _MASK:
        what += ", part by part"

        def request() -> CollectiveSpec:
            return CollectiveSpec(what, fingerprint(what), _body(communicator, pairs, digests))

        found: ReplicaMismatch = communicator.perform(what, request, owner.timeout)
        for entry, _ in pairs:
            entry.is_reported = entry is found.entry or entry.name in found.others
        raise _error(communicator, found, now)
    for entry, _ in pairs:
        entry.good = good or now


def _digests(pairs: Sequence[Pair]) -> NDArray[np.uint64]:
    return np.concatenate([block_digests(state.storage.array) for _, state in pairs])


def _body(
    communicator: Communicator, pairs: Sequence[Pair], digests: NDArray[np.uint64]
) -> Generator[Stage, None, ReplicaMismatch]:
    everyone = yield from exchange_bytes(communicator, digests.tobytes())
    table = np.array([np.frombuffer(one, np.uint64) for one in everyone])
    differs = (table != table[0]).any(axis=0)
    found: Pair | None = None
    blocks: list[int] = []
    rows: Any = None
    others: list[str] = []
    place = 0
    for entry, state in pairs:
        here = slice(place, place + block_count(entry.nbytes))
        place = here.stop
        if not differs[here].any():
            continue
        if found is None:
            found, rows, blocks = (
                (entry, state),
                table[:, here],
                np.flatnonzero(differs[here]).tolist(),
            )
        else:
            others.append(entry.name)
    assert found is not None  # the combination of equal digests is equal
    counts = Counter(row.tobytes() for row in rows)
    # Ties go to the digests of the lowest rank.
    usual, count = counts.most_common(1)[0]
    strangers = [replica for replica, row in enumerate(rows) if row.tobytes() != usual]
    copy = found[1].storage.array
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
    return ReplicaMismatch(
        *found, others, strangers, count * 2 > communicator.size, first, last, values
    )


def _error(communicator: Communicator, found: ReplicaMismatch, now: str) -> MismatchError:
    entry = found.entry
    dtype = found.state.dtype
    ranks = [communicator.members[replica] for replica in found.strangers]
    table = {}
    for replica, member in enumerate(communicator.members):
        data = found.values[replica]
        value = np.frombuffer(data, dtype)[0] if len(data) == dtype.itemsize else "?"
        note = ", differs" if replica in found.strangers else ""
        table[member] = f"element {found.first} is {value!s} (bytes {data.hex()}){note}"
    shown = ", ".join(map(str, ranks))
    which = f"rank {shown} differs" if len(ranks) == 1 else f"ranks {shown} differ"
    whom = "from the lowest rank (no majority can tell who is right)"
    if found.has_majority:
        whom = "from the majority"
    names = ", ".join(map(repr, found.others[:8])) + (", …" if len(found.others) > 8 else "")
    more = f" Further variables that differ: {names}." if found.others else ""
    return MismatchError(
        f"the copies of variable {entry.name!r} are not the same on all replicas: {which} {whom}, "
        f"in elements {found.first} to {found.last} of the flat array. They parted after "
        f"{entry.good} and not later than {now}.{more} Memory or hardware may have failed, or the "
        "program has changed copies by itself. Go on from a checkpoint that was saved by "
        f"{entry.good}, or write v.assign(value) with one value on every replica",
        table,
    )
