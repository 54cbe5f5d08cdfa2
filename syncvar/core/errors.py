"""Every error that syncvar raises, as one tree.

Children are chosen by what the caller can do about them:

* `ConfigError`, `UsageError`, `MismatchError`: nothing was changed and the group stays usable; fix the call.
* `TransportError` and its children: a link or a peer is gone; the group is broken and refuses later calls.
* `RendezvousError`, `LaunchError`: the job did not come together, or a worker of it failed.
* `InternalError`: our bug.

Every field is an attribute; the message is built from the fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.process_ids import process_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SyncvarError(Exception):
    """Base of every error of this package."""


class ConfigError(SyncvarError, ValueError):
    """A wrong argument or setting. Nothing was sent and nothing changed: correct it and call again."""


class SharedMemoryFull(ConfigError, MemoryError):
    """The memory that the processes of this host share has no room for an array. Nothing was taken."""


class RowOutOfRange(ConfigError, IndexError):
    """A row index of a scatter or lookup lies outside the variable."""


class UsageError(SyncvarError, RuntimeError):
    """A right argument at the wrong time or place. Nothing changed."""


class NoAggregation(UsageError, ValueError):
    """The copies of a variable would have to be combined, but it has aggregation NONE."""


class MismatchError(SyncvarError):
    """The ranks do not make the same call. Nothing changed and the group stays usable.

    Every rank of the group raises it for that call, on every path: no collective ends on any rank before all ranks have
    come to it with the same call. Only messages (`send`) may end before the other rank has come.

    Args:
        message: What disagrees, in one sentence.
        table: For each rank that is known to take part, what it does.
    """

    def __init__(self, message: str, table: Mapping[int, str] | None = None) -> None:
        self.table: dict[int, str] = dict(table or {})
        rows = "".join(f"\n  rank {rank}: {what}" for rank, what in sorted(self.table.items()))
        super().__init__(message + rows)


class TransportError(SyncvarError):
    """A link failed; every group of this generation is broken."""


class PeerLost(TransportError):
    """Another rank, or a server, is gone, or cannot take part any more.

    Args:
        rank: The rank that was lost, in the world; of a server, the number of its process (`syncvar.core.process_ids`).
        host: Its host, or an empty text where it is not known.
        reason: Why, for instance "signal 9".
        detail: Where the loss was noticed; may be empty.
    """

    def __init__(self, rank: int, host: str = "", reason: str = "", detail: str = "") -> None:
        self.rank = rank
        self.host = host
        self.reason = reason
        self.detail = detail
        where = f" on {host}" if host else ""
        what = f": {reason}" if reason else ""
        super().__init__(
            f"{process_name(rank)}{where} was lost{what}" + (f" ({detail})" if detail else "")
        )


class DeadlineExceeded(TransportError, TimeoutError):
    """A call did not finish in time. The group is broken.

    Args:
        message: Which call waited how long.
        missing: The ranks that were waited for, in the world.
        timeout_s: The time allowed, in seconds.
    """

    def __init__(self, message: str, missing: Sequence[int] = (), timeout_s: float = 0.0) -> None:
        self.missing = tuple(missing)
        self.timeout_s = timeout_s
        super().__init__(message)


class SharedMemoryUnavailable(TransportError):
    """The processes of this host cannot share memory; their data goes through sockets instead."""


class HandshakeError(TransportError):
    """Two processes of a job cannot talk: versions, byte order or job differ."""


class GroupBroken(TransportError):
    """A call on a group that broke earlier.

    Args:
        message: What broke it.
        cause: The first failure, also set as `__cause__`.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        self.cause = cause
        super().__init__(message)
        self.__cause__ = cause


class CheckpointError(SyncvarError):
    """A checkpoint cannot be written, or does not fit what it is restored into."""


class NotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path."""


class Corrupt(CheckpointError):
    """A stored value is damaged.

    Args:
        key: What is damaged.
        expected: What should be there, a digest for instance.
        actual: What is there.
        detail: Where it was noticed; may be empty.
    """

    def __init__(self, key: str, expected: str = "", actual: str = "", detail: str = "") -> None:
        self.key = key
        self.expected = expected
        self.actual = actual
        self.detail = detail
        where = f" ({detail})" if detail else ""
        super().__init__(
            f"{key} is damaged: expected {expected}, found {actual}{where}; restore another checkpoint"
        )


class RendezvousError(SyncvarError):
    """The ranks did not all meet.

    Args:
        message: What happened.
        missing: The ranks that did not come.
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

    `__cause__` is the exception that it raised; None if its process was killed or ended by itself.
    It has the class of the worker's exception if this program can import that class, else a class
    of the same name.

    Args:
        rank: Its rank, or -1 where the job failed as a whole.
        host: Its host.
        exit_code: The exit code of the job (128 + n for signal n).
        last_lines: Its traceback, or the last lines that it wrote.
    """

    def __init__(self, rank: int, host: str, exit_code: int, last_lines: str) -> None:
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.last_lines = last_lines
        who = f"rank {rank} on {host}" if rank >= 0 else "the job"
        super().__init__(f"{who} failed with exit code {exit_code}\n{last_lines}")


class InternalError(SyncvarError):
    """A bug in syncvar itself; please report it with this text."""


class PlanError(InternalError):
    """A plan breaks its contract."""


class WireError(TransportError):
    """Bytes that are no valid frame or message."""
