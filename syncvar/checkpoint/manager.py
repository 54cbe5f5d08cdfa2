"""`CheckpointManager`: the checkpoints of a run, one folder for each step; which stay, which is the latest and the best."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

import numpy as np

from syncvar.bootstrap.process import joined, shutdown
from syncvar.checkpoint.checkpoint import Checkpoint
from syncvar.checkpoint.file_names import LOCK, MANIFEST, checked_path, step_name, step_of
from syncvar.checkpoint.folder import CheckpointFolder, make_folder
from syncvar.checkpoint.folder_lock import Lock
from syncvar.checkpoint.manifest import Label
from syncvar.checkpoint.preemption import EXIT_CODE, Notice
from syncvar.checkpoint.retention import best_of, superfluous
from syncvar.checkpoint.save import checked_metric
from syncvar.checkpoint.save_plan import failure_of, raise_failures
from syncvar.checkpoint.step_folders import StepFolders
from syncvar.checkpoint.trackables import SoloGroup, gathered, outside
from syncvar.collectives.all_reduce import reduce_request
from syncvar.core.errors import CheckpointError, ConfigError, MismatchError
from syncvar.core.lazy_import import MigrationHintsMixin, unexpected

if TYPE_CHECKING:
    from syncvar.checkpoint.async_save import PendingSave
    from syncvar.checkpoint.trackables import Together
    from syncvar.runtime.communicator import Communicator


_log = logging.getLogger("syncvar")
_BEST = ("min", "max")
_KEPT = 5


class CheckpointManager(MigrationHintsMixin):
    """The checkpoints of a run, in folders `step-…` of one directory.

    From its first save on rank 0 holds the directory's lock: a second job that saves there is refused, jobs that only restore are not.
    Old checkpoints are removed after a new one is committed. Their order is that of saving, whatever
    their steps are: after a return to step 50, its save is the latest. It is a context manager;
    `close` gives the lock back.

    Args:
        checkpoint: What is saved.
        directory: Where; made at the first save. All ranks must see it.
        keep: So many of the latest saves stay; None: all. `max_to_keep=`, as tf.train writes it, is taken as well.
        best: "min" or "max": the checkpoint with the smallest or largest `metric` stays too.
        on_preemption: Take SIGTERM for a notice that this process will be ended soon; see `should_stop`.
        check_every: Ranks ask each other at every so many calls of `should_stop`.

    Raises:
        ConfigError: A wrong argument.
        UsageError: `on_preemption` outside the main thread.

    Example:
        >>> import syncvar as sv, tempfile
        >>> v = sv.Variable(0.0)
        >>> with tempfile.TemporaryDirectory() as folder, sv.CheckpointManager(sv.Checkpoint(v=v), folder, keep=2) as manager:
        ...     for step in range(5):
        ...         _ = manager.save(step) if v.assign(step) is v else None
        ...     [path[-6:] for path in manager.checkpoints], manager.restore_latest() == manager.latest
        (['000003', '000004'], True)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Any,
        keep: int | None = _KEPT,
        best: str | None = None,
        *,
        on_preemption: bool = False,
        check_every: int = 1,
        **_foreign: int | None,
    ) -> None:
        if "max_to_keep" in _foreign:
            if keep != _KEPT:
                raise ConfigError(
                    f"keep={keep!r:.60} and max_to_keep={_foreign['max_to_keep']!r:.60} are two words for one thing: give keep"
                )
            keep = _foreign.pop("max_to_keep")
        if _foreign:
            raise unexpected(CheckpointManager, _foreign)
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigError(
                f"checkpoint must be a sv.Checkpoint, not a {type(checkpoint).__name__}: sv.Checkpoint(model=…)"
            )
        for name, number in (("keep", keep), ("check_every", check_every)):
            is_count = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            if not is_count and not (name == "keep" and number is None):
                raise ConfigError(
                    f"{name} must be an integer of at least 1{' or None' * (name == 'keep')}, not {number!r:.60}"
                )
        if best is not None and best not in _BEST:
            raise ConfigError(f"best must be 'min', 'max' or None, not {best!r:.60}")
        if not isinstance(on_preemption, bool):
            raise ConfigError(f"on_preemption must be True or False, not {on_preemption!r:.60}")
        self._checkpoint = checkpoint
        self._folders = StepFolders(os.path.abspath(checked_path(directory)))
        self._keep, self._best = keep, best
        self._check_every, self._asked = check_every, 0
        self._must_stop = False
        self._lock: Lock | None = None
        self._saved: tuple[int, float | None, object] | None = (
            None  # step, metric, restore before it
        )
        self._warned_of_going_back = False
        self._notice = Notice(listens=on_preemption)
        weakref.finalize(self, self._notice.close)
        self._group: tuple[Any, Together] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if (
                error[0] is None
            ):  # all ranks leave here together, and a save that nobody has waited for is worth its files
                self._checkpoint._finish_pending()  # noqa: SLF001
        finally:
            self.close()

    def close(self) -> None:
        """Give back the directory's lock, and SIGTERM. Idempotent.

        A save that is pending stays to be waited for; the end of a `with` block that no exception leaves commits it first.
        """
        if self._lock is not None:
            self._lock.release()
        self._notice.close()

    # -- what there is -----------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._folders.directory

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the committed checkpoints, the oldest save first; sends nothing.

        Checkpoints of earlier versions, whose order of saving is not known, come first, by steps.
        """
        return [self._folders.path(kept.step) for kept in self._folders.committed()]

    @property
    def latest(self) -> str | None:
        """Path of the latest save whose files are there, or None; sends nothing."""
        return self._folders.latest()[0]

    @property
    def best(self) -> str | None:
        """Path of the one with the best metric, or None (also where the manager was not told what is best)."""
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
        """Save as a step, then remove what need not stay. Collective, right in every context. Returns the path.

        Args:
            step: Of the program, at least 0; None means one more than that of the latest save. A
                step that is there is replaced. One below a step that is there is saved after a
                warning: it is the latest from then on, and the higher ones are removed before it.
            metric: How good it is, the same on all ranks; NaN is never the best.
            async_op: As `Checkpoint.save`; old checkpoints are removed in `wait`.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            ConfigError: A wrong argument, or something cannot be saved; the others raise MismatchError.
            MismatchError: The ranks pass different steps, metrics or directories.
            CheckpointError: On every rank: the disk is full or fails, or another job saves here. Nothing was saved.

        Cost: as `Checkpoint.save`, and one exchange more.
        """
        communicator = self._checkpoint._collect().group  # noqa: SLF001  (the manager is the checkpoint's other half)
        if isinstance(communicator, SoloGroup) and communicator.rank and step is None:
            raise ConfigError(
                "rank 0 saves what is on servers, and other workers do not know how often it has: say the step, manager.save(step)"
            )
        self._finish_pending()

        def bring() -> list[Any]:
            if step is not None:
                step_name(step)
            rated = checked_metric(metric)
            found = self._folders.committed() if communicator.member_rank == 0 else []
            following = found[-1].step + 1 if found else 0
            return [self.directory, step, None if rated is None else repr(rated), following]

        communicator.require_all(
            "saving a checkpoint", "let one rank write alone: sv.save(path, …)"
        )
        everyone = gathered(communicator, "checkpoint step", bring, timeout)
        if any(one[:3] != everyone[0][:3] for one in everyone):
            table = {
                communicator.members[
                    rank
                ]: f"step {one[1]}, metric {one[2]}, directory {one[0]!r:.200}"
                for rank, one in enumerate(everyone)
            }
            raise MismatchError(
                "the ranks do not make the same save; nothing was written. A metric must be the same everywhere: "
                "strategy.reduce('MEAN', metric, axis=None)",
                table,
            )
        agreed = everyone[0][3] if step is None else step
        rated = checked_metric(metric)
        is_first = communicator.member_rank == 0
        label = Label(agreed, rated, self._folders.next_number() if is_first else 0)
        restored = self._checkpoint._waiting  # noqa: SLF001

        def after() -> None:
            self._saved = agreed, rated, restored
            if is_first:
                self._folders.forget(agreed)
                self._warn_of_going_back(agreed)
                self._remove_superfluous()

        path = self._folders.path(agreed)
        return self._checkpoint._save(  # noqa: SLF001
            path, label, timeout, async_op=async_op, guard=self._hold, after=after
        )

    def _finish_pending(self) -> None:
        """Commit a save that nobody has waited for; it is before what comes now."""
        with outside():
            self._checkpoint._finish_pending()  # noqa: SLF001

    def _warn_of_going_back(self, step: int) -> None:
        highest = max(self._folders.steps(), default=step)
        if highest <= step or self._warned_of_going_back:
            return
        self._warned_of_going_back = True
        stays = "" if self._keep is None else f", and keep={self._keep} counts saves, not steps"
        _log.warning(
            "step %d is saved in %s, which has step %d already. Checkpoints go by the order of "
            "saving: step %d is now the latest%s. If this is a new run, give it a directory of its own",
            step,
            self.directory,
            highest,
            step,
            stays,
        )

    def _hold(self) -> None:
        """Take the directory's lock, on rank 0; remove what unfinished saves and removals left."""
        with make_folder(self.directory) as folder:
            if self._lock is None or not self._lock.is_held:
                self._lock = Lock(self.directory, "saves checkpoints")
            committed = set(self._folders.steps())
            for name in folder.names():
                step = step_of(name)
                if step is not None and step not in committed:
                    self._remove(step)

    def _remove_superfluous(self) -> None:
        for kept in superfluous(self._folders.committed(), self._keep, self._best):
            self._remove(kept.step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint: its manifest first, so that it is never there in part. Other files in the folder stay."""
        path = self._folders.path(step)
        try:
            with CheckpointFolder(path) as folder:
                if folder.has(MANIFEST):
                    folder.remove(MANIFEST)
                    folder.sync()
                folder.sweep(None)
                if folder.has(LOCK):  # of a process that was killed, else this is refused
                    Lock(path, "saves a checkpoint").release()
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
        """Restore the latest save that is whole. Collective. Returns its path, None if there is none.

        Rank 0 looks for it, and all ranks restore that one. It warns of later ones that it cannot
        use: their manifest cannot be read, or a file is missing or has another length.

        Args:
            restore_policy: As `Checkpoint.restore`.
            partial: As `Checkpoint.restore`.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            CheckpointError: As `Checkpoint.restore`, and where there are only checkpoints that
                cannot be used. `checkpoints` lists the others.
        """
        communicator = self._checkpoint._collect().group  # noqa: SLF001
        if isinstance(communicator, SoloGroup):
            return self._checkpoint._restore(  # noqa: SLF001
                None, self._latest_whole, restore_policy, timeout, partial=partial
            )
        self._finish_pending()
        mine: CheckpointError | None = None

        def look() -> list[Any]:
            nonlocal mine
            try:
                return [None, self._latest_whole() if communicator.member_rank == 0 else None]
            except CheckpointError as error:
                mine = error
                return [failure_of(error), None]

        failure, path = gathered(communicator, "checkpoint latest", look, timeout)[0]
        if failure is not None:
            raise_failures({communicator.members[0]: failure}, mine, "nothing was restored")
        if path is not None:
            self._checkpoint.restore(
                path, restore_policy=restore_policy, partial=partial, timeout=timeout
            )
        found: str | None = path
        return found

    def _latest_whole(self) -> str | None:
        """Return the latest save that is whole, None if there is no checkpoint; warn of later ones.

        Raises:
            CheckpointError: None of them is whole.
        """
        path, faults = self._folders.latest()
        if path is None and faults:
            raise CheckpointError(
                f"{self.directory} has no checkpoint that can be restored: {'; '.join(faults[:8])}. "
                f"Repair one, or remove their folders and start from the beginning"
            )
        for fault in faults:
            _log.warning(
                "restore_latest takes %s and passes over one that is damaged: %s", path, fault
            )
        return path

    def _communicator(self) -> Together:
        """Return the group of the checkpoint, which is looked for again only where something has changed."""
        state = joined(), len(self._checkpoint._objects)  # noqa: SLF001
        if self._group is None or self._group[0] != state:
            self._group = state, self._checkpoint._collect().group  # noqa: SLF001
        return self._group[1]

    # -- stopping ----------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask for a stop from this rank, as SIGTERM does; for notices that come another way. Sends nothing."""
        self._notice.is_given = True

    def should_stop(self, timeout: float | None = None) -> bool:
        """Return whether a rank has been asked to stop: the same answer on all ranks, at the same call. Collective.

        It also commits a save that was started with `async_op=True`, once all ranks have written theirs. Call it once in every step, on every rank:

            for step in range(first, last):
                train()
                if manager.should_stop():
                    manager.stop(step)

        Args:
            timeout: Seconds; None means the job's default.

        Cost: one all-reduce of two bytes at every `check_every`-th call.
        """
        communicator = self._communicator()
        self._asked += 1
        if not self._must_stop and self._asked % self._check_every == 0:
            pending = self._checkpoint._pending  # noqa: SLF001
            is_writing = pending is not None and not pending.done()
            must_stop, somebody_writes = int(self._notice.is_given), int(is_writing)
            if not isinstance(communicator, SoloGroup):
                must_stop, somebody_writes = _most(
                    communicator, [must_stop, somebody_writes], timeout
                )
            self._must_stop = bool(must_stop)
            if pending is not None and not somebody_writes:
                self._checkpoint._finish_pending()  # noqa: SLF001
        return self._must_stop

    def stop(
        self, step: int | None = None, metric: Any = None, timeout: float | None = None
    ) -> NoReturn:
        """Save, leave the job in order and end the process with exit code 75: "run me again". Collective.

        A step that has just been saved is not saved again, unless something was restored since.

        Args:
            step: As `save`.
            metric: As `save`.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            SystemExit: Always, with code 75; unless saving fails.
        """
        self._finish_pending()
        if step is None or not self._is_saved(step, metric):
            path = self.save(step, metric, timeout=timeout)
        else:
            path = self._folders.path(step)
        rank = self._communicator().rank
        self._notice.end()
        self.close()
        shutdown()
        if rank == 0:
            _log.warning("stopped as asked; %s has all that is needed to go on", path)
        raise SystemExit(EXIT_CODE)

    def _is_saved(self, step: int, metric: Any) -> bool:
        """Return whether this was the last save, and nothing was restored since."""
        if self._saved is None:
            return False
        *saved, restored = self._saved
        is_same = saved == [step, checked_metric(metric)]
        return is_same and restored is self._checkpoint._waiting  # noqa: SLF001


def _most(communicator: Communicator, mine: list[int], timeout: float | None) -> list[int]:
    """Return for each place whether a rank has something there."""
    flags = np.array(mine, np.uint8)
    made: list[int] = communicator.perform(
        "should_stop",
        lambda: reduce_request(communicator, flags, "max", name="should_stop"),
        timeout,
    ).tolist()
    return made
