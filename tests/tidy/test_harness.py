"""The harness that finds what a test leaves behind, tested: leaks made on purpose must be told."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import TESTS

pytestmark = pytest.mark.slow

CONFTEST = TESTS / "conftest.py"

LEAKS = '''
import os, signal, socket, subprocess, sys, threading, time
import pytest

kept = []
OTHER = """
import os, sys
sys.stdin.readline()
file = open("/dev/shm/PREFIXof-others", "w")
print("made", flush=True)
sys.stdin.readline()
os.unlink(file.name)
"""
other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

SEMAPHORES = """
import sys, multiprocessing
sys.stdin.readline()
lock = multiprocessing.get_context("spawn").Lock()
print("sem." + lock._semlock.name.lstrip("/"), flush=True)
sys.stdin.readline()
"""
semaphores = subprocess.Popen([sys.executable, "-c", SEMAPHORES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def test_clean():
    kept.append([])

def test_thread():
    thread = threading.Thread(target=time.sleep, args=(600,), name="forgotten", daemon=True)
    thread.start()
    kept.append(thread)

def test_libzmq_thread():
    import zmq
    context = zmq.Context()
    context.socket(zmq.PUSH).close()
    kept.append(context)

def test_descriptor():
    kept.append(os.pipe())

def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_grandchild_in_its_own_session():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_zombie():
    pid = os.fork()
    if pid == 0:
        os._exit(0)

def test_socket_file():
    end = socket.socket(socket.AF_UNIX)
    end.bind(os.environ["XDG_RUNTIME_DIR"] + "/forgotten.sock")
    end.close()

def test_job_folder():
    os.makedirs(os.environ["XDG_RUNTIME_DIR"] + "/syncvar/12ab34cd")

def test_shared_memory():
    with open("/dev/shm/PREFIXforgotten", "w"):
        pass

def test_shared_memory_of_others():
    # Started before this test, so it is no process of it; it makes a name, keeps it open, and removes it when it ends.
    other.stdin.write(b"go\\n")
    other.stdin.flush()
    assert other.stdout.readline() == b"made\\n"
    assert "PREFIXof-others" in os.listdir("/dev/shm")

def test_semaphore_of_others():
    # A program that started before this test, as another program of this machine: its name does not tell that it is used.
    semaphores.stdin.write(b"go\\n")
    semaphores.stdin.flush()
    name = semaphores.stdout.readline().decode().strip()
    assert name.startswith("sem.mp-") and name in os.listdir("/dev/shm")

def test_semaphore_of_its_own():
    import multiprocessing
    kept.append(multiprocessing.get_context("spawn").Lock())

def test_slow_end():
    thread = threading.Thread(target=time.sleep, args=(0.1,))
    thread.start()

def test_interrupted():
    with subprocess.Popen(["sleep", "200"]) as child:
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT

@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_hung_up(number):
    os.kill(os.getpid(), number)  # does not end the tests, as nohup asked; their processes get it
    with subprocess.Popen(["sleep", "200"]) as child:
        child.send_signal(number)
        assert child.wait(60) == -number

@pytest.fixture
def does_not_end():
    yield
    time.sleep(600)

@pytest.mark.timeout(2, method="signal")
def test_stuck(does_not_end):
    threading.Event().wait(600)

def test_compiled():
    code = "import colorsys, sys; print(sys.pycache_prefix)"
    folder = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    names = [name for _, _, names in os.walk(folder) for name in names]
    assert [name for name in names if name.startswith("colorsys.")], "the next process need not compile it"
    print("FOLDER", folder)

def test_clean_again():
    assert not [name for name in os.listdir(os.environ["XDG_RUNTIME_DIR"]) if name != "syncvar"]
'''

CLEAN = {
    "test_clean",
    "test_compiled",
    "test_shared_memory_of_others",
    "test_semaphore_of_others",
    "test_slow_end",
    "test_interrupted",
    "test_hung_up",
    "test_clean_again",
}
IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # as under nohup in the background


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    shorter = CONFTEST.read_text().replace("SETTLE_S = 20.0", "SETTLE_S = 1.0")
    prefix = f"syncvar-test-{os.getpid()}-"  # another run of these tests has others
    (folder / "conftest.py").write_text(
        shorter.replace('_PREFIX = "syncvar-"', f'_PREFIX = "{prefix}"')
    )
    (folder / "test_leaks.py").write_text(LEAKS.replace("PREFIX", prefix))
    (folder / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", str(folder)]
    with (folder / "output").open(
        "w+"
    ) as output:  # no pipe: a leak that is missed would keep it open
        done = subprocess.run(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=400,
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in IGNORED],  # noqa: PLW1509
        )
        output.seek(0)
        done.stdout = output.read()
    return done


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_thread", r"thread 'forgotten'"),
        ("test_libzmq_thread", r"thread 'ZMQbg.*' of libzmq"),
        ("test_descriptor", r"descriptor \d+ -> pipe:"),
        ("test_child", r"child process \d+"),
        ("test_grandchild_in_its_own_session", r"process \d+ of this test: .*sleep"),
        ("test_zombie", r"child process \d+"),
        ("test_socket_file", r"file /tmp/sv-\w+/forgotten\.sock"),
        ("test_job_folder", r"file /tmp/sv-\w+/syncvar/12ab34cd"),
        ("test_shared_memory", r"shared memory /dev/shm/syncvar-test-\d+-forgotten"),
        ("test_semaphore_of_its_own", r"shared memory /dev/shm/sem\.mp-\w+"),
    ],
)
def test_a_leak_is_told(outcome, name, words):
    assert re.search(rf"^ERROR \S*::{name} - Failed: the test le", outcome.stdout, re.MULTILINE), (
        outcome.stdout
    )
    block = re.search(
        rf"ERROR at teardown of {name} _+\n(.*?)\n(___|===)", outcome.stdout, re.DOTALL
    )
    assert re.search(words, block[1]), block[1]


def test_tests_that_leave_nothing_pass(outcome):
    errors = set(re.findall(r"^ERROR \S*::(\w+)", outcome.stdout, re.MULTILINE))
    passed = set(re.findall(r"^PASSED \S*::(\w+)", outcome.stdout, re.MULTILINE))
    assert not errors & CLEAN
    assert passed >= CLEAN
    assert outcome.returncode == 1


def test_modules_that_processes_have_compiled_stay_out_of_the_tree_and_go_with_the_run(outcome):
    (folder,) = re.findall(r"FOLDER (/\S+/sv-code-\w+)", outcome.stdout)
    assert not Path(folder).exists()
    assert not list(Path(outcome.args[-1]).rglob("__pycache__"))


def test_a_test_that_is_stuck_fails_alone_and_its_fixtures_end_too(outcome):
    assert re.search(r"^FAILED \S*::test_stuck - Failed: Timeout", outcome.stdout, re.MULTILINE), (
        outcome.stdout
    )
    assert re.search(r"^ERROR \S*::test_stuck - Failed: Timeout", outcome.stdout, re.MULTILINE), (
        outcome.stdout
    )
    assert re.search(r"^PASSED \S*::test_clean_again", outcome.stdout, re.MULTILINE), outcome.stdout


LEAVES_OUT = """
def pytest_collection_modifyitems(config, items):
    config.syncvar_left_out.append("2 tests of nothing were left out: there is nothing")
    config.hook.pytest_deselected(items=items[1:])
    del items[1:]
"""


def test_what_is_left_out_is_told_by_the_process_that_started_the_others(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "conftest.py").write_text(LEAVES_OUT)
    (tmp_path / "few" / "test_few.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for options in ([], ["-n", "1"]):
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
            str(tmp_path),
        ]
        told = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )
        assert told.stdout.count("2 tests of nothing were left out: there is nothing") == 1, told
