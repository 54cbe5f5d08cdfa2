"""What goes into `sv.run` and what comes out: refusals are one exception, and come before anything starts where they can."""

import linecache
import os
import signal
import subprocess
import threading
import traceback

import pytest

import syncvar as sv


class Own:
    """A value of a class of the program's own."""


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def with_a_lock():
    lock = threading.Lock()
    return lambda: lock


@pytest.mark.parametrize(
    "call",
    [
        lambda: sv.run(divmod, workers=1, args=(Own(), 1)),
        lambda: sv.run(divmod, workers=1, args=({"a": ["\ud800"]}, 1)),
        lambda: sv.run(divmod, workers=1, kwargs={"x": Own()}),
        lambda: sv.broadcast_object([Own()]),
        lambda: sv.all_gather_object({"k": "\ud800"}),
        lambda: sv.run(with_a_lock()),
    ],
    ids=["args", "text", "kwargs", "broadcast_object", "all_gather_object", "function"],
)
def test_a_refused_value_is_one_exception(call, nothing_starts):
    with pytest.raises(sv.ConfigError) as raised:
        call()
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback (most recent call last)") == 1, printed
    assert "During handling" not in printed


class Wrong(ValueError):
    """An exception of the program's own, that carries a value."""

    def __init__(self, rank):
        super().__init__(f"rank {rank} is wrong")
        self.rank = rank


def raises(error):
    if sv.rank() == 1:
        raise {"own": Wrong(1), "file": FileNotFoundError(2, "not there", "x.csv"), "exit": SystemExit(3)}[error]
    sv.barrier()


@pytest.mark.parametrize(("error", "kind"), [("own", Wrong), ("file", FileNotFoundError), ("exit", SystemExit)])
def test_the_cause_of_a_failure_is_the_exception_of_the_worker(error, kind):
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(raises, workers=2, args=(error,))
    cause = raised.value.__cause__
    assert type(cause) is kind
    assert raised.value.rank == 1
    assert getattr(cause, "rank", 1) == 1
    assert getattr(cause, "filename", None) == ("x.csv" if error == "file" else None)


def test_a_rank_that_is_killed_has_no_cause(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNCVAR_RESTART_DELAY_S", "0.01")
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(fails_then_dies, workers=1, max_restarts=1, args=(str(tmp_path / "began"),))
    assert raised.value.exit_code == 128 + signal.SIGKILL
    assert raised.value.__cause__ is None


def fails_then_dies(path):
    """Fail for a reason that may pass in the first start, and be killed in the second."""
    sv.barrier()
    if sv.restart_count() == 0:
        raise OSError(5, "an error that may pass")
    os.kill(os.getpid(), signal.SIGKILL)


def test_places_in_cells_keep_their_names(monkeypatch):
    name = "/tmp/ipykernel_1/2864.py"  # there is no such file: IPython keeps the source of cells in linecache
    source = "import syncvar as sv\ndef cell(x):\n    return 1 / x  # of the cell\n"
    monkeypatch.setitem(linecache.cache, name, (len(source), 1.0, source.splitlines(keepends=True), name))
    of_the_cell = {"__name__": "no_module"}
    exec(compile(source, name, "exec"), of_the_cell)
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(of_the_cell["cell"], workers=1, args=(0,))
    assert f'File "{name}", line 3, in cell\n      return 1 / x  # of the cell' in raised.value.last_lines
    assert "dynamic-code" not in str(raised.value)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
