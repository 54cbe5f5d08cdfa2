"""Addresses by which hosts reach each other: how they are written, and found without sending anything."""

from __future__ import annotations

import contextlib
import socket
import time

from syncvar.core.errors import RendezvousError

_PAUSE_S = 0.02
_ANY_PORT = 9
_NOT_YET = (socket.EAI_NONAME, socket.EAI_AGAIN)
_ANYWHERE = "192.0.2.1"  # nobody's: the way there is that to anywhere


def bracketed(address: str) -> str:
    """Return an address as it stands before a port.

    Example:
        >>> bracketed("10.0.0.7"), bracketed("fd00::7")
        ('10.0.0.7', '[fd00::7]')
    """
    return f"[{address}]" if ":" in address else address


def tcp_endpoint(address: str, port: int | str | None = None) -> str:
    """Return an address as ZeroMQ takes it.

    Example:
        >>> tcp_endpoint("10.0.0.7"), tcp_endpoint("fd00::7", "*")
        ('tcp://10.0.0.7', 'tcp://[fd00::7]:*')
    """
    place = f"tcp://{bracketed(address)}"
    return place if port is None else f"{place}:{port}"


def resolved(address: str, timeout_s: float) -> str:
    """Return the address that a name stands for, the same on all hosts: of IPv4 where there is one.

    The name of a pod is known only when the pod has begun.

    Args:
        address: A name, or an address.
        timeout_s: Longest wait for the name to be known, in seconds.

    Raises:
        RendezvousError: It cannot be found.
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
    """Return the address of this host by which it reaches another one.

    Args:
        address: Of the other, or its name.
        port: There; 0 for any.

    Raises:
        OSError: There is no way.
    """
    found = socket.getaddrinfo(address, port or _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def address_towards_any(names: list[str]) -> str:
    """Return the address by which this host reaches the first other one that can be found, or anything at all.

    Args:
        names: Of the other hosts.

    Raises:
        RendezvousError: This host has no way out.
    """
    for name in (*names, socket.gethostname(), _ANYWHERE):
        with contextlib.suppress(OSError):
            address = address_towards(name)
            if name in names or not address.startswith("127."):
                return address
    raise RendezvousError(
        f"rank 0 has no address by which {', '.join(names)} could reach it; set MASTER_ADDR and MASTER_PORT, and SYNCVAR_KEY_FILE"
    )
