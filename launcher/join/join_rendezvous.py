"""The hosts that join a job: waits for them, and admits or rejects each until there are enough."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError, HostUnreachable, WireError
from syncvar.transports.zeromq_sockets import bracket_ipv6
from syncvar_launcher.hosts.agent_connection import NOT_UNDERSTOOD, RemoteHost, poll_hosts
from syncvar_launcher.hosts.host_checks import missing_resources, version_mismatch
from syncvar_launcher.hosts.network_proof import interfaces
from syncvar_launcher.io.output import escape
from syncvar_launcher.join.join_key import join_secret, make_key_file
from syncvar_launcher.join.listener import Listener
from syncvar_launcher.options.hostfile import Host
from syncvar_launcher.options.join_options import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar_launcher.join.listener import AgentPipe, JoinedHost
    from syncvar_launcher.options.launch_options import LaunchOptions

_ANSWER_S = 30.0
_BEAT_S = 5.0
_MOST = 1 << 16
_JOIN = "join"


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


class JoinGroup:
    """The hosts that join one job.

    Args:
        options: The options, with `join.listen`.
        say: Shows a sentence.
        ask: Asks an agent for facts about its host.
        called_by: The command that makes the hosts join; empty if people start it.
        why_ended: Returns why hosts will not join; empty while all may.

    Attributes:
        place: The address of the launcher, as `--join` takes it.
    """

    def __init__(
        self,
        options: LaunchOptions,
        say: Callable[[str], None],
        ask: Callable[[RemoteHost], None],
        called_by: str = "",
        why_ended: Callable[[], str] = str,
    ) -> None:
        assert options.join.listen is not None
        self._options, self._ask = options, ask
        self._say: Callable[[str], None] = lambda sentence: say(escape(sentence))
        self._limit_s = options.runtime.rendezvous_timeout_s
        self._ways: dict[str, AgentPipe] = {}  # by the name of the host
        self._addresses: dict[str, str] = {}
        self._reasons: list[str] = []
        address, port = listen_address(options.join.listen)
        self._called_by, self._why_ended = called_by, why_ended
        if make_key_file(options.join.key_file) and not called_by:
            say(f"made {options.join.key_file}; copy it to hosts that do not share this folder")
        self._address = address
        self._door = Listener(
            address, port, join_secret(options.join.key_file), options.join.host_count or _MOST
        )
        self.place = f"{bracket_ipv6(address)}:{self._door.port}"
        self._command = join_command(address, self._door.port, options)

    def gather(self) -> list[RemoteHost]:
        """Wait for as many hosts as the job needs, and return them sorted by name."""
        count = self._options.join.host_count
        whom = (
            f"{count} host{'s' * (count != 1)}"
            if count is not None
            else f"hosts with {self._options.ranks.workers} slots together"
        )
        each = "this host" if count == 1 else "each host"
        if not self._called_by:
            self._say(
                f"waiting for {whom} for up to {self._limit_s:g} s; run on {each}: {self._command}"
            )
        came = self._await(self._has_enough, self._why_not, whom)
        self._door.fill(len(came))
        self._name(came)
        came.sort(
            key=lambda one: [
                int(part) if part.isdigit() else part for part in re.split(r"(\d+)", one.host.name)
            ]
        )
        return came

    def again(self, host: Host, machine: str) -> RemoteHost:
        """Return the connection to a new agent on a host whose agent is gone.

        If the host itself is gone, it may join once more.
        """
        way = self._ways[host.name].again()
        if way is not None:
            self._ways[host.name] = way
            one = RemoteHost(
                host, way, {"launcher_at": self._address, "reached_at": self._addresses[host.name]}
            )
            self._ask(one)
            return one
        self._say(
            f"{host.name} is to join again, within {self._limit_s:g} s; run there: {self._command}"
        )

        def why_not(one: RemoteHost, _: list[RemoteHost]) -> str:
            other = f"the job waits for {host.name} to join again, and this is another machine"
            return missing_resources(one.facts, one.host, self._options) or (
                "" if one.facts["machine"] == machine else other
            )

        (one,) = self._await(bool, why_not, host.name)
        self._ways[host.name] = self._ways.pop(one.host.name)
        one.host = host
        return one

    def take_said(self) -> list[str]:
        """Return the sentences to show since the last call."""
        return [escape(one) for one in self._door.take_said()]

    def close(self, exit_code: int) -> None:
        """Send all hosts the exit code of the job, and stop listening. Idempotent."""
        self._door.close(exit_code)

    # -- inside ------------------------------------------------------------------------------------

    def _await(
        self,
        is_enough: Callable[[list[RemoteHost]], bool],
        why_not: Callable[[RemoteHost, list[RemoteHost]], str],
        whom: str,
    ) -> list[RemoteHost]:
        came: list[RemoteHost] = []
        asked: list[RemoteHost] = []
        now = time.monotonic()
        until, beat_at = now + self._limit_s, now + _BEAT_S
        while not is_enough(came):
            now = time.monotonic()
            if now >= until:
                self._give_up(came, whom)
            if why := self._why_ended():
                raise HostUnreachable(f"{whom} cannot be used; nothing was started:\n  {why}")
            if now >= beat_at:
                beat_at = now + _BEAT_S
                for one in came:
                    one.send("beat")
            present = [*came, *asked]
            said, _ = poll_hosts(present, min(until - now, 1.0), [self._door.descriptor()])
            asked += filter(None, map(self._met, self._door.take()))
            for sentence in self._door.take_said():
                self._say(sentence)
                self._reasons.append(sentence)
            for one, messages in zip(present, said, strict=True):
                self._hear(
                    one, [message["facts"] for message in messages if message["kind"] == "facts"]
                )
                if one in asked and (one.facts or one.loss_reason):
                    asked.remove(one)
                    why = one.words() or one.loss_reason if one.loss_reason else why_not(one, came)
                    if why:
                        self._dismiss(one, why)
                    else:
                        came.append(one)
                        if not self._called_by:
                            self._say(
                                f"{_shown(one)} has joined with {self._slots(one)} "
                                f"slot{'s' * (self._slots(one) != 1)}"
                            )
                elif one in came and one.loss_reason:
                    came.remove(one)
                    self._dismiss(one, f"it has left: {one.words() or one.loss_reason}")
                elif one in asked and now - one.began > _ANSWER_S:
                    one.end("it does not answer in time")
        for one in asked:
            self._dismiss(one, "the job has enough hosts without it")
        return came

    def _met(self, joined: JoinedHost) -> RemoteHost | None:
        """Ask a new host for its facts; None if its greeting is enough to reject it."""
        hello = joined.hello
        name = self._free_name(hello.name)
        known = {"launcher_at": self._address, "reached_at": hello.at}
        one = RemoteHost(
            Host(name, hello.slots, cwd=hello.cwd, origin=joined.address), joined.way, known
        )
        self._ways[name] = joined.way
        self._addresses[name] = hello.at
        if why := version_mismatch(
            hello.syncvar, hello.protocol, hello.byte_order, hello.python, "join by the same Python"
        ):
            self._dismiss(one, why)
            return None
        self._ask(one)
        return one

    def _free_name(self, name: str) -> str:
        """Return a name that no other host has, its own if possible."""
        number = 0
        found = name
        while found in self._ways:
            number += 1
            found = f"{name}#{number}"
        return found

    @staticmethod
    def _hear(one: RemoteHost, all_facts: list[dict[str, object]]) -> None:
        for facts in all_facts:
            try:
                one.learn(facts)
            except WireError as error:
                one.end(f"{NOT_UNDERSTOOD}: {error}")

    def _dismiss(self, one: RemoteHost, why: str) -> None:
        self._ways.pop(one.host.name).refuse(why)
        one.close()

    def _why_not(self, one: RemoteHost, came: list[RemoteHost]) -> str:
        twins = [each for each in came if each.facts["machine"] == one.facts["machine"]]
        if len(twins) >= self._options.ranks.fake_hosts:
            return (
                f"this machine has joined already, as {_shown(twins[0])}: start --join once on "
                "each host, with --slots K for K workers"
                f" (--fake-hosts N beside --listen lets one machine pose as N)"
            )
        return missing_resources(one.facts, one.host, self._options)

    @staticmethod
    def _slots(one: RemoteHost) -> int:
        return int(one.host.slots or one.facts["core_count"])

    def _has_enough(self, came: list[RemoteHost]) -> bool:
        count = self._options.join.host_count
        return (
            len(came) >= count
            if count is not None
            else sum(map(self._slots, came)) >= self._options.ranks.workers
        )

    def _give_up(self, came: list[RemoteHost], whom: str) -> None:
        who = f"By {self._called_by} each" if self._called_by else "Each"
        lines = [
            (
                f"{whom} did not join within {self._limit_s:g} s; nothing was started. "
                f"{who} runs: {self._command}"
            )
        ]
        lines += [
            f"  {_shown(one)}: has joined, with {self._slots(one)} slots" for one in came
        ] or ["  nobody has joined"]
        lines += [f"  {reason}" for reason in dict.fromkeys(self._reasons)]
        raise HostUnreachable("\n".join(map(escape, lines)))

    def _name(self, came: list[RemoteHost]) -> None:
        """Give hosts with the same name their addresses as names, if those differ."""
        names = Counter(one.host.name.partition("#")[0] for one in came)
        addresses = Counter(self._addresses[one.host.name] for one in came)
        for one in came:
            address = self._addresses[one.host.name]
            if names[one.host.name.partition("#")[0]] > 1 and addresses[address] == 1:
                self._ways[address] = self._ways.pop(one.host.name)
                self._addresses[address] = address
                one.host = one.host._replace(name=address)


def _shown(one: RemoteHost) -> str:
    return f"{one.host.name} ({one.host.origin})"
