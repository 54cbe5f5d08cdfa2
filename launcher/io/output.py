"""Forwards the output of the ranks: whole lines, each with its rank, never mixed.

Bytes of the ranks are data, not commands for the reader's terminal. So control characters, and
marks that change the direction of text, appear as escapes. A terminal still gets colours, progress
lines and prompts.

A line ends with a line feed, a carriage return, or both. Text that ends with a carriage return
alone is progress. A terminal shows it in a line at its bottom, one for each rank, which changes in
place; lines that have ended appear above. Other sinks get the last state of the progress, and
before that one state every 10 s.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from syncvar.core.output_files import REQUESTED, LostFile, check_folder, write_error_text
from syncvar.core.process_ids import SERVER_0, is_server, process_name, short_name
from syncvar_launcher.io.live_lines import STATUS, LineKey, LiveLines, split_nested, update_start

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path

Stream = Literal["out", "err"]

LINE_NBYTES = 16 << 10
TAIL_LINES = 40
LOG_LINES = 200
IDLE_S = 0.2
PROGRESS_S = 10.0  # between two states of one progress line where no terminal replaces the first
BELOW_S = 0.02  # until a line feed after progress ends it, and does not lead to a bar below
DRAW_S = 0.05  # between two changes of the lines at the bottom of a terminal

# Memory of the tail stays below 40 x 2 000 bytes for each rank, whatever the ranks write.
_TAIL_NBYTES = 2_000
_CLEAR = b"\r\x1b[K"
# Red and black are left out: red reads as an error, black cannot be read at all.
_COLORS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")

_PLAIN = re.compile(rb"[\x20-\x7e\t]*")
_END = re.compile(rb"\r\n|\n|\r")
# Colours and "erase to the end of the line" are the only sequences that a line may use. Moving the
# cursor, setting the title or writing to the clipboard would reach beyond the line.
_SEQUENCE = r"\x1b\[[0-9;:]*[mK]"
_UNSAFE = (
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e"
    r"\u2066-\u2069\ud800-\udfff]"
)
_FOR_FILE = re.compile(_UNSAFE)
_FOR_TERMINAL = re.compile(f"{_SEQUENCE}|{_UNSAFE}")
_SEQUENCES = re.compile(_SEQUENCE)
_ERASURES = re.compile(rb"\x1b\[[0-9;:]*K")
_BLANK = re.compile(rb"(?:[ \t]|\x1b\[[0-9;:]*[mK])*")  # progress that clears its line
_ROWS = 24  # of a terminal that does not report its size
_LOG = re.compile(r"(rank|server)-(0|[1-9][0-9]{0,8})\.(?:out|err)")


class Writable(Protocol):
    """A file for a sink: a `NonblockingWriter`, or a buffered binary file."""

    def write(self, data: bytes, /) -> int:
        """Write all of `data`."""

    def flush(self) -> None:
        """Write as much as possible now."""


class Sink(NamedTuple):
    """A file to which forwarded lines go."""

    file: Writable  # flushed after each write
    is_terminal: bool = False  # progress and prompts stay, and colours of the programs pass
    color: bool = False  # of our own prefixes
    is_dumb: bool = False  # a terminal whose cursor cannot move up: it shows no live lines
    descriptor: int = -1  # to ask for the number of rows

    @property
    def has_live_lines(self) -> bool:
        """Whether progress changes in place."""
        return self.is_terminal and not self.is_dumb

    def rows(self) -> int:
        """Return the number of rows of the terminal."""
        try:
            return os.get_terminal_size(self.descriptor).lines or _ROWS
        except OSError:
            return _ROWS


_Tail = deque[tuple[Stream, bytes, bool]]
"""The last lines of a rank: stream, text, and whether it is progress."""


class _Source:
    """One stream of one rank."""

    def __init__(self, rank: int, stream: Stream) -> None:
        self.rank = rank
        self.stream: Stream = stream
        self.pending = b""  # of a line that has not ended
        self.continued = False  # the start of a line that is too long was forwarded already
        self.returned: bytes | None = None  # last progress, to which a following line feed belongs
        self.is_progress = False  # the last end was a carriage return, so `pending` is progress
        self.is_nested = False  # it has several bars, one below the other
        self.unsure = b""  # a line feed that may lead to the next bar below
        self.unsure_since = 0.0
        self.held = b""  # progress that waits because it may be replaced soon
        self.progressed: float | None = None  # when progress was last forwarded, or first held
        self.shown = b""  # the part of `pending` that the terminal shows as a prompt
        self.changed = 0.0  # when bytes last came
        self.closed = False


def escape(text: str) -> str:
    r"""Return text with control characters and direction marks as escapes. Tabs stay.

    Example:
        >>> print(escape("a\x1b[31mb\x07"))
        a\x1b[31mb\x07
    """
    return _FOR_FILE.sub(_escaped, text)


class OutputForwarder:
    r"""Forwards the output of the ranks, and remembers the last lines of each.

    Every write to a sink holds whole lines of one rank, so lines of different ranks never mix. It
    handles no processes and no descriptors. The caller reads the pipes, calls `feed` with the
    bytes, and calls `tick` at the time that `tick` has returned.

    `shown` are the ranks whose lines it forwards, None for all. `clock` is the wall clock for the
    local time before each line. `log_dir` gets the raw bytes, one file for each rank and stream;
    the files of `ranks` are made at once, to replace those of an earlier job. With `is_one` both
    sinks lead to the same place, where a reader sees both in order.

    Example:
        >>> import io
        >>> out = io.BytesIO()
        >>> forwarder = OutputForwarder(Sink(out), Sink(io.BytesIO()))
        >>> forwarder.feed(1, "out", b"one\ntw", 0.0)
        >>> forwarder.feed(0, "out", b"zero\n", 0.1)
        >>> forwarder.close(1, "out")
        >>> print(out.getvalue().decode(), end="")
        [1] one
        [0] zero
        [1] tw
    """

    def __init__(
        self,
        stdout: Sink,
        stderr: Sink,
        *,
        shown: frozenset[int] | None = None,
        clock: Callable[[], float] | None = None,
        log_dir: Path | None = None,
        ranks: tuple[int, ...] = (),
        is_one: bool = False,
    ) -> None:
        self.broken = False  # whether the standard output has no reader any more
        self._is_one = is_one
        # Whose lines went to the sinks last.
        self._recent: deque[tuple[int, Stream]] = deque(maxlen=TAIL_LINES)
        # The last lines of all ranks in their order, and whether each is progress
        self._log: deque[tuple[int, bytes, bool]] = deque(maxlen=LOG_LINES)
        self._sinks: dict[Stream, Sink] = {"out": stdout, "err": stderr}
        self._dead: set[Stream] = set()
        self._shown = shown
        self._clock = clock
        self._sources: dict[tuple[int, Stream], _Source] = {}
        self._tails: dict[int, _Tail] = {}
        self._concealed: dict[tuple[int, Stream], deque[bytes]] = {}
        self._live: _Source | None = None  # whose prompt stands on the terminal
        self._lines = LiveLines()
        # The stream of the terminal that shows the live lines.
        self._screen: Stream | None = None
        if stderr.has_live_lines or stdout.has_live_lines:
            self._screen = "err" if stderr.has_live_lines else "out"
        self._drawn = float("-inf")  # when the live lines were last drawn
        self._now = 0.0
        self._lost_output: list[LostFile] = []
        self._logs = _Logs(log_dir, self._warn) if log_dir is not None else None
        if self._logs is not None:
            self._logs.remove_others(ranks)
        for rank in ranks:
            self._source(rank, "out")
            self._source(rank, "err")

    def feed(self, rank: int, stream: Stream, data: bytes, now: float) -> None:
        """Add bytes of a rank, and forward every line that they complete."""
        if not data:
            return
        source = self._source(rank, stream)
        source.closed = False
        self._now = source.changed = now
        if self._logs is not None:
            self._logs.write(rank, stream, data)
        other = self._sources.get((rank, "out" if stream == "err" else "err"))
        if other is not None and not other.is_nested:
            self._settle(other)  # keeps the order of the two streams
        for position, part in self._parts(source, source.unsure + data):
            if not position:
                self._consume(source, part)
            elif self.is_forwarded(rank) and self._sinks[stream].has_live_lines:
                self._set_line(source, part, position)

    def lost_files(self) -> list[LostFile]:
        """Return the files that could not be written whole: logs, and the standard output."""
        return [*self._lost_output, *([] if self._logs is None else self._logs.lost_files())]

    def pass_raw(self, stream: Stream, data: bytes) -> None:
        """Forward bytes of a rank that has the terminal unchanged."""
        self.clear_live_lines()
        self._screen = None  # the cursor is where the rank has put it
        self._write(stream, data)

    def show_status(self, text: str) -> None:
        """Show text of the launcher itself in a line that changes in place; "" removes it.

        Only a terminal shows it.
        """
        self._lines.set(STATUS, f"syncvar: {escape(text)}".encode() if text else b"")

    def clear_live_lines(self) -> None:
        """Remove the live lines from the terminal until the next `tick`."""
        if self._screen is not None:
            self._write(self._screen, self._lines.erase())

    def close(self, rank: int, stream: Stream) -> None:
        """End a stream: forward a line without end as it is, and close the file. Idempotent."""
        source = self._source(rank, stream)
        if source.closed:
            return
        source.closed = True
        self._settle(source)
        if source.is_progress and source.pending and _BLANK.fullmatch(source.pending):
            source.held = b""
        elif source.pending:
            self._forward(source, [(source.pending, b"\n")])
        source.pending = b""
        self._show_held(source)
        self._lines.remove(rank, stream)
        source.shown = b""
        source.returned = None
        if self._logs is not None:
            self._logs.close(rank, stream)

    def conceal(self, rank: int, stream: Stream, text: str) -> None:
        """Do not forward lines that a rank is about to write; its files get them.

        `text` has whole lines; others may come between them.
        """
        self._concealed[rank, stream] = deque(
            text.encode("utf-8", "backslashreplace").split(b"\n")[:-1]
        )

    def tick(self, now: float) -> float | None:
        """Draw the live lines, and unfinished lines that have been idle for 0.2 s, such as prompts.

        Return when to call again at the latest, on the clock of `now`, or None if nothing waits.
        """
        self._now = now
        following: float | None = None
        for source in list(self._sources.values()):
            if source.unsure:
                due = source.unsure_since + (IDLE_S if source.is_nested else BELOW_S)
                if now < due:
                    following = due if following is None else min(following, due)
                else:
                    self._settle(source)
            if not source.pending or source.shown == source.pending:
                continue
            if source.is_progress or not self.is_forwarded(source.rank):
                continue
            if not self._sinks[source.stream].is_terminal:
                continue
            due = source.changed + IDLE_S
            if now < due:
                following = due if following is None else min(following, due)
            elif self._live is None or self._live is source or not self._live.shown:
                # A prompt is not pushed away by another one: the first stays until its line ends.
                self._show_prompt(source)
        return self._draw(now, following)

    def _draw(self, now: float, following: float | None) -> float | None:
        """Draw the live lines if they are missing, or if they have changed and it is time.

        A prompt takes their place: its reader types there.
        """
        if self._screen is None or self._live is not None:
            return following
        if not self._lines.is_missing:
            if not self._lines.has_changed:
                return following
            due = self._drawn + DRAW_S
            if now < due:
                return due if following is None else min(following, due)
        self._drawn = now
        self._write(self._screen, self._lines.draw(self._sinks[self._screen].rows()))
        return following

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return the last 40 lines of a rank on both streams, escaped and without colours."""
        lines = [text for _, text, _ in self._tails.get(rank, ())]
        for stream in ("out", "err"):
            source = self._sources.get((rank, stream))
            if source is not None and source.pending:
                lines.append(source.pending[:_TAIL_NBYTES])
        return tuple(escape(_SEQUENCES.sub("", _decode(line))) for line in lines[-TAIL_LINES:])

    def log_lines(self) -> list[str]:
        """Return the last 200 lines of all ranks as "[rank] line", escaped, without colours."""
        return [
            f"[{short_name(rank)}] {escape(_SEQUENCES.sub('', _decode(line)))}"
            for rank, line, _ in self._log
        ]

    def stands_above(self, rank: int) -> bool:
        """Return whether the reader has just seen the lines of `last_lines`."""
        lines = self._tails.get(rank, ())
        recent = [one for one in self._recent if self._is_one or one[1] == "err"][-len(lines) :]
        is_all = len(recent) == len(lines) > 0 and all(each == rank for each, _ in recent)
        is_seen = self._is_one or all(stream == "err" for stream, _, _ in lines)
        return (
            is_all
            and is_seen
            and not any(source.pending for source in self._sources.values() if source.rank == rank)
        )

    def begin(self, mark: str) -> None:
        """Begin a new attempt, with ranks of the same names.

        It forgets the last lines. The files continue after a line with `mark`.
        """
        for source in list(self._sources.values()):
            start = "\n" if source.pending else ""
            self.close(source.rank, source.stream)
            source.closed = False
            if self._logs is not None:
                self._logs.open(source.rank, source.stream, f"{start}=== {mark} ===\n".encode())
        self._tails.clear()
        self._concealed.clear()
        self._recent.clear()

    def write_text(self, text: str) -> None:
        """Write text of the launcher itself, whole lines, to standard error at once."""
        self._recent.append((-1, "err"))
        self._write("err", self._head(None, "err") + text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Write waiting bytes, as far as the sinks take them now."""
        for stream in self._sinks:
            self._attempt(stream, b"")

    def is_forwarded(self, rank: int) -> bool:
        """Return whether a sink gets the output of a rank.

        It gets that of all servers, which write only about problems.
        """
        return self._shown is None or rank in self._shown or (is_server(rank) and bool(self._shown))

    def finish(self) -> None:
        """Close every stream; no bytes are lost, and the shell's prompt starts on a new line."""
        for source in list(self._sources.values()):
            self.close(source.rank, source.stream)
        self.show_status("")
        self.clear_live_lines()

    def _source(self, rank: int, stream: Stream) -> _Source:
        source = self._sources.get((rank, stream))
        if source is None:
            source = self._sources[rank, stream] = _Source(rank, stream)
            if self._logs is not None:
                self._logs.open(rank, stream)
        return source

    def _parts(self, source: _Source, data: bytes) -> list[tuple[int, bytes]]:
        """Split bytes into updates of bars below the first one, and others; hold the unsure end."""
        source.unsure, source.unsure_since = b"", self._now
        if source.is_nested or b"\x1b[A" in data:
            source.is_nested = True
            parts, source.unsure = split_nested(data)
            return parts
        if not source.is_progress and b"\r" not in data:
            return [(0, data)]
        start = update_start(data)
        line = data[data.rfind(b"\n", 0, start) + 1 : start]
        is_progress = b"\r" in line.rstrip(b"\r") or (
            source.is_progress and source.returned is None and len(line) == start
        )
        if is_progress:
            source.unsure = data[start:]
        return [(0, data[:start] if is_progress else data)]

    def _settle(self, source: _Source) -> None:
        """Decide that a line feed ends a line, because no bar below has followed."""
        data, source.unsure = source.unsure, b""
        for position, part in split_nested(data, is_last=True)[0]:
            self._consume(source, b"" if position else part)

    def _set_line(self, source: _Source, text: bytes, position: int = 0) -> None:
        """Set a live line of a stream; blank text removes it."""
        line = b""
        if not _BLANK.fullmatch(text):
            sink = self._sinks[source.stream]
            safe = _safe(_ERASURES.sub(b"", text[:LINE_NBYTES]), is_terminal=True)
            line = self._prefix(source, sink) + safe
        self._lines.set(LineKey(source.rank, source.stream, position), line)

    def _consume(self, source: _Source, data: bytes) -> None:
        if not data:
            return
        segments: list[tuple[bytes, bytes]] = []
        if source.returned is not None:
            # The carriage return at the end of the last piece may be half of a line end.
            if data.startswith(b"\n"):
                self._finish_progress(source)
                data = data[1:]
            source.returned = None
        data = source.pending + data
        start = 0
        for match in _END.finditer(data):
            segments.append((data[start : match.start()], match.group()))
            start = match.end()
        rest = data[start:]
        while len(rest) > LINE_NBYTES:
            cut = _cut(rest)
            segments.append((rest[:cut], b""))
            rest = rest[cut:]
        source.pending = rest
        if segments:
            self._forward(source, segments)
        if rest:
            source.returned = None
            sink = self._sinks[source.stream]
            if source.is_progress and sink.has_live_lines and self.is_forwarded(source.rank):
                self._set_line(source, rest)

    def _forward(self, source: _Source, segments: list[tuple[bytes, bytes]]) -> None:
        """Forward texts of one stream, with their line ends, in one write."""
        is_forwarded = self.is_forwarded(source.rank)
        concealed = self._concealed.get((source.rank, source.stream))
        sink = self._sinks[source.stream]
        body = bytearray()
        for text, end in segments:
            live = is_forwarded
            if concealed and text == concealed[0] and end.endswith(b"\n") and not source.continued:
                concealed.popleft()
                live = False
            rest = text
            while len(rest) > LINE_NBYTES:
                cut = _cut(rest)
                body += self._line(source, sink, rest[:cut], b"\n", live=live)
                source.continued, rest = True, rest[cut:]
            source.returned = rest if end == b"\r" else None
            source.is_progress = end == b"\r"
            if end == b"\r":
                if not rest:
                    continue  # a bare carriage return holds nothing to show
                body += self._progress(source, sink, rest, live=live)
            else:
                held, source.held = source.held, b""  # a text has replaced it; without one it stays
                body += self._line(source, sink, rest or held, b"\n", live=live)
                self._lines.shift(source.rank, source.stream)
            source.continued = not end
        if body:
            self._write(source.stream, self._head(source, source.stream) + body)

    def _progress(self, source: _Source, sink: Sink, text: bytes, *, live: bool) -> bytes:
        """Keep progress for its live line or its last state; return what a file gets now."""
        if _BLANK.fullmatch(text):
            source.held = b""
            self._set_line(source, b"")
            return b""
        if live and sink.has_live_lines:
            self._set_line(source, text)
            live = False
        is_now = live and self._is_due(source)
        source.held = b"" if is_now else text
        return self._line(source, sink, text, b"\n", live=is_now, progress=True)

    def _is_due(self, source: _Source) -> bool:
        """Return whether to forward progress now, to a sink that cannot replace it."""
        if source.progressed is not None and self._now - source.progressed < PROGRESS_S:
            return False
        is_first, source.progressed = source.progressed is None, self._now
        return not is_first

    def _show_held(self, source: _Source) -> None:
        text, source.held = source.held, b""
        if text and self.is_forwarded(source.rank):
            sink = self._sinks[source.stream]
            self._recent.append((source.rank, source.stream))
            line = self._prefix(source, sink) + _safe(text, is_terminal=sink.is_terminal) + b"\n"
            self._write(source.stream, self._head(source, source.stream) + line)

    def _line(
        self,
        source: _Source,
        sink: Sink,
        text: bytes,
        end: bytes,
        *,
        live: bool,
        progress: bool = False,
    ) -> bytes:
        lines = self._tails.setdefault(source.rank, deque(maxlen=TAIL_LINES))
        if lines and lines[-1][0] == source.stream and lines[-1][2]:
            lines.pop()  # progress is replaced by what follows it
        lines.append((source.stream, text[:_TAIL_NBYTES], progress))
        if self._log and self._log[-1][0] == source.rank and self._log[-1][2]:
            self._log.pop()
        self._log.append((source.rank, text[:_TAIL_NBYTES], progress))
        if not live:
            return b""
        self._recent.append((source.rank, source.stream))
        return self._prefix(source, sink) + _safe(text, is_terminal=sink.is_terminal) + end

    def _prefix(self, source: _Source, sink: Sink) -> bytes:
        label = f"[{short_name(source.rank)}{'+' if source.continued else ''}]"
        if sink.color:
            label = f"\x1b[{_COLORS[source.rank % len(_COLORS)]}m{label}\x1b[0m"
        if self._clock is not None:
            from datetime import datetime  # only timestamps need it

            # The reader's own time, as on a wall clock: no offset.
            moment = datetime.fromtimestamp(self._clock()).isoformat(timespec="milliseconds")  # noqa: DTZ006
            label += f" {moment}"
        return f"{label} ".encode()

    def _finish_progress(self, source: _Source) -> None:
        """Turn progress that was shown already into a line that stays, after its line feed."""
        text = source.returned
        source.is_progress = False
        lines = self._tails.setdefault(source.rank, deque(maxlen=TAIL_LINES))
        if not text or _BLANK.fullmatch(text):
            self._forward(source, [(text or b"", b"\n")])
            return
        if lines and lines[-1][0] == source.stream and lines[-1][2]:
            lines[-1] = (*lines[-1][:2], False)
        self._lines.shift(source.rank, source.stream)
        self._show_held(source)

    def _show_prompt(self, source: _Source) -> None:
        sink = self._sinks[source.stream]
        head = self._head(source, source.stream)
        source.shown = source.pending
        self._live = source
        prompt = self._prefix(source, sink) + _safe(source.pending, is_terminal=True)
        self._write(source.stream, head + prompt)

    def _head(self, source: _Source | None, stream: Stream) -> bytes:
        """Return the bytes that clear a prompt of another rank and the live lines."""
        if not self._sinks[stream].is_terminal:
            return b""
        head = b""
        if self._screen == stream:
            head = self._lines.erase()
        else:
            self.clear_live_lines()
        live, self._live = self._live, None
        if live is None:
            return head
        # The whole line will be written again: when it ends, or when it has been idle again.
        live.shown = b""
        live.changed = self._now
        clear = b"\n" if self._sinks[live.stream].is_dumb else _CLEAR
        if live.stream == stream:
            return head + clear
        self._write(live.stream, clear)
        return head

    def _write(self, stream: Stream, data: bytes) -> None:
        if data:
            self._attempt(stream, data)

    def _attempt(self, stream: Stream, data: bytes) -> None:
        if stream in self._dead:
            return
        file = self._sinks[stream].file
        try:
            if data:
                file.write(data)
            file.flush()
        except (OSError, ValueError) as error:  # a closed Python file raises ValueError
            self._dead.add(stream)
            if stream == "out":
                self.broken = getattr(error, "errno", None) == errno.EPIPE
                if not self.broken:
                    reason = write_error_text(error)
                    lost = LostFile("the standard output", "the launcher", reason)
                    self._lost_output.append(lost)
                    self._warn(
                        f"cannot write to the standard output: {reason}; the job goes on without it"
                    )

    def _warn(self, text: str) -> None:
        self.write_text(f"syncvar: {text}\n")


class _Logs:
    """The files of `log_dir`. A warning names the first one that cannot be written."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        check_folder(str(folder), "--log-dir")
        self._folder = folder
        self._warn = warn
        self._warned = False
        self._files: dict[tuple[int, Stream], int] = {}
        self._lost: dict[tuple[int, Stream], LostFile] = {}

    def remove_others(self, ranks: Container[int]) -> None:
        """Remove files of an earlier job for ranks and servers that this one does not have."""
        for path in self._folder.iterdir():
            match = _LOG.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():  # we make regular files
                continue
            if int(match[2]) + (0 if match[1] == "rank" else SERVER_0) in ranks:
                continue
            try:
                path.unlink()
            except OSError as error:
                reason = write_error_text(error)
                self._warn(
                    f"cannot remove {path} of an earlier job: {reason}; it is not of this job"
                )

    def open(self, rank: int, stream: Stream, mark: bytes = b"") -> None:
        """Open a file: a new one, or an existing one with a mark after its content."""
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mark else os.O_TRUNC)
        # A pipe that stands there under this name must not block us.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._files[rank, stream] = os.open(self._path(rank, stream), flags, REQUESTED)
        except OSError as error:
            self._failed(rank, stream, error)
            return
        self.write(rank, stream, mark)

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        file = self._files.get((rank, stream))
        if file is None:
            self._count_lost(rank, stream, len(data))
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            self._failed(rank, stream, error)
            self._count_lost(rank, stream, len(view))
            self.close(rank, stream)  # a log with a hole would mislead

    def close(self, rank: int, stream: Stream) -> None:
        file = self._files.pop((rank, stream), None)
        if file is not None:
            try:
                os.close(file)
            except OSError as error:  # some file systems report a full disk only here
                self._failed(rank, stream, error)

    def lost_files(self) -> list[LostFile]:
        return [self._lost[key] for key in sorted(self._lost)]

    def _count_lost(self, rank: int, stream: Stream, nbytes: int) -> None:
        lost = self._lost.get((rank, stream))
        if lost is not None:
            self._lost[rank, stream] = lost._replace(
                missing_nbytes=max(0, lost.missing_nbytes) + nbytes
            )

    def _path(self, rank: int, stream: Stream) -> Path:
        return self._folder / f"{process_name(rank).replace(' ', '-')}.{stream}"

    def _failed(self, rank: int, stream: Stream, error: OSError) -> None:
        path, reason = self._path(rank, stream), write_error_text(error)
        self._lost.setdefault((rank, stream), LostFile(str(path), "--log-dir", reason))
        if not self._warned:
            self._warned = True
            self._warn(f"cannot write {path}: {reason}; the job goes on without this log")


def _cut(text: bytes) -> int:
    """Return where to cut a text that is too long: within 16 KiB, and not inside a character."""
    for back in range(4):
        if text[LINE_NBYTES - back] & 0xC0 != 0x80:
            return LINE_NBYTES - back
    return LINE_NBYTES


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def _safe(text: bytes, *, is_terminal: bool) -> bytes:
    if _PLAIN.fullmatch(text):
        return text
    if not is_terminal:
        return _FOR_FILE.sub(_escaped, _decode(text)).encode()
    shown = _FOR_TERMINAL.sub(_escaped, _decode(text))
    # A colour that the program left on must not reach the prefix of the next line.
    return (shown + "\x1b[0m" if "\x1b" in shown else shown).encode()


def _escaped(match: re.Match[str]) -> str:
    text = match.group()
    if len(text) > 1:
        return text
    return f"\\x{ord(text):02x}" if ord(text) < 0x100 else f"\\u{ord(text):04x}"
