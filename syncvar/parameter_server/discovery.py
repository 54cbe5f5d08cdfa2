"""What a process knows of the servers of its job: where they are, and which processes have ended, as the launcher tells it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import HandshakeError, RendezvousError
from syncvar.core.process_ids import SERVER_0
from syncvar.protocol.control_messages import pack_message
from syncvar.transports.zeromq_control import ZeromqControl

if TYPE_CHECKING:
    import zmq

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import LinkKeys

_PAUSE_MS = 1000


class ProcessChange(NamedTuple):
    """Something that has happened to a process.

    Args:
        number: Which one.
        kind: "serves" (a server can be reached), "ended" or "begins" (it was started again).
        reason: Why it has ended; empty where in order.
        incarnation: Of one that was started again.
    """

    number: int
    kind: str
    reason: str = ""
    incarnation: int = 0


class Directory:
    """Asks the launcher where the servers are, and takes in what it says from then on.

    Args:
        context: ZeroMQ context of this process.
        environment: Who this process is.
        config: Deadlines and limits.
        keys: What a tcp endpoint is protected by.

    Attributes:
        addresses: Where each server that serves is reached, by its index.
        hosts: Its host, for messages.
        ended: The processes that have ended, by number, with the reason.
        socket: To wait for.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        environment: RankEnvironment,
        config: RuntimeConfig,
        keys: LinkKeys | None,
    ) -> None:
        self._environment = environment
        self._config = config
        number = environment.rank + (SERVER_0 if environment.role == "server" else 0)
        self._control = ZeromqControl(
            context, environment.rendezvous, number, config, keys, kind=b"S"
        )
        self.socket = self._control.socket
        self.addresses: dict[int, str] = {}
        self.hosts: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self._incarnations: dict[int, int] = {}

    def serve(self, address: str, outside: str) -> None:
        """Say where this server listens, for processes of its own host and for others, and ask for the others."""
        me = self._environment
        message = pack_message(
            "serve",
            server=me.rank,
            job=me.job_id,
            generation=me.generation,
            address=address,
            outside=outside,
            host=me.host,
            host_index=me.host_index,
            pid=os.getpid(),
        )
        self._control.send(message)

    def say_copied(self, server: int) -> None:
        """Say that this server has a copy of another one's variables now."""
        me = self._environment
        self._control.send(
            pack_message(
                "holds", server=me.rank, job=me.job_id, generation=me.generation, of=server
            )
        )

    def find(self) -> None:
        """Ask for the servers."""
        me = self._environment
        self._control.send(
            pack_message(
                "find_servers", job=me.job_id, generation=me.generation, host_index=me.host_index
            )
        )

    def changes(self) -> list[ProcessChange]:
        """Return what has changed since the last call.

        Raises:
            RendezvousError: The launcher refuses this process.
        """
        found: list[ProcessChange] = []
        while (message := self._control.receive()) is not None:
            if message["kind"] == "refused":
                raise RendezvousError(
                    f"{self._environment.role} {self._environment.rank} is refused: {message['reason']}"
                )
            if message["kind"] != "servers":
                raise HandshakeError(
                    f"the launcher answered with {message['kind']!r} where servers were asked for"
                )
            again = [
                number
                for number, count in message["incarnations"].items()
                if count != self._incarnations.get(number, 0)
            ]
            found += [
                ProcessChange(number, "begins", incarnation=message["incarnations"][number])
                for number in again
            ]
            for number in again:
                self.ended.pop(number, None)
            found += [
                ProcessChange(SERVER_0 + server, "serves")
                for server in message["addresses"]
                if server not in self.addresses
            ]
            found += [
                ProcessChange(number, "ended", reason)
                for number, reason in message["ended"].items()
                if number not in self.ended
            ]
            self.addresses, self.hosts, self.ended = (
                message["addresses"],
                message["hosts"],
                message["ended"],
            )
            self._incarnations = message["incarnations"]
        return found

    def await_all(self) -> list[ProcessChange]:
        """Wait until every server serves or has ended; return all that has changed meanwhile.

        Raises:
            RendezvousError: Some have not begun in time; they are named.
        """
        until = time.monotonic() + self._config.rendezvous_timeout_s
        found: list[ProcessChange] = []
        while True:
            found += self.changes()
            missing = [
                server
                for server in range(self._environment.servers)
                if server not in self.addresses and SERVER_0 + server not in self.ended
            ]
            if not missing:
                return found
            left_s = until - time.monotonic()
            if left_s <= 0:
                names = ", ".join(map(str, missing))
                raise RendezvousError(
                    f"server{'s' * (len(missing) > 1)} {names} did not begin within {self._config.rendezvous_timeout_s:g} s"
                )
            self.socket.poll(min(_PAUSE_MS, int(left_s * 1000) + 1))

    def close(self) -> None:
        """Close the channel."""
        self._control.close(self._config.shutdown_timeout_s)
