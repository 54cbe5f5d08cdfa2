"""Mesh: the ranks of the world as a grid, with a group for each line of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.collectives.groups import Group
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    default = (
        ("column", "row")
        if len(lengths) == 2
        else tuple(f"axis{number}" for number in range(len(lengths)))
    )
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
