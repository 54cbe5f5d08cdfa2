"""The handshake of a rank.

It announces itself and its versions, and receives the members and their addresses.

The launcher, or rank 0's process, decides; see `protocol/membership.py`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from syncvar.core.errors import HandshakeError, PeerLost, RendezvousError, TransportError
from syncvar.protocol.control_messages import Message, pack_message
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar.protocol.membership import SETTING

if TYPE_CHECKING:
    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.base import Control, Transport

_log = logging.getLogger("syncvar")
_SCRIPT_NBYTES_MAX = 4 << 20
# A rank that joins again may still receive news of its last generation.
_OF_THE_LAST = ("leave_notice", "decision")


def join_handshake(
    environment: RankEnvironment,
    config: RuntimeConfig,
    transport: Transport,
    control: Control,
    generation: int,
    without_shm: str,
) -> Message:
    """Join the handshake; open the transport when all ranks have come.

    Returns:
        The answer: host and place of each rank, reasons of ranks without shared memory, and more.
    """
    control.send(
        pack_message(
            "join",
            rank=environment.rank,
            job=environment.job_id,
            generation=generation,
            address=transport.address,
            pid=os.getpid(),
            host=environment.host,
            about={
                **compatibility_fields(config),
                "shm": without_shm,
                "host_index": environment.host_index,
                "outside": transport.outside,
            },
        )
    )
    # The launcher decides when the handshake has failed; this limit only guards against a stuck
    # launcher.
    limit_s = config.rendezvous_timeout_s + 10.0
    began, has_warned = time.monotonic(), False
    deadline = began + limit_s
    while True:
        message: Message | None = control.receive()
        if message is None:
            now = time.monotonic()
            if now > deadline:
                raise RendezvousError(_no_answer(environment, control, limit_s))
            if now - began >= config.missing_report_s and not has_warned:
                has_warned = True
                _warn_of_wait(environment, control, now - began)
            transport.wait(min(1.0, deadline - time.monotonic()))
        elif message["kind"] == "members":
            transport.open(message["addresses"], message["generation"])
            return message
        elif message["kind"] == "refused":
            if message["error"] == "HandshakeError":
                raise HandshakeError(message["reason"])
            raise RendezvousError(
                f"rank {environment.rank} could not join: {message['reason']}", message["missing"]
            )
        elif message["kind"] == "abort":
            raise PeerLost(
                message["rank"],
                message["host"],
                message["reason"],
                "while the ranks met",
                status=next(iter(message["status"]), None),
            )
        elif message["kind"] not in _OF_THE_LAST:
            raise TransportError(f"unexpected message {message['kind']!r} while the ranks met")


def _warn_of_wait(environment: RankEnvironment, control: Control, waited_s: float) -> None:
    """Log that this rank waits, unless another process on this host names the missing ranks."""
    if control.keeper not in (None, environment.rank) and environment.local_rank == 0:
        _log.warning(
            "rank %d has waited %.0f s for the others at %s, where rank %d runs the rendezvous",
            environment.rank,
            waited_s,
            environment.rendezvous,
            control.keeper,
        )


def _no_answer(environment: RankEnvironment, control: Control, limit_s: float) -> str:
    """Return the error text for a handshake without answer."""
    rank, address = environment.rank, environment.rendezvous
    if control.keeper is None:
        return f"syncvar-launch did not answer rank {rank} at {address} within {limit_s:g} s"
    hosts = f"{environment.host_count} host{'s' * (environment.host_count != 1)}"
    return (
        f"rank {control.keeper} did not answer rank {rank} at {address} within {limit_s:g} s: no "
        "syncvar-launch started these ranks, so they meet in the process of rank "
        f"{control.keeper}. Check that it runs, that this host reaches the address, and that all "
        f"ranks have the same variables: rank {rank} reads from its own that "
        f"{environment.world_size} ranks run on {hosts}, {environment.local_world_size} of them "
        "on this one"
    )


def compatibility_fields(config: RuntimeConfig) -> dict[str, int | str]:
    """Return versions, script and settings that must be equal on all ranks.

    Cost: reading the script, some 50 us.
    """
    return {
        "protocol": PROTOCOL_VERSION,
        "byte_order": sys.byteorder,
        "syncvar": sys.modules[
            "syncvar"
        ].__version__,  # importing the package here would be circular
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": ".".join(np.__version__.split(".")[:2]),
        "script": _script(),
        **{SETTING + name: value for name, value in config.shared().items()},
    }


def _script() -> str:
    """Return name and digest of the file that runs as `__main__`; empty if there is none."""
    import hashlib  # imported late: it slows down importing the package

    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):  # a pipe has been read already
        return ""
    try:
        with open(path, "rb") as file:
            data = file.read(_SCRIPT_NBYTES_MAX)
    except OSError:
        return ""
    return f"{os.path.basename(path)[:100]} {hashlib.blake2b(data, digest_size=4).hexdigest()}"
