"""One save, from the agreement of the ranks to the commit.

1. All ranks compare their leaves. Rank 0 creates and locks the folder and chooses the identity.
2. Each rank takes snapshots, arrays that never change, so the program can continue.
3. Each rank writes its shard. `write` sends nothing and may run in a thread.
4. All ranks exchange their results in `commit`. If all succeeded, rank 0 writes the manifest.

Every rank makes the same number of calls, whatever happens to its files. `PendingSave` is a save
that continues in a thread.

Rank 0 saves server-side variables alone; the same call of another worker returns at once
(`ChiefSave`).
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import math
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import current
from syncvar.checkpoint.checkpoint_format import (
    DIGEST_BYTES,
    FORMAT,
    LOCK,
    MANIFEST,
    Manifest,
    digest_of,
    header_bytes,
    itemsize_of,
    shard_name,
)
from syncvar.checkpoint.checkpoint_reader import bytes_of, read_manifest
from syncvar.checkpoint.folder import CheckpointFolder, FolderLock, make_folder
from syncvar.checkpoint.save_plan import (
    LeafHeader,
    SaveLayout,
    entries_of,
    failure_of,
    lay_out,
    raise_failures,
    shard_of,
)
from syncvar.checkpoint.trackables import SoloGroup, gather
from syncvar.core.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    MismatchError,
    NotFound,
    TransportError,
    UsageError,
)
from syncvar.core.progress_line import size_text, work_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from syncvar.checkpoint.checkpoint_format import Label
    from syncvar.checkpoint.trackables import CheckpointGroup, Leaf

# Advice for a block of `sv.uneven` that some ranks have left.
SINGLE_RANK_ADVICE = "let one rank write alone: sv.save(path, …)"
_CHUNK = 1 << 20  # bytes that are digested and written while they are in the cache
_NOTHING = "nothing was saved, and the previous checkpoint is unchanged"
_log = logging.getLogger("syncvar")


class SaveOperation:
    """A save on which the ranks have agreed; `Checkpoint` and `PendingSave` drive it.

    `refused` is the error of an object that cannot be saved, reported to the other ranks. Ranks
    agree on step and metric of `label`; rank 0 has the number. Rank 0 calls `guard` before any
    file changes. On rank 0, `pushes` is rank -> number of its pushes to servers that the values
    include.
    """

    def __init__(
        self,
        leaves: list[Leaf],
        refused: Exception | None,
        communicator: CheckpointGroup,
        path: str,
        label: Label,
        timeout: float | None,
        guard: Callable[[], None] | None = None,
    ) -> None:
        communicator.require_all("saving a checkpoint", SINGLE_RANK_ADVICE)
        self.path, self._label = path, label
        self.pushes: dict[int, int] = {}
        # A worker that saves alone need not be initialized.
        self._context = None if isinstance(communicator, SoloGroup) else current()
        self._communicator = communicator
        self._rank = communicator.member_rank
        self._timeout = timeout
        self._lock: FolderLock | None = None
        self._identity = ""
        self._is_written = False
        self._arrays: dict[str, NDArray[Any]] = {}
        try:
            self._layout = self._agree(leaves, refused, guard)
            by_key = {leaf.key: leaf for leaf in leaves}
            self._arrays.update({key: by_key[key].snapshot() for key in sorted(by_key)})
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock and the values; no commit is possible afterwards."""
        self._arrays.clear()
        if self._lock is not None:
            self._lock.release()

    def _agree(
        self, leaves: list[Leaf], refused: Exception | None, guard: Callable[[], None] | None
    ) -> SaveLayout:
        communicator = self._communicator
        mine: CheckpointError | None = None

        def describe() -> list[Any]:
            nonlocal mine
            if refused is not None:
                raise refused
            headers = {leaf.key: leaf.describe(communicator) for leaf in leaves}
            if len(headers) != len(leaves):
                counts = collections.Counter(leaf.key for leaf in leaves)
                twice = min(key for key, count in counts.items() if count > 1)
                raise ConfigError(
                    f"two objects of a checkpoint have the same key {twice!r}: rename one of them"
                )
            folder: list[Any] = ["", None]  # (identity, failure) of rank 0
            if self._rank == 0:
                try:
                    if guard is not None:
                        guard()
                    folder[0] = self._prepare_folder(_estimate(headers, communicator.size))
                except CheckpointError as error:
                    mine = error
                    folder[1] = failure_of(error)
            step, metric, _ = self._label
            rated = None if metric is None else repr(metric)
            return [self.path, step, rated, {key: [*one] for key, one in headers.items()}, folder]

        everyone = gather(communicator, "checkpoint save", describe, self._timeout)
        self._identity, failure = everyone[0][4]
        if failure is not None:
            raise_failures({communicator.members[0]: failure}, mine, _NOTHING)
        self._require_same([one[:3] for one in everyone])
        return lay_out(
            [{key: LeafHeader(*one) for key, one in rank[3].items()} for rank in everyone],
            communicator.members,
        )

    def _prepare_folder(self, nbytes: int) -> str:
        """Create and lock the folder, remove an unfinished save, and return a new identity."""
        with make_folder(self.path) as folder:
            self._lock = FolderLock(self.path, "saves a checkpoint")
            try:
                folder.sweep(read_manifest(folder).identity)
            except NotFound:
                folder.sweep(None)
            except CheckpointError:
                pass  # keep a damaged checkpoint for inspection; the commit replaces it
            folder.require_room(nbytes)
        return secrets.token_hex(8)

    def _require_same(self, saves: list[Any]) -> None:
        if any(one != saves[0] for one in saves):
            members = self._communicator.members
            table = {
                rank: f"path {path!r:.200}, step {step}, metric {metric}"
                for rank, (path, step, metric) in zip(members, saves, strict=True)
            }
            raise MismatchError("the ranks do not make the same save; nothing was written", table)

    # -- writing: no calls of the group ------------------------------------------------------------

    def write(self) -> list[Any]:
        """Write this rank's shard; return the record that `commit` needs."""
        layout, rank = self._layout, self._rank
        parts = [(part.key, part.start, part.stop) for part in layout.parts if part.rank == rank]
        own = [key for key in self._arrays if key in layout.own and self._arrays[key].size]
        parts += [(key, 0, self._arrays[key].size) for key in own]
        try:
            folder = CheckpointFolder(self.path)
        except NotFound:
            raise self._not_shared() from None
        with folder:
            if not folder.has(LOCK):
                raise self._not_shared()
            if not parts:
                return [[], {}]
            return self._write_shard(folder, parts)

    def _write_shard(
        self, folder: CheckpointFolder, parts: list[tuple[str, int, int]]
    ) -> list[Any]:
        arrays, described = [], []
        for key, start, stop in parts:
            array = self._arrays[key]
            flat = array.reshape(-1)[start:stop]
            arrays.append(flat)
            shape = array.shape if flat.size == array.size else flat.shape
            described.append((key, array.dtype.name, shape))
        about = {"format": FORMAT, "identity": self._identity, "rank": str(self._rank)}
        header = header_bytes(described, about)[0]
        digests: dict[str, str] = {}
        line = work_line(self._rank)
        title, total = f"saving {self.path}:", sum(flat.nbytes for flat in arrays)

        def stream() -> Iterator[memoryview]:
            yield memoryview(header)
            done = 0
            for (key, _, _), flat in zip(parts, arrays, strict=True):
                digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
                data = bytes_of(flat)
                for start in range(0, data.nbytes, _CHUNK):
                    if line.is_due():
                        line.show(f"{title} {size_text(done + start, total)}")
                    chunk = data[start : start + _CHUNK]
                    digest.update(chunk)
                    yield chunk
                done += data.nbytes
                digests[key] = digest.hexdigest()

        name = shard_name(self._identity, self._rank, self._communicator.size)
        try:
            nbytes = folder.write(name, stream(), self._identity)
        except BaseException:
            folder.remove(name)  # it exists if only the sync of the folder failed
            raise
        finally:
            line.close()
        self._is_written = True
        return [[nbytes, digest_of(header)], digests]

    def _not_shared(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} on this host is not the folder that rank {self._communicator.members[0]} "
            "has locked: all ranks of a checkpoint must share its folder. Pass an absolute path on "
            "a shared file system"
        )

    # -- committing --------------------------------------------------------------------------------

    def commit(self, written: list[Any] | CheckpointError, timeout: float | None = None) -> str:
        """Exchange the results of `write`, and commit if all ranks succeeded. Collective."""
        if self._context is not None and self._context.is_closed:
            self.discard()
            raise UsageError(
                f"this process left the job (sv.shutdown) before it committed the checkpoint "
                f"{self.path}, so the checkpoint does not exist: call wait() on the result of "
                f"save(…, async_op=True) before sv.shutdown()"
            )
        communicator = self._communicator
        communicator.require_all("committing a checkpoint", SINGLE_RANK_ADVICE)
        timeout = self._timeout if timeout is None else timeout
        mine = written if isinstance(written, CheckpointError) else None
        result = [None, written] if mine is None else [failure_of(mine), None]
        try:
            everyone = gather(communicator, "checkpoint written", lambda: result, timeout)
            results = zip(communicator.members, everyone, strict=True)
            failures = {rank: one[0] for rank, one in results if one[0] is not None}
            if failures:
                self._discard()
                raise_failures(failures, mine, _NOTHING)
            # From here on the shard may be part of a committed checkpoint: never remove it.
            mine = None

            def seal() -> Any:
                nonlocal mine
                if self._rank != 0:
                    return None
                try:
                    self._write_manifest([one[1] for one in everyone])
                except CheckpointError as error:
                    mine = error
                    return [failure_of(error), self._is_visible()]
                return None

            sealed = gather(communicator, "checkpoint committed", seal, timeout)[0]
            if sealed is not None:
                failure, is_visible = sealed
                if not is_visible:
                    self._discard()
                state = "it may be missing after a power cut" if is_visible else _NOTHING
                raise_failures({communicator.members[0]: failure}, mine, state)
        finally:
            self.release()
        return self.path

    @property
    def failure(self) -> TransportError | None:
        """Error that ended all calls of the group, such as a failed rank; None without one."""
        engine = None if self._context is None else self._context.engine
        failure = None if engine is None else engine.failure
        return failure if isinstance(failure, TransportError) else None

    @property
    def is_speaker(self) -> bool:
        """Whether this is the first surviving rank of the save, which writes the log line."""
        lost = getattr(self.failure, "rank", None)
        left = [rank for rank in self._communicator.members if rank != lost]
        return left[:1] == [self._communicator.members[self._rank]]

    def discard(self) -> None:
        """Abandon a save that was not committed. Sends nothing."""
        self._discard()
        self.release()

    def _discard(self) -> None:
        if self._is_written:
            self._is_written = False
            name = shard_name(self._identity, self._rank, self._communicator.size)
            with contextlib.suppress(CheckpointError), CheckpointFolder(self.path) as folder:
                folder.remove(name)

    def _write_manifest(self, written: list[Any]) -> None:
        found = enumerate(shard_of(one[0]) for one in written)
        shards = {rank: shard for rank, shard in found if shard is not None}
        entries = entries_of(self._layout, [one[1] for one in written])
        size = self._communicator.size
        manifest = Manifest(self._identity, size, self._label, shards, entries, self.pushes)
        with CheckpointFolder(self.path) as folder:
            folder.write(MANIFEST, [memoryview(manifest.to_bytes())], self._identity)
            with contextlib.suppress(CheckpointError):
                folder.sweep(self._identity)  # remove the shards of the previous checkpoint

    def _is_visible(self) -> bool:
        """Return whether the manifest exists although `write` failed: only the folder sync did."""
        try:
            with CheckpointFolder(self.path) as folder:
                return read_manifest(folder).identity == self._identity
        except CheckpointError:
            return False


def _estimate(headers: dict[str, LeafHeader], ranks: int) -> int:
    """Estimate the bytes that all ranks will write from the leaves of this rank."""
    sizes = {key: math.prod(one.shape) * itemsize_of(one.dtype) for key, one in headers.items()}
    return sum(size * (ranks if headers[key].own else 1) for key, size in sizes.items())


def checked_metric(metric: Any) -> float | None:
    """Return a metric as a float, or None."""
    if metric is None:
        return None
    try:
        return float(metric)
    except (TypeError, ValueError):
        raise ConfigError(
            f"metric must be a number, not {metric!r:.60}: write manager.save(metric=float(loss))"
        ) from None


class ChiefSave:
    """A save by rank 0 as another worker sees it; has the methods of `SaveOperation`."""

    failure: TransportError | None = None
    is_speaker = False

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self) -> list[Any]:
        """Write nothing."""
        return []

    def commit(self, written: Any, timeout: float | None = None) -> str:
        """Return the path."""
        del written, timeout
        return self.path

    def discard(self) -> None:
        """Do nothing."""


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
        self._saving, self._after = saving, after
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
