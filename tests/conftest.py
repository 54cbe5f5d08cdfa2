"""No test leaves anything behind: children, descriptors, threads, socket files, job folders, shared-memory names.

The check runs after the fixtures of a test have been torn down. What is still ending gets SETTLE_S seconds; after that
the test fails, and what it left is removed so that the next test starts clean.

Processes that a test started, directly or through a launcher, are known by a mark in their environment. Only processes
that appeared during the test are looked at, so that the check costs a pure test less than a millisecond.
"""

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

collect_ignore_glob = [
    "*/conftest.py",  # two modules of one name cannot both be searched for doctests, and have none
    "*/rank_scripts/*",  # programs of ranks
    "*/mpi4py_programs/*",
]

MARK = "SYNCVAR_TEST_MARK"
SETTLE_S = 20.0
AGAIN_S = 20.0
EXEC_S = 2.0
SLOW_S = 600.0

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "syncvar-"  # of the names that the library makes there
_KERNEL_THREAD = 0x00200000
_BARE = set()  # processes that have no environment
_LIMIT = pytest.StashKey()
_BEFORE = (
    pytest.StashKey()
)  # what variables were, and the folders that they name while the tests run


# How long an example takes, or is drawn, says nothing here: another process of tests may have the core meanwhile. The
# examples are the same in each run: a change fails for what it does. `.ci/nightly` looks for new ones.
settings.register_profile(
    "shared",
    deadline=None,
    database=None,
    derandomize=not os.environ.get("SYNCVAR_TEST_RANDOM"),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared")


def pytest_configure(config):
    # A script that starts the tests in the background makes them ignore SIGINT and SIGQUIT, nohup SIGHUP, and all their
    # processes would inherit it: what tests see of Ctrl-C or a hangup must not depend on that. Handlers are not
    # inherited, so a hangup still does not end the tests that nohup has started, and means to a job what it always does.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    config.stash[_BEFORE] = {}
    config.syncvar_left_out = []  # in words, by the conftest of a folder whose tests need what is not there
    # Short, because paths of unix sockets are limited to 107 bytes; private, because jobs keep their sockets in it.
    runtime_parent = os.environ.get("SYNCVAR_TEST_RUNTIME", "/tmp")
    config.syncvar_runtime = _folder_of_the_run(config, "XDG_RUNTIME_DIR", "sv-", runtime_parent)
    _folder_of_the_run(
        config, "XDG_STATE_HOME", "sv-state-"
    )  # records of jobs that fail stay out of this user's home
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        # Each of thousands of processes would compile all that it imports, for a third of its time; they share it here.
        _folder_of_the_run(config, "PYTHONPYCACHEPREFIX", "sv-code-")
        config.stash[_BEFORE]["PYTHONDONTWRITEBYTECODE"] = (
            os.environ.pop("PYTHONDONTWRITEBYTECODE"),
            None,
        )


def _folder_of_the_run(config, variable, prefix, parent=None):
    """Make a folder that lasts as long as this run, and name it in the environment."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    config.stash[_BEFORE][variable] = os.environ.get(variable), folder
    os.environ[variable] = folder
    return folder


def pytest_collection_modifyitems(config, items):
    """Give slow and nightly tests the time that they may need beside other programs; the default limit is for the others.

    Without the C extension or Chromium, leave out what needs it, and say why.
    """
    for item in items:
        is_long = any(item.get_closest_marker(name) for name in ("slow", "nightly"))
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    _leave_out(config, items, "needs_c_extension", "the C extension", _why_no_c_extension)
    _leave_out(config, items, "browser", "pages in a browser", _why_no_browser)


def _leave_out(config, items, marker, subject, reason):
    """Deselect the tests with a marker if there is a reason."""
    own = [item for item in items if item.get_closest_marker(marker)]
    if own and (why := reason()):
        config.syncvar_left_out.append(f"{len(own)} tests of {subject} were left out: {why}")
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]


def _why_no_c_extension():
    from syncvar import _native

    return _native.missing_reason()


def _why_no_browser():
    from tests.support.chromium_pages import CHROMIUM

    return "" if CHROMIUM else "there is no Chromium (apt install chromium)"


def pytest_collection_finish():
    leave_alone_what_stays()


def leave_alone_what_stays():
    """Let the collector pass over what is there for good: thousands of collected tests, modules, reports of tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Ring more than once: what still waits after the failure, a `with` for instance, is interrupted too."""
    done = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
        item.stash[_LIMIT] = settings
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Set the timer anew: pytest-timeout stops it at a failure, and the fixtures would have no limit."""
    if _LIMIT in item.stash:
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[_LIMIT])


def pytest_sessionfinish(session):
    """Hand on what a process of tests has left out: the one that started it tells."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.syncvar_left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take in what a process of tests has left out; all of them leave out the same."""
    for line in getattr(node, "workeroutput", {}).get("left_out", []):
        if line not in node.config.syncvar_left_out:
            node.config.syncvar_left_out.append(line)


def pytest_terminal_summary(terminalreporter, config):
    """Say which tests were left out, and why."""
    for line in config.syncvar_left_out:
        terminalreporter.write_line(line)


def pytest_unconfigure(config):
    for variable, (before, folder) in config.stash.get(_BEFORE, {}).items():
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


def _text(path):
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""


def _children():
    """Return this process's children, those not yet waited for included."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        for pid in _text(f"/proc/self/task/{task}/children").split():
            found[int(pid)] = f"child process {pid} ({_text(f'/proc/{pid}/comm').strip()})"
    return found


def _descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(f"/proc/{os.getpid()}/fd"):
                found[int(name), target] = f"descriptor {name} -> {target}"
    return found


def _threads():
    """Return Python's threads, and those that libzmq starts without telling Python."""
    found = {thread.ident: f"thread {thread.name!r}" for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        comm = _text(f"/proc/self/task/{task}/comm").strip()
        if comm.startswith("ZMQ"):
            found["native", task] = f"thread {comm!r} of libzmq"
    return found


def _files(runtime):
    found = {}
    for folder, folders, files in os.walk(runtime):
        for name in folders + files:
            path = str(Path(folder, name))
            if path not in (f"{runtime}/syncvar", f"{runtime}/syncvar/.lock"):
                found[path] = f"file {path}"
    return found


def _shared_memory():
    """Return the files in the folder of shared memory: (name, device, inode) -> words."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(_SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                told = entry.stat(follow_symlinks=False)
                found[entry.name, told.st_dev, told.st_ino] = f"shared memory {entry.path}"
    return found


def _held(pid):
    """Return what a process has open or mapped, as (device, inode): a name may have been another when it was opened."""
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                told = os.stat(f"/proc/{pid}/fd/{number}")
                found.add((told.st_dev, told.st_ino))
    for line in _text(f"/proc/{pid}/maps").splitlines():
        device, inode = line.split(None, 5)[3:5]
        major, minor = (int(part, 16) for part in device.split(":"))
        found.add((os.makedev(major, minor), int(inode)))
    return found


def _processes():
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _environment(pid):
    """Return the environment of a process. In the middle of exec it has none yet, and its parent may have ended already."""
    until = time.monotonic() + EXEC_S
    while not (data := Path(f"/proc/{pid}/environ").read_bytes()) and pid not in _BARE:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) < 7 or fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
            break
        if time.monotonic() > until:
            _BARE.add(pid)
        time.sleep(0.001)
    return data


def _marked_processes(mark, known):
    """Return the processes, not in `known`, whose environment holds this mark: pid -> words."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for pid in _processes() - known - {os.getpid()}:
        with contextlib.suppress(OSError):
            if wanted in _environment(pid):
                words = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                found[pid] = f"process {pid} of this test: {words.strip()[:200]}"
    return found


class _Snapshot:
    """What there was before a test."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.mark = uuid.uuid4().hex
        self.processes = _processes()
        self.looks = [_children, _descriptors, _threads, lambda: _files(runtime)]
        self.before = [look() for look in self.looks]
        self.names = _shared_memory()

    def own_processes(self):
        """Return the processes that the test has started, children of children included: pid -> words."""
        return _marked_processes(self.mark, self.processes)

    def news(self):
        """Return what is there now and was not before, in words, by what it is."""
        found = {}
        for look, before in zip(self.looks, self.before, strict=True):
            found |= {words: key for key, words in look().items() if key not in before}
        own = self.own_processes()
        found |= {words: pid for pid, words in own.items()}
        return found | {words: name for name, words in self.shared_memory(own).items()}

    def shared_memory(self, own):
        """Return the new names of shared memory that are the test's.

        The system does not say who made a file. The test's are those that it or one of its processes has open or mapped,
        and those named as syncvar's that no other program has; what other programs of this machine make is theirs.
        """
        names = {key: words for key, words in _shared_memory().items() if key not in self.names}
        if not names:
            return names
        ours = set().union(*map(_held, {os.getpid(), *own}))
        theirs = set().union(*map(_held, _processes() - own.keys() - {os.getpid()}))
        return {
            key: words
            for key, words in names.items()
            if key[1:] in ours
            or (
                key[0].startswith(_PREFIX)
                and key[1:] not in theirs
                and os.path.lexists(f"{_SHARED_MEMORY}/{key[0]}")
            )
        }

    def left(self):
        """Return what stays after everything had time to end."""
        found = self.news()
        if not found:
            return found
        gc.collect()
        until, pause = time.monotonic() + SETTLE_S, 0.002
        while (found := self.news()) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(0.05, pause * 2)
        return found

    def clear(self):
        """End the processes of the test and remove its files."""
        before, own = self.before[0], self.own_processes()
        names = self.shared_memory(own)  # before its processes end: they tell whose it is
        for pid in {*own, *(_children().keys() - before.keys())}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
        for path in _files(self.runtime).keys() - self.before[3].keys():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path)
        for name, *_ in names:
            with contextlib.suppress(OSError):
                os.unlink(f"{_SHARED_MEMORY}/{name}")


@pytest.fixture(scope="module", autouse=True)
def collections_are_short():
    """Keep a collection of garbage as quick as in the first file: there are thousands of them."""
    leave_alone_what_stays()


@pytest.fixture(autouse=True)
def nothing_left_behind(pytestconfig):
    """Fail the test if it leaves anything behind. The value knows the processes of the test."""
    snapshot = _Snapshot(pytestconfig.syncvar_runtime)
    os.environ[MARK] = snapshot.mark
    yield snapshot
    left = snapshot.left()
    del os.environ[MARK]
    if left:
        snapshot.clear()
        pytest.fail(
            "the test left behind:\n" + "\n".join(f"  {words}" for words in left), pytrace=False
        )
