"""Logs in to the hosts of a job one by one, for `syncvar doctor`; a host that fails stops no other.

    python -m syncvar_launcher.hosts.host_survey --hostfile hosts script.py

The arguments are those of syncvar-launch. The result is one line of JSON: the interfaces of this
machine, the scheduler around it, the hosts with what is wrong with them, and who reaches whom.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError, HostUnreachable, SyncvarError, error_message
from syncvar_launcher.hosts.host_checks import allowed_addresses, interfaces
from syncvar_launcher.hosts.multi_host import JobHosts
from syncvar_launcher.options.parse_options import parse
from syncvar_launcher.schedulers.allocation import find_allocation

if TYPE_CHECKING:
    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions

_HERE = "this machine"


def main() -> int:
    """Print the survey; return 0, also where hosts fail."""
    result: dict[str, Any] = {"scheduler": _scheduler(), "hosts": [], "reach": [], "error": ""}
    try:
        options = _options_of(sys.argv[1:])
        result |= _links(options.hosts.iface)
        if options.hosts.entries:
            with contextlib.closing(HostSurvey(options)) as survey:
                result |= survey.survey()
    except SyncvarError as error:
        result = {**_links(None), **result, "error": error_message(error)}
    print(json.dumps(result))  # noqa: T201  (the result)
    return 0


def _options_of(arguments: list[str]) -> LaunchOptions:
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return parse(arguments, os.environ, Path.cwd(), find_allocation)
    except SystemExit:
        text = messages.getvalue().removeprefix("syncvar-launch: ")
        raise ConfigError(text.partition("\nSee ")[0].strip()) from None


def _links(iface: str | None) -> dict[str, Any]:
    """Return the interfaces of this machine, and the addresses that links would use."""
    found = interfaces()
    chosen = allowed_addresses(found, iface, None)
    return {"interfaces": [list(one) for one in found], "addresses": chosen}


def _scheduler() -> dict[str, Any]:
    """Return the scheduler's job whose hosts the launcher would use, or why there is none."""
    found: dict[str, Any] = {"name": "", "host_count": 0, "error": ""}
    try:
        job = find_allocation(os.environ)
    except ConfigError as error:
        return {**found, "error": error_message(error)}
    if job is None:
        return found
    hosts = ", ".join(f"{one.name} ({one.slots} slots)" for one in job.hosts)
    name = f"{job.name}: {hosts}; {job.starter.program} starts ranks on other hosts"
    return {**found, "name": name, "host_count": len(job.hosts)}


def hostfile_line(host: Host) -> str:
    """Return the line of a host file for a host, with two slots.

    Example:
        >>> from syncvar_launcher.options.hostfile import Host
        >>> hostfile_line(Host("fd00::7", user="ann", port=22))
        'ann@[fd00::7] slots=2 port=22'
    """
    name = f"[{host.name}]" if ":" in host.name else host.name
    login = f"{host.user}@{name}" if host.user else name
    words = [login, "slots=2"]
    for key in ("port", "addr", "python", "cwd"):
        value = getattr(host, key)
        if value is not None:
            text = str(value)
            words.append(f'{key}="{text}"' if " " in text else f"{key}={text}")
    return " ".join(words)


class HostSurvey(JobHosts):
    """The hosts of a job that does not start; it notes what is wrong with each of them."""

    def __init__(self, options: LaunchOptions) -> None:
        super().__init__(options, lambda _: None)
        self._reasons: dict[Host, str] = {}
        self._collects = True  # whether a failed host is noted, and not an error

    def survey(self) -> dict[str, Any]:
        """Return what is wrong with each host, and which of the others reach each other."""
        entries = self._options.hosts.entries
        if self._is_started_by_job:
            raise ConfigError(
                "the scheduler starts the agents, and only a job can try that: run "
                "syncvar-launch -m syncvar.examples.digits in it"
            )
        self._log_in(lambda: None)
        self._check(self._remotes)
        self._collects = False
        facts = {one.host: one.facts for one in self._remotes}
        hosts = [
            {
                "name": host.name,
                "origin": host.origin,
                "reason": self._reasons.get(host, ""),
                "line": hostfile_line(host),
                "interfaces": facts.get(host, {}).get("interfaces", []),
            }
            for host in entries
        ]
        reach: list[dict[str, Any]] = []
        error = ""
        if self._remotes:
            try:
                reach = self._reach()
            except HostUnreachable as problem:
                error = error_message(problem)
        return {"hosts": hosts, "reach": reach, "error": error}

    def _reach(self) -> list[dict[str, Any]]:
        """Return for each pair the addresses that were tried, and those that answered."""
        candidates, answers = self.test_addresses()
        names = [one.host.name for one in self._remotes]
        found = []
        position = 0
        for owner, addresses in enumerate(candidates, -1):
            for other, reached in enumerate(answers):
                if other != owner:
                    good = [
                        address
                        for index, address in enumerate(addresses, position)
                        if reached[index]
                    ]
                    found.append(
                        {
                            "from": names[other],
                            "to": names[owner] if owner >= 0 else _HERE,
                            "tried": addresses,
                            "reached": good,
                        }
                    )
            position += len(addresses)
        return found

    def _refuse(self, reasons: dict[Host, str]) -> None:
        if not self._collects:
            super()._refuse(reasons)
        self._reasons |= reasons
        for one in [one for one in self._remotes if one.host in reasons]:
            one.close()
            self._remotes.remove(one)


if __name__ == "__main__":
    sys.exit(main())
