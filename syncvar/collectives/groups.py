"""Groups of ranks as the user sees them, and meshes: a group for each line of a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.collectives.stage_builders import gather_objects, meet
from syncvar.core.array_arguments import checked_integer
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.html_table import html_table
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncvar.runtime.communicator import Communicator


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

    def _repr_html_(self) -> str:
        rows = [("size", self.size), ("ranks", list(self.ranks)), ("rank here", self.rank)]
        return html_table("sv.Group", rows)


def new_group(
    ranks: Iterable[int],
    *,
    members_only: bool = False,
    group: Group | None = None,
    timeout: float | None = None,
) -> Group:
    """Make a group of ranks of the world, or of another group.

    Collective over the world, or `group`, with the same list on every rank. With `members_only`
    only the ranks of the list call it.

    Args:
        ranks: Distinct ranks of the world, or of `group`, in the order of the new group.
        members_only: Whether only the members make the call, as MPI_Comm_create_group. If they make
            several groups of the same ranks, they all do so in the same order.
        group: Group whose ranks the list names; None means the world.
        timeout: Seconds; None means the job's default.

    Returns:
        The group, on every rank that makes the call; `is_member` says whether this rank belongs to
        it.

    Raises:
        ConfigError: The list is empty, or a rank is outside the world or `group`, or named twice.
            With `members_only`: or this rank is not in the list.
        MismatchError: The lists differ between ranks. With `members_only` ranks with other lists
            wait, until the deadline at the latest.

    Cost: one exchange of small messages between the ranks that make the call.

    Example:
        >>> import syncvar as sv
        >>> group = sv.new_group([0])
        >>> sv.all_reduce(2.0, group=group)
        array(2.)
        >>> sv.new_group([0], members_only=True).ranks
        (0,)
    """
    context = current()
    context.refuse_in_block("sv.new_group")
    parent = communicator_of(group)
    chosen: tuple[int, ...] = ()
    refused: ConfigError | None = None
    try:
        chosen = _checked_members(ranks, parent.size, "a world" if group is None else "a group")
        if members_only and parent.rank not in chosen:
            raise ConfigError(
                f"this rank is not in {list(chosen)}: with members_only=True only the ranks of "
                "the list call sv.new_group"
            )
    except ConfigError as error:
        if members_only:
            raise  # nobody else is known to take part
        refused = error

    def check() -> None:
        if refused is not None:
            raise refused

    members = tuple(parent.members[rank] for rank in chosen)
    meeting = _meeting_place(parent, members) if members_only else parent
    identity = _identity(meeting, members)
    spec = CollectiveSpec("new_group", options=chosen, shown=(list(chosen),))
    meet(meeting, spec, timeout, check)
    return Group(context.communicator(identity, members))


def _meeting_place(parent: Communicator, members: tuple[int, ...]) -> Communicator:
    """Return the communicator in which some ranks agree on groups of themselves.

    It numbers these groups, because other members of the parent do not take part.
    """
    found = parent.meeting_places.get(members)
    if found is None:
        identity = fingerprint("members only", parent.identity, members)
        found = parent.meeting_places[members] = current().communicator(
            identity, members, shares=False
        )
    return found


def _checked_members(ranks: Iterable[int], size: int, whole: str) -> tuple[int, ...]:
    if isinstance(ranks, str | bytes) or not hasattr(ranks, "__iter__"):
        raise ConfigError(f"the ranks of a group must be a list of integers, not {ranks!r}")
    members = tuple(checked_integer("a rank of a group", rank) for rank in ranks)
    if not members:
        raise ConfigError("a group needs at least one rank")
    outside = [rank for rank in members if not 0 <= rank < size]
    if outside:
        raise ConfigError(f"ranks {outside} are outside {whole} of {size}")
    if len(set(members)) != len(members):
        raise ConfigError(f"a rank is named twice in {list(members)}")
    return members


def by_rank(communicator: Communicator, output: list[Any], nothing: Any) -> list[Any]:
    """Return results in rank order; `nothing` for ranks that have left a block of `sv.uneven`."""
    if len(output) == len(communicator.whole):
        return output
    known = dict(zip(communicator.present, output, strict=True))
    return [known.get(rank, nothing) for rank in range(len(communicator.whole))]


def communicator_of(group: Any) -> Communicator:
    """Return the communicator of `group`, or of the world for None."""
    if group is None:
        return current().world
    if not isinstance(group, Group):
        from syncvar.core.migration_hints import group_hint

        shown = f"{type(group).__name__}{group_hint(group)}"
        raise ConfigError(f"group must be made by sv.new_group or split, not {shown}")
    communicator = group._communicator  # noqa: SLF001
    if communicator.engine is not current().engine:
        raise UsageError(
            "this group belongs to a job that this process has left; make it again after "
            "sv.init(), in an elastic job inside the function of sv.elastic.run"
        )
    return communicator


def _identity(parent: Communicator, members: tuple[int, ...]) -> int:
    return fingerprint("group", parent.identity, parent.next_call, members)


def checked_root(root: Any, communicator: Communicator) -> int:
    """Return the root as a rank of the group; raise ConfigError if it is none."""
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


class Mesh:
    """Ranks in a grid of any number of axes; the last axis varies fastest. Made by `mesh`.

    Example:
        >>> import syncvar as sv
        >>> grid = sv.mesh((1, 1))
        >>> grid.shape, grid.coordinates, grid.row.size, grid.axis("column").ranks
        ((1, 1), (0, 0), 1, (0,))
    """

    def __init__(
        self, shape: tuple[int, ...], names: tuple[str, ...], rank: int, groups: tuple[Group, ...]
    ) -> None:
        self.shape = shape
        self.names = names
        self._groups = groups
        self.coordinates = tuple(int(one) for one in np.unravel_index(rank, shape))

    def axis(self, axis: int | str) -> Group:
        """Return the group of the ranks whose coordinates differ along one axis only.

        Args:
            axis: Number or name of the axis.

        Raises:
            ConfigError: The mesh has no such axis.
        """
        if isinstance(axis, str):
            if axis not in self.names:
                raise ConfigError(
                    f"the mesh has no axis {axis!r}; its axes are {', '.join(self.names)}"
                )
            return self._groups[self.names.index(axis)]
        if isinstance(axis, bool) or not -len(self.shape) <= axis < len(self.shape):
            raise ConfigError(f"the mesh has {len(self.shape)} axes, not axis {axis!r}")
        return self._groups[axis]

    @property
    def row(self) -> Group:
        """Group of the ranks in this rank's row, in a mesh of two axes."""
        return self._of_two(1)

    @property
    def column(self) -> Group:
        """Group of the ranks in this rank's column, in a mesh of two axes."""
        return self._of_two(0)

    def rank_at(self, *coordinates: int) -> int:
        """Return the rank of the world at the given coordinates."""
        try:
            return int(np.ravel_multi_index(coordinates, self.shape))
        except ValueError:
            raise ConfigError(
                f"{coordinates} is no place in a mesh of shape {self.shape}"
            ) from None

    def _of_two(self, axis: int) -> Group:
        if len(self.shape) != 2:
            raise ConfigError(
                f"a mesh of shape {self.shape} has no rows and columns; use axis(number)"
            )
        return self._groups[axis]

    def __repr__(self) -> str:
        return f"Mesh(shape={self.shape}, names={self.names}, coordinates={self.coordinates})"

    def _repr_html_(self) -> str:
        rows = [("shape", self.shape), ("names", self.names), ("coordinates", self.coordinates)]
        return html_table("sv.Mesh", rows)


def mesh(
    shape: Sequence[int], names: Sequence[str] | None = None, *, timeout: float | None = None
) -> Mesh:
    """Arrange the ranks of the world in a grid and make a group of each line.

    Collective over the world.

    Args:
        shape: Lengths of the axes; their product is the world size. One of them may be -1.
        names: Names of the axes. Two axes are called column and row by default; the axis "row"
            joins the ranks of a row.
        timeout: Seconds; None means the job's default.

    Returns:
        The mesh, with a group for each axis through this rank.

    Raises:
        ConfigError: The shape does not fit the world, or two axes have one name. The other ranks
            raise MismatchError.

    Cost: one exchange of small objects for each axis.

    Example:
        >>> import syncvar as sv
        >>> sv.mesh((1, -1)).shape
        (1, 1)
    """
    world = current().world
    lengths = _checked_shape(shape, world.size)
    # Of two axes the first one leads down a column, the second along a row.
    default = tuple(f"axis{number}" for number in range(len(lengths)))
    if len(lengths) == 2:
        default = ("column", "row")
    called = default if names is None else tuple(names)
    if (
        len(called) != len(lengths)
        or len(set(called)) != len(called)
        or not all(isinstance(one, str) for one in called)
    ):
        raise ConfigError(
            f"names must be {len(lengths)} different texts, one for each axis, not {names!r}"
        )
    rank = world.member_rank
    place = [int(one) for one in np.unravel_index(rank, lengths)]
    whole = Group(world)
    groups = []
    for axis in range(len(lengths)):
        others = [*place[:axis], 0, *place[axis + 1 :]]
        color = int(np.ravel_multi_index(others, lengths))
        group = whole.split(color, place[axis], timeout=timeout)
        assert group is not None
        groups.append(group)
    return Mesh(lengths, called, rank, tuple(groups))


def _checked_shape(shape: Any, size: int) -> tuple[int, ...]:
    try:
        lengths = [int(one) for one in shape]
    except (TypeError, ValueError):
        raise ConfigError(f"the shape of a mesh must be some integers, not {shape!r}") from None
    if lengths.count(-1) == 1:
        known = -int(np.prod(lengths, dtype=np.int64))
        if known > 0 and size % known == 0:
            lengths[lengths.index(-1)] = size // known
    if (
        not lengths
        or any(length < 1 for length in lengths)
        or int(np.prod(lengths, dtype=np.int64)) != size
    ):
        raise ConfigError(
            f"a mesh of shape {tuple(shape)} does not hold exactly the {size} ranks of the world"
        )
    return tuple(lengths)
