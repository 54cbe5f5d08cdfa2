"""Reading the command line: our options, and the program with its arguments; texts of `--help`.

argparse reads values and prints errors. This module finds the border between our options and those
of the program: `argparse.REMAINDER` treats `--` and options before it differently between versions.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from syncvar.core import exit_status
from syncvar.core.errors import ConfigError, error_message, with_code
from syncvar.core.settings import nearest
from syncvar_launcher.options.option_table import (
    BY_FLAG,
    BY_OFF_FLAG,
    HOSTS,
    LAUNCH_PREFIX,
    LIMITS,
    OPTIONS,
    OTHER_FLAGS,
    OUTPUT,
    PROGRAM,
    RUN,
    WORKERS,
    WRONG_OPTION,
    Option,
    read_dashboard,
    read_stats,
    read_variables,
)
from syncvar_launcher.options.worker_environment import check_assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FOOTER = f"""
Instead of --some-option: the variable {LAUNCH_PREFIX}SOME_OPTION, or the key
some_option in the file. A switch set there is turned off by --no-some-option.
Exit code: of the first rank that failed (128 + n for signal n), or 2 usage,
69 hosts, 70 lost rank, 71 limits, 74 checkpoint, 75 preempted, 76 mismatch,
77 key, 78 configuration, 124 timeout.
"""

_HEADER = f"""\
Examples:
  {PROGRAM} --workers 4 train.py --lr 0.1        four ranks of a script
  {PROGRAM} -n auto -m syncvar.examples.digits   one rank for each core
  {PROGRAM} -n 3 a.py : -n 1 -x R=1 b.py         rank 3 runs b.py, with R=1
Usage: {PROGRAM} [options] script.py | -m module | --no-python command
       Its arguments follow, untouched; '\\:' stands for ":"; -- ends options.
"""

_HOSTS_HEADER = f"""\
Examples:
  {PROGRAM} --hostfile hosts train.py             a rank for each slot
  {PROGRAM} -H a:2,b:2 --workers 3 train.py       three of four slots
  {PROGRAM} --hostfile hosts --dry-run train.py   says what it would do

A line of a host file, with what is left out in brackets:
  [user@]name[:slots] [slots=N] [max_slots=M] [port=P] [addr=A] [python=PATH] [cwd=DIR]
name may be an address ([fd00::7] for IPv6) or stand for several: gpu[01-04,07].
ssh goes to name, at port P; the other ranks reach it at A, where that differs.
^name removes one; # begins a comment. Without slots: one for each usable core;
in -H, as for mpirun, one for each time that the host is named.
"""

_HOSTS_FOOTER = """
The launcher logs in to each host by ssh, without a password; with --listen each
host runs --join instead. A host needs this version of syncvar for the same Python,
the script at the same path or --stage, and open TCP ports (32768 to 60999).
Links between hosts are encrypted; --encryption control-only sends data in plain,
and still admits members only. The launcher checks all hosts before it starts ranks.
"""

_AFTER_GROUP = {
    RUN: f"  {'-h, --help, --version':<27}show this help, or the version\n",
    WORKERS: (
        f"  {'--hostfile FILE, -H a:2,b:2':<27} workers on several hosts; see --help-hosts\n"
        "  Forked ones start sooner, with NumPy imported: set BLAS variables by --env.\n"
    ),
}


_NEXT_PROGRAM = ":"
_OF_EACH_PROGRAM = ("workers", "env")  # options that may stand after a ":"
_COLON = re.compile(r"\\+:")  # an argument that loses one backslash
_FLAGS = (*BY_FLAG, *BY_OFF_FLAG, *OTHER_FLAGS)
_AT_COLON = (
    ", before and after each ':' (it begins another program; for an argument that is a colon "
    r"write '\:')"
)
_NOTHING_TO_RUN = {
    "script": "nothing to run: give a script, -m module or --no-python command",
    "module": "-m needs the name of a module",
    "command": "--no-python needs a command",
}


def help_text() -> str:
    """Return the help: examples, then the options in groups, at most 80 columns wide."""
    groups = (RUN, WORKERS, OUTPUT, LIMITS)
    return _HEADER + "".join(_group_text(group) for group in groups) + _FOOTER


def hosts_help_text() -> str:
    """Return the help for several hosts: how to name them, and all options for them."""
    aside = "".join(_option_line(one) for one in OPTIONS if one.key == "fake_hosts")
    body = "".join(_option_line(one) for one in OPTIONS if one.group == HOSTS)
    return f"{_HOSTS_HEADER}\n{HOSTS}:\n{aside}{body}{_HOSTS_FOOTER}"


def version_text() -> str:
    """Return the name of the program with its version, as a line."""
    # This import costs more than the rest of the parser, and one option needs it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{PROGRAM} {version('syncvar')}\n"
    except PackageNotFoundError:
        return f"{PROGRAM} (not installed)\n"


def _group_text(group: str) -> str:
    lines = "".join(_option_line(option) for option in OPTIONS if option.group == group)
    return f"\n{group}:\n{lines}{_AFTER_GROUP.get(group, '')}"


def _option_line(option: Option) -> str:
    return f"  {option.usage:<27}{option.description}\n"


_TEXTS: dict[str, Callable[[], str]] = {
    "-h": help_text,
    "--help": help_text,
    "--help-hosts": hosts_help_text,
    "--version": version_text,
}


class CommandLine(NamedTuple):
    """A command line in its parts."""

    values: dict[str, Any]  # checked values of the options on it, by key
    kind: str  # "script", "module" or "command"
    words: list[str]  # script, module or command with its arguments; may be empty
    more: tuple[CommandLine, ...] = ()  # the parts after each ":"

    def check_target(self, folder: Path, *, may_be_empty: bool, is_local: bool) -> None:
        """End with a usage error if there is nothing to run, or no such script."""
        for one in (self, *self.more):
            if not one.words and not may_be_empty:
                usage_error(f"{_NOTHING_TO_RUN[one.kind]}{_AT_COLON if self.more else ''}")
            if one.words and one.kind == "script" and is_local:
                _check_script(one.words[0], folder)


def usage_error(message: str) -> NoReturn:
    """End with the exit code for a wrong command line, after a message on standard error."""
    text = with_code(message, WRONG_OPTION)
    sys.stderr.write(f"{PROGRAM}: {text}\nSee {PROGRAM} --help.\n")
    sys.exit(exit_status.USAGE)


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read a command line without the program's name; end after `--help` and on errors.

    Each argument ":" ends a part with one program. Only the first part has options of the job.
    """
    parts: list[list[str]] = [[]]
    for argument in argv:
        if argument == _NEXT_PROGRAM:
            parts.append([])
        else:
            parts[-1].append(argument)
    first, *more = map(_read_part, parts)
    for one in more:
        for option in OPTIONS:
            if option.key in one.values and option.key not in _OF_EACH_PROGRAM:
                usage_error(
                    f"{option.flags[-1]} stands after ':', and it concerns the whole job: give it "
                    "before the first program"
                )
    return first._replace(more=tuple(more))


def _read_part(argv: Sequence[str]) -> CommandLine:
    """Read the options and the program of one part."""
    ours: list[str] = []
    rest = list(argv)
    while rest:
        target = _target_of(rest)
        if target is not None:
            kind, words = target
            words[1:] = [one[1:] if _COLON.fullmatch(one) else one for one in words[1:]]
            return CommandLine(_values_of(ours), kind, words)
        ours.append(_take_option(rest))
    return CommandLine(_values_of(ours), "script", [])


def _target_of(rest: list[str]) -> tuple[str, list[str]] | None:
    """Return what to run if the next argument begins it, else None."""
    first = rest[0]
    if first == "--":
        return "script", rest[1:]
    if not first.startswith("-") or first == "-":
        return "script", rest
    if first == "--no-python":
        return "command", rest[2:] if rest[1:2] == ["--"] else rest[1:]
    if first == "-m":
        return "module", rest[1:]
    if (
        first.startswith("-m")
        and first[2:].replace(".", "").replace("_", "").isalnum()
        and not _migration_hint(first.partition("=")[0])
    ):
        return "module", [first[2:], *rest[1:]]
    return None


def _take_option(rest: list[str]) -> str:
    """Remove an option with its value from the arguments; return both as one argument."""
    argument = rest.pop(0)
    if argument in _TEXTS:
        sys.stdout.write(_TEXTS[argument]())
        sys.exit(0)
    name, equals, value = argument.partition("=")
    if name not in _FLAGS and (hint := _migration_hint(name)):
        usage_error(f"unknown option {name}: {hint}")
    if name not in _FLAGS and argument[:2] in BY_FLAG and argument[1] != "-":
        name, equals, value = argument[:2], "=", argument[2:]  # -n4
    option = BY_FLAG.get(name) or BY_OFF_FLAG.get(name)
    if option is None:
        usage_error(f"unknown option {name}{nearest(name, _FLAGS)}")
    if option.is_switch:
        if equals:
            usage_error(f"{name} takes no value")
        return name
    if option.read in {read_stats, read_dashboard} and not equals:
        equals, value = "=", "yes"
    if not equals:
        if not rest:
            usage_error(f"{name} needs a value: {name} {option.metavar}")
        value = rest.pop(0)
    # One argument, so that argparse does not take a value with a dash for an option. The long
    # flag, because -n=4 would make the sign part of the value.
    return f"{option.flags[-1]}={value}"


def _migration_hint(name: str) -> str:
    """Return what replaces an option of another launcher; empty for an option of none."""
    if name in _FLAGS:
        return ""
    from syncvar.core.migration_hints import hint_for  # only unknown options need it

    return hint_for("option", name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        usage_error(message)


def _values_of(arguments: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(prog=PROGRAM, allow_abbrev=False, add_help=False)
    for option in OPTIONS:
        if option.is_switch:
            parser.add_argument(*option.flags, dest=option.key, action="store_const", const=True)
            off = option.off_flag
            parser.add_argument(off, dest=option.key, action="store_const", const=False)
        else:
            action = "append" if option.read is read_variables else "store"
            read = _ArgumentReader(option)
            parser.add_argument(*option.flags, dest=option.key, action=action, type=read)
    values = vars(parser.parse_args(arguments))
    return {key: value for key, value in values.items() if value is not None}


class _ArgumentReader:
    """The reader of an option with the exceptions that argparse expects."""

    def __init__(self, option: Option) -> None:
        self._option = option

    def __call__(self, text: str) -> Any:
        try:
            if self._option.read is not read_variables:
                return self._option.value(text, is_text=True)
            check_assignment(text)  # the shell has split the words already
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error_message(error)) from None
        return text


def _check_script(script: str, folder: Path) -> None:
    path = folder / script
    if _is_interpreter(path):
        usage_error(
            f"{script} is not a script: leave out {script}, because the launcher starts Python by "
            f"itself: {PROGRAM} --workers 2 train.py"
        )
    if path.exists():
        return
    try:
        names = sorted(item.name for item in path.parent.iterdir())
    except OSError:
        names = []
    usage_error(
        f"there is no script {script} in {folder}{nearest(Path(script).name, names)}; "
        "a module is started with -m, a command with --no-python"
    )


def _is_interpreter(path: Path) -> bool:
    """Return whether a path names Python: a program of that name, or no file at all."""
    if path.name.rstrip("0123456789.") not in ("python", "pypy"):
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return not path.exists()
