"""Choosing the hosts of a job: from `-H`, a host file or the job of a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar_launcher.options.allocated_hosts import restrict_hosts
from syncvar_launcher.options.hostfile import Hosts, parse_hostfile, parse_hosts, select_named

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncvar_launcher.options.allocated_hosts import Allocation
    from syncvar_launcher.options.hostfile import Host

_HOSTFILE_NBYTES_MAX = 1 << 20


def select_hosts(
    values: Mapping[str, Any], base: Path, job: Allocation | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts to use, and notices about them for the user.

    Args:
        values: The values of the options, by key.
        base: The folder to which the path of the host file is relative.
        job: The job of a scheduler whose hosts limit the choice, or None.
    """
    hostfile, listed = values["hostfile"], values["hosts"]
    include, exclude = values["include"], values["exclude"]
    if hostfile is None and listed is None:
        if job is not None:
            return select_named(job.hosts, include, exclude), ()
        option = "--include" if include is not None else "--exclude"
        raise ConfigError(
            f"{option} selects among the hosts of --hostfile or -H, and there are none"
        )
    if hostfile is not None and listed is not None:
        raise ConfigError(
            f"--hostfile {hostfile} and -H {listed} both name hosts; leave one out "
            "(--include selects)"
        )
    found = parse_hosts(listed) if listed is not None else _read_hostfile(base, hostfile)
    named = select_named(found.hosts, include, exclude)
    if job is not None:
        kept, notices = restrict_hosts(job, named)
        return kept, (*found.notices, *notices)
    if listed is not None:  # as for mpirun
        named = tuple(one._replace(slots=one.slots or 1) for one in named)
    return named, found.notices


def _read_hostfile(base: Path, name: str) -> Hosts:
    path = base / name
    try:
        with path.open("rb") as file:
            content = file.read(_HOSTFILE_NBYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from None
    if len(content) > _HOSTFILE_NBYTES_MAX:
        raise ConfigError(
            f"--hostfile {path}: it has more than {_HOSTFILE_NBYTES_MAX} bytes; is it a host file?"
        )
    return parse_hostfile(content, name)
