"""The texts of `--help`, `--help-hosts` and `--version`."""

from __future__ import annotations

from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.options.option_table import (
    HOSTS,
    LAUNCH_PREFIX,
    LIMITS,
    OPTIONS,
    OUTPUT,
    PROGRAM,
    RUN,
    WORKERS,
    Option,
)

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
  {PROGRAM} -n 4 --debug 2 train.py              rank 2 gets the terminal
Usage: {PROGRAM} [options] script.py | -m module | --no-python command
       Its arguments follow, and are passed on untouched; -- ends options.
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
Each host is logged in to by ssh, without a password (with --listen none is: each
runs --join), and needs this version of syncvar for the same Python, the script at
the same path or --stage, and open ports above 1023 to the others. Links between
hosts are encrypted; --encryption control-only leaves the data as it is, and still
lets nobody else in. What is wrong with any host is told before anything is started.
"""

_AFTER_GROUP = {
    RUN: f"  {'-h, --help, --version':<27}show this help, or the version\n",
    WORKERS: (
        f"  {'--hostfile FILE, -H a:2,b:2':<27} workers on several hosts; see --help-hosts\n"
        "  Forked, they begin sooner with NumPy imported: set BLAS variables by --env.\n"
    ),
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
    names = option.spelling or f"{', '.join(option.flags)} {option.metavar}".rstrip()
    text = option.text
    if option.choices:
        text += f": {', '.join(option.choices)}"
    if isinstance(option.default, int | str) and not option.is_switch:
        text += f" [{option.default}]"
    if option.setting and not option.is_switch:
        settings = RuntimeConfig.runtime_settings()
        default = next(one.default for one in settings if one.name == option.setting)
        text += f" [{default}]" if isinstance(default, str) else f" [{default:g} s]"
    return f"  {names:<27}{text}\n"
