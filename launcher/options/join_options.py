"""What is said on the command line of a job that hosts join, and of a host that joins one: checked, and made one of each."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_join", "check_listen", "place_of"]

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PORT_MAX = 65535
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
_HOSTS_MAX = 1 << 16


def place_of(text: str) -> tuple[str, int]:
    """Return host and port of ADDR, ADDR:PORT or [IPv6]:PORT; the port is 0 where there is none.

    Raises:
        ConfigError: It is something else.

    Example:
        >>> place_of("10.0.0.1:29400"), place_of("node1"), place_of("[fd00::7]:80"), place_of("fd00::7")
        (('10.0.0.1', 29400), ('node1', 0), ('fd00::7', 80), ('fd00::7', 0))
    """
    host, port = text, ""
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
        is_right = bool(closing) and ":" in host and (not rest or rest.startswith(":"))
    else:
        is_right = True
        if text.count(":") == 1:
            host, _, port = text.partition(":")
    if not _is_address(host):
        is_right = is_right and ":" not in host and _NAME.fullmatch(host) is not None
    if port and not (
        port.isascii() and port.isdigit() and len(port) < 6 and 1 <= int(port) <= _PORT_MAX
    ):
        is_right = False
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


def check_join(values: Mapping[str, Any], origin: Mapping[str, str], rest: list[str]) -> None:
    """Check what is said beside `--join`.

    Raises:
        ConfigError: It belongs to the launcher.
    """
    if not place_of(values["join"])[1]:
        raise ConfigError(
            f"--join {values['join']}: the port is missing; syncvar-launch --listen says which"
        )
    if rest:
        raise ConfigError(
            f"--join takes what is run from syncvar-launch --listen: leave {rest[0]} out"
        )
    for key, source in origin.items():
        if source == "command line" and key not in _WITH_JOIN and not key.startswith("env."):
            raise ConfigError(
                f"--{key.replace('_', '-')} is for syncvar-launch --listen; a host that joins is told all by it"
            )


def check_listen(values: Mapping[str, Any], origin: Mapping[str, str]) -> int | None:
    """Check what is said beside `--listen`; return how many hosts are to join, None where the workers say it.

    Raises:
        ConfigError: It contradicts, or it is not said how many hosts are to be waited for.
    """
    for key in _WITHOUT_LISTEN:
        if origin[key] == "command line":
            raise ConfigError(
                f"--{key.replace('_', '-')} is for hosts that are logged in to, and with --listen they come by themselves; leave one out"
            )
    if values["slots"] is not None:
        raise ConfigError(
            "--slots is said by each host that joins; here --workers says how many there are"
        )
    host, _ = place_of(values["listen"])
    if _is_address(host) and ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(
            f"--listen {values['listen']} would listen on all networks of this machine: name one of its addresses"
        )
    text = values["hosts"]
    if text is None:
        if origin["workers"] == "default":
            raise ConfigError(
                "--listen does not know how many hosts to wait for: give --hosts N, or --workers N for as many as have the slots"
            )
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _HOSTS_MAX):
        raise ConfigError(f"--hosts {text}: with --listen it is how many hosts join, such as 2")
    return int(text)
