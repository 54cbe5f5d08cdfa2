"""What happens to a job, as JSON lines in a file: `--events FILE`.

Each line is one object. All have `event`, `time` (seconds since 1970), `monotonic` (seconds of this host's monotonic clock,
by which to measure) and `job` (its identity). What else an event has:

* `job_start`: version, host, hosts, workers, servers, kind, target, start_method, max_restarts, options (a digest of all settings), pid.
* `rank_start`: rank, host, pid, restarts (how often the ranks have been started again before).
* `met`: generation, after_s (since these ranks were started). All ranks have joined.
* `stall`: text. A rank waits for others for long; `notice`: text. Whatever else the launcher was told to show.
* `signal`: signal, name. The launcher got one that ends the job.
* `signal_forwarded`: signal, name. The launcher got one and passed it on to the ranks.
* `rank_failed`: rank, error, message. What a rank said of its failure before it ended.
* `rank_end`: rank, pid, exit_code (null where a signal ended it), signal (null where none did).
* `server_start`, `server_failed`, `server_end`: the same of a server, with `server` in place of `rank`.
* `server_lost`: server, why. The job goes on with the copies of its variables. `server_copy`: server, of. It has a copy again of what
  that one had. `rank_restart`: rank, why, number. It is started again alone.
* `restart`: number, reason, pause_s, generation, rank (the culprit, or null), why.
* `preempted`: signal (or null). All ranks have saved, stopped as asked and want to be run again.
* `job_end`: exit_code, rank (the culprit, or null), why, elapsed_s; server, where the culprit is one.

A job that cannot be started has no `job_end`. Fields may be added. A line is appended by one write. Whoever should read a pipe and does not stops nobody: what it does
not take waits, up to a limit, and is dropped then.
"""

from __future__ import annotations

import os
import select
import stat
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import LostFile, why_unwritten
from syncvar.core.private_files import REQUESTED
from syncvar_launcher.io.nonblocking_writer import NonblockingWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_TEXT_MAX = 2000
_ALIASES = ("/dev/", "/proc/")  # /dev/fd/63 is a link, as `--events >(reader)` gives it


class EventLog:
    """The file of `--events`, or nothing.

    Args:
        path: The file, to which is appended; None for no file.
        job_id: Identity of the job.
        warn: Shows a sentence, with which the file is given up.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: Path | None, job_id: str, warn: Callable[[str], None]) -> None:
        self._path = path
        self._job_id = job_id
        self._warn = warn
        self._dropped = 0
        self._lost: list[LostFile] = []
        self._file = -1
        self._outlet: NonblockingWriter | None = None
        if path is not None:
            flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            flags |= 0 if str(path).startswith(_ALIASES) else os.O_NOFOLLOW
            try:
                # A pipe that nobody reads yet can be opened for both only; and then its reader may come and go.
                is_pipe = path.exists() and stat.S_ISFIFO(path.stat().st_mode)
                self._file = os.open(
                    path, flags | (os.O_RDWR if is_pipe else os.O_WRONLY), REQUESTED
                )
                self._outlet = NonblockingWriter(self._file)
            except OSError as error:
                if self._file >= 0:
                    os.close(self._file)
                raise ConfigError(f"cannot write {path} of --events: {error.strerror}") from None

    def add(self, event: str, **fields: Any) -> None:
        """Append an event."""
        if self._outlet is None:
            return
        if self._outlet.is_full:
            self._dropped += 1
            return
        import json  # only who asks for events needs it

        texts = {
            name: value[:_TEXT_MAX] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        told = {
            "event": event,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "job": self._job_id,
            **texts,
        }
        self._attempt(json.dumps(told).encode() + b"\n")

    def lost_files(self) -> list[LostFile]:
        """Return the file, if events are missing in it because it could not be written."""
        return list(self._lost)

    def flush(self) -> None:
        """Write what a reader has not taken yet, as far as it takes it now."""
        if self._outlet is not None and self._outlet.descriptor >= 0:
            self._attempt(b"")

    def close(self, patience_s: float = 0.0) -> None:
        """Close the file. Idempotent.

        Args:
            patience_s: How long a reader of a pipe may take for what waits.
        """
        until = time.monotonic() + patience_s
        while self._outlet is not None and self._outlet.descriptor >= 0:
            left = until - time.monotonic()
            poller = select.poll()
            poller.register(self._outlet.descriptor, select.POLLOUT)
            if left <= 0 or not poller.poll(left * 1000):
                self._dropped += 1
                break
            self.flush()
        if self._dropped and self._outlet is not None:
            self._warn(f"some events were dropped, for nobody read {self._path}")
        self._give_up()

    def _attempt(self, data: bytes) -> None:
        assert self._outlet is not None
        try:
            self._outlet.write(data)
        except OSError as error:
            self._lost.append(LostFile(str(self._path), "--events", why_unwritten(error)))
            self._warn(
                f"cannot write {self._path} of --events: {error.strerror}; the job goes on without it"
            )
            self._give_up()

    def _give_up(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            os.close(self._file)
            self._outlet = None
