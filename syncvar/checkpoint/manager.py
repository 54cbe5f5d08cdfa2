"""`sv.CheckpointManager`: one checkpoint folder per step, and which of them to keep and restore.

A SIGTERM is noted at once (`StopNotice`); ranks act on it when all have agreed (`should_stop`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

import numpy as np

from syncvar.bootstrap.process import current, is_initialized, joined, shutdown
from syncvar.checkpoint.checkpoint import Checkpoint, core_of
from syncvar.checkpoint.checkpoint_format import (
    LOCK,
    MANIFEST,
    Label,
    checked_path,
    step_name,
    step_of,
)
from syncvar.checkpoint.checkpoint_reader import StepFolders, best_of, removable
from syncvar.checkpoint.folder import CheckpointFolder, FolderLock, make_folder
from syncvar.checkpoint.restore import RestoreOptions
from syncvar.checkpoint.save import SINGLE_RANK_ADVICE, checked_metric
from syncvar.checkpoint.save_plan import failure_of, raise_failures
from syncvar.checkpoint.trackables import SoloGroup, gather, outside_scopes
from syncvar.collectives.all_reduce import AllReduceCall
from syncvar.core.errors import CheckpointError, ConfigError, MismatchError, UsageError
from syncvar.core.exit_status import NOTICE_ECHO_S, send_status
from syncvar.core.fork_cleanup import handle_signal, release_signal
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.core.migration_hints import unexpected_keyword

if TYPE_CHECKING:
    from types import FrameType

    from syncvar.checkpoint.save import PendingSave
    from syncvar.checkpoint.trackables import CheckpointGroup
    from syncvar.runtime.communicator import Communicator

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: "run me again"
_log = logging.getLogger("syncvar")
_BEST = ("min", "max")
_DEFAULT_KEEP = 5


class StopNotice:
    """Whether this rank has received a stop request.

    The first SIGTERM is the request. A later one, or one in a job with a failed rank, runs the
    previous handler. Two within a second count as one: a scheduler that signals every process also
    signals the launcher, which passes the signal on.

    Args:
        listens: Whether to handle SIGTERM.
    """

    def __init__(self, *, listens: bool) -> None:
        self.is_requested = False
        self._signalled_at: float | None = None
        self._before: Any = None
        self._listens = listens
        if listens:
            if threading.current_thread() is not threading.main_thread():
                raise UsageError(
                    "on_preemption=True handles SIGTERM, which only the main thread can: make the "
                    "manager there, or call manager.request_stop() when you learn of the stop"
                )
            self._before = handle_signal(signal.SIGTERM, self._signalled)
            send_status("takes_notice", on=1)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        engine = current().engine if is_initialized() else None
        now = time.monotonic()
        is_echo = self._signalled_at is not None and now - self._signalled_at < NOTICE_ECHO_S
        is_broken = engine is not None and engine.failure is not None
        if (self._signalled_at is not None and not is_echo) or is_broken:
            before = self._before
            self.close()
            if callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:
                raise SystemExit(128 + number)
        self._signalled_at = now if self._signalled_at is None else self._signalled_at
        self.is_requested = True

    def close(self) -> None:
        """Restore the previous SIGTERM handler, in the main thread. Idempotent."""
        if self._listens and threading.current_thread() is threading.main_thread():
            self._listens = False
            if signal.getsignal(signal.SIGTERM) == self._signalled:
                release_signal(signal.SIGTERM, self._signalled)
                outer = getattr(self._before, "__self__", None)
                send_status("takes_notice", on=int(isinstance(outer, StopNotice)))

    def end(self) -> None:
        """Ignore SIGTERM from now on: the process is about to exit with the agreed code."""
        listened = self._listens
        self.close()
        if listened and not self._listens:
            handle_signal(signal.SIGTERM, signal.SIG_IGN)


class CheckpointManager(MigrationHintsMixin):
    """Checkpoints of a run, in the folders `step-…` of one directory.

    After its first save, rank 0 holds the lock of the directory. A second job that saves there
    raises CheckpointError; jobs that only restore do not. The manager removes old checkpoints after
    it has committed a new one. Checkpoints are ordered by time of saving, whatever their steps are:
    after a return to step 50, the save of step 50 is the latest. The manager is a context manager;
    `close` releases the lock.

    Args:
        checkpoint: Checkpoint to save.
        directory: Directory of the folders; created at the first save. All ranks must see it.
        keep: Number of latest saves to keep; None keeps all. `max_to_keep=`, the name in tf.train,
            is an alias.
        best: "min" or "max": also keep the checkpoint with the smallest or largest `metric`.
        on_preemption: Whether SIGTERM announces the end of this process; see `should_stop`.
        check_every: Number of calls of `should_stop` between two exchanges of the ranks.

    Raises:
        ConfigError: A wrong argument.
        UsageError: `on_preemption` outside the main thread.

    Example:
        >>> import syncvar as sv, tempfile
        >>> v = sv.Variable(0.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sv.CheckpointManager(sv.Checkpoint(v=v), folder, keep=2)
        ...     for step in range(5):
        ...         _ = manager.save(step) if v.assign(step) is v else None
        ...     names = [path[-6:] for path in manager.checkpoints]
        ...     is_latest = manager.restore_latest() == manager.latest
        ...     manager.close()
        >>> names, is_latest
        (['000003', '000004'], True)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Any,
        keep: int | None = _DEFAULT_KEEP,
        best: str | None = None,
        *,
        on_preemption: bool = False,
        check_every: int = 1,
        **_foreign: int | None,
    ) -> None:
        if "max_to_keep" in _foreign:
            if keep != _DEFAULT_KEEP:
                raise ConfigError(
                    f"keep={keep!r:.60} and max_to_keep={_foreign['max_to_keep']!r:.60} are "
                    f"aliases: pass only keep"
                )
            keep = _foreign.pop("max_to_keep")
        if _foreign:
            raise unexpected_keyword(CheckpointManager, _foreign)
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigError(
                f"checkpoint must be a sv.Checkpoint, not a {type(checkpoint).__name__}: "
                f"write sv.Checkpoint(model=…)"
            )
        for name, number in (("keep", keep), ("check_every", check_every)):
            is_count = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            if not is_count and not (name == "keep" and number is None):
                allowed = "an integer of at least 1" + " or None" * (name == "keep")
                raise ConfigError(f"{name} must be {allowed}, not {number!r:.60}")
        if best is not None and best not in _BEST:
            raise ConfigError(f"best must be 'min', 'max' or None, not {best!r:.60}")
        if not isinstance(on_preemption, bool):
            raise ConfigError(f"on_preemption must be True or False, not {on_preemption!r:.60}")
        self._checkpoint = checkpoint
        core = core_of(checkpoint)
        assert core is not None, "every Checkpoint has one"
        self._core = core
        self._folders = StepFolders(os.path.abspath(checked_path(directory)))
        self._keep, self._best = keep, best
        self._check_every, self._checks = check_every, 0
        self._must_stop = False
        self._lock: FolderLock | None = None
        # (step, metric, the restore before it)
        self._saved: tuple[int, float | None, object] | None = None
        self._warned_of_going_back = False
        self._stop_notice = StopNotice(listens=on_preemption)
        weakref.finalize(self, self._stop_notice.close)
        self._group: tuple[Any, CheckpointGroup] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:  # all ranks leave the block together, so the commit can be made
                self._core.finish_pending()
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock of the directory and the SIGTERM handler. Idempotent.

        A pending save stays pending. A `with` block that ends without an exception commits it
        first.
        """
        if self._lock is not None:
            self._lock.release()
        self._stop_notice.close()

    # -- existing checkpoints ----------------------------------------------------------------------

    @property
    def directory(self) -> str:
        """Absolute path of the directory."""
        return self._folders.directory

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the committed checkpoints, the oldest save first. Local.

        Checkpoints of earlier versions have no number of their save: they come first, ordered by
        step.
        """
        return [self._folders.path(one.step) for one in self._folders.committed()]

    @property
    def latest(self) -> str | None:
        """Path of the latest save whose files exist, or None. Local."""
        return self._folders.latest()[0]

    @property
    def best(self) -> str | None:
        """Path of the checkpoint with the best metric, or None. Always None without `best=`."""
        winner = best_of(self._folders.committed(), self._best)
        return None if winner is None else self._folders.path(winner.step)

    # -- saving ------------------------------------------------------------------------------------

    @overload
    def save(
        self,
        step: int | None = None,
        metric: Any = None,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> str: ...

    @overload
    def save(
        self,
        step: int | None = None,
        metric: Any = None,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> PendingSave: ...

    def save(
        self,
        step: int | None = None,
        metric: Any = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> str | PendingSave:
        """Save as a step, then remove old checkpoints. Collective; allowed in every context.

        Args:
            step: Step of the program, at least 0; None means one more than that of the latest save.
                An existing step is replaced. A step below an existing one logs a warning: it
                becomes the latest save, and higher steps are removed before it.
            metric: Quality of the checkpoint, the same on all ranks; NaN is never the best.
            async_op: As for `Checkpoint.save`; `wait` removes old checkpoints.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Returns:
            The path, or a `PendingSave` with `async_op=True`.

        Raises:
            ConfigError: A wrong argument, or an object cannot be saved. The other ranks raise
                MismatchError.
            MismatchError: The ranks pass different steps, metrics or directories.
            CheckpointError: On every rank: the disk is full or fails, or another job saves here.
                Nothing was saved.

        Cost: As `Checkpoint.save`, and one more exchange.
        """
        communicator = self._core.collect().group
        if isinstance(communicator, SoloGroup) and communicator.rank and step is None:
            raise ConfigError(
                "only rank 0 saves server-side variables, so this worker does not know the next "
                "step: pass it, manager.save(step)"
            )
        self._finish_pending()

        def describe() -> list[Any]:
            if step is not None:
                step_name(step)
            rated = checked_metric(metric)
            found = self._folders.committed() if communicator.member_rank == 0 else []
            following = found[-1].step + 1 if found else 0
            return [self.directory, step, None if rated is None else repr(rated), following]

        communicator.require_all("saving a checkpoint", SINGLE_RANK_ADVICE)
        everyone = gather(communicator, "checkpoint step", describe, timeout)
        if any(one[:3] != everyone[0][:3] for one in everyone):
            saves = zip(communicator.members, everyone, strict=True)
            table = {
                rank: f"step {one[1]}, metric {one[2]}, directory {one[0]!r:.200}"
                for rank, one in saves
            }
            raise MismatchError(
                "the ranks do not make the same save; nothing was written. A metric must be equal "
                "on all ranks: strategy.reduce('MEAN', metric, axis=None)",
                table,
            )
        agreed = everyone[0][3] if step is None else step
        rated = checked_metric(metric)
        is_first = communicator.member_rank == 0
        label = Label(agreed, rated, self._folders.next_number() if is_first else 0)
        restored = self._core.waiting

        def after() -> None:
            self._saved = agreed, rated, restored
            if is_first:
                self._folders.forget(agreed)
                self._warn_of_going_back(agreed)
                for retained in removable(self._folders.committed(), self._keep, self._best):
                    self._remove(retained.step)

        at = self._folders.path(agreed)
        return self._core.save(at, label, timeout, async_op=async_op, guard=self._hold, after=after)

    def _finish_pending(self) -> None:
        with outside_scopes():
            self._core.finish_pending()

    def _warn_of_going_back(self, step: int) -> None:
        highest = max(self._folders.steps(), default=step)
        if highest <= step or self._warned_of_going_back:
            return
        self._warned_of_going_back = True
        note = "" if self._keep is None else f", and keep={self._keep} counts saves, not steps"
        _log.warning(
            "step %d is saved in %s, which already has step %d. Checkpoints are ordered by time of "
            "saving: step %d is now the latest%s. Give a new run its own directory",
            step,
            self.directory,
            highest,
            step,
            note,
        )

    def _hold(self) -> None:
        """On rank 0: lock the directory and remove the files of unfinished saves and removals."""
        with make_folder(self.directory) as folder:
            if self._lock is None or not self._lock.is_held:
                self._lock = FolderLock(self.directory, "saves checkpoints")
            committed = set(self._folders.steps())
            for name in folder.names():
                step = step_of(name)
                if step is not None and step not in committed:
                    self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that no one sees a part. Other files stay."""
        path = self._folders.path(step)
        try:
            with CheckpointFolder(path) as folder:
                if folder.has(MANIFEST):
                    folder.remove(MANIFEST)
                    folder.sync()
                folder.sweep(None)
                if folder.has(LOCK):  # left by a killed process; else `FolderLock` raises
                    FolderLock(path, "saves a checkpoint").release()
            with contextlib.suppress(OSError):
                os.rmdir(path)
        except CheckpointError as error:
            _log.warning("an old checkpoint cannot be removed: %s", error)

    # -- restoring ---------------------------------------------------------------------------------

    def restore_latest(
        self,
        *,
        restore_policy: str = "same_rank_or_initial",
        partial: bool = False,
        timeout: float | None = None,
    ) -> str | None:
        """Restore the latest save that is complete. Collective.

        Rank 0 finds it, and all ranks restore that one. It logs a warning for each later one that
        it cannot use: the manifest cannot be read, or a file is missing or has another length.

        Args:
            restore_policy: As for `Checkpoint.restore`.
            partial: As for `Checkpoint.restore`.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Returns:
            Path of the restored checkpoint; None if there is none.

        Raises:
            CheckpointError: As for `Checkpoint.restore`; or no existing checkpoint is complete.
                `checkpoints` lists the others.
        """
        communicator = self._core.collect().group
        if isinstance(communicator, SoloGroup):
            options = RestoreOptions(restore_policy, timeout, partial)
            return self._core.restore(None, self._latest_whole, options)
        self._finish_pending()
        mine: CheckpointError | None = None

        def look() -> list[Any]:
            nonlocal mine
            try:
                return [None, self._latest_whole() if communicator.member_rank == 0 else None]
            except CheckpointError as error:
                mine = error
                return [failure_of(error), None]

        failure, path = gather(communicator, "checkpoint latest", look, timeout)[0]
        if failure is not None:
            raise_failures({communicator.members[0]: failure}, mine, "nothing was restored")
        if path is not None:
            self._checkpoint.restore(
                path, restore_policy=restore_policy, partial=partial, timeout=timeout
            )
        found: str | None = path
        return found

    def _latest_whole(self) -> str | None:
        path, faults = self._folders.latest()
        if path is None and faults:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be restored: {'; '.join(faults[:8])}. "
                f"Repair one, or remove their folders and start from the beginning"
            )
        for fault in faults:
            _log.warning("restore_latest uses %s; another one is damaged: %s", path, fault)
        return path

    def _communicator(self) -> CheckpointGroup:
        """Return the group of the checkpoint, cached until a shutdown or a new object."""
        state = joined(), len(self._core.objects)
        if self._group is None or self._group[0] != state:
            self._group = state, self._core.collect().group
        return self._group[1]

    # -- stopping ----------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask for a stop from this rank, as SIGTERM does; for notices of another kind. Local."""
        self._stop_notice.is_requested = True

    def should_stop(self, timeout: float | None = None) -> bool:
        """Return whether any rank has received a stop request. Collective.

        All ranks return the same at the same call. It also commits a save with `async_op=True` once
        all ranks have written their parts. Call it once in every step, on every rank:

            for step in range(first, last):
                train()
                if manager.should_stop():
                    manager.stop(step)

        Args:
            timeout: Seconds; None means the job's default.

        Cost: One all-reduce of two bytes at every `check_every`-th call.
        """
        communicator = self._communicator()
        self._checks += 1
        if not self._must_stop and self._checks % self._check_every == 0:
            pending = self._core.pending
            is_writing = pending is not None and not pending.done()
            must_stop, some_write = int(self._stop_notice.is_requested), int(is_writing)
            if not isinstance(communicator, SoloGroup):
                must_stop, some_write = _most(communicator, [must_stop, some_write], timeout)
            self._must_stop = bool(must_stop)
            if pending is not None and not some_write:
                self._core.finish_pending()
        return self._must_stop

    def stop(
        self, step: int | None = None, metric: Any = None, timeout: float | None = None
    ) -> NoReturn:
        """Save, leave the job and exit with code 75, which means "run me again". Collective.

        A step that has just been saved is not saved again, unless something was restored since.

        Args:
            step: As for `save`.
            metric: As for `save`.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            SystemExit: Always, with code 75, unless the save fails.
        """
        self._finish_pending()
        if step is None or not self._is_saved(step, metric):
            path = self.save(step, metric, timeout=timeout)
        else:
            path = self._folders.path(step)
        rank = self._communicator().rank
        self._stop_notice.end()
        self.close()
        shutdown()
        if rank == 0:
            _log.warning("stopped as requested; restore %s to continue", path)
        raise SystemExit(EXIT_CODE)

    def _is_saved(self, step: int, metric: Any) -> bool:
        if self._saved is None:
            return False
        *saved, restored = self._saved
        is_same = saved == [step, checked_metric(metric)]
        return is_same and restored is self._core.waiting


def _most(communicator: Communicator, mine: list[int], timeout: float | None) -> list[int]:
    flags = np.array(mine, np.uint8)
    check = partial(AllReduceCall, communicator, flags, "max", name="should_stop")
    largest: list[int] = communicator.perform("should_stop", check, timeout).tolist()
    return largest
