"""Options and results of `syncvar test`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncvar.cli.collective_registry import available
from syncvar.core.errors import ConfigError
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar.cli.collective_registry import Collective

_SHOWN_FAILURES = 3


@dataclass(slots=True)
class SelfTestResult:
    """Result of one collective on one data path.

    Args:
        name: The collective.
        proves: Checked properties, in words.
        calls: Number of calls of each rank.
        seconds: Their duration.
        failures: Texts of failures on all ranks.
    """

    name: str
    proves: str
    calls: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("collectives", nargs="*", metavar="collective", help="only these (all)")
    parser.add_argument("--workers", metavar="N", default="4", help="how many processes (4)")
    parser.add_argument(
        "--transport", choices=("auto", "zmq"), help="only this data path (first auto, then zmq)"
    )
    parser.add_argument(
        "-T",
        "--timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="limit of each job, in seconds (120)",
    )
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)


def parse_arguments(arguments: Sequence[str] | None = None) -> Any:
    """Parse the command line of a worker."""
    parser = argparse.ArgumentParser(prog="syncvar test", allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(arguments)


def select_collectives(names: Sequence[str]) -> list[Collective]:
    """Return the collectives to test; raise ConfigError for an unknown name."""
    known = {one.name: one for one in available()}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"unknown collective {name!r}{nearest(name, known)}: it is one of "
                f"{', '.join(known)}"
            )
    return [one for one in known.values() if not names or one.name in names]


def outcome_lines(paths: Mapping[str, Sequence[SelfTestResult]]) -> tuple[list[str], bool]:
    """Return a line for each collective, with its failures below, and whether all succeeded."""
    together: dict[str, dict[str, SelfTestResult]] = defaultdict(dict)
    for path, outcomes in paths.items():
        for one in outcomes:
            together[one.name][path] = one
    lines, is_good = [], True
    for name, by_path in together.items():
        failures = [f"{path}: {words}" for path, one in by_path.items() for words in one.failures]
        calls = {one.calls for one in by_path.values()}
        shown = " and ".join(str(one.calls) for one in by_path.values())
        if len(calls) == 1:
            shown = str(calls.pop())
        proves = next(iter(by_path.values())).proves
        lines.append(
            f"{name:<18} {'FAIL' if failures else 'OK':<5} {proves}; {shown} calls over "
            f"{' and '.join(by_path)}"
        )
        lines += [f"    {words}" for words in failures[:_SHOWN_FAILURES]]
        if len(failures) > _SHOWN_FAILURES:
            lines.append(f"    and {len(failures) - _SHOWN_FAILURES} more")
        is_good = is_good and not failures
    return lines, is_good
