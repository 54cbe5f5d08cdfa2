"""The file of AUTO's decisions: JSON lines, written by the first rank of each group, read to replay a run.

A line tells of one change: {"strategy": …, "at": "run", "step": 12, "of": "", "variable": "w", "from": "eager", "to":
"deferred", "why": …}. "at" is "run" for the end of run number `step` of the strategy, and "write" for increment number
`step` of the variable `of` outside every scope. A line {"strategy": …, "begins": true} starts the record of a strategy; what
a file holds of it before that line belongs to an earlier job. Strategies are told apart by their ranks and by how many were
made over the same ranks before, so the same program finds its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import AUTO_LOG, LostFile, report_lost_file, why_unwritten
from syncvar.core.private_files import REQUESTED

__all__ = ["DeferralChange", "ProgramPoint", "append", "read"]


class ProgramPoint(NamedTuple):
    """Where a program decides.

    Args:
        at: "run" or "write".
        step: Number of the run, or of the increment.
        of: The variable that was incremented; empty for runs.
    """

    at: str
    step: int
    of: str = ""


class DeferralChange(NamedTuple):
    """A change of pace of one variable."""

    point: ProgramPoint
    variable: str
    before: str
    after: str
    why: str


def append(path: str, strategy: int, changes: list[DeferralChange], *, begins: bool) -> bool:
    """Write changes to a file.

    Args:
        path: It is made where it does not exist.
        strategy: Identity of the strategy's group.
        changes: In order.
        begins: This is the first time in this job.

    Returns:
        Whether the file has them. If not, `report_lost_file` has got its name.
    """
    key = f"{strategy:016x}"
    lines: list[dict[str, Any]] = [{"strategy": key, "begins": True}] if begins else []
    lines += [
        {
            "strategy": key,
            "at": one.point.at,
            "step": one.point.step,
            "of": one.point.of,
            "variable": one.variable,
            "from": one.before,
            "to": one.after,
            "why": one.why,
        }
        for one in changes
    ]
    if not lines:
        return True
    text = "".join(json.dumps(line) + "\n" for line in lines)
    try:  # one write to the end of the file, since several groups may have the same
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, REQUESTED)
        try:
            rest = text.encode()
            while rest:  # a disk that fills up takes a part, and raises the error for the next one
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        report_lost_file(LostFile(path, AUTO_LOG, why_unwritten(error)))
        return False
    return True


def read(path: str, strategy: int) -> list[tuple[str, int, str, str, str]]:
    """Return the changes of a strategy in a file: (at, step, of, variable, pace), of the last job in it.

    Raises:
        ConfigError: It cannot be read, or a line is no decision.
    """
    key = f"{strategy:016x}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"auto_replay={path!r} cannot be read: {error}. Name a file that SYNCVAR_AUTO_LOG has made"
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
            at, step, of, variable, pace = (
                one["at"],
                one["step"],
                one["of"],
                one["variable"],
                one["to"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"auto_replay={path!r}: line {number} is no decision of AUTO: {line:.80}"
            ) from error
        if (
            at not in ("run", "write")
            or type(step) is not int
            or pace not in ("eager", "deferred")
            or not isinstance(variable, str)
        ):
            raise ConfigError(
                f"auto_replay={path!r}: line {number} is no decision of AUTO: {line:.80}"
            )
        found.append((at, step, str(of), variable, pace))
    return found
