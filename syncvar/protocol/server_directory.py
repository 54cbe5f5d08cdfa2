"""Where the servers of a job are, and which of its processes have ended: a pure machine, told to all who ask.

A server says where it listens. Workers and other servers ask once, and are told at once and again whenever something
changes. What they are told is whole, with a version that grows, so that nothing is missed and the last word counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.process_ids import SERVER_0, SERVING, process_name
from syncvar.protocol.control_messages import pack_message

if TYPE_CHECKING:
    from syncvar.protocol.control_messages import Message


class _ServerAddress(NamedTuple):
    """Where a server listens: for processes of its own host, and for others."""

    address: str
    outside: str
    host: str
    host_index: int
    pid: int


class ServerTable:
    """What is known of the servers.

    Args:
        job_id: The job's random identity.
        generation: The first of the membership in this start of the job.
    """

    def __init__(self, job_id: str, generation: int) -> None:
        self.version = 0
        self._job_id = job_id
        self._generation = generation
        self._places: dict[int, _ServerAddress] = {}  # by the number of a server's process
        self._ended: dict[int, str] = {}  # processes that have ended, and why; empty where in order
        self._incarnations: dict[int, int] = {}
        self._copies: list[tuple[int, int]] = []

    def refusal(self, message: Message) -> str:
        """Return why a process has no say here; empty where it has."""
        if message["job"] != self._job_id:
            return "this is another job"
        if message["generation"] != self._generation:
            return f"the processes of generation {message['generation']} have been replaced by those of {self._generation}"
        return ""

    def serves(self, message: Message) -> str:
        """Take in where a server listens.

        Returns:
            An empty text, or the reason why it is refused.
        """
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

    def holds(self, message: Message) -> None:
        """Take in that a server has a copy of what another one has, or had."""
        if not self.refusal(message):
            self._copies.append((message["server"], message["of"]))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return who has told since the last call that it has a copy, and of which server's variables."""
        made, self._copies = self._copies, []
        return made

    def ended(self, number: int, reason: str) -> None:
        """Note that a process has ended, or is given up; the first reason stays."""
        if number not in self._ended:
            self._ended[number] = reason
            self.version += 1

    def position(self, number: int) -> str:
        """Return in words what is known of a server."""
        if number in self._ended:
            return f"ended: {self._ended[number]}" if self._ended[number] else "finished"
        return SERVING if number in self._places else "not serving yet"

    def begins_again(self, number: int, incarnation: int) -> None:
        """Note that a process was started in place of one that has ended."""
        self._ended.pop(number, None)
        self._incarnations[number] = incarnation
        self.version += 1

    def told(self, host_index: int) -> bytes:
        """Return what a process of a host is told."""
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
