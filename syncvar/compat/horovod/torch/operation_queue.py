"""A thread that makes the asynchronous operations of this rank, one after another.

Horovod lets ranks submit operations in different orders, because it negotiates each by its name. We
make them in the order of submission, which must be the same on all ranks. The names travel with
the calls, so ranks that differ raise an error with both names.

`hvd.join` uses such a difference: a rank that has joined makes a call that no other rank makes. All
ranks get MismatchError, exchange descriptions of their calls, and learn who has joined. From then
on they exchange descriptions before each operation, until all have joined.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from syncvar.collectives.object_collectives import all_gather_object
from syncvar.core.errors import ConfigError, MismatchError, SyncvarError, error_line

if TYPE_CHECKING:
    from collections.abc import Callable

_JOIN = "join"


class HorovodInternalError(RuntimeError):
    """A collective failed; the cause is the error of syncvar."""


class DuplicateNameError(ValueError, HorovodInternalError):
    """An operation of this name has been submitted, and has not ended."""


class QueuedOperation(Protocol):
    """A collective call with its arguments."""

    name: str | None
    is_global: bool  # whether all ranks of the world take part

    def run(self) -> Any:
        """Make the call and return its result."""

    def description(self) -> dict[str, Any]:
        """Return plain data from which a rank that has joined can make the same call."""


class PendingOperation:
    """An operation on its way, with its result or error."""

    def __init__(self, operation: QueuedOperation) -> None:
        self.operation = operation
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def outcome(self) -> Any:
        """Wait for the end; return the result or raise the error."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class JoinCall:
    """`hvd.join`: take part in the sums of other ranks with zeros, until all have joined."""

    name: str | None = None
    is_global = True

    def __init__(self, substitute: Callable[[dict[str, Any]], QueuedOperation | None]) -> None:
        self.substitute = substitute

    def description(self) -> dict[str, Any]:
        """Return the word that this rank has joined."""
        return {"kind": _JOIN}

    def run(self) -> Any:
        """Refuse: `OperationQueue` makes the call, because it exchanges descriptions."""
        raise NotImplementedError


class OperationQueue:
    """The operations that this rank has submitted, in order."""

    def __init__(self) -> None:
        self._waiting: deque[PendingOperation] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._handles: dict[int, PendingOperation] = {}
        self._names: set[str] = set()
        self._next = 0
        self._running = False
        self._joined: list[int] = []  # in the order in which they joined

    # -- for the functions of the interface --------------------------------------------------------

    def submit(self, operation: QueuedOperation) -> int:
        """Let the thread make an operation, and return its handle."""
        pending = PendingOperation(operation)
        with self._changed:
            if operation.name is not None and operation.name in self._names:
                raise DuplicateNameError(
                    f"an operation with the name {operation.name!r} runs already: give each "
                    "operation that has not been synchronized a name of its own"
                )
            if operation.name is not None:
                self._names.add(operation.name)
            self._waiting.append(pending)
            handle, self._next = self._next, self._next + 1
            self._handles[handle] = pending
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="hvd-operations", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return handle

    def call(self, operation: QueuedOperation) -> Any:
        """Make an operation and return its result; in this thread if no other one waits."""
        with self._changed:
            is_idle = not self._waiting and not self._running
            self._running = self._running or is_idle
        if not is_idle:
            return self.synchronize(self.submit(operation))
        try:
            return self._make(operation)
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def poll(self, handle: int) -> bool:
        """Return whether an operation has ended."""
        return self._handles[handle].done.is_set() if handle in self._handles else True

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation, forget it, and return its result."""
        pending = self._handles.get(handle)
        if pending is None:
            return None
        try:
            return pending.outcome()
        finally:
            self._handles.pop(handle, None)

    def stop(self) -> None:
        """Wait until all operations have ended, and end the thread."""
        thread = self._thread
        with self._changed:
            self._thread = None
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._handles.clear()
        self._joined.clear()

    # -- in the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while self._running or (not self._waiting and self._thread is me):
                    self._changed.wait()
                if not self._waiting:
                    return
                pending = self._waiting.popleft()
                self._running = True
            try:
                pending.result = self._make(pending.operation)
            except BaseException as error:
                pending.error = error
            with self._changed:
                self._running = False
                self._names.discard(pending.operation.name or "")
                self._changed.notify_all()
            pending.done.set()

    def _make(self, operation: QueuedOperation) -> Any:
        """Make an operation; SyncvarError becomes HorovodInternalError."""
        try:
            if isinstance(operation, JoinCall):
                return self._join(operation)
            if self._joined:
                self._announce(operation)
            return operation.run()
        except (MismatchError, ConfigError) as error:
            if operation.is_global:
                return self._again(operation, error)
            raise HorovodInternalError(str(error)) from error
        except SyncvarError as error:
            raise HorovodInternalError(error_line(error)) from error

    def _again(self, operation: QueuedOperation, error: SyncvarError) -> Any:
        """Make an operation again, if it failed because a rank has joined."""
        if self._joined:
            raise HorovodInternalError(str(error)) from error
        try:
            self._announce(operation)
            if self._joined:
                return operation.run()
        except SyncvarError as second:
            raise HorovodInternalError(error_line(second)) from error
        raise HorovodInternalError(str(error)) from error

    def _announce(self, operation: QueuedOperation) -> None:
        """Exchange descriptions with all ranks; raise if those that have joined cannot follow."""
        mine = operation.description()
        if operation.is_global:
            self.note_joined(self._exchange(mine))
        if self._joined and not is_followed(mine):
            raise HorovodInternalError(
                f"rank {self._joined[0]} has called hvd.join, and only sums and averages of all "
                f"ranks are possible until all have: not {mine['kind']}"
            )

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = all_gather_object(mine)
        return found

    def note_joined(self, descriptions: list[dict[str, Any]]) -> None:
        """Take the ranks that have joined from descriptions of all ranks."""
        for rank, one in enumerate(descriptions):
            if one["kind"] == _JOIN and rank not in self._joined:
                self._joined.append(rank)

    def _join(self, operation: JoinCall) -> int:
        """Follow the other ranks until all have joined."""
        while True:
            try:
                found = self._exchange(operation.description())
            except MismatchError:  # the others make a call, and do not know yet; now they do
                continue
            self.note_joined(found)
            active = [one for one in found if one["kind"] != _JOIN]
            if not active:
                last = self._joined[-1]
                self._joined.clear()
                return last
            substitute = operation.substitute(active[0]) if is_followed(active[0]) else None
            if substitute is not None:
                self._follow(substitute)

    def _follow(self, substitute: QueuedOperation) -> None:
        try:
            substitute.run()
        except (MismatchError, ConfigError):
            return  # the active ranks differ among themselves, and raise it too


def is_followed(description: dict[str, Any]) -> bool:
    """Return whether ranks that have joined can take part in a call."""
    return description.get("is_sum", False)  # type: ignore[no-any-return]


operations = OperationQueue()
