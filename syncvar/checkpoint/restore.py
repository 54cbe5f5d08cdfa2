"""Restoring, all or nothing: every rank reads and checks, all agree, and only then anything changes.

Another job may save there meanwhile. Then some ranks may have read the old checkpoint and some the new one: all see it, and
all read again.

What changes is kept until all ranks say that it went well; an object that refuses its state takes everything back.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.checkpoint.optimizer_state import (
    RuleLeaf,
    SlotLeaf,
    ownerless_keys,
    refuse_ownerless,
)
from syncvar.checkpoint.save_plan import failure_of, raise_failures
from syncvar.checkpoint.shard_reader import Source
from syncvar.checkpoint.trackables import KEEP, VariableLeaf, gathered
from syncvar.core.errors import CheckpointError, ConfigError, Corrupt, NotFound
from syncvar.variables.policy import VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.checkpoint.trackables import Leaf, Together
    from syncvar.runtime.communicator import Communicator


POLICIES = ("same_rank_or_initial", "cycle", "error")
_TRIES = 3  # of one rank
_ROUNDS = 10  # of all: one saved meanwhile makes some ranks see the old one, and some the new one
_NOTHING = "nothing was restored"
_log = logging.getLogger("syncvar")


class Found(NamedTuple):
    """A checkpoint that has been read.

    Args:
        identity: Which.
        left: Its keys that no object has taken.
        pushes: Rank -> how many of its pushes to servers are in it.
    """

    identity: str = ""
    left: frozenset[str] = frozenset()
    pushes: dict[int, int] = {}  # noqa: RUF012  (never changed)


def check_arguments(policy: Any, partial: Any) -> None:
    """Raise ConfigError about arguments of a restore."""
    if policy not in POLICIES:
        raise ConfigError(
            f"restore_policy must be one of {', '.join(POLICIES)}, not {policy!r:.60}"
        )
    if not isinstance(partial, bool):
        raise ConfigError(f"partial must be True or False, not {partial!r:.60}")


def restore_leaves(
    leaves: list[Leaf],
    communicator: Communicator | None,
    path: str,
    policy: Any,
    timeout: float | None,
    *,
    partial: bool,
    identity: str | None = None,
    prefix: str = "",
    refused: Exception | None = None,
    last: Callable[[], None] | None = None,
) -> Found:
    """Restore objects from a checkpoint. Collective, unless there is no group.

    Args:
        leaves: What is restored, on this rank.
        communicator: Of the ranks that restore; None: this rank alone (variables that never send).
        path: The checkpoint's folder.
        policy: What replicas take that have no copy there.
        timeout: Seconds that a call of the group waits.
        partial: Objects without an entry stay as they are; else that is an error.
        identity: The checkpoint must be this one; None for any.
        prefix: What the keys in the checkpoint have before those of the leaves.
        refused: Why an object cannot be restored, for the others to be told; or None.
        last: What the first rank does when all others have theirs: restores what is on servers.

    Returns:
        What was found.

    Raises:
        ConfigError: A wrong policy.
        CheckpointError: On every rank. Nothing was restored.
    """
    staged: list[tuple[Leaf, Any]] = []
    mine: CheckpointError | None = None
    found = Found()

    def stage() -> list[Any]:
        nonlocal staged, mine, found
        if refused is not None:
            raise refused
        check_arguments(policy, partial)
        try:
            staged, found = stage_leaves(
                leaves, communicator, path, policy, identity, prefix, partial=partial
            )
        except CheckpointError as error:
            mine = error
            return [failure_of(error), ""]
        return [None, found.identity]

    if communicator is None:
        stage()
        if mine is not None:
            raise mine
        for leaf, value in staged:
            leaf.put(value)
        return found
    communicator.require_all("restoring a checkpoint")
    members = communicator.members
    before: list[str] = []
    for _ in range(_ROUNDS):
        everyone = gathered(communicator, "checkpoint restore", stage, timeout)
        raise_failures(
            {members[rank]: one[0] for rank, one in enumerate(everyone) if one[0] is not None},
            mine,
            _NOTHING,
        )
        seen = [one[1] for one in everyone]
        if len(set(seen)) == 1:
            _put(staged, communicator, timeout, last)
            return found
        if seen == before:  # nothing is replaced, each rank has another one for good
            raise CheckpointError(
                f"the ranks see different checkpoints at {path}, {_NOTHING}: the hosts do not share this folder, or the ranks "
                f"do not name the same one"
            )
        before = seen
    raise CheckpointError(
        f"the checkpoint at {path} was replaced again and again while the ranks read it, {_NOTHING}: save less often, or "
        f"restore from a CheckpointManager, which keeps several"
    )


def stage_leaves(
    leaves: list[Leaf],
    communicator: Together | None,
    path: str,
    policy: str,
    identity: str | None,
    prefix: str,
    *,
    partial: bool,
) -> tuple[list[tuple[Leaf, Any]], Found]:
    """Read everything; once more if the checkpoint is replaced while it is read."""
    for left in reversed(range(_TRIES)):
        with Source(path) as source:
            manifest = source.manifest
            if identity is not None and manifest.identity != identity:
                raise NotFound(
                    f"the checkpoint at {path} that was restored has been replaced, so objects that were added since cannot be "
                    f"restored from it: add them (or run one step) before the next save"
                )
            try:
                skipped = (
                    _skipped_prefixes(leaves, communicator, source, policy, prefix)
                    if partial
                    else ()
                )
                found, missing = [], []
                for leaf in leaves:
                    if skipped and leaf.key.startswith(skipped):
                        continue
                    if (
                        isinstance(leaf, SlotLeaf)
                        and prefix + leaf.rule_key not in manifest.entries
                    ):
                        missing.append(
                            leaf.rule_key
                        )  # earlier versions saved state by names of variables
                        continue
                    entry = manifest.entries.get(prefix + leaf.key)
                    if entry is not None:
                        read = functools.partial(source.array, prefix + leaf.key)
                        value = leaf.stage(entry, read, policy, communicator or _alone(leaf))
                    elif isinstance(leaf, SlotLeaf):
                        value = leaf.stage_absent(manifest.entries, prefix)
                    else:
                        value = KEEP
                        missing += [] if leaf.is_optional else [leaf.key]
                    if value is not KEEP:
                        found.append((leaf, value))
                if missing and not partial:
                    raise CheckpointError(
                        f"the checkpoint at {path} has nothing for {', '.join(map(repr, [*dict.fromkeys(missing)][:8]))}; it has "
                        f"{', '.join(map(repr, sorted(manifest.entries)[:16])) or 'nothing'}. restore(…, partial=True) leaves "
                        f"such objects as they are"
                    )
                if not partial:
                    refuse_ownerless(path, ownerless_keys(leaves, manifest.entries, prefix))
            except CheckpointError:
                if left and source.was_replaced():
                    continue
                raise
            taken = {prefix + leaf.key for leaf in leaves}
            taken |= {
                key
                for key in manifest.entries
                if key.startswith(tuple(prefix + one for one in skipped))
            }
            return found, Found(
                manifest.identity, frozenset(manifest.entries.keys() - taken), manifest.pushes
            )
    raise CheckpointError(
        f"the checkpoint at {path} was replaced again and again while it was read"
    )


def _skipped_prefixes(
    leaves: list[Leaf], communicator: Together | None, source: Source, policy: str, prefix: str
) -> tuple[str, ...]:
    """Return the beginnings of the keys of optimizers that cannot use what the checkpoint has."""
    skipped = []
    for leaf in leaves:
        if not isinstance(leaf, RuleLeaf):
            continue
        entry = source.manifest.entries.get(prefix + leaf.key)
        if entry is None:
            skipped.append(leaf.below)
            continue
        assert communicator is not None, "optimizers are restored by a group"
        try:
            leaf.stage(
                entry, functools.partial(source.array, prefix + leaf.key), policy, communicator
            )
        except Corrupt:
            raise
        except CheckpointError as error:
            _log.warning("%s. This optimizer stays as it is", error)
            skipped.append(leaf.below)
    return tuple(skipped)


def _alone(leaf: Leaf) -> Communicator:
    assert isinstance(leaf, VariableLeaf)
    communicator: Communicator = leaf.variable.strategy.communicator
    return communicator


def _put(
    staged: list[tuple[Leaf, Any]],
    communicator: Communicator,
    timeout: float | None,
    last: Callable[[], None] | None,
) -> None:
    """Change everything; take it back on all ranks if an object of one refuses."""
    before: list[tuple[Leaf, Any]] = []
    key = ""
    failure: Exception | None = None
    try:
        for leaf, value in staged:
            key = leaf.key
            before.append((leaf, leaf.now()))
            leaf.put(value)
    except Exception as error:  # of the program's own object
        failure = error

    def told() -> str | None:
        return (
            None
            if failure is None
            else f"{key!r} refused its state: {type(failure).__name__}: {failure}"[:500]
        )

    everyone = gathered(communicator, "checkpoint restored", told, timeout)
    if last is not None and not any(everyone):
        try:
            if communicator.member_rank == 0:
                key = "what is on servers"
                last()
        except Exception as error:
            failure = error
        everyone = gathered(communicator, "servers restored", told, timeout)
    refused = {
        communicator.members[rank]: ["CheckpointError", one]
        for rank, one in enumerate(everyone)
        if one is not None
    }
    if not refused:
        return
    _take_back(before)
    mine = None if failure is None else CheckpointError(f"{told()}; {_NOTHING}")
    if mine is not None:
        mine.__cause__ = failure
    raise_failures(refused, mine, _NOTHING)


def _take_back(before: list[tuple[Leaf, Any]]) -> None:
    for leaf, value in reversed(before):
        leaf.put(value)


def is_local(leaves: list[Leaf]) -> bool:
    """Return whether objects are restored without the others: variables of which each rank has its own."""
    return bool(leaves) and all(
        isinstance(leaf, VariableLeaf)
        and leaf.variable.synchronization is VariableSynchronization.NONE
        for leaf in leaves
    )
