"""Which messages a rank has found, in a file: `match_log` writes, `match_replay` reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import (
    MATCH_LOG,
    REQUESTED,
    LostFile,
    check_folder,
    report_lost_file,
    write_error_text,
)

if TYPE_CHECKING:
    from syncvar.runtime.p2p_mailbox import MessageInfo


class MatchLog:
    """The messages that the probes and receives from any source of a rank have found.

    `match_log` writes them to a file of a folder, one line each: identity of the group, number of
    the call in it, source, tag. `match_replay` reads such a file, and the calls find the same ones.
    """

    def __init__(self, log: str, replay: str, rank: int) -> None:
        self._name = f"matches-{rank}.log"
        self._path = os.path.join(log, self._name) if log else ""
        self._mode = os.O_TRUNC
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        self._last: dict[int, int] = {}  # last call of each group that found something
        if log:
            check_folder(log, MATCH_LOG)
        if replay:
            self._read(os.path.join(replay, self._name))

    def _read(self, path: str) -> None:
        try:
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                group, call, source, tag = (int(word, 16) for word in line.split())
                self._found[group, call] = source, tag
                self._last[group] = max(call, self._last.get(group, 0))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"match_replay: {path} cannot be read: {error}. Name a folder that "
                f"{MATCH_LOG} has made, in a job of as many ranks"
            ) from error

    def add(self, group: int, call: int, found: MessageInfo) -> None:
        """Write which message a call has found."""
        if not self._path:
            return
        line = f"{group:x} {call:x} {found.source:x} {found.tag:x}\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | self._mode
        try:
            file = os.open(self._path, flags, REQUESTED)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
        except OSError as error:
            report_lost_file(LostFile(self._path, MATCH_LOG, write_error_text(error)))
            self._path = ""  # a log with a hole would mislead a replay
        self._mode = 0

    def recorded(self, group: int, call: int) -> tuple[int, int] | None:
        """Return the source and tag that a call found in the recorded run."""
        return self._found.get((group, call))

    def found_nothing(self, group: int, call: int) -> bool:
        """Return whether a call of the recorded run found nothing, and a later one something."""
        return call < self._last.get(group, 0) and (group, call) not in self._found
