"""Command lines of workers and servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.bootstrap.worker_entry import command_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def worker_command(kind: str, target: str, args: Sequence[str], *, is_forked: bool) -> list[str]:
    """Return the command line of a worker, or of the fork server if `is_forked`.

    `kind` is "script", "module" or "command".

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
            "syncvar.bootstrap.fork_server" if is_forked else "syncvar.bootstrap.worker_main"
        ),
        *worker_arguments(kind, target, args),
    ]


def worker_arguments(kind: str, target: str, args: Sequence[str]) -> list[str]:
    """Return the arguments of `worker_main` and `fork_server`: the program with its arguments."""
    return ["-m", target, *args] if kind == "module" else [target, *args]


def server_command(kind: str, target: str, server: int) -> list[str]:
    """Return the command line of a server.

    It names the workers' program, from which the server may import update rules; it runs nothing of
    it.

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
