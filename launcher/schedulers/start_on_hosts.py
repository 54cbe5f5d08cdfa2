"""Hosts whose scheduler starts processes without pipes to the launcher, as pbsdsh does.

Each of them runs `syncvar-launch --join`, with a key of its own in a folder that all hosts have;
the launcher removes the key at the end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from syncvar.bootstrap.kv_store import shared_folder
from syncvar.bootstrap.worker_entry import command_of
from syncvar.core.errors import HostUnreachable
from syncvar.transports.zeromq_sockets import address_towards_any, bracket_ipv6
from syncvar_launcher.hosts.network_proof import allowed_addresses, interfaces
from syncvar_launcher.hosts.ssh import module_command
from syncvar_launcher.join.join_rendezvous import JoinGroup
from syncvar_launcher.local.child_processes import child_of
from syncvar_launcher.options.worker_environment import inherited_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar_launcher.hosts.agent_connection import RemoteHost
    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions

_RUN = "syncvar_launcher.main"
_END_S = 10.0


def join_argv(options: LaunchOptions, host: Host, place: str, key: str) -> list[str]:
    """Return the command line by which a host of the job joins.

    Args:
        options: The options, with an allocation.
        host: The host.
        place: The address of the launcher.
        key: The file with the key.
    """
    job = options.hosts.scheduled
    assert job is not None
    own = [
        "--join",
        place,
        "--key-file",
        key,
        *(["--slots", str(host.slots)] if host.slots else []),
        *(["--cwd", host.cwd] if host.cwd else []),
    ]
    if host.name == job.here and host.python is None and options.hosts.remote_python is None:
        return [*command_of(_RUN), *own]
    words = [
        *module_command(host.python or options.hosts.remote_python or sys.executable, _RUN),
        *own,
    ]
    return words if host.name == job.here else job.command(host, words)


class StartedHosts:
    """The commands that run on the hosts of a job and make them join.

    Args:
        options: The options, with an allocation whose command has no pipes.
        say: Shows a sentence.
        ask: Asks an agent for facts about its host.

    Attributes:
        party: The hosts that join.
    """

    def __init__(
        self, options: LaunchOptions, say: Callable[[str], None], ask: Callable[[RemoteHost], None]
    ) -> None:
        job = options.hosts.scheduled
        assert job is not None
        self._program = job.starter.program
        others = [one.name for one in options.hosts.entries if one.name != job.here]
        address = (
            allowed_addresses(interfaces(), options.hosts.iface, None)[0]
            if options.hosts.iface
            else address_towards_any(others)
        )
        self._key = shared_folder(os.environ) / f"join-{os.urandom(8).hex()}"
        self._started: dict[Host, subprocess.Popen[bytes]] = {}
        count = len(options.hosts.entries)
        join = options.join._replace(
            listen=bracket_ipv6(address), host_count=count, key_file=self._key
        )
        self.party = JoinGroup(
            options._replace(join=join), say, ask, self._program, self._why_ended
        )
        environ = inherited_variables(os.environ, is_clear=False)
        try:
            for host in options.hosts.entries:
                line = join_argv(options, host, self.party.place, str(self._key))
                self._started[host] = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=environ,
                    start_new_session=True,
                    preexec_fn=child_of(os.getpid()),  # noqa: PLW1509
                )
        except OSError as error:
            self.close()
            raise HostUnreachable(
                f"{self._program} cannot be started: {error.strerror}; give --ssh"
            ) from error

    def close(self) -> None:
        """Let the commands end, and remove the key. Idempotent.

        All hosts already know how the job has ended.
        """
        with contextlib.suppress(OSError):
            self._key.unlink()
        for process in self._started.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._started.clear()

    def _why_ended(self) -> str:
        """Return the hosts that will not join because their command failed, or an empty text."""
        failed = {
            host.name: status
            for host, process in self._started.items()
            if (status := process.poll())
        }
        return "; ".join(
            f"{name}: {self._program} ended with {status}, and what it wrote is above, or in the "
            "output of the job"
            for name, status in failed.items()
        )
