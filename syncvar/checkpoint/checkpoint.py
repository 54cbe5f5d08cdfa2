"""`sv.Checkpoint`: named objects that ranks save and restore together.

`trackables`, `server_leaves` and `optimizer_state` describe the objects as leaves; `save` and
`restore` move the leaves to and from files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from syncvar.checkpoint.checkpoint_core import CheckpointCore, is_name
from syncvar.checkpoint.file_names import checked_path
from syncvar.checkpoint.manifest import Label
from syncvar.checkpoint.restore import (
    RestoreOptions,
)
from syncvar.checkpoint.trackables import (
    checked_object,
    is_nested,
)
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from syncvar.checkpoint.async_save import PendingSave


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

    _core: CheckpointCore

    def __init__(self, **objects: Any) -> None:
        self.__dict__["_core"] = CheckpointCore()
        for name, value in objects.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"<sv.Checkpoint of {', '.join(self._core.objects) or 'nothing'}>"

    def __getattr__(self, name: str) -> Any:
        core = self.__dict__.get("_core")
        objects = {} if core is None else core.objects
        if name not in objects:
            raise AttributeError(
                f"the checkpoint has no object {name!r}; it has {', '.join(objects) or 'none'}"
            )
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not is_name(name) or hasattr(type(self), name):
            reason = "is not a name (1 to 128 characters, no / and no leading _)"
            if hasattr(type(self), name):
                reason = "is a method of checkpoints"
            raise ConfigError(f"{name!r} {reason}; give the object another name")
        if not isinstance(value, Checkpoint) and not is_nested(value):
            checked_object(name, value)
        self._core.add(name, value)

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._core.objects[name]

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
            path,
            "checkpoint.save('folder/name'), or manager.restore_latest() to start without one",
        ), None
    except ConfigError as error:
        return "", error
