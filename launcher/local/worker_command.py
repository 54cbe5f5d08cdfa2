"""What a worker is started with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.bootstrap.worker_entry import command_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def worker_command(kind: str, target: str, args: Sequence[str], *, is_forked: bool) -> list[str]:
    """Return the command line of a worker, or of the process that workers are forked from.

    Args:
        kind: What the target is: "script", "module" or "command".
        target: What is run.
        args: Its arguments.
        is_forked: Workers are forked.

    Example:
        >>> worker_command("module", "train", ["--lr", "1"], is_forked=False)[2:]
        ['syncvar.bootstrap.worker_main', '-m', 'train', '--lr', '1']
        >>> worker_command("command", "/bin/true", [], is_forked=False)
        ['/bin/true']
    """
    if kind == "command":
        return [target, *args]
    return [
        *command_of(
            "syncvar.bootstrap.prefork.fork_server"
            if is_forked
            else "syncvar.bootstrap.worker_main"
        ),
        *worker_arguments(kind, target, args),
    ]


def worker_arguments(kind: str, target: str, args: Sequence[str]) -> list[str]:
    """Return what `syncvar.bootstrap.worker_main` and `syncvar.bootstrap.prefork.fork_server` are given: a script or module, and its arguments."""
    return ["-m", target, *args] if kind == "module" else [target, *args]


def server_command(kind: str, target: str, server: int) -> list[str]:
    """Return the command line of a server, which names whose update rules it may import and runs nothing of it.

    Args:
        kind: What the target of the workers is: "script", "module" or "command".
        target: What they run.
        server: Which server.

    Example:
        >>> server_command("script", "train.py", 1)[2:]
        ['syncvar.parameter_server.server.server_main', 'server', '1', 'train.py']
    """
    beside = {"module": ["-m", target], "script": [target], "command": []}[kind]
    return [
        *command_of("syncvar.parameter_server.server.server_main"),
        "server",
        str(server),
        *beside,
    ]
