"""Save and restore of server-side variables, which rank 0 does for all workers.

Rank 0 saves alone; the same call of another worker returns at once. Rank 0 also restores alone, and
leaves a record on the servers. The other workers wait for that record in the same call and take
from it the data that each worker keeps for itself (plain data and states). A worker that restarts
repeats its calls and finds their records, so no checkpoint is restored twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.checkpoint.restore import CheckpointInfo, refused_state, stage_leaves
from syncvar.checkpoint.save_plan import failure_of, raise_failures
from syncvar.checkpoint.server_leaves import give_back, read_report, restore_record
from syncvar.core.errors import CheckpointError, MismatchError, SyncvarError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.checkpoint.restore import RestoreOptions
    from syncvar.checkpoint.server_leaves import ServerLeaves
    from syncvar.checkpoint.trackables import Leaf, SoloGroup


_NOTHING = "nothing was restored"


class ChiefSave:
    """A save by rank 0 as another worker sees it; has the methods of `Saving`."""

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


def restore_for_all(
    leaves: list[Leaf],
    on_servers: ServerLeaves,
    group: SoloGroup,
    path: str | None,
    find: Callable[[], str | None] | None,
    options: RestoreOptions,
) -> tuple[str | None, CheckpointInfo]:
    """Restore server-side variables once, and the data of each worker on every worker."""
    here = on_servers.strategy.here
    here.restore_count += 1
    number, is_first = here.restore_count, group.rank == 0
    record = None
    if not is_first or here.session.client.incarnation:
        record = read_report(
            on_servers.strategy, number, waits=not is_first, timeout=options.timeout
        )
    if record is None:
        where = path if find is None else find
        where, found = _restore(leaves, on_servers, group, number, where, options)
        here.resume_after_restore(where)
        return where, found
    if record["failure"] is not None:
        raise_failures({0: record["failure"]}, None, _NOTHING)
    if path is not None and record["path"] != path:
        table = {0: str(record["path"]), group.rank: path}
        raise MismatchError("the workers do not restore the same checkpoint", table)
    here.resume_after_restore(record["path"])
    own = [leaf for leaf in leaves if hasattr(leaf, "accept")]
    missing = [leaf.key for leaf in own if leaf.key not in record["own"] and not leaf.is_optional]
    if missing and not options.partial and record["path"] is not None:
        raise CheckpointError(
            f"rank 0 has restored {record['path']}, and nothing for "
            f"{', '.join(map(repr, missing[:8]))}: every worker must make the same sv.Checkpoint(…)"
        )
    for leaf in own:
        mine: Any = record["own"].get(leaf.key)
        mine = mine[group.rank % len(mine)] if mine else None
        if mine is not None:
            _put(leaf, leaf.accept(mine))
    return record["path"], CheckpointInfo(
        record["identity"], frozenset(record["left"]), record["pushes"]
    )


def _restore(
    leaves: list[Leaf],
    on_servers: ServerLeaves,
    group: SoloGroup,
    number: int,
    where: str | Callable[[], str | None] | None,
    options: RestoreOptions,
) -> tuple[str | None, CheckpointInfo]:
    record = restore_record(None)
    done: list[tuple[Leaf, Any]] = []
    found = CheckpointInfo()
    try:
        path = record["path"] = where() if callable(where) else where
        if path is not None:
            staged, found = stage_leaves(leaves, group, path, options)
            own = {
                leaf.key: data for leaf in leaves if (data := getattr(leaf, "worker_states", None))
            }
            record |= {"identity": found.identity, "left": sorted(found.left), "own": own}
            record["pushes"] = found.pushes
            for leaf, value in staged:
                done.append((leaf, leaf.now()))
                _put(leaf, value)
        on_servers.give_back(number, record, options.timeout)
    except Exception as error:
        for leaf, before in reversed(done):
            leaf.put(before)
        if isinstance(error, SyncvarError) and not isinstance(error, TransportError):
            # The other workers wait for a record.
            record |= {"own": {}, "failure": failure_of(error)}
            give_back(on_servers.strategy, [], number, record, options.timeout)
        raise
    return path, found


def _put(leaf: Leaf, value: Any) -> None:
    try:
        leaf.put(value)
    except Exception as error:  # raised by an object of the program
        raise CheckpointError(refused_state(leaf.key, error)) from error
