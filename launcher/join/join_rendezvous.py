"""The hosts that join a job: waits for them, and admits or rejects each until there are enough.

People start `syncvar-launch --join` on these hosts, with the same key file. Schedulers such as PBS
start processes that have no pipes to the launcher. There `StartedHosts` starts that command on each
host, with a new key in a folder that all hosts share.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from syncvar.bootstrap.job_private import secret_of_file
from syncvar.bootstrap.kv_store import shared_folder
from syncvar.bootstrap.worker_entry import command_of
from syncvar.core.errors import ConfigError, HostUnreachable
from syncvar.core.output_files import PRIVATE, create_file
from syncvar.core.progress_line import missing_text, terminal_line
from syncvar.protocol.auth_keys import KEY_BYTES, derive
from syncvar.transports.zeromq_sockets import address_towards_any, bracket_ipv6
from syncvar_launcher.hosts.agent_connection import (
    RemoteHost,
    module_command,
    poll_hosts,
)
from syncvar_launcher.hosts.host_checks import (
    allowed_addresses,
    interfaces,
    missing_resources,
    version_mismatch,
)
from syncvar_launcher.io.output import escape
from syncvar_launcher.join.listener import Listener
from syncvar_launcher.local.worker_start import child_of
from syncvar_launcher.options.hostfile import Host
from syncvar_launcher.options.option_table import parse_address
from syncvar_launcher.options.worker_environment import inherited_variables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncvar_launcher.join.listener import AgentPipe, JoinedHost
    from syncvar_launcher.options.launch_options import LaunchOptions

_KEY_OPTION = "--key-file "
_ANSWER_S = 30.0
_BEAT_S = 5.0
_END_S = 10.0
_MOST = 1 << 16
_RUN = "syncvar_launcher.main"


def make_key_file(path: Path) -> bool:
    """Make a key file unless there is one; return whether it made one."""
    try:
        descriptor = create_file(path, PRIVATE)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"--key-file {path} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(os.urandom(KEY_BYTES).hex() + "\n")
    return True


def join_secret(path: Path) -> bytes:
    """Return the secret that protects the connections of hosts that join."""
    return derive(secret_of_file(str(path), _KEY_OPTION), b"syncvar join")


def listen_address(text: str) -> tuple[str, int]:
    """Return the address and port of `--listen`."""
    host, port = parse_address(text)
    own = [one.address for one in interfaces()]
    if host in own:
        return host, port
    try:
        found = [
            str(one[4][0])
            for one in socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)
        ]
    except OSError as error:
        raise ConfigError(f"--listen {text}: {host} is unknown: {error.strerror}") from None
    for address in found:
        if address in own or address.startswith("127."):
            return address, port
    raise ConfigError(
        f"--listen {text}: this machine has no address {', '.join(dict.fromkeys(found))}; it has "
        f"{', '.join(own)}"
    )


def join_command(address: str, port: int | str, options: LaunchOptions) -> str:
    """Return the command to run on each host."""
    return (
        f"syncvar-launch --join {bracket_ipv6(address)}:{port} --key-file "
        f"{shlex.quote(str(options.join.key_file))}"
    )


def join_lines(options: LaunchOptions) -> list[str]:
    """Return what `--listen` would do, for the dry run; it does not listen."""
    address, port = listen_address(options.join.listen or "")
    awaited = f"as many hosts as have {_needed_slots(options)} slots together"
    if options.join.host_count is not None:
        awaited = f"{options.join.host_count} hosts"
    origin = "read from" if options.join.key_file.exists() else "to be made in"
    return [
        (
            f"waits at {address}, port {port or 'chosen by the system'}, for {awaited}, up to "
            f"{options.runtime.rendezvous_timeout_s:g} s; each runs:"
        ),
        f"  {join_command(address, port or 'PORT', options)}",
        f"key: {origin} {options.join.key_file}",
    ]


class JoinGroup:
    """The hosts that join one job.

    `ask` requests an agent's facts about its host. `starter` is the command that makes the hosts
    join; empty if people start it. `start_failure` returns why hosts will not join; empty while all
    may.
    """

    def __init__(
        self,
        options: LaunchOptions,
        show: Callable[[str], None],
        ask: Callable[[RemoteHost], None],
        starter: str = "",
        start_failure: Callable[[], str] = str,
    ) -> None:
        assert options.join.listen is not None
        self._options, self._ask = options, ask
        self._write = show
        self._line = terminal_line(options.runtime.progress)
        self._limit_s = options.runtime.rendezvous_timeout_s
        self._pipes: dict[str, AgentPipe] = {}  # by the name of the host
        self._addresses: dict[str, str] = {}
        self._rejections: list[str] = []
        self._early: list[RemoteHost] = []  # joined when the job had just enough hosts to begin
        address, port = listen_address(options.join.listen)
        self._starter, self._start_failure = starter, start_failure
        if make_key_file(options.join.key_file) and not starter:
            show(f"made {options.join.key_file}; copy it to hosts that do not share this folder")
        self._address = address
        self._listener = Listener(
            address, port, join_secret(options.join.key_file), options.join.host_count or _MOST
        )
        # The address of the launcher, as `--join` takes it.
        self.place = f"{bracket_ipv6(address)}:{self._listener.port}"
        self._command = join_command(address, self._listener.port, options)

    def gather(self) -> list[RemoteHost]:
        """Wait for as many hosts as the job needs, and return them sorted by name."""
        count = self._options.join.host_count
        awaited = f"hosts with {_needed_slots(self._options)} slots together"
        if count is not None:
            awaited = f"{count} host{'s' * (count != 1)}"
        each = "this host" if count == 1 else "each host"
        if not self._starter:
            self._show(
                f"waiting for {awaited} for up to {self._limit_s:g} s; run on {each}: "
                f"{self._command}"
            )
        joined = self._await(self._has_enough, self._rejection_of, awaited)
        if not self._options.may_grow:
            self._listener.set_places(len(joined))
        self._rename_twins(joined)
        return sorted(joined, key=_natural_order)

    def again(self, host: Host, machine: str) -> RemoteHost:
        """Return the connection to a new agent on a host whose agent is gone.

        If the host itself is gone, it may join once more.
        """
        pipe = self._pipes[host.name].again()
        if pipe is not None:
            self._pipes[host.name] = pipe
            one = RemoteHost(host, pipe, self._known_facts(self._addresses[host.name]))
            self._ask(one)
            return one
        self._show(
            f"{host.name} is to join again, within {self._limit_s:g} s; run there: {self._command}"
        )

        def rejection(one: RemoteHost, _: list[RemoteHost]) -> str:
            other = f"the job waits for {host.name} to join again, and this is another machine"
            return missing_resources(one.facts, one.host, self._options) or (
                "" if one.facts["machine"] == machine else other
            )

        (one,) = self._await(bool, rejection, host.name)
        self._pipes[host.name] = self._pipes.pop(one.host.name)
        one.host = host
        return one

    def descriptor(self) -> int:
        """Return the descriptor to poll for reading: a host joins."""
        return self._listener.descriptor()

    def newcomers(self) -> list[RemoteHost]:
        """Return hosts that have joined since the last call, after the job has begun."""
        early, self._early = self._early, []
        return [*early, *filter(None, map(self._accept, self._listener.take()))]

    def take_messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        return [escape(one) for one in self._listener.take_messages()]

    def close(self, exit_code: int) -> None:
        """Send all hosts the exit code of the job, and stop listening. Idempotent."""
        self._listener.close(exit_code)

    # -- inside ------------------------------------------------------------------------------------

    def _await(
        self,
        is_enough: Callable[[list[RemoteHost]], bool],
        rejection: Callable[[RemoteHost, list[RemoteHost]], str],
        awaited: str,
    ) -> list[RemoteHost]:
        """Return the hosts that have joined, when they are enough; reject the others."""
        with self._line:
            return self._gather(is_enough, rejection, awaited)

    def _gather(
        self,
        is_enough: Callable[[list[RemoteHost]], bool],
        rejection: Callable[[RemoteHost, list[RemoteHost]], str],
        awaited: str,
    ) -> list[RemoteHost]:
        joined: list[RemoteHost] = []
        pending: list[RemoteHost] = []  # whose facts have not arrived
        now = time.monotonic()
        until, heartbeat_at = now + self._limit_s, now + _BEAT_S
        while not is_enough(joined):
            now = time.monotonic()
            self._check_start(joined, awaited, is_late=now >= until)
            if now >= heartbeat_at:
                heartbeat_at = now + _BEAT_S
                for one in joined:
                    one.send("heartbeat")
            present = [*joined, *pending]
            if self._line.is_due():
                self._line.show(self._joined_text(joined, awaited))
            limit_s = min(until - now, 1.0, self._line.due_s())
            received, _ = poll_hosts(present, limit_s, [self._listener.descriptor()])
            pending += filter(None, map(self._accept, self._listener.take()))
            self._show_rejections()
            for one, messages in zip(present, received, strict=True):
                one.learn_from(messages)
                if one in joined and one.loss_reason:
                    joined.remove(one)
                    self._dismiss(one, f"it has left: {one.words() or one.loss_reason}")
                elif one in pending and (one.facts or one.loss_reason):
                    pending.remove(one)
                    self._admit(one, joined, rejection)
                elif one in pending and now - one.began > _ANSWER_S:
                    one.end("it does not answer in time")
        self._turn_away(pending)
        return joined

    def _turn_away(self, pending: list[RemoteHost]) -> None:
        """Reject hosts that came late, or keep them for an elastic job, which they can join."""
        if self._options.may_grow:
            self._early += pending
            return
        for one in pending:
            self._dismiss(one, "the job has enough hosts without it")

    def _joined_text(self, joined: list[RemoteHost], awaited: str) -> str:
        """Return how many hosts have joined, and which are missing if that is known."""
        text = f"waiting for {awaited}; {len(joined)} joined"
        if self._options.join.host_count is None:
            text += f" with {sum(one.slots for one in joined)} slots"
        present = {one.host.name for one in joined}
        absent = [one.name for one in self._options.hosts.entries if one.name not in present]
        return f"{text}; {missing_text(absent)}" if absent and self._starter else text

    def _show(self, sentence: str) -> None:
        self._line.close()
        self._write(escape(sentence))

    def _show_rejections(self) -> None:
        for sentence in self._listener.take_messages():
            self._show(sentence)
            self._rejections.append(sentence)

    def _admit(
        self,
        one: RemoteHost,
        joined: list[RemoteHost],
        rejection: Callable[[RemoteHost, list[RemoteHost]], str],
    ) -> None:
        """Add a host to those that have joined, or reject it."""
        reason = one.words() or one.loss_reason if one.loss_reason else rejection(one, joined)
        if reason:
            self._dismiss(one, reason)
            return
        joined.append(one)
        if not self._starter:
            slots = one.slots
            self._show(f"{_host_text(one)} has joined with {slots} slot{'s' * (slots != 1)}")

    def _accept(self, new: JoinedHost) -> RemoteHost | None:
        """Ask a new host for its facts; None if its greeting is enough to reject it."""
        hello = new.hello
        name, number = hello.name, 0
        while name in self._pipes:
            number += 1
            name = f"{hello.name}#{number}"
        host = Host(name, hello.slots, cwd=hello.cwd, origin=new.address)
        one = RemoteHost(host, new.pipe, self._known_facts(hello.address))
        self._pipes[name] = new.pipe
        self._addresses[name] = hello.address
        reason = version_mismatch(
            hello.syncvar, hello.protocol, hello.byte_order, hello.python, "join by the same Python"
        )
        if reason:
            self._dismiss(one, reason)
            return None
        self._ask(one)
        return one

    def _known_facts(self, address: str) -> dict[str, str]:
        return {"launcher_address": self._address, "login_address": address}

    def _dismiss(self, one: RemoteHost, reason: str) -> None:
        self._pipes.pop(one.host.name).refuse(reason)
        one.close()

    def _rejection_of(self, one: RemoteHost, joined: list[RemoteHost]) -> str:
        twins = [each for each in joined if each.facts["machine"] == one.facts["machine"]]
        if len(twins) >= self._options.ranks.fake_hosts:
            return (
                f"this machine has joined already, as {_host_text(twins[0])}: start --join once on "
                "each host, with --slots K for K workers"
                f" (--fake-hosts N beside --listen lets one machine pose as N)"
            )
        return missing_resources(one.facts, one.host, self._options)

    def _has_enough(self, joined: list[RemoteHost]) -> bool:
        count = self._options.join.host_count
        if count is not None:
            return len(joined) >= count
        return sum(one.slots for one in joined) >= _needed_slots(self._options)

    def _check_start(self, joined: list[RemoteHost], awaited: str, *, is_late: bool) -> None:
        """Raise HostUnreachable if the time has passed, or if hosts will not join."""
        failure = self._start_failure()
        if failure and not is_late:
            raise HostUnreachable(f"{awaited} cannot be used; nothing was started:\n  {failure}")
        if not is_late:
            return
        each = f"By {self._starter} each" if self._starter else "Each"
        lines = [
            (
                f"{awaited} did not join within {self._limit_s:g} s; nothing was started. "
                f"{each} runs: {self._command}"
            ),
            *(f"  {_host_text(one)}: has joined, with {one.slots} slots" for one in joined),
            *([] if joined else ["  nobody has joined"]),
            *(f"  {reason}" for reason in dict.fromkeys(self._rejections)),
        ]
        raise HostUnreachable("\n".join(map(escape, lines)))

    def _rename_twins(self, joined: list[RemoteHost]) -> None:
        """Give hosts with the same name their addresses as names, if those differ."""
        names = Counter(one.host.name.partition("#")[0] for one in joined)
        addresses = Counter(self._addresses[one.host.name] for one in joined)
        for one in joined:
            address = self._addresses[one.host.name]
            if names[one.host.name.partition("#")[0]] > 1 and addresses[address] == 1:
                self._pipes[address] = self._pipes.pop(one.host.name)
                self._addresses[address] = address
                one.host = one.host._replace(name=address)


def _host_text(one: RemoteHost) -> str:
    return f"{one.host.name} ({one.host.origin})"


def _natural_order(one: RemoteHost) -> list[int | str]:
    parts = re.split(r"(\d+)", one.host.name)
    return [int(part) if part.isdigit() else part for part in parts]


def _needed_slots(options: LaunchOptions) -> int:
    """Return how many slots the job needs to begin."""
    return options.ranks.fewest or options.ranks.workers


def join_argv(options: LaunchOptions, host: Host, place: str, key: str) -> list[str]:
    """Return the command line by which a host of the job joins."""
    job = options.hosts.scheduled
    assert job is not None
    own = ["--join", place, "--key-file", key]
    own += ["--slots", str(host.slots)] if host.slots else []
    own += ["--cwd", host.cwd] if host.cwd else []
    if host.name == job.here and host.python is None and options.hosts.remote_python is None:
        return [*command_of(_RUN), *own]
    python = host.python or options.hosts.remote_python or sys.executable
    words = [*module_command(python, _RUN), *own]
    return words if host.name == job.here else job.command(host, words)


class StartedHosts:
    """The commands that run on the hosts of a job and make them join."""

    def __init__(
        self, options: LaunchOptions, show: Callable[[str], None], ask: Callable[[RemoteHost], None]
    ) -> None:
        job = options.hosts.scheduled
        assert job is not None
        self._program = job.starter.program
        others = [one.name for one in options.hosts.entries if one.name != job.here]
        if options.hosts.iface:
            address = allowed_addresses(interfaces(), options.hosts.iface, None)[0]
        else:
            address = address_towards_any(others)
        self._key = shared_folder(os.environ) / f"join-{os.urandom(8).hex()}"
        self._started: dict[Host, subprocess.Popen[bytes]] = {}
        count = len(options.hosts.entries)
        join = options.join._replace(
            listen=bracket_ipv6(address), host_count=count, key_file=self._key
        )
        self.joined = JoinGroup(
            options._replace(join=join), show, ask, self._program, self._start_failure
        )
        environ = inherited_variables(os.environ, is_clear=False)
        try:
            for host in options.hosts.entries:
                line = join_argv(options, host, self.joined.place, str(self._key))
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

    def _start_failure(self) -> str:
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
