"""Workers are forked by default: one that was is as one that was started afresh, begins and ends as it does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import await_true

FORK = ("--start-method", "fork")

WORLD = """
import atexit, gc, json, os, random, signal, sys, threading
import numpy as np
import probe
import syncvar as sv

def stream(one):
    return [one.name, one.mode, type(one.buffer).__name__, one.encoding, one.errors, one.line_buffering, one.write_through]

def told(handler):
    return handler.__name__ if callable(handler) and not isinstance(handler, signal.Handlers) else str(handler)

before = set(sys.modules)
sv.barrier()
sv.all_reduce(np.ones(3))
probe.note("loaded", names=sorted(set(sys.modules) - before))
sv.shutdown()
OWN = {"SYNCVAR_JOB_ID", "SYNCVAR_RENDEZVOUS", "SYNCVAR_HOST_DIRECTORY", "SYNCVAR_FLIGHT_DIR", "SYNCVAR_PROCESS"}
environ = {k: v for k, v in os.environ.items() if k not in OWN}
print(sys.stdin.read(), end="")
atexit.register(probe.note, "handler", code=len(sys.argv))
probe.note(
    "world", argv=sys.argv, path=sys.path, name=__name__, spec=str(__spec__), cwd=os.getcwd(), environ=environ,
    streams=[stream(one) for one in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)],
    signals=[told(signal.getsignal(n)) for n in sorted(signal.valid_signals())], mask=list(signal.pthread_sigmask(0, ())),
    leads=[os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], cores=sorted(os.sched_getaffinity(0)),
    threads=[one.name for one in threading.enumerate()], descriptors=len(os.listdir("/proc/self/fd")), main=sys.modules["__main__"].__name__,
    flags=str(sys.flags), umask=os.umask(0o22), collects=gc.isenabled(), product=float((np.ones((300, 300)) @ np.ones((300, 300)))[0, 0]),
)
probe.note("drawn", numbers=[random.random(), float(np.random.rand())], parent=os.getppid())
"""


def world(launch, how, **keywords):
    env = {"PYTHONUNBUFFERED": "1", "SYNCVAR_RESTART_DELAY_S": "7"}
    options = (
        "--start-method",
        how,
        "--env",
        "COLOUR=blue",
        "--env",
        "OPENBLAS_NUM_THREADS=2",
        "--bind",
        "cores",
    )
    job = launch(
        WORLD, arguments=["--lr", "0.1"], stdin=b"a line\n", options=options, env=env, **keywords
    )
    assert job.wait() == 0, str(job)
    assert job.lines(0) == ["a line"], str(job)
    assert len(job.events("handler")) == 2, str(job)
    if how == "fork":
        assert [event["names"] for event in job.events("loaded")] == [[], []], (
            "what the server does not import, each worker does"
        )
    assert {event["parent"] for event in job.events("drawn")} == {job.process.pid}, (
        "the launcher is the parent"
    )
    events = [job.events("world", rank)[0] for rank in range(2)]
    text = json.dumps(
        [
            {key: value for key, value in event.items() if key not in ("at", "pid")}
            for event in events
        ]
    )
    return json.loads(text.replace(str(job.folder), "FOLDER"))


def test_a_forked_worker_finds_what_a_fresh_one_finds(launch):
    forked, fresh = (world(launch, how) for how in ("fork", "spawn"))
    for rank in range(2):
        assert forked[rank] == fresh[rank]


def on_python_path(folder, text):
    """Return variables with which every interpreter runs a text when it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ).rstrip(os.pathsep)
    }


IN_SERVER = "import sys\nif 'syncvar.bootstrap.fork_server' in sys.orig_argv:\n"


def test_workers_draw_different_numbers(launch, tmp_path):
    env = on_python_path(
        tmp_path / "site", IN_SERVER + "    import numpy.random, random; numpy.random.rand()\n"
    )
    job = launch(WORLD, options=FORK, env=env)
    assert job.wait() == 0, str(job)
    drawn = [number for event in job.events("drawn") for number in event["numbers"]]
    assert len(set(drawn)) == 4, drawn


CARRIED = """
import importlib.util, os, sys, threading

before = [name for name in sys.modules if name.startswith(("numpy", "zmq", "syncvar.collectives", "syncvar.runtime", "syncvar.bootstrap.process", "syncvar._native"))]
os.environ.update(OPENBLAS_NUM_THREADS=sys.argv[1], OMP_NUM_THREADS="7")
asked = importlib.util.find_spec("numpy")
del os.environ["GOTO_NUM_THREADS"]
imports = [threading.Thread(target=importlib.import_module, args=(one,)) for one in ("numpy.linalg", "syncvar.collectives", "zmq", "numpy")]
for one in imports:
    one.start()
for one in imports:
    one.join()

import numpy as np
import probe
import syncvar as sv
from syncvar.bootstrap.preloaded_imports import openblas

x = np.linspace(0.0, 1.0, 160_000).reshape(400, 400)
importlib.import_module("numpy.fft")
probe.note("carried", before=before, origin=asked.origin == np.__spec__.origin == np.__file__, here=os.path.dirname(asked.submodule_search_locations[0]),
           threads=openblas().get_num_threads(), product=(x @ x).tobytes().hex()[:64], code=bool(asked.loader.get_code("numpy")),
           same=[sys.modules["numpy"] is np, sv.collectives is sys.modules["syncvar.collectives"], np.linalg is sys.modules["numpy.linalg"]])
assert sv.all_reduce(np.ones(3)).tolist() == [2.0] * 3
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_a_script_asks_for_before_it_imports_numpy(launch, threads):
    """Many imports at once, a look before the first: whatever comes first, each module is there once."""
    found = []
    for how in ("spawn", "fork"):
        job = launch(
            CARRIED,
            arguments=[str(threads)],
            start=how,
            options=("--bind", "none"),
            env={"GOTO_NUM_THREADS": "1"},
        )
        assert job.wait() == 0, str(job)
        found += [
            {name: value for name, value in one.items() if name not in ("at", "pid", "rank")}
            for one in job.events("carried")
        ]
    assert len(found) == 4
    assert found[1:] == found[:1] * 3
    cores = len(os.sched_getaffinity(0))
    assert found[0]["threads"] == min(threads, cores)
    assert found[0]["same"] == [True] * 3
    assert found[0]["before"] == [], "nothing of it is in sight"


ELSEWHERE = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "other"))
import numpy
print(numpy.MARK, "zmq" in sys.modules)
"""
LATE = """
import settings
import numpy, syncvar as sv
print(int(sv.all_reduce(1)))
"""


def test_another_numpy_and_variables_that_come_too_late(launch, tmp_path):
    (tmp_path / "other" / "numpy").mkdir(parents=True)
    (tmp_path / "other" / "numpy" / "__init__.py").write_text("MARK = 'mine'\n")
    (tmp_path / "settings.py").write_text(
        "import os\nos.environ['NPY_DISABLE_CPU_FEATURES'] = 'AVX512F'\n"
    )
    for name, text in (("elsewhere.py", ELSEWHERE), ("late.py", LATE)):
        (tmp_path / name).write_text(text)
    elsewhere = launch(target=[str(tmp_path / "elsewhere.py")])
    late = launch(target=[str(tmp_path / "late.py")])
    assert elsewhere.wait() == 0, str(elsewhere)
    assert elsewhere.lines(0) == elsewhere.lines(1) == ["mine False"], str(elsewhere)
    assert late.wait() == 0, str(late)
    assert late.lines(0) == late.lines(1) == ["2"], str(late)
    assert "late.py:3: RuntimeWarning: NPY_DISABLE_CPU_FEATURES changed after NumPy" in late.err, (
        str(late)
    )
    assert "--start-method spawn" in late.err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "forked: from one process that has imported NumPy and syncvar"),
        (
            "    raise SystemExit(3)\n",
            "fresh processes: the process that workers are forked from exited with status 1 before it was ready",
        ),
        (
            "    import threading, time; threading.Thread(target=time.sleep, args=(60,), name='tick', daemon=True).start()\n",
            "fresh processes: the process that workers are forked from has threads (tick), which",
        ),
        (
            "    sys.modules['zmq'] = None\n",
            "fresh processes: importing NumPy and syncvar failed in the process that workers are forked from (ModuleNotFoundError: ",
        ),
    ],
    ids=["nothing against it", "the server ends", "it has threads", "it lacks a module"],
)
def test_how_workers_begin_by_default(launch, tmp_path, text, why):
    script = """
        import sys, syncvar as sv
        print("syncvar.bootstrap.fork_server" in sys.orig_argv, sv.all_reduce(1))
    """
    job = launch(
        script,
        start="auto",
        options=("-v",),
        env=on_python_path(tmp_path / "site", IN_SERVER + (text or "    pass\n")),
    )
    assert job.wait() == 0, str(job)
    assert f"syncvar: workers are {why}" in job.report, str(job)
    assert job.lines(0) == job.lines(1) == [f"{why.startswith('forked')} 2"], str(job)


BEGUN = """
import os, sys
import syncvar as sv
print(int(sv.all_reduce(1)), sys.flags.hash_randomization, os.environ.get("COLOUR"), os.environ.get("SYNCVAR_KEY"), len(sys.argv), sys.orig_argv[3:] == sys.argv)
"""


@pytest.mark.parametrize(
    ("options", "hashes", "colour"),
    [
        ((), 1, "blue"),
        (("-x", "COLOUR=red"), 1, "red"),
        (("-x", "PYTHONHASHSEED=0"), 0, "blue"),
        (("--env-clear",), 1, "None"),
    ],
    ids=["nothing", "one for scripts", "one for interpreters", "next to none"],
)
def test_a_server_started_ahead_has_what_one_started_later_has(launch, options, hashes, colour):
    """Whatever variables workers are given, and however long their command line is: what cannot be brought later starts another server."""
    job = launch(
        BEGUN,
        start="auto",
        options=options,
        arguments=map(str, range(40_000)),
        env={"COLOUR": "blue", "SYNCVAR_LOST_AFTER_S": "9", "PYTHONHASHSEED": "random"},
    )
    assert job.wait() == 0, str(job)
    assert job.lines(0) == job.lines(1) == [f"2 {hashes} {colour} None 40001 True"], str(job)


LAST = """
import atexit, sys, types
import numpy as np
import probe
import syncvar as sv

class Last:
    def __init__(self, name):
        self.name, self.me = name, self
    def __del__(self, write=sys.stdout.write):
        write(f"{self.name} goes\\n")

sv.all_reduce(1)
mine = sys.modules["mine"] = types.ModuleType("mine")
here = Last("of a cycle")
here_too = Last("of the script")
here_too.me = None
mine.here = Last("of a module")
mine.here.me = None
atexit.register(lambda: print("first", "numpy" in sys.modules, np.ones(2).sum()))
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_what_a_script_has_made_ends_with_it(launch, how):
    job = launch(LAST, options=("--start-method", how))
    assert job.wait() == 0, str(job)
    for rank in range(2):
        lines = job.lines(rank)
        assert lines[0] == "first True 2.0", str(job)
        assert set(lines[1:]) == {"of a cycle goes", "of the script goes", "of a module goes"}, str(
            job
        )


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_worker_that_is_killed_is_reported(launch, how):
    script = """
        import probe, syncvar as sv
        sv.all_reduce(1)
        probe.note("ready")
        probe.gate("never") if probe.RANK else probe.failure(sv.all_reduce, 1)
    """
    unhurried = {
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
        "SYNCVAR_ABORT_GRACE_S": "20",
    }  # rank 0 says what it saw, however late it gets a core
    job = launch(script, options=("--start-method", how), env=unhurried)
    job.await_events("ready", 2)
    job.kill_rank(1)
    assert job.wait() == 137, str(job)
    assert "rank 1 on" in job.report, str(job)
    assert "SIGKILL" in job.report, str(job)
    assert [event["error"] for event in job.events("raised")] == ["PeerLost"], str(job)


def test_a_restart_forks_again(launch):
    script = """
        import os, probe, syncvar as sv
        sv.all_reduce(1)
        if os.environ["SYNCVAR_RESTARTS"] == "0" and probe.RANK == 1:
            os.kill(os.getpid(), 9)
        print("sum", sv.all_reduce(probe.RANK), sv.all_reduce(1))
    """
    job = launch(
        script, options=(*FORK, "--max-restarts", "1"), env={"SYNCVAR_RESTART_DELAY_S": "0.1"}
    )
    assert job.wait() == 0, str(job)
    assert sorted(job.lines(0) + job.lines(1)) == ["sum 1 2"] * 2, str(job)
    assert len({event["pid"] for event in job.events("began")}) == 4, str(job)


SLEEPS = IN_SERVER + "    import time; open({ready!r}, 'w').close(); time.sleep(60)\n"


@pytest.mark.parametrize(
    "end", ["TERM", "two INT", pytest.param("timeout", marks=pytest.mark.slow), "kill"]
)
def test_the_end_comes_while_the_server_imports(launch, tmp_path, end, nothing_left_behind):
    ready = tmp_path / "ready"
    env = on_python_path(tmp_path / "site", SLEEPS.format(ready=str(ready)))
    limit = ("--timeout", "6") if end == "timeout" else ()
    job = launch("import probe", options=(*FORK, *limit), env=env)
    await_true(ready.exists, what="a server that imports")
    await_true(
        lambda: any(
            "process_sessions.py" in words for words in nothing_left_behind.own_processes().values()
        ),
        what="a guardian",
    )
    if end == "kill":
        job.process.kill()
        job.process.wait()
        await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of all processes")
        return
    for number in {"TERM": (signal.SIGTERM,), "two INT": (signal.SIGINT, signal.SIGINT)}.get(
        end, ()
    ):
        job.send(number)
    assert job.wait() == {"TERM": 143, "two INT": 130, "timeout": 124}[end], str(job)
    assert not job.events("began"), "no worker has begun"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("    raise SystemExit(3)\n", "exited with status"),
        ("    import os; os.kill(os.getpid(), 9)\n", "was killed by signal 9 (SIGKILL)"),
        (
            "    import threading, time; threading.Thread(target=time.sleep, args=(60,), name='tick', daemon=True).start()\n",
            "threads (tick)",
        ),
    ],
    ids=["fails", "is killed", "has threads"],
)
def test_a_server_that_cannot_fork(launch, tmp_path, text, words):
    job = launch(
        "import probe", options=FORK, env=on_python_path(tmp_path / "site", IN_SERVER + text)
    )
    assert job.wait() != 0, str(job)
    assert words in job.report, str(job)
    assert "--start-method spawn" in job.report, str(job)
    assert "syncvar: the job failed after" in job.report, "no rank is blamed, for none has begun"
    assert "rank 0 on" not in job.report, str(job)
    assert not job.events("began"), "no worker has begun"


def test_a_server_that_is_killed_while_it_forks_is_the_culprit(launch, tmp_path):
    """Workers that it has forked have not begun; they end, and none is blamed."""
    text = """
    import os
    forked = []
    def count():
        forked.append(1)
        if len(forked) == 2:
            os.kill(os.getpid(), 9)
    os.register_at_fork(after_in_parent=count)
"""
    job = launch(
        "import probe",
        workers=3,
        options=FORK,
        env=on_python_path(tmp_path / "site", IN_SERVER + text),
    )
    assert job.wait() == 137, str(job)
    words = "the process that workers are forked from was killed by signal 9 (SIGKILL) before all were forked"
    assert words in job.report, str(job)
    assert job.report.startswith("syncvar: the job failed after"), str(job)
    assert "rank 0 on" not in job.report, str(job)
    assert not job.events("began"), "no worker has begun"


def test_a_server_on_a_host_with_an_agent_that_is_killed_gives_the_same_code(launch, tmp_path):
    text = IN_SERVER + "    import os; os.kill(os.getpid(), 9)\n"
    path = on_python_path(tmp_path / "site", text)["PYTHONPATH"]
    options = (*FORK, "-H", "localhost:2", "--env", f"PYTHONPATH={path}")
    job = launch("import probe", options=options)
    assert job.wait() == 137, str(job)
    assert "the process that workers are forked from was killed by signal 9" in job.report, str(job)
    assert not job.events("began"), "no worker has begun"


def test_a_program_is_refused_before_anything_starts(tmp_path):
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "-n",
        "2",
        *FORK,
        "--no-python",
        "touch",
        "made",
    ]
    ended = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 78
    assert "--start-method fork: touch is a program" in ended.stderr
    assert "--start-method spawn" in ended.stderr
    assert not list(Path(tmp_path).iterdir())
