"""Options of `syncvar bench`, and the checked plan that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncvar.algorithms.builders import ALGORITHMS
from syncvar.cli.bench_table import parse_size, sizes
from syncvar.collectives.collective_registry import CollectiveKind, available, find, ops_of
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.errors import ConfigError
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.collectives.collective_registry import Collective


_NAMES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "char": "int8",
    "int": "int32",
    "uint": "uint32",
}
_FIRST, _LAST = "8", "16M"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Measurements to make."""

    collective: Collective  # the collective
    sizes: tuple[int, ...]  # sizes in bytes
    kinds: tuple[tuple[str, str], ...]  # (dtype, op) pairs; op is "" if the collective has none
    roots: str  # a rank, or "all"
    iterations: int | None  # timed calls for each size; None chooses by time
    chosen: argparse.Namespace  # all options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    listed = "all_reduce, broadcast, …; `syncvar collectives` lists them"
    parser.add_argument("collective", help=listed)
    size: dict[str, Any] = {"metavar": "SIZE"}
    number: dict[str, Any] = {"metavar": "N", "type": int}
    add = parser.add_argument_group("sizes").add_argument
    add("-b", "--minbytes", default=_FIRST, **size, help=f"first size: 8, 4K, 64M ({_FIRST})")
    add("-e", "--maxbytes", default=_LAST, **size, help=f"last size ({_LAST})")
    add("-f", "--stepfactor", metavar="F", type=float, help="factor of one size to the next (2)")
    add("-i", "--stepbytes", **size, help="difference of one size to the next")
    add = parser.add_argument_group("calls").add_argument
    dtype = "dtypes, by commas, or all (float32)"
    add("-d", "--dtype", "--datatype", metavar="TYPE", default="float32", help=dtype)
    add("-o", "--op", metavar="OP", default="sum", help="ops, by commas, or all (sum)")
    add("-r", "--root", metavar="RANK", default="0", help="a rank, or all (0)")
    add("--algorithm", metavar="NAME", help="an algorithm of `syncvar plan`, if there is a choice")
    add("--reproducible", action="store_true", help="all_reduce by the fixed tree")
    add("--async", dest="asynchronous", action="store_true", help="async_op=True, then wait")
    add("--resident", action="store_true", help="arrays of sv.empty, in the host's shared memory")
    add = parser.add_argument_group("measurement").add_argument
    add("-n", "--iters", **number, help="timed calls of each size (20 or more, about 0.05 s)")
    add("-w", "--warmup-iters", **number, default=5, help="calls before that, not timed (5)")
    together = "calls in each timed one; --async: at a time (1)"
    add("-m", "--agg-iters", **number, default=1, help=together)
    add("-c", "--check", **number, default=1, help="calls with checked elements; 0: none (1)")
    shown = "time of: 0 rank 0, 1 average of ranks, 2 fastest, 3 slowest (1)"
    add("-a", "--average", metavar="0-3", type=int, default=1, choices=range(4), help=shown)
    add("-G", "--cudagraph", metavar="N", help=argparse.SUPPRESS)
    add = parser.add_argument_group("output").add_argument
    add("-J", "--json", metavar="FILE", help="write the results as JSON")
    add("--plot", metavar="FILE.png", help="draw time and bandwidth (needs matplotlib)")
    add("--no-model", action="store_true", help="no column of predicted times")
    add = parser.add_argument_group("workers, when no launcher started this").add_argument
    add("--workers", metavar="N", default="auto", help="how many (auto: one per usable core)")
    transports = "auto: shared memory if possible; zmq: sockets"
    add("--transport", choices=("auto", "zmq"), help=transports)
    add("-T", "--timeout", metavar="S", type=float, help="limit of the whole run, in seconds")
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)


def make_plan(chosen: argparse.Namespace) -> BenchPlan:
    """Check the options and return the plan; raise ConfigError for a wrong one."""
    collective = find(
        chosen.collective, [one for one in available() if one.kind is not CollectiveKind.OBJECT]
    )
    if chosen.cudagraph is not None:
        raise ConfigError("-G has no meaning here: there are no graphs of GPU work to replay")
    limits = ("-n", chosen.iters, 1), ("-w", chosen.warmup_iters, 0), ("-m", chosen.agg_iters, 1)
    for letter, value, least in (*limits, ("-c", chosen.check, 0)):
        if value is not None and value < least:
            raise ConfigError(f"{letter} must be at least {least}, not {value}")
    if chosen.reproducible and collective.name != "all_reduce":
        raise ConfigError(f"--reproducible is for all_reduce; {collective.name} has no such option")
    if chosen.algorithm is not None and chosen.algorithm not in ALGORITHMS.get(collective.name, ()):
        known = ", ".join(ALGORITHMS.get(collective.name, ())) or "none"
        raise ConfigError(
            f"{collective.name} has no algorithm {chosen.algorithm!r}; it has {known}"
        )
    if chosen.plot is not None:
        from syncvar.cli.bench_table import require_matplotlib

        require_matplotlib()
    if not (chosen.root == "all" or chosen.root.isdigit()):
        raise ConfigError(f"-r must be a rank or all, not {chosen.root!r}")
    step = None if chosen.stepbytes is None else parse_size(chosen.stepbytes)
    first, last = parse_size(chosen.minbytes), parse_size(chosen.maxbytes)
    found = sizes(first, last, factor=chosen.stepfactor, step=step)
    if not collective.has_arrays:
        found = [0]
    kinds = tuple(_kinds(collective, chosen.dtype, chosen.op))
    return BenchPlan(collective, tuple(found), kinds, chosen.root, chosen.iters, chosen)


def _kinds(collective: Collective, dtype_text: str, op_text: str) -> list[tuple[str, str]]:
    wanted = list(DTYPE_NAMES)
    if dtype_text != "all":
        wanted = [_NAMES.get(one, one) for one in dtype_text.split(",")]
    for dtype in wanted:
        if dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"unknown dtype {dtype!r}{nearest(dtype, DTYPE_NAMES)}: it is one of "
                f"{', '.join(DTYPE_NAMES)}"
            )
    if not collective.has_arrays:
        return [("-", "")]
    if not collective.takes("op"):
        return [(dtype, "") for dtype in wanted]
    kinds = []
    for dtype in wanted:
        supported = ops_of(collective, dtype)
        ops = supported
        if op_text != "all":
            ops = tuple("mean" if one == "avg" else one for one in op_text.split(","))
        for op in ops:
            if op not in supported:
                raise ConfigError(
                    f"{collective.name} of {dtype} does not take op "
                    f"{op!r}{nearest(op, supported)}: it takes {', '.join(supported)}"
                )
            kinds.append((dtype, op))
    return kinds


def parse_arguments(arguments: Sequence[str] | None = None) -> Any:
    """Parse the command line of a worker."""
    parser = argparse.ArgumentParser(prog="syncvar bench", allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(arguments)
