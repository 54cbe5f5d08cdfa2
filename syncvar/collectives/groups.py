"""Groups of ranks as the user sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import current
from syncvar.collectives.sync_points import gather_objects, meet
from syncvar.core.array_arguments import checked_integer
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.call_record import CallFields, CallLabel
from syncvar.runtime.communicator import Communicator, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable


class Group(MigrationHintsMixin):
    """Ranks that communicate among themselves; made by `new_group` or `split`.

    Example:
        >>> import syncvar as sv
        >>> group = sv.new_group([0])
        >>> group.rank, group.size, group.ranks, group.is_member
        (0, 1, (0,), True)
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def rank(self) -> int | None:
        """This process's rank in the group, or None for a non-member."""
        communicator = self._communicator
        return None if communicator.rank is None else communicator.home_rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._communicator.whole)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world, in the group's order."""
        return self._communicator.whole

    @property
    def is_member(self) -> bool:
        """Whether this process belongs to the group."""
        return self._communicator.rank is not None

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Group | None:
        """Split the group: ranks of the same color form a new group, ordered by (key, rank).

        Collective over this group.

        Args:
            color: Any integer; None to belong to no new group.
            key: Order within the new group.
            timeout: Seconds; None means the job's default.

        Returns:
            The new group of this rank's color, or None for color None.

        Raises:
            ConfigError: `color` or `key` is not an integer.
        """

        def mine() -> list[int | None]:
            return [
                None if color is None else checked_integer("color", color),
                checked_integer("key", key),
            ]

        parent = communicator_of(self)
        current().refuse_in_block("group.split")
        everyone = gather_objects(parent, "split", mine, timeout)
        if color is None:
            return None
        chosen = sorted(
            (theirs[1], rank) for rank, theirs in enumerate(everyone) if theirs[0] == color
        )
        members = tuple(parent.members[rank] for _, rank in chosen)
        return Group(current().communicator(_identity(parent, members), members))

    def destroy(self) -> None:
        """Free what the group holds on this rank; later calls on it raise UsageError.

        Idempotent, not collective. A group without references is freed automatically.

        Raises:
            UsageError: The group is the world.

        Example:
            >>> import syncvar as sv
            >>> group = sv.new_group([0])
            >>> group.destroy()
        """
        if self._communicator is current().world:
            raise UsageError("the world cannot be destroyed; sv.shutdown() leaves the job")
        self._communicator.destroy()

    def __repr__(self) -> str:
        return f"Group(ranks={list(self.ranks)}, rank={self.rank})"


def new_group(ranks: Iterable[int], *, timeout: float | None = None) -> Group:
    """Make a group of ranks of the world.

    Collective over the world, with the same list on every rank.

    Args:
        ranks: Distinct ranks of the world, in the order of the group.
        timeout: Seconds; None means the job's default.

    Returns:
        The group, on every rank of the world; `is_member` says whether this rank belongs to it.

    Raises:
        ConfigError: The list is empty, or a rank is outside the world or named twice.
        MismatchError: The lists differ between ranks.
    """
    context = current()
    context.refuse_in_block("sv.new_group")
    world = context.world
    members: tuple[int, ...] = ()
    refused: ConfigError | None = None
    try:
        members = _checked_members(ranks, world.size)
    except ConfigError as error:
        refused = error

    def check() -> None:
        if refused is not None:
            raise refused

    identity = _identity(world, members)
    label = CallLabel(f"new_group({list(members)})", CallFields("new_group"))
    meet(world, label, ("new_group", members), timeout, check)
    return Group(context.communicator(identity, members))


def _checked_members(ranks: Iterable[int], world_size: int) -> tuple[int, ...]:
    if isinstance(ranks, str | bytes) or not hasattr(ranks, "__iter__"):
        raise ConfigError(f"the ranks of a group must be a list of integers, not {ranks!r}")
    members = tuple(checked_integer("a rank of a group", rank) for rank in ranks)
    if not members:
        raise ConfigError("a group needs at least one rank")
    outside = [rank for rank in members if not 0 <= rank < world_size]
    if outside:
        raise ConfigError(f"ranks {outside} are outside a world of {world_size}")
    if len(set(members)) != len(members):
        raise ConfigError(f"a rank is named twice in {list(members)}")
    return members


def by_rank(communicator: Communicator, made: list[Any], nothing: Any) -> list[Any]:
    """Return one item for each rank; `nothing` for ranks that left a block of `sv.uneven`.

    `made` has one item for each rank that takes part.
    """
    if len(made) == len(communicator.whole):
        return made
    known = dict(zip(communicator.present, made, strict=True))
    return [known.get(rank, nothing) for rank in range(len(communicator.whole))]


def communicator_of(group: Any) -> Communicator:
    """Return the communicator of `group`, or of the world for None.

    Raises:
        ConfigError: `group` is not a group.
        UsageError: The group belongs to a job that this process has left.
    """
    if group is None:
        return current().world
    if not isinstance(group, Group):
        from syncvar.core.migration_hints import group_hint

        given = f"{type(group).__name__}{group_hint(group)}"
        raise ConfigError(f"group must be made by sv.new_group or split, not {given}")
    communicator = group._communicator  # noqa: SLF001
    if communicator.engine is not current().engine:
        raise UsageError(
            "this group belongs to a job that this process has left; make it again after sv.init()"
        )
    return communicator


def _identity(parent: Communicator, members: tuple[int, ...]) -> int:
    return fingerprint("group", parent.identity, parent.next_call, members)


def checked_root(root: Any, communicator: Communicator) -> int:
    """Return `root` as an index into the ranks that make the call.

    Raises:
        ConfigError: `root` is not an integer, or outside the group.
        UsageError: The root has left the block of `sv.uneven` that this rank is in.
    """
    size = len(communicator.whole)
    rank = checked_integer("root", root)
    if not 0 <= rank < size:
        raise ConfigError(f"root {rank} is not in the group: its ranks are 0 to {size - 1}")
    if communicator.uneven is None:
        return rank
    if communicator.whole[rank] not in communicator.members:
        raise UsageError(
            f"rank {rank} is the root of this call and has left its loop in sv.uneven: pass a rank "
            f"that still works ({', '.join(map(str, communicator.present))}), for instance "
            f"block.working[0]"
        )
    return communicator.members.index(communicator.whole[rank])
