"""Replication of one state to its backup.

The primary sends nothing before the backup has executed the entries that the message depends on. A
new backup, after a failure, first gets the whole state (`seed`) and then every entry; messages wait
for the seed too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.parameter_server.messages import OutgoingMessage
from syncvar.parameter_server.server.replicated_state import ReplicatedState
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from syncvar.parameter_server.messages import Arrays, Message
    from syncvar.parameter_server.server.shard import Room

PATIENCE = 16  # factor up to which the interval between repeated messages doubles


class ReplicationStream:
    """The entries of one state on their way to the backup, and the messages that wait for it."""

    def __init__(self, server: int, entries: int, backup: int | None, resend_s: float) -> None:
        self.backup = backup
        self._server = server
        self._resend_s = self._patience_s = resend_s
        self._seed: OutgoingMessage | None = None
        self._log: deque[tuple[int, OutgoingMessage]] = deque()  # entries without confirmation
        self._logged = self._copied = entries
        self._sent_at = 0.0
        self._waiting: deque[tuple[int, OutgoingMessage]] = deque()
        self._out: list[OutgoingMessage] = []

    def enter(self, entry: Message, arrays: Arrays, now: float) -> None:
        """Send an entry, which has just been executed, to the backup."""
        self._logged += 1
        if self.backup is None:
            self._copied = self._logged
            return
        copy = {"kind": "copy", "server": self._server, "index": self._logged, "entry": entry}
        outgoing = OutgoingMessage(("server", self.backup), copy, arrays)
        if not self._log and self._seed is None:
            self._sent_at = now
        self._log.append((self._logged, outgoing))
        self._out.append(outgoing)

    def move_to(self, backup: int | None, ledger: ReplicatedState, now: float) -> None:
        """Replace the backup, which has failed, by another server or none."""
        self.backup = backup
        self._log.clear()
        if backup is None:
            self._seed, self._copied = None, self._logged
            return
        seed = {"kind": "seed", "server": self._server, "index": self._logged}
        self._seed = OutgoingMessage(("server", backup), seed, seed_of(ledger))
        self._sent_at, self._patience_s = now, 4 * self._resend_s  # it may be large
        self._out.append(self._seed)

    def copied(self, index: int) -> None:
        """Note that the backup has executed all entries up to `index`."""
        self._copied, self._seed = max(self._copied, index), None
        self._patience_s = self._resend_s

    def enqueue(self, outgoing: OutgoingMessage) -> None:
        """Queue a message until the backup has the entries that it depends on."""
        self._waiting.append((self._logged, outgoing))

    def retire(self) -> None:
        """Drop all messages: another server is in charge."""
        self._waiting.clear()

    def wake_at(self) -> float:
        """Return the time at which `wake` is due; infinite for never."""
        is_open = self._log or self._seed is not None
        return self._sent_at + self._patience_s if is_open else float("inf")

    def wake(self, now: float) -> None:
        """Repeat what the backup has not confirmed."""
        if self.wake_at() > now:
            return
        self._sent_at = now
        self._patience_s = min(2 * self._patience_s, PATIENCE * self._resend_s)
        seeds = [] if self._seed is None else [self._seed]
        self._out += [*seeds, *(copy for _, copy in self._log)]

    def ready(self) -> list[OutgoingMessage]:
        """Return the messages that may be sent now, those to the backup first."""
        while self._log and self._log[0][0] <= self._copied:
            self._log.popleft()
        outgoing, self._out = self._out, []
        while self._waiting and self._waiting[0][0] <= self._copied:
            outgoing.append(self._waiting.popleft()[1])
        return outgoing


def seed_of(ledger: ReplicatedState) -> Arrays:
    """Return a state as arrays that do not change: one of plain data, then those it numbers."""
    arrays: list[Any] = []
    state = pack_object(_numbered(ledger.state(), arrays))
    return (np.frombuffer(state, np.uint8), *arrays)


def state_of_seed(server: int, workers: int, seed: Arrays, room: Room) -> ReplicatedState:
    """Return the state in a seed."""
    state = unpack_object(seed[0].tobytes())
    return ReplicatedState.of_state(server, workers, _resolved(state, seed[1:]), room)


def _numbered(value: Any, arrays: list[Any]) -> Any:
    """Return plain data in which {None: number} stands for an array, appended to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {None: len(arrays) - 1}
    if isinstance(value, dict):
        return {key: _numbered(one, arrays) for key, one in value.items()}
    if isinstance(value, tuple | list):
        parts = [_numbered(one, arrays) for one in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _resolved(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, dict):
        if None in value:
            return arrays[value[None]]
        return {key: _resolved(one, arrays) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_resolved(one, arrays) for one in value)
    return value
