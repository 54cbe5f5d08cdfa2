"""The files that a job leaves (flight records, events, totals), and files that are lost."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import stat
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import (
    AUTO_LOG,
    EVIDENCE,
    RECORDS,
    REQUESTED,
    TOTALS,
    LostFile,
    check_file,
    check_folder,
    job_name,
    keep_newest,
    remove_job,
    state_folder,
    write_error_text,
)
from syncvar.core.process_ids import process_list, process_name
from syncvar.runtime.call_record import bus_factor
from syncvar_launcher.io.output import escape
from syncvar_launcher.io.standard_streams import NonblockingWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from syncvar_launcher.options.launch_options import LaunchOptions

_TEXT_MAX = 2000
_ALIASES = ("/dev/", "/proc/")  # /dev/fd/63 is a link, as `--events >(reader)` gives it

_TITLE = (
    "syncvar: totals of all calls; time in seconds over the ranks, bandwidth in GB/s by the mean"
)
_HEAD = (
    *("call", "size", "ranks", "calls", "bytes"),
    *("mean", "min", "max", "waiting", "algbw", "busbw"),
)
_TOTALS_ROWS = 14
_FILE_NBYTES_MAX = 16 << 20
_TEXTS, _NUMBERS = ("call", "ranks"), ("group", "size", "class", "calls", "nbytes", "ns", "failed")
_LOST_FILES_SHOWN = 20


class FlightRecords:
    """The folder in which the workers of a job leave flight records; it need not exist.

    It is the folder for the output of the ranks, or one of the job's own.
    """

    def __init__(self, log_dir: Path | None, environ: Mapping[str, str], job_id: str) -> None:
        self._has_own = log_dir is None
        self._job_id = job_id
        self.folder = log_dir
        self.refusal = ""
        if log_dir is None:
            top, self.refusal = state_folder(environ)
            self.folder = top / job_name(job_id) if top is not None else None

    def paths(self) -> list[Path]:
        """Return the records."""
        with contextlib.suppress(OSError):
            return sorted(self.folder.glob(RECORDS)) if self.folder is not None else []
        return []

    def remove(self) -> None:
        """Remove the records, partial ones of killed workers, and a folder of the job's own."""
        if self.folder is not None:
            remove_job(self.folder)

    def sentence(self) -> str:
        """Return the sentence that names the records, or an empty text without records.

        In the folder of all jobs this also removes records of older jobs.
        """
        if self.folder is None:
            return f"no flight records: {self.refusal}"
        if not self.paths():
            return ""
        if not self._has_own:
            return (
                f"flight records in {self.folder} (syncvar explain {shlex.quote(str(self.folder))})"
            )
        keep_newest(self.folder.parent)
        because = f"; {self.refusal}" if self.refusal else ""
        return f"flight records in {self.folder} (syncvar explain {self._job_id[:8]}){because}"


class EventLog:
    """The file of `--events` with the events of a job as JSON lines, or nothing.

    Each line is one object. All have `event`, `time` (seconds since 1970), `monotonic` (seconds of
    this host's monotonic clock, for durations) and `job` (the identity). The other fields:

    * `job_start`: version, host, hosts, workers, servers, kind, target, programs (kind, target and
      workers of each, the first one too), start_method, max_restarts, options (a digest of all
      settings), pid.
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
    * `job_end`: exit_code, rank (the culprit, or null), why, elapsed_s; server for a server.

    A job that cannot start has no `job_end`. Later versions may add fields. One write appends one
    line. A pipe that nothing reads delays nothing: lines wait up to a limit, and then the log drops
    them.

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
        self._writer: NonblockingWriter | None = None
        if path is not None:
            flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            flags |= 0 if str(path).startswith(_ALIASES) else os.O_NOFOLLOW
            try:
                # Opening a pipe without reader for writing fails. Opened for both, its reader may
                # come and go.
                is_pipe = path.exists() and stat.S_ISFIFO(path.stat().st_mode)
                flags |= os.O_RDWR if is_pipe else os.O_WRONLY
                self._file = os.open(path, flags, REQUESTED)
                self._writer = NonblockingWriter(self._file)
            except OSError as error:
                if self._file >= 0:
                    os.close(self._file)
                raise ConfigError(f"cannot write {path} of --events: {error.strerror}") from None

    def add(self, event: str, **fields: Any) -> None:
        """Append an event."""
        if self._writer is None:
            return
        if self._writer.is_full:
            self._dropped += 1
            return
        import json  # only `--events` needs it

        line = {
            "event": event,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "job": self._job_id,
        }
        for name, value in fields.items():
            line[name] = value[:_TEXT_MAX] if isinstance(value, str) else value
        self._write(json.dumps(line).encode() + b"\n")

    def lost_files(self) -> list[LostFile]:
        """Return the file, if it could not be written and lacks events."""
        return list(self._lost)

    def flush(self) -> None:
        """Write waiting events, as far as the reader takes them now."""
        if self._writer is not None and self._writer.descriptor >= 0:
            self._write(b"")

    def close(self, patience_s: float = 0.0) -> None:
        """Close the file, after at most `patience_s` seconds for the reader of a pipe.

        Idempotent.
        """
        until = time.monotonic() + patience_s
        while self._writer is not None and self._writer.descriptor >= 0:
            left = until - time.monotonic()
            poller = select.poll()
            poller.register(self._writer.descriptor, select.POLLOUT)
            if left <= 0 or not poller.poll(left * 1000):
                self._dropped += 1
                break
            self.flush()
        if self._dropped and self._writer is not None:
            self._warn(f"some events were dropped, because nobody read {self._path}")
        self._give_up()

    def _write(self, data: bytes) -> None:
        assert self._writer is not None
        try:
            self._writer.write(data)
        except OSError as error:
            self._lost.append(LostFile(str(self._path), "--events", write_error_text(error)))
            reason = error.strerror
            self._warn(
                f"cannot write {self._path} of --events: {reason}; the job goes on without it"
            )
            self._give_up()

    def _give_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            os.close(self._file)
            self._writer = None


def read_totals(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the totals in a folder by rank or server number; skip other files."""
    import json  # only `--stats` needs it

    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(TOTALS)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if path.stat().st_size > _FILE_NBYTES_MAX:
                continue
            document = json.loads(path.read_bytes())
            rows = [
                row
                for row in document["rows"]
                if all(type(row[name]) is str for name in _TEXTS)
                and all(type(row[name]) is int for name in _NUMBERS)
            ]
            found.setdefault(int(document["rank"]), []).extend(rows)
    return found


def merge_totals(totals: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each kind of call, sorted by mean time, the longest first.

    The columns of a row:

    - "call", "ranks", "size" of the group, "failed" calls.
    - "class": upper end of the size class in bytes.
    - "calls" and "nbytes": those of the rank with most.
    - "min_s", "mean_s", "max_s": time in these calls, over the ranks.
    - "waiting": share of the mean time beyond the fastest rank's. It is a lower bound.
    - "algbw", "busbw": GB/s by the mean time; null if unknown.
    """
    cells: dict[tuple[str, str, int, int, int], list[dict[str, Any]]] = {}
    for rows in totals.values():
        here: dict[tuple[str, str, int, int, int], dict[str, Any]] = {}
        for row in rows:  # a rank that has met again reports the same group twice
            key = (row["call"], row["ranks"], row["size"], row["group"], row["class"])
            if key in here:
                for name in ("calls", "nbytes", "ns", "failed"):
                    here[key][name] += row[name]
            else:
                here[key] = dict(row)
        for key, row in here.items():
            cells.setdefault(key, []).append(row)
    result = []
    for (call, ranks, size, _, end), rows in cells.items():
        times = [row["ns"] / 1e9 for row in rows]
        mean = sum(times) / len(times)
        nbytes = max(row["nbytes"] for row in rows)
        is_known = all(row["nbytes"] >= 0 for row in rows) and nbytes > 0 and mean > 0
        rate = nbytes / mean / 1e9 if is_known else None
        factor = bus_factor(call.partition("(")[0], size)
        result.append(
            {
                "call": call,
                "ranks": ranks,
                "size": size,
                "class": end,
                "calls": max(row["calls"] for row in rows),
                "nbytes": nbytes if is_known else None,
                "min_s": min(times),
                "mean_s": mean,
                "max_s": max(times),
                "waiting": (1 - min(times) / mean if mean > 0 else 0.0) if len(rows) > 1 else None,
                "algbw": rate if factor else None,
                "busbw": rate * factor if rate is not None and factor else None,
                "failed": sum(row["failed"] for row in rows),
            }
        )
    return sorted(result, key=lambda row: -row["mean_s"])


def totals_table(rows: Sequence[dict[str, Any]], missing: Sequence[int] = ()) -> str:
    """Write the rows of `merge_totals` as a table of at most 20 lines.

    It names the ranks and servers without totals.
    """
    if not rows and missing:
        return f"syncvar: no totals: {process_list(missing)} ended before writing them\n"
    if not rows:
        return "syncvar: no calls to add up\n"
    cells = [_HEAD] + [_totals_cells(row) for row in rows[:_TOTALS_ROWS]]
    rest = rows[_TOTALS_ROWS:]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_TITLE]
    for row in cells:
        texts = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        texts += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append(f"  {'  '.join(texts)}".rstrip())
    if rest:
        calls, time_s = (sum(row[name] for row in rest) for name in ("calls", "mean_s"))
        lines.append(
            f"  {len(rest)} more kinds: {calls} calls, {time_s:.3f} s (--stats=FILE has all)"
        )
    lines.append(
        "  waiting: share of the mean time beyond that of the rank that took least, a lower bound"
    )
    if missing:
        lines.append(f"  {process_list(missing)} sent no totals")
    return "".join(f"{line}\n" for line in lines)


def _totals_cells(row: dict[str, Any]) -> tuple[str, ...]:
    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    share = "-" if row["waiting"] is None else f"{100 * row['waiting']:.0f}%"
    total = "-" if row["nbytes"] is None else _bytes_text(row["nbytes"])
    times = (f"{row[name]:.3f}" for name in ("mean_s", "min_s", "max_s"))
    size = "-" if row["nbytes"] is None else f"<= {_bytes_text(row['class'])}"
    return (
        escape(row["call"])[:40],
        size,
        escape(row["ranks"])[:20],
        str(row["calls"]),
        total,
        *times,
        share,
        rate(row["algbw"]),
        rate(row["busbw"]),
    )


def _bytes_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


class LostFiles:
    """Collects lost files, each once, in the order in which they were lost."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, str, str], LostFile] = {}

    def add(self, files: Iterable[LostFile], where: str = "") -> None:
        """Add files; `where` is the rank or server that wrote them, empty for the launcher."""
        for lost in files:
            self._lost.setdefault((lost.path, lost.origin, where), lost)

    def add_record(self, number: int, record: Mapping[str, Any]) -> None:
        """Add the file that a rank or server reports; ignore a malformed record."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            path, origin, reason = (
                str(record[name])[:4096] for name in ("path", "origin", "reason")
            )
            self.add(
                [LostFile(path, origin, reason, int(record["missing_nbytes"]))],
                process_name(number),
            )

    def lines(self, *, has_failed: bool) -> list[str]:
        """Return a sentence for each file, for flight records only after a failure."""
        shown = []
        for (_, _, where), lost in self._lost.items():
            sentence = f"{where}: {lost}" if where else str(lost)
            if lost.origin != EVIDENCE:
                shown.append(sentence)
            elif has_failed:
                shown.append(f"{sentence}; set XDG_STATE_HOME to a folder with free space")
        lines = [escape(sentence) for sentence in shown[:_LOST_FILES_SHOWN]]
        rest = len(shown) - _LOST_FILES_SHOWN
        return [*lines, f"{rest} more files could not be written"] if rest > 0 else lines

    @property
    def has_result(self) -> bool:
        """Whether one of them is a file that the user asked for."""
        return any(lost.origin != EVIDENCE for lost in self._lost.values())


def check_requested_files(chosen: LaunchOptions, *, is_local: bool) -> None:
    """Check before the start that every requested file can be written."""
    output = chosen.output
    if output.log_dir is not None:
        check_folder(str(output.log_dir), "--log-dir")
    if output.events is not None:
        check_file(str(output.events), "--events")
    if output.stats and not isinstance(output.stats, bool):
        check_file(str(output.stats), "--stats")
    if is_local and chosen.runtime.trace:
        check_folder(chosen.runtime.trace, "SYNCVAR_TRACE")
    if is_local and chosen.runtime.ledger:
        check_folder(chosen.runtime.ledger, "--ledger")
    if is_local and chosen.runtime.auto_log:
        check_file(chosen.runtime.auto_log, AUTO_LOG)
