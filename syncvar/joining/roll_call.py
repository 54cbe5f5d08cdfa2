"""The roll call: a rank tells that it has come, and hears who the others are and where.

Whoever keeps the roll, the launcher or rank 0's process, decides it; see `wire/membership.py`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from syncvar.errors import HandshakeError, PeerLost, RendezvousError, TransportError
from syncvar.joining.likeness import likeness
from syncvar.wire import Message, pack_message

if TYPE_CHECKING:
    from syncvar.config import RuntimeConfig
    from syncvar.env import RankEnvironment
    from syncvar.transports import Control, Transport

__all__ = ["answer_roll_call"]

_OF_THE_LAST = ("left", "verdict")  # who joins anew is told still of ranks that leave the generation that it has left


def answer_roll_call(
    environment: RankEnvironment,
    config: RuntimeConfig,
    transport: Transport,
    control: Control,
    generation: int,
    without_arena: str,
) -> Message:
    """Join the roll call; open the transport when all have come.

    Returns:
        The roll: among others, host and place of each rank, and why those ranks that have no arena have none.
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
                **likeness(config),
                "arena": without_arena,
                "host_index": environment.host_index,
                "outside": transport.outside,
            },
        )
    )
    # The launcher decides when the roll call has failed; this limit only guards against a launcher that is stuck.
    deadline = time.monotonic() + config.rendezvous_timeout_s + 10.0
    while True:
        message: Message | None = control.receive()
        if message is None:
            if time.monotonic() > deadline:
                raise RendezvousError(f"the launcher did not answer rank {environment.rank} in time")
            transport.wait(min(1.0, deadline - time.monotonic()))
        elif message["kind"] == "roll":
            transport.open(message["addresses"], message["generation"])
            return message
        elif message["kind"] == "refused":
            if message["error"] == "HandshakeError":
                raise HandshakeError(message["reason"])
            raise RendezvousError(f"rank {environment.rank} could not join: {message['reason']}", message["missing"])
        elif message["kind"] == "abort":
            raise PeerLost(message["rank"], message["host"], message["reason"], "while the ranks met")
        elif message["kind"] not in _OF_THE_LAST:
            raise TransportError(f"unexpected message {message['kind']!r} while the ranks met")
