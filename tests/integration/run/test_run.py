"""`sv.run` from a script: wrong arguments start nothing, and a script that cannot be imported is told what to write."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import syncvar as sv
from tests.support.launching import await_true


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"args": 5},
            "args must be a tuple or list of positional arguments, such as args=(x,), not 5",
        ),
        ({"args": "ab"}, "args must be a tuple or list"),
        ({"kwargs": [1]}, "kwargs must be a dict of arguments by name"),
        ({"kwargs": {1: 2}}, "kwargs must be a dict of arguments by name"),
        ({"timeout": -1}, "timeout must be seconds above 0, or None for no limit, not -1"),
        ({"timeout": 0}, "timeout must be seconds above 0"),
        ({"timeout": "x"}, "timeout must be seconds above 0, or None for no limit, not 'x'"),
        ({"timeout": float("nan")}, "timeout must be seconds above 0"),
        ({"timeout": -(10**400)}, "timeout must be seconds above 0"),
        ({"timeout": True}, "timeout must be seconds above 0"),
    ],
    ids=str,
)
def test_wrong_arguments_start_nothing(arguments, words, monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(sv.ConfigError) as raised:
        sv.run(divmod, **arguments)
    assert words in str(raised.value)


def test_numbers_of_numpy_are_seconds():
    assert sv.run(divmod, workers=1, args=[7, 2], timeout=np.float32(60)) == [(3, 1)]
    assert sv.run(divmod, workers=1, args=(7, 2), timeout=10**400) == [(3, 1)]


def test_workers_of_a_program_may_inherit_next_to_nothing(monkeypatch):
    monkeypatch.setenv("SYNCVAR_LAUNCH_ENV_CLEAR", "1")
    monkeypatch.setenv("LEAK", "1")
    assert sv.run(os.getenv, workers=1, args=("LEAK",)) == [None]


def scripted(folder, text):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path):
    ended = scripted(
        tmp_path,
        """
        import syncvar as sv
        def work():
            return sv.rank()
        print(sv.run(work, workers=2))
        """,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("syncvar.core.errors.ConfigError: a worker that imported "), ended.stderr
    assert last.endswith(": put the call under if __name__ == '__main__': [SV-101]"), ended.stderr
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert "RankFailed" not in ended.stderr
    assert "syncvar: rank" not in ended.stderr, "nothing of a job in the job"
    assert "__syncvar_main__" not in ended.stderr


def test_a_function_under_the_guard_is_told_to_stand_above_it(tmp_path):
    ended = scripted(
        tmp_path,
        """
        import syncvar as sv
        if __name__ == "__main__":
            def nested():
                return sv.rank()
            print(sv.run(nested, workers=2))
        """,
    )
    assert ended.returncode == 1
    assert (
        f"a worker has imported {tmp_path}/script.py and found no 'nested' in it" in ended.stderr
    ), ended.stderr
    assert "define it at the top of the file, not under if __name__ == '__main__':" in ended.stderr


@pytest.mark.parametrize("how", ["auto", "spawn"])
def test_functions_and_methods_of_a_script_are_found(tmp_path, monkeypatch, how):
    monkeypatch.setenv("SYNCVAR_LAUNCH_START_METHOD", how)
    ended = scripted(
        tmp_path,
        """
        import syncvar as sv
        def work(x, *, y):
            return sv.rank() * 10 + x + y
        class Group:
            @staticmethod
            def work():
                return int(sv.all_reduce(1))
        if __name__ == "__main__":
            print(sv.run(work, workers=2, args=(1,), kwargs={"y": 2}), sv.run(Group.work, workers=2))
        """,
    )
    assert (ended.returncode, ended.stdout) == (0, "[3, 13] [2, 2]\n"), ended.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("syncvar")] == []


def test_a_caller_that_is_killed_leaves_no_folder(tmp_path, nothing_left_behind):
    script = """
        import os, time
        import syncvar as sv
        def work():
            sv.all_reduce(1)
            open(os.path.join(os.environ["TMPDIR"], f"began-{sv.rank()}"), "w").close()
            time.sleep(60)
        if __name__ == "__main__":
            sv.run(work, workers=2)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        await_true(
            lambda: len(list(tmp_path.glob("began-*"))) == 2, what="two ranks that have begun"
        )
        assert len(list(tmp_path.glob("syncvar-run-*"))) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(120)
    await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of all processes")
    assert not list(tmp_path.glob("syncvar-run-*"))
