"""The optional C extension, and what replaces it where it was not built.

`pip install` builds the module `native` if a C compiler and Python's headers are present. Without
it everything works in Python, more slowly. SYNCVAR_CALL_RUNNER=python or c demands one of the two.
`native.h` lists the C files.

The extension reads arrays and ufuncs through the first fields of NumPy's structures, which NumPy's
C API has kept since version 1. This module checks them with the installed NumPy before the first
use.
"""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

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
    _missing = (
        "syncvar was installed without the C extension: "
        "building it needs a C compiler and Python's headers"
    )
except ImportError as error:
    _native = None
    _missing = f"the C extension cannot be loaded: {error}"


def _differs(native: Any) -> str:
    """Return what the extension reads differently from NumPy; empty if nothing."""
    left = np.arange(6.0).reshape(2, 3)
    for array in (left, left[:, 1:], left.astype(np.int16), np.array(1.0)):
        flags = array.flags
        expected = (
            array.__array_interface__["data"][0],
            array.shape,
            array.dtype,
            flags.c_contiguous | flags.aligned << 8 | flags.writeable << 10,
        )
        if native.describe(array) != expected:
            return "the form of arrays"
    for ufunc in (np.add, np.subtract, np.divide, np.maximum):
        one, other, out = np.arange(1.0, 9.0), np.full(8, 3.0), np.zeros(8)
        if not native.combine_once(ufunc, out.dtype.num, one, other, out) or not np.array_equal(
            out, ufunc(one, other)
        ):
            return f"the form of {ufunc.__name__}"
    return ""


if _native is not None and getattr(_native, "FORM", 0) != FORM:
    _native = None
    _missing = "the C extension is of another version of syncvar: install syncvar again"
if _native is not None and (_found := _differs(_native)):
    _native, _missing = None, f"NumPy {np.__version__} is not as it expects: {_found}"


_OPENING, _STEPS = True, False  # which part of a program C runs
_HOME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class AsyncCall:
    """A persistent call with async_op=True; only the C extension makes them.

    Attributes:
        request: The engine's request once the engine continues the call; else None.
        began: Start time, CLOCK_MONOTONIC in nanoseconds.
        is_over: The call has ended without the engine.
        end: Returns the result if it is ready, or with True arrives while spinning; else None.
        give_to_engine: Lets the engine continue the call; does nothing if it is over.
    """

    request: Any
    began: int
    is_over: bool
    end: Callable[[bool], Any]
    give_to_engine: Callable[[], None]


class ChannelState:
    """Last publication of a rank in a group, and whether all ranks have reached it."""

    __slots__ = ("is_settled", "last", "phase", "side", "tail")
    is_settled: bool
    last: int
    phase: int
    side: int
    tail: int


class AdmissionState:
    """Part of the engine that every call reads.

    Attributes:
        is_quiet: The engine admits calls, and no writes are queued.
        driver: Thread that drives the engine in order to wait for its own call; 0 for none.
    """

    __slots__ = ("driver", "is_quiet")
    driver: int
    is_quiet: bool


class CommunicatorState:
    """Part of a communicator that every call reads: `next_call`, the number of its next call."""

    __slots__ = ("next_call",)
    next_call: int


class CopyGuard:
    """Detects concurrent access to the local copy of a variable.

    Attributes:
        changes: Local writes of this process in progress.
        is_being_written: A call of all replicas is writing the copy in place.
        moves: Seqlock of relocations: odd while the copy is being moved.
    """

    __slots__ = ("changes", "is_being_written", "moves")
    changes: int
    is_being_written: bool
    moves: int


class VariableCounters:
    """Counters of a variable.

    Attributes:
        added: Increments of an AUTO variable.
        collectives: Collective calls.
        reads: All reads.
        steps: Writes outside of runs, which schedule the comparisons of replicas.
        turned: Value of `added` at the latest read that followed an increment.
        turns: Reads that followed at least one increment.
        writes: All writes.
    """

    __slots__ = ("added", "collectives", "reads", "steps", "turned", "turns", "writes")

    def __init__(self) -> None:
        self.added = self.collectives = self.reads = self.steps = self.turned = self.turns = (
            self.writes
        ) = 0


class CheckGate:
    """Gate of writes: none needs a check if `is_free`, else those from number `until` on."""

    __slots__ = ("is_free", "until")
    is_free: bool
    until: int


if _native is not None:  # classes with the same attributes, which C reads directly
    AdmissionState = _native.AdmissionState  # type: ignore[misc]
    AsyncCall = _native.AsyncCall  # type: ignore[misc]
    ChannelState = _native.ChannelState  # type: ignore[misc]
    CommunicatorState = _native.CommunicatorState  # type: ignore[misc]
    CopyGuard = _native.CopyGuard  # type: ignore[misc]
    VariableCounters = _native.VariableCounters  # type: ignore[misc]
    CheckGate = _native.CheckGate  # type: ignore[misc]

crc32: Callable[..., int] = zlib.crc32 if _native is None else _native.crc32
"""The CRC-32 of a buffer, or of one behind bytes with a known sum, as zlib computes it."""


class MessageCounter(CommunicatorState):
    """Counts the calls of one (sender, receiver, tag) that are over; frames of them are dropped.

    The endpoints advance it without informing the engine; `SequenceTracker.count_by` merges it. The
    communicator has the number of the next message, which may still be waited for.
    """

    __slots__ = ("__weakref__", "identity")

    def __init__(self, identity: int, next_call: int) -> None:
        self.identity = identity
        self.next_call = next_call


def missing_reason() -> str:
    """Return why this process has no C extension; empty if it has one."""
    return _missing


def which(wanted: str) -> str:
    """Return the runner for the setting `call_runner`: "c" or "python".

    `wanted` is "auto", "c" or "python".

    Raises:
        ConfigError: "c" was demanded, but there is no extension.

    Example:
        >>> which("python")
        'python'
    """
    if wanted == "c" and _native is None:
        raise ConfigError(
            f"call_runner = c, but there is no C extension: {_missing}; install syncvar with a "
            f"compiler, or set call_runner = auto"
        )
    return "python" if wanted == "python" or _native is None else "c"


def runner_text(wanted: str) -> str:
    """Return a text that says what runs persistent calls under a setting, and why.

    Example:
        >>> runner_text("python")
        'persistent calls run in Python: call_runner = python asks for it'
    """
    if wanted == "python":
        return "persistent calls run in Python: call_runner = python asks for it"
    if not _missing:
        return "persistent calls run in C"
    return f"persistent calls run in Python: {_missing}"


def bind(channel: Any, *places: Any) -> bool:
    """Set the offsets of a channel in the extension; False if it does not take so many ranks."""
    if _native is None:
        return False
    try:
        channel.bind(*places)
    except ValueError:
        return False
    return True


def program(*parts: Any) -> Any:
    """Return a program for the extension, or None if it cannot run it; see `program_check.c`."""
    if _native is None:
        return None
    try:
        return _native.Program(*parts)
    except ValueError:  # NumPy has no loop for this dtype and op
        return None


def open_program(
    code: Any, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], *, keeps_lock: bool
) -> None:
    """Run a program's opening; see `run`. Arrays may be None for memories that it does not use."""
    _native.Run(code, channel, arrays, offsets, keeps_lock, _OPENING)  # type: ignore[union-attr]


def run(
    code: Any, channel: Any, arrays: tuple[Any, ...], offsets: tuple[int, ...], *, keeps_lock: bool
) -> Iterator[int]:
    """Run a program in C; yield the needs.

    Args:
        code: Result of `program`.
        channel: This rank's channel.
        arrays: The memories that are arrays; anything for the others.
        offsets: Offsets of the others in shared memory, in bytes, or with bit 60 addresses in the
            process of the memory's rank; -1 for arrays.
        keeps_lock: Keep the GIL.
    """
    steps: Iterator[int] = _native.Run(  # type: ignore[union-attr]
        code, channel, arrays, offsets, keeps_lock, _STEPS
    )
    return steps


def native_call(spec: Any) -> Any:
    """Return a persistent call in C, or None if C cannot run it.

    `spec` is a `NativeCallSpec`, see `syncvar/runtime/persistent_call.py`.
    """
    if _native is None:
        return None
    try:
        return _native.NativeCall(spec)
    except ValueError:  # NumPy has no loop for this dtype and op, or there are too many ranks
        return None


def group_of(
    variables: tuple[Any, ...],
    storages: tuple[Any, ...],
    tallies: tuple[Any, ...],
    parts: tuple[Any, ...],
) -> Any:
    """Return a flat bucket of variables in C, or None; see `PyFlatBucket` for the arguments."""
    if _native is None:
        return None
    nbytes = tuple([part.nbytes for part in parts])
    return _native.Group(
        nbytes, variables=variables, storages=storages, tallies=tallies, parts=parts
    )


def message_end(*parts: Any, **objects: Any) -> Any:
    """Return an endpoint of messages in C, or None; see `p2p.c`."""
    return None if _native is None else _native.End(*parts, **objects)


def message_dispatch(function: Any, state: Any, *, is_sending: bool) -> Any:
    """Return a C dispatch of `send` or `recv`, which calls the function for all other messages."""
    if _native is None:
        return function
    return _native.MessageDispatch(is_sending, function=function, state=state)


class AccessScope(NamedTuple):
    """Calls in which a persistent access of a variable is valid."""

    # Scope stack of each thread; None for a Read that is always one of all replicas, and not
    # counted
    places: Any
    owner: Any
    # It is the default one; reads of the combined copies do not need to know
    is_default: bool = False
    # Its group; this field and the next ones are for calls of all replicas
    communicator: Any = None
    channel: Any = None
    replica: Any = None  # context in which each replica has its own values


class LocalCopy(NamedTuple):
    """This replica's copy of a variable: its storage and counters, and the form of its array."""

    storage: CopyGuard
    tally: VariableCounters
    dtype: Any
    shape: tuple[int, ...]


def access(
    kind: str,
    plain: Any,
    scope: AccessScope,
    copy: LocalCopy,
    *,
    call: Any = None,
    watch: CheckGate | None = None,
    is_increment: bool = False,
) -> Any:
    """Return a persistent access of a variable in C, or `plain` if there is no extension.

    Args:
        kind: "Write", "Look" (a read of this replica's copy), or "Read" (of the copies, combined).
        plain: The Python version, called for unusual accesses before anything has changed.
        scope: Calls in which it is valid.
        copy: The copy that it reads or writes.
        call: The persistent all-reduce; in a write it applies its result to the copy.
        watch: Gate of the strategy for writes; None if nothing is compared.
        is_increment: It increments an AUTO variable.
    """
    if _native is None or (kind == "Read" and type(call) is not _native.NativeCall):
        return plain
    objects = {**scope._asdict(), **copy._asdict(), "plain": plain, "call": call, "watch": watch}
    form = [objects.pop(name) for name in ("dtype", "shape", "is_default")]
    return getattr(_native, kind)(*form, is_increment, **objects)


def call_dispatch(
    function: Any,
    state: Any,
    *,
    no_input: Any = None,
    second: str | None = None,
    usual: Any = None,
    positions: int = 1,
    takes_numbers: bool = True,
) -> Any:
    """Return a C dispatch of a public function, which calls the function for all calls not cached.

    Args:
        function: The function; the dispatch takes its name, documentation and signature.
        state: Holder of the process context: `default`, and `is_bound` if threads have their own.
        no_input: Input of a function without arguments; None for one that takes an array.
        second: Name of the second cached argument: op, root or axis.
        usual: Default of that argument.
        positions: Positional arguments at most.
        takes_numbers: A number, or a short list of numbers, becomes an array.
    """
    if _native is None:
        return function
    name = None if second is None else sys.intern(second)
    return _native.CallDispatch(
        positions,
        takes_numbers,
        function=function,
        state=state,
        no_input=no_input,
        second=name,
        usual=usual,
        home=_HOME,
    )


def note_change() -> None:
    """Invalidate the dispatch cache for calls without `group=`.

    Call it when the default group changes: init, shutdown, or a thread sets its own context.
    """
    if _native is not None:
        _native.note_change()


def remember(function: Any, *entry: Any) -> None:
    """Cache a persistent call, or an endpoint, in a C dispatch; ignore Python ones.

    Args:
        function: Result of `call_dispatch` or `message_dispatch`.
        entry: (second argument, call, persistent calls of its group), or (endpoint, other rank,
            tag).
    """
    if _native is not None and isinstance(
        function, (_native.CallDispatch, _native.MessageDispatch)
    ):
        function.remember(*entry)


def recall(function: Any, call: Any) -> None:
    """Cache a persistent call again that a C dispatch has evicted; ignore calls never cached."""
    if _native is not None and isinstance(function, _native.CallDispatch):
        function.recall(call)
