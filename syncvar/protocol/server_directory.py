"""The launcher's table of servers: where they listen, and which processes have ended.

Workers and servers ask for it once; the launcher answers, and again after each change. Every
answer holds the whole table and a growing version, so a receiver keeps the newest and misses none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.process_ids import SERVER_0, SERVING, process_name
from syncvar.protocol.control_messages import pack_message

if TYPE_CHECKING:
    from syncvar.protocol.control_messages import Message


class _ServerAddress(NamedTuple):
    """Addresses of a server: for processes of its own host, and for other hosts."""

    address: str
    outside: str
    host: str
    host_index: int
    pid: int


class ServerTable:
    """State of the servers of one attempt, which begins with this version of the membership."""

    def __init__(self, job_id: str, generation: int) -> None:
        self.version = 0
        self._job_id = job_id
        self._generation = generation
        self._places: dict[int, _ServerAddress] = {}  # by process number of the server
        self._ended: dict[int, str] = {}  # reason by process number; empty after a normal end
        self._incarnations: dict[int, int] = {}
        self._copies: list[tuple[int, int]] = []

    def refusal(self, message: Message) -> str:
        """Return why a message is refused (wrong job or generation); empty if it is accepted."""
        if message["job"] != self._job_id:
            return "this is another job"
        generation = message["generation"]
        if generation != self._generation:
            now = self._generation
            return f"the processes of generation {generation} have been replaced by those of {now}"
        return ""

    def add_server(self, message: Message) -> str:
        """Record where a server listens; return the reason if it is refused, else ""."""
        number = SERVER_0 + message["server"]
        if number in self._ended:
            return f"{process_name(number)} was given up: {self._ended[number]}"
        present = self._places.get(number)
        if present is not None:
            return f"{process_name(number)} is already process {present.pid} on {present.host}"
        self._places[number] = _ServerAddress(
            message["address"],
            message["outside"],
            message["host"],
            message["host_index"],
            message["pid"],
        )
        self.version += 1
        return ""

    def add_replica(self, message: Message) -> None:
        """Record that a server holds a replica of another server's state."""
        if not self.refusal(message):
            self._copies.append((message["server"], message["of"]))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the new replicas since the last call as (holder, server whose state it holds)."""
        copies, self._copies = self._copies, []
        return copies

    def ended(self, number: int, reason: str) -> None:
        """Record that a process has ended or is given up; the first reason stays."""
        if number not in self._ended:
            self._ended[number] = reason
            self.version += 1

    def position(self, number: int) -> str:
        """Return the state of a server as text."""
        if number in self._ended:
            return f"ended: {self._ended[number]}" if self._ended[number] else "finished"
        return SERVING if number in self._places else "not serving yet"

    def restarted(self, number: int, incarnation: int) -> None:
        """Record that a new process replaces one that has ended."""
        self._ended.pop(number, None)
        self._incarnations[number] = incarnation
        self.version += 1

    def message_for(self, host_index: int) -> bytes:
        """Return the table as a message for the processes of a host."""
        return pack_message(
            "servers",
            version=self.version,
            addresses={
                number - SERVER_0: one.address if one.host_index == host_index else one.outside
                for number, one in self._places.items()
                if number not in self._ended
            },
            hosts={number - SERVER_0: one.host for number, one in self._places.items()},
            ended=self._ended,
            incarnations=self._incarnations,
        )
