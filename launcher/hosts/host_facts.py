"""The facts about its host that an agent sends before anything starts there."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import syncvar
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar_launcher.hosts.network_proof import interfaces
from syncvar_launcher.local.host_resources import tasks_left
from syncvar_launcher.options.option_table import core_count, usable_cores


def facts_of(kind: str, target: str, cwd: str) -> dict[str, Any]:
    """Return the facts that the launcher needs about this host, for a target and its folder."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "python": platform.python_version(),
        "syncvar": syncvar.__version__,
        "numpy": _version_of_numpy(),
        "protocol": PROTOCOL_VERSION,
        "byte_order": sys.byteorder,
        "cores": list(usable_cores()),
        "cpu_count": os.cpu_count() or 1,
        "core_count": core_count(),
        "processor": os.uname().machine,
        "interfaces": [list(one) for one in interfaces()],
        "launcher_at": connection[0] if len(connection) == 4 else "",
        "reached_at": connection[2] if len(connection) == 4 else "",
        "has_folder": Path(cwd).is_dir(),
        "has_target": kind != "script" or (Path(cwd) / target).exists(),
        "pid": os.getpid(),
        "tasks_left": tasks_left(),
    }


def _machine() -> str:
    parts = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _version_of_numpy() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("numpy")
    except PackageNotFoundError:
        return ""
