"""Restore, all or nothing: every rank reads and checks, all agree, and only then objects change.

If another job saves meanwhile, some ranks may have read the old checkpoint and some the new one.
The exchanged identities show that, and all ranks read again. Previous values are kept until all
ranks have succeeded. If one object raises on its state, all ranks restore the previous values.

Rank 0 restores server-side variables alone, and leaves a record on the servers
(`restore_for_all`). The other workers wait for that record in the same call and take from it the
data that each worker keeps for itself (plain data and states). A worker that restarts repeats its
calls and finds their records, so no checkpoint is restored twice.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.checkpoint.checkpoint_reader import CheckpointReader
from syncvar.checkpoint.optimizer_state import RuleLeaf, SlotLeaf, ownerless_keys, refuse_ownerless
from syncvar.checkpoint.save_plan import failure_of, raise_failures
from syncvar.checkpoint.server_leaves import read_report, restore_record, write_servers
from syncvar.checkpoint.trackables import KEEP, FeedbackLeaf, VariableLeaf, gather
from syncvar.core.errors import (
    CheckpointError,
    ConfigError,
    Corrupt,
    MismatchError,
    NotFound,
    SyncvarError,
    TransportError,
)
from syncvar.core.progress_line import work_line
from syncvar.variables.policy import VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.checkpoint.server_leaves import ServerLeaves
    from syncvar.checkpoint.trackables import CheckpointGroup, Leaf, SoloGroup
    from syncvar.runtime.communicator import Communicator

POLICIES = ("same_rank_or_initial", "cycle", "error")
_TRIES = 3  # of one rank
_ROUNDS = 10  # of all ranks: a save meanwhile lets some see the old checkpoint, some the new one
_NOTHING = "nothing was restored"
_log = logging.getLogger("syncvar")


class CheckpointInfo(NamedTuple):
    """Description of a checkpoint that has been read."""

    identity: str = ""  # its identity
    left: frozenset[str] = frozenset()  # its keys that no object has used
    # rank -> number of its pushes to servers that the values include
    pushes: dict[int, int] = {}  # noqa: RUF012  (never changed)


class RestoreOptions(NamedTuple):
    """Options of a restore."""

    policy: Any  # what replicas without a saved copy take
    timeout: float | None  # seconds that a call of the group waits
    partial: bool  # whether objects without an entry keep their values; otherwise they are an error
    identity: str | None = None  # required identity of the checkpoint; None for any
    prefix: str = ""  # prefix of the saved keys of the leaves


def check_options(options: RestoreOptions) -> None:
    """Raise ConfigError for wrong arguments of a restore."""
    policy, partial = options.policy, options.partial
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
    options: RestoreOptions,
    refused: Exception | None = None,
    last: Callable[[], None] | None = None,
) -> CheckpointInfo:
    """Restore leaves from a checkpoint. Collective, unless there is no group.

    `refused` is the error of an object that cannot be restored, reported to the other ranks. The
    first rank calls `last` after all have succeeded; it restores server-side variables.
    """
    staged: list[tuple[Leaf, Any]] = []
    mine: CheckpointError | None = None
    found = CheckpointInfo()

    def stage() -> list[Any]:
        nonlocal staged, mine, found
        if refused is not None:
            raise refused
        check_options(options)
        try:
            staged, found = stage_leaves(leaves, communicator, path, options)
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
        everyone = gather(communicator, "checkpoint restore", stage, options.timeout)
        results = zip(members, everyone, strict=True)
        failures = {rank: one[0] for rank, one in results if one[0] is not None}
        raise_failures(failures, mine, _NOTHING)
        seen = [one[1] for one in everyone]
        if len(set(seen)) == 1:
            _put(staged, communicator, options.timeout, last)
            return found
        if seen == before:  # nobody replaces it: the ranks read different folders
            raise CheckpointError(
                f"the ranks see different checkpoints at {path}, {_NOTHING}: the hosts do not "
                "share this folder, or the ranks pass different paths"
            )
        before = seen
    raise CheckpointError(
        f"the checkpoint at {path} was replaced {_ROUNDS} times while the ranks read it, "
        f"{_NOTHING}: save less often, or restore from a CheckpointManager, which keeps several"
    )


def stage_leaves(
    leaves: list[Leaf], communicator: CheckpointGroup | None, path: str, options: RestoreOptions
) -> tuple[list[tuple[Leaf, Any]], CheckpointInfo]:
    """Read the new value of every leaf; read again if the checkpoint is replaced meanwhile."""
    for left in reversed(range(_TRIES)):
        rank = 1 if communicator is None else communicator.member_rank
        with work_line(rank) as line, CheckpointReader(path, line) as source:
            if options.identity not in (None, source.manifest.identity):
                raise NotFound(
                    f"the restored checkpoint at {path} has been replaced, so objects that were "
                    f"added later cannot be restored from it: add them (or run one step) before "
                    f"the next save"
                )
            try:
                return _stage(leaves, communicator, source, path, options)
            except CheckpointError:
                if not left or not source.was_replaced():
                    raise
    raise CheckpointError(f"the checkpoint at {path} was replaced {_TRIES} times during the read")


def _stage(
    leaves: list[Leaf],
    communicator: CheckpointGroup | None,
    source: CheckpointReader,
    path: str,
    options: RestoreOptions,
) -> tuple[list[tuple[Leaf, Any]], CheckpointInfo]:
    entries, prefix = source.manifest.entries, options.prefix
    skipped = _skipped_prefixes(leaves, communicator, source, options)
    found, missing = [], []
    for leaf in leaves:
        if leaf.key.startswith(skipped):
            continue
        if isinstance(leaf, SlotLeaf) and prefix + leaf.rule_key not in entries:
            missing.append(leaf.rule_key)  # earlier versions saved state by names of variables
            continue
        entry = entries.get(prefix + leaf.key)
        if entry is not None:
            read = functools.partial(source.array, prefix + leaf.key)
            value = leaf.stage(entry, read, options.policy, communicator or _group_of(leaf))
        elif isinstance(leaf, SlotLeaf | FeedbackLeaf):
            value = leaf.stage_absent(entries, prefix)
        else:
            value = KEEP
            missing += [] if leaf.is_optional else [leaf.key]
        if value is not KEEP:
            found.append((leaf, value))
    if missing and not options.partial:
        absent = ", ".join(map(repr, [*dict.fromkeys(missing)][:8]))
        present = ", ".join(map(repr, sorted(entries)[:16])) or "nothing"
        raise CheckpointError(
            f"the checkpoint at {path} has nothing for {absent}; it has {present}. "
            f"restore(…, partial=True) leaves such objects unchanged"
        )
    if not options.partial:
        refuse_ownerless(path, ownerless_keys(leaves, entries, prefix))
    below = tuple(prefix + one for one in skipped)
    used = {prefix + leaf.key for leaf in leaves}
    used |= {key for key in entries if key.startswith(below)}
    left = frozenset(entries.keys() - used)
    return found, CheckpointInfo(source.manifest.identity, left, source.manifest.pushes)


def refused_state(key: str, error: Exception) -> str:
    """Describe an object of the program that raised an error when it got its state."""
    return f"{key!r} refused its state: {type(error).__name__}: {error}"[:500]


def _skipped_prefixes(
    leaves: list[Leaf],
    communicator: CheckpointGroup | None,
    source: CheckpointReader,
    options: RestoreOptions,
) -> tuple[str, ...]:
    """Return the key prefixes of optimizers that cannot use the saved state, if partial."""
    if not options.partial:
        return ()
    skipped, prefix = [], options.prefix
    for leaf in leaves:
        if not isinstance(leaf, RuleLeaf):
            continue
        entry = source.manifest.entries.get(prefix + leaf.key)
        if entry is None:
            skipped.append(leaf.below)
            continue
        assert communicator is not None, "optimizers are restored by a group"
        read = functools.partial(source.array, prefix + leaf.key)
        try:
            leaf.stage(entry, read, options.policy, communicator)
        except Corrupt:
            raise
        except CheckpointError as error:
            _log.warning("%s. This optimizer stays unchanged", error)
            skipped.append(leaf.below)
    return tuple(skipped)


def _group_of(leaf: Leaf) -> Communicator:
    assert isinstance(leaf, VariableLeaf)
    communicator: Communicator = leaf.variable.strategy.communicator
    return communicator


def _put(
    staged: list[tuple[Leaf, Any]],
    communicator: Communicator,
    timeout: float | None,
    last: Callable[[], None] | None,
) -> None:
    """Change all objects; change them back on all ranks if an object of one rank raises."""
    before: list[tuple[Leaf, Any]] = []
    key = ""
    failure: Exception | None = None
    try:
        for leaf, value in staged:
            key = leaf.key
            before.append((leaf, leaf.now()))
            leaf.put(value)
    except Exception as error:  # raised by an object of the program
        failure = error

    def result() -> str | None:
        return None if failure is None else refused_state(key, failure)

    everyone = gather(communicator, "checkpoint restored", result, timeout)
    if last is not None and not any(everyone):
        try:
            if communicator.member_rank == 0:
                key = "server-side variables"
                last()
        except Exception as error:
            failure = error
        everyone = gather(communicator, "servers restored", result, timeout)
    results = zip(communicator.members, everyone, strict=True)
    refused = {rank: ["CheckpointError", one] for rank, one in results if one is not None}
    if not refused:
        return
    for leaf, value in reversed(before):
        leaf.put(value)
    mine = None if failure is None else CheckpointError(f"{result()}; {_NOTHING}")
    if mine is not None:
        mine.__cause__ = failure
    raise_failures(refused, mine, _NOTHING)


def is_local(leaves: list[Leaf]) -> bool:
    """Return whether a restore needs no other rank: all leaves are NONE variables."""
    return bool(leaves) and all(
        isinstance(leaf, VariableLeaf)
        and leaf.variable.synchronization is VariableSynchronization.NONE
        for leaf in leaves
    )


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
        where, found = _restore_servers(leaves, on_servers, group, number, where, options)
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
            _put_leaf(leaf, leaf.accept(mine))
    return record["path"], CheckpointInfo(
        record["identity"], frozenset(record["left"]), record["pushes"]
    )


def _restore_servers(
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
            own = {one.key: data for one in leaves if (data := getattr(one, "worker_states", None))}
            record |= {"identity": found.identity, "left": sorted(found.left), "own": own}
            record["pushes"] = found.pushes
            for leaf, value in staged:
                done.append((leaf, leaf.now()))
                _put_leaf(leaf, value)
        on_servers.write(number, record, options.timeout)
    except Exception as error:
        for leaf, before in reversed(done):
            leaf.put(before)
        if isinstance(error, SyncvarError) and not isinstance(error, TransportError):
            # The other workers wait for a record.
            record |= {"own": {}, "failure": failure_of(error)}
            write_servers(on_servers.strategy, [], number, record, options.timeout)
        raise
    return path, found


def _put_leaf(leaf: Leaf, value: Any) -> None:
    try:
        leaf.put(value)
    except Exception as error:  # raised by an object of the program
        raise CheckpointError(refused_state(leaf.key, error)) from error
