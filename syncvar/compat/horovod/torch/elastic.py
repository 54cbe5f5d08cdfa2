"""`hvd.elastic`: go on from the last commit after a failure.

Horovod keeps the state in memory and replaces workers. Here `syncvar-launch --max-restarts N`
starts all workers again, as many as before. Rank 0 writes each commit to a file of the job, and
after a restart all ranks begin with it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
from typing import TYPE_CHECKING, Any

import torch

from syncvar.bootstrap.process import environment_here, restart_count
from syncvar.compat.horovod.torch.process_sets import init, rank, size
from syncvar.compat.horovod.torch.state_broadcast import broadcast_object
from syncvar.core.errors import UsageError
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER_VARIABLE = "SYNCVAR_ELASTIC_FOLDER"
_FILE = "elastic-commit"


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """A sampler of this rank's part of a dataset that knows what has been processed this epoch.

    Args:
        dataset: Anything with a length.
        shuffle: Whether the order is random.
        seed: Seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that all ranks have processed a batch of this size."""
        del batch_idx
        self.processed_num += batch_size * size()

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to a position."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rows that remain among the ranks."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311  (no secret)
        rest = order[self.processed_num :]
        rest += rest[: -len(rest) % size()]
        self.indices = rest[rank() :: size()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class ObjectState:
    """Named values that ranks commit and restore together; plain data, or with `state_dict`.

    Args:
        values: The values, which become attributes.
    """

    def __init__(self, **values: Any) -> None:
        self._names = list(values)
        self._callbacks: list[Callable[[], None]] = []
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = self._snapshot()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call functions after each restart, when the state has been restored."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions."""
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep the state in memory, and on rank 0 in the file of the job."""
        self._saved = self._snapshot()
        path = commit_path()
        if rank() == 0 and path is not None:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(path + ".new", "wb") as file:
                file.write(pack_object(self._saved))
            os.replace(path + ".new", path)  # a failure during the commit leaves the last one

    def commit(self) -> None:
        """Keep the state: a restart begins with it."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of a job stay the same."""

    def restore(self) -> None:
        """Go back to the last commit."""
        for name, value in self._saved.items():
            attribute = getattr(self, name)
            if hasattr(attribute, "load_state_dict"):
                attribute.load_state_dict(copy.deepcopy(value))
            else:
                setattr(self, name, copy.deepcopy(value))

    def restore_from_file(self) -> bool:
        """On rank 0, go back to the commit in the file; return whether there is one."""
        path = commit_path()
        if rank() or path is None:
            return False
        if not os.path.exists(path):
            return False
        with open(path, "rb") as file:
            self._saved = unpack_object(file.read())  # what `sync` can send; runs no code
        self.restore()
        return True

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        self._saved = broadcast_object(self._snapshot())
        self.restore()

    def _snapshot(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        return {
            name: copy.deepcopy(one.state_dict() if hasattr(one, "state_dict") else one)
            for name, one in values.items()
        }


class TorchState(ObjectState):
    """The state of a training: a model, an optimizer, and other values.

    Args:
        model: Module of PyTorch, or None.
        optimizer: Optimizer, or None.
        values: Other values, such as `epoch=0` or an `ElasticSampler`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        if model is not None:
            values["model"] = model
        if optimizer is not None:
            values["optimizer"] = optimizer
        super().__init__(**values)


def commit_path() -> str | None:
    """Return the file of commits: in the folder of a variable, or in that of the job."""
    here = environment_here()
    folder = os.environ.get(FOLDER_VARIABLE) or (here.flight_dir if here else "")
    return os.path.join(folder, _FILE) if folder else None


def remove_commit() -> None:
    """Remove the file of commits, when the function has returned."""
    path = commit_path()
    if rank() == 0 and path is not None:
        with contextlib.suppress(OSError):
            os.remove(path)
            os.rmdir(os.path.dirname(path))  # if this module made it, and nothing else is there


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function that trains: its first argument is the state.

    Before it begins, all ranks get the state of rank 0; after a restart, that of the last commit. A
    failure ends this start of the workers, and `--max-restarts` makes the next one.
    """
    return functools.wraps(function)(ElasticFunction(function))


class ElasticFunction:
    """A function that begins with the last commit."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, state: ObjectState, *arguments: Any, **options: Any) -> Any:
        """Bring the state up to date, and call the function."""
        init()
        if restart_count():
            if commit_path() is None:
                raise UsageError(
                    "hvd.elastic finds no folder with the last commit: start the job with "
                    f"syncvar-launch, or set {FOLDER_VARIABLE} to a folder that rank 0 can write"
                )
            state.restore_from_file()
        state.sync()
        if restart_count():
            state.on_reset()
        result = self._function(state, *arguments, **options)
        remove_commit()
        return result
