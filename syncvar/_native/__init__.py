"""The optional C runner of persistent calls, and what stands in for it where it has not been built.

`pip install` builds the module `native` where a C compiler and Python's headers are; without it everything works, with
Python's own steps. `SYNCVAR_CALL_RUNNER=python` or `c` demands one of the two. `native.h` tells which file of C has what.

The C runner reads arrays and ufuncs by the beginnings of NumPy's own structures, which its C interface has kept since
version 1. Before it is used for the first time, that is tried out with this NumPy.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native.constants import FORM
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_native: ModuleType | None
_missing: str
try:
    _native = importlib.import_module("syncvar._native.native")
    _missing = ""
except ModuleNotFoundError:
    _native = None
    _missing = "syncvar was installed without the C extension: that takes a C compiler and Python's headers at the time"
except ImportError as error:
    _native = None
    _missing = f"the C extension cannot be loaded: {error}"


def _differs(native: Any) -> str:
    """Return what the C runner reads otherwise than NumPy says; empty where they agree."""
    left = np.arange(6.0).reshape(2, 3)
    for array in (left, left[:, 1:], left.astype(np.int16), np.array(1.0)):
        flags = array.flags
        told = (
            array.__array_interface__["data"][0],
            array.shape,
            array.dtype,
            flags.c_contiguous | flags.aligned << 8 | flags.writeable << 10,
        )
        if native.describe(array) != told:
            return "the form of arrays"
    for ufunc in (np.add, np.subtract, np.divide, np.maximum):
        one, other, out = np.arange(1.0, 9.0), np.full(8, 3.0), np.zeros(8)
        if not native.combine_once(ufunc, out.dtype.num, one, other, out) or not np.array_equal(
            out, ufunc(one, other)
        ):
            return f"the form of {ufunc.__name__}"
    return ""


if _native is not None and getattr(_native, "FORM", 0) != FORM:
    _native, _missing = (
        None,
        "the C extension is of another version of syncvar: install syncvar again",
    )
if _native is not None and (_found := _differs(_native)):
    _native, _missing = None, f"NumPy {np.__version__} is not as it expects: {_found}"


_HOME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class AsyncCall:
    """A persistent call that has begun, and is waited for later; only the C runner makes them.

    Attributes:
        operation: The engine's, once it goes on with the call; None before.
        begin: When it began, CLOCK_MONOTONIC in nanoseconds.
        is_over: It has ended without the engine.
        end: Returns the result if it is there, or, with True, comes soon; None where the engine has to go on.
        adopt: Lets the engine go on with it; nothing where it is over.
    """

    operation: Any
    begin: int
    is_over: bool
    end: Callable[[bool], Any]
    adopt: Callable[[], None]


class ChannelState:
    """What a rank has published last in a group, and whether everyone has reached it."""

    __slots__ = ("is_settled", "last", "phase", "side", "tail")
    is_settled: bool
    last: int
    phase: int
    side: int
    tail: int


class AdmissionState:
    """What every call reads of the engine.

    Attributes:
        is_quiet: Nothing is known that would refuse a call, and no writes are queued.
        driver: The thread that drives in order to wait for its own call; 0 where none does.
    """

    __slots__ = ("driver", "is_quiet")
    driver: int
    is_quiet: bool


class CommunicatorState:
    """What every call reads of its group's communicator.

    Attributes:
        next_call: The number of the group's next call.
    """

    __slots__ = ("next_call",)
    next_call: int


class CopyGuard:
    """What is going on with a variable's copy.

    Attributes:
        changes: That this process makes by itself now.
        is_being_written: A call of all replicas writes it in place.
        moves: Twice how often it has gone to other memory; odd while it goes.
    """

    __slots__ = ("changes", "is_being_written", "moves")
    changes: int
    is_being_written: bool
    moves: int


class VariableCounters:
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
        self.added = self.collectives = self.reads = self.steps = self.turned = self.turns = (
            self.writes
        ) = 0


class CheckGate:
    """When a strategy looks at writes: not at all (`is_free`), or at those whose number among a variable's is above `until`."""

    __slots__ = ("is_free", "until")
    is_free: bool
    until: int


class MessageCounter:
    """How far the messages of a pair and tag are: calls that the engine has not seen, for `CallLedger.count_by`.

    Attributes:
        identity: Of the pair's calls.
        next_call: It grows when a call is over, or has been seen by the other rank: frames of it that come later are of no use then.
        number: Of the next message. Whoever numbers one by the pair's communicator looks here first, and tells it here then.
    """

    __slots__ = ("__weakref__", "identity", "next_call", "number")

    def __init__(self, identity: int, next_call: int) -> None:
        self.identity = identity
        self.next_call = self.number = next_call


if _native is not None:  # these have the same attributes, which C reads as numbers
    AdmissionState = _native.AdmissionState  # type: ignore[misc]
    AsyncCall = _native.AsyncCall  # type: ignore[misc]
    ChannelState = _native.ChannelState  # type: ignore[misc]
    CommunicatorState = _native.CommunicatorState  # type: ignore[misc]
    CopyGuard = _native.CopyGuard  # type: ignore[misc]
    MessageCounter = _native.MessageCounter  # type: ignore[misc]
    VariableCounters = _native.VariableCounters  # type: ignore[misc]
    CheckGate = _native.CheckGate  # type: ignore[misc]


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
        raise ConfigError(
            f"call_runner = c, but there is no C extension: {_missing}; install with a compiler, or leave it to auto"
        )
    return "python" if wanted == "python" or _native is None else "c"


def told(wanted: str) -> str:
    """Return in words what runs persistent calls, and why, under a setting.

    Example:
        >>> told("python")
        'persistent calls run in Python: call_runner = python asks for it'
    """
    if wanted == "python":
        return "persistent calls run in Python: call_runner = python asks for it"
    return (
        "persistent calls run in C"
        if not _missing
        else f"persistent calls run in Python: {_missing}"
    )


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
    """Return a program for the C runner, or None where it takes no such program; see `program_check.c`."""
    if _native is None:
        return None
    try:
        return _native.Program(*parts)
    except ValueError:  # a dtype or an op without a loop of its own
        return None


def open_program(
    made: Any, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], *, keeps_lock: bool
) -> None:
    """Make the copies of a program's opening in C; arguments as of `run`, None for memories that the opening does not use."""
    _native.Run(made, channel, arrays, offsets, keeps_lock, True)  # type: ignore[union-attr]


def run(
    made: Any, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], *, keeps_lock: bool
) -> Iterator[int]:
    """Run a program in C; yields what the others have to reach.

    Args:
        made: What `program` has returned.
        channel: This rank's end of the group's channels.
        arrays: The memories that are arrays; anything for the others.
        offsets: Where the others lie in shared memory, in bytes; with bit 60 the address in the process of the memory's rank; -1 for arrays.
        keeps_lock: Python's lock is kept.
    """
    found: Iterator[int] = _native.Run(made, channel, arrays, offsets, keeps_lock, False)  # type: ignore[union-attr]
    return found


def slot_call(*parts: Any, **objects: Any) -> Any:
    """Return the C runner of a persistent call, or None where it takes no such call; see `persistent_call.c`, and `Preparation.natively` for the objects."""
    if _native is None:
        return None
    try:
        return _native.SlotCall(*parts, **objects)
    except (
        ValueError
    ):  # a dtype or an op without a loop of its own, or more ranks than it is made for
        return None


def group_of(
    variables: tuple[Any, ...],
    storages: tuple[Any, ...],
    tallies: tuple[Any, ...],
    parts: tuple[Any, ...],
) -> Any:
    """Return what looks at variables that are written together in C, or None where there is no C runner; see `PlainGroup` for the arguments."""
    if _native is None:
        return None
    nbytes = tuple([part.nbytes for part in parts])
    return _native.Group(
        nbytes, variables=variables, storages=storages, tallies=tallies, parts=parts
    )


def message_end(*parts: Any, **objects: Any) -> Any:
    """Return the C runner of one end of a pair's messages, or None where there is none; see `p2p.h`."""
    return None if _native is None else _native.End(*parts, **objects)


def message_entrance(function: Any, state: Any, *, is_sending: bool) -> Any:
    """Return a callable that makes in C what it can of `send` or `recv`, and calls the function for anything else.

    Args:
        function: What it stands for; its name, documentation and signature are the callable's.
        state: As for `entrance`.
        is_sending: It is `send`.
    """
    return (
        function
        if _native is None
        else _native.MessageEntrance(is_sending, function=function, state=state)
    )


def access(
    kind: str,
    plain: Any,
    where: tuple[Any, ...],
    storage: CopyGuard,
    tally: VariableCounters,
    form: tuple[Any, ...],
    *,
    call: Any = None,
    watch: CheckGate | None = None,
    is_default: bool = False,
    is_increment: bool = False,
) -> Any:
    """Return the C runner of a prepared access of a variable; `plain` where there is none.

    Args:
        kind: "Write", "Look" (a read of this replica's copy), or "Read" (of the copies, combined).
        plain: Does the same in Python; takes every access that is unusual, before anything has been changed.
        where: The stacks of places, the strategy; of a call of all replicas also the strategy's calls, their channel, and the
            context in which each replica has its own values. A read with None for the places is one of all replicas, and not counted.
        storage: The memory of the copy.
        tally: The variable's.
        form: dtype and shape.
        call: The prepared all-reduce; that of a write applies its result to the copy.
        watch: The strategy's, of writes; None where nothing is compared.
        is_default: The strategy is the default one.
        is_increment: It writes an AUTO variable.
    """
    if _native is None or (kind == "Read" and type(call) is not _native.SlotCall):
        return plain
    places, owner, communicator, channel, replica = (
        where if len(where) > 2 else (*where, None, None, None)
    )  # noqa: PLR2004
    return getattr(_native, kind)(
        *form,
        is_default,
        is_increment,
        plain=plain,
        owner=owner,
        places=places,
        storage=storage,
        tally=tally,
        call=call,
        communicator=communicator,
        channel=channel,
        replica=replica,
        watch=watch,
    )


def entrance(
    function: Any,
    state: Any,
    *,
    nothing: Any = None,
    second: str | None = None,
    usual: Any = None,
    positions: int = 1,
    takes_numbers: bool = True,
) -> Any:
    """Return a callable that finds and runs a public function's persistent calls in C, and calls the function for any other.

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
        positions,
        takes_numbers,
        function=function,
        state=state,
        nothing=nothing,
        second=name,
        usual=usual,
        home=_HOME,
    )


def note_change() -> None:
    """Let entrances look again of which group calls are that name none: the process's job, what threads have, or a group is another."""
    if _native is not None:
        _native.note_change()


def remember(function: Any, *what: Any) -> None:
    """Let a callable find what makes some of its calls in C.

    Args:
        function: What `entrance` or `message_entrance` has returned; nothing is done where it is the function itself.
        what: The argument beside the array, as the caller writes it, what `slot_call` has returned, and its group's persistent calls,
            while they are the same; or what `message_end` has returned, the other rank, and the tag. Nothing is done with what does
            not run in C.
    """
    if _native is not None and isinstance(function, (_native.Entrance, _native.MessageEntrance)):
        function.remember(*what)


def recall(function: Any, call: Any) -> None:
    """Let an entrance find a persistent call again that it has forgotten for others, since it can remember some hundred.

    Args:
        function: As in `remember`.
        call: What `slot_call` has returned. Nothing is done with what was never remembered, or does not run in C.
    """
    if _native is not None and isinstance(function, _native.Entrance):
        function.recall(call)
