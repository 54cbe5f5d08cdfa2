"""What the processes of a job with servers share with the launcher: servers and push counts.

The launcher reports the servers and the processes that have ended (`Directory`). A worker counts
its pushes in a file (`PushCounter`), so that a restart of all ranks can report lost pushes. The
file is mapped memory: counting costs no system call, and survives the death of the process.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import HandshakeError, RendezvousError
from syncvar.core.process_ids import SERVER_0, failover_order, server_hosts
from syncvar.protocol.control_messages import pack_message
from syncvar.transports.zeromq_links import ZeromqControl

if TYPE_CHECKING:
    import zmq

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import LinkKeys

_PAUSE_MS = 1000
_NAME = "pushes-{}"
_CONTENT = struct.Struct("<QQ")  # attempt + 1, so that 0 marks a new file; number of pushes


class ProcessChange(NamedTuple):
    """A change of a process."""

    number: int  # process number
    kind: str  # "serves" (a server is reachable), "ended", or "begins" (it was restarted)
    reason: str = ""  # reason of the end; empty for a normal exit
    incarnation: int = 0  # number of the restart


def heirs_of(environment: RankEnvironment) -> list[tuple[int, ...]]:
    """Return for each server the servers that take its place, in order."""
    hosts = server_hosts(environment.servers, environment.host_count)
    replicas = environment.server_replicas
    return [failover_order(server, hosts, replicas) for server in range(environment.servers)]


class Directory:
    """Asks the launcher for the servers, and collects its reports."""

    def __init__(
        self,
        context: zmq.Context[Any],
        environment: RankEnvironment,
        config: RuntimeConfig,
        keys: LinkKeys | None,
    ) -> None:
        self._environment, self._config = environment, config
        number = environment.rank + (SERVER_0 if environment.role == "server" else 0)
        address = environment.rendezvous
        self._control = ZeromqControl(context, address, number, config, keys, kind=b"S")
        self.socket = self._control.socket  # socket of the reports, for a poller
        self.addresses: dict[int, str] = {}  # server -> address
        self.hosts: dict[int, str] = {}  # server -> host name, for messages
        self.ended: dict[int, str] = {}  # process number -> reason of its end
        self._incarnations: dict[int, int] = {}

    def serve(self, address: str, outside: str) -> None:
        """Report this server's addresses, for its own host and for others; ask for the others."""
        me = self._environment
        own = {"server": me.rank, "host": me.host, "host_index": me.host_index}
        self._send("serve", address=address, outside=outside, pid=os.getpid(), **own)

    def report_backup(self, server: int) -> None:
        """Report that this server holds the backup of another server."""
        self._send("holds", server=self._environment.rank, of=server)

    def find(self) -> None:
        """Ask for the servers."""
        self._send("find_servers", host_index=self._environment.host_index)

    def _send(self, kind: str, **fields: Any) -> None:
        me = self._environment
        self._control.send(pack_message(kind, job=me.job_id, generation=me.generation, **fields))

    def changes(self) -> list[ProcessChange]:
        """Return the changes since the last call; RendezvousError if the launcher refuses us."""
        found: list[ProcessChange] = []
        while (message := self._control.receive()) is not None:
            if message["kind"] == "refused":
                me = self._environment
                raise RendezvousError(f"{me.role} {me.rank} is refused: {message['reason']}")
            if message["kind"] != "servers":
                raise HandshakeError(
                    f"the launcher answered a question for servers with {message['kind']!r}"
                )
            found += self._apply(message)
        return found

    def _apply(self, message: dict[str, Any]) -> list[ProcessChange]:
        found: list[ProcessChange] = []
        for number, count in message["incarnations"].items():
            if count != self._incarnations.get(number, 0):
                found.append(ProcessChange(number, "begins", incarnation=count))
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
        self.addresses, self.hosts = message["addresses"], message["hosts"]
        self.ended, self._incarnations = message["ended"], message["incarnations"]
        return found

    def await_all(self) -> list[ProcessChange]:
        """Wait until every server serves or has ended, and return all changes."""
        until = time.monotonic() + self._config.rendezvous_timeout_s
        found: list[ProcessChange] = []
        while True:
            found += self.changes()
            servers = range(self._environment.servers)
            missing = [
                server
                for server in servers
                if server not in self.addresses and SERVER_0 + server not in self.ended
            ]
            if not missing:
                return found
            left_s = until - time.monotonic()
            if left_s <= 0:
                names = ", ".join(map(str, missing))
                raise RendezvousError(
                    f"server{'s' * (len(missing) > 1)} {names} did not begin within "
                    f"{self._config.rendezvous_timeout_s:g} s"
                )
            self.socket.poll(min(_PAUSE_MS, int(left_s * 1000) + 1))

    def close(self) -> None:
        """Close the channel."""
        self._control.close(self._config.shutdown_timeout_s)


def tally_path(folder: str, rank: int) -> str:
    """Return the path of a worker's file."""
    return str(Path(folder) / _NAME.format(rank))


def take_tallies(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder that the launcher is about to remove, by name."""
    return {path.name: path.read_bytes() for path in folder.glob(_NAME.format("*"))}


def put_tallies(tallies: dict[str, bytes], folder: Path) -> None:
    """Write the files to the new folder."""
    for name, content in tallies.items():
        (folder / name).write_bytes(content)


class PushCounter:
    """The file of one worker; `before` is the count of an earlier attempt, or 0."""

    def __init__(self, path: str, generation: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _CONTENT.size)
            self._memory = mmap.mmap(descriptor, _CONTENT.size)
        finally:
            os.close(descriptor)
        self._generation = generation + 1
        attempt, pushes = _CONTENT.unpack_from(self._memory)
        self.before = pushes if 0 < attempt <= generation else 0

    def count(self, pushes: int) -> None:
        """Store a count."""
        _CONTENT.pack_into(self._memory, 0, self._generation, pushes)

    def close(self) -> None:
        """Unmap the memory; the file stays."""
        self._memory.close()
