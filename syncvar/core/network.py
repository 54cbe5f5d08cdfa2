"""Addresses of hosts: their text forms, and how to find them without sending anything."""

from __future__ import annotations

import contextlib
import socket
import time

from syncvar.core.errors import RendezvousError

_PAUSE_S = 0.02
_ANY_PORT = 9
_NOT_YET = (socket.EAI_NONAME, socket.EAI_AGAIN)
_ANYWHERE = "192.0.2.1"  # an address of no host (RFC 5737); its route is the default route


def bracket_ipv6(address: str) -> str:
    """Return an address as it is written before a port."""
    return f"[{address}]" if ":" in address else address


def tcp_endpoint(address: str, port: int | str | None = None) -> str:
    """Return an address in ZeroMQ's form."""
    host = f"tcp://{bracket_ipv6(address)}"
    return host if port is None else f"{host}:{port}"


def resolve_host(address: str, timeout_s: float) -> str:
    """Return the address of a host name, IPv4 if there is one, so that all hosts get the same.

    It waits up to `timeout_s` seconds: the name of a Kubernetes pod resolves once the pod runs.

    Raises:
        RendezvousError: The name does not resolve.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)
            return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
        except OSError as error:
            if time.monotonic() > until or "." not in address or error.errno not in _NOT_YET:
                raise RendezvousError(
                    f"the address of rank 0, {address!r}, cannot be found: {error}"
                ) from error
        time.sleep(_PAUSE_S)


def address_towards(address: str, port: int = 0) -> str:
    """Return the address of this host from which it reaches another; raise OSError without a route.

    `address` is a host name or address, and `port` 0 stands for any port.
    """
    found = socket.getaddrinfo(address, port or _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_towards_any(names: list[str]) -> str:
    """Return the address from which this host reaches the first of `names` that can be found.

    If none can, it returns the address of the default route.

    Raises:
        RendezvousError: This host has no route.
    """
    for name in (*names, socket.gethostname(), _ANYWHERE):
        with contextlib.suppress(OSError):
            address = address_towards(name)
            if name in names or not address.startswith("127."):
                return address
    raise RendezvousError(
        f"rank 0 has no address by which {', '.join(names)} could reach it; set MASTER_ADDR and "
        f"MASTER_PORT, and SYNCVAR_KEY_FILE"
    )
