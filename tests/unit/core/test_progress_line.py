import contextlib
import io
import os
import threading

import pytest

from syncvar.core.progress_line import (
    VARIABLE,
    ProgressLine,
    can_move_cursor,
    is_watched,
    terminal_line,
    work_line,
)
from tests.support.terminal_screen import TerminalScreen


@contextlib.contextmanager
def standard_error(monkeypatch, term="xterm"):
    """Make the standard error a terminal; yields a function that returns what it shows."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    screen = TerminalScreen()

    def lines():
        with contextlib.suppress(BlockingIOError):
            screen.feed(os.read(ours, 65536))
        return screen.lines()

    with open(theirs, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", term)
        yield lines
    os.close(ours)


def test_a_line_changes_in_place_and_is_gone_at_the_end(monkeypatch):
    with standard_error(monkeypatch) as lines:
        line = terminal_line("auto", after_s=0.0)
        assert line.is_due()
        line.show("copying: 1 of 200 files")
        assert lines() == ["syncvar: copying: 1 of 200 files"]
        assert not line.is_due()
        assert 0 < line.due_s() <= 1
        line.show("2 of 3\n\x1b[31m")
        assert lines() == ["syncvar: 2 of 3??[31m"]
        line.close()
        line.close()
        assert lines() == []


def test_short_work_shows_nothing(monkeypatch):
    with standard_error(monkeypatch) as lines:
        with terminal_line("auto", after_s=3600.0) as line:
            assert not line.is_due()
            assert line.due_s() > 3000
        assert lines() == []


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_a_dumb_terminal_gets_nothing(monkeypatch, term):
    with standard_error(monkeypatch, term) as lines:
        line = terminal_line("auto", after_s=0.0)
        assert not line.is_due()
        assert line.due_s() == float("inf")
        line.show("text")
        line.close()
        assert lines() == []


def test_a_pipe_gets_nothing_unless_the_launcher_has_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delenv(VARIABLE, raising=False)
    work_line(0).show("text")
    assert stream.getvalue() == ""
    monkeypatch.setenv(VARIABLE, "on")
    work_line(1).show("text")
    assert stream.getvalue() == ""
    with work_line(0) as line:
        line.show("text")
    assert stream.getvalue() == "\rsyncvar: text\r             \r"


def test_the_setting_turns_it_off(monkeypatch):
    with standard_error(monkeypatch):
        assert is_watched("auto")
        assert not is_watched("off")
    monkeypatch.setattr("sys.stderr", None)
    assert not is_watched("auto")


def test_a_thread_shows_nothing(monkeypatch):
    found = []
    with standard_error(monkeypatch):
        thread = threading.Thread(target=lambda: found.append(terminal_line("on", 0.0).is_due()))
        thread.start()
        thread.join()
        assert found == [False]
        assert terminal_line("on", 0.0).is_due()


def test_a_closed_standard_error_changes_nothing(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    terminal_line("on", 0.0).show("text")


def test_a_line_without_a_writer_is_never_due():
    line = ProgressLine(None, after_s=0.0)
    assert not line.is_due()
    assert not can_move_cursor(io.StringIO(), {"TERM": "xterm"})
