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
    """Base of all exceptions of this package."""


class ConfigError(SyncvarError, ValueError):
    """A wrong argument or setting. Nothing was sent and nothing changed: fix it and call again."""


class SharedMemoryFull(ConfigError, MemoryError):
    """The shared memory of this host has no room for an array. Nothing was allocated."""


class RowOutOfRange(ConfigError, IndexError):
    """A row index of a scatter or lookup is outside the variable."""


class UsageError(SyncvarError, RuntimeError):
    """A valid call at the wrong time or in the wrong context. Nothing changed."""


class NoAggregation(UsageError, ValueError):
    """A write needs to combine the replicas of a variable that has aggregation NONE."""


class MismatchError(SyncvarError):
    """The ranks do not make the same call. Nothing changed and the group stays usable.

    Every rank of the group raises it for that call. This is sure because no collective ends on any
    rank before all ranks have entered it with the same call. Only `send` may end earlier.

    Args:
        message: Disagreement, in one sentence.
        table: Call of each rank that is known to take part.
        is_deadlock: Whether each rank of the table waits for the next one.
    """

    def __init__(
        self, message: str, table: Mapping[int, str] | None = None, *, is_deadlock: bool = False
    ) -> None:
        self.table: dict[int, str] = dict(table or {})
        self.is_deadlock = is_deadlock
        rows = "".join(f"\n  rank {rank}: {call}" for rank, call in sorted(self.table.items()))
        super().__init__(message + rows)


class TransportError(SyncvarError):
    """A link failed. Every group of this version of the membership is broken."""


class PeerLost(TransportError):
    """Another rank, or a server, has failed or cannot be reached.

    Args:
        rank: World rank of the process; for a server, its process number.
        host: Host of the process; empty if unknown.
        reason: Reason, for instance "signal 9".
        detail: Where this process noticed it; may be empty.
        status: Exit code of the process, or minus the signal that killed it; None if unknown.
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
    """

    def __init__(self, message: str, missing: Sequence[int] = (), timeout_s: float = 0.0) -> None:
        self.missing = tuple(missing)
        self.timeout_s = timeout_s
        super().__init__(message)


class SharedMemoryUnavailable(TransportError):
    """The processes of this host cannot share memory. Their data goes through sockets instead."""


class HandshakeError(TransportError):
    """Two processes cannot communicate: they differ in version, byte order or job."""


class GroupBroken(TransportError):
    """A call on a group that broke earlier.

    Args:
        message: Reason why the group is broken.
        cause: First failure of the group, also in `__cause__`.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        self.cause = cause
        super().__init__(message)
        self.__cause__ = cause


class CheckpointError(SyncvarError):
    """A checkpoint cannot be written, or does not match the objects to restore."""


class NotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path."""


class Corrupt(CheckpointError):
    """A stored value is damaged.

    Args:
        key: Name of the damaged value.
        expected: Expected content, for instance a digest.
        actual: Actual content.
        detail: Where it was noticed; may be empty.
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
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class LaunchError(SyncvarError):
    """A job could not be started, or one of its workers failed."""


class HostUnreachable(LaunchError):
    """A host of the job cannot be reached."""


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
    """

    def __init__(self, rank: int, host: str, exit_code: int, last_lines: str) -> None:
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.last_lines = last_lines
        failed = f"rank {rank} on {host}" if rank >= 0 else "the job"
        super().__init__(f"{failed} failed with exit code {exit_code}\n{last_lines}")


class InternalError(SyncvarError):
    """A bug in syncvar itself; please report it with this text."""


class PlanError(InternalError):
    """A schedule breaks its contract."""


class WireError(TransportError):
    """Received bytes are not a valid frame or message."""
