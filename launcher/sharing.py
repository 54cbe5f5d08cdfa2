"""How the ranks of this host exchange data, and why: through memory that they share, else through unix sockets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.arena.creating import CreatedArena, create, why_not_here
from syncvar.arena.handing import Handing
from syncvar.arena.layout import Layout, bytes_in_words

if TYPE_CHECKING:
    from pathlib import Path

    from syncvar_launcher.options import LaunchOptions

__all__ = ["Sharing", "why_no_arena"]


def why_no_arena(options: LaunchOptions, machine: str) -> str:
    """Return why a job uses no shared memory, or an empty text where it is to have some.

    Args:
        options: What was asked for.
        machine: The kind of processor, as `os.uname` names it.

    Raises:
        ConfigError: `arena_bytes` is too small for so many ranks.
    """
    if options.runtime.transport == "zmq":
        said = {"environment": "SYNCVAR_TRANSPORT=zmq", "file": 'transport = "zmq" in the file'}
        return f"{said.get(options.origin['transport'], 'the default')} asks for it"
    if options.workers == 1:
        return "a single rank sends nothing"
    reason = why_not_here(machine)
    if not reason:
        Layout(options.runtime.arena_bytes, options.workers)
    return f"unix sockets; no arena because {reason}" if reason else ""


class Sharing:
    """The memory that the ranks of one job share: made when they ask, handed over, and marked when one of them is lost.

    Args:
        options: What was asked for.
        job_id: The job's identity.
        core_count: How many cores its ranks may use together.
        directory: The job's private directory.
        hands_over: Workers will ask for it; not so where somebody only wants to know (`--dry-run`).
    """

    def __init__(
        self, options: LaunchOptions, job_id: str, core_count: int, directory: Path, *, hands_over: bool = True
    ) -> None:
        self._arena_bytes = options.runtime.arena_bytes
        self._workers = options.workers
        self._core_count = core_count
        self._directory = directory
        self._why_not = why_no_arena(options, os.uname().machine)
        self._handing: Handing | None = None
        self._said: list[str] = []
        if hands_over and options.workers > 1 and options.runtime.transport != "zmq":
            try:
                self._handing = Handing(f"{directory}/arena", job_id, options.workers, self._make)
            except OSError as error:
                self._why_not = f"unix sockets; no arena because it cannot be handed over ({error.strerror})"
                self._said.append(f"no shared memory: it cannot be handed over ({error.strerror})")

    def describe(self) -> tuple[str, str]:
        """Return what serves, in two words and as a whole line that says why. Makes the arena, to know."""
        if self._why_not:
            return "unix sockets", f"transport zmq: {self._why_not}"
        arena, reason = self._make(0) if self._handing is None else self._handing.prepare(0)
        if arena is None:
            return "unix sockets", f"transport zmq: unix sockets; no arena because {reason}"
        if self._handing is None:
            arena.close()
        size = bytes_in_words(self._arena_bytes)
        line = f"transport arena: shared memory ({arena.how}), {size} virtual; SYNCVAR_TRANSPORT=zmq turns it off"
        return f"shared memory ({arena.how})", line

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return self._handing.descriptors() if self._handing is not None else []

    def readable(self, descriptor: int) -> None:
        """Handle a descriptor that poll reported; others are not looked at."""
        if self._handing is not None:
            self._handing.readable(descriptor)

    def take_said(self) -> list[str]:
        """Return the sentences to show since the last call."""
        said, self._said = self._said, []
        return said + (self._handing.take_said() if self._handing is not None else [])

    def abort(self, generation: int | None = None) -> None:
        """Let every rank that waits in shared memory look up: of one generation, or of all there are and will be."""
        if self._handing is not None:
            self._handing.abort(generation)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if self._handing is not None:
            self._handing.close()

    def _make(self, generation: int) -> tuple[CreatedArena | None, str]:
        if self._why_not:
            return None, self._why_not
        return create(self._arena_bytes, self._workers, self._core_count, generation, str(self._directory))
