"""The hosts of a job: logs in to all at once, checks them, places the workers, and tests the links.

Nothing starts before every host has answered: one message then names all problems of all hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.bootstrap.worker_entry import command_of
from syncvar.core import exit_codes
from syncvar.core.errors import HostUnreachable, WireError
from syncvar.protocol.auth_keys import KEY_BYTES
from syncvar_launcher.hosts.agent_connection import (
    NOT_UNDERSTOOD,
    RemoteHost,
    poll_hosts,
    start_agent,
)
from syncvar_launcher.hosts.agent_protocol import checked_list
from syncvar_launcher.hosts.call_transfer import without_call
from syncvar_launcher.hosts.host_checks import missing_resources
from syncvar_launcher.hosts.network_proof import Interface, Listeners, allowed_addresses, interfaces
from syncvar_launcher.hosts.placement import HostCapacity, place_workers
from syncvar_launcher.hosts.ssh import AGENT, agent_command_line, ssh_command, ssh_error_text
from syncvar_launcher.hosts.staging import Collection, collect_files, stage
from syncvar_launcher.io.output import escape
from syncvar_launcher.local.host_resources import OF_LIMITS, LimitTooLow, TimePassed
from syncvar_launcher.options.worker_environment import inherited_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar_launcher.join.join_rendezvous import JoinGroup
    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions
    from syncvar_launcher.schedulers.start_on_hosts import StartedHosts

_LOGINS_AT_ONCE = 16
_LOGIN_S = 30.0
_ANSWER_S = 15.0
_REACH_S = 5.0
_ADDRESSES_MAX = 4  # of each host that are tried


class HostSlot(NamedTuple):
    """A host that has workers.

    Args:
        remote: The connection to its agent.
        name: The name for messages.
        workers: The number of its workers, at least 1.
        address: The address at which its ranks listen for other hosts.
        facts: The facts that its agent has sent.
    """

    remote: RemoteHost
    name: str
    workers: int
    address: str
    facts: dict[str, Any]


def is_here(host: Host, own: Sequence[Interface]) -> bool:
    """Return whether a host is this machine, by name or address, so that it needs no ssh."""
    if host.user or host.port:
        return False
    names = {"localhost", "ip6-localhost", socket.gethostname()}
    if host.name in names:
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.name)
        return address.is_loopback or host.name in {one.address for one in own}
    return False


class JobHosts:
    """The hosts of one job.

    Args:
        options: The options, with at least one host.
        say: Shows a sentence.

    Attributes:
        began: When the job began, in seconds of the monotonic clock; the time limit counts from it.
        sites: The hosts that have workers, in the order of their ranks.
        address: The address at which the launcher listens.
        secret: The secret of the job.
        exit_code: The exit code of the job, for hosts that have joined.
    """

    def __init__(self, options: LaunchOptions, say: Callable[[str], None]) -> None:
        self.began = time.monotonic()
        self._until = self.began + options.limits.timeout_s
        self._options = options
        self._say = say
        self.secret = os.urandom(KEY_BYTES)
        self.sites: list[HostSlot] = []
        self.address = ""
        self._remotes: list[RemoteHost] = []
        self._own_interfaces = interfaces()
        self._party: JoinGroup | None = None
        self._calling: StartedHosts | None = None
        self._collection: Collection | None = None
        self.exit_code = exit_codes.RENDEZVOUS

    def open(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Log in to all hosts, or wait until hosts have joined; check them and place the workers.

        It also finds addresses by which all hosts reach each other. It calls `meanwhile` once,
        during the first logins.
        """
        if self._options.hosts.stage:
            self._collection = collect_files(self._options)
            self._say(f"--stage copies to each host {self._collection.describe()}")
        if self._options.join.listen is not None:
            from syncvar_launcher.join.join_rendezvous import (
                JoinGroup,  # sockets for hosts that join, which the others do not need
            )

            self._party = JoinGroup(self._options, self._say, self._ask)
            meanwhile()
            self._remotes = self._party.gather()
            self.began = time.monotonic()  # the job begins when all hosts have joined
            self._until = self.began + self._options.limits.timeout_s
        elif (
            self._options.hosts.scheduled is not None
            and self._options.hosts.scheduled.starter.joins
        ):
            from syncvar_launcher.schedulers.start_on_hosts import StartedHosts  # likewise

            self._calling = StartedHosts(self._options, self._say, self._ask)
            self._party = self._calling.party
            meanwhile()
            self._remotes = self._party.gather()
        else:
            self._log_in(meanwhile)
            self._check(self._remotes)
            self._put_together()
        rooms = [
            HostCapacity(
                one.host.name, one.host.slots or one.facts["core_count"], one.host.max_slots
            )
            for one in self._remotes
        ]
        workers = self._options.ranks.workers or None
        sizes = place_workers(rooms, workers, self._options.hosts.map_by)
        used = [(one, size) for one, size in zip(self._remotes, sizes, strict=True) if size]
        for one, size in zip(self._remotes, sizes, strict=True):
            if not size:
                one.close()
        self._remotes = [one for one, _ in used]
        self._stage(self._remotes)
        addresses = self._prove()
        self.sites = [
            HostSlot(one, one.host.name, size, address, one.facts)
            for (one, size), address in zip(used, addresses, strict=True)
        ]

    def free_port(self) -> int:
        """Return a free port at the first host's address, by which all others reach it."""
        first, found = self.sites[0], list[int]()
        first.remote.send("listen", addresses=[first.address], token=os.urandom(KEY_BYTES))
        self._await(
            [first.remote],
            "listening",
            lambda _, said: found.extend(checked_list(said["ports"], int, 1)),
            _ANSWER_S,
        )
        self._refuse_silent([] if found else [first.remote])
        return found[0]

    def close(self) -> None:
        """Let all agents end. Idempotent."""
        for one in self._remotes:
            one.end_input()
        for one in self._remotes:
            one.close()
        self._remotes.clear()
        if self._party is not None:
            self._party.close(self.exit_code)
        if self._calling is not None:
            self._calling.close()

    def take_said(self) -> list[str]:
        """Return the sentences to show since the last call."""
        return self._party.take_said() if self._party is not None else []

    def command(self, host: Host) -> list[str]:
        """Return the command line that leads to the agent of a host."""
        joins = (
            self._options.hosts.scheduled is not None
            and self._options.hosts.scheduled.starter.joins
        )
        if self._is_without_ssh(host) and not joins:
            python = host.python or self._options.hosts.remote_python
            return command_of(AGENT) if python is None else agent_command_line(python)
        options = self._options
        if options.hosts.scheduled is not None and options.hosts.scheduled.starter.joins:
            from syncvar_launcher.schedulers.start_on_hosts import join_argv  # likewise

            return join_argv(options, host, "ADDRESS:PORT", "KEYFILE")
        if options.hosts.scheduled is not None:
            from syncvar_launcher.schedulers.allocation import agent_command  # likewise

            return agent_command(
                options.hosts.scheduled, host, options.hosts.remote_python or sys.executable
            )
        return ssh_command(
            options.hosts.ssh,
            host,
            options.hosts.ssh_port,
            options.hosts.remote_python or sys.executable,
        )

    def renew(self, left_s: float) -> None:
        """Log in again to hosts whose agent has ended.

        `left_s` is the rest of the time limit, in seconds.
        """
        self._until = time.monotonic() + left_s
        for one in self.sites:
            one.remote.drain()  # messages since the last attempt are unread
        gone = [place for place, one in enumerate(self.sites) if one.remote.loss_reason]
        if not gone:
            return
        for place in gone:
            one = self.sites[place]
            one.remote.close()
            again = (
                self._start(one.remote.host)
                if self._party is None
                else self._party.again(one.remote.host, one.facts["machine"])
            )
            self.sites[place] = one._replace(remote=again)
        self._remotes = [one.remote for one in self.sites]
        renewed = [self.sites[place].remote for place in gone]
        self._await([one for one in renewed if not one.facts], "facts", self._keep_facts, _LOGIN_S)
        self._refuse_silent(one for one in renewed if not one.facts)
        self._check(renewed)
        self._stage(renewed)
        for place in gone:
            one = self.sites[place]
            listed = [address for _, address in one.remote.facts["interfaces"]]
            if one.remote.facts["machine"] != one.facts["machine"] and one.address not in listed:
                why = (
                    f"it is another machine now, without the address {one.address}; start the job "
                    "again"
                )
                self._refuse({one.remote.host: why})
            self.sites[place] = one._replace(facts=one.remote.facts)

    # -- one after another -------------------------------------------------------------------------

    def _log_in(self, meanwhile: Callable[[], object]) -> None:
        waiting = deque(self._options.hosts.entries)
        under_way: list[RemoteHost] = []
        while waiting or under_way:
            while waiting and len(under_way) < _LOGINS_AT_ONCE:
                one = self._start(waiting.popleft())
                self._remotes.append(one)
                under_way.append(one)
            if len(self._remotes) == len(under_way):
                meanwhile()
            left_s = min(one.began for one in under_way) + _LOGIN_S - time.monotonic()
            self._await(
                under_way, "facts", self._keep_facts, max(0.0, left_s), is_one_enough=bool(waiting)
            )
            now = time.monotonic()
            for one in under_way:
                if (
                    not one.facts
                    and not one.loss_reason
                    and now >= min(one.began + _LOGIN_S, self._until)
                ):
                    one.end("it does not answer in time")
            if now >= self._until:
                waiting.clear()
            under_way = [one for one in under_way if not one.facts and not one.loss_reason]
        self._refuse_silent(one for one in self._remotes if not one.facts)

    def _is_without_ssh(self, host: Host) -> bool:
        job = self._options.hosts.scheduled
        return not self._options.hosts.ssh_always and (
            is_here(host, self._own_interfaces) if job is None else host.name == job.here
        )

    def _is_near(self, one: RemoteHost) -> bool:
        """Return whether an agent, and so its listening address, is on this machine."""
        if (
            self._options.hosts.scheduled is not None and self._party is None
        ):  # it does not say from where it was started
            return self._is_without_ssh(one.host)
        return one.facts["launcher_at"] in ("", "127.0.0.1", "::1")

    def _environment_for(self, host: Host) -> dict[str, str] | None:
        """Return the environment of the program that leads to a host; None for our own."""
        if self._is_without_ssh(host):
            return inherited_variables(os.environ, is_clear=True)
        if self._options.hosts.scheduled is None:
            return None
        unset = self._options.hosts.scheduled.starter.unset
        return {
            name: value
            for name, value in inherited_variables(os.environ, is_clear=False).items()
            if name not in unset
        }

    def _start(self, host: Host) -> RemoteHost:
        try:
            environ = self._environment_for(host)
            one = RemoteHost(host, start_agent(self.command(host), without_call(environ)))
        except OSError as error:
            if error.errno in OF_LIMITS:
                count = len(self._options.hosts.entries)
                raise LimitTooLow(
                    f"a limit of the system is too low to log in to {count} hosts: {error.strerror}"
                ) from error
            job = self._options.hosts.scheduled
            program = self._options.hosts.ssh[0] if job is None else job.starter.program
            raise HostUnreachable(
                f"{program} cannot be started: {error.strerror}; give --ssh"
            ) from error
        self._ask(one)
        return one

    def _ask(self, one: RemoteHost) -> None:
        options, runtime = self._options, self._options.runtime
        one.send(
            "ask",
            kind_of_target=options.program.kind,
            target=options.program.target,
            cwd=one.host.cwd or str(options.program.cwd),
            beat_s=runtime.heartbeat_interval_s,
            silence_s=runtime.host_silence_s,
            abort_grace_s=runtime.abort_grace_s,
            term_grace_s=runtime.term_grace_s,
        )

    def _stage(self, remotes: Sequence[RemoteHost]) -> None:
        if self._collection is not None and (why := stage(remotes, self._collection)):
            self._refuse({one.host: why[one.host.name] for one in remotes if one.host.name in why})

    @staticmethod
    def _keep_facts(one: RemoteHost, message: dict[str, Any]) -> None:
        one.learn(message["facts"])

    def _refuse_silent(self, silent: Iterable[RemoteHost]) -> None:
        reasons = {one.host: self._why_silent(one) for one in silent}
        if reasons:
            self._refuse(reasons)

    def _why_silent(self, one: RemoteHost) -> str:
        python = self._options.hosts.remote_python or sys.executable
        if self._party is not None:
            return one.words() or one.loss_reason or "it does not answer in time"
        if one.loss_reason.startswith(NOT_UNDERSTOOD):
            return f"{one.loss_reason}; install the same syncvar on all"
        job = self._options.hosts.scheduled
        program = (
            "ssh"
            if job is None
            else "the agent here"
            if self._is_without_ssh(one.host)
            else job.starter.program
        )
        return ssh_error_text(
            one.host,
            one.status() if one.loss_reason and not one.is_ended else None,
            one.words(),
            python,
            program,
        )

    def _refuse(self, reasons: dict[Host, str]) -> None:
        count = len(reasons)
        named = {
            f"{host.name} ({host.origin})" if host.origin else host.name: why
            for host, why in reasons.items()
        }
        what = "1 host cannot be used" if count == 1 else f"{count} hosts cannot be used"
        lines = "\n".join(
            [
                f"{what}; nothing was started:",
                *(escape(f"  {who}: {why}") for who, why in named.items()),
            ]
        )
        if time.monotonic() >= self._until:
            raise TimePassed(
                f"the time limit of {self._options.limits.timeout_s:g} s passed; {lines}"
            )
        raise HostUnreachable(lines)

    def _check(self, remotes: Iterable[RemoteHost]) -> None:
        """Raise HostUnreachable for hosts on which the job cannot run."""
        wrong = {
            one.host: why
            for one in remotes
            if (why := missing_resources(one.facts, one.host, self._options))
        }
        if wrong:
            self._refuse(wrong)

    def _put_together(self) -> None:
        first: dict[str, RemoteHost] = {}
        for one in list(self._remotes):
            known = first.setdefault(one.facts["machine"], one)
            if known is one:
                continue
            slots = [each.host.slots or each.facts["core_count"] for each in (known, one)]
            total = (
                max(slots) if known.host.slots is None and one.host.slots is None else sum(slots)
            )
            known.host = known.host._replace(slots=total)
            self._say(
                f"{one.host.name} and {known.host.name} are one machine: it counts once, with "
                f"{total} slots"
            )
            one.close()
            self._remotes.remove(one)

    def _prove(self) -> list[str]:
        """Return for each host an address at which all others reach it; set the launcher's own."""
        candidates = [self._candidates(one) for one in self._remotes]
        own = self._own_candidates()
        token = os.urandom(KEY_BYTES)
        listeners = Listeners(own, token)
        ports: dict[int, list[int]] = {}
        answers: dict[int, list[bool]] = {}
        places = {id(one): place for place, one in enumerate(self._remotes)}
        try:
            for one, addresses in zip(self._remotes, candidates, strict=True):
                one.send("listen", addresses=addresses, token=token)
            counts = {
                id(one): len(addresses)
                for one, addresses in zip(self._remotes, candidates, strict=True)
            }

            def keep_ports(one: RemoteHost, said: dict[str, Any]) -> None:
                ports[places[id(one)]] = checked_list(said["ports"], int, counts[id(one)])

            self._await(self._remotes, "listening", keep_ports, _ANSWER_S)
            self._refuse_silent(
                one for place, one in enumerate(self._remotes) if place not in ports
            )
            targets = [*zip(own, listeners.ports, strict=True)]
            for place, addresses in enumerate(candidates):
                targets += zip(addresses, ports[place], strict=True)
            for one in self._remotes:
                one.send("reach", targets=targets, token=token, timeout_s=_REACH_S)

            def keep_answers(one: RemoteHost, said: dict[str, Any]) -> None:
                answers[places[id(one)]] = checked_list(said["answers"], bool, len(targets))

            self._await(self._remotes, "reached", keep_answers, _ANSWER_S, listeners=listeners)
            self._refuse_silent(
                one for place, one in enumerate(self._remotes) if place not in answers
            )
        finally:
            listeners.close()
        return self._chosen(own, candidates, answers)

    def _chosen(
        self,
        own: Sequence[str],
        candidates: Sequence[Sequence[str]],
        answers: dict[int, list[bool]],
    ) -> list[str]:
        """Return for each host its first address that all others reach; set the launcher's own."""
        names = [one.host.name for one in self._remotes]
        position = 0
        found: list[str] = []
        unreachable = []
        for owner, addresses in enumerate([own, *candidates], -1):
            chosen = ""
            missing: dict[str, list[str]] = {}
            for offset, address in enumerate(addresses):
                index = position + offset
                blind = [
                    names[other]
                    for other, said in answers.items()
                    if other != owner and not said[index]
                ]
                if not blind:
                    chosen = address
                    break
                missing[address] = blind
            position += len(addresses)
            found.append(chosen)
            if not chosen:
                who = names[owner] if owner >= 0 else "this machine"
                tried = "; ".join(
                    f"{address} not by {', '.join(blind)}" for address, blind in missing.items()
                )
                unreachable.append(
                    f"  {who} is not reached by all others: {tried or 'it has no address'}"
                )
        if unreachable:
            raise HostUnreachable(
                "hosts do not reach each other; nothing was started. Open the ports above 1023 "
                "between them, or "
                "name the network by --iface or addr=:\n" + "\n".join(unreachable)
            )
        self.address = found[0]
        return found[1:]

    def _candidates(self, one: RemoteHost) -> list[str]:
        if one.host.addr is not None:
            return [one.host.addr]
        found = [Interface(name, address) for name, address in one.facts["interfaces"]]
        near = all(map(self._is_near, self._remotes))
        named = (
            one.host.name if any(each.address == one.host.name for each in found) else ""
        )  # without ssh
        reached_at = _for_links(one.facts["reached_at"]) or named or ("127.0.0.1" if near else None)
        return allowed_addresses(found, self._options.hosts.iface, reached_at)[:_ADDRESSES_MAX]

    def _own_candidates(self) -> list[str]:
        seen = list(
            dict.fromkeys(
                at for one in self._remotes if (at := _for_links(one.facts["launcher_at"]))
            )
        )
        found = self._own_interfaces
        all_here = all(self._is_near(one) and not one.facts["launcher_at"] for one in self._remotes)
        first = "127.0.0.1" if all_here else None
        if seen and any(one.address == seen[0] for one in found):
            first = seen[0]
        more = seen if self._options.hosts.iface is None else []
        return list(
            dict.fromkeys([*allowed_addresses(found, self._options.hosts.iface, first), *more])
        )[: 2 * _ADDRESSES_MAX]

    def _await(
        self,
        remotes: Sequence[RemoteHost],
        kind: str,
        take: Callable[[RemoteHost, dict[str, Any]], None],
        limit_s: float,
        *,
        is_one_enough: bool = False,
        listeners: Listeners | None = None,
    ) -> None:
        """Wait until each agent has sent something, or is gone, or the time has passed."""
        until = min(time.monotonic() + limit_s, self._until)
        missing = [
            one for one in remotes if not one.loss_reason
        ]  # `poll_hosts` waits in vain for these
        while missing and (left_s := until - time.monotonic()) > 0:
            said, ready = poll_hosts(missing, left_s, listeners.descriptors() if listeners else ())
            heard = []
            for one, messages in zip(missing, said, strict=True):
                for message in messages:
                    if message["kind"] == kind:
                        heard.append(one)
                        try:
                            take(one, message)
                        except WireError as error:
                            one.end(f"{NOT_UNDERSTOOD}: {error}")
            for descriptor in ready:
                if listeners is not None:
                    listeners.readable(descriptor)
            missing = [one for one in missing if one not in heard and not one.loss_reason]
            if is_one_enough and len(missing) < len(remotes):
                return


def _for_links(address: str) -> str:
    """Return an address of ssh that links can use, too; not one with an interface scope."""
    return (
        ""
        if "%" in address or (address and ipaddress.ip_address(address).is_link_local)
        else address
    )
