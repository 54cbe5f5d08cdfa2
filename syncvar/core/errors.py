"""All exceptions of syncvar, as one tree ordered by what the caller can do.

* `ConfigError`, `UsageError`, `MismatchError`: nothing changed, the group stays usable.
* `TransportError` and its children: a link or a peer failed. The group is broken.
* `RendezvousError`, `LaunchError`: the job did not start, or a worker failed.
* `InternalError`: a bug in syncvar.

Every field is an attribute. The message contains the fields, and ends with the error's `code`.
A code never changes its meaning; `syncvar explain CODE` says what happened and what to do. A new
code needs a section in `cli/errors.md`, with a program that raises it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from syncvar.core.process_ids import is_server, process_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CODE = re.compile(r"SV-\d{3}")
_CODE_AT_END = re.compile(rf"\s*\[{CODE.pattern}\]")


class SyncvarError(Exception):
    """Base of all exceptions of this package.

    Attributes:
        code: Stable code of what happened, such as "SV-101". `str(error)` ends with it.

    Example:
        >>> str(ConfigError("workers must be at least 1"))
        'workers must be at least 1 [SV-101]'
        >>> ConfigError("workers must be at least 1").code
        'SV-101'
    """

    code = "SV-100"

    def __str__(self) -> str:
        return with_code(super().__str__(), self.code)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def with_code(text: str, code: str) -> str:
    """Return a message that ends with its code, without the codes of the errors that it quotes.

    A message of several lines has the code on a line of its own.

    Example:
        >>> with_code("rank 1 was lost", "SV-301")
        'rank 1 was lost [SV-301]'
    """
    gap = "\n" if "\n" in text else " "
    return f"{without_codes(text)}{gap}[{code}]".lstrip()


def without_codes(text: str) -> str:
    """Return a text without the codes of the errors that it quotes."""
    return _CODE_AT_END.sub("", text) if "[SV-" in text else text


def error_message(error: BaseException) -> str:
    """Return the message of any exception without a code, for texts and records that quote it."""
    try:
        return without_codes(str(error))
    except Exception:  # noqa: BLE001  (a user's __str__ may raise anything)
        return "<exception str() failed>"  # as the interpreter says


def error_line(error: BaseException) -> str:
    """Return the class of any exception and its message, without a code.

    Example:
        >>> error_line(ConfigError("workers must be at least 1"))
        'ConfigError: workers must be at least 1'
    """
    return f"{type(error).__name__}: {error_message(error)}"


def code_of(error: BaseException) -> str:
    """Return the code of an exception of syncvar, or an empty text for another one."""
    return error.code if isinstance(error, SyncvarError) else ""


def _rebuild(kind: type[SyncvarError], args: tuple[Any, ...]) -> SyncvarError:
    """Return a copy of an error; its fields follow. The class's own __init__ takes the fields."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class ConfigError(SyncvarError, ValueError):
    """A wrong argument or setting. Nothing was sent and nothing changed: fix it and call again.

    Example:
        >>> import syncvar as sv
        >>> try:
        ...     sv.all_reduce([1.0, 2.0], op="median")
        ... except sv.ConfigError as error:
        ...     total = sv.all_reduce([1.0, 2.0])
        >>> total
        array([1., 2.])
    """

    code = "SV-101"


class SharedMemoryFull(ConfigError, MemoryError):
    """The shared memory of this host has no room for an array. Nothing was allocated.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> try:
        ...     x = sv.empty(2**60)
        ... except sv.SharedMemoryFull:
        ...     x = np.empty(8)
        >>> x.nbytes
        64
    """

    code = "SV-102"


class RowOutOfRange(ConfigError, IndexError):
    """A row index of a scatter or lookup is outside the variable.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable([1.0, 2.0])
        >>> try:
        ...     v.scatter_add([5], [1.0])
        ... except sv.RowOutOfRange:
        ...     print(v.numpy())
        [1. 2.]
    """

    code = "SV-103"


class UsageError(SyncvarError, RuntimeError):
    """A valid call at the wrong time or in the wrong context. Nothing changed.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.MirroredStrategy()
        >>> try:
        ...     strategy.run(lambda: strategy.run(int))
        ... except sv.UsageError as error:
        ...     print(str(error).partition(";")[0])
        strategy.run is called inside run
    """

    code = "SV-104"


class NoAggregation(UsageError, ValueError):
    """A write needs to combine the replicas of a variable that has aggregation NONE.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.MirroredStrategy()
        >>> with strategy.scope():
        ...     v = sv.Variable(0.0)
        >>> try:
        ...     strategy.run(lambda: v.assign(1.0))
        ... except sv.NoAggregation:
        ...     print(v.aggregation.name)
        NONE
    """

    code = "SV-105"


class MismatchError(SyncvarError, RuntimeError):
    """The ranks do not make the same call. Nothing changed and the group stays usable.

    Every rank of the group raises it for that call. This is sure because no collective ends on any
    rank before all ranks have entered it with the same call. Only `send` may end earlier.

    Args:
        message: Disagreement, in one sentence.
        table: Call of each rank that is known to take part.
        is_deadlock: Whether each rank of the table waits for the next one.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> from syncvar.testing import run_ranks
        >>> errors = run_ranks(2, lambda: sv.all_reduce(np.ones(2 + sv.rank())))
        >>> for rank, call in sorted(errors[0].table.items()):
        ...     print(rank, call.partition(" at ")[0])
        0 all_reduce(sum, float64[2]) (call 1)
        1 all_reduce(sum, float64[3]) (call 1)
    """

    code = "SV-201"

    def __init__(
        self, message: str, table: Mapping[int, str] | None = None, *, is_deadlock: bool = False
    ) -> None:
        self.table: dict[int, str] = dict(table or {})
        self.is_deadlock = is_deadlock
        if is_deadlock:
            self.code = "SV-202"
        rows = "".join(f"\n  rank {rank}: {call}" for rank, call in sorted(self.table.items()))
        super().__init__(message + rows)


class TransportError(SyncvarError, RuntimeError):
    """A link failed. Every group of this version of the membership is broken.

    Example:
        >>> import syncvar as sv
        >>> from syncvar.testing import run_ranks
        >>> def step():
        ...     if sv.rank() == 1:
        ...         raise ValueError("bad row")
        ...     try:
        ...         sv.barrier()
        ...     except sv.TransportError as error:
        ...         return type(error).__name__
        >>> run_ranks(2, step)[0]
        'PeerLost'
    """

    code = "SV-311"


_CODES_OF_LOSSES = {"raised": "SV-301", "interrupted": "SV-301", "memory": "SV-303"}


class PeerLost(TransportError):
    """Another rank, or a server, has failed or cannot be reached.

    Args:
        rank: World rank of the process; for a server, its process number.
        host: Host of the process; empty if unknown.
        reason: Reason, for instance "signal 9".
        detail: Where this process noticed it; may be empty.
        status: Exit code of the process, or minus the signal that killed it; None if unknown.
        kind: "raised" or "interrupted" if an exception ended it, "memory" if it ran out of memory,
            otherwise "lost".

    Example:
        >>> import syncvar as sv
        >>> from syncvar.testing import run_ranks
        >>> def step():
        ...     if sv.rank() == 1:
        ...         raise ValueError("bad row")
        ...     sv.barrier()
        >>> lost = run_ranks(2, step)[0]
        >>> lost.rank, lost.reason
        (1, 'uncaught ValueError: bad row')
    """

    code = "SV-304"

    def __init__(
        self,
        rank: int,
        host: str = "",
        reason: str = "",
        detail: str = "",
        *,
        status: int | None = None,
        kind: str = "lost",
    ) -> None:
        self.code = loss_code(rank, status, kind)
        self.rank = rank
        self.host = host
        self.reason = reason
        self.detail = detail
        self.status = status
        self.kind = kind
        text = f"{process_name(rank)}{f' on {host}' if host else ''} was lost"
        text += f": {reason}" if reason else ""
        super().__init__(text + (f" ({detail})" if detail else ""))


def loss_code(rank: int, status: int | None, kind: str = "lost") -> str:
    """Return the code of a lost process, from the fields of `PeerLost`.

    Example:
        >>> [loss_code(1, -9), loss_code(1, -9, "memory"), loss_code(1, 3), loss_code(1, None)]
        ['SV-302', 'SV-303', 'SV-305', 'SV-304']
    """
    if is_server(rank):
        return "SV-306"
    if kind in _CODES_OF_LOSSES:
        return _CODES_OF_LOSSES[kind]
    if status is None:
        return PeerLost.code
    return "SV-302" if status < 0 else "SV-305"


class DeadlineExceeded(TransportError, TimeoutError):
    """A call did not finish in time. The group is broken.

    Args:
        message: Call, and how long it waited.
        missing: World ranks for which the call waited.
        timeout_s: Time limit, in seconds.

    Example:
        >>> import time, syncvar as sv
        >>> from syncvar.testing import run_ranks
        >>> def step():
        ...     time.sleep(0.5 * sv.rank())
        ...     sv.barrier(timeout=0.1)
        >>> late = run_ranks(2, step)[0]
        >>> late.missing, late.timeout_s
        ((1,), 0.1)
    """

    code = "SV-307"
    # RuntimeError.__new__, which is found first, makes no OSError.
    __new__ = TimeoutError.__new__  # type: ignore[assignment]

    def __init__(self, message: str, missing: Sequence[int] = (), timeout_s: float = 0.0) -> None:
        self.missing = tuple(missing)
        self.timeout_s = timeout_s
        super().__init__(message)


class SharedMemoryUnavailable(TransportError):
    """The processes of this host cannot share memory. Their data goes through sockets instead.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.SharedMemoryUnavailable, sv.TransportError)
        True
    """

    code = "SV-310"


class HandshakeError(TransportError):
    """Two processes cannot communicate: they differ in version, byte order or job.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.HandshakeError, sv.TransportError)
        True
    """

    code = "SV-309"


class GroupBroken(TransportError):
    """A call on a group that broke earlier.

    Args:
        message: Reason why the group is broken.
        cause: First failure of the group, also in `__cause__`.

    Example:
        >>> import syncvar as sv
        >>> from syncvar.testing import run_ranks
        >>> def step():
        ...     if sv.rank() == 1:
        ...         raise ValueError("bad row")
        ...     try:
        ...         sv.barrier()
        ...     except sv.PeerLost:
        ...         sv.barrier()
        >>> broken = run_ranks(2, step)[0]
        >>> type(broken).__name__, type(broken.cause).__name__
        ('GroupBroken', 'PeerLost')
    """

    code = "SV-308"

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        self.cause = cause
        super().__init__(message)
        self.__cause__ = cause


class CheckpointError(SyncvarError):
    """A checkpoint cannot be written, or does not match the objects to restore.

    Example:
        >>> import pathlib, tempfile, syncvar as sv
        >>> path = pathlib.Path(tempfile.mkdtemp(), "weights.txt")
        >>> _ = path.write_text("1.0 2.0")
        >>> try:
        ...     sv.load(path)
        ... except sv.CheckpointError as error:
        ...     print(type(error).__name__)
        CheckpointError
    """

    code = "SV-401"


class NotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path.

    Example:
        >>> import syncvar as sv
        >>> try:
        ...     start = sv.load("no-such-file")["step"]
        ... except sv.NotFound:
        ...     start = 0
        >>> start
        0
    """

    code = "SV-402"


class Corrupt(CheckpointError):
    """A stored value is damaged.

    Args:
        key: Name of the damaged value.
        expected: Expected content, for instance a digest.
        actual: Actual content.
        detail: Where it was noticed; may be empty.

    Example:
        >>> import numpy as np, pathlib, tempfile, syncvar as sv
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
        >>> _ = sv.save(path, {"w": np.ones(2)})
        >>> _ = path.write_bytes(path.read_bytes()[:-1] + b"!")
        >>> try:
        ...     sv.load(path)
        ... except sv.Corrupt as error:
        ...     print(error.key == str(path))
        True
    """

    code = "SV-403"

    def __init__(self, key: str, expected: str = "", actual: str = "", detail: str = "") -> None:
        self.key = key
        self.expected = expected
        self.actual = actual
        self.detail = detail
        place = f" ({detail})" if detail else ""
        super().__init__(
            f"{key} is damaged: expected {expected}, found {actual}{place}; "
            f"restore another checkpoint"
        )


class RendezvousError(SyncvarError):
    """Not all ranks joined the job.

    Args:
        message: Reason.
        missing: Ranks that did not join.

    Example:
        >>> import syncvar as sv
        >>> error = sv.RendezvousError("rank 3 did not join", missing=[3])
        >>> error.missing
        (3,)
    """

    code = "SV-501"

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class LaunchError(SyncvarError):
    """A job could not be started, or one of its workers failed.

    Example:
        >>> import syncvar as sv
        >>> try:
        ...     sv.run(divmod, workers=1, args=(1, 0))
        ... except sv.LaunchError as error:
        ...     print(type(error).__name__)
        RankFailed
    """

    code = "SV-502"


class HostUnreachable(LaunchError):
    """A host of the job cannot be reached.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.HostUnreachable, sv.LaunchError)
        True
    """

    code = "SV-503"


class RankFailed(LaunchError):
    """A worker failed.

    `__cause__` is the exception that it raised, or None if its process was killed or ended by
    itself. It has the class of the worker's exception if this program can import that class,
    otherwise a class of the same name.

    Args:
        rank: Its rank, or -1 if the job failed as a whole.
        host: Its host.
        exit_code: Exit code of the job (128 + n for signal n).
        last_lines: Its traceback, or the last lines of its output.

    Example:
        >>> import syncvar as sv
        >>> try:
        ...     sv.run(divmod, workers=1, args=(1, 0))
        ... except sv.RankFailed as error:
        ...     print(error.rank, error.exit_code, type(error.__cause__).__name__)
        0 1 ZeroDivisionError
    """

    code = "SV-504"

    def __init__(self, rank: int, host: str, exit_code: int, last_lines: str) -> None:
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.last_lines = last_lines
        failed = f"rank {rank} on {host}" if rank >= 0 else "the job"
        super().__init__(f"{failed} failed with exit code {exit_code}\n{last_lines.rstrip()}")

    def __str__(self) -> str:
        return f"{self.args[0]}\n[{self.code}]"  # a traceback is evidence, so it keeps its code


class InternalError(SyncvarError):
    """A bug in syncvar itself; please report it with this text.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.InternalError, sv.SyncvarError)
        True
    """

    code = "SV-901"


class PlanError(InternalError):
    """A schedule breaks its contract.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.PlanError, sv.InternalError)
        True
    """

    code = "SV-902"


class WireError(TransportError):
    """Received bytes are not a valid frame or message."""

    code = "SV-312"
