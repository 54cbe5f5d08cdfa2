"""Times of the calls in `rows`, of one library: `syncvar-launch --workers 2 bench/peers/rows_worker.py --library syncvar`.

The rows are timed in turns, a slice of the time each, and the fastest slice counts: one is told as
a multiple of another, and the machine must not be another one in between. A time is that of the
slowest rank.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from rows import GROUPS, Row, rows_of
from timing import Refused, Team, argument_parser, finish, timed
from values import itemsize, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

SLICES = 5


def main() -> None:
    """Run as one worker."""
    parser = argument_parser(__doc__)
    parser.add_argument("--library", choices=("syncvar", "mpi", "torch"), required=True)
    parser.add_argument("--groups", default=",".join(GROUPS), help="of the rows [all]")
    parser.add_argument("--largest", type=int, default=1 << 62, help="largest size in bytes")
    parser.add_argument("--slices", type=int, default=SLICES, help=f"turns of each row [{SLICES}]")
    chosen = parser.parse_args()
    team, names, end = {"syncvar": _syncvar, "mpi": _mpi, "torch": _torch}[chosen.library]()
    calls, refused = {}, {}
    for row in rows_of(chosen.groups):
        for size in row.sizes:
            if size > chosen.largest or not getattr(row, chosen.library):
                continue
            if team.world % 2 and row.is_of_pairs:
                refused[row.title] = f"it is made in pairs, and there are {team.world} workers"
                continue
            try:
                calls[row.title, size] = _verified(row, size, chosen.library, team, names)
            except Refused as problem:
                refused[row.title] = str(problem)
    found: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(chosen.slices):
        for key, (call, within) in calls.items():
            times = within(lambda call=call: timed(team, call, chosen.seconds / chosen.slices))
            found[key].append(team.largest(round(times["median_us"] * 1e3)) / 1e3)
    results = [
        {"row": title, "size": size, "us": min(times)} for (title, size), times in found.items()
    ]
    finish(team, chosen, results, refused=refused)
    end()


def _verified(
    row: Row, size: int, library: str, team: Team, names: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Make a row's call once and look at the result; return the call, and what it is to be made within."""
    count = max(1, size // itemsize(row.dtype))
    pieces = np.repeat(np.arange(1, team.world + 1), count)
    arrays = {
        "x": np.full(count, team.rank + 1).astype(numpy_dtype(row.dtype)),
        "whole": pieces.astype(numpy_dtype(row.dtype)),
    }
    if library == "torch":
        arrays = {name: names["torch"].from_numpy(array) for name, array in arrays.items()}
    arrays["out"] = arrays["x"] if library == "torch" else np.zeros_like(arrays["x"])
    own = {
        **names,
        **arrays,
        "rank": team.rank,
        "world": team.world,
        "other": team.rank ^ 1,
        "np": np,
    }
    within = (
        names["strategy"].run
        if row.within and library == "syncvar"
        else lambda function: function()
    )
    exec(row.setup.get(library, ""), own)  # noqa: S102  (text of this folder)
    exec(_function(getattr(row, library)), own)  # noqa: S102
    team.barrier()
    try:
        got = within(own["call"])
    except names["refusals"] as problem:  # what a library lacks it says before it sends
        raise Refused(str(problem).strip().splitlines()[0]) from problem
    looked = {
        **own,
        "got": own["out"] if got is None else got,
        "flat": _flat,
        "total": sum(range(team.world + 1)),
        "pieces": pieces,
    }
    if not eval(row.check, looked):  # noqa: S307
        sys.exit(f"rank {team.rank}: {row.title} of {size} bytes is wrong: {looked['got']!r:.200}")
    for name in arrays.keys() & {"x", "whole"}:
        own[name][...] = 0
    return own["call"], within


def _function(text: str) -> str:
    """Return the text of a function that makes a call and returns what the call gives, or what its text returns.

    Example:
        >>> print(_function("f(x)"))
        def call():
            return f(x)
    """
    try:
        compile(text, "", "eval")
        text = f"return {text}"
    except SyntaxError:
        pass
    return "\n    ".join(["def call():", *text.splitlines()])


def _flat(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, list | tuple):
        return np.concatenate([_flat(one) for one in value])
    return np.ravel(np.asarray(value)).astype(np.float64)


def _syncvar() -> tuple[Team, dict[str, Any], Callable[[], object]]:
    from peer_syncvar import syncvar_team

    import syncvar as sv

    team = syncvar_team()
    pairs = [sv.new_group(_pair(first, team.world)) for first in range(0, team.world, 2)]
    names = {
        "sv": sv,
        "strategy": sv.MirroredStrategy(),
        "pair": pairs[team.rank // 2],
        "refusals": (),
    }
    return team, names, lambda: None


def _mpi() -> tuple[Team, dict[str, Any], Callable[[], object]]:
    from mpi4py import MPI
    from peer_mpi import mpi_team

    comm = MPI.COMM_WORLD
    names = {"MPI": MPI, "comm": comm, "pair": comm.Split(comm.Get_rank() // 2), "refusals": ()}
    return mpi_team(comm, MPI.MAX), names, lambda: None


def _torch() -> tuple[Team, dict[str, Any], Callable[[], object]]:
    import torch
    from peer_torch import torch_team
    from torch import distributed as dist

    team = torch_team()
    pairs = [dist.new_group(_pair(first, team.world)) for first in range(0, team.world, 2)]
    refusals = (RuntimeError, NotImplementedError, ValueError)
    names = {"torch": torch, "dist": dist, "pair": pairs[team.rank // 2], "refusals": refusals}
    return team, names, dist.destroy_process_group


def _pair(first: int, world: int) -> list[int]:
    return list(range(first, min(first + 2, world)))


if __name__ == "__main__":
    main()
