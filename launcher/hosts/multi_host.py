"""Runs a job on several hosts, from the command line to the exit code.

It logs in to all hosts at once, checks them, places the workers, and tests the links. Nothing
starts before every host has answered: one message then names all problems of all hosts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.worker_entry import command_of
from syncvar.core import exit_status
from syncvar.core.errors import HostUnreachable, WireError, error_message
from syncvar.core.progress_line import missing_text, terminal_line
from syncvar.protocol.auth_keys import KEY_BYTES
from syncvar_launcher.hosts.agent_connection import (
    AGENT,
    NOT_UNDERSTOOD,
    HostSlot,
    RemoteHost,
    agent_command_line,
    poll_hosts,
    ssh_command,
    ssh_error_text,
    start_agent,
)
from syncvar_launcher.hosts.agent_protocol import Message, checked_list
from syncvar_launcher.hosts.file_transfer import Collection, collect_files, stage, without_call
from syncvar_launcher.hosts.host_arrivals import HostArrivals
from syncvar_launcher.hosts.host_checks import (
    HostCapacity,
    Listeners,
    check_file_limit,
    choose_addresses,
    host_candidates,
    interfaces,
    is_here,
    launcher_candidates,
    missing_resources,
    place_workers,
    refusal_text,
)
from syncvar_launcher.hosts.host_discovery import HostDiscovery
from syncvar_launcher.job.job import Job
from syncvar_launcher.local.host_resources import OF_LIMITS, LimitTooLow, TimePassed
from syncvar_launcher.options.launch_options import check_debugged
from syncvar_launcher.options.option_table import shown_ranks
from syncvar_launcher.options.worker_environment import inherited_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar_launcher.join.join_rendezvous import JoinGroup, StartedHosts
    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions

_LOGINS_AT_ONCE = 16
_LOGIN_S = 30.0
_ANSWER_S = 15.0
_REACH_S = 5.0


def launch(chosen: LaunchOptions, arguments: Sequence[str]) -> int:
    """Start a job on the named hosts; return the exit code."""
    for notice in chosen.hosts.notices:
        show(notice)
    check_file_limit(chosen)
    discovery = None
    if chosen.hosts.discovery is not None:
        discovery = HostDiscovery(chosen.hosts.discovery, chosen.runtime.host_discovery_s)
        limit_s = chosen.runtime.rendezvous_timeout_s
        entries = discovery.first(chosen.ranks.fewest, limit_s, show)
        chosen = chosen._replace(hosts=chosen.hosts._replace(entries=entries))
    # In the background reading a terminal fails, and does not stop us and with us all ranks.
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    with contextlib.closing(JobHosts(chosen, show)) as host_group:
        host_group.open(_import_the_rest)
        if chosen.may_grow:
            host_group.arrivals = HostArrivals(chosen, host_group, discovery, show)
        # Not before the logins.
        from syncvar_launcher.hosts.remote_workers import RemoteWorkers
        from syncvar_launcher.job import restart_loop

        workers = sum(one.workers for one in host_group.sites)
        shown_ranks(chosen.output.selection, max(workers, chosen.ranks.workers))
        check_debugged(chosen.ranks.debug, workers)
        # An elastic job keeps numbers for workers of hosts that come later.
        final = chosen if chosen.ranks.fewest else chosen.with_workers(workers)
        job = Job(final, arguments, os.environ, host_group)
        make_workers = partial(RemoteWorkers, host_group)
        host_group.exit_code = restart_loop.run(job, None, make_workers)
        return host_group.exit_code


def _import_the_rest() -> None:
    """Import what a job needs later; a login takes longer than that."""
    from syncvar_launcher.job import restart_loop  # noqa: F401


def show(sentence: str) -> None:
    """Write a sentence of the launcher to its standard error."""
    sys.stderr.write(f"syncvar-launch: {sentence}\n")
    sys.stderr.flush()


class JobHosts:
    """The hosts of one job: the launcher reaches them, checks them, and gives them workers."""

    def __init__(self, options: LaunchOptions, show: Callable[[str], None]) -> None:
        # When the job began, in seconds of the monotonic clock; the time limit counts from it.
        self.began = time.monotonic()
        self._until = self.began + options.limits.timeout_s
        self._options = options
        self._show = show
        self._line = terminal_line(options.runtime.progress)
        self.secret = os.urandom(KEY_BYTES)  # the secret of the job
        self.sites: list[HostSlot] = []  # the hosts that have workers, in the order of their ranks
        self.address = ""  # the address at which the launcher listens
        self._remotes: list[RemoteHost] = []
        self._own_interfaces = interfaces()
        self._allocation = options.hosts.scheduled
        self._is_started_by_job = self._allocation is not None and self._allocation.starter.joins
        self._joined: JoinGroup | None = None
        self._started: StartedHosts | None = None
        self._collection: Collection | None = None
        self.arrivals: HostArrivals | None = None  # of an elastic job to which hosts may come
        # The exit code of the job, for hosts that have joined.
        self.exit_code = exit_status.RENDEZVOUS

    def open(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Log in to all hosts, or wait until hosts have joined; check them and place the workers.

        It also finds addresses by which all hosts reach each other. It calls `meanwhile` once,
        during the first logins.
        """
        options = self._options
        if options.hosts.stage:
            self._collection = collect_files(options)
            self._show(f"--stage copies to each host {self._collection.describe()}")
        if options.join.listen is not None or self._is_started_by_job:
            self._gather(meanwhile)
        else:
            self._log_in(meanwhile)
            self._check(self._remotes)
            self._merge_by_machine()
        capacities = [
            HostCapacity(one.host.name, one.slots, one.host.max_slots) for one in self._remotes
        ]
        wanted = options.ranks.workers or None
        map_by, fewest = options.hosts.map_by, options.ranks.fewest
        sizes = place_workers(capacities, wanted, map_by, fewest=fewest)
        used = [(one, size) for one, size in zip(self._remotes, sizes, strict=True) if size]
        for one, size in zip(self._remotes, sizes, strict=True):
            if not size:
                one.close()
        self._remotes = [one for one, _ in used]
        self._stage(self._remotes)
        self.address, *addresses = self._find_addresses()
        self.sites = [
            HostSlot(one, one.host.name, size, address, one.facts)
            for (one, size), address in zip(used, addresses, strict=True)
        ]

    def free_port(self) -> int:
        """Return a free port at the first host's address, by which all others reach it."""
        first = self.sites[0]
        first.remote.send("listen", addresses=[first.address], token=os.urandom(KEY_BYTES))
        ((port,),) = self._collect(
            [first.remote], "listening", lambda _, found: checked_list(found["ports"], int, 1)
        )
        return int(port)

    # -- hosts that come later ---------------------------------------------------------------------

    def log_in(self, host: Host) -> RemoteHost:
        """Start to log in to a host, and ask it for its facts."""
        return self._start(host)

    def joined(self) -> list[RemoteHost]:
        """Return hosts that have joined by themselves since the last call."""
        return [] if self._joined is None else self._joined.newcomers()

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading: a host joins."""
        return [] if self._joined is None else [self._joined.descriptor()]

    def admit(self, slot: HostSlot) -> None:
        """Add a host, and copy the script to it; raise HostUnreachable if that fails."""
        self._remotes.append(slot.remote)
        self.sites.append(slot)
        self._until = float("inf")
        self._stage([slot.remote])

    def close(self) -> None:
        """Let all agents end. Idempotent."""
        if self.arrivals is not None:
            self.arrivals.close()
        for one in self._remotes:
            one.end_input()
        for one in self._remotes:
            one.close()
        self._remotes.clear()
        if self._joined is not None:
            self._joined.close(self.exit_code)
        if self._started is not None:
            self._started.close()

    def take_messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        return self._joined.take_messages() if self._joined is not None else []

    def command(self, host: Host) -> list[str]:
        """Return the command line that leads to the agent of a host."""
        options, job = self._options, self._allocation
        python = options.hosts.remote_python
        if self._is_without_ssh(host) and not self._is_started_by_job:
            own = host.python or python
            return command_of(AGENT) if own is None else agent_command_line(own)
        if self._is_started_by_job:
            from syncvar_launcher.join.join_rendezvous import join_argv  # not for ssh

            return join_argv(options, host, "ADDRESS:PORT", "KEYFILE")
        if job is not None:
            from syncvar_launcher.schedulers.allocation import agent_command  # not for ssh

            return agent_command(job, host, python or sys.executable)
        return ssh_command(
            options.hosts.ssh, host, options.hosts.ssh_port, python or sys.executable
        )

    def renew(self, left_s: float) -> None:
        """Log in again to hosts whose agent has ended.

        `left_s` is the rest of the time limit, in seconds.
        """
        self._until = time.monotonic() + left_s
        for one in self.sites:
            one.remote.drain()  # messages since the last attempt are unread
        if self._options.ranks.fewest:
            self._keep_living()
        lost = [place for place, one in enumerate(self.sites) if not one.remote.is_available]
        if not lost:
            return
        for place in lost:
            one = self.sites[place]
            one.remote.close()
            again = (
                self._start(one.remote.host)
                if self._joined is None
                else self._joined.again(one.remote.host, one.facts["machine"])
            )
            self.sites[place] = one._replace(remote=again)
        self._remotes = [one.remote for one in self.sites]
        renewed = [self.sites[place].remote for place in lost]
        self._collect([one for one in renewed if not one.facts], "facts", _learn_facts, _LOGIN_S)
        self._check(renewed)
        self._stage(renewed)
        for place in lost:
            one = self.sites[place]
            listed = [address for _, address in one.remote.facts["interfaces"]]
            if one.remote.facts["machine"] != one.facts["machine"] and one.address not in listed:
                now = f"it is another machine now, without the address {one.address}"
                self._refuse({one.remote.host: f"{now}; start the job again"})
            self.sites[place] = one._replace(facts=one.remote.facts)

    def _keep_living(self) -> None:
        """Go on with the hosts that live, if they have enough slots for an elastic job."""
        ranks, left = self._options.ranks, self._options.ranks.workers
        living = []
        for one in self.sites:
            size = min(one.workers, left)
            if size and one.remote.is_available:
                living.append(one._replace(workers=size))
                left -= size
        if sum(one.workers for one in living) >= ranks.fewest:
            self.sites = living

    # -- how the launcher reaches the agents -------------------------------------------------------

    def _gather(self, meanwhile: Callable[[], object]) -> None:
        """Wait for hosts that join, started by people or by the scheduler."""
        # An import of sockets that other jobs do not need.
        from syncvar_launcher.join.join_rendezvous import JoinGroup, StartedHosts

        if self._options.join.listen is not None:
            self._joined = JoinGroup(self._options, self._show, self._ask)
        else:
            self._started = StartedHosts(self._options, self._show, self._ask)
            self._joined = self._started.joined
        meanwhile()
        self._remotes = self._joined.gather()
        if self._started is None:
            self.began = time.monotonic()  # the job begins when all hosts have joined
            self._until = self.began + self._options.limits.timeout_s

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
                under_way, "facts", _learn_facts, max(0.0, left_s), is_one_enough=bool(waiting)
            )
            now = time.monotonic()
            under_way = [one for one in under_way if not one.facts and not one.loss_reason]
            for one in under_way:
                if now >= min(one.began + _LOGIN_S, self._until):
                    one.end("it does not answer in time")
            if now >= self._until:
                waiting.clear()
            under_way = [one for one in under_way if not one.loss_reason]
        self._refuse_silent(one for one in self._remotes if not one.facts)

    def _is_without_ssh(self, host: Host) -> bool:
        if self._options.hosts.ssh_always:
            return False
        if self._allocation is not None:
            return host.name == self._allocation.here
        return is_here(host, self._own_interfaces)

    def _is_near(self, one: RemoteHost) -> bool:
        """Return whether an agent, and so its listening address, is on this machine."""
        if self._allocation is not None and self._joined is None:
            return self._is_without_ssh(one.host)  # its facts do not name the starting machine
        return one.facts["launcher_address"] in ("", "127.0.0.1", "::1")

    def _environment_for(self, host: Host) -> dict[str, str] | None:
        """Return the environment of the program that leads to a host; None for our own."""
        if self._is_without_ssh(host):
            return inherited_variables(os.environ, is_clear=True)
        if self._allocation is None:
            return None
        inherited = inherited_variables(os.environ, is_clear=False)
        unset = self._allocation.starter.unset
        return {name: value for name, value in inherited.items() if name not in unset}

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
            job = self._allocation
            program = self._options.hosts.ssh[0] if job is None else job.starter.program
            raise HostUnreachable(
                f"{program} cannot be started: {error.strerror}; give --ssh"
            ) from error
        self._ask(one)
        return one

    def _ask(self, one: RemoteHost) -> None:
        options, runtime = self._options, self._options.runtime
        one.send(
            "get_facts",
            scripts=[one.target for one in options.programs if one.kind == "script"],
            cwd=one.host.cwd or str(options.program.cwd),
            beat_s=runtime.heartbeat_interval_s,
            silence_s=runtime.host_silence_s,
            abort_grace_s=runtime.abort_grace_s,
            term_grace_s=runtime.term_grace_s,
        )

    def _await(
        self,
        remotes: Sequence[RemoteHost],
        kind: str,
        take: Callable[[RemoteHost, Message], object],
        limit_s: float,
        *,
        is_one_enough: bool = False,
        listeners: Listeners | None = None,
    ) -> None:
        """Wait until each agent has sent something, or is gone, or the time has passed."""
        until = min(time.monotonic() + limit_s, self._until)
        watched = listeners.descriptors() if listeners is not None else []
        missing = [one for one in remotes if not one.loss_reason]
        while missing and (left_s := until - time.monotonic()) > 0:
            if kind == "facts" and self._line.is_due():
                self._line.show(self._login_text(missing))
            received, ready = poll_hosts(missing, min(left_s, self._line.due_s()), watched)
            answered = []
            for one, messages in zip(missing, received, strict=True):
                for message in messages:
                    if message["kind"] == kind:
                        answered.append(one)
                        try:
                            take(one, message)
                        except WireError as error:
                            one.end(f"{NOT_UNDERSTOOD}: {error_message(error)}")
            for descriptor in ready:
                if listeners is not None:
                    listeners.readable(descriptor)
            missing = [one for one in missing if one not in answered and not one.loss_reason]
            if is_one_enough and len(missing) < len(remotes):
                break
        self._line.close()

    def _login_text(self, missing: Sequence[RemoteHost]) -> str:
        count = max(len(self._remotes), len(self._options.hosts.entries))
        answered = sum(bool(one.facts) for one in self._remotes)
        names = missing_text(one.host.name for one in missing)
        return f"{answered} of {count} hosts have answered; {names}"

    def _collect(
        self,
        remotes: Sequence[RemoteHost],
        kind: str,
        read: Callable[[RemoteHost, Message], Any],
        limit_s: float = _ANSWER_S,
        listeners: Listeners | None = None,
    ) -> list[Any]:
        """Return what `read` returns for each agent's answer; raise HostUnreachable without one."""
        found: dict[int, Any] = {}

        def take(one: RemoteHost, message: Message) -> None:
            found[id(one)] = read(one, message)

        self._await(remotes, kind, take, limit_s, listeners=listeners)
        self._refuse_silent(one for one in remotes if id(one) not in found)
        return [found[id(one)] for one in remotes]

    # -- what the launcher checks ------------------------------------------------------------------

    def _stage(self, remotes: Sequence[RemoteHost]) -> None:
        if self._collection is not None:
            with terminal_line(self._options.runtime.progress) as line:
                failed = stage(remotes, self._collection, line)
            if failed:
                self._refuse(
                    {one.host: failed[one.host.name] for one in remotes if one.host.name in failed}
                )

    def _refuse_silent(self, silent: Iterable[RemoteHost]) -> None:
        reasons = {one.host: self._silence_reason(one) for one in silent}
        if reasons and not self._leave_out(reasons):
            self._refuse(reasons)

    def _leave_out(self, reasons: dict[Host, str]) -> bool:
        """Start an elastic job without some hosts; return False if it needs them."""
        others = [one for one in self._remotes if one.host not in reasons and one.facts]
        slots = sum(one.slots for one in others)
        if not 0 < self._options.ranks.fewest <= slots or self.sites:
            return False
        for one in [one for one in self._remotes if one.host in reasons]:
            self._show(f"{one.host.name} is left out: {reasons[one.host]}")
            self._remotes.remove(one)
            one.close()
        return True

    def _silence_reason(self, one: RemoteHost) -> str:
        if self._joined is not None:
            return one.words() or one.loss_reason or "it does not answer in time"
        if one.loss_reason.startswith(NOT_UNDERSTOOD):
            return f"{one.loss_reason}; install the same syncvar on all"
        program = "ssh"
        if self._allocation is not None:
            is_own = self._is_without_ssh(one.host)
            program = "the agent here" if is_own else self._allocation.starter.program
        status = one.status() if one.loss_reason and not one.is_ended else None
        python = self._options.hosts.remote_python or sys.executable
        return ssh_error_text(one.host, status, one.words(), python, program)

    def _refuse(self, reasons: dict[Host, str]) -> None:
        text = refusal_text(reasons)
        if time.monotonic() >= self._until:
            limit_s = self._options.limits.timeout_s
            raise TimePassed(f"the time limit of {limit_s:g} s passed; {text}")
        raise HostUnreachable(text)

    def _check(self, remotes: Iterable[RemoteHost]) -> None:
        """Raise HostUnreachable for hosts on which the job cannot run."""
        reasons = {
            one.host: reason
            for one in remotes
            if (reason := missing_resources(one.facts, one.host, self._options))
        }
        if reasons and not self._leave_out(reasons):
            self._refuse(reasons)

    def _merge_by_machine(self) -> None:
        """Count entries that lead to the same machine as one host."""
        first: dict[str, RemoteHost] = {}
        for one in list(self._remotes):
            known = first.setdefault(one.facts["machine"], one)
            if known is one:
                continue
            slots = [known.slots, one.slots]
            are_cores = known.host.slots is None and one.host.slots is None
            total = max(slots) if are_cores else sum(slots)
            known.host = known.host._replace(slots=total)
            self._show(
                f"{one.host.name} and {known.host.name} are one machine: it counts once, with "
                f"{total} slots"
            )
            one.close()
            self._remotes.remove(one)

    def _find_addresses(self) -> list[str]:
        """Return addresses of the launcher and of each host at which all others reach them."""
        candidates, answers = self.test_addresses()
        return choose_addresses([one.host.name for one in self._remotes], candidates, answers)

    def test_addresses(self) -> tuple[list[list[str]], list[list[bool]]]:
        """Return the addresses of the launcher and of each host, and which host reaches which.

        The answers of each host are about all these addresses, in their order.
        """
        remotes, iface = self._remotes, self._options.hosts.iface
        near = [self._is_near(one) for one in remotes]
        seen = [one.facts["launcher_address"] for one in remotes]
        candidates = [
            host_candidates(
                one.host,
                one.facts,
                iface,
                are_all_near=all(near) and not self._options.may_grow,
            )
            for one in remotes
        ]
        is_here_only = all(near) and not any(seen) and not self._options.may_grow
        own = launcher_candidates(self._own_interfaces, seen, iface, is_here_only=is_here_only)
        token = os.urandom(KEY_BYTES)
        listeners = Listeners(own, token)
        counts = {}
        try:
            for one, addresses in zip(remotes, candidates, strict=True):
                counts[id(one)] = len(addresses)
                one.send("listen", addresses=addresses, token=token)
            ports = self._collect(
                remotes,
                "listening",
                lambda one, message: checked_list(message["ports"], int, counts[id(one)]),
            )
            targets = [*zip(own, listeners.ports, strict=True)]
            for addresses, own_ports in zip(candidates, ports, strict=True):
                targets += zip(addresses, own_ports, strict=True)
            for one in remotes:
                one.send("connect", targets=targets, token=token, timeout_s=_REACH_S)
            answers = self._collect(
                remotes,
                "connected",
                lambda _, message: checked_list(message["results"], bool, len(targets)),
                listeners=listeners,
            )
        finally:
            listeners.close()
        return [own, *candidates], answers


def _learn_facts(one: RemoteHost, message: Message) -> None:
    one.learn(message["facts"])
