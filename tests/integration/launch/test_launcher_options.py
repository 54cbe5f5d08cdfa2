"""Every option of the launcher, seen from outside: what ranks get, what is shown, what is written."""

import json
import os
import pty
import re
import select
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from syncvar_launcher.options.option_table import core_count
from tests.support.paths import PROFILE

CORES = sorted(os.sched_getaffinity(0))

ABOUT = """
import json, os, sys
import probe
probe.note("about", environ=dict(os.environ), argv=sys.argv, cwd=os.getcwd(), cores=sorted(os.sched_getaffinity(0)),
           stdin=sys.stdin.read(), path=sys.path[0], executable=sys.executable, session=os.getsid(0),
           descriptors={name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                        if os.path.exists(f"/proc/self/fd/{name}")})
"""


def about(job):
    assert job.wait() == 0, str(job)
    events = {event["rank"]: event for event in job.events("about")}
    assert set(events) == set(range(job.workers)), str(job)
    return events


def test_what_every_rank_gets(launch):
    job = launch(
        ABOUT,
        workers=2,
        arguments=["--lr", "0.1", "two words"],
        stdin=b"a line\n",
        env={"FROM_OUTSIDE": "5"},
        options=["--env", "OWN=a b", "--env", "FROM_OUTSIDE"],
    )
    for rank, event in about(job).items():
        environ = event["environ"]
        expected = {
            "SYNCVAR_RANK": str(rank),
            "SYNCVAR_WORLD_SIZE": "2",
            "SYNCVAR_LOCAL_RANK": str(rank),
            "SYNCVAR_LOCAL_WORLD_SIZE": "2",
            "SYNCVAR_HOST_INDEX": "0",
            "SYNCVAR_ROLE": "worker",
            "SYNCVAR_GENERATION": "0",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OWN": "a b",
            "FROM_OUTSIDE": "5",
            "SYNCVAR_LOST_AFTER_S": "4.0",
            "SYNCVAR_TERM_GRACE_S": "2.0",
        }
        assert {name: environ.get(name) for name in expected} == expected
        assert environ["SYNCVAR_RENDEZVOUS"].startswith("ipc:///"), "on one host only unix sockets"
        assert re.fullmatch("[0-9a-f]{32}", environ["SYNCVAR_JOB_ID"])
        assert "MASTER_ADDR" not in environ
        assert "SYNCVAR_STATUS_FD" not in environ, "the bootstrap keeps it to itself"
        threads = str(max(1, core_count() // 2))
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            assert environ[name] == os.environ.get(name, threads)
        assert event["argv"][1:] == ["--lr", "0.1", "two words"]
        assert event["stdin"] == ("a line\n" if rank == 0 else ""), "stdin belongs to rank 0"
        assert event["path"] == str(job.folder)
        assert event["executable"] == sys.executable
        assert event["session"] == event["pid"], "each rank leads a session"
        kinds = {
            target.partition(":")[0]
            for name, target in event["descriptors"].items()
            if int(name) > 2
        }
        assert "socket" not in kinds, "nothing of the launcher is inherited"
        if len(CORES) >= 2:
            assert (
                event["cores"] == CORES[rank * (len(CORES) // 2) : (rank + 1) * (len(CORES) // 2)]
            )


def test_what_a_rank_of_a_cleared_environment_gets(launch):
    leaks = {
        "LEAK": "1",
        "MY_TOKEN": "2",
        "PYTHONSTARTUP": "/nonexistent",
        "OWN_A": "3",
        "OWN_B": "4",
        "SYNCVAR_STALL_WARNING_S": "9",
    }
    options = ["--env-clear", "-x", "OWN_*", "-x", "MY_TOKEN", "-xPLAIN=5", "--fake-hosts", "2"]
    job = launch(
        ABOUT + "import syncvar as sv; assert sv.all_reduce(1) == 2\n", options=options, env=leaks
    )
    for event in about(job).values():
        environ = event["environ"]
        assert {name: environ.get(name) for name in ("OWN_A", "OWN_B", "MY_TOKEN", "PLAIN")} == {
            "OWN_A": "3",
            "OWN_B": "4",
            "MY_TOKEN": "2",
            "PLAIN": "5",
        }
        assert environ["PATH"] == os.environ["PATH"]
        assert float(environ["SYNCVAR_STALL_WARNING_S"]) == 9, "settings reach every rank"
        assert not {"LEAK", "PYTHONSTARTUP", "PYTEST_CURRENT_TEST"} & environ.keys()
    arguments = launch(ABOUT, options=[*options, "--dry-run"], env=leaks)
    assert arguments.wait() == 0, str(arguments)
    assert "OWN_A=3" in arguments.out, str(arguments)
    assert "MY_TOKEN='***'" in arguments.out, "shown, but for secrets"
    assert "LEAK" not in arguments.out


def test_torch_names(launch):
    job = launch(ABOUT, workers=2, options=["--torch-env"])
    first, second = (event["environ"] for event in about(job).values())
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert 1024 <= int(first["MASTER_PORT"]) < 65536


def test_own_blas_variables_and_no_binding(launch, tmp_path):
    (tmp_path / "there").mkdir()
    options = ["--bind", "none", "--env", "OMP_NUM_THREADS=7", "--cwd", str(tmp_path / "there")]
    job = launch(ABOUT, workers=2, options=options)
    for event in about(job).values():
        assert event["environ"]["OMP_NUM_THREADS"] == "7"
        assert event["cores"] == CORES
        assert event["cwd"] == str(tmp_path / "there")


def test_more_workers_than_cores_are_not_bound(launch):
    job = launch(ABOUT, workers=len(CORES) + 1)
    for event in about(job).values():
        assert event["cores"] == CORES
        assert event["environ"]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


WRITE = """
import sys, time
import probe
for line in range(3):
    print("out", line, "of", probe.RANK)
print("err of", probe.RANK, file=sys.stderr)
sys.stdout.write("progress 50 %\\rprogress 100 %\\r\\nlast, not ended")
sys.stdout.flush()
sys.stdout.buffer.write(b"\\xff\\xfe raw\\n")
if "fail" in sys.argv and probe.RANK == 1:
    raise ValueError("planted failure")
"""


def test_output_of_all_ranks(launch):
    job = launch(WRITE, workers=2)
    assert job.wait() == 0, str(job)
    for rank in (0, 1):
        lines = job.lines(rank)
        assert lines[:3] == [f"out {line} of {rank}" for line in range(3)], str(job)
        assert any("progress 100 %" in line for line in lines), str(job)
        assert job.lines(rank, job.err) == [f"err of {rank}"], str(job)
    assert all(re.match(r"\[[01]\] ", line) for line in re.split("[\r\n]+", job.out) if line), str(
        job
    )


def test_output_of_the_first_rank(launch):
    job = launch(WRITE, workers=2, options=["--output", "first"])
    assert job.wait() == 0, str(job)
    assert job.lines(0)[:1] == ["out 0 of 0"], str(job)
    assert job.lines(1) == [], str(job)


def test_output_of_some_ranks(launch, tmp_path):
    job = launch(
        WRITE,
        workers=4,
        options=["--output", "3,0", "--log-dir", str(tmp_path / "logs")],
        arguments=["fail"],
    )
    assert job.wait() == 1, str(job)
    for stream in (job.out, job.err):
        assert {line[:4] for line in stream.splitlines() if re.match(r"\[\d\] ", line)} == {
            "[0] ",
            "[3] ",
        }, str(job)
    assert "rank 1" in job.report, str(job)
    assert "ValueError: planted failure" in job.report, "a failure is shown whoever has it"
    assert (tmp_path / "logs" / "rank-1.out").read_bytes().startswith(b"out 0 of 1\n"), (
        "files hold the lines of all"
    )
    assert (tmp_path / "logs" / "rank-2.err").read_text() == "err of 2\n"


def test_output_of_the_failed_rank(launch):
    job = launch(WRITE, workers=2, options=["--output", "failed"], arguments=["fail"])
    assert job.wait() == 1, str(job)
    assert job.out == "", str(job)
    assert "ValueError: planted failure" in job.report, str(job)
    quiet = launch(WRITE, workers=2, options=["--output", "failed"])
    assert quiet.wait() == 0, str(quiet)
    assert (quiet.out, quiet.err) == ("", ""), str(quiet)


def test_no_output(launch):
    job = launch(WRITE, workers=2, options=["--output", "none"])
    assert job.wait() == 0, str(job)
    assert (job.out, job.err) == ("", ""), str(job)


def test_log_files(launch, tmp_path):
    job = launch(
        WRITE, workers=2, options=["--log-dir", str(tmp_path / "logs"), "--output", "none"]
    )
    assert job.wait() == 0, str(job)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "rank-0.err",
        "rank-0.out",
        "rank-1.err",
        "rank-1.out",
    ]
    text = (tmp_path / "logs" / "rank-1.out").read_bytes()
    assert text.startswith(b"out 0 of 1\nout 1 of 1\n"), text
    assert text.endswith(b"last, not ended\xff\xfe raw\n"), "raw bytes, as they were written"
    assert (tmp_path / "logs" / "rank-1.err").read_text() == "err of 1\n"


def test_log_files_of_an_earlier_job_are_not_left_beside_those_of_this_one(launch, tmp_path):
    earlier = ("rank-0.out", "rank-2.out", "rank-12.err", "server-0.err", "flight-rank2.json")
    others = ("notes.txt", "rank-2.out.gz", "rank-02.out", "server-0.log")
    for name in (*earlier, *others):
        (tmp_path / name).write_text("of an earlier job")
    job = launch(WRITE, workers=2, options=["--log-dir", str(tmp_path), "--output", "none"])
    assert job.wait() == 0, str(job)
    own = ("rank-0.err", "rank-0.out", "rank-1.err", "rank-1.out")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {*own, *others}
    assert "earlier" not in (tmp_path / "rank-0.out").read_text(errors="replace")


def test_timestamps(launch):
    job = launch(WRITE, workers=1, options=["--timestamps"])
    assert job.wait() == 0, str(job)
    assert re.match(r"\[0\] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} out 0 of 0\n", job.out), str(job)


def test_modules_and_commands(launch):
    job = launch(WRITE, workers=1)  # makes probe.py and script.py in its folder
    assert job.wait() == 0, str(job)
    module = launch(workers=2, target=["-m", "script"], options=["--cwd", str(job.folder)])
    assert module.wait() == 0, str(module)
    assert module.lines(1)[0] == "out 0 of 1", str(module)
    command = launch(
        workers=2, target=["--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE; exit $RANK"]
    )
    assert command.wait() == 1, str(command)
    assert command.lines(0) == ["rank 0 of 2"], str(command)
    assert command.lines(1) == ["rank 1 of 2"], str(command)
    missing = launch(workers=2, target=["--no-python", "no-such-command"])
    assert missing.wait() == 78, str(missing)
    assert "no-such-command" in missing.err, str(missing)
    assert "Traceback" not in missing.err, str(missing)


def test_a_dry_run_starts_nothing(launch, nothing_left_behind):
    job = launch(ABOUT, workers=3, options=["--dry-run"], arguments=["--lr", "1"], start="auto")
    assert job.wait() == 0, str(job)
    assert job.events() == [], str(job)
    assert not list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("syncvar/????????")), (
        "no directory was made"
    )
    assert nothing_left_behind.own_processes() == {}
    for words in (
        "SYNCVAR_RANK=0",
        "--lr 1",
        "script.py",
        "lost_after_s",
        "4 s",
        "OMP_NUM_THREADS",
    ):
        assert words in job.out, str(job)
    assert "\nworkers: forked: from one process that has imported NumPy and syncvar\n" in job.out, (
        str(job)
    )
    (job.folder / "features.py").write_text(
        "import os\nos.environ['NPY_DISABLE_CPU_FEATURES'] = 'AVX2'\n"
    )
    fresh = launch(target=[str(job.folder / "features.py")], options=["--dry-run"], start="auto")
    assert fresh.wait() == 0, str(fresh)
    assert "\nworkers: fresh processes: " in fresh.out, str(fresh)
    assert (
        " names NPY_DISABLE_CPU_FEATURES, which NumPy reads only when it is imported\n" in fresh.out
    ), str(fresh)


def test_wrong_options(launch):
    job = launch(WRITE, options=["--wrokers", "3"])
    assert job.wait() == 2, str(job)
    assert "--workers" in job.err, str(job)
    (job.folder / "wrong.toml").write_text("[launch]\nworkrs = 3\n")
    wrong = launch(WRITE, config=job.folder / "wrong.toml")
    assert wrong.wait() == 78, str(wrong)
    assert "workers" in wrong.err, str(wrong)
    assert wrong.events() == [], str(wrong)


LISTEN = """
import os
import numpy as np
import probe, syncvar as sv
sv.all_reduce(np.ones(100_000))
probe.note("ready")
probe.gate("go")
sv.all_reduce(1)
"""


def listening(pids):
    """Return the listening tcp sockets of processes, by the kernel's tables."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes], inodes


def test_private_directory_and_no_listening_port(launch, nothing_left_behind):
    before = os.umask(0)  # even so, nobody else may reach the sockets
    try:
        job = launch(LISTEN, workers=3, start="spawn")  # whose variables /proc tells
    finally:
        os.umask(before)
    job.await_events("ready", 3)
    processes = nothing_left_behind.own_processes()
    ports, inodes = listening(processes)
    assert len(processes) == 5, processes
    assert ports == []
    base = Path(os.environ["XDG_RUNTIME_DIR"], "syncvar")
    (folder,) = [path for path in base.iterdir() if path.is_dir()]
    for path in (base, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    sockets = [path for path in folder.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]
    assert len(sockets) >= 4, "the store and one of each rank"
    assert {stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in sockets} == {0}
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    bound = [row[7] for row in unix if row[6] in inodes and len(row) > 7]
    assert bound
    assert all(name.startswith(str(folder)) for name in bound), (
        "every socket of the job lies in the private directory"
    )
    arguments = " ".join(processes.values())
    job_id = next(event for event in [Path(f"/proc/{job.pids()[0]}/environ").read_bytes()]).split(
        b"SYNCVAR_JOB_ID="
    )[1][:32]
    assert job_id.decode() not in arguments, "no secret in a command line"
    job.open_gate("go")
    assert job.wait() == 0, str(job)
    assert not folder.exists()


DEBUGGED = """
import os
import probe, syncvar as sv
if sv.rank() == 1:
    value = 41
    breakpoint()
    print("after", value + 1, os.isatty(0))
assert sv.all_reduce(1) == 2
probe.note("done")
"""


def descendants(pid):
    """Return the ranks that a launcher has started and that have not ended."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"syncvar.bootstrap.worker_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_a_rank_with_the_terminal(tmp_path):
    from tests.support.launching import PROBE

    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "script.py").write_text(DEBUGGED)
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--config",
        str(PROFILE),
        "-n",
        "2",
        "--debug",
        "1",
        "script.py",
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(line[0], line)  # noqa: S606
    seen = b""

    def until(words, limit_s=60.0):
        nonlocal seen
        end = time.monotonic() + limit_s
        asked = False
        while words not in seen:
            if time.monotonic() > end and not asked:
                asked = True  # where the ranks stand: SIGABRT makes each print its stacks
                end += 3.0
                for rank in descendants(pid):
                    os.kill(rank, signal.SIGABRT)
            assert time.monotonic() < end, seen.decode(errors="replace")
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    seen += os.read(terminal, 4096)
                except OSError:
                    break
        return words in seen

    try:
        assert until(b"(Pdb) "), seen
        time.sleep(
            2.0
        )  # longer than every deadline of the profile that could end the wait of rank 0
        seen = b""
        os.write(terminal, b"p value\n")
        assert until(b"41"), seen
        os.write(terminal, b"c\n")
        assert until(b"after 42 True"), seen
        until(
            b"no such words"
        )  # reads on until the terminal is let go of: who writes to it waits for a reader
        ended, status = os.waitpid(pid, 0)
        pid = 0
        assert (ended > 0, os.waitstatus_to_exitcode(status)) == (True, 0), seen
    finally:
        os.close(terminal)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    notes = [
        json.loads(text)
        for path in tmp_path.glob("events-*")
        for text in path.read_text().splitlines()
    ]
    assert sorted(note["rank"] for note in notes if note["what"] == "done") == [0, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plain_python_program_is_a_world_of_one_or_more(launch, workers):
    job = launch(
        "import syncvar as sv; print(sv.rank(), sv.world_size(), int(sv.all_reduce(5)))",
        workers=workers,
    )
    assert job.wait() == 0, str(job)
    assert job.lines(0) == [f"0 {workers} {5 * workers}"], str(job)


CALLS = """
import numpy as np, syncvar as sv
for _ in range(3000):
    sv.all_reduce(np.ones(1))
for _ in range(5):
    sv.all_reduce(np.ones(1 << 12), "max")
    sv.barrier()
"""


def test_totals_of_all_calls(launch, tmp_path):
    job = launch(CALLS, options=["--stats"])
    assert job.wait() == 0, str(job)
    rows = {
        line.split()[0]: line.split() for line in job.report.splitlines() if line.startswith("  ")
    }
    assert rows["all_reduce(sum)"][1:8] == ["<=", "16", "B", "0,", "1", "3000", "23.4"], str(job)
    assert rows["all_reduce(max)"][1:8] == ["<=", "64", "KiB", "0,", "1", "5", "160"], str(job)
    hosts = launch(CALLS, options=[f"--stats={tmp_path / 'totals.json'}", "--fake-hosts", "2"])
    assert hosts.wait() == 0, str(hosts)
    told = json.loads((tmp_path / "totals.json").read_text())
    assert (told["workers"], told["missing"]) == (2, [])
    by_call = {row["call"]: row for row in told["rows"]}
    assert by_call["all_reduce(sum)"]["calls"] == 3000
    assert by_call["all_reduce(max)"]["nbytes"] == 5 * 8 << 12
    assert by_call["all_reduce(max)"]["busbw"] == by_call["all_reduce(max)"]["algbw"] > 0, (
        "the factor of two ranks is 1"
    )
    assert by_call["barrier"]["algbw"] is None


def test_a_launcher_that_another_launcher_has_started_several_times_says_so(launch):
    job = launch(
        "print('ran')", workers=1, env={"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    )
    assert job.wait() == 0, job
    assert "mpirun of Open MPI has started 2 processes, and each starts a job of its own" in job.err
