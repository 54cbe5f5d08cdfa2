"""What `--dry-run` shows: who would run where, with which cores, command, environment and settings. Text only."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from syncvar.core.rank_text import rank_spans
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import mask_environment
from syncvar_launcher.local.affinity import BLAS_VARIABLES
from syncvar_launcher.options.option_table import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.options.launch_options import LaunchOptions

_NOT_SHOWN = (
    "env",
    "hostfile",
    "include",
    "exclude",
    "join",
)  # `env` and `hosts` have their content
_UNITS = {"timeout": "s"}


def dry_run_text(
    options: LaunchOptions,
    cores: Sequence[Sequence[int] | None],
    environments: Sequence[Mapping[str, str]],
    argv: Sequence[str],
    *,
    host: str = "localhost",
    binding: str = "",
    transport: str = "",
    kernel: str = "",
    beginning: str = "",
    servers: Sequence[tuple[str, Sequence[int], Sequence[str]]] = (),
) -> str:
    """Write what a launch would do.

    Args:
        options: What was asked for.
        cores: For each rank its cores, or None where it is not bound.
        environments: For each rank the variables that the launcher sets, with `--env-clear` all that the rank has; those of
            rank 0 are shown, secrets masked.
        argv: The command line of a worker.
        host: Name of the host.
        binding: Why the cores are what they are, in one sentence.
        transport: Which transport, and why, in one line.
        kernel: What runs persistent calls, and why, likewise.
        beginning: How workers begin, and why, likewise.
        servers: For each server its host, those that hold copies of its variables, and its command line.

    Returns:
        Lines, each ended.
    """
    table = [("rank", "host", "cores", "BLAS threads")]
    for rank, (own, environ) in enumerate(zip(cores, environments, strict=True)):
        table.append(
            (
                str(rank),
                escape(environ.get("SYNCVAR_HOST", host)),
                "any" if own is None else _cores(own),
                _threads(environ),
            )
        )
    lines = columns(table)
    if servers:
        rows = [
            (str(index), escape(host), rank_spans(mirrors) or "none")
            for index, (host, mirrors, _) in enumerate(servers)
        ]
        lines += ["", *columns([("server", "host", "copies on"), *rows]), ""]
    lines += [line for line in (binding, transport, kernel, beginning) if line]
    lines += [
        f"folder {escape(str(options.program.cwd))}",
        "",
        "command:",
        f"  {escape(shlex.join(argv))}",
    ]
    if servers:
        lines += ["", "command of server 0:", f"  {escape(shlex.join(servers[0][2]))}"]
    if environments:
        lines += [
            "",
            f"environment {'of rank 0, and nothing else' if options.program.env_clear else 'set for rank 0'}:",
        ]
        masked = mask_environment(environments[0])
        lines += [
            f"  {escape(name)}={escape(shlex.quote(value))}"
            for name, value in sorted(masked.items())
        ]
    lines += ["", "settings:", *(f"  {line}" for line in columns(settings_rows(options)))]
    return "".join(f"{line}\n" for line in lines)


def settings_rows(options: LaunchOptions) -> list[tuple[str, str, str]]:
    """Return every setting as name, value with its unit, and origin; launch options first, then knobs."""
    rows = []
    shown = [one for one in OPTIONS if not one.setting and one.key not in _NOT_SHOWN]
    shown.sort(key=lambda one: one.key == "config")  # last
    for one in shown:
        value = getattr(getattr(options, one.section), one.field_name)
        rows.append((one.key, _value(value, _UNITS.get(one.key, "")), options.origin[one.key]))
    rows += [
        (f"env.{name}", escape(shlex.quote(value)), options.origin[f"env.{name}"])
        for name, value in mask_environment(options.program.env).items()
    ]
    rows += [
        (
            item.name,
            _value(getattr(options.runtime, item.name), item.unit),
            options.origin[item.name],
        )
        for item in RuntimeConfig.knobs()
    ]
    return rows


def _value(value: object, unit: str) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return (
            escape(
                " ".join(
                    value
                    if all(isinstance(one, str) for one in value)
                    else [one.name for one in value]
                )
            )
            or "none"
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        # Not :g, which would round a number of bytes.
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{text} {unit}" if unit else text
    return escape(str(value))


def _cores(cores: Sequence[int]) -> str:
    return rank_spans(cores).replace(" ", "")


def _threads(environ: Mapping[str, str]) -> str:
    found = {environ[name] for name in BLAS_VARIABLES if name in environ}
    return escape("/".join(sorted(found))) if found else "as set"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
