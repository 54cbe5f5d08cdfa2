"""Options of a job that hosts join (`--listen`), and of a host that joins one (`--join`)."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PORT_MAX = 65535
_HOSTS_MAX = 1 << 16
_WITH_JOIN = frozenset(
    (
        "join",
        "key_file",
        "slots",
        "cwd",
        "config",
        "verbose",
        "start_timeout",
        "rendezvous_timeout_s",
        "color",
    )
)
_WITHOUT_LISTEN = ("hostfile", "include", "exclude", "ssh_always", "ssh_port", "remote_python")


class JoinOptions(NamedTuple):
    """How hosts join a job by themselves.

    Args:
        listen: The address at which hosts join, perhaps with a port; None without `--listen`.
        address: The launcher that this host joins, with the port; None to launch a job.
        key_file: The absolute path of the key that both sides need.
        slots: The slots that this host offers when it joins; None for one per usable core.
        host_count: The number of hosts that `--listen` waits for; None for as many hosts as
            offer slots for all workers.
    """

    listen: str | None
    address: str | None
    key_file: Path
    slots: int | None
    host_count: int | None = None

    def validate(self, origin: Mapping[str, str], words: list[str]) -> None:
        """Check the other options beside `--join` or `--listen`.

        Args:
            origin: Where each option comes from.
            words: The program and its arguments.
        """
        if self.address is not None:
            self._validate_join(self.address, origin, words)
        elif self.listen is not None:
            self._validate_listen(self.listen, origin)

    def _validate_join(self, address: str, origin: Mapping[str, str], words: list[str]) -> None:
        if not parse_address(address)[1]:
            raise ConfigError(
                f"--join {address}: the port is missing; syncvar-launch --listen prints it"
            )
        if words:
            raise ConfigError(
                f"--join runs the program that syncvar-launch --listen names: leave {words[0]} out"
            )
        for key, source in origin.items():
            if source == "command line" and key not in _WITH_JOIN and not key.startswith("env."):
                raise ConfigError(
                    f"--{key.replace('_', '-')} is for syncvar-launch --listen, which sends "
                    "its options to the hosts that join: leave it out here"
                )

    def _validate_listen(self, listen: str, origin: Mapping[str, str]) -> None:
        for key in _WITHOUT_LISTEN:
            if origin[key] == "command line":
                raise ConfigError(
                    f"--{key.replace('_', '-')} is for hosts that the launcher logs in to, and "
                    "with --listen they come by themselves; leave one out"
                )
        if self.slots is not None:
            raise ConfigError(
                "--slots is an option of each host that joins; here --workers gives the number "
                "of workers"
            )
        host, _ = parse_address(listen)
        if _is_address(host) and ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(
                f"--listen {listen} would listen on all networks of this machine: "
                "name one of its addresses"
            )
        if self.host_count is None and origin["workers"] == "default":
            raise ConfigError(
                "--listen does not know how many hosts to wait for: give --hosts N, or "
                "--workers N for as many as have the slots"
            )


def host_count_of(text: str | None) -> int | None:
    """Return the number of hosts in `--hosts N` beside `--listen`."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _HOSTS_MAX):
        raise ConfigError(f"--hosts {text}: with --listen it is how many hosts join, such as 2")
    return int(text)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ADDR, ADDR:PORT or [IPv6]:PORT; the port is 0 without one.

    Example:
        >>> parse_address("10.0.0.1:29400"), parse_address("node1"), parse_address("[fd00::7]:80")
        (('10.0.0.1', 29400), ('node1', 0), ('fd00::7', 80))
    """
    host, port = text, ""
    is_right = True
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
        is_right = bool(closing) and ":" in host and (not rest or rest.startswith(":"))
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not _is_address(host):
        is_right = is_right and ":" not in host and _NAME.fullmatch(host) is not None
    if port:
        is_number = port.isascii() and port.isdigit() and len(port) < 6
        is_right = is_right and is_number and 1 <= int(port) <= _PORT_MAX
    if not is_right or text.endswith(":"):
        raise ConfigError(
            f"must be an address such as 10.0.0.1, 10.0.0.1:29400 or [fd00::7]:29400, not {text!r}"
        )
    return host, int(port or 0)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
