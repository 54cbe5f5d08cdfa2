"""The text of `--dry-run`: which rank would run where, with which cores, command and settings."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from syncvar.core.rank_text import rank_spans
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import mask_environment
from syncvar_launcher.local.host_resources import BLAS_VARIABLES
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
    """Write what a launch would do, as lines.

    Args:
        options: The options.
        cores: For each rank its cores, or None without binding.
        environments: For each rank its variables. The text shows those of rank 0 and masks secrets.
        argv: The command line of a worker.
        host: The name of the host.
        binding: The reason for the cores, in one sentence.
        transport: The transport with the reason, in one line.
        kernel: What runs persistent calls, in one line.
        beginning: How workers start, in one line.
        servers: For each server its host, the servers with copies of its variables, and its command
            line.
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
    extent = "of rank 0, and nothing else" if options.program.env_clear else "set for rank 0"
    if environments:
        lines += [
            "",
            f"environment {extent}:",
        ]
        masked = mask_environment(environments[0])
        lines += [
            f"  {escape(name)}={escape(shlex.quote(value))}"
            for name, value in sorted(masked.items())
        ]
    lines += ["", "settings:", *(f"  {line}" for line in columns(settings_rows(options)))]
    return "".join(f"{line}\n" for line in lines)


def settings_rows(options: LaunchOptions) -> list[tuple[str, str, str]]:
    """Return all settings as rows of name, value with unit, and origin."""
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
        for item in RuntimeConfig.runtime_settings()
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
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
