"""Decides how workers start: forked from one process with NumPy imported, or fresh."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from syncvar_launcher.local.worker_command import worker_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ON_HOSTS = {
    "auto": (
        "forked on each host that has several, where nothing speaks against it, "
        "else fresh processes"
    ),
    "spawn": "fresh processes: --start-method spawn",
    "fork": "forked: --start-method fork",
}
"""What is known before the hosts have been asked."""

_SCRIPT_MAX = 4 << 20
SHOW_IMPORTS = ("PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE")


class StartMethod(NamedTuple):
    """How the workers of a host start.

    Args:
        is_forked: Whether they are forked from one process; else each is a fresh interpreter.
        reason: The reason, in one sentence without a subject.
        may_change: Whether the fork server may still decide for fresh processes.
    """

    is_forked: bool
    reason: str
    may_change: bool = False

    def command(self, kind: str, target: str, args: Sequence[str]) -> list[str]:
        """Return the command line of a worker, or of the fork server."""
        return worker_command(kind, target, args, is_forked=self.is_forked)

    def __str__(self) -> str:
        return f"{'forked' if self.is_forked else 'fresh processes'}: {self.reason}"


def plan_start(
    method: str, kind: str, target: str, workers: int, cwd: str, environ: Mapping[str, str]
) -> StartMethod:
    """Decide how the workers of a host start.

    Args:
        method: One of `START_METHODS`.
        kind: "script", "module" or "command".
        target: The script, module or command. A script or module in the folder is searched for
            variables that NumPy reads only at import.
        workers: The number of workers on this host.
        cwd: The folder in which they start.
        environ: Their variables.

    Example:
        >>> print(plan_start("auto", "command", "/bin/true", 4, "/", {}))
        fresh processes: /bin/true is a program of its own
        >>> print(plan_start("spawn", "script", "train.py", 4, "/", {}))
        fresh processes: --start-method spawn
    """
    if method != "auto":
        return StartMethod(method == "fork", f"--start-method {method}")
    if kind == "command":
        return StartMethod(is_forked=False, reason=f"{target} is a program of its own")
    if workers == 1:
        return StartMethod(is_forked=False, reason="one worker shares what it imports with nobody")
    for name in SHOW_IMPORTS:
        if environ.get(name):
            return StartMethod(is_forked=False, reason=f"{name} shows what each worker imports")
    found = _named_in(kind, target, cwd)
    if found:
        return StartMethod(
            is_forked=False,
            reason=f"{target} names {', '.join(found)}, which NumPy reads only when it is imported",
        )
    return StartMethod(
        is_forked=True,
        reason="from one process that has imported NumPy and syncvar",
        may_change=True,
    )


def _named_in(kind: str, target: str, cwd: str) -> list[str]:
    """Return the variables in a script's text that NumPy reads once, sorted."""
    from syncvar.bootstrap.preloaded_imports import READ_ONCE

    path = os.path.join(cwd, target.replace(".", os.sep) if kind == "module" else target)
    for name in (f"{path}.py",) * (kind == "module") + (path, os.path.join(path, "__main__.py")):
        try:
            with open(name, encoding="utf-8", errors="replace") as file:
                return sorted(set(READ_ONCE.findall(file.read(_SCRIPT_MAX))))
        except OSError:
            continue
    return []
