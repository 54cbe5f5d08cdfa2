"""Decides whether a job can run on a host; returns the reason and the remedy if not.

Data in, text out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import syncvar
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar_launcher.local.host_resources import needed_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions


def version_mismatch(version: str, protocol: int, byte_order: str, python: str, remedy: str) -> str:
    """Return why the ranks of two hosts cannot understand each other; empty if they can.

    `version`, `protocol`, `byte_order` and `python` are those of the other host. `remedy` says how
    to get another Python there.

    Example:
        >>> ours = (syncvar.__version__, PROTOCOL_VERSION, sys.byteorder)
        >>> version_mismatch(*ours, "2.7.18", "use another")[:26]
        'it has Python 2.7.18, and '
    """
    if protocol != PROTOCOL_VERSION or version != syncvar.__version__:
        return (
            f"it has syncvar {version} (protocol {protocol}), and here is {syncvar.__version__} "
            f"(protocol {PROTOCOL_VERSION}); "
            f"install the same on all"
        )
    if byte_order != sys.byteorder:
        return f"its numbers are {byte_order}-endian, and here they are {sys.byteorder}-endian"
    own_python = ".".join(map(str, sys.version_info[:3]))
    if python.split(".")[:2] != own_python.split(".")[:2]:
        return f"it has Python {python}, and here is {own_python}; {remedy}"
    return ""


def missing_resources(facts: Mapping[str, Any], host: Host, options: LaunchOptions) -> str:
    """Return why a job cannot run on a host, and what to do; empty if it can."""
    joins = options.join.listen is not None
    other_python = "join by the same Python" if joins else "give python=PATH or --remote-python"
    why = version_mismatch(
        facts["syncvar"], facts["protocol"], facts["byte_order"], facts["python"], other_python
    )
    cwd = host.cwd or options.program.cwd
    if why:
        return why
    if not facts["numpy"]:
        python = "python" if joins else host.python or options.hosts.remote_python or sys.executable
        return f"NumPy is not installed there; {python} -m pip install numpy"
    if 0 <= facts["tasks_left"] < needed_tasks(1):
        return (
            f"its control group allows {facts['tasks_left']} more processes and threads "
            f"(pids.max), and one rank needs {needed_tasks(1)}; "
            f"ask for a higher limit there, or leave the host out"
        )
    if not facts["has_folder"] and (host.cwd or not options.hosts.stage):
        return (
            f"there is no folder {cwd} there; give "
            f"--cwd{' to its --join' if joins else ', or cwd= in the host file'}"
        )
    if not facts["has_target"] and not options.hosts.stage:
        return (
            f"there is no script {options.program.target} in {cwd} there; --stage copies it, or "
            "use a shared folder"
        )
    return ""
