"""All settings of a job as rows of a table, for `--dry-run` and for the digest of a job."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import mask_environment
from syncvar_launcher.options.option_table import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar_launcher.options.launch_options import LaunchOptions

# `env` and `hosts` have their content.
_NOT_SHOWN = ("env", "hostfile", "include", "exclude", "join")
_UNITS = {"timeout": "s"}


def settings_rows(options: LaunchOptions) -> list[tuple[str, str, str]]:
    """Return all settings as rows of name, value with unit, and origin."""
    origin = options.origin
    rows = []
    shown = [one for one in OPTIONS if not one.setting and one.key not in _NOT_SHOWN]
    shown.sort(key=lambda one: one.key == "config")  # last
    for one in shown:
        value = getattr(getattr(options, one.section), one.field_name)
        rows.append((one.key, _value(value, _UNITS.get(one.key, "")), origin[one.key]))
    for name, text in mask_environment(options.program.env).items():
        rows.append((f"env.{name}", escape(shlex.quote(text)), origin[f"env.{name}"]))
    for item in RuntimeConfig.runtime_settings():
        value = getattr(options.runtime, item.name)
        rows.append((item.name, _value(value, item.unit), origin[item.name]))
    return rows


def _value(value: object, unit: str) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        words = [one if isinstance(one, str) else one.name for one in value]
        return escape(" ".join(words)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        # Not :g, which would round a number of bytes.
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{text} {unit}" if unit else text
    return escape(str(value))


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
