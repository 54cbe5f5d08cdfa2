"""The job as Horovod shows it: initialization, ranks, and sets of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.bootstrap import process
from syncvar.collectives.groups import new_group
from syncvar.compat.horovod.torch.operation_queue import operations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.collectives.groups import Group


class ProcessSet:
    """Ranks that make collective calls among themselves.

    Attributes:
        process_set_id: Number of the set, None before `add_process_set`.
        ranks: Ranks of the world, in ascending order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)
        self.process_set_id: int | None = None
        self.group: Group | None = None

    def size(self) -> int | None:
        """Return the number of ranks; None if the set has not been added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's position in the set; None if it has not been added."""
        if self.process_set_id is None or not self.included():
            return None
        return self.ranks.index(rank())

    def included(self) -> bool:
        """Return whether this process belongs to the set."""
        return rank() in self.ranks

    def position_of(self, root_rank: int) -> int:
        """Return the position in the set of a rank of the world, or raise ValueError."""
        if root_rank not in self.ranks:
            raise ValueError(f"root rank {root_rank} is not one of the ranks {self.ranks}")
        return self.ranks.index(root_rank)

    def required(self) -> Group | None:
        """Return the group of the set (None is the world), or raise ValueError."""
        if self.process_set_id is None:
            raise ValueError(f"{self} has not been added: call hvd.add_process_set on all ranks")
        if not self.included():
            raise ValueError(f"rank {rank()} does not belong to {self}")
        return self.group

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class JobSets:
    """The process sets of the job."""

    def __init__(self) -> None:
        self.world = ProcessSet([])
        self.added: dict[int, ProcessSet] = {}
        self._next = 1

    def begin(self) -> None:
        """Give the set of all ranks its members."""
        self.world.process_set_id = 0
        self.world.ranks = list(range(process.world_size()))

    def end(self) -> None:
        """Forget all sets."""
        for one in self.added.values():
            one.process_set_id = one.group = None
        self.added.clear()
        self.world.process_set_id = None
        self._next = 1

    def add(self, process_set: ProcessSet) -> ProcessSet:
        """Make the group of a set; collective over the world."""
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} has been added already")
        known = [self.world, *self.added.values()]
        if any(one.ranks == process_set.ranks for one in known):
            raise ValueError(f"there is a process set with the ranks {process_set.ranks} already")
        process_set.group = operations.call(GroupCall(process_set.ranks))
        process_set.process_set_id = self._next
        self.added[self._next] = process_set
        self._next += 1
        return process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """Forget a set; return whether there was one."""
        number = process_set.process_set_id
        if number is None or number not in self.added:
            return False
        del self.added[number]
        process_set.process_set_id = process_set.group = None
        return True


class GroupCall:
    """The call that makes a group, as an operation of the queue."""

    name: str | None = None
    is_global = True

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def run(self) -> Group:
        """Make the group."""
        return new_group(self._ranks)

    def description(self) -> dict[str, Any]:
        """Return what the other ranks learn about the call."""
        return {"kind": "add_process_set", "ranks": list(self._ranks)}


sets = JobSets()
global_process_set = sets.world


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job, and add process sets; "dynamic" stands for none.

    Raises:
        ValueError: `comm` names some of the ranks: make a process set of them.
    """
    if comm is not None:
        raise ValueError("hvd.init takes no comm: all ranks of the job join; make a process set")
    process.init()
    if global_process_set.process_set_id is None:
        sets.begin()
        for one in () if isinstance(process_sets, str) else process_sets or ():
            sets.add(one)


def shutdown() -> None:
    """Wait for the operations of this rank, and leave the job."""
    operations.stop()
    sets.end()
    process.shutdown()


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not."""
    return process.is_initialized() and global_process_set.process_set_id is not None


def require_init() -> None:
    """Raise ValueError before `init`, as Horovod does."""
    if not is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def rank() -> int:
    """Return this process's rank."""
    require_init()
    return process.rank()


def size() -> int:
    """Return the number of ranks."""
    require_init()
    return process.world_size()


def local_rank() -> int:
    """Return this process's rank among those of its host."""
    require_init()
    return process.local_rank()


def local_size() -> int:
    """Return the number of ranks on this host."""
    require_init()
    return process.local_world_size()


def cross_rank() -> int:
    """Return the index of this host."""
    require_init()
    return process.host_index()


def cross_size() -> int:
    """Return the number of hosts."""
    require_init()
    return process.host_count()


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks, as far as this one can see."""
    return local_size() * cross_size() == size()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set, given as such or by its ranks; all ranks of the world call it."""
    require_init()
    is_set = isinstance(process_set, ProcessSet)
    return sets.add(process_set if is_set else ProcessSet(process_set))  # type: ignore[arg-type]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return whether it was there. All ranks of the world call it."""
    require_init()
    return sets.remove(process_set)


def is_absent() -> bool:
    """Return False: the answer to questions about MPI, gloo, NCCL and other libraries."""
    return False
