"""Commands of `syncvar`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

import syncvar
from syncvar.cli import bench, flight, selftest
from syncvar.cli.rules import rules_text
from syncvar.cli.table_of_collectives import collectives_text
from syncvar.config import RuntimeConfig
from syncvar.errors import ConfigError
from syncvar.plans import ALGORITHMS, build_all, choose, plan_text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Example:
        >>> main(["plan", "broadcast", "--ranks", "2", "--count", "3"])  # doctest: +ELLIPSIS
        tree: ...
        0
    """
    parser = argparse.ArgumentParser(prog="syncvar", description="Look at plans and settings. Jobs are started by syncvar-launch.")
    parser.add_argument("--version", action="version", version=f"syncvar {syncvar.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="show the plan of a collective, and why it would be chosen")
    plan.add_argument("collective", choices=sorted(ALGORITHMS))
    plan.add_argument("--ranks", type=int, default=4, help="ranks of the group (4)")
    plan.add_argument("--count", type=int, default=8, help="elements of the buffer, or of each rank's block (8)")
    plan.add_argument("--itemsize", type=int, default=4, help="bytes of an element (4)")
    plan.add_argument("--root", type=int, default=0, help="root of a broadcast (0)")
    plan.add_argument("--algorithm", help="show this one instead of the one that would be chosen")
    plan.add_argument("--reproducible", action="store_true", help="all_reduce by the fixed tree")
    commands.add_parser("rules", help="show what each operation on a variable does, as a table")
    commands.add_parser("collectives", help="show all collectives, as a table")
    bench.add_options(commands.add_parser("bench", help="time a collective by size, and check its results"))
    selftest.add_options(commands.add_parser("test", help="prove all collectives on real processes"))
    commands.add_parser("settings", help="list every setting with unit, default and meaning")
    flight.add_options(commands)
    arguments = sys.argv[1:] if argv is None else list(argv)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "plan":
            _plan(chosen)
        elif chosen.command == "rules":
            print(rules_text(), end="")
        elif chosen.command == "collectives":
            print(collectives_text(), end="")
        elif chosen.command == "bench":
            return bench.run(chosen, arguments[1:])
        elif chosen.command == "test":
            return selftest.run(chosen, arguments[1:])
        elif chosen.command in flight.COMMANDS:
            return flight.run(chosen)
        else:
            _settings()
    except ConfigError as error:
        sys.stderr.write(f"syncvar: {error}\n")
        return 2
    return 0


def _plan(chosen: argparse.Namespace) -> None:
    if chosen.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, not {chosen.ranks}")
    blocks = chosen.ranks if chosen.collective in ("all_gather", "header_exchange") else 1
    choice = choose(
        chosen.collective,
        chosen.count * blocks * chosen.itemsize,
        chosen.ranks,
        reproducible=chosen.reproducible,
        forced=chosen.algorithm,
    )
    print(choice.reason)
    plans = build_all(chosen.collective, choice.algorithm, chosen.ranks, count=chosen.count, root=chosen.root)
    print(plan_text(plans), end="")


def _settings() -> None:
    for item in fields(RuntimeConfig):
        unit = f" {item.metadata['unit']}" if item.metadata["unit"] else ""
        print(f"SYNCVAR_{item.name.upper()} = {item.default}{unit}: {item.metadata['text']}")
