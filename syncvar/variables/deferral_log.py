"""The log of AUTO's decisions: JSON lines, to read and to replay.

A line is one change: {"strategy": …, "at": "run", "step": 12, "of": "", "variable": "w", "from":
"eager", "to": "deferred", "why": …}. "at" and "step" are the end of run 12, or with "write"
increment 12 of the variable "of" outside every scope. A line {"strategy": …, "begins": true} starts
the record of a strategy. The identity of a strategy comes from its ranks and their order, so the
same program finds its own lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import (
    AUTO_LOG,
    REQUESTED,
    LostFile,
    report_lost_file,
    write_error_text,
)


class ProgramPoint(NamedTuple):
    """A point of decision: the end of a run, or an increment of the variable `of` ("write")."""

    at: str
    step: int
    of: str = ""


class DeferralChange(NamedTuple):
    """A change of one variable between eager and deferred."""

    point: ProgramPoint
    variable: str
    before: str
    after: str
    why: str


def append(path: str, strategy: int, changes: list[DeferralChange], *, begins: bool) -> bool:
    """Append changes to a log of JSON lines, and return whether that succeeded."""
    key = f"{strategy:016x}"
    lines: list[dict[str, Any]] = [{"strategy": key, "begins": True}] if begins else []
    for (at, step, of), name, before, after, why in changes:
        place = {"strategy": key, "at": at, "step": step, "of": of, "variable": name}
        lines.append(place | {"from": before, "to": after, "why": why})
    rest = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if not rest:
        return True
    try:  # one write to the end of the file, because several groups may share it
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, REQUESTED)
        try:
            while rest:  # a full disk takes a part, and raises the error for the next one
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        report_lost_file(LostFile(path, AUTO_LOG, write_error_text(error)))
        return False
    return True


def read(path: str, strategy: int) -> list[tuple[str, int, str, str, str]]:
    """Return a strategy's changes in the last job of a log: (at, step, of, variable, pace)."""
    key = f"{strategy:016x}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"auto_replay={path!r} cannot be read: {error}. Name a file that SYNCVAR_AUTO_LOG has "
            "made"
        ) from error
    found: list[tuple[str, int, str, str, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            if one["strategy"] != key:
                continue
            if one.get("begins"):
                found.clear()
                continue
            record = one["at"], one["step"], str(one["of"]), one["variable"], one["to"]
            at, step, _, variable, pace = record
            is_known = at in ("run", "write") and pace in ("eager", "deferred")
            if not is_known or type(step) is not int or not isinstance(variable, str):
                raise ValueError(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"auto_replay={path!r}: line {number} is no decision of AUTO: {line:.80}"
            ) from error
        found.append(record)
    return found
