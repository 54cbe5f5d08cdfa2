"""All exceptions of syncvar, as one tree ordered by what the caller can do.

* `ConfigError`, `UsageError`, `MismatchError`: nothing changed, the group stays usable.
* `TransportError` and its children: a link or a peer failed. The group is broken.
* `RendezvousError`, `LaunchError`: the job did not start, or a worker failed.
* `InternalError`: a bug in syncvar.

Every field is an attribute. The message contains the fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.process_ids import process_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SyncvarError(Exception):
    """Base of all exceptions of this package.

    Example:
        >>> import syncvar as sv
        >>> try:
        ...     sv.all_reduce("text")
        ... except sv.SyncvarError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


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


class MismatchError(SyncvarError):
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

    def __init__(
        self, message: str, table: Mapping[int, str] | None = None, *, is_deadlock: bool = False
    ) -> None:
        self.table: dict[int, str] = dict(table or {})
        self.is_deadlock = is_deadlock
        rows = "".join(f"\n  rank {rank}: {call}" for rank, call in sorted(self.table.items()))
        super().__init__(message + rows)


class TransportError(SyncvarError):
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


class PeerLost(TransportError):
    """Another rank, or a server, has failed or cannot be reached.

    Args:
        rank: World rank of the process; for a server, its process number.
        host: Host of the process; empty if unknown.
        reason: Reason, for instance "signal 9".
        detail: Where this process noticed it; may be empty.
        status: Exit code of the process, or minus the signal that killed it; None if unknown.

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

    def __init__(
        self,
        rank: int,
        host: str = "",
        reason: str = "",
        detail: str = "",
        *,
        status: int | None = None,
    ) -> None:
        self.rank = rank
        self.host = host
        self.reason = reason
        self.detail = detail
        self.status = status
        text = f"{process_name(rank)}{f' on {host}' if host else ''} was lost"
        text += f": {reason}" if reason else ""
        super().__init__(text + (f" ({detail})" if detail else ""))


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


class HandshakeError(TransportError):
    """Two processes cannot communicate: they differ in version, byte order or job.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.HandshakeError, sv.TransportError)
        True
    """


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


class HostUnreachable(LaunchError):
    """A host of the job cannot be reached.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.HostUnreachable, sv.LaunchError)
        True
    """


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

    def __init__(self, rank: int, host: str, exit_code: int, last_lines: str) -> None:
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.last_lines = last_lines
        failed = f"rank {rank} on {host}" if rank >= 0 else "the job"
        super().__init__(f"{failed} failed with exit code {exit_code}\n{last_lines}")


class InternalError(SyncvarError):
    """A bug in syncvar itself; please report it with this text.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.InternalError, sv.SyncvarError)
        True
    """


class PlanError(InternalError):
    """A schedule breaks its contract.

    Example:
        >>> import syncvar as sv
        >>> issubclass(sv.PlanError, sv.InternalError)
        True
    """


class WireError(TransportError):
    """Received bytes are not a valid frame or message."""
