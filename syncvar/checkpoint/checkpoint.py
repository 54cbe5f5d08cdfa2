"""`Checkpoint`: objects under names, saved and restored together."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Literal, overload

from syncvar.checkpoint.async_save import PendingSave, write_now
from syncvar.checkpoint.chief_restore import SavedElsewhere, restore_for_all
from syncvar.checkpoint.file_names import checked_path
from syncvar.checkpoint.manifest import Label
from syncvar.checkpoint.optimizer_state import SlotLeaf
from syncvar.checkpoint.restore import (
    Found,
    check_arguments,
    is_local,
    restore_leaves,
    stage_leaves,
)
from syncvar.checkpoint.save import Saving
from syncvar.checkpoint.server_leaves import ServerOptimizerLeaf, ServerVariableLeaf, sorted_out
from syncvar.checkpoint.trackables import (
    SoloGroup,
    VariableLeaf,
    checked_object,
    is_nested,
    leaf_of,
    outside,
)
from syncvar.core.errors import ConfigError
from syncvar.optimizers import Optimizer
from syncvar.parameter_server.server_variables import ServerVariable
from syncvar.strategies.contexts import get_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncvar.checkpoint.server_leaves import Collected, Walked
    from syncvar.checkpoint.trackables import Leaf, Together
    from syncvar.runtime.communicator import Communicator


_NAME = re.compile(r"[^\W_][^/\0]{0,127}")
_log = logging.getLogger("syncvar")


class _Waiting:
    """Entries of a restored checkpoint that wait for their objects.

    Args:
        path: Of the checkpoint.
        identity: Which one it was.
        policy: The restore policy.
        timeout: Seconds.
        keys: Of the entries; shared by nested checkpoints.
        prefix: What the keys have before those of this checkpoint.
        partial: As for `restore`.
    """

    def __init__(
        self,
        path: str,
        identity: str,
        policy: str,
        timeout: float | None,
        keys: set[str],
        prefix: str = "",
        *,
        partial: bool,
    ) -> None:
        self.path, self.identity, self.policy, self.timeout = path, identity, policy, timeout
        self.keys, self.prefix, self.partial = keys, prefix, partial
        self.is_news = not partial  # the first save without these entries says so

    def under(self, key: str) -> _Waiting:
        """Return what waits for the checkpoint nested under a key."""
        prefix = f"{self.prefix}{key}/"
        given = self.path, self.identity, self.policy, self.timeout, self.keys, prefix
        return _Waiting(*given, partial=self.partial)


class Checkpoint:
    """Objects under names, saved and restored together.

    It takes variables, optimizers, iterators and other objects with `state_dict()` and `load_state_dict(state)` (modules, optimizers
    and schedulers of PyTorch), `numpy.random.Generator`, checkpoints, dicts, lists and tuples of these, and plain data (numbers,
    texts, arrays, tensors, dates, lists, sets and dicts of them).
    `checkpoint.name = object` adds one later. Plain data belong to the checkpoint itself: `checkpoint.epoch` is what was restored.

    A checkpoint is a folder: a shard of each rank, in the safetensors format, and a manifest, which is written last and is the
    commit. It is restored on any number of replicas, and into variables of any mode: an ON_WRITE value as it is; ON_READ by what
    reading gives (a sum is split again, exactly); NONE, and ON_READ without aggregation, replica by replica. States and plain data
    are saved once where all ranks have the same, else each rank's own. Nothing is pickled.

    The ranks that save are the replicas of its variables (without variables: those of the strategy in force). All must have the
    same objects under the same names; NONE variables may exist on some only. Where all its variables are on servers, rank 0 saves
    alone, from one version of all of them, while the others go on: their calls return at once. Rank 0 restores them, as one
    transaction, and the others wait for that.

    Args:
        objects: By name.

    Raises:
        ConfigError: An object that cannot be saved, or a name that is taken by a method.

    Example:
        >>> import syncvar as sv, tempfile
        >>> checkpoint = sv.Checkpoint(v=sv.Variable([1.0, 2.0]), epoch=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(folder + "/first")
        ...     _ = checkpoint.v.assign([0.0, 0.0])
        ...     checkpoint.epoch = 0
        ...     checkpoint.restore(path)
        >>> checkpoint.v.numpy(), checkpoint.epoch
        (array([1., 2.], dtype=float32), 3)
    """

    _objects: dict[str, Any]
    _waiting: _Waiting | None
    _pending: PendingSave | None

    def __init__(self, **objects: Any) -> None:
        self.__dict__.update(_objects={}, _waiting=None, _pending=None)
        for name, value in objects.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"<sv.Checkpoint of {', '.join(self._objects) or 'nothing'}>"

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(
                f"the checkpoint has no object {name!r}; it has {', '.join(objects) or 'none'}"
            )
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not _NAME.fullmatch(name) or hasattr(type(self), name):
            why = (
                "is a method of checkpoints"
                if hasattr(type(self), name)
                else "is no name: up to 128 characters, no / in it, none of _ first"
            )
            raise ConfigError(f"{name!r} {why}; give the object another name")
        if not isinstance(value, Checkpoint) and not is_nested(value):
            checked_object(name, value)
        before = self._objects.copy()
        self._objects[name] = value
        try:
            if self._waiting is not None:
                self._restore_late()
                self._follow(name, value)
        except BaseException:
            self._objects.clear()
            self._objects.update(before)
            raise

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._objects[name]

    # -- saving ------------------------------------------------------------------------------------

    @overload
    def save(
        self, path: Any, *, async_op: Literal[False] = False, timeout: float | None = None
    ) -> str: ...

    @overload
    def save(
        self, path: Any, *, async_op: Literal[True], timeout: float | None = None
    ) -> PendingSave: ...

    def save(
        self, path: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> str | PendingSave:
        """Save everything. Collective, right in every context. Returns the path.

        Atomic: `path` holds the checkpoint that was there before until the new one is complete and on the medium, whatever
        happens meanwhile. One job at a time writes a folder, which all ranks must see.

        Args:
            path: The folder; made if need be.
            async_op: Take the values now and return a `PendingSave`; a thread writes them, `wait` commits.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            ConfigError: Something cannot be saved (its name is given); the others raise MismatchError.
            MismatchError: The ranks save different objects, or to different paths.
            CheckpointError: On every rank: the disk is full or fails, or another job writes there. Nothing was saved.

        Cost: three exchanges of descriptions (some 100 bytes for each object and rank), one transfer for each ON_READ variable
            that is combined. Each rank writes 1/N of the values, and its own copies; nothing is copied in memory.
        """
        where, refused = _path_or_error(path)
        return self._save(where, Label(), timeout, async_op=async_op, refused=refused)

    def _save(
        self,
        path: str,
        label: Label,
        timeout: float | None,
        *,
        async_op: bool,
        guard: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        refused: Exception | None = None,
    ) -> str | PendingSave:
        leaves, communicator, missing, there, unsaved = self._collect()
        leaves = [leaf for leaf in leaves if not isinstance(leaf, SlotLeaf) or leaf.is_present]
        refused = refused or missing or unsaved
        with outside():
            self._finish_pending()
            waiting = self._waiting
            if waiting is not None and waiting.is_news and waiting.keys and communicator.rank == 0:
                waiting.is_news = False
                _log.warning(
                    "%d entries of the checkpoint that was restored from %s wait for their objects, and are not part of %s: %s",
                    len(waiting.keys),
                    waiting.path,
                    path,
                    ", ".join(sorted(waiting.keys)[:8]),
                )
            saving: Saving | SavedElsewhere
            if refused is None and isinstance(communicator, SoloGroup) and communicator.rank:
                saving = SavedElsewhere(path)
            else:
                pushes: dict[int, int] = {}
                if there is not None and communicator.member_rank == 0 and refused is None:
                    try:
                        on_servers, pushes = there.taken(timeout)
                        leaves = sorted([*leaves, *on_servers], key=lambda leaf: leaf.key)
                    except Exception as error:  # told to the other ranks where there are some
                        refused = error
                saving = Saving(leaves, refused, communicator, path, label, timeout, guard, pushes)
            if async_op:
                pending = PendingSave(saving, communicator.member_rank, after)
                self.__dict__["_pending"] = pending
                return pending
            try:
                written = write_now(saving)
            except (
                BaseException
            ):  # the program is being ended: what was written must not lie around, or be locked
                saving.discard()
                raise
            saving.commit(written)
            if after is not None:
                after()
            return path

    def _finish_pending(self) -> None:
        """Commit the save that was started before, if nobody has waited for it; its error belongs to its handle."""
        pending, self.__dict__["_pending"] = self._pending, None
        if pending is not None:
            error = pending.exception()
            if error is not None:
                _log.warning(
                    "the checkpoint %s, which nobody has waited for, failed: %s",
                    pending.path,
                    error,
                )

    # -- restoring ---------------------------------------------------------------------------------

    def restore(
        self,
        path: Any,
        *,
        restore_policy: str = "same_rank_or_initial",
        partial: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Restore everything, or nothing. Collective, right in every context.

        An entry without an object waits until `checkpoint.name = object` adds one; the log names
        it. State of an optimizer needs no such wait: the optimizer keeps it until its first step.
        State belongs to the variable that has the same name in the checkpoint.

        Args:
            path: The folder of the checkpoint.
            restore_policy: What replica r takes of what was saved replica by replica: "same_rank_or_initial": entry r, or
                it keeps what it has; "cycle": entry r modulo the number saved; "error": the numbers must be equal.
            partial: Objects without an entry stay as they are, state of an optimizer without a
                variable or slot is left out, and so is state of another kind of optimizer. Without
                it these three are errors.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            ConfigError: A wrong argument; the others raise MismatchError.
            NotFound: There is no checkpoint; on every rank, as the next two.
            Corrupt: Bytes are not those that were saved.
            CheckpointError: An object has another shape, dtype or kind than its entry, or no entry;
                or the state of an optimizer has no owner.

        Cost: every rank reads all values, and of the copies its own; two exchanges of some bytes.
        """
        where, refused = _path_or_error(path)
        self._restore(where, None, restore_policy, timeout, partial=partial, refused=refused)

    def _restore(
        self,
        path: str | None,
        find: Callable[[], str | None] | None,
        policy: Any,
        timeout: float | None,
        *,
        partial: bool,
        refused: Exception | None = None,
    ) -> str | None:
        """Restore from a path, or, where one worker restores for all, from what `find` finds there; returns the path."""
        collected = self._collect()
        with outside():
            self._finish_pending()
            found_at, found = self._restored(
                collected._replace(refused=refused or collected.refused),
                collected.group,
                path,
                find,
                policy,
                timeout,
                partial=partial,
            )
        if found_at is None:
            return None
        waiting = _Waiting(
            found_at, found.identity, policy, timeout, set(found.left), partial=partial
        )
        self.__dict__["_waiting"] = waiting
        if waiting.keys and not partial and collected.group.rank == 0:
            shown = sorted(waiting.keys)
            _log.warning(
                "%d entries of the checkpoint %s have no object in this program and are not restored: "
                "%s%s. Add the object, checkpoint.name = object, or say that this is meant: "
                "restore(…, partial=True)",
                len(shown),
                found_at,
                ", ".join(shown[:8]),
                ", …" * (len(shown) > 8),
            )
        for name, value in list(self._objects.items()):
            self._follow(name, value)
        return found_at

    @staticmethod
    def _restored(
        collected: Collected,
        group: Together | None,
        path: str | None,
        find: Callable[[], str | None] | None,
        policy: Any,
        timeout: float | None,
        *,
        partial: bool,
        identity: str | None = None,
        prefix: str = "",
    ) -> tuple[str | None, Found]:
        """Restore objects, by the group that they belong to."""
        leaves, _, refused, there, _unsaved = collected
        everything = leaves if there is None else [*leaves, *there.leaves()]
        if isinstance(group, SoloGroup):
            assert there is not None, "whoever restores alone does so for what is on servers"
            check_arguments(policy, partial)
            if refused is not None:
                raise refused

            def stage(where: str) -> tuple[list[tuple[Leaf, Any]], Found]:
                return stage_leaves(
                    everything, group, where, policy, identity, prefix, partial=partial
                )

            return restore_for_all(
                everything,
                there,
                group,
                path,
                find or (lambda: path),
                stage,
                timeout,
                partial=partial,
            )
        assert path is not None, "ranks that restore together agree on the path before"
        last = None if there is None else there.restored_by_all(path, timeout)
        found = restore_leaves(
            everything,
            group,
            path,
            policy,
            timeout,
            partial=partial,
            identity=identity,
            prefix=prefix,
            refused=refused,
            last=last,
        )
        return path, found

    def _restore_late(self) -> None:
        """Restore objects that came after `restore`, from the entries that wait for them."""
        waiting = self._waiting
        if waiting is None or not waiting.keys:
            return
        found = [leaf for name, value in self._objects.items() for leaf in self._walk(name, value)]
        collected = sorted_out(found, _default, prefix=waiting.prefix, only=waiting.keys)
        if not collected.leaves and collected.there is None:
            return
        group = None if collected.there is None and is_local(collected.leaves) else collected.group
        with outside():
            self._restored(
                collected,
                group,
                waiting.path,
                None,
                waiting.policy,
                waiting.timeout,
                partial=waiting.partial,
                identity=waiting.identity,
                prefix=waiting.prefix,
            )
        taken = [*collected.leaves, *([] if collected.there is None else collected.there.leaves())]
        waiting.keys.difference_update(waiting.prefix + leaf.key for leaf in taken)

    def _follow(self, key: str, value: Any) -> None:
        """Let nested checkpoints have the entries that wait for their objects."""
        waiting = self._waiting
        if waiting is None:
            return
        if isinstance(value, Checkpoint):
            value.__dict__["_waiting"] = waiting.under(key)
            for name, inner in list(value._objects.items()):  # noqa: SLF001  (one of its own kind)
                value._follow(name, inner)  # noqa: SLF001
        elif is_nested(value):
            for inner, item in _items(value):
                self._follow(f"{key}/{inner}", item)

    # -- what it holds -----------------------------------------------------------------------------

    def _collect(self) -> Collected:
        """Return everything it holds."""
        leaves: list[Walked] = []
        refused: Exception | None = None
        for name, value in self._objects.items():
            try:
                leaves += list(self._walk(name, value))
            except Exception as error:
                refused = refused or error
        return sorted_out(leaves, _default, refused)

    def _walk(
        self, key: str, value: Any, above: tuple[int, ...] = (), replace: Any = None
    ) -> Iterator[Walked]:
        """Yield the leaves of an object under a key."""
        if id(value) in above:
            raise ConfigError(f"{key!r} holds itself: a checkpoint must not be nested in itself")
        above = (*above, id(value), id(self))
        if isinstance(value, Checkpoint):
            for name, inner in value._objects.items():  # noqa: SLF001  (one of its own kind)
                yield from self._walk(f"{key}/{name}", inner, above, value._replacing(name))  # noqa: SLF001
        elif is_nested(value):
            for name, inner in _items(value):
                yield from self._walk(f"{key}/{name}", inner, above, _refuse)
        elif isinstance(value, Optimizer):
            yield ServerOptimizerLeaf(key, value)
        elif callable(getattr(value, "tracked", None)):
            for name, variable in value.tracked().items():
                yield VariableLeaf(f"{key}/{name}", variable)
        elif isinstance(value, ServerVariable):
            yield ServerVariableLeaf(key, value)
        else:
            put = self._replacing(key) if replace is None else replace
            yield leaf_of(key, value, None if put is _refuse else put)

    def _replacing(self, name: str) -> Callable[[Any], None]:
        def replace(state: Any) -> None:
            self._objects[name] = state

        return replace


def _path_or_error(path: Any) -> tuple[str, Exception | None]:
    """Return a path, or why it is none, for the other ranks to be told."""
    try:
        return checked_path(
            path,
            "checkpoint.save('folder/name'), or, to begin with nothing, manager.restore_latest()",
        ), None
    except ConfigError as error:
        return "", error


def _refuse(_state: Any) -> None:
    """Stand for: plain data here cannot be replaced."""


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a dict, list or tuple by name.

    Raises:
        ConfigError: A dict with keys that are no names.
    """
    if not isinstance(value, dict):
        return [(str(index), item) for index, item in enumerate(value)]
    for key in value:
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ConfigError(
                f"a dict of objects in a checkpoint must have names as keys, not {key!r:.80}"
            )
    return sorted(value.items())


def _default() -> Communicator:
    communicator: Communicator = get_strategy().communicator
    return communicator
