"""Hosts that come and go while an elastic job runs.

They come from the script of `--host-discovery`, or join by `syncvar-launch --join`. A new host is
checked as the first ones were, and then gets workers with the numbers that are vacant. Nothing here
waits: the loop of the launcher polls the descriptors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from syncvar.core.errors import SyncvarError, error_message
from syncvar_launcher.hosts.agent_connection import HostSlot
from syncvar_launcher.hosts.host_checks import host_candidates, missing_resources
from syncvar_launcher.hosts.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar_launcher.hosts.agent_connection import RemoteHost
    from syncvar_launcher.hosts.host_discovery import HostDiscovery
    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions

_ANSWER_S = 30.0


class HostSource(Protocol):
    """What leads to new hosts."""

    def log_in(self, host: Host) -> RemoteHost:
        """Start to log in to a host, and ask it for its facts."""

    def joined(self) -> list[RemoteHost]:
        """Return hosts that have joined by themselves since the last call."""

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading: a host joins."""


class HostArrivals:
    """New hosts of one job, until they can get workers.

    Args:
        options: The options of the job.
        source: What leads to new hosts.
        discovery: The discovery script; None without one.
        show: Shows a sentence to the user.
    """

    def __init__(
        self,
        options: LaunchOptions,
        source: HostSource,
        discovery: HostDiscovery | None,
        show: Callable[[str], None],
    ) -> None:
        self._options, self._source, self._discovery = options, source, discovery
        self._show = show
        self._pool = HostPool(options.runtime.host_exclusion_s)
        self._pool.update(options.hosts.entries if discovery is not None else ())
        self._pending: list[RemoteHost] = []
        self._departing: set[str] = set()

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        found = [one for remote in self._pending for one in remote.descriptors()]
        return [*found, *self._source.descriptors()]

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [one for remote in self._pending for one in remote.unsent()]

    def readable(self, descriptor: int) -> list[HostSlot]:
        """Handle a descriptor that poll reported; return hosts that can get workers.

        Their number of workers is that of their slots.
        """
        self._pending += self._source.joined()
        return [slot for one in list(self._pending) for slot in self._read(one, descriptor)]

    def look(self, used: set[str], *, room: int) -> list[str]:
        """Ask for hosts, and log in to new ones while there is room for workers; do not wait.

        Return the hosts in use that the script names no longer, each once.
        """
        now = time.monotonic()
        for one in list(self._pending):
            if now - one.began > _ANSWER_S:
                self._drop(one, "it does not answer in time")
        found = None
        if self._discovery is not None:
            found = self._discovery.ask()
            for sentence in self._discovery.take_messages():
                self._show(sentence)
        if found is not None:
            self._pool.update(found)
        names = used | {one.host.name for one in self._pending}
        for host in self._pool.available(now, names):
            if room <= 0:
                break
            room -= host.slots or 1
            self._log_in(host)
        if found is None:
            return []
        removed = set(self._pool.removed(used))
        leaving = sorted(removed - self._departing)
        self._departing = removed
        return leaving

    def fail(self, name: str) -> None:
        """Exclude a host that has failed."""
        if self._discovery is not None:
            pause_s = self._pool.fail(name, time.monotonic())
            self._show(f"{name} is not used for {pause_s:g} s")

    def close(self) -> None:
        """Let go of hosts without workers, and end the script. Idempotent."""
        for one in self._pending:
            one.close()
        self._pending.clear()
        if self._discovery is not None:
            self._discovery.close()

    # -- inside ------------------------------------------------------------------------------------

    def _log_in(self, host: Host) -> None:
        try:
            self._pending.append(self._source.log_in(host))
        except SyncvarError as error:
            self._show(f"{host.name} cannot be used: {error_message(error)}")
            self.fail(host.name)

    def _read(self, one: RemoteHost, descriptor: int) -> list[HostSlot]:
        one.flush()
        one.learn_from(one.readable(descriptor))
        if one.loss_reason:
            self._drop(one, (one.words().splitlines() or [one.loss_reason])[-1])
            return []
        if not one.facts:
            return []
        reason = missing_resources(one.facts, one.host, self._options)
        if reason:
            self._drop(one, reason)
            return []
        iface = self._options.hosts.iface
        addresses = host_candidates(one.host, one.facts, iface, are_all_near=False)
        if not addresses:
            self._drop(one, f"it has no address that --iface {iface} allows")
            return []
        self._pending.remove(one)
        return [HostSlot(one, one.host.name, one.slots, addresses[0], one.facts)]

    def _drop(self, one: RemoteHost, reason: str) -> None:
        self._pending.remove(one)
        one.end(reason)  # else it may take a while to end
        one.close()
        self._show(f"{one.host.name} cannot be used: {reason}")
        self.fail(one.host.name)
