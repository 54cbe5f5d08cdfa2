"""One worker saves and restores for all: what is on servers is there once, and the others go on meanwhile.

That worker is rank 0. It saves alone; the same call of another worker returns at once. It restores alone too, and keeps on the servers
what it said of it: the others wait for that in the same call, and take from it what is each worker's own (plain data and states).
A worker that was started again alone makes its calls again, and is told what came of them; nothing is restored twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.checkpoint.restore import Found
from syncvar.checkpoint.save_plan import failure_of, raise_failures
from syncvar.core.errors import CheckpointError, MismatchError, SyncvarError, TransportError
from syncvar.parameter_server.snapshot import give_back, recall

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.checkpoint.server_leaves import OnServers
    from syncvar.checkpoint.trackables import Leaf, SoloGroup


_NOTHING = "nothing was restored"


class SavedElsewhere:
    """A save that rank 0 makes, as another worker sees it; has what a `Saving` has.

    Args:
        path: Where it will be.
    """

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
    there: OnServers,
    group: SoloGroup,
    path: str | None,
    find: Callable[[], str | None],
    stage: Callable[[str], tuple[list[tuple[Leaf, Any]], Found]],
    timeout: float | None,
    *,
    partial: bool,
) -> tuple[str | None, Found]:
    """Restore what is on servers, once, and what is each worker's own on all of them.

    Args:
        leaves: All of this worker.
        there: What of it is on servers.
        group: This worker.
        path: Of the checkpoint; None: what `find` finds.
        find: Returns it on rank 0; None where there is none, and nothing is restored.
        stage: Reads a checkpoint; returns what each leaf takes, and what it is.
        timeout: Seconds.
        partial: Objects without an entry stay as they are.

    Returns:
        (the path, what was found there).

    Raises:
        CheckpointError: On every worker; nothing was restored.
        MismatchError: Rank 0 has restored another one.
    """
    here = there.strategy.here
    here.restorings += 1
    number, is_first = here.restorings, group.rank == 0
    told = None
    if not is_first or here.session.client.incarnation:
        told = recall(there.strategy, number, waits=not is_first, timeout=timeout)
    if told is None:
        where, found = _restore(leaves, there, number, path or find, stage, timeout)
        here.went_back(where)
        return where, found
    if told["failure"] is not None:
        raise_failures({0: told["failure"]}, None, _NOTHING)
    if path is not None and told["path"] != path:
        raise MismatchError(
            "the workers do not restore the same checkpoint",
            {0: str(told["path"]), group.rank: path},
        )
    here.went_back(told["path"])
    own = [leaf for leaf in leaves if hasattr(leaf, "accept")]
    missing = [leaf.key for leaf in own if leaf.key not in told["own"] and not leaf.is_optional]
    if missing and not partial and told["path"] is not None:
        raise CheckpointError(
            f"rank 0 has restored {told['path']}, and nothing for {', '.join(map(repr, missing[:8]))}: every worker makes the same sv.Checkpoint(…)"
        )
    for leaf in own:
        mine: Any = told["own"].get(leaf.key)
        mine = mine[group.rank % len(mine)] if mine else None
        if mine is not None:
            _put(leaf, leaf.accept(mine))
    return told["path"], Found(told["identity"], frozenset(told["left"]), told["pushes"])


def _restore(
    leaves: list[Leaf],
    there: OnServers,
    number: int,
    where: str | Callable[[], str | None],
    stage: Any,
    timeout: float | None,
) -> tuple[str | None, Found]:
    says: dict[str, Any] = {
        "failure": None,
        "path": None,
        "identity": "",
        "left": [],
        "own": {},
        "pushes": {},
    }
    done: list[tuple[Leaf, Any]] = []
    found = Found()
    try:
        says["path"] = where if isinstance(where, str) else where()
        if says["path"] is not None:
            staged, found = stage(says["path"])
            says |= {"identity": found.identity, "left": sorted(found.left), "pushes": found.pushes}
            says["own"] = {
                leaf.key: told for leaf in leaves if (told := getattr(leaf, "told", None))
            }
            for leaf, value in staged:
                done.append((leaf, leaf.now()))
                _put(leaf, value)
        there.give_back(number, says, timeout)
    except Exception as error:
        for leaf, before in reversed(done):
            leaf.put(before)
        if isinstance(error, SyncvarError) and not isinstance(
            error, TransportError
        ):  # for the workers that wait for it
            give_back(
                there.strategy,
                [],
                number,
                {**says, "own": {}, "failure": failure_of(error)},
                timeout,
            )
        raise
    return says["path"], found


def _put(leaf: Leaf, value: Any) -> None:
    try:
        leaf.put(value)
    except Exception as error:  # of the program's own object
        raise CheckpointError(
            f"{leaf.key!r} refused its state: {type(error).__name__}: {error}"[:500]
        ) from error
