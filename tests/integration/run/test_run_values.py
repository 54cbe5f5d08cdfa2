"""What goes into `sv.run` and what comes out.

Refusals are one exception, and come before anything starts where they can.
"""

import datetime as dt
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import zoneinfo

import pytest

import syncvar as sv
from tests.support.launching import LIMIT_S, await_true


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
        raise {
            "own": Wrong(1),
            "file": FileNotFoundError(2, "not there", "x.csv"),
            "exit": SystemExit(3),
        }[error]
    sv.barrier()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("own", Wrong),
        ("file", FileNotFoundError),
        pytest.param("exit", SystemExit, marks=pytest.mark.slow),
    ],
)
def test_the_cause_of_a_failure_is_the_exception_of_the_worker(error, kind):
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(raises, workers=2, args=(error,))
    cause = raised.value.__cause__
    assert type(cause) is kind
    assert raised.value.rank == 1
    assert getattr(cause, "rank", 1) == 1
    assert getattr(cause, "filename", None) == ("x.csv" if error == "file" else None)


@pytest.mark.slow
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
    name = "/tmp/ipykernel_1/2864.py"  # no file: IPython keeps the source of cells in linecache
    source = "import syncvar as sv\ndef cell(x):\n    return 1 / x  # of the cell\n"
    monkeypatch.setitem(
        linecache.cache, name, (len(source), 1.0, source.splitlines(keepends=True), name)
    )
    of_the_cell = {"__name__": "no_module"}
    exec(compile(source, name, "exec"), of_the_cell)
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(of_the_cell["cell"], workers=1, args=(0,))
    assert (
        f'File "{name}", line 3, in cell\n      return 1 / x  # of the cell'
        in raised.value.last_lines
    )
    assert "dynamic-code" not in str(raised.value)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


class Model:
    """A value that only cloudpickle takes: of a class of the program's own."""

    def __init__(self, weights):
        self.weights = weights

    def fit(self, by):
        return Model([one + by for one in self.weights])


def fitted(model, *, by):
    assert isinstance(model, Model)
    return {"model": model.fit(by + sv.rank()), "rank": sv.rank()}


def annotated() -> Model:
    return Model([])


def test_any_object_goes_in_and_comes_out_where_the_caller_says_so():
    results = sv.run(fitted, workers=2, args=(Model([1, 2]),), kwargs={"by": 10}, pickle=True)
    assert [type(one["model"]) for one in results] == [Model, Model]
    assert [one["model"].weights for one in results] == [[11, 12], [12, 13]]


class Shape(type):
    """A class of classes, as libraries of annotations have it."""


class Shaped(metaclass=Shape):
    """What stands in an annotation, and is no class of the value."""


def of_a_shape() -> Shaped:
    return 1


def test_an_annotation_that_is_no_plain_class_refuses_nothing():
    assert sv.run(of_a_shape) == [1]


@pytest.mark.slow
def test_models_of_a_library_come_back():
    from sklearn.linear_model import LinearRegression

    def train(x, y):
        return LinearRegression().fit(x, y)

    (model,) = sv.run(train, workers=1, args=([[0.0], [1.0]], [1.0, 3.0]), pickle=True)
    assert model.predict([[2.0]]).round(6).tolist() == [5.0]


SCRIPT = """
    import syncvar as sv
    class Own:
        def __init__(self, x): self.x = x
    def work(own):
        assert isinstance(own, Own), type(own)
        return Own(own.x + sv.rank())
    if __name__ == "__main__":
        for one in sv.run(work, workers=2, args=(Own(3),), pickle=True):
            assert isinstance(one, Own), type(one)
            print(one.x)
"""


@pytest.mark.parametrize(
    "line",
    [["script.py"], ["-m", "script"], pytest.param(["-c"], marks=pytest.mark.slow)],
    ids=["script", "module", "prompt"],
)
def test_classes_of_the_main_program_stay_themselves(line, tmp_path):
    text = textwrap.dedent(SCRIPT)
    (tmp_path / "script.py").write_text(text)
    line = [*line, text] if line == ["-c"] else line
    ended = subprocess.run(
        [sys.executable, *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "3\n4\n"), ended.stderr


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: sv.run(divmod, args=(1, Model(2))),
            r"args\[1\] is a .*Model, which cannot travel as plain data: write ",
        ),
        (
            lambda: sv.run(divmod, kwargs={"x": [Model(2)]}),
            r"kwargs\['x'\]\[0\] is a .*Model, which cannot travel",
        ),
        (
            lambda: sv.run(annotated),
            "the function returns a .*Model, as its annotation says, which cannot travel",
        ),
    ],
    ids=["args", "kwargs", "annotation"],
)
def test_the_refusal_names_the_remedy_before_anything_starts(call, words, nothing_starts):
    with pytest.raises(sv.ConfigError, match=words) as raised:
        call()
    assert str(raised.value).endswith("sv.run(..., pickle=True) [SV-101]")
    assert "\n" not in str(raised.value)


def test_what_cannot_be_pickled_is_refused_before_anything_starts(nothing_starts):
    words = "the arguments of the function cannot be pickled: TypeError: "
    with pytest.raises(sv.ConfigError, match=words):
        sv.run(divmod, args=(threading.Lock(), 1), pickle=True)


def test_a_result_that_cannot_travel_names_the_remedy():
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(Model, workers=1, args=(1,))
    words = "the result of the function on rank 0 cannot be returned: result is a "
    assert str(raised.value.__cause__).startswith(words)
    assert str(raised.value.__cause__).endswith("sv.run(..., pickle=True) [SV-101]")
    with pytest.raises(
        sv.RankFailed, match="the result of the function on rank 0 cannot be pickled"
    ):
        sv.run(threading.Lock, workers=1, pickle=True)


def test_dates_and_times_travel():
    zone = zoneinfo.ZoneInfo("Europe/Vienna")
    values = [
        dt.date(2024, 2, 29),
        dt.time(1, 2, 3, 4, dt.UTC),
        dt.timedelta(1, 2, 3),
        dt.datetime(2024, 3, 31, 2, 30, tzinfo=zone, fold=1),
    ]
    (back,) = sv.run(list, workers=1, args=(values,))
    assert back == values
    assert [type(one) for one in back] == [type(one) for one in values]


def outside(source, **variables):
    """Functions of a cell that use what is made in another one."""
    of_the_cell = {"__name__": "__main__", "sv": sv, **variables}
    exec(source, of_the_cell)
    return of_the_cell["cell"]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            lambda v: outside("def cell(): return w.numpy()", w=v),
            "'cell' uses 'w', a Variable that was made outside of it",
        ),
        (
            lambda v: outside("def cell(): return f()\ndef f(): return [w for _ in ' ']", w=v),
            "'cell' uses 'w', a Variable",
        ),
        (lambda v: outside("def cell(x=w): return x", w=v), "'cell' uses 'x', a Variable"),
        (
            lambda v: outside("def cell(): return (lambda: s.run(print))()", s=v.strategy),
            "'cell' uses 's', a MirroredStrategy",
        ),
        (lambda v: lambda: v, "uses 'v', a Variable"),
    ],
    ids=["global", "helper", "default", "strategy", "closure"],
)
def test_what_cannot_be_copied_is_named(cell, words, nothing_starts):
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        variable = sv.Variable([1.0])
    variable = types.SimpleNamespace(strategy=strategy) if "'s'" in words else variable
    with pytest.raises(sv.ConfigError) as raised:
        sv.run(cell(variable), workers=1)
    assert words in str(raised.value)
    assert str(raised.value).endswith(
        ": make strategies and variables inside the function [SV-101]"
    )


def test_a_lock_of_another_cell_is_named(nothing_starts):
    with pytest.raises(
        sv.ConfigError, match=r"'cell' uses 'lock', which cannot be copied .*: make it inside"
    ):
        sv.run(outside("def cell(): return lock", lock=threading.Lock()))


def shows_progress():
    for percent in range(8):
        sys.stderr.write(f"\r {percent}/8")
        sys.stderr.flush()
        time.sleep(0.02)
    sys.stderr.write("\r 8/8 done\n")
    return input("name? ")


def test_progress_is_one_line_and_input_says_that_there_is_no_terminal(capsys):
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(shows_progress, workers=1)
    assert isinstance(raised.value.__cause__, EOFError)
    assert str(raised.value.__cause__).startswith(
        "workers of sv.run have no terminal to read from: pass "
    )
    assert capsys.readouterr().err == "[0]  8/8 done\n"


WAITS = """
    import os, sys, time
    import syncvar as sv
    def work():
        sv.all_reduce(1)
        open(f"began-{sv.rank()}", "w").close()
        time.sleep(600)
    if __name__ == "__main__":
        sv.run(work, workers=2)  # of the caller
"""


def test_an_interrupt_shows_the_line_of_the_caller_only(tmp_path, nothing_left_behind):
    (tmp_path / "script.py").write_text(textwrap.dedent(WAITS))
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    await_true(
        lambda: len(list(tmp_path.glob("began-*"))) == 2, LIMIT_S, "two ranks that have begun"
    )
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=LIMIT_S)
    trace = printed[printed.index("Traceback") :]
    assert "sv.run(work, workers=2)  # of the caller" in trace
    assert trace.rstrip().endswith("KeyboardInterrupt")
    assert "subprocess.py" not in printed
    assert trace.count('File "') == 2, trace
    assert printed.count("Traceback") == 1
    await_true(lambda: not nothing_left_behind.own_processes(), what="the end of all processes")
