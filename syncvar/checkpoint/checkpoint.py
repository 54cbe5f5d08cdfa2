"""`sv.Checkpoint`: named objects that ranks save and restore together.

`trackables`, `server_leaves` and `optimizer_state` describe the objects as leaves; `save` and
`restore` move the leaves to and from files.
"""

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
    RestoreOptions,
    check_options,
    is_local,
    restore_leaves,
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
    from syncvar.checkpoint.trackables import Together
    from syncvar.runtime.communicator import Communicator


_NAME = re.compile(r"[^\W_][^/\0]{0,127}")
_log = logging.getLogger("syncvar")


class _Waiting:
    """Entries of a restored checkpoint whose objects do not exist yet.

    `keys` is one set, shared by nested checkpoints; the prefix of `options` precedes the keys of
    this one.
    """

    def __init__(self, path: str, options: RestoreOptions, keys: set[str]) -> None:
        self.path, self.options, self.keys = path, options, keys
        self.is_news = not options.partial  # the first save without these entries logs a warning

    def under(self, key: str) -> _Waiting:
        prefix = f"{self.options.prefix}{key}/"
        return _Waiting(self.path, self.options._replace(prefix=prefix), self.keys)


class Checkpoint:
    """Named objects that ranks save and restore together.

    A checkpoint accepts variables, optimizers, iterators, `numpy.random.Generator`, nested
    checkpoints and objects with `state_dict()` and `load_state_dict(state)`, such as PyTorch
    modules. It also accepts dicts, lists and tuples of them, and plain data: numbers, texts,
    arrays, tensors, dates, and lists, sets and dicts of plain data. `checkpoint.name = object` adds
    an object later. The checkpoint owns its plain data: after a restore, `checkpoint.epoch` is the
    restored value.

    On disk a checkpoint is a folder with one safetensors file (shard) per rank and a manifest. Rank
    0 writes the manifest last; that is the commit. Any number of replicas can restore it, into
    variables of any mode. An ON_WRITE variable takes the value. An ON_READ variable takes the value
    that a read returns; a sum is split again, exactly. NONE variables, and ON_READ variables
    without aggregation, take it replica by replica. States and plain data are saved once if all
    ranks have the same, else once per rank. No file contains pickled data.

    The replicas of the variables save together; without variables, those of the current strategy.
    All must have the same objects under the same names; NONE variables may exist on some ranks
    only. If all variables are server-side, rank 0 saves one version of them, and the calls of the
    other workers return at once. Rank 0 restores them in one transaction, and the other workers
    wait.

    Args:
        objects: Objects by name.

    Raises:
        ConfigError: An object that cannot be saved, or the name of a method.

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
            reason = "is not a name (1 to 128 characters, no / and no leading _)"
            if hasattr(type(self), name):
                reason = "is a method of checkpoints"
            raise ConfigError(f"{name!r} {reason}; give the object another name")
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
        """Save all objects. Collective; allowed in every context.

        The save is atomic: until the new checkpoint is complete on disk, `path` holds the previous
        one. One job at a time writes a folder, and all ranks must see that folder.

        Args:
            path: Checkpoint folder; created if missing.
            async_op: Whether to copy the values now, write them in a thread, and return a
                `PendingSave`. Its `wait` commits.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Returns:
            The path, or a `PendingSave` with `async_op=True`.

        Raises:
            ConfigError: An object cannot be saved; the text names it. The other ranks raise
                MismatchError.
            MismatchError: The ranks save different objects, or to different paths.
            CheckpointError: On every rank: the disk is full or fails, or another job writes the
                folder. Nothing was saved.

        Cost: Three exchanges of descriptions (some 100 bytes for each object and rank), and one
            transfer for each ON_READ variable that is combined. Each rank writes 1/N of the shared
            values, and its own copies; memory is not copied.
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
                keys = ", ".join(sorted(waiting.keys)[:8])
                _log.warning(
                    "%d entries of the checkpoint restored from %s still wait for their objects. "
                    "They are not part of %s: %s",
                    len(waiting.keys),
                    waiting.path,
                    path,
                    keys,
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
                    except Exception as error:  # `Saving` reports it to the other ranks
                        refused = error
                saving = Saving(leaves, refused, communicator, path, label, timeout, guard, pushes)
            if async_op:
                pending = PendingSave(saving, communicator.member_rank, after)
                self.__dict__["_pending"] = pending
                return pending
            try:
                written = write_now(saving)
            except BaseException:  # the program ends: remove the written files and the lock
                saving.discard()
                raise
            saving.commit(written)
            if after is not None:
                after()
            return path

    def _finish_pending(self) -> None:
        """Commit a started save that nobody has waited for. Its `PendingSave` keeps the error."""
        pending, self.__dict__["_pending"] = self._pending, None
        if pending is not None:
            error = pending.exception()
            if error is not None:
                _log.warning(
                    "saving the checkpoint %s failed, and nobody called its wait(): %s",
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
        """Restore all objects or none. Collective; allowed in every context.

        An entry without an object waits until `checkpoint.name = object` adds one; the log names
        the entry. Optimizer state needs no such wait: the optimizer keeps it until its first step.
        State belongs to the variable that has the same name in the checkpoint.

        Args:
            path: Checkpoint folder.
            restore_policy: What replica r takes from an entry that was saved per replica.
                "same_rank_or_initial": copy r, or its current value if there is none; "cycle": copy
                r modulo the number of copies; "error": the numbers of replicas must be equal.
            partial: Whether to skip what does not fit: objects without an entry, optimizer state
                without its variable or slot, and state of another kind of optimizer. These are
                errors by default.
            timeout: Seconds that each call of the group waits; None means the job's default.

        Raises:
            ConfigError: A wrong argument; the other ranks raise MismatchError.
            NotFound: On every rank: there is no checkpoint.
            Corrupt: On every rank: bytes differ from those that were saved.
            CheckpointError: On every rank: an object has no entry, or differs from it in shape,
                dtype or type; or optimizer state has no owner.

        Cost: Every rank reads all shared values and its own copies. Two exchanges of some bytes.
        """
        where, refused = _path_or_error(path)
        options = RestoreOptions(restore_policy, timeout, partial)
        self._restore(where, None, options, refused)

    def _restore(
        self,
        path: str | None,
        find: Callable[[], str | None] | None,
        options: RestoreOptions,
        refused: Exception | None = None,
    ) -> str | None:
        """Restore from `path`, or from the path that `find` returns on rank 0; return that path."""
        collected = self._collect()
        with outside():
            self._finish_pending()
            collected = collected._replace(refused=refused or collected.refused)
            found_at, found = self._restored(collected, collected.group, path, find, options)
        if found_at is None:
            return None
        options = options._replace(identity=found.identity)
        waiting = _Waiting(found_at, options, set(found.left))
        self.__dict__["_waiting"] = waiting
        if waiting.keys and not options.partial and collected.group.rank == 0:
            shown = sorted(waiting.keys)
            keys = ", ".join(shown[:8]) + ", …" * (len(shown) > 8)
            _log.warning(
                "%d entries of the checkpoint %s have no object in this program and are not "
                "restored: %s. Add the object with checkpoint.name = object, or confirm with "
                "restore(…, partial=True)",
                len(shown),
                found_at,
                keys,
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
        options: RestoreOptions,
    ) -> tuple[str | None, Found]:
        leaves, _, refused, there, _unsaved = collected
        everything = leaves if there is None else [*leaves, *there.leaves()]
        if isinstance(group, SoloGroup):
            assert there is not None, "only server-side variables are restored by one worker"
            check_options(options)
            if refused is not None:
                raise refused
            return restore_for_all(everything, there, group, path, find, options)
        assert path is not None, "ranks that restore together have agreed on the path"
        last = None if there is None else there.restored_by_all(path, options.timeout)
        return path, restore_leaves(everything, group, path, options, refused, last)

    def _restore_late(self) -> None:
        """Restore objects that were added after `restore`."""
        waiting = self._waiting
        if waiting is None or not waiting.keys:
            return
        prefix = waiting.options.prefix
        found = [leaf for name, value in self._objects.items() for leaf in self._walk(name, value)]
        collected = sorted_out(found, _default, prefix=prefix, only=waiting.keys)
        if not collected.leaves and collected.there is None:
            return
        group = None if collected.there is None and is_local(collected.leaves) else collected.group
        with outside():
            self._restored(collected, group, waiting.path, None, waiting.options)
        on_servers = [] if collected.there is None else collected.there.leaves()
        restored = [*collected.leaves, *on_servers]
        waiting.keys.difference_update(prefix + leaf.key for leaf in restored)

    def _follow(self, key: str, value: Any) -> None:
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
    try:
        return checked_path(
            path,
            "checkpoint.save('folder/name'), or manager.restore_latest() to start without one",
        ), None
    except ConfigError as error:
        return "", error


def _refuse(_state: Any) -> None:
    pass


def _items(value: Any) -> list[tuple[str, Any]]:
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
