"""The launcher's side of shared memory: what it says, whom it wakes and how fast, and F40: little or no /dev/shm, no memfd."""

import os
import re
import signal
import subprocess

import pytest

from tests.support.launching import check_bound

# Ranks that look at shared memory themselves, whatever the engine does with it.
FETCH = """
import os, sys, time
import probe
from syncvar.shm.fd_passing import fd_socket_path, fetch
from syncvar.shm.segment import SharedSegment
from syncvar.core.environment import RankEnvironment

me = RankEnvironment.from_mapping(os.environ)


def attached(generation=0):
    fd, reason = fetch(fd_socket_path(me.socket_directory), me.job_id, generation, me.local_rank, 10)
    probe.note("fetched", reason=reason)
    return SharedSegment.attach(fd, me.local_rank) if fd is not None else None
"""


# What it says.


def transport_line(launch, *options, workers=2, **more):
    job = launch("print(1)", workers=workers, options=["--dry-run", *options], **more)
    code = job.wait()
    assert code == 0, str(job)
    (line,) = [
        line for line in job.out.splitlines() if line.startswith("transport ") and ":" in line
    ]
    return line


def test_a_dry_run_says_what_would_serve(launch, tmp_path):
    assert (
        transport_line(launch)
        == "transport shared memory: shared memory (memfd), 1 TiB virtual; SYNCVAR_TRANSPORT=zmq turns it off"
    )
    small = {"SYNCVAR_SHM_BYTES": str(256 << 20)}
    assert "(memfd), 256 MiB virtual;" in transport_line(launch, env=small)
    asked = transport_line(launch, env={"SYNCVAR_TRANSPORT": "zmq"})
    assert asked == "transport zmq: SYNCVAR_TRANSPORT=zmq asks for it"
    (tmp_path / "zmq.toml").write_text('[runtime]\ntransport = "zmq"\n')
    in_file = transport_line(launch, config=tmp_path / "zmq.toml")
    assert in_file == 'transport zmq: transport = "zmq" in the file asks for it'
    assert transport_line(launch, workers=1) == "transport zmq: a single rank sends nothing"


def test_verbose_says_it_in_two_words(launch):
    job = launch("import syncvar as sv; sv.init()", options=["--verbose"])
    assert job.wait() == 0, str(job)
    assert re.search(r"\| 2 ranks on .* \| shared memory \(memfd\) \| ", job.report), str(job)
    zmq = launch(
        "import syncvar as sv; sv.init()", options=["--verbose"], env={"SYNCVAR_TRANSPORT": "zmq"}
    )
    assert zmq.wait() == 0, str(zmq)
    assert re.search(r"\| 2 ranks on .* \| unix sockets \| ", zmq.report), str(zmq)


def test_a_size_that_does_not_fit_is_a_wrong_setting(launch):
    job = launch("print(1)", workers=9, env={"SYNCVAR_SHM_BYTES": str(16 << 20)})
    assert job.wait() == 78, str(job)
    assert job.err == (
        "syncvar-launch: shm_bytes (16777216) is too small for 9 ranks on a host: they need at least 20971520 [SV-506]\n"
    )


SHARE = (
    FETCH
    + """
shm = attached()
probe.note("shm", cores=shm.usable_cores, ranks=shm.local_world_size, bytes=shm.shm_bytes)
"""
)


def test_ranks_fetch_what_was_asked_for(launch):
    job = launch(SHARE, workers=3, env={"SYNCVAR_SHM_BYTES": str(64 << 20)})
    assert job.wait() == 0, str(job)
    found = job.events("shm")
    assert [(event["ranks"], event["bytes"]) for event in found] == [(3, 64 << 20)] * 3
    assert {event["cores"] for event in found} <= set(range(1, len(os.sched_getaffinity(0)) + 1))


def test_there_is_none_where_sockets_are_asked_for(launch):
    job = launch(FETCH + "assert attached() is None", env={"SYNCVAR_TRANSPORT": "zmq"})
    assert job.wait() == 0, str(job)
    assert all("sends no shared memory" in event["reason"] for event in job.events("fetched"))


def test_an_address_space_that_is_too_small_is_served_by_sockets(launch):
    script = """
    import resource
    import probe
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    import numpy as np
    import syncvar as sv
    assert sv.all_reduce(np.ones(100_000)).sum() == 200_000
    """
    job = launch(script)
    assert job.wait() == 0, str(job)


# Whom it wakes.


WATCH = (
    FETCH
    + """
how = sys.argv[1]
shm = attached()
if me.rank == 1:
    probe.gate("ready")
    probe.note("inject")
    if how == "exit":
        os._exit(3)
    if how == "leave":
        os._exit(0)
    if how == "raise":
        raise ValueError("planted")
    time.sleep(60)
probe.open_gate("ready")
until = time.monotonic() + 50
while not shm.is_aborted:
    if time.monotonic() > until:
        raise SystemExit("nobody said anything")
probe.note("aborted")
"""
)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("exit", marks=pytest.mark.slow),
        "leave",
        "raise",
        "SEGV",
        pytest.param("STOP", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_told_in_the_shm(launch, how):
    job = launch(WATCH, arguments=[how])
    (injected,) = job.await_events("inject", rank=1)
    at = injected["at"]
    if how.isupper():
        at = job.kill_rank(1, getattr(signal, f"SIG{how}"))
    (aborted,) = job.await_events("aborted", rank=0)
    allowed_s = 1.5 if how == "STOP" else 0.1
    check_bound(f"{how}: the abort word", aborted["at"] - at, allowed_s)
    job.wait()


def test_an_orderly_end_wakes_nobody(launch):
    script = (
        FETCH
        + """
shm = attached()
if me.rank == 1:
    raise SystemExit(0)
time.sleep(0.5)
probe.note("end", aborted=shm.is_aborted)
"""
    )
    job = launch(script)
    assert job.wait() == 0, str(job)
    assert [event["aborted"] for event in job.events("end")] == [False]


BREAK = (
    FETCH
    + """
import syncvar as sv

sv.init()
shm = attached()
assert not shm.is_aborted
if me.rank == 1:
    try:
        sv.all_reduce(1, timeout=0.3)
    except sv.DeadlineExceeded:
        pass
    probe.note("broke")
until = time.monotonic() + 50
while not shm.is_aborted and time.monotonic() < until:
    time.sleep(0.001)
probe.note("aborted", aborted=shm.is_aborted)
"""
)


def test_a_break_that_a_rank_reports_is_told_in_the_shm(launch):
    job = launch(BREAK)
    job.wait()
    (broke,) = job.events("broke")
    aborted = job.events("aborted")
    assert [event["aborted"] for event in aborted] == [True, True], str(job)
    check_bound(
        "a reported break: the abort word", max(event["at"] for event in aborted) - broke["at"], 0.2
    )


ANEW = (
    FETCH
    + """
import syncvar as sv

generations = []
for generation in range(4):
    assert sv.all_reduce(1) == 2
    shm = attached(generation)
    generations.append(shm.generation)
    assert not shm.is_aborted
    shm.close()
    sv.shutdown()
probe.note("end", generations=generations, descriptors=len(os.listdir("/proc/self/fd")))
probe.gate("looked")
"""
)


def test_every_generation_has_an_shm_and_the_launcher_keeps_few(launch):
    job = launch(ANEW)
    ends = job.await_events("end", 2)
    assert [event["generations"] for event in ends] == [[0, 1, 2, 3]] * 2
    held = [
        os.readlink(f"/proc/{job.process.pid}/fd/{name}")
        for name in os.listdir(f"/proc/{job.process.pid}/fd")
    ]
    assert len([target for target in held if "syncvar-shm" in target]) == 1, held
    job.open_gate("looked")
    assert job.wait() == 0, str(job)


# F40.

REFUSE = """
import errno, os, sys

words = os.environ.get("REFUSE", "").split(",")


def refused(function, condition):
    def call(path, *arguments, **keywords):
        if condition(path):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **keywords)
    return call


if "memfd" in words:
    del os.memfd_create
if "shm" in words:
    os.open = refused(os.open, lambda path: str(path).startswith("/dev/shm/"))
if "directory" in words:
    os.open = refused(os.open, lambda path: "/syncvar-" in str(path))
"""

USE = (
    FETCH
    + """
import numpy as np
import syncvar as sv
from syncvar.core.errors import SharedMemoryFull

for count in (1, 1000, 100_000, 2_000_000):
    found = sv.all_reduce(np.arange(count, dtype=np.float32))
    assert np.array_equal(found, 2 * np.arange(count, dtype=np.float32))
strategy = sv.MirroredStrategy()
with strategy.scope():
    variable = sv.Variable(np.zeros(100_000), aggregation=sv.VariableAggregation.SUM)
for _ in range(5):
    strategy.run(lambda: variable.assign_add(np.ones(100_000)))
assert (variable.numpy() == 10).all()

words = ""
shm = attached()
if shm is not None and "fill" in sys.argv:  # until there is nothing left, and everything is touched
    sv.barrier()
    if me.rank == 0:
        arrays = []
        try:
            while len(arrays) < 200:
                arrays.append(shm.empty(1 << 20, np.uint8))
                arrays[-1][:] = 255
        except SharedMemoryFull as full:
            words = str(full)
        probe.note("filled", count=len(arrays), words=words)
        del arrays
        shm.release(shm.allocate(1))
    shm.close()
    sv.barrier()
    assert sv.all_reduce(np.ones(1000)).sum() == 2000
probe.note("end", status=open("/proc/self/status").read().split("ShmPnd")[0][:20])
"""
)


def namespace():
    """Return the start of a command line that has mounts of its own, or None where nobody may have them."""
    for flags in ("-m", "-rm"):
        trial = ["unshare", flags, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
        try:
            if subprocess.run(trial, capture_output=True, timeout=120, check=False).returncode == 0:
                return ["unshare", flags]
        except (OSError, subprocess.TimeoutExpired):
            return None
    return None


NAMESPACE = namespace()
NO_MEMFD = "memfd (Function not implemented)"

# Name: what is refused, the mount on /dev/shm, the sentence that is said.
WAYS = {
    "as it is": ("", "", None),
    "no memfd": ("memfd", "", f"shared memory: a file in /dev/shm instead of {NO_MEMFD}"),
    "no memfd and no /dev/shm": (
        "memfd,shm",
        "",
        f"shared memory: a file in the job's directory instead of {NO_MEMFD} or a file in /dev/shm (No such file or directory)",
    ),
    "nothing at all": (
        "memfd,shm,directory",
        "",
        (
            f"no shared memory, data go through unix sockets: it cannot be made: {NO_MEMFD}, a file in /dev/shm (No such file or "
            "directory), a file in the job's directory (No such file or directory)"
        ),
    ),
}
if NAMESPACE is not None:
    WAYS |= {
        "64 MiB": ("", "size=64m", None),
        "64 MiB, no memfd": ("memfd", "size=64m", WAYS["no memfd"][2]),
        "read-only, no memfd": (
            "memfd",
            "ro",
            f"shared memory: a file in the job's directory instead of {NO_MEMFD} or a file in /dev/shm (Read-only file system)",
        ),
        "no page at all, no memfd": (
            "memfd",
            "size=4k",
            f"shared memory: a file in the job's directory instead of {NO_MEMFD} or a file in /dev/shm (No space left on device)",
        ),
    }


def refusing(tmp_path, refused, mount):
    """Return environment and prefix of a launcher that lives with less."""
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "REFUSE": refused}
    prefix = (
        [*NAMESPACE, "sh", "-c", f'mount -t tmpfs -o {mount} tmpfs /dev/shm && exec "$@"', "sh"]
        if mount
        else []
    )
    return {"env": env, "prefix": prefix}


# What others cover too: most tests run as it is, and what a small /dev/shm adds to "no memfd" is a way of its own.
COVERED = {"as it is", "64 MiB", *(["no memfd"] if NAMESPACE is not None else [])}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way in COVERED else ()) for way in WAYS]
)
def test_f40_little_or_no_shared_memory(launch, tmp_path, way):
    refused, mount, sentence = WAYS[way]
    fill = ["fill"] if mount == "size=64m" and refused else []
    job = launch(USE, arguments=fill, **refusing(tmp_path, refused, mount))
    assert job.wait() == 0, str(job)
    assert len(job.events("end")) == 2, str(job)
    said = [line for line in job.report.splitlines() if "shared memory" in line]
    assert said == ([f"syncvar: {sentence}"] if sentence else []), str(job)
    if fill:
        (filled,) = job.events("filled")
        assert 10 < filled["count"] < 64, str(job)
        assert (
            "the system has no more room for it (the ranks of this host hold 6" in filled["words"]
        ), str(job)
        assert "raise the size of /dev/shm or the memory limit of the container" in filled["words"]


@pytest.mark.parametrize(
    ("refused", "line"),
    [
        (
            "memfd",
            "transport shared memory: shared memory (a file in /dev/shm), 1 TiB virtual; SYNCVAR_TRANSPORT=zmq turns it off",
        ),
        (
            "memfd,shm,directory",
            "transport zmq: unix sockets; no shared memory because it cannot be made: memfd (",
        ),
    ],
)
def test_f40_a_dry_run_says_it(launch, tmp_path, refused, line):
    assert transport_line(launch, **refusing(tmp_path, refused, "")).startswith(line)


def test_the_kill_of_a_rank_is_seen_within_milliseconds(launch):
    job = launch(WATCH, arguments=["KILL"])
    job.await_events("inject", rank=1)
    at = job.kill_rank(1)
    took_s = job.await_events("aborted", rank=0)[0]["at"] - at
    check_bound("from SIGKILL to the abort word", took_s, 0.05)
    job.wait()


READ = """
import os
import signal
import threading

import numpy as np

import syncvar as sv

sv.init()
x, part = np.full(4 << 20, sv.rank(), np.float32), np.full(1 << 20, sv.rank(), np.float32)
calls = 0
try:
    while True:
        if calls == 1 and sv.rank() == 0:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        assert (sv.broadcast(x) == 0).all()
        assert (sv.all_gather(part).reshape(sv.world_size(), -1) == np.arange(sv.world_size())[:, None]).all()
        calls += 1
except sv.PeerLost as error:
    print(f"{calls} calls, then {error}", flush=True)
    raise
"""


def test_a_rank_that_is_killed_while_others_read_its_memory(launch):
    job = launch(READ, workers=3)
    assert job.wait() == 128 + signal.SIGKILL, str(job)
    assert (
        len(re.findall(r"\[[12]\] [1-9]\d* calls, then rank 0 on \S+ was lost: signal 9", job.out))
        == 2
    ), str(job)
