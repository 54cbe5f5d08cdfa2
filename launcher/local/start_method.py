"""How workers begin: forked from one process that has imported NumPy and syncvar, or each a fresh interpreter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from syncvar_launcher.local.worker_command import worker_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ON_HOSTS = {
    "auto": "forked on each host that has several, where nothing speaks against it, else fresh processes",
    "spawn": "fresh processes: --start-method spawn",
    "fork": "forked: --start-method fork",
}
"""What is known before the hosts have been asked."""

_SCRIPT_MAX = 4 << 20
SHOW_IMPORTS = ("PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE")


class StartMethod(NamedTuple):
    """How the workers of a host begin.

    Args:
        is_forked: From one process; else each is a fresh one.
        reason: Why, in one sentence without a subject.
        may_change: They may begin as fresh ones where the process that they would be forked from finds that better.
    """

    is_forked: bool
    reason: str
    may_change: bool = False

    def command(self, kind: str, target: str, args: Sequence[str]) -> list[str]:
        """Return the command line of a worker, or of the process that workers are forked from."""
        return worker_command(kind, target, args, is_forked=self.is_forked)

    def __str__(self) -> str:
        """Return both in words."""
        return f"{'forked' if self.is_forked else 'fresh processes'}: {self.reason}"


def plan_beginning(
    method: str, kind: str, target: str, workers: int, cwd: str, environ: Mapping[str, str]
) -> StartMethod:
    """Decide how the workers of a host begin.

    Args:
        method: One of `START_METHODS`, as it was asked for.
        kind: What the target is: "script", "module" or "command".
        target: What is run. A script, or a module in the folder, is looked through for variables that come too late where
            NumPy is there already.
        workers: How many there are on this host.
        cwd: Where they start.
        environ: Their variables.

    Example:
        >>> print(plan_beginning("auto", "command", "/bin/true", 4, "/", {}))
        fresh processes: /bin/true is a program of its own
        >>> print(plan_beginning("spawn", "script", "train.py", 4, "/", {}))
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
    """Return the variables in a script's text that NumPy reads once, sorted; none of a text that is not found."""
    from syncvar.bootstrap.prefork.preloaded_imports import READ_ONCE

    path = os.path.join(cwd, target.replace(".", os.sep) if kind == "module" else target)
    for name in (f"{path}.py",) * (kind == "module") + (path, os.path.join(path, "__main__.py")):
        try:
            with open(name, encoding="utf-8", errors="replace") as file:
                return sorted(set(READ_ONCE.findall(file.read(_SCRIPT_MAX))))
        except OSError:
            continue
    return []
