"""The events of a job as JSON lines in a file: `--events FILE`.

Each line is one object. All have `event`, `time` (seconds since 1970), `monotonic` (seconds of this
host's monotonic clock, for durations) and `job` (the identity). The other fields of an event:

* `job_start`: version, host, hosts, workers, servers, kind, target, start_method, max_restarts,
  options (a digest of all settings), pid.
* `rank_start`: rank, host, pid, restarts (how often the launcher has started all ranks again).
* `met`: generation, after_s (since the start of these ranks). All ranks have joined.
* `stall`: text. A rank waits for others for long. `notice`: text. Any other notice.
* `signal`: signal, name. The launcher received a signal that ends the job.
* `signal_forwarded`: signal, name. The launcher forwarded a signal to the ranks.
* `rank_failed`: rank, error, message. The failure that a rank reported before it ended.
* `rank_end`: rank, pid, exit_code (null after a signal), signal (null without one).
* `server_start`, `server_failed`, `server_end`: the same with `server` in place of `rank`.
* `server_lost`: server, why. The job continues with copies of its variables.
* `server_copy`: server, of. `server` has a new copy of the variables of `of`.
* `rank_restart`: rank, why, number. The rank starts again alone.
* `restart`: number, reason, pause_s, generation, rank (the culprit, or null), why.
* `preempted`: signal (or null). All ranks have saved, stopped as asked and want another run.
* `job_end`: exit_code, rank (the culprit, or null), why, elapsed_s; server for a culprit server.

A job that cannot start has no `job_end`. Later versions may add fields. One write appends one line.
A pipe that nothing reads delays nothing: lines wait up to a limit, and then the log drops them.
"""

from __future__ import annotations

import os
import select
import stat
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import REQUESTED, LostFile, write_error_text
from syncvar_launcher.io.standard_streams import NonblockingWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_TEXT_MAX = 2000
_ALIASES = ("/dev/", "/proc/")  # /dev/fd/63 is a link, as `--events >(reader)` gives it


class EventLog:
    """The file of `--events`, or nothing.

    Args:
        path: The file, which events are appended to; None for no file.
        job_id: The identity of the job.
        warn: Shows a sentence when the log gives up the file.
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
                # Opening a pipe without reader for writing fails. Opened for both, its reader may
                # come and go.
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
        import json  # only `--events` needs it

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
        """Return the file, if it could not be written and lacks events."""
        return list(self._lost)

    def flush(self) -> None:
        """Write waiting events, as far as the reader takes them now."""
        if self._outlet is not None and self._outlet.descriptor >= 0:
            self._attempt(b"")

    def close(self, patience_s: float = 0.0) -> None:
        """Close the file, after at most `patience_s` seconds for the reader of a pipe.

        Idempotent.
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
            self._lost.append(LostFile(str(self._path), "--events", write_error_text(error)))
            reason = error.strerror
            self._warn(
                f"cannot write {self._path} of --events: {reason}; the job goes on without it"
            )
            self._give_up()

    def _give_up(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            os.close(self._file)
            self._outlet = None
