"""`sv.Checkpoint`: named objects that ranks save and restore together.

`trackables`, `server_leaves` and `optimizer_state` describe the objects as leaves; `save` and
`restore` move the leaves to and from files. `CheckpointCore` is a class of its own, so that its
methods do not collide with the names of objects in a `Checkpoint`; `CheckpointManager` uses it too.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from syncvar.checkpoint.checkpoint_format import Label, checked_path
from syncvar.checkpoint.optimizer_state import SlotLeaf
from syncvar.checkpoint.restore import (
    CheckpointInfo,
    RestoreOptions,
    check_options,
    is_local,
    restore_for_all,
    restore_leaves,
)
from syncvar.checkpoint.save import ChiefSave, PendingSave, SaveOperation, write_now
from syncvar.checkpoint.server_leaves import (
    ServerOptimizerLeaf,
    ServerVariableLeaf,
    sort_leaves,
    sort_objects,
)
from syncvar.checkpoint.trackables import (
    SoloGroup,
    VariableLeaf,
    checked_object,
    feedback_leaves,
    is_nested,
    leaf_of,
    outside_scopes,
)
from syncvar.core.errors import ConfigError
from syncvar.core.html_table import html_table, preview
from syncvar.optimizers import Optimizer
from syncvar.parameter_server.server_variables import ServerVariable
from syncvar.strategies.contexts import get_strategy
from syncvar.strategies.distributed_dataset import DistributedIterator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncvar.checkpoint.server_leaves import AnyLeaf, CheckpointContent, SortedObjects
    from syncvar.checkpoint.trackables import CheckpointGroup
    from syncvar.runtime.communicator import Communicator

_NAME = re.compile(r"[^\W_][^/\0]{0,127}")
_log = logging.getLogger("syncvar")


class _WaitingEntries:
    """Entries of a restored checkpoint whose objects do not exist yet.

    `keys` is one set, shared by nested checkpoints; the prefix of `options` precedes the keys of
    this one.
    """

    def __init__(self, path: str, options: RestoreOptions, keys: set[str]) -> None:
        self.path, self.options, self.keys = path, options, keys
        self.is_news = not options.partial  # the first save without these entries logs a warning

    def under(self, key: str) -> _WaitingEntries:
        prefix = f"{self.options.prefix}{key}/"
        return _WaitingEntries(self.path, self.options._replace(prefix=prefix), self.keys)


class CheckpointCore:
    """The objects of one checkpoint, its pending save, and entries that wait for their objects."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.waiting: _WaitingEntries | None = None
        self.pending: PendingSave | None = None

    def add(self, name: str, value: Any) -> None:
        """Add an object, and restore it if an entry waits for it."""
        before = self.objects.copy()
        self.objects[name] = value
        try:
            if self.waiting is not None:
                self.restore_late()
                self.follow(name, value)
        except BaseException:
            self.objects.clear()
            self.objects.update(before)
            raise

    def save(
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
        """Save all objects: the common part of `Checkpoint.save` and `CheckpointManager.save`."""
        leaves, communicator, missing, on_servers, unsaved = self.collect()
        leaves = [leaf for leaf in leaves if not isinstance(leaf, SlotLeaf) or leaf.is_present]
        refused = refused or missing or unsaved
        with outside_scopes():
            self.finish_pending()
            waiting = self.waiting
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
            saving: SaveOperation | ChiefSave
            if refused is None and isinstance(communicator, SoloGroup) and communicator.rank:
                saving = ChiefSave(path)
            else:
                pushes: dict[int, int] = {}
                if on_servers is not None and communicator.member_rank == 0 and refused is None:
                    try:
                        snapshot, pushes = on_servers.take_snapshot(timeout)
                        leaves = sorted([*leaves, *snapshot], key=lambda leaf: leaf.key)
                    except Exception as error:  # `SaveOperation` reports it to the other ranks
                        refused = error
                saving = SaveOperation(leaves, refused, communicator, path, label, timeout, guard)
                saving.pushes = pushes
            if async_op:
                pending = PendingSave(saving, communicator.member_rank, after)
                self.pending = pending
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

    def finish_pending(self) -> None:
        """Commit a started save that nobody has waited for. Its `PendingSave` keeps the error."""
        pending, self.pending = self.pending, None
        if pending is not None:
            error = pending.exception()
            if error is not None:
                _log.warning(
                    "saving the checkpoint %s failed, and nobody called its wait(): %s",
                    pending.path,
                    error,
                )

    def restore(
        self,
        path: str | None,
        find: Callable[[], str | None] | None,
        options: RestoreOptions,
        refused: Exception | None = None,
    ) -> str | None:
        """Restore from `path`, or from the path that `find` returns on rank 0; return that path."""
        collected = self.collect()
        with outside_scopes():
            self.finish_pending()
            collected = collected._replace(refused=refused or collected.refused)
            found_at, found = self._restored(collected, collected.group, path, find, options)
        if found_at is None:
            return None
        options = options._replace(identity=found.identity)
        waiting = _WaitingEntries(found_at, options, set(found.left))
        self.waiting = waiting
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
        for name, value in list(self.objects.items()):
            self.follow(name, value)
        return found_at

    @staticmethod
    def _restored(
        collected: CheckpointContent,
        group: CheckpointGroup | None,
        path: str | None,
        find: Callable[[], str | None] | None,
        options: RestoreOptions,
    ) -> tuple[str | None, CheckpointInfo]:
        leaves, _, refused, on_servers, _unsaved = collected
        everything = leaves if on_servers is None else [*leaves, *on_servers.leaves()]
        if isinstance(group, SoloGroup):
            assert on_servers is not None, "only server-side variables are restored by one worker"
            check_options(options)
            if refused is not None:
                raise refused
            return restore_for_all(everything, on_servers, group, path, find, options)
        assert path is not None, "ranks that restore together have agreed on the path"
        last = None if on_servers is None else on_servers.joint_restorer(path, options.timeout)
        return path, restore_leaves(everything, group, path, options, refused, last)

    def restore_late(self) -> None:
        """Restore objects that were added after `restore`."""
        waiting = self.waiting
        if waiting is None or not waiting.keys:
            return
        prefix = waiting.options.prefix
        found = [leaf for name, value in self.objects.items() for leaf in self._walk(name, value)]
        content = sort_leaves(found, _default, prefix=prefix, only=waiting.keys)
        if not content.leaves and content.on_servers is None:
            return
        group = None if content.on_servers is None and is_local(content.leaves) else content.group
        with outside_scopes():
            self._restored(content, group, waiting.path, None, waiting.options)
        server_leaves = [] if content.on_servers is None else content.on_servers.leaves()
        restored = [*content.leaves, *server_leaves]
        waiting.keys.difference_update(prefix + leaf.key for leaf in restored)

    def follow(self, key: str, value: Any) -> None:
        """Assign waiting entries to the checkpoints nested in an object."""
        waiting = self.waiting
        if waiting is None:
            return
        nested = core_of(value)
        if nested is not None:
            nested.waiting = waiting.under(key)
            for name, inner in list(nested.objects.items()):
                nested.follow(name, inner)
        elif is_nested(value):
            for inner, item in _items(value):
                self.follow(f"{key}/{inner}", item)

    def collect(self) -> CheckpointContent:
        """Return all objects as leaves, and the group that saves them."""
        found, refused = self._found()
        return sort_leaves(found, _default, refused)

    def objects_here(self) -> SortedObjects:
        """Return all objects as leaves; also of a job that this process has left."""
        return sort_objects(*self._found())

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers among the objects."""
        return [one.optimizer for one in self._found()[0] if isinstance(one, ServerOptimizerLeaf)]

    def iterators(self) -> list[Any]:
        """Return the iterators of distributed datasets among the objects."""
        return list(_iterators(self.objects))

    def _found(self) -> tuple[list[AnyLeaf], Exception | None]:
        """Return the leaves of all objects, and the error of one that cannot be saved."""
        leaves: list[AnyLeaf] = []
        refused: Exception | None = None
        for name, value in self.objects.items():
            try:
                leaves += list(self._walk(name, value))
            except Exception as error:
                refused = refused or error
        return leaves, refused

    def _walk(
        self, key: str, value: Any, above: tuple[int, ...] = (), replace: Any = None
    ) -> Iterator[AnyLeaf]:
        nested = core_of(value)
        ident = id(value if nested is None else nested)
        if ident in above:
            raise ConfigError(f"{key!r} holds itself: a checkpoint must not be nested in itself")
        above = (*above, ident, id(self))
        if nested is not None:
            for name, inner in nested.objects.items():
                replace = partial(nested.objects.__setitem__, name)
                yield from self._walk(f"{key}/{name}", inner, above, replace)
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
            put = replace or partial(self.objects.__setitem__, key)
            leaf = leaf_of(key, value, None if put is _refuse else put)
            yield leaf
            yield from feedback_leaves(leaf)


def core_of(value: Any) -> CheckpointCore | None:
    """Return the core of a `Checkpoint`, None for other objects."""
    core = getattr(value, "__dict__", {}).get("_core")
    return core if isinstance(core, CheckpointCore) else None


def is_name(name: str) -> bool:
    """Return whether a text may be the name of an object."""
    return _NAME.fullmatch(name) is not None


def _iterators(value: Any) -> Iterator[DistributedIterator]:
    nested = core_of(value)
    if isinstance(value, DistributedIterator):
        yield value
    elif nested is not None:
        yield from _iterators(nested.objects)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterators(item)


def _refuse(_state: Any) -> None:
    pass


def _items(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(str(index), item) for index, item in enumerate(value)]
    for key in value:
        if not isinstance(key, str) or not is_name(key):
            raise ConfigError(
                f"a dict of objects in a checkpoint must have names as keys, not {key!r:.80}"
            )
    return sorted(value.items())


def _default() -> Communicator:
    communicator: Communicator = get_strategy().communicator
    return communicator


class NamedObjects:
    """Objects as attributes: the base class of `Checkpoint` and `sv.elastic.State`.

    Args:
        core: What keeps the objects.
    """

    _core: CheckpointCore

    def __init__(self, core: CheckpointCore, objects: dict[str, Any]) -> None:
        self.__dict__["_core"] = core
        for name, value in objects.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"<{self._title()} of {', '.join(self._core.objects) or 'nothing'}>"

    def _repr_html_(self) -> str:
        return html_table(
            self._title(),
            [(name, type(one).__name__, preview(one)) for name, one in self._core.objects.items()],
            ("object", "type", "value here"),
            code=(2,),
        )

    def __getattr__(self, name: str) -> Any:
        core = self.__dict__.get("_core")
        objects = {} if core is None else core.objects
        if name not in objects:
            raise AttributeError(
                f"the {self._kind()} has no object {name!r}; it has {', '.join(objects) or 'none'}"
            )
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not is_name(name) or hasattr(type(self), name):
            reason = "is not a name (1 to 128 characters, no / and no leading _)"
            if hasattr(type(self), name):
                reason = f"is a method of {self._kind()}s"
            raise ConfigError(f"{name!r} {reason}; give the object another name")
        if not isinstance(value, NamedObjects) and not is_nested(value):
            checked_object(name, value)
        self._core.add(name, value)

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._core.objects[name]

    def _title(self) -> str:
        return f"sv.{type(self).__name__}"

    def _kind(self) -> str:
        return type(self).__name__.lower()


class Checkpoint(NamedObjects):
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

    def __init__(self, **objects: Any) -> None:
        super().__init__(CheckpointCore(), objects)

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
        return self._core.save(where, Label(), timeout, async_op=async_op, refused=refused)

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
        self._core.restore(where, None, options, refused)


def _path_or_error(path: Any) -> tuple[str, Exception | None]:
    try:
        return checked_path(
            path, "checkpoint.save('folder/name'), or manager.restore_latest() to start without one"
        ), None
    except ConfigError as error:
        return "", error
