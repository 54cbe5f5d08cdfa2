"""The command `syncvar`: its parser, and the dispatch to the modules of its subcommands."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from typing import TYPE_CHECKING

import numpy as np

import syncvar
from syncvar import _native
from syncvar.cli import (
    bench,
    bench_options,
    flight_commands,
    plan,
    selftest,
    stacks,
)
from syncvar.cli.printed_tables import (
    WORDS,
    add_migration_options,
    collectives_text,
    coming_from_text,
    rules_text,
)
from syncvar.core.errors import ConfigError
from syncvar.core.migration_hints import table_text
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.auth_keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Example:
        >>> main(["plan", "broadcast", "--ranks", "2", "--path", "links"])  # doctest: +ELLIPSIS
        tree: ...
        0
    """
    parser = argparse.ArgumentParser(
        prog="syncvar",
        description="Look at plans, settings and running jobs. Jobs are started by syncvar-launch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the version has two lines
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_options(
        commands.add_parser(
            "plan", help="show the plan of a collective, what it costs, and why it would be chosen"
        )
    )
    commands.add_parser("rules", help="show what each operation on a variable does, as a table")
    commands.add_parser("collectives", help="show all collectives, as a table")
    add_migration_options(
        commands.add_parser(
            "coming-from", help="show how syncvar spells what other libraries do, side by side"
        )
    )
    bench_options.add_options(
        commands.add_parser("bench", help="time a collective by size, and check its results")
    )
    selftest.add_options(
        commands.add_parser("test", help="prove all collectives on real processes")
    )
    commands.add_parser("settings", help="list every setting with unit, default and meaning")
    flight_commands.add_options(commands)
    stacks.add_options(
        commands.add_parser(
            "stacks", help="show where the ranks of a running job stand, equal stacks once"
        )
    )
    arguments = sys.argv[1:] if argv is None else list(argv)
    chosen = parser.parse_args(arguments)
    try:
        code = _run(chosen, arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `syncvar settings | head -1`
        # The interpreter flushes stdout at exit: let that go to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _version() -> str:
    missing = _native.missing_reason()
    return (
        f"syncvar {syncvar.__version__}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}\nC extension: {f'no: {missing}' if missing else 'yes'}\n"
    )


def _run(chosen: argparse.Namespace, arguments: list[str]) -> int:
    texts: dict[str, Callable[[], str]] = {
        "plan": lambda: plan.text(chosen, RuntimeConfig.from_mapping(os.environ)),
        "rules": rules_text,
        "collectives": collectives_text,
        "coming-from": lambda: _coming_from(chosen.library),
        "settings": _settings,
    }
    try:
        if chosen.command in texts:
            print(texts[chosen.command](), end="")
            return 0
        if chosen.command == "bench":
            return bench.run(chosen, arguments[1:])
        if chosen.command == "test":
            return selftest.run(chosen, arguments[1:])
        if chosen.command == "stacks":
            return stacks.run(chosen)
        return flight_commands.run(chosen)
    except ConfigError as error:
        sys.stderr.write(f"syncvar: {error}\n")
        return 2


def _coming_from(library: str | None) -> str:
    return table_text() if library == WORDS else coming_from_text(library)


def _settings() -> str:
    lines = []
    for item in RuntimeConfig.runtime_settings():
        unit = f" {item.unit}" if item.default != "" and item.unit else ""
        default = f"{item.default}{unit}" if item.default != "" else f"({item.unit})"
        others = ", ".join(one for one in item.choices if one != item.default)
        default += f" (or {others})" if others else ""
        lines.append(f"SYNCVAR_{item.name.upper()} = {default}: {item.text}\n")
    return "".join(lines) + (
        f"SYNCVAR_KEY = ({2 * KEY_BYTES} hexadecimal digits): secret of a job on several hosts, if "
        "a scheduler and not syncvar-launch starts it\n"
        "SYNCVAR_KEY_FILE = (path): file that holds this secret, with mode 0600\n"
        "SYNCVAR_RENDEZVOUS_DIR = (path): folder on all hosts, through which ranks find each other "
        "that a scheduler starts; without it, your home folder\n"
    )
