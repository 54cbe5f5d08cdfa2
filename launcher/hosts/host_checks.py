"""Decides whether a job can run on hosts, how many workers each gets, and at which addresses.

The checks return the reason and the remedy if a host cannot be used. For the addresses, each agent
listens for a moment, and all others try to connect with a token.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import resource
import select
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import syncvar
from syncvar.core.errors import ConfigError, HostUnreachable
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar_launcher.io.output import escape
from syncvar_launcher.local.host_resources import LimitTooLow, needed_tasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.options.launch_options import LaunchOptions

_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS
_IS_UP = 1
_PROOF_NBYTES = 32
_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "flannel", "lxc", "podman")
_ADDRESSES_MAX = 4  # of each host that are tried
_FILES, _FILES_OF_A_HOST = 32, 4  # descriptors of the launcher, and for each host


def version_mismatch(version: str, protocol: int, byte_order: str, python: str, remedy: str) -> str:
    """Return why the ranks of two hosts cannot understand each other; empty if they can.

    `version`, `protocol`, `byte_order` and `python` are those of the other host. `remedy` advises
    how to get another Python there.

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
    mismatch = version_mismatch(
        facts["syncvar"], facts["protocol"], facts["byte_order"], facts["python"], other_python
    )
    if mismatch:
        return mismatch
    cwd = host.cwd or options.program.cwd
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
    if facts["missing_scripts"] and not options.hosts.stage:
        return (
            f"there is no script {facts['missing_scripts'][0]} in {cwd} there; --stage copies it, "
            "or use a shared folder"
        )
    return ""


def check_file_limit(chosen: LaunchOptions) -> None:
    """Raise LimitTooLow if the launcher may not open as many files as it needs."""
    hosts = len(chosen.hosts.entries) or chosen.join.host_count or chosen.ranks.workers
    needed = (
        _FILES
        + hosts * _FILES_OF_A_HOST * (1 + (chosen.join.listen is not None))
        + 2 * (chosen.ranks.workers or hosts) * (chosen.output.log_dir is not None)
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise LimitTooLow(
            f"the launcher needs {needed} open files for {hosts} hosts, and {soft} are allowed: "
            f"ulimit -n {needed}"
        )


def refusal_text(reasons: Mapping[Host, str]) -> str:
    """Return why hosts cannot be used, one line for each."""
    count = "1 host" if len(reasons) == 1 else f"{len(reasons)} hosts"
    lines = [f"{count} cannot be used; nothing was started:"]
    for host, reason in reasons.items():
        name = f"{host.name} ({host.origin})" if host.origin else host.name
        lines.append(escape(f"  {name}: {reason}"))
    return "\n".join(lines)


# -- workers on each host --------------------------------------------------------------------------


class HostCapacity(NamedTuple):
    """A host with its slots."""

    name: str  # the name for messages
    slots: int  # the slots, at least 1
    # The limit when all slots of all hosts are taken; None for `slots`.
    max_slots: int | None = None


def place_workers(
    hosts: Sequence[HostCapacity], workers: int | None, map_by: str = "slot", *, fewest: int = 0
) -> tuple[int, ...]:
    """Return the number of workers of each host; 0 for a host without any.

    Ranks are numbered host by host, so those of one host are neighbours.

    Args:
        hosts: The hosts in their order.
        workers: The number of workers; None for all slots.
        map_by: "slot" fills a host before the next one. "host" gives each one worker in turn.
        fewest: Fewest workers of an elastic job, which begins with as many as there are slots.

    Example:
        >>> two = [HostCapacity("a", 4), HostCapacity("b", 4)]
        >>> place_workers(two, 5), place_workers(two, 5, "host"), place_workers(two, 9, fewest=2)
        ((4, 1), (3, 2), (4, 4))
    """
    if workers is None:
        return tuple(one.slots for one in hosts)
    soft = sum(one.slots for one in hosts)
    if fewest:
        workers = max(fewest, min(workers, soft))
    most = [max(one.slots, one.max_slots or 0) for one in hosts]
    if workers > sum(most):
        there = ", ".join(f"{one.name} {limit}" for one, limit in zip(hosts, most, strict=True))
        raise ConfigError(
            f"{workers} workers have no place: the hosts have {sum(most)} slots ({there}); "
            f"write --workers {sum(most)}, or give a host more: name:N in -H, "
            "slots=N or max_slots=N in a host file"
        )
    limits = [one.slots for one in hosts]
    sizes = _deal(limits, min(workers, soft), map_by)
    if workers > soft:
        rest = [limit - slots for limit, slots in zip(most, limits, strict=True)]
        more = _deal(rest, workers - soft, map_by)
        sizes = [first + second for first, second in zip(sizes, more, strict=True)]
    return tuple(sizes)


def _deal(limits: Sequence[int], workers: int, map_by: str) -> list[int]:
    sizes = [0] * len(limits)
    while workers:
        for index, limit in enumerate(limits):
            share = min(limit - sizes[index], workers if map_by == "slot" else 1, workers)
            sizes[index] += share
            workers -= share
    return sizes


# -- addresses of hosts ----------------------------------------------------------------------------


class Interface(NamedTuple):
    """One address of this host, with the name of its interface."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the addresses of this host that others could reach, and then those of loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _GET_FLAGS, request), 16)[0]
                if flags & _IS_UP:
                    answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
                    found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    found += _interfaces_of_ipv6()
    return sorted(found, key=lambda one: ipaddress.ip_address(one.address).is_loopback)


def _interfaces_of_ipv6() -> Iterator[Interface]:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
        for line in lines:
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:
                yield Interface(name, str(address))


def allowed_addresses(
    found: Sequence[Interface], spec: str | None, reached_at: str | None
) -> list[str]:
    """Return the addresses that a job may use, the best first.

    Args:
        found: All addresses of a host.
        spec: `--iface`: names, `^name` and networks ("10.0.0.0/8"), with commas. If one of them is
            named, the job uses only such addresses. It never uses those with ^. None for all except
            bridges of containers.
        reached_at: The address at which ssh reached the host; it comes first.

    Example:
        >>> two = [Interface("eth0", "10.0.0.7"), Interface("ib0", "10.9.0.7")]
        >>> two.append(Interface("lo", "127.0.0.1"))
        >>> spread = [(None, "10.9.0.7"), ("eth0", "10.9.0.7"), ("10.9.0.0/16", None)]
        >>> tuple(allowed_addresses(two, spec, reached_at) for spec, reached_at in spread)
        (['10.9.0.7', '10.0.0.7'], ['10.0.0.7'], ['10.9.0.7'])
    """
    if spec is None:
        is_near = reached_at is not None and ipaddress.ip_address(reached_at).is_loopback
        rest = [
            one.address
            for one in found
            if not one.name.startswith(_BRIDGES)
            and ipaddress.ip_address(one.address).is_loopback == is_near
        ]
    else:
        wanted, unwanted = _parse_interfaces(spec)
        rest = [
            one.address
            for one in found
            if not _fits(one, unwanted) and (not wanted or _fits(one, wanted))
        ]
        if not wanted:
            rest = [one for one in rest if not ipaddress.ip_address(one).is_loopback] or rest
    first = [reached_at] if reached_at is not None and (spec is None or reached_at in rest) else []
    return list(dict.fromkeys([*first, *rest]))


def _parse_interfaces(spec: str) -> tuple[list[str], list[str]]:
    wanted: list[str] = []
    unwanted: list[str] = []
    for part in spec.split(","):
        word = part.strip()
        name = word.removeprefix("^")
        if "/" in name or ":" in name or name[:1].isdigit():
            try:
                ipaddress.ip_network(name, strict=False)
            except ValueError:
                raise ConfigError(
                    f"--iface {spec}: {name!r} is no network, such as 10.0.0.0/8"
                ) from None
        elif not name or len(name) > 15 or not name.isprintable():
            problem = f"--iface {spec}: {word!r} is no name of an interface"
            raise ConfigError(f"{problem}; write for instance eth0, ^docker0 or 10.0.0.0/8")
        (unwanted if word.startswith("^") else wanted).append(name)
    return wanted, unwanted


def _fits(one: Interface, words: Sequence[str]) -> bool:
    for word in words:
        if one.name == word:
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(one.address) in ipaddress.ip_network(word, strict=False):
                return True
    return False


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


def host_candidates(
    host: Host, facts: Mapping[str, Any], iface: str | None, *, are_all_near: bool
) -> list[str]:
    """Return the addresses of a host that others should try, the best first.

    `are_all_near` tells whether all agents are on the launcher's machine.
    """
    if host.addr is not None:
        return [host.addr]
    found = [Interface(name, address) for name, address in facts["interfaces"]]
    named = host.name if any(each.address == host.name for each in found) else ""  # without ssh
    near = "127.0.0.1" if are_all_near else None
    login_address = _for_links(facts["login_address"]) or named or near
    return allowed_addresses(found, iface, login_address)[:_ADDRESSES_MAX]


def launcher_candidates(
    found: Sequence[Interface], as_seen: Iterable[str], iface: str | None, *, is_here_only: bool
) -> list[str]:
    """Return the launcher's own addresses that hosts should try, the best first.

    `as_seen` are the addresses of the launcher as the hosts see them.
    """
    seen = [*dict.fromkeys(address for one in as_seen if (address := _for_links(one)))]
    first = "127.0.0.1" if is_here_only else None
    if seen and any(one.address == seen[0] for one in found):
        first = seen[0]
    more = seen if iface is None else []
    return [*dict.fromkeys([*allowed_addresses(found, iface, first), *more])][: 2 * _ADDRESSES_MAX]


def choose_addresses(
    names: Sequence[str], candidates: Sequence[Sequence[str]], answers: Sequence[Sequence[bool]]
) -> list[str]:
    """Return for the launcher and for each host its first address that all others reach.

    `candidates` are the addresses of the launcher, and those of each host. `answers` say for each
    host whether it reaches each of all these addresses.
    """
    chosen = []
    unreachable = []
    position = 0
    for owner, addresses in enumerate(candidates, -1):
        missing = {
            address: [
                names[other]
                for other, reached in enumerate(answers)
                if other != owner and not reached[index]
            ]
            for index, address in enumerate(addresses, position)
        }
        position += len(addresses)
        chosen.append(next((address for address, blind in missing.items() if not blind), ""))
        if not chosen[-1]:
            name = names[owner] if owner >= 0 else "this machine"
            tried = "; ".join(f"{one} not by {', '.join(blind)}" for one, blind in missing.items())
            unreachable.append(
                f"  {name} is not reached by all others: {tried or 'it has no address'}"
            )
    if unreachable:
        raise HostUnreachable(
            "hosts do not reach each other; nothing was started. Open TCP ports 32768 to 60999 "
            "between them (net.ipv4.ip_local_port_range), or name the network by --iface or "
            "addr=:\n" + "\n".join(unreachable)
        )
    return chosen


def _for_links(address: str) -> str:
    """Return an address of ssh that links can use, too; not one with an interface scope."""
    is_local = "%" in address or (address and ipaddress.ip_address(address).is_link_local)
    return "" if is_local else address


# -- connections on trial --------------------------------------------------------------------------


def _proof(token: bytes, address: str, port: int) -> bytes:
    return hmac.new(token, f"{address} {port}".encode(), hashlib.sha256).digest()


class Listeners:
    """Listens on addresses, and proves to clients that this is the right host.

    The same private address may belong to another machine elsewhere. Only a process with the token
    of the job can answer. At addresses of other hosts it does not listen.
    """

    def __init__(self, addresses: Sequence[str], token: bytes) -> None:
        self.ports: list[int] = []  # the port of each address, or 0 if it cannot listen there
        self._token = token
        self._sockets: dict[int, tuple[socket.socket, str]] = {}
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            one = socket.socket(family, _STREAM)
            try:
                one.bind((address, 0))
                one.listen(256)
            except OSError:
                one.close()
                self.ports.append(0)
                continue
            self.ports.append(one.getsockname()[1])
            self._sockets[one.fileno()] = (one, address)

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return list(self._sockets)

    def readable(self, descriptor: int) -> None:
        """Answer a client; ignore other descriptors."""
        found = self._sockets.get(descriptor)
        if found is None:
            return
        listener, address = found
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.send(_proof(self._token, address, listener.getsockname()[1]))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for listener, _ in self._sockets.values():
            listener.close()
        self._sockets.clear()


def reachable(
    targets: Sequence[tuple[str, int]],
    token: bytes,
    timeout_s: float,
    listeners: Listeners | None = None,
) -> list[bool]:
    """Return for each address and port whether a process with the token answers there.

    Port 0 is not reachable. `listeners` answer meanwhile, because other hosts connect at that time.
    """
    answers = [False] * len(targets)
    waiting: dict[int, tuple[int, socket.socket]] = {}
    poller = select.poll()
    until = time.monotonic() + timeout_s
    own = set(listeners.descriptors()) if listeners is not None else set()
    for descriptor in own:
        poller.register(descriptor, select.POLLIN)
    try:
        for index, (address, port) in enumerate(targets):
            if not port:
                continue
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            one = socket.socket(family, _STREAM)
            waiting[one.fileno()] = (index, one)
            one.connect_ex((address, port))
            poller.register(one, select.POLLIN)
        while waiting and (left := until - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left * 1000):
                if listeners is not None and descriptor in own:
                    listeners.readable(descriptor)
                    continue
                index, one = waiting.pop(descriptor)
                poller.unregister(descriptor)
                with one, contextlib.suppress(OSError):
                    answers[index] = hmac.compare_digest(
                        one.recv(_PROOF_NBYTES), _proof(token, *targets[index])
                    )
    finally:
        for _, one in waiting.values():
            one.close()
    return answers
