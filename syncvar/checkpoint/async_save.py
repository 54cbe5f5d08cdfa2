"""Saves that continue in a thread: `PendingSave`, the result of `save(…, async_op=True)`."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import CheckpointError, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.checkpoint.chief_restore import ChiefSave
    from syncvar.checkpoint.save import SaveOperation


_log = logging.getLogger("syncvar")


def write_now(saving: SaveOperation | ChiefSave) -> list[Any] | CheckpointError:
    """Write this rank's part; return its record, or an error as a CheckpointError."""
    try:
        return saving.write()
    except CheckpointError as error:
        return error
    except Exception as error:
        failure = CheckpointError(f"writing {saving.path} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


class PendingSave:
    """A save that continues in a thread; `save(…, async_op=True)` returns it.

    The values have been copied, and the thread only writes them; it sends nothing. The commit needs
    all ranks. It happens in `wait`, in `should_stop` of a manager, or at the start of the next save
    or restore of the same checkpoint. A save without a commit does not exist: at the end of the
    program its files are removed, with a warning.

    Example:
        >>> import syncvar as sv, tempfile
        >>> checkpoint = sv.Checkpoint(v=sv.Variable([1.0, 2.0]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = checkpoint.save(folder + "/a", async_op=True)
        ...     checkpoint.v.assign([3.0, 4.0]).numpy()  # does not change the saved value
        ...     _ = pending.wait()
        ...     checkpoint.restore(folder + "/a")
        array([3., 4.], dtype=float32)
        >>> checkpoint.v.numpy()
        array([1., 2.], dtype=float32)
    """

    def __init__(
        self, saving: SaveOperation | ChiefSave, rank: int, after: Callable[[], None] | None = None
    ) -> None:
        self._saving = saving
        self._after = after
        self._written: list[list[Any] | CheckpointError] = []
        self._path: str | None = None
        self._error: BaseException | None = None
        self._is_settled = False
        written = self._written
        self._thread = threading.Thread(
            target=lambda: written.append(write_now(saving)), name=f"syncvar-checkpoint-{rank}"
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _give_up, saving, self._thread, os.getpid())

    @property
    def path(self) -> str:
        """Folder of the checkpoint."""
        return self._saving.path

    def wait(self, timeout: float | None = None) -> str:
        """Finish writing and commit. Collective: every rank calls it at the same point.

        Args:
            timeout: Seconds for this rank's writing, and for each of the two calls of the group.
                None means no limit for writing, and the timeout of the save for the calls.

        Returns:
            The path.

        Raises:
            CheckpointError: On every rank, if one could not write; nothing was saved.
            DeadlineExceeded: The disk was too slow; call it again.

        Cost: Two exchanges of a few hundred bytes.
        """
        if not self._is_settled:
            began = time.monotonic()
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"this rank was still writing {self.path} after {time.monotonic() - began:.1f} "
                    "s of wait(); call wait again, with a longer timeout",
                    (),
                    timeout or 0.0,
                )
            self._settle(timeout)
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _settle(self, timeout: float | None) -> None:
        self._finalizer.detach()
        self._is_settled = True
        try:
            self._path = self._saving.commit(self._written[0], timeout)
        except BaseException as error:
            self._error = error
            raise
        if self._after is not None:
            self._after()

    def done(self) -> bool:
        """Return whether this rank has written its part, so that `wait` need not. Local."""
        return self._is_settled or not self._thread.is_alive()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Call `wait`, and return its error or None."""
        try:
            self.wait(timeout)
        except Exception as error:
            return error
        return None


def _give_up(saving: SaveOperation | ChiefSave, thread: threading.Thread, process: int) -> None:
    """Remove the files of a save without a commit."""
    if os.getpid() != process:
        return
    thread.join()
    saving.discard()
    if saving.failure is not None:
        if saving.is_speaker:
            _log.warning(
                "the save of the checkpoint %s ended without a commit: %s. "
                "The checkpoints before it are complete",
                saving.path,
                saving.failure,
            )
        return
    _log.warning(
        "the checkpoint %s was never committed, so it does not exist: call wait() on the result of "
        "save(…, async_op=True), on every rank, before the program ends",
        saving.path,
    )
