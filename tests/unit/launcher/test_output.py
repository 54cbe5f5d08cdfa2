import errno
import io
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError
from syncvar_launcher.io.output import (
    BELOW_S,
    DRAW_S,
    LINE_NBYTES,
    OutputForwarder,
    Sink,
    escape,
)
from syncvar_launcher.options.option_table import shown_ranks
from tests.support.terminal_screen import TerminalScreen, shown


class Broken(io.RawIOBase):
    """A sink whose writes fail."""

    def __init__(self, number):
        self.number = number
        self.calls = 0

    def write(self, data):
        self.calls += 1
        raise OSError(self.number, os.strerror(self.number))


def pair(*, terminal=False, color=False, same=False, **keywords):
    """Return two files and their forwarder; `same` gives both streams the same file."""
    out, err = io.BytesIO(), io.BytesIO()
    if same:
        err = out
    return (
        out,
        err,
        OutputForwarder(Sink(out, terminal, color), Sink(err, terminal, color), **keywords),
    )


def test_lines_are_forwarded_when_they_are_complete():
    out, err, forwarder = pair()
    forwarder.feed(3, "out", b"one\ntw", 0)
    forwarder.feed(1, "out", b"other\n", 0)
    forwarder.feed(3, "out", b"o\n\n", 0)
    forwarder.feed(3, "err", b"bad\n", 0)
    assert out.getvalue() == b"[3] one\n[1] other\n[3] two\n[3] \n"
    assert err.getvalue() == b"[3] bad\n"


def test_the_last_line_needs_no_end():
    out, _, forwarder = pair()
    forwarder.feed(0, "out", b"tail", 0)
    forwarder.close(0, "out")
    forwarder.close(0, "out")
    assert out.getvalue() == b"[0] tail\n"


def test_finish_closes_every_stream():
    out, err, forwarder = pair()
    forwarder.feed(0, "out", b"a", 0)
    forwarder.feed(1, "err", b"b", 0)
    forwarder.finish()
    assert (out.getvalue(), err.getvalue()) == (b"[0] a\n", b"[1] b\n")


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("all", b"[0] a\n[1] b\n"),
        ("first", b"[0] a\n"),
        ("failed", b""),
        ("none", b""),
        ("1", b"[1] b\n"),
        ("0-1", b"[0] a\n[1] b\n"),
    ],
)
def test_what_is_shown_is_chosen_and_always_remembered(which, expected):
    out, _, forwarder = pair(shown=shown_ranks(which, 2))
    forwarder.feed(0, "out", b"a\n", 0)
    forwarder.feed(1, "out", b"b\n", 0)
    assert out.getvalue() == expected
    assert forwarder.last_lines(1) == ("b",)


def test_colours_are_stable_and_only_on_request():
    out, _, forwarder = pair(color=True)
    forwarder.feed(1, "out", b"a\n", 0)
    forwarder.feed(11, "out", b"b\n", 0)
    assert out.getvalue() == b"\x1b[33m[1]\x1b[0m a\n\x1b[33m[11]\x1b[0m b\n"


def test_timestamps_are_local_time_with_milliseconds():
    out, _, forwarder = pair(clock=lambda: 1_700_000_000.25)
    forwarder.feed(0, "out", b"a\n", 0)
    assert re.fullmatch(rb"\[0\] 2023-11-1\dT\d\d:\d\d:20\.250 a\n", out.getvalue())


# Control characters.


def test_controls_are_escaped_in_a_file():
    out, _, forwarder = pair()
    forwarder.feed(0, "out", "\x1b[31mred\x07\tx\x9b\u202ey\u2028é\n".encode() + b"\xff\x9b\n", 0)
    assert (
        out.getvalue().decode() == "[0] \\x1b[31mred\\x07\tx\\x9b\\u202ey\\u2028é\n[0] \\xff\\x9b\n"
    )


def test_a_terminal_gets_colours_and_nothing_that_reaches_beyond_the_line():
    out, _, forwarder = pair(terminal=True)
    forwarder.feed(0, "out", b"\x1b[1;31mred\x1b[K \x1b[2J\x1b[5A\x1b]0;title\x07\n", 0)
    assert out.getvalue() == b"[0] \x1b[1;31mred\x1b[K \\x1b[2J\\x1b[5A\\x1b]0;title\\x07\x1b[0m\n"


def test_escape_keeps_tabs_and_letters():
    assert escape("a\té\x00\x7f\ud800") == "a\té\\x00\\x7f\\ud800"


# Progress and prompts.


def test_progress_is_shown_on_a_terminal_below_the_lines_of_others():
    out, _, forwarder = pair(terminal=True, same=True)
    forwarder.feed(0, "out", b"50%\r", 0)
    forwarder.tick(0)
    assert shown(out.getvalue()) == ["[0] 50%"]
    forwarder.feed(0, "out", b"60%\r", 0)
    forwarder.feed(1, "out", b"line\n", 0)
    forwarder.tick(0)
    assert shown(out.getvalue()) == ["[1] line", "[0] 60%"]
    forwarder.feed(0, "out", b"70%\rdone\n", 0)
    forwarder.tick(1)
    assert shown(out.getvalue()) == ["[1] line", "[0] done"]


def test_progress_that_begins_with_the_return_is_shown_too():
    out, _, forwarder = pair(terminal=True, same=True)
    forwarder.feed(0, "err", b"\r 10%", 0)
    assert forwarder.tick(0.1) is None
    assert shown(out.getvalue()) == ["[0]  10%"]
    forwarder.feed(0, "err", b"\r 20%", 0.11)
    assert forwarder.tick(0.11) == pytest.approx(0.1 + DRAW_S)
    assert shown(out.getvalue()) == ["[0]  10%"]
    assert forwarder.tick(0.2) is None
    assert shown(out.getvalue()) == ["[0]  20%"]
    forwarder.feed(0, "err", b"\r 30%\n", 0.4)
    forwarder.tick(0.5)
    assert shown(out.getvalue()) == ["[0]  30%"]


def test_bars_of_several_ranks_have_a_line_each():
    out, _, forwarder = pair(terminal=True, same=True)
    for percent in range(0, 100, 10):
        for rank in (3, 1, 0, 2):
            forwarder.feed(rank, "err", b"\r%3d%%" % (percent + rank), percent)
        forwarder.feed(1, "out", b"at %d\n" % percent, percent)
        forwarder.tick(percent)
        lines = shown(out.getvalue())
        assert lines == [
            *(f"[1] at {one}" for one in range(0, percent + 1, 10)),
            *(f"[{rank}] {percent + rank:3d}%" for rank in range(4)),
        ]
    forwarder.feed(2, "err", b"\r100%\n", 100)
    forwarder.tick(101)
    assert shown(out.getvalue())[-4:] == ["[2] 100%", "[0]  90%", "[1]  91%", "[3]  93%"]
    forwarder.finish()
    assert shown(out.getvalue())[-4:] == ["[2] 100%", "[3]  93%", "[1]  91%", "[0]  90%"]


def test_more_bars_than_fit_are_counted():
    out, _, forwarder = pair(terminal=True, same=True)
    for rank in range(64):
        forwarder.feed(rank, "err", b"\r 1%", 0)
    forwarder.show_status("waits")
    forwarder.tick(0)
    assert shown(out.getvalue()) == [*(f"[{rank}]  1%" for rank in range(11)), "syncvar: waits"]
    forwarder.show_status("")
    forwarder.tick(1)
    assert shown(out.getvalue())[-1] == "... and 53 more lines"


def test_a_bar_that_is_wider_than_the_terminal_takes_one_line():
    out, _, forwarder = pair(terminal=True, same=True)
    for step in range(3):
        for rank in range(2):
            forwarder.feed(rank, "err", b"\r%d" % step + b"=" * 500, step)
        forwarder.tick(step)
        lines = shown(out.getvalue())
        assert [line[:6] for line in lines] == [f"[0] {step}=", f"[1] {step}="]


@pytest.mark.parametrize("clear", [b"\r   \r", b"\r\x1b[K", b"\r\x1b[2K"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_that_its_program_clears_is_gone(clear, terminal):
    out, _, forwarder = pair(terminal=terminal, same=True)
    forwarder.feed(0, "err", b"\r 10%\r 20%", 0)
    forwarder.feed(0, "err", clear, 0)
    forwarder.tick(1)
    assert shown(out.getvalue()) == []
    forwarder.finish()
    assert shown(out.getvalue()) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("terminal", [True, False])
def test_nested_bars_stand_below_each_other(size, terminal):
    out, _, forwarder = pair(terminal=terminal, same=True)
    now = 0.0

    def write(data):
        nonlocal now
        for start in range(0, len(data), size):
            forwarder.feed(0, "err", data[start : start + size], now)
            now += 0.001
        now += 1.0
        forwarder.tick(now)
        return shown(out.getvalue())

    live = terminal
    outer, inner = ["[0] outer 0"] * live, ["[0] inner 7"] * live
    assert write(b"\router 0\n\rinner 1\x1b[A\n\n\rinmost\x1b[A\x1b[A\n\rinner 7\x1b[A") == [
        *outer,
        *inner,
        *["[0] inmost"] * live,
    ]
    assert write(b"\n\n\r      \r\x1b[A\x1b[A") == [*outer, *inner]
    assert write(b"\r       \rtext\n\router 0") == ["[0] text", *outer]
    assert write(b"a log\n\n\rinner 9\x1b[A\router 1") == [
        *["[0] text", "[0] outer 0a log"],
        *["[0] outer 1", "[0] inner 9"] * live,
    ]
    assert write(b"\nend\n")[-2:] == ["[0] outer 1", "[0] end"]


def test_a_dumb_terminal_gets_the_last_state():
    out = io.BytesIO()
    sink = Sink(out, is_terminal=True, is_dumb=True)
    forwarder = OutputForwarder(sink, sink)
    for percent in range(10):
        forwarder.feed(0, "err", b"\r%d%%" % percent, 0)
        forwarder.tick(percent / 100)
    forwarder.show_status("waits")
    forwarder.feed(0, "out", b"name? ", 1)
    forwarder.tick(2)
    forwarder.feed(0, "err", b"\n", 2)
    forwarder.finish()
    assert out.getvalue() == b"[0] name? \n[0] 9%\n[0] name? \n"


def test_a_prompt_takes_the_place_of_the_bars_until_its_line_ends():
    out, _, forwarder = pair(terminal=True, same=True)
    forwarder.feed(1, "err", b"\r 10%", 0)
    forwarder.feed(0, "out", b"name? ", 0)
    forwarder.tick(1)
    assert shown(out.getvalue()) == ["[0] name?"]
    forwarder.feed(1, "err", b"\r 20%", 1)
    forwarder.tick(2)
    assert shown(out.getvalue()) == ["[0] name?"]
    forwarder.feed(0, "out", b"Bob\n", 3)
    forwarder.tick(3)
    assert shown(out.getvalue()) == ["[0] name? Bob", "[1]  20%"]


def test_of_progress_in_a_file_the_last_state_stands():
    out, _, forwarder = pair()
    forwarder.feed(0, "out", b"50%\r", 0)
    forwarder.feed(1, "out", b"other\n", 1)
    assert out.getvalue() == b"[1] other\n"
    forwarder.feed(0, "out", b"\r60%\r\n", 2)
    assert forwarder.tick(2) == pytest.approx(2 + BELOW_S), "a bar may follow below"
    forwarder.tick(2 + BELOW_S)
    assert out.getvalue() == b"[1] other\n[0] 60%\n"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_progress_that_nothing_replaces_is_a_line_at_its_end(end):
    out, _, forwarder = pair()
    for percent in (b"\r 10%", b"\r 90%", b"\r100%\r", end):
        forwarder.feed(0, "out", percent, 0)
    forwarder.finish()
    assert out.getvalue() == b"[0] 100%\n"


def test_progress_that_lasts_is_a_line_every_ten_seconds():
    out, _, forwarder = pair()
    for second in range(35):
        forwarder.feed(0, "out", b"\rstep %d" % second, second)
    forwarder.finish()
    assert out.getvalue() == b"[0] step 10\n[0] step 20\n[0] step 30\n[0] step 34\n"
    assert forwarder.last_lines(0) == ("step 34",)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_end_of_two_bytes_may_come_in_two_pieces(terminal):
    out, _, forwarder = pair(terminal=terminal)
    forwarder.feed(0, "out", b"a\r", 0)
    forwarder.feed(0, "out", b"\nb\n", 0)
    assert out.getvalue() == b"[0] a\n[0] b\n"


def test_progress_at_the_end_stays_visible():
    out, _, forwarder = pair(terminal=True, same=True)
    forwarder.feed(0, "out", b"100%\r", 0)
    forwarder.tick(0)
    forwarder.finish()
    assert shown(out.getvalue()) == ["[0] 100%"]
    assert out.getvalue().endswith(b"\n")


def test_prompt_is_shown_when_idle_and_again_after_another_line():
    out, _, forwarder = pair(terminal=True)
    forwarder.feed(0, "out", b"name? ", 1.0)
    assert forwarder.tick(1.1) == pytest.approx(1.2)
    assert out.getvalue() == b""
    assert forwarder.tick(1.25) is None
    assert out.getvalue() == b"[0] name? "
    assert forwarder.tick(9.0) is None
    forwarder.feed(1, "out", b"x\n", 10.0)
    assert forwarder.tick(10.1) == pytest.approx(10.2)
    forwarder.tick(10.3)
    forwarder.feed(0, "out", b"Bob\n", 11.0)
    wipe = b"\r\x1b[K"
    assert out.getvalue() == b"[0] name? " + wipe + b"[1] x\n[0] name? " + wipe + b"[0] name? Bob\n"


def test_prompt_is_not_shown_in_a_file_or_when_not_forwarded():
    for keywords in ({}, {"terminal": True, "shown": frozenset()}):
        out, _, forwarder = pair(**keywords)
        forwarder.feed(0, "out", b"name? ", 0)
        assert forwarder.tick(5) is None
        assert out.getvalue() == b""


def test_standard_error_in_a_file_leaves_progress_on_the_terminal_alone():
    out, err = io.BytesIO(), io.BytesIO()
    forwarder = OutputForwarder(Sink(out, True), Sink(err))
    forwarder.feed(0, "out", b"50%\r", 0)
    forwarder.tick(0)
    forwarder.feed(1, "err", b"warning\n", 0)
    forwarder.feed(1, "out", b"x\n", 0)
    forwarder.tick(0)
    assert err.getvalue() == b"[1] warning\n"
    assert shown(out.getvalue()) == ["[1] x", "[0] 50%"]


def test_what_is_told_elsewhere_is_kept_from_the_sinks_and_not_from_files(tmp_path):
    _, err, forwarder = pair(log_dir=tmp_path)
    forwarder.conceal(1, "err", "Traceback\n\n  at \u00e4\nKeyError: 3\n")
    forwarder.feed(0, "err", b"Traceback\n", 0)
    forwarder.feed(1, "err", b"before\nTraceback\n\nof a thread\n  at \xc3", 0)
    forwarder.feed(1, "err", b"\xa4\nKeyError: 3\nTraceback\n", 0)
    assert err.getvalue().decode() == "[0] Traceback\n[1] before\n[1] of a thread\n[1] Traceback\n"
    assert forwarder.last_lines(1)[-2:] == ("KeyError: 3", "Traceback")
    forwarder.conceal(1, "err", "never written\n")
    forwarder.finish()
    assert (
        tmp_path / "rank-1.err"
    ).read_text() == "before\nTraceback\n\nof a thread\n  at \u00e4\nKeyError: 3\nTraceback\n"
    forwarder.begin("again")
    forwarder.feed(1, "err", b"never written\n", 0)
    assert err.getvalue().endswith(b"[1] never written\n"), "another start is another program"
    forwarder.finish()


@pytest.mark.parametrize("is_one", [True, False])
def test_whether_the_last_lines_of_a_rank_stand_above(is_one):
    _, _, forwarder = pair(is_one=is_one)
    assert not forwarder.stands_above(1), "it wrote nothing"
    forwarder.feed(0, "err", b"a\n", 0)
    forwarder.feed(1, "err", b"b\nc\n", 0)
    assert forwarder.stands_above(1)
    assert not forwarder.stands_above(0)
    forwarder.feed(0, "out", b"d\n", 0)
    assert forwarder.stands_above(1) is not is_one, "what goes elsewhere stands elsewhere"
    forwarder.feed(1, "err", b"e\n" * 50, 0)
    assert forwarder.stands_above(1)
    forwarder.feed(1, "out", b"f\n", 0)
    assert forwarder.stands_above(1) is is_one, "its last line went elsewhere"
    forwarder.feed(1, "err", b"without end", 0)
    assert not forwarder.stands_above(1)
    forwarder.finish()
    forwarder.write_text("words\n")
    assert not forwarder.stands_above(1)
    _, _, forwarder = pair(is_one=is_one, shown=frozenset([0]))
    forwarder.feed(1, "err", b"b\n", 0)
    assert not forwarder.stands_above(1), "nobody has seen it"


def test_text_of_the_launcher_stands_above_the_bars():
    out, _, forwarder = pair(terminal=True, same=True)
    forwarder.feed(0, "out", b"50%\r", 0)
    forwarder.tick(0)
    forwarder.write_text("syncvar: words\n")
    assert shown(out.getvalue()) == ["syncvar: words"]
    forwarder.tick(0)
    assert shown(out.getvalue()) == ["syncvar: words", "[0] 50%"]
    forwarder.clear_live_lines()
    assert shown(out.getvalue()) == ["syncvar: words"]


# Long lines, memory, last lines.


@pytest.mark.parametrize("piece", [1000, 1 << 20])
def test_long_lines_are_cut_into_marked_pieces_however_they_come(piece):
    out, _, forwarder = pair()
    line = b"x" * (2 * LINE_NBYTES + 5) + b"\nend\n"
    for start in range(0, len(line), piece):
        forwarder.feed(7, "out", line[start : start + piece], 0)
    full = b"x" * LINE_NBYTES
    assert out.getvalue() == b"[7] " + full + b"\n[7+] " + full + b"\n[7+] xxxxx\n[7] end\n"


def test_a_line_of_exactly_the_limit_is_not_cut():
    out, _, forwarder = pair()
    forwarder.feed(0, "out", b"x" * LINE_NBYTES, 0)
    forwarder.feed(0, "out", b"\n", 0)
    assert out.getvalue() == b"[0] " + b"x" * LINE_NBYTES + b"\n"


def test_characters_are_not_cut():
    out, _, forwarder = pair()
    text = "é€😀" * 5000
    forwarder.feed(0, "out", text.encode() + b"\n", 0)
    lines = out.getvalue().decode().splitlines()
    assert "".join(line.partition(" ")[2] for line in lines) == text


def test_memory_is_bounded_without_line_ends():
    _, _, forwarder = pair(shown=frozenset())
    for _ in range(200):
        forwarder.feed(0, "out", b"x" * 65536, 0)
    assert len(forwarder._source(0, "out").pending) <= LINE_NBYTES
    assert sum(map(len, forwarder.last_lines(0))) < 100_000


def test_last_lines_are_forty_of_both_streams_without_colours():
    _, _, forwarder = pair(shown=frozenset())
    for number in range(60):
        forwarder.feed(2, "out" if number % 2 else "err", b"\x1b[31m%d\x07\x1b[0m\n" % number, 0)
    forwarder.feed(2, "err", b"Segmentation fault", 0)
    lines = forwarder.last_lines(2)
    assert len(lines) == 40
    assert lines[:2] == ("21\\x07", "22\\x07")
    assert lines[-1] == "Segmentation fault"
    assert forwarder.last_lines(5) == ()


def test_progress_takes_one_of_the_last_lines():
    _, _, forwarder = pair()
    forwarder.feed(0, "err", b"loading\n" + b"".join(b"%d%%\r" % i for i in range(100)), 0)
    assert forwarder.last_lines(0) == ("loading", "99%")


# Sinks that fail.


def test_a_closed_pipe_sets_broken_and_ends_writing():
    out = Broken(errno.EPIPE)
    err = io.BytesIO()
    forwarder = OutputForwarder(Sink(out), Sink(err))
    forwarder.feed(0, "out", b"a\n", 0)
    forwarder.feed(0, "out", b"b\n", 0)
    forwarder.feed(0, "err", b"c\n", 0)
    assert forwarder.broken
    assert out.calls == 1
    assert err.getvalue() == b"[0] c\n"


def test_another_failure_of_standard_output_is_told_once():
    err = io.BytesIO()
    forwarder = OutputForwarder(Sink(Broken(errno.ENOSPC)), Sink(err))
    forwarder.feed(0, "out", b"a\n", 0)
    forwarder.feed(0, "out", b"b\n", 0)
    assert not forwarder.broken
    assert err.getvalue().decode().count("\n") == 1
    assert b"cannot write to the standard output: No space left" in err.getvalue()


def test_a_failing_standard_error_is_given_up():
    out = io.BytesIO()
    forwarder = OutputForwarder(Sink(out), Sink(Broken(errno.EPIPE)))
    forwarder.feed(0, "err", b"a\n", 0)
    forwarder.feed(0, "out", b"b\n", 0)
    assert not forwarder.broken
    assert out.getvalue() == b"[0] b\n"


# Files.


def test_files_hold_the_raw_bytes_and_nothing_of_an_earlier_job(tmp_path):
    folder = tmp_path / "a" / "logs"
    folder.mkdir(parents=True)
    (folder / "rank-1.err").write_bytes(b"old")
    _, _, forwarder = pair(log_dir=folder, shown=frozenset(), ranks=(0, 1))
    forwarder.feed(0, "out", b"a\x1b\r\nb\xff", 0)
    forwarder.finish()
    assert (folder / "rank-0.out").read_bytes() == b"a\x1b\r\nb\xff"
    assert sorted(item.name for item in folder.iterdir()) == [
        "rank-0.err",
        "rank-0.out",
        "rank-1.err",
        "rank-1.out",
    ]
    assert (folder / "rank-1.err").read_bytes() == b""


def test_a_full_disk_is_told_once_and_the_job_goes_on(tmp_path, monkeypatch):
    out, err, forwarder = pair(log_dir=tmp_path)

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("syncvar_launcher.io.output.os.write", full)
    for _ in range(3):
        forwarder.feed(0, "out", b"a\n", 0)
        forwarder.feed(1, "err", b"b\n", 0)
    forwarder.finish()
    assert out.getvalue() == b"[0] a\n" * 3
    text = err.getvalue().decode()
    assert text.count("syncvar:") == 1
    assert f"cannot write {tmp_path}/rank-0.out: No space left on device; the job goes on" in text


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "rank-0.out").symlink_to(victim)
    _, err, forwarder = pair(log_dir=folder)
    forwarder.feed(0, "out", b"a\n", 0)
    forwarder.finish()
    assert victim.read_bytes() == b"keep"
    assert b"cannot write" in err.getvalue()


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        pair(log_dir=tmp_path / "file" / "logs")


# Any bytes in any pieces.

_BYTES = st.lists(
    st.sampled_from(
        [
            b"a",
            b" ",
            b"[1] ",
            b"\n",
            b"\r",
            b"\r\n",
            b"\x1b[31m",
            b"\x00",
            b"\x9b",
            "é\u202e".encode(),
            b"\xe2",
            b"\t",
        ]
    )
    | st.binary(max_size=8),
    max_size=30,
).map(b"".join)


BLANK = re.compile(rb"(?:[ \t]|\x1b\[[0-9;:]*[mK])*")


def model(data, limit):
    """What the lines of a stream are, said another way: all at once."""
    ends = re.split(rb"(\r\n|\n|\r)", data)
    held, before = b"", b""
    for index in range(0, len(ends), 2):
        text = ends[index]
        end = ends[index + 1] if index + 1 < len(ends) else b""
        before, last = end, before
        if not text and end in (b"\r", b""):
            continue
        if not end and last == b"\r" and len(text) <= limit and BLANK.fullmatch(text):
            held = b""  # the program has cleared its progress
            continue
        pieces = []
        while len(text) > limit:
            cut = limit
            while cut > limit - 3 and text[cut] & 0xC0 == 0x80:
                cut -= 1
            if text[cut] & 0xC0 == 0x80:
                cut = limit
            pieces.append(text[:cut])
            text = text[cut:]
        lines = pieces if end == b"\r" else [*pieces, text or held]
        if end == b"\r" and BLANK.fullmatch(text):
            text = b""
        held = text if end == b"\r" else b""
        yield from [escape(line.decode("utf-8", "backslashreplace")) for line in lines]
    if held:
        yield escape(held.decode("utf-8", "backslashreplace"))


@given(
    # A program that moves the cursor up draws bars below each other: another test has these.
    streams=st.dictionaries(
        st.tuples(st.integers(0, 3), st.sampled_from(["out", "err"])),
        _BYTES.filter(lambda data: b"\x1b[A" not in data),
        min_size=1,
    ),
    pieces=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=60),
    limit=st.sampled_from([4, 16, 1000]),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_in_any_pieces_give_the_lines_of_each_rank(streams, pieces, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncvar_launcher.io.output.LINE_NBYTES", limit)
        out, err, forwarder = pair()
        left = dict(streams)
        order = list(left)
        for choice, size in [*pieces, *((index, 1 << 20) for index in range(len(order)))]:
            key = order[choice % len(order)]
            forwarder.feed(*key, left[key][:size], 0)
            left[key] = left[key][size:]
        forwarder.finish()
    for stream, sink in (("out", out), ("err", err)):
        text = sink.getvalue().decode()
        assert text == "" or text.endswith("\n")
        seen = {}
        for line in text.split("\n")[:-1]:
            rank, _, rest = line.partition(" ")
            seen.setdefault(int(rank.strip("[+]")), []).append(rest)
        for rank in range(4):
            assert seen.get(rank, []) == list(model(streams.get((rank, stream), b""), limit))


@given(
    streams=st.lists(
        st.lists(_BYTES | st.sampled_from([b"\x1b[A", b"\n\rb\x1b[A"])).map(b"".join),
        min_size=2,
        max_size=3,
    ),
    pieces=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_a_terminal_never_mixes_ranks_whatever_comes(streams, pieces):
    out, screen = io.BytesIO(), TerminalScreen(columns=400)
    sink = Sink(out, is_terminal=True)
    forwarder = OutputForwarder(sink, sink)
    now = 0.0
    left = list(streams)
    for choice, size, pause in [*pieces, *((index, 1 << 20, True) for index in range(len(left)))]:
        rank = choice % len(left)
        forwarder.feed(rank, "out", left[rank][:size], now)
        left[rank] = left[rank][size:]
        now += 0.3 if pause else 0.01
        forwarder.tick(now)
        screen.feed(out.getvalue())
        out.seek(0)
        out.truncate()
    forwarder.finish()
    screen.feed(out.getvalue())
    assert not out.getvalue() or out.getvalue().endswith((b"\n", b"\x1b[K", b"\x1b[J"))
    # Each line begins with its rank, at any time.
    for lines in screen.seen:
        for line in lines:
            assert re.match(r"\[[0-2]\]", line)
