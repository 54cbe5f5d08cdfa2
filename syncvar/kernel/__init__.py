"""The optional C runner of prepared calls, and what stands in for it where it has not been built.

`pip install` builds the module `native` where a C compiler and Python's headers are; without it everything works, with
Python's own steps. `SYNCVAR_KERNEL=python` or `c` demands one of the two. `native.h` tells which file of C has what.

The C runner reads arrays and ufuncs by the beginnings of NumPy's own structures, which its C interface has kept since
version 1. Before it is used for the first time, that is tried out with this NumPy.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

__all__ = [
    "UNREAD", "AdmissionState", "Begun", "ChannelState", "CommunicatorState", "Copied", "Count", "Tally", "Watch", "bind", "entrance", "group_of",
    "look", "message_door", "message_end", "note_change", "program", "read", "remember", "remember_end", "run", "slot_call", "told", "which",
    "why_not_native", "write",
]  # fmt: skip

_native: ModuleType | None
_missing: str
try:
    _native = importlib.import_module("syncvar.kernel.native")
    _missing = ""
except ModuleNotFoundError:
    _native = None
    _missing = "syncvar was installed without the C kernel: that takes a C compiler and Python's headers at the time"
except ImportError as error:
    _native = None
    _missing = f"the C kernel cannot be loaded: {error}"


_FORM = 16  # as in native.c


def _differs(native: Any) -> str:
    """Return what the C runner reads otherwise than NumPy says; empty where they agree."""
    left = np.arange(6.0).reshape(2, 3)
    for array in (left, left[:, 1:], left.astype(np.int16), np.array(1.0)):
        flags = array.flags
        told = (
            array.__array_interface__["data"][0], array.shape, array.dtype,
            flags.c_contiguous | flags.aligned << 8 | flags.writeable << 10,
        )  # fmt: skip
        if native.describe(array) != told:
            return "the form of arrays"
    for ufunc in (np.add, np.subtract, np.divide, np.maximum):
        one, other, out = np.arange(1.0, 9.0), np.full(8, 3.0), np.zeros(8)
        if not native.combine_once(ufunc, out.dtype.num, one, other, out) or not np.array_equal(out, ufunc(one, other)):
            return f"the form of {ufunc.__name__}"
    return ""


if _native is not None and getattr(_native, "FORM", 0) != _FORM:
    _native, _missing = None, "the C kernel is of another version of syncvar: install syncvar again"
if _native is not None and (_found := _differs(_native)):
    _native, _missing = None, f"NumPy {np.__version__} is not as it expects: {_found}"


_HOME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class Begun:
    """A prepared call that has begun, and is waited for later; only the C runner makes them.

    Attributes:
        operation: The engine's, once it goes on with the call; None before.
        begin: When it began, CLOCK_MONOTONIC in nanoseconds.
        is_over: It has ended without the engine.
    """

    if TYPE_CHECKING:
        operation: Any
        begin: int
        is_over: bool

        def end(self, waits: bool, /) -> Any:
            """Return the result if it is there, or, where the caller waits, comes soon; None where the engine has to go on."""

        def adopt(self) -> None:
            """Let the engine go on with it; nothing where it is over."""


class ChannelState:
    """What a rank has published last in a group, and whether everyone has reached it."""

    if TYPE_CHECKING:
        is_settled: bool
        last: int
        phase: int
        side: int
        tail: int
    else:
        __slots__ = ("is_settled", "last", "phase", "side", "tail")


class AdmissionState:
    """What every call reads of the engine.

    Attributes:
        is_quiet: Nothing is known that would refuse a call, and no writes are queued.
    """

    if TYPE_CHECKING:
        is_quiet: bool
    else:
        __slots__ = ("is_quiet",)


class CommunicatorState:
    """What every call reads of its group's communicator.

    Attributes:
        next_call: The number of the group's next call.
    """

    if TYPE_CHECKING:
        next_call: int
    else:
        __slots__ = ("next_call",)


class Copied:
    """What is going on with a variable's copy.

    Attributes:
        changes: That this process makes by itself now.
        is_being_written: A call of all replicas writes it in place.
        moves: How often it has gone to other memory.
    """

    if TYPE_CHECKING:
        changes: int
        is_being_written: bool
        moves: int
    else:
        __slots__ = ("changes", "is_being_written", "moves")


class Tally:
    """What is counted of a variable.

    Attributes:
        added: Increments of AUTO's.
        collectives: Calls of the group.
        reads: All reads.
        steps: Writes outside runs, by which comparisons are due.
        turned: Increments at the last read after one.
        turns: Such reads.
        writes: All writes.
    """

    __slots__ = ("added", "collectives", "reads", "steps", "turned", "turns", "writes")

    def __init__(self) -> None:
        self.added = self.collectives = self.reads = self.steps = self.turned = self.turns = self.writes = 0


class Watch:
    """When a strategy looks at writes: not at all (`is_free`), or at those whose number among a variable's is above `until`."""

    if TYPE_CHECKING:
        is_free: bool
        until: int
    else:
        __slots__ = ("is_free", "until")


if _native is not None:
    AdmissionState = _native.AdmissionState  # type: ignore[misc]
    Begun = _native.Begun  # type: ignore[misc]
    ChannelState = _native.ChannelState  # type: ignore[misc]
    CommunicatorState = _native.CommunicatorState  # type: ignore[misc]
    Copied = _native.Copied  # type: ignore[misc]
    Tally = _native.Tally  # type: ignore[misc]
    Watch = _native.Watch  # type: ignore[misc]


class Count:
    """How far the messages of a pair and tag are: calls that the engine has not seen, for `Engine.count_by`.

    Attributes:
        identity: Of the pair's calls.
        next_call: It grows when a call is over, or has been seen by the other rank: frames of it that come later are of no use then.
        number: Of the next message. Whoever numbers one by the pair's communicator looks here first, and tells it here then.
    """

    if TYPE_CHECKING:
        identity: int
        next_call: int
        number: int
    else:
        __slots__ = ("__weakref__", "identity", "next_call", "number")

    def __init__(self, identity: int, next_call: int) -> None:
        self.identity = identity
        self.next_call = self.number = next_call


if _native is not None:
    Count = _native.Count  # type: ignore[misc]


def why_not_native() -> str:
    """Return why there is no C runner in this process; empty where there is one."""
    return _missing


def which(wanted: str) -> str:
    """Return the runner that a setting means: "c" or "python".

    Args:
        wanted: "auto", "c" or "python".

    Raises:
        ConfigError: The C runner is demanded, and there is none.

    Example:
        >>> which("python")
        'python'
    """
    if wanted == "c" and _native is None:
        raise ConfigError(f"kernel = c, but there is no C kernel: {_missing}; install with a compiler, or leave it to auto")
    return "python" if wanted == "python" or _native is None else "c"


def told(wanted: str) -> str:
    """Return in words what runs prepared calls, and why, under a setting.

    Example:
        >>> told("python")
        'prepared calls run in Python: kernel = python asks for it'
    """
    if wanted == "python":
        return "prepared calls run in Python: kernel = python asks for it"
    return "prepared calls run in C" if not _missing else f"prepared calls run in Python: {_missing}"


UNREAD = -(1 << 41)
"""Yielded by a run that could not read the memory of another process."""


def bind(channel: Any, *places: Any) -> bool:
    """Tell the C runner where the words of a channel's ranks are; returns False where it does not take so many ranks."""
    if _native is None:
        return False
    try:
        channel.bind(*places)
    except ValueError:
        return False
    return True


def program(*parts: Any) -> Any:
    """Return a program for the C runner, or None where it takes no such program; see `programs.c`."""
    if _native is None:
        return None
    try:
        return _native.Program(*parts)
    except ValueError:  # a dtype or an op without a loop of its own
        return None


def open_program(made: Any, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], *, keeps_lock: bool) -> None:
    """Make the copies of a program's opening in C; arguments as of `run`, None for memories that the opening does not use."""
    _native.Run(made, channel, arrays, offsets, keeps_lock, True)  # type: ignore[union-attr]


def run(made: Any, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], *, keeps_lock: bool) -> Iterator[int]:
    """Run a program in C; yields what the others have to reach.

    Args:
        made: What `program` has returned.
        channel: This rank's end of the group's channels.
        arrays: The memories that are arrays; anything for the others.
        offsets: Where the others lie in the arena, in bytes; with bit 60 the address in the process of the memory's rank; -1 for arrays.
        keeps_lock: Python's lock is kept.
    """
    found: Iterator[int] = _native.Run(made, channel, arrays, offsets, keeps_lock, False)  # type: ignore[union-attr]
    return found


def slot_call(
    digest: int, detail: int, tells: bool, brought: tuple[Any, ...], made: tuple[Any, ...], copies: tuple[Any, ...], how: tuple[Any, ...],
    ring: int, parts: int, everyone: bool, reads: bool, **objects: Any,
) -> Any:  # fmt: skip
    """Return the C runner of a prepared call, or None where it takes no such call; see `Preparation.natively`, and `calls.h` for the objects."""
    if _native is None:
        return None
    try:
        return _native.SlotCall(digest, detail, tells, brought, made, *copies, *how, ring, parts, everyone, reads, array_type=np.ndarray, make=np.empty, **objects)
    except ValueError:  # a dtype or an op without a loop of its own, or more ranks than it is made for
        return None


def group_of(variables: tuple[Any, ...], storages: tuple[Any, ...], tallies: tuple[Any, ...], parts: tuple[Any, ...]) -> Any:
    """Return what looks at variables that are written together in C, or None where there is no C runner; see `PlainGroup` for the arguments."""
    if _native is None:
        return None
    nbytes = tuple([part.nbytes for part in parts])
    return _native.Group(nbytes, variables=variables, storages=storages, tallies=tallies, parts=parts, array_type=np.ndarray)


def message_end(*parts: Any, **objects: Any) -> Any:
    """Return the C runner of one end of a pair's messages, or None where there is none; see `messages.h`."""
    return None if _native is None else _native.End(*parts, array_type=np.ndarray, make=np.empty, **objects)


def message_door(function: Any, state: Any, *, is_sending: bool) -> Any:
    """Return a callable that makes in C what it can of `send` or `recv`, and calls the function for anything else.

    Args:
        function: What it stands for; its name, documentation and signature are the callable's.
        state: As for `entrance`.
        is_sending: It is `send`.
    """
    return function if _native is None else _native.Door(is_sending, function=function, state=state)


def remember_end(door: Any, end: Any, peer: int, tag: int) -> None:
    """Let the callable that `message_door` has returned find one end of a pair's messages.

    Args:
        door: That callable.
        end: What `message_end` has returned; nothing is done with None.
        peer: The other rank.
        tag: The tag.
    """
    if _native is not None and end is not None:
        door.remember(end, peer, tag)


def write(
    call: Any, plain: Any, where: tuple[Any, ...], storage: Copied, tally: Tally, watch: Watch | None, form: tuple[Any, ...], *,
    is_default: bool, is_increment: bool,
) -> Any:
    """Return the C runner of a prepared write; `plain` where there is none.

    Args:
        call: The prepared all-reduce, which applies its result to the copy.
        plain: Does the same in Python; takes every write that is unusual, before anything has been changed.
        where: The stacks of places, the strategy, its calls, their channel, and the context in which each replica has its own values.
        storage: The memory of the copy.
        tally: The variable's.
        watch: The strategy's; None where nothing is compared.
        form: dtype and shape.
        is_default: The strategy is the default one.
        is_increment: Of an AUTO variable.
    """  # fmt: skip
    if _native is None:
        return plain
    places, owner, communicator, channel, replica = where
    return _native.Write(
        *form, is_default, is_increment, call=call, plain=plain, places=places, owner=owner, communicator=communicator, channel=channel,
        replica=replica, array_type=np.ndarray, storage=storage, tally=tally, watch=watch,
    )  # fmt: skip


def read(call: Any, plain: Any, where: tuple[Any, ...], storage: Copied, tally: Tally) -> Any:
    """Return the C runner of a prepared read that combines the copies; `plain` where there is none.

    Args:
        call: The prepared all-reduce.
        plain: Does the same in Python; takes every read that is unusual, before anything has been done.
        where: The stacks of places, or None where it is known that all replicas read; the strategy, its calls, the channel of
            these, what stands for replica context.
        storage: The memory of the copy.
        tally: The variable's; reads are counted where there are `places`.
    """
    if _native is None or type(call) is not _native.SlotCall:
        return plain
    places, owner, communicator, channel, replica = where
    return _native.Read(
        call=call, plain=plain, places=places, owner=owner, communicator=communicator, channel=channel, replica=replica, storage=storage, tally=tally
    )


def look(plain: Any, places: Any, owner: Any, storage: Copied, tally: Tally, *, is_default: bool) -> Any:
    """Return the C runner of a prepared read of this replica's copy; `plain` where there is none.

    Args:
        plain: Does the same in Python; takes every read that is unusual, before anything has been done.
        places: The stacks of places.
        owner: The strategy.
        storage: The memory of the copy.
        tally: The variable's.
        is_default: The strategy is the default one.
    """
    if _native is None:
        return plain
    return _native.Look(is_default, plain=plain, places=places, owner=owner, storage=storage, tally=tally)


def entrance(
    function: Any, state: Any, *, nothing: Any = None, second: str | None = None, usual: Any = None, positions: int = 1, takes_numbers: bool = True
) -> Any:
    """Return a callable that finds and runs a public function's prepared calls in C, and calls the function for any other.

    Args:
        function: What it stands for; its name, documentation and signature are the callable's.
        state: Has the process's context as `default`, and `is_bound` True where threads have their own.
        nothing: What a function without arguments brings; None for one that takes an array.
        second: Name of the argument beside the array that calls may differ in: op, root, axis.
        usual: Its default.
        positions: How many arguments may be given by position.
        takes_numbers: A number, or a short list of numbers, is the array that NumPy makes of it.
    """
    if _native is None:
        return function
    name = None if second is None else sys.intern(second)
    return _native.Entrance(
        positions, function=function, state=state, array_type=np.ndarray, as_array=np.asarray if takes_numbers else None, nothing=nothing, second=name, usual=usual,
        home=_HOME,
    )  # fmt: skip


def note_change() -> None:
    """Let entrances look again of which group calls are that name none: the process's job, what threads have, or a group is another."""
    if _native is not None:
        _native.note_change()


def remember(function: Any, second: Any, call: Any, prepared_calls: Any) -> None:
    """Let the callable that `entrance` has returned find a prepared call.

    Args:
        function: That callable; nothing is done where it is the function itself.
        second: The argument beside the array, as the caller writes it.
        call: What `slot_call` has returned; nothing is done with anything else.
        prepared_calls: Those of its group, while they are the same.
    """
    if _native is not None and type(function) is _native.Entrance:
        function.remember(second, call, prepared_calls)
