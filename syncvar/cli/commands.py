"""The command `syncvar`: its parser, and the dispatch to the modules of its subcommands."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import syncvar
from syncvar import _native
from syncvar.cli import (
    bench,
    bench_options,
    dashboard,
    flight_commands,
    ledger_command,
    plan,
    report,
    selftest,
    stacks,
    status,
)
from syncvar.cli.doctor import doctor_command
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


class _Command(NamedTuple):
    """A command whose module adds its options and runs it."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_COMMANDS = (
    _Command(
        "stacks",
        "show where the ranks of a running job stand, equal stacks once",
        stacks.add_options,
        stacks.run,
    ),
    _Command(
        "status",
        "show what the ranks of a running job do, and for whom they wait",
        status.add_options,
        status.run,
    ),
    _Command(
        "top",
        "the same as status, renewed until the job ends",
        status.add_top_options,
        status.run_top,
    ),
    _Command(
        "dashboard",
        "serve a page about a running job, and metrics",
        dashboard.add_options,
        dashboard.run,
    ),
    _Command(
        "ledger",
        "show the calls, bytes and time of a job by variable and program line",
        ledger_command.add_options,
        ledger_command.run,
    ),
    _Command(
        "doctor",
        "check this machine, or the hosts of a job, before a job starts",
        doctor_command.add_options,
        doctor_command.run,
    ),
    _Command(
        "report",
        "write one file about a job, without secrets, to attach to an issue",
        report.add_options,
        report.run,
    ),
)


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
    for one in _COMMANDS:
        one.add_options(commands.add_parser(one.name, help=one.help))
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
        run = next((one.run for one in _COMMANDS if one.name == chosen.command), None)
        return flight_commands.run(chosen) if run is None else run(chosen)
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
