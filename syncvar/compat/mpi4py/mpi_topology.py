"""Communicators with a topology: grids, graphs, and graphs of which each rank knows a part."""

from __future__ import annotations

import math
from functools import partialmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from syncvar.compat.mpi4py import mpi_collectives as plans
from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_communicator import Comm, Intracomm
from syncvar.compat.mpi4py.mpi_errors import MpiException

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class CartTopology(NamedTuple):
    """A grid; the last axis varies fastest."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    kind: int = const.CART


class GraphTopology(NamedTuple):
    """A graph that all ranks know: the neighbours of rank r are `edges[ends[r - 1]:ends[r]]`."""

    ends: tuple[int, ...]
    edges: tuple[int, ...]
    kind: int = const.GRAPH


class DistGraphTopology(NamedTuple):
    """The neighbours of this rank in a directed graph."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    source_weights: tuple[int, ...] | None
    destination_weights: tuple[int, ...] | None
    kind: int = const.DIST_GRAPH


class Topocomm(Intracomm):
    """A communicator whose ranks have neighbours.

    Args:
        comm: Communicator with such a topology to refer to; None for a null communicator.
    """

    _kind = const.UNDEFINED  # of the topology

    def __new__(cls, comm: Comm | None = None) -> Self:
        """Return a reference to the same communicator, or a null one."""
        if comm is not None and comm and (comm.topology != cls._kind or not comm.is_topo):
            raise TypeError(f"the communicator is no {cls.__name__}")
        return super().__new__(cls, comm)

    @property
    def inneighbors(self) -> list[int]:
        """Ranks from which this rank receives, one for each receive block."""
        raise MpiException(const.ERR_TOPOLOGY, "the communicator has no topology")

    @property
    def outneighbors(self) -> list[int]:
        """Ranks to which this rank sends, one for each send block."""
        return self.inneighbors

    @property
    def indegree(self) -> int:
        """Number of ranks from which this rank receives."""
        return len(self.inneighbors)

    @property
    def outdegree(self) -> int:
        """Number of ranks to which this rank sends."""
        return len(self.outneighbors)

    @property
    def degrees(self) -> tuple[int, int]:
        """Numbers of ranks from which this rank receives, and to which it sends."""
        return self.indegree, self.outdegree

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """Ranks from which this rank receives, and to which it sends."""
        return self.inneighbors, self.outneighbors

    inoutneighbors = inoutedges

    @property
    def inedges(self) -> list[int]:
        """Ranks from which this rank receives."""
        return self.inneighbors

    @property
    def outedges(self) -> list[int]:
        """Ranks to which this rank sends."""
        return self.outneighbors

    def send_order(self) -> Iterable[int]:
        """Return the send blocks in the order in which their receivers number them."""
        return range(len(self.outneighbors))

    Neighbor_allgather = partialmethod(Comm._now_buffers, plans.plan_neighbor_allgather)
    Neighbor_allgatherv = partialmethod(Comm._now_buffers, plans.plan_neighbor_allgatherv)
    Neighbor_alltoall = partialmethod(Comm._now_buffers, plans.plan_neighbor_alltoall)
    Neighbor_alltoallv = partialmethod(Comm._now_buffers, plans.plan_neighbor_alltoallv)
    Neighbor_alltoallw = partialmethod(Comm._now_buffers, plans.plan_neighbor_alltoallw)
    Ineighbor_allgather = partialmethod(Comm._soon, plans.plan_neighbor_allgather)
    Ineighbor_allgatherv = partialmethod(Comm._soon, plans.plan_neighbor_allgatherv)
    Ineighbor_alltoall = partialmethod(Comm._soon, plans.plan_neighbor_alltoall)
    Ineighbor_alltoallv = partialmethod(Comm._soon, plans.plan_neighbor_alltoallv)
    Ineighbor_alltoallw = partialmethod(Comm._soon, plans.plan_neighbor_alltoallw)
    Neighbor_allgather_init = partialmethod(Comm._persistent, plans.plan_neighbor_allgather)
    Neighbor_allgatherv_init = partialmethod(Comm._persistent, plans.plan_neighbor_allgatherv)
    Neighbor_alltoall_init = partialmethod(Comm._persistent, plans.plan_neighbor_alltoall)
    Neighbor_alltoallv_init = partialmethod(Comm._persistent, plans.plan_neighbor_alltoallv)
    Neighbor_alltoallw_init = partialmethod(Comm._persistent, plans.plan_neighbor_alltoallw)
    neighbor_allgather = partialmethod(Comm._now, plans.plan_neighbor_allgather_objects)
    neighbor_alltoall = partialmethod(Comm._now, plans.plan_neighbor_alltoall_objects)


class Cartcomm(Topocomm):
    """A communicator whose ranks form a grid."""

    _kind = const.CART

    @classmethod
    def create_cart(cls, comm: Intracomm, dims: Sequence[int], periods: Any) -> Any:
        """Return a grid of the first ranks of a communicator; a null one on the other ranks."""
        lengths = (dims,) if isinstance(dims, int | np.integer) else tuple(dims)
        lengths = tuple(int(one) for one in lengths)
        if periods is None:
            periods = [False] * len(lengths)
        elif isinstance(periods, bool | int):
            periods = [periods] * len(lengths)
        if len(periods) != len(lengths):
            raise ValueError(f"{len(lengths)} axes need as many periods, not {len(periods)}")
        nodes = math.prod(lengths)
        if any(one < 1 for one in lengths) or nodes > comm.size:
            raise MpiException(
                const.ERR_DIMS, f"a grid of {list(lengths)} does not fit {comm.size} ranks"
            )
        topology = CartTopology(lengths, tuple(bool(one) for one in periods))
        return _with_topology(comm, range(nodes), topology, cls)

    @property
    def _grid(self) -> CartTopology:
        topology: CartTopology = self.state.topology
        return topology

    @property
    def dims(self) -> list[int]:
        """Lengths of the axes."""
        return list(self._grid.dims)

    @property
    def periods(self) -> list[int]:
        """1 for each axis whose ends are neighbours, 0 for others."""
        return [int(one) for one in self._grid.periods]

    @property
    def coords(self) -> list[int]:
        """Coordinates of this rank."""
        return self.Get_coords(self.rank)

    def Get_dim(self) -> int:
        """Return the number of axes."""
        return len(self._grid.dims)

    dim = ndim = property(Get_dim)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return lengths, periods and coordinates."""
        return self.dims, self.periods, self.coords

    topo = property(Get_topo)

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise MpiException(const.ERR_RANK, f"rank {rank} is not in 0..{self.size - 1}")
        if not self._grid.dims:
            return []
        return [int(one) for one in np.unravel_index(rank, self._grid.dims)]

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at some coordinates, which wrap along periodic axes."""
        rank = self._rank_at(list(coords))
        if rank == const.PROC_NULL:
            raise MpiException(const.ERR_ARG, f"{list(coords)} is outside the grid {self.dims}")
        return rank

    def _rank_at(self, coords: list[int]) -> int:
        grid = self._grid
        places = []
        for place, length, wraps in zip(coords, grid.dims, grid.periods, strict=True):
            if not wraps and not 0 <= place < length:
                return const.PROC_NULL
            places.append(place % length)
        return int(np.ravel_multi_index(places, grid.dims)) if places else 0

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks to receive from and to send to, for a shift along an axis."""
        if not 0 <= direction < len(self._grid.dims):
            raise MpiException(const.ERR_DIMS, f"the grid has no axis {direction}")
        return self._beside(direction, -disp), self._beside(direction, disp)

    def _beside(self, direction: int, disp: int) -> int:
        coords = self.coords
        coords[direction] += disp
        return self._rank_at(coords)

    def Sub(self, remain_dims: Sequence[bool]) -> Cartcomm:
        """Return the communicator of the grid along some axes, through this rank."""
        grid, coords = self._grid, self.coords
        stays = [bool(one) for one in remain_dims]
        fixed = [place for place, one in zip(coords, stays, strict=True) if not one]
        lengths = [length for length, one in zip(grid.dims, stays, strict=True) if not one]
        color = int(np.ravel_multi_index(fixed, lengths)) if fixed else 0
        comm = self.Split(color, self.rank)
        dims = tuple(one for one, stay in zip(grid.dims, stays, strict=True) if stay)
        periods = tuple(one for one, stay in zip(grid.periods, stays, strict=True) if stay)
        comm.state.topology = CartTopology(dims, periods)
        return Cartcomm.of(comm.state)  # type: ignore[no-any-return]

    @property
    def inneighbors(self) -> list[int]:
        """The ranks before and behind this one along each axis; PROC_NULL where there is none."""
        return [
            self._beside(axis, step) for axis in range(len(self._grid.dims)) for step in (-1, 1)
        ]

    def send_order(self) -> Iterable[int]:
        """Return the send blocks in the order in which their receivers number them.

        The block for the rank before this one is what that rank gets from the rank behind it.
        """
        return [slot ^ 1 for slot in range(2 * len(self._grid.dims))]


class Graphcomm(Topocomm):
    """A communicator whose ranks form a graph that all of them know."""

    _kind = const.GRAPH

    @classmethod
    def create_graph(cls, comm: Intracomm, index: Sequence[int], edges: Sequence[int]) -> Any:
        """Return a graph of the first ranks of a communicator; a null one on the other ranks."""
        if len(index) > 1 and index[0] == 0 and index[-1] == len(edges):
            index = index[1:]  # mpi4py takes the form of adjacency lists, too
        if len(index) > comm.size:
            raise MpiException(
                const.ERR_TOPOLOGY, f"{len(index)} nodes are more than {comm.size} ranks"
            )
        topology = GraphTopology(tuple(map(int, index)), tuple(map(int, edges)))
        return _with_topology(comm, range(len(index)), topology, cls)

    @property
    def _graph(self) -> GraphTopology:
        topology: GraphTopology = self.state.topology
        return topology

    def Get_dims(self) -> tuple[int, int]:
        """Return the numbers of nodes and edges."""
        return len(self._graph.ends), len(self._graph.edges)

    dims = property(Get_dims)

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self._graph.ends)

    @property
    def nedges(self) -> int:
        """Number of edges."""
        return len(self._graph.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return the index and the edges."""
        return list(self._graph.ends), list(self._graph.edges)

    topo = property(Get_topo)

    @property
    def index(self) -> list[int]:
        """For each rank the number of neighbours of it and all lower ranks."""
        return list(self._graph.ends)

    @property
    def edges(self) -> list[int]:
        """Neighbours of all ranks."""
        return list(self._graph.edges)

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        if not 0 <= rank < self.size:
            raise MpiException(const.ERR_RANK, f"rank {rank} is not in 0..{self.size - 1}")
        first = self._graph.ends[rank - 1] if rank else 0
        return list(self._graph.edges[first : self._graph.ends[rank]])

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbours of a rank."""
        return len(self.Get_neighbors(rank))

    @property
    def nneighbors(self) -> int:
        """Number of neighbours of this rank."""
        return self.Get_neighbors_count(self.rank)

    @property
    def neighbors(self) -> list[int]:
        """Neighbours of this rank."""
        return self.Get_neighbors(self.rank)

    @property
    def inneighbors(self) -> list[int]:
        """Neighbours of this rank."""
        return self.neighbors


class Distgraphcomm(Topocomm):
    """A communicator with a directed graph of which each rank knows its neighbours."""

    _kind = const.DIST_GRAPH

    @classmethod
    def create_adjacent(
        cls,
        comm: Intracomm,
        sources: Sequence[int],
        destinations: Sequence[int],
        source_weights: Any,
        destination_weights: Any,
    ) -> Any:
        """Return a graph of all ranks, each of which knows its neighbours."""
        topology = DistGraphTopology(
            tuple(sources or ()),
            tuple(destinations or ()),
            _weights(source_weights),
            _weights(destination_weights),
        )
        return _with_topology(comm, range(comm.size), topology, cls)

    @classmethod
    def create_dist_graph(
        cls,
        comm: Intracomm,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Any,
    ) -> Any:
        """Return a graph of all ranks from the edges that the ranks contribute."""
        starts = [
            rank for rank, degree in zip(sources, degrees, strict=True) for _ in range(degree)
        ]
        is_weighted = _weights(weights) is not None
        values = _weights(weights) or [1] * len(starts)
        edges = list(zip(map(int, starts), map(int, destinations), map(int, values), strict=True))
        everyone = [one for part in comm.allgather_plain(edges) for one in part]
        incoming = [(one, weight) for one, other, weight in everyone if other == comm.rank]
        outgoing = [(other, weight) for one, other, weight in everyone if one == comm.rank]
        topology = DistGraphTopology(
            tuple(rank for rank, _ in incoming),
            tuple(rank for rank, _ in outgoing),
            tuple(weight for _, weight in incoming) if is_weighted else None,
            tuple(weight for _, weight in outgoing) if is_weighted else None,
        )
        return _with_topology(comm, range(comm.size), topology, cls)

    @property
    def _graph(self) -> DistGraphTopology:
        topology: DistGraphTopology = self.state.topology
        return topology

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the numbers of sources and destinations, and whether edges have weights."""
        graph = self._graph
        return len(graph.sources), len(graph.destinations), graph.source_weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], Any]:
        """Return the sources, the destinations and their weights."""
        graph = self._graph
        weights = None
        if graph.source_weights is not None and graph.destination_weights is not None:
            weights = list(graph.source_weights), list(graph.destination_weights)
        return list(graph.sources), list(graph.destinations), weights

    @property
    def inneighbors(self) -> list[int]:
        """Ranks from which this rank receives."""
        return list(self._graph.sources)

    @property
    def outneighbors(self) -> list[int]:
        """Ranks to which this rank sends."""
        return list(self._graph.destinations)


def _weights(weights: Any) -> tuple[int, ...] | None:
    """Return weights, or None for UNWEIGHTED."""
    if weights is None or isinstance(weights, int):
        return () if weights == const.WEIGHTS_EMPTY else None
    return tuple(int(one) for one in weights)


def _with_topology(comm: Intracomm, ranks: range, topology: Any, kind: Any) -> Any:
    child = comm._child(list(ranks))
    if not child:
        return kind()
    child.state.topology = topology
    return kind.of(child.state)


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return the lengths of a grid of some ranks, as equal as possible.

    Args:
        nnodes: Number of ranks.
        dims: Number of axes, or lengths; a length of 0 is chosen.
    """
    lengths = [0] * dims if isinstance(dims, int) else [int(one) for one in dims]
    known = math.prod(one for one in lengths if one)
    if any(one < 0 for one in lengths) or nnodes % known:
        raise MpiException(const.ERR_DIMS, f"{nnodes} ranks do not fit a grid of {lengths}")
    free = [axis for axis, one in enumerate(lengths) if not one]
    if not free:
        if known != nnodes:
            raise MpiException(const.ERR_DIMS, f"{nnodes} ranks do not fit a grid of {lengths}")
        return lengths
    factors = _balanced(nnodes // known, len(free), nnodes // known)
    assert factors is not None  # n * 1 * 1 ...
    for axis, length in zip(free, factors, strict=True):
        lengths[axis] = length
    return lengths


def _balanced(number: int, count: int, limit: int) -> list[int] | None:
    """Return decreasing factors of a number, none above a limit, with the smallest first one."""
    if count == 1:
        return [number] if number <= limit else None
    for first in range(1, min(number, limit) + 1):
        if number % first == 0 and first**count >= number:
            rest = _balanced(number // first, count - 1, first)
            if rest is not None:
                return [first, *rest]
    return None
