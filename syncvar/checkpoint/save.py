"""One save, from the agreement on what is saved to the commit.

1. All ranks compare what they bring; rank 0 makes the folder, locks it, and says the checkpoint's identity.
2. Each takes its values: arrays that never change, so that the program can go on.
3. Each writes its shard (`write`, which may run in a thread: it sends nothing).
4. All tell each other how that went. If all went well, rank 0 writes the manifest: that is the commit (`commit`).

Every rank makes the same number of calls, whatever happens to its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import current
from syncvar.checkpoint.file_names import LOCK, MANIFEST, shard_name
from syncvar.checkpoint.folder import CheckpointFolder, make_folder
from syncvar.checkpoint.folder_lock import Lock
from syncvar.checkpoint.manifest import DIGEST_BYTES, Manifest, digest_of
from syncvar.checkpoint.safetensors_header import header_bytes, itemsize_of
from syncvar.checkpoint.save_plan import (
    LeafHeader,
    SaveLayout,
    entries_of,
    failure_of,
    lay_out,
    raise_failures,
    shard_of,
)
from syncvar.checkpoint.shard_reader import bytes_of, read_manifest
from syncvar.checkpoint.trackables import SoloGroup, gathered
from syncvar.core.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    NotFound,
    TransportError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from syncvar.checkpoint.manifest import Label
    from syncvar.checkpoint.trackables import Leaf, Together


_CHUNK = 1 << 20  # written and digested while it is in the cache
_NOTHING = "nothing was saved, and what was there before is as it was"


class Saving:
    """A save that has been agreed on.

    Args:
        leaves: What is saved, on this rank.
        refused: Why something that should be saved cannot be, for the others to be told; or None.
        communicator: Of the ranks that save.
        path: The folder.
        label: What the saver calls it; ranks agree on step and metric, rank 0 has the number.
        timeout: Seconds that a call of the group waits.
        pushes: Rank -> how many of its pushes to servers are in what is saved; on rank 0.
        guard: Called on rank 0 before anything is touched; raises CheckpointError.

    Raises:
        ConfigError: Something cannot be saved.
        MismatchError: The ranks save different things.
        CheckpointError: The folder cannot be written to; on every rank.
    """

    def __init__(
        self,
        leaves: list[Leaf],
        refused: Exception | None,
        communicator: Together,
        path: str,
        label: Label,
        timeout: float | None,
        guard: Callable[[], None] | None = None,
        pushes: dict[int, int] | None = None,
    ) -> None:
        communicator.require_all(
            "saving a checkpoint", "let one rank write alone: sv.save(path, …)"
        )
        self.path = path
        self._label = label
        self._pushes = pushes or {}
        self._context = (
            None if isinstance(communicator, SoloGroup) else current()
        )  # who saves alone need not have joined
        self._communicator = communicator
        self._rank = communicator.member_rank
        self._timeout = timeout
        self._lock: Lock | None = None
        self._identity = ""
        self._is_written = False
        self._arrays: dict[str, NDArray[Any]] = {}
        try:
            self._layout = self._agree(leaves, refused, guard)
            by_key = {leaf.key: leaf for leaf in leaves}
            self._arrays.update({key: by_key[key].snapshot() for key in sorted(by_key)})
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Give back the lock and the values; nothing is committed from now on."""
        self._arrays.clear()
        if self._lock is not None:
            self._lock.release()

    def _agree(
        self, leaves: list[Leaf], refused: Exception | None, guard: Callable[[], None] | None
    ) -> SaveLayout:
        communicator = self._communicator
        mine: CheckpointError | None = None

        def bring() -> list[Any]:
            nonlocal mine
            if refused is not None:
                raise refused
            brought = {leaf.key: leaf.bring(communicator) for leaf in leaves}
            if len(brought) != len(leaves):
                twice = sorted(
                    {
                        leaf.key
                        for leaf in leaves
                        if sum(leaf.key == other.key for other in leaves) > 1
                    }
                )
                raise ConfigError(
                    f"two objects of a checkpoint have the same key {twice[0]!r}: give one of them another name"
                )
            said: list[Any] = ["", None]
            if self._rank == 0:
                try:
                    if guard is not None:
                        guard()
                    said = [self._prepare_folder(_estimate(brought, communicator.size)), None]
                except CheckpointError as error:
                    mine = error
                    said = ["", failure_of(error)]
            step, metric, _ = self._label
            return [
                self.path,
                step,
                None if metric is None else repr(metric),
                {key: [*one] for key, one in brought.items()},
                said,
            ]

        everyone = gathered(communicator, "checkpoint save", bring, self._timeout)
        self._identity, failure = everyone[0][4]
        if failure is not None:
            raise_failures({communicator.members[0]: failure}, mine, _NOTHING)
        self._require_same([one[:3] for one in everyone])
        return lay_out(
            [{key: LeafHeader(*one) for key, one in rank[3].items()} for rank in everyone],
            communicator.members,
        )

    def _prepare_folder(self, nbytes: int) -> str:
        """Make the folder, lock it, remove what an unfinished save left there; return a new identity."""
        with make_folder(self.path) as folder:
            self._lock = Lock(self.path, "saves a checkpoint")
            try:
                folder.sweep(read_manifest(folder).identity)
            except NotFound:
                folder.sweep(None)
            except CheckpointError:
                pass  # somebody may want to look at what is damaged; it is replaced by the commit
            folder.require_room(nbytes)
        return secrets.token_hex(8)

    def _require_same(self, saves: list[Any]) -> None:
        if any(one != saves[0] for one in saves):
            table = {
                self._communicator.members[
                    rank
                ]: f"path {path!r:.200}, step {step}, metric {metric}"
                for rank, (path, step, metric) in enumerate(saves)
            }
            raise MismatchError("the ranks do not make the same save; nothing was written", table)

    # -- writing: no calls of the group ------------------------------------------------------------

    def write(self) -> list[Any]:
        """Write this rank's shard; return what the others have to know.

        Raises:
            CheckpointError: It cannot be written; nothing of it is left.
        """
        layout, rank = self._layout, self._rank
        parts = [(part.key, part.start, part.stop) for part in layout.parts if part.rank == rank]
        own = [key for key in self._arrays if key in layout.own and self._arrays[key].size]
        parts += [(key, 0, self._arrays[key].size) for key in own]
        try:
            folder = CheckpointFolder(self.path)
        except NotFound:
            raise self._unseen() from None
        with folder:
            if not folder.has(LOCK):
                raise self._unseen()
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
            described.append(
                (key, array.dtype.name, array.shape if flat.size == array.size else flat.shape)
            )
        about = {
            "format": "syncvar.checkpoint",
            "identity": self._identity,
            "rank": str(self._rank),
        }
        header = header_bytes(described, about)[0]
        digests: dict[str, str] = {}

        def stream() -> Iterator[memoryview]:
            yield memoryview(header)
            for (key, _, _), flat in zip(parts, arrays, strict=True):
                digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
                data = bytes_of(flat)
                for start in range(0, data.nbytes, _CHUNK):
                    chunk = data[start : start + _CHUNK]
                    digest.update(chunk)
                    yield chunk
                digests[key] = digest.hexdigest()

        name = shard_name(self._identity, self._rank, self._communicator.size)
        try:
            nbytes = folder.write(name, stream(), self._identity)
        except BaseException:
            folder.remove(name)  # renamed, but the folder could not be synced: it is thrown away
            raise
        self._is_written = True
        return [[nbytes, digest_of(header)], digests]

    def _unseen(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} on this host is not the folder that rank {self._communicator.members[0]} has locked: a checkpoint "
            f"needs a folder that all its ranks share; give an absolute path on a shared file system"
        )

    # -- committing --------------------------------------------------------------------------------

    def commit(self, written: list[Any] | CheckpointError, timeout: float | None = None) -> str:
        """Tell the others how writing went, and commit if all went well. Collective. Returns the path.

        Args:
            written: What `write` returned or raised.
            timeout: Seconds; None means those of the save.

        Raises:
            CheckpointError: On every rank, if one could not write. What was there before is as it was.
            UsageError: This process has left the job; nothing was saved.
        """
        if self._context is not None and self._context.is_closed:
            self.discard()
            raise UsageError(
                f"this process left the job (sv.shutdown) before the checkpoint {self.path} was committed, so it does not exist: "
                f"call wait() on what save(…, async_op=True) returned before that"
            )
        communicator = self._communicator
        communicator.require_all(
            "committing a checkpoint", "let one rank write alone: sv.save(path, …)"
        )
        timeout = self._timeout if timeout is None else timeout
        mine = written if isinstance(written, CheckpointError) else None
        told = (
            [failure_of(written), None] if isinstance(written, CheckpointError) else [None, written]
        )
        try:
            everyone = gathered(communicator, "checkpoint written", lambda: told, timeout)
            failures = {
                communicator.members[rank]: one[0]
                for rank, one in enumerate(everyone)
                if one[0] is not None
            }
            if failures:
                self._discard()
                raise_failures(failures, mine, _NOTHING)
            # From here on the shard may be part of a committed checkpoint: it is not removed, whatever happens to this rank.
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

            sealed = gathered(communicator, "checkpoint committed", seal, timeout)[0]
            if sealed is not None:
                failure, is_visible = sealed
                if not is_visible:
                    self._discard()
                raise_failures(
                    {communicator.members[0]: failure},
                    mine,
                    "it may not be there" if is_visible else _NOTHING,
                )
        finally:
            self.let_go()
        return self.path

    @property
    def failure(self) -> TransportError | None:
        """Why the ranks can make no more calls, such as the loss of one; None as long as they can."""
        engine = None if self._context is None else self._context.engine
        failure = None if engine is None else engine.failure
        return failure if isinstance(failure, TransportError) else None

    @property
    def is_speaker(self) -> bool:
        """Whether this is the first rank of those that save and are not lost."""
        lost = getattr(self.failure, "rank", None)
        left = [rank for rank in self._communicator.members if rank != lost]
        return left[:1] == [self._communicator.members[self._rank]]

    def discard(self) -> None:
        """Give up a save that nobody committed. Sends nothing."""
        self._discard()
        self.let_go()

    def _discard(self) -> None:
        if self._is_written:
            self._is_written = False
            with (
                contextlib.suppress(CheckpointError),
                CheckpointFolder(self.path) as folder,
            ):  # else it is gone, and the shard with it
                folder.remove(shard_name(self._identity, self._rank, self._communicator.size))

    def _write_manifest(self, written: list[Any]) -> None:
        shards = {
            rank: shard
            for rank, one in enumerate(written)
            if (shard := shard_of(one[0])) is not None
        }
        entries = entries_of(self._layout, [one[1] for one in written])
        size = self._communicator.size
        manifest = Manifest(self._identity, size, self._label, shards, entries, self._pushes)
        with CheckpointFolder(self.path) as folder:
            folder.write(MANIFEST, [memoryview(manifest.to_bytes())], self._identity)
            with contextlib.suppress(CheckpointError):
                folder.sweep(
                    self._identity
                )  # the shards of the checkpoint before: the new one is on the medium

    def _is_visible(self) -> bool:
        """Return whether the manifest is there although writing it failed: only syncing the folder did."""
        try:
            with CheckpointFolder(self.path) as folder:
                return read_manifest(folder).identity == self._identity
        except CheckpointError:
            return False


def _estimate(brought: dict[str, LeafHeader], count: int) -> int:
    """Return about how many bytes all ranks will write, judged by what this one has."""
    sizes = {key: math.prod(one.shape) * itemsize_of(one.dtype) for key, one in brought.items()}
    return sum(size * (count if brought[key].own else 1) for key, size in sizes.items())


def checked_metric(metric: Any) -> float | None:
    """Return a metric as a float, or None.

    Raises:
        ConfigError: It is no number.
    """
    if metric is None:
        return None
    try:
        made = float(metric)
    except (TypeError, ValueError):
        made = math.nan
        if not isinstance(metric, float):
            raise ConfigError(
                f"metric must be a number, not {metric!r:.60}: write manager.save(metric=float(loss))"
            ) from None
    return made
