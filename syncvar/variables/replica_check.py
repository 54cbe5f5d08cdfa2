"""Compare what should be equal on all replicas, by digests of all bytes.

The replica check compares the copies of variables: `CheckSchedule` says when which ones are
compared; the registry calls `compare`. If digests differ, the replicas exchange them block by
block. So the error names the variable, the elements, the replicas, and the last good point of the
program. `sv.check_equal` compares other values, and names the first difference.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import agree
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.stage_builders import exchange_bytes, gather_bytes
from syncvar.core.array_arguments import as_array
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint
from syncvar.runtime.communicator import CheckedCall
from syncvar.variables.storage import (
    BLOCK_BYTES,
    block_bytes,
    block_count,
    block_digests,
    combined,
    digest_of,
)
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import RegistryEntry, VariableState

    Pair = tuple[RegistryEntry, VariableState]

NEVER = 1 << 62
_LOT_BYTES = 1 << 20  # comparing so much takes 0.1 to 0.2 ms, and as much again at the end of a run
_COMPARISON = "comparison of the replicas' copies"
_MASK = (1 << 64) - 1
_CALL = "check_equal"
_REMEDY = (
    "Make the ranks equal again, for instance by "
    "model.load_state_dict(sv.broadcast(model.state_dict(), root=0)), and look for a step that "
    "used local gradients: sv.all_reduce returns new arrays, and out=grads writes into them"
)
_counts: weakref.WeakKeyDictionary[Communicator, dict[Any, int]] = weakref.WeakKeyDictionary()


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
    """A difference between copies."""

    entry: RegistryEntry  # of the first variable whose copies differ
    state: VariableState
    others: list[str]  # names of further such variables
    strangers: list[int]  # replicas in the minority
    has_majority: bool  # more than half of the replicas agree
    first: int  # first element that differs
    last: int
    values: list[bytes]  # of the first element, by replica


def compare(
    owner: VariableOwner,
    pairs: Sequence[Pair],
    now: str,
    *,
    good: str | None = None,
    before: str = "",
) -> None:
    """Compare the copies of variables that exist on every replica. Collective.

    `now` is the point of the program ("run 7"), `good` the one at which the present values were
    last written. `before` describes the write that follows.
    """
    if not pairs:
        return
    communicator = owner.communicator
    label = _COMPARISON + before
    digests = np.concatenate([block_digests(state.storage.array) for _, state in pairs])
    mine = combined(digests)
    # The largest and the smallest are equal exactly if all are.
    sides = np.array([mine, mine ^ _MASK], np.uint64)
    spec = CollectiveSpec(label)
    most, least = agree(communicator, _COMPARISON, "max", sides, owner.timeout, spec).tolist()
    if most != least ^ _MASK:
        label += ", part by part"
        request = partial(_MismatchSearch, communicator, label, pairs, digests)
        found: ReplicaMismatch = communicator.perform(label, request, owner.timeout)
        for entry, _ in pairs:
            entry.is_reported = entry is found.entry or entry.name in found.others
        raise _mismatch_error(communicator, found, now)
    for entry, _ in pairs:
        entry.good = good or now


class _MismatchSearch(CheckedCall):
    """A call that finds the first difference; the replicas have different digests."""

    def __init__(
        self,
        communicator: Communicator,
        label: str,
        pairs: Sequence[Pair],
        digests: NDArray[np.uint64],
    ) -> None:
        super().__init__(CollectiveSpec(label))
        self._communicator, self._pairs, self._digests = communicator, pairs, digests

    def stages(self) -> Generator[Stage, None, ReplicaMismatch]:
        """Yield the exchange of the digests, then those of the blocks that differ."""
        size = self._communicator.size
        table = yield from _exchanged(self._communicator, self._digests)
        different: list[tuple[Pair, NDArray[np.uint64]]] = []  # with the digests of all replicas
        place = 0
        for entry, state in self._pairs:
            rows = table[:, place : place + block_count(entry.nbytes)]
            place += block_count(entry.nbytes)
            if (rows != rows[0]).any():
                different.append(((entry, state), rows))
        (found, rows), *others = different  # not empty: the combination of equal digests is equal
        # Ties go to the digests of the lowest rank.
        usual, count = Counter(row.tobytes() for row in rows).most_common(1)[0]
        strangers = [replica for replica, row in enumerate(rows) if row.tobytes() != usual]
        first, last, values = yield from self._elements(found[1].storage.array, rows)
        names = [entry.name for (entry, _), _ in others]
        return ReplicaMismatch(*found, names, strangers, count * 2 > size, first, last, values)

    def _elements(
        self, copy: NDArray[Any], rows: NDArray[np.uint64]
    ) -> Generator[Stage, None, tuple[int, int, list[bytes]]]:
        """Return the first and the last element that differ, and the bytes of the first one."""
        blocks, size = _columns(rows), copy.dtype.itemsize
        first, last, values = -1, -1, [b""] * self._communicator.size
        for block in dict.fromkeys((blocks[0], blocks[-1])):
            mine = block_bytes(copy, block).tobytes()
            contents = yield from exchange_bytes(self._communicator, mine)
            places = _columns(_rows(contents, np.uint8))
            last = (block * BLOCK_BYTES + places[-1]) // size
            if first < 0:
                first = (block * BLOCK_BYTES + places[0]) // size
                begin = first * size - block * BLOCK_BYTES
                values = [one[max(begin, 0) : begin + size] for one in contents]
        return first, last, values


def _exchanged(
    communicator: Communicator, mine: NDArray[np.uint64]
) -> Generator[Stage, None, NDArray[np.uint64]]:
    """Exchange numbers; return a row of each rank."""
    return _rows((yield from exchange_bytes(communicator, mine.tobytes())), np.uint64)


def _rows(parts: list[bytes], dtype: Any) -> NDArray[Any]:
    return np.array([np.frombuffer(one, dtype) for one in parts])


def _columns(table: NDArray[Any]) -> list[int]:
    """Return the numbers of the columns in which some rows differ."""
    found: list[int] = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    return found


def _mismatch_error(communicator: Communicator, found: ReplicaMismatch, now: str) -> MismatchError:
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


class NamedArray(NamedTuple):
    """An array to compare, with its name in the value that holds it."""

    name: str
    array: NDArray[Any]


def check_equal(
    value: Any,
    name: str = "value",
    *,
    every: int = 1,
    group: Group | None = None,
    timeout: float | None = None,
) -> bool:
    """Compare a module or arrays with those of the other ranks, byte by byte. Collective.

    Args:
        value: An array or tensor of any shape and dtype, a number, a text, or a variable (this
            replica's copy). Also objects with `state_dict()`, as in PyTorch, or `get_weights()`, as
            in Keras; and dicts, lists and tuples of such values.
        name: Name of the value in errors.
        every: Compare at the first call and then at every `every`-th one. Calls from one line with
            one name count together. Every rank makes each call; the calls between send nothing.
        group: The ranks that compare; None means the world.
        timeout: Seconds to wait for the others; None means the job's default.

    Returns:
        Whether this call compared.

    Raises:
        MismatchError: The values differ; on all ranks. It names the first array that differs, the
            index, and each rank's value.
        ConfigError: `value` holds something that cannot be compared, or `every` is not a whole
            number of at least 1.

    Cost: a digest of all bytes, and an exchange of 16 bytes between all ranks; if values differ,
        three more exchanges.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.check_equal({"w": np.zeros(3), "step": 7})
        True
        >>> [sv.check_equal(np.zeros(3), every=2) for step in range(4)]
        [True, False, True, False]
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"every must be a whole number of calls of at least 1, not {every!r}: write every=100"
        )
    communicator = communicator_of(group)
    if every > 1:
        caller = sys._getframe(1)  # noqa: SLF001  (the public way, inspect.stack, reads files)
        counts = _counts.setdefault(communicator, {})
        key = caller.f_code.co_filename, caller.f_lineno, name
        count = counts[key] = counts.get(key, -1) + 1
        if count % every:
            return False
    communicator.perform(_CALL, partial(_CheckEqualCall, communicator, value, name), timeout)
    return True


def _named_arrays(value: Any, place: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield each array in a value with its name, in an order that all ranks share."""
    if isinstance(value, Variable):
        yield value.name, np.asarray(value.local_value(), order="C")
    elif callable(getattr(value, "state_dict", None)):
        yield from _named_arrays(OrderedDict(value.state_dict()), place)
    elif callable(getattr(value, "get_weights", None)):
        names = [getattr(one, "path", None) or one.name for one in getattr(value, "weights", ())]
        for number, weight in enumerate(value.get_weights()):
            shown = names[number] if number < len(names) else str(number)
            yield f"{place}[{shown!r}]", np.asarray(as_array(weight), order="C")
    elif isinstance(value, dict):
        for key in value if isinstance(value, OrderedDict) else sorted(value, key=repr):
            yield from _named_arrays(value[key], f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named_arrays(item, f"{place}[{number}]")
    elif value is None or isinstance(value, str | bytes):
        text = value.encode(errors="surrogatepass") if isinstance(value, str) else value or b""
        # Two long texts may have the same name, which shows only the beginning.
        yield f"{place} = {value!r:.60}", np.frombuffer(text, np.uint8)
    else:
        yield place, np.asarray(as_array(value, place), order="C")


class _CheckEqualCall(CheckedCall):
    """A call that compares arrays: first one digest of all, then what differs."""

    def __init__(self, communicator: Communicator, value: Any, name: str) -> None:
        super().__init__(CollectiveSpec(_CALL, options=(name,)))
        self._communicator, self._name = communicator, name
        self._arrays = [NamedArray(place, array) for place, array in _named_arrays(value, name)]

    def stages(self) -> Generator[Stage, None, None]:
        """Yield one exchange; more if the arrays differ, and then raise MismatchError."""
        communicator, arrays = self._communicator, self._arrays
        names = [[one.name, one.array.dtype.name, list(one.array.shape)] for one in arrays]
        digests = np.array([digest_of(one.array) for one in arrays], np.uint64)
        table = yield from _exchanged(
            communicator, np.array([fingerprint(repr(names)), digest_of(digests)], np.uint64)
        )
        if (table == table[0]).all():
            return
        if (table[:, 0] != table[0, 0]).any():
            packed = yield from gather_bytes(communicator, pack_object(names))
            raise _different_names(communicator, list(map(unpack_object, packed)), self._name)
        table = yield from _exchanged(communicator, digests)
        found, *others = [arrays[number] for number in _columns(table)]
        block = _columns((yield from _exchanged(communicator, block_digests(found.array))))[0]
        data = block_bytes(found.array, block).tobytes()
        contents = yield from exchange_bytes(communicator, data)
        size = found.array.itemsize
        # No element crosses two blocks, because sizes are powers of two.
        flat = (block * BLOCK_BYTES + _columns(_rows(contents, np.uint8))[0]) // size
        begin = flat * size - block * BLOCK_BYTES
        values = [one[begin : begin + size] for one in contents]
        raise _different_values(communicator, found, flat, values, [one.name for one in others])


def _different_names(communicator: Communicator, everyone: list[Any], label: str) -> MismatchError:
    longest = max(map(len, everyone))
    padded = [[*one, *[None] * (longest - len(one))] for one in everyone]
    place = next(
        number
        for number in range(longest)
        if any(one[number] != padded[0][number] for one in padded)
    )
    table = {}
    for rank, one in zip(communicator.members, padded, strict=True):
        entry = one[place]
        table[rank] = (
            f"no array number {place}" if entry is None else f"{entry[0]}: {entry[1]}{entry[2]}"
        )
    return MismatchError(
        f"check_equal: {label!r} has other names, shapes or dtypes on some ranks; the first "
        f"difference is array number {place}. Build the same model with the same arguments on "
        "every rank",
        table,
    )


def _different_values(
    communicator: Communicator, found: NamedArray, flat: int, values: list[bytes], others: list[str]
) -> MismatchError:
    index = tuple(int(one) for one in np.unravel_index(flat, found.array.shape))
    shown = f"{found.name}[{', '.join(map(str, index))}]" if index else found.name
    table = {
        rank: f"{shown} = {np.frombuffer(one, found.array.dtype)[0]!s} (bytes {one.hex()})"
        for rank, one in zip(communicator.members, values, strict=True)
    }
    more = f" {len(others)} further arrays differ, the next is {others[0]}." if others else ""
    return MismatchError(
        f"check_equal: {found.name} differs between the ranks, first at index {index}.{more} "
        f"{_REMEDY}",
        table,
    )
