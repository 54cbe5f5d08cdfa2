"""Processes that another launcher has started find each other by what it tells them."""

import json
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.support.launching import free_ports

SCRIPT = """
import os, signal, sys, time
import numpy as np
import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.runtime.arithmetic import gil_monitor
try:
    sv.init()
    total = sv.all_reduce(np.arange(3.0))
    print("met", sv.rank(), sv.world_size(), sv.local_rank(), sv.host_index(), sv.host_count(), total[2], current().transport, flush=True)
    if "idle" in sys.argv:
        begun = time.process_time()
        time.sleep(0.5)
        print("took", time.process_time() - begun, "beside busy threads:", gil_monitor.is_there(), flush=True)
        sv.barrier()
    if "late" in sys.argv and sv.rank() == 1:
        until = time.monotonic() + 60
        while 0 not in current().engine.book.left and time.monotonic() < until:
            time.sleep(0.01)
        raise ValueError("after rank 0 has left")
    if "again" in sys.argv:
        sv.shutdown()
        sv.init()
        print("again", sv.all_reduce(1), flush=True)
    if "kill" in sys.argv:
        if sv.rank() == 1:
            until = time.monotonic() + 60
            while "not entered it" not in open("out0").read() and time.monotonic() < until:
                time.sleep(0.01)  # late
            os.kill(os.getpid(), signal.SIGKILL)
        sv.barrier()
except sv.SyncvarError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


REFUSED = """
import sys, threading
import numpy as np
import syncvar as sv
entries = {
    "init": sv.init,
    "rank": sv.rank,
    "all_reduce": lambda: sv.all_reduce(np.ones(3)),
    "barrier": sv.barrier,
    "Variable": lambda: sv.Variable(np.zeros(3)),
    "MirroredStrategy": sv.MirroredStrategy,
}
for name, enter in entries.items():
    try:
        enter()
    except sv.ConfigError as error:
        print(name, "refused:", error, flush=True)
assert not sv.is_initialized() and threading.active_count() == 1
sv.init(alone=True)
sv.init()
assert sv.all_reduce(5) == 5
print("alone", sv.rank(), sv.world_size(), flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Start processes with the given environments; return their (exit code, output)."""
    running = []
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SYNCVAR_", "MASTER_"))
    }
    runtime = Path(tempfile.mkdtemp(prefix="sv"))  # short: socket files lie in it
    limits = {
        "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "60",
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
        "XDG_RUNTIME_DIR": str(runtime),
    }

    def begin(environments, *arguments, script=SCRIPT, descriptors=()):
        (tmp_path / "script.py").write_text(script)
        for environ in environments:
            line = [sys.executable, str(tmp_path / "script.py"), *arguments]
            with (tmp_path / f"out{len(running)}").open("wb") as out:
                running.append(
                    subprocess.Popen(
                        line,
                        stdout=out,
                        stderr=out,
                        cwd=tmp_path,
                        env=plain | limits | environ,
                        pass_fds=descriptors,
                    )
                )
        until = time.monotonic() + 120
        codes = [one.wait(max(0.1, until - time.monotonic())) for one in running]
        outputs = [(tmp_path / f"out{number}").read_text() for number in range(len(running))]
        assert not any(path.is_dir() for path in (runtime / "syncvar").glob("*")), (
            "private folders are removed"
        )
        return list(zip(codes, outputs, strict=True))

    yield begin
    for one in running:
        if one.poll() is None:
            one.kill()
        one.wait(120)
    shutil.rmtree(runtime)


def torch(rank, size, number, **more):
    named = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number}
    return {name: str(value) for name, value in (named | more).items()}


def test_torchruns_variables_on_one_host_share_memory(start):
    number = free_ports(2)
    told = [torch(rank, 3, number, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=3) for rank in (2, 1, 0)]
    for (code, out), rank in zip(start(told, "again"), (2, 1, 0), strict=True):
        assert code == 0, out
        assert out.startswith(f"met {rank} 3 {rank} 0 1 6.0 shared memory: 3 ranks")
        assert "again 3" in out


def test_several_hosts_meet_with_a_secret_and_are_refused_without(start):
    number, key = free_ports(2), secrets.token_hex(32)
    places = [(0, 2, 0), (1, 2, 0), (0, 1, 1)]  # local rank, ranks here, host
    told = [
        torch(
            rank,
            3,
            number,
            LOCAL_RANK=local,
            LOCAL_WORLD_SIZE=size,
            GROUP_RANK=host,
            GROUP_WORLD_SIZE=2,
        )
        for rank, (local, size, host) in enumerate(places)
    ]
    for code, out in start([one | {"SYNCVAR_KEY": key} for one in told]):
        assert code == 0, out
        assert "6.0" in out
        assert "tcp between 2 hosts" in out
        assert key not in out
    assert all(code == 3 and "SYNCVAR_KEY_FILE" in out for code, out in start(told)[3:])


def test_while_the_program_waits_nothing_else_runs(start):
    """A thread that does not wait takes core and interpreter from the calls: one between hosts took 20 times as long."""
    number, key = free_ports(2), secrets.token_hex(32)
    places = [(0, 2, 0), (1, 2, 0), (0, 1, 1)]  # local rank, ranks here, host
    told = [
        torch(
            rank,
            3,
            number,
            LOCAL_RANK=local,
            LOCAL_WORLD_SIZE=size,
            GROUP_RANK=host,
            GROUP_WORLD_SIZE=2,
        )
        | {"SYNCVAR_KEY": key}
        for rank, (local, size, host) in enumerate(places)
    ]
    for code, out in start(told, "idle"):
        assert code == 0, out
        # Seconds of processor time in half a second; on a busy machine each look takes longer.
        assert float(out.split("took")[1].split()[0]) < 0.15, out
        assert (
            "beside busy threads: False" in out
        )  # what serves the roll and shared memory is not what a call has to mind


def test_rank_0_does_not_wait_for_a_rank_of_another_host_that_has_failed(start):
    number, key = free_ports(2), secrets.token_hex(32)
    several = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 2}
    told = [
        torch(
            rank,
            2,
            number,
            **several,
            GROUP_RANK=rank,
            SYNCVAR_KEY=key,
            SYNCVAR_RENDEZVOUS_TIMEOUT_S=300,
        )
        for rank in range(2)
    ]
    (first, out), (second, error) = start(told, "late")
    assert (first, second) == (0, 1), (out, error)
    assert "after rank 0 has left" in error


SILENT = """
import os, signal, sys, threading, time
import syncvar as sv
rank = int(os.environ["RANK"])
def fall_silent():
    until = time.monotonic() + 60
    while "(joined: 2 of 3)" not in open("out0").read() and time.monotonic() < until:
        time.sleep(0.01)
    open("pid", "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    threading.Thread(target=fall_silent, daemon=True).start()
try:
    sv.init()
except sv.SyncvarError as error:
    print(type(error).__name__, error, flush=True)
    if rank == 0:
        os.kill(int(open("pid").read()), signal.SIGCONT)
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_rank_of_another_host_that_falls_silent_while_the_ranks_meet_is_lost_and_nobody_waits_for_it(
    start,
):
    """The third rank never comes; without signs of life the others would wait for as long as it may take."""
    number, key = free_ports(2), secrets.token_hex(32)
    limits = {
        "SYNCVAR_RENDEZVOUS_TIMEOUT_S": 300,
        "SYNCVAR_MISSING_REPORT_S": 0.2,
        "SYNCVAR_HEARTBEAT_INTERVAL_S": 0.1,
        "SYNCVAR_LOST_AFTER_S": 5,
        "SYNCVAR_SUSPECT_AFTER_S": 2,
    }
    told = [
        torch(
            rank,
            3,
            number,
            LOCAL_RANK=0,
            LOCAL_WORLD_SIZE=1,
            GROUP_RANK=rank,
            GROUP_WORLD_SIZE=3,
            SYNCVAR_KEY=key,
            **limits,
        )
        for rank in range(2)
    ]
    (first, out), (second, other) = start(told, script=SILENT)
    assert (first, second) == (3, 3), (out, other)
    assert "PeerLost rank 1 on" in out
    lasted = re.search(
        r"was lost: silent for (\S+) s: nothing came from it on its connection \(while the ranks met\)",
        out,
    )
    assert lasted, out
    assert 1.0 <= float(lasted[1]) <= 20.0, "what it says was silent is what was"
    assert re.search(r"PeerLost rank 0 was lost: .*\(while the ranks met\)", other), other


def places(size, hosts):
    """Return what ranks are told that are on one host together, or each on its own."""
    number, key = free_ports(2), secrets.token_hex(32)
    together = {"LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    apart = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": size, "SYNCVAR_KEY": key}
    return [
        torch(
            rank,
            size,
            number,
            **({"LOCAL_RANK": rank} | together if hosts == 1 else {"GROUP_RANK": rank} | apart),
        )
        for rank in range(size)
    ]


CUT = """
import os, signal, sys
import syncvar as sv
sv.init()
assert sv.all_reduce(1) == 2
if sv.rank() == 1:
    open("pid", "w").write(str(os.getpid()))
    sv.barrier()
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    sv.barrier()
try:
    sv.all_reduce(1)
except sv.SyncvarError as error:
    print(type(error).__name__, error, flush=True)
    if sv.rank() == 0:
        os.kill(int(open("pid").read()), signal.SIGCONT)
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_too_long_is_lost_and_the_text_says_for_how_long(start):
    limits = {
        "SYNCVAR_HEARTBEAT_INTERVAL_S": "0.1",
        "SYNCVAR_LOST_AFTER_S": "2",
        "SYNCVAR_SUSPECT_AFTER_S": "1",
        "SYNCVAR_HANDSHAKE_TIMEOUT_S": "0.3",
    }
    (first, out), _ = start(
        [one | limits for one in places(2, 2)], script=CUT
    )  # the other has what it needs when it wakes
    assert first == 3, out
    lasted = re.search(r"rank 1 on \S+ was lost: silent for (\S+) s: ", out)
    assert lasted, out
    assert 2.0 <= float(lasted[1]) <= 20.0, out


RAISING = """
import sys, time
import syncvar as sv
sv.init()
if sv.rank() == int(sys.argv[1]):
    sv.barrier()
    raise ValueError("step 7 has no data")
try:
    sv.barrier()  # another rank may leave it sooner, and raise
    sv.all_reduce(1)
except sv.PeerLost as error:
    print("PeerLost", error, flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("raising", "hosts"),
    [
        (0, 1),
        (1, 3),
        pytest.param(0, 3, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_is_lost_by_its_exception(start, raising, hosts):
    """No launcher sees it; a connection that is closed says nothing of why."""
    ended = start(places(3, hosts), str(raising), script=RAISING)
    assert "ValueError: step 7 has no data" in ended[raising][1]
    for rank, (code, out) in enumerate(ended):
        assert code == (1 if rank == raising else 70), out
        if rank != raising:
            assert re.search(
                rf"PeerLost rank {raising} on \S+ was lost: uncaught ValueError: step 7 has no data",
                out,
            ), out


def test_tf_config(start):
    first = free_ports(2)
    workers = [f"localhost:{first + index}" for index in range(2)]
    told = [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            )
        }
        for index in range(2)
    ]
    for code, out in start(told):
        assert code == 0, out
        assert "4.0 shared memory: 2 ranks" in out


def slurm(rank, host, local, sizes, **more):
    step = {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": sum(sizes),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, sizes)),
    }
    task = {
        "SLURM_PROCID": rank,
        "SLURM_NODEID": host,
        "SLURM_LOCALID": local,
        "SLURMD_NODENAME": f"n{host}.invalid",
    }
    return {name: str(value) for name, value in (step | task | more).items()}


def test_tasks_of_srun_on_several_hosts_meet_in_a_folder_that_all_have_without_a_secret_of_the_users(
    start, tmp_path
):
    """Two hosts play on this one: they have a folder, names and numbers of their own, and nothing else in common."""
    (tmp_path / ".syncvar").mkdir(mode=0o700)
    (tmp_path / ".syncvar" / "killed").mkdir()
    os.utime(tmp_path / ".syncvar" / "killed", (1e9, 1e9))  # a run that had not met, in 2001
    told = [
        slurm(*place, (2, 1), HOME=tmp_path, SYNCVAR_RENDEZVOUS_TIMEOUT_S=25)
        for place in ((0, 0, 0), (1, 0, 1), (2, 1, 0))
    ]
    for rank, (code, out) in enumerate(start(told, "again")):
        assert code == 0, out
        assert out.startswith(f"met {rank} 3 {rank % 2} {rank // 2} 2 6.0 "), out
        assert "encrypted tcp between 2 hosts" in out
        assert "again 3" in out
    assert not list((tmp_path / ".syncvar").iterdir()), "what told of the secret is gone"
    assert (tmp_path / ".syncvar").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_task_whose_others_do_not_come_says_where_it_looks_and_a_folder_of_others_is_refused(
    start, tmp_path
):
    (tmp_path / "open" / ".syncvar").mkdir(parents=True)
    (tmp_path / "open" / ".syncvar").chmod(0o755)
    alone = slurm(1, 1, 0, (1, 1), HOME=tmp_path, SYNCVAR_RENDEZVOUS_TIMEOUT_S=0.2)
    (code, out), (other_code, other) = start(
        [alone, slurm(1, 1, 0, (1, 1), HOME=tmp_path / "open")]
    )
    assert (code, other_code) == (3, 3), out + other
    assert "RendezvousError rank 0, the first of its host, has written nothing to" in out
    assert "SYNCVAR_RENDEZVOUS_DIR names another; or set MASTER_ADDR and MASTER_PORT" in out
    assert "open to others (mode 755); set SYNCVAR_RENDEZVOUS_DIR" in other


def test_ranks_of_mpirun_on_one_host_share_memory_by_the_name_of_its_job(start):
    told = [
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "PMIX_NAMESPACE": "prterun-n-1@1",
        }
        for rank in range(2)
    ]
    for rank, (code, out) in enumerate(start(told)):
        assert code == 0, out
        assert out.startswith(f"met {rank} 2 {rank} 0 1 4.0 shared memory: 2 ranks")


class Manager(threading.Thread):
    """Serves PMI 1.1 as the process manager of MPICH does: one socket a rank, lines of words, a barrier of all.

    Args:
        mapping: What it says of hosts.
        count: Ranks.
    """

    def __init__(self, mapping, count):
        super().__init__()
        self.known = {"PMI_process_mapping": mapping}
        self.heard = []
        self.sockets, self.others = zip(*(socket.socketpair() for _ in range(count)), strict=True)
        for one in self.others:
            one.set_inheritable(True)

    def run(self):
        waiting, selector = [], selectors.DefaultSelector()
        for one in self.sockets:
            selector.register(one, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.recv(4096).decode()
                if not line:
                    selector.unregister(key.fileobj)
                    continue
                fields = dict(part.partition("=")[::2] for part in line.split())
                self.heard.append(fields)
                answer = {
                    "cmd": {"get_my_kvsname": "my_kvsname", "finalize": "finalize_ack"}.get(
                        fields["cmd"], fields["cmd"] + "_result"
                    )
                }
                if fields["cmd"] == "get_my_kvsname":
                    answer["kvsname"] = "kvs_1"
                elif fields["cmd"] == "put":
                    self.known[fields["key"]] = fields["value"]
                elif fields["cmd"] == "get":
                    answer |= (
                        {"rc": "0", "value": self.known[fields["key"]]}
                        if fields["key"] in self.known
                        else {"rc": "-1"}
                    )
                elif fields["cmd"] == "barrier_in":
                    waiting.append(key.fileobj)
                    if len(waiting) == len(self.sockets):
                        for one in waiting:
                            one.sendall(b"cmd=barrier_out\n")
                        waiting.clear()
                    continue
                key.fileobj.sendall(
                    (" ".join(f"{name}={value}" for name, value in answer.items()) + "\n").encode()
                )


@pytest.fixture
def played():
    """Make process managers that end with their ranks."""
    managers = []

    def make(mapping, count):
        managers.append(Manager(mapping, count))
        managers[-1].start()
        return managers[-1]

    yield make
    for manager in managers:
        for one in manager.others:
            one.close()
        manager.join(20)
        for one in manager.sockets:
            one.close()


def mpich(rank, manager, **more):
    number = manager.others[rank].fileno()
    return {
        name: str(value)
        for name, value in (
            {"PMI_RANK": rank, "PMI_SIZE": len(manager.others), "PMI_FD": number} | more
        ).items()
    }


def test_ranks_of_mpiexec_meet_by_its_process_manager_on_one_host_and_on_several(start, played):
    one = played("(vector,(0,1,2))", 2)
    told = [mpich(rank, one, MPI_LOCALRANKID=rank, MPI_LOCALNRANKS=2) for rank in range(2)]
    for rank, (code, out) in enumerate(
        start(told, descriptors=[other.fileno() for other in one.others])
    ):
        assert code == 0, out
        assert out.startswith(f"met {rank} 2 {rank} 0 1 4.0 shared memory: 2 ranks")
    assert not any(fields["cmd"] == "put" for fields in one.heard), (
        "on one host the name of the run is enough"
    )
    assert [fields["cmd"] for fields in one.heard].count("finalize") == 2, (
        "one who ends without a last word has crashed, and all are killed"
    )
    several = played("(vector,(0,1,2),(1,1,1))", 3)
    told = [
        mpich(rank, several, MPI_LOCALRANKID=local, MPI_LOCALNRANKS=size)
        for rank, (local, size) in enumerate(((0, 2), (1, 2), (0, 1)))
    ]
    for rank, (code, out) in enumerate(
        start(told, "again", descriptors=[other.fileno() for other in several.others])[2:]
    ):
        assert code == 0, out
        assert out.startswith(f"met {rank} 3 {rank % 2} {rank // 2} 2 6.0 ")
        assert "encrypted tcp between 2 hosts" in out
        assert "again 3" in out
    assert len([fields for fields in several.heard if fields["cmd"] == "barrier_in"]) == 6
    secret = bytes.fromhex(several.known["syncvar-meet"]).decode().split()[2]
    assert len(bytes.fromhex(secret)) == 32


@pytest.mark.slow
def test_a_rank_of_mpiexec_that_cannot_meet_says_no_last_word_so_that_mpiexec_ends_the_others(
    start, played
):
    manager = played("(vector,(0,2,1))", 3)  # rank 2 is on the first host again
    told = [mpich(rank, manager, MPI_LOCALRANKID=0, MPI_LOCALNRANKS=1) for rank in range(3)]
    for code, out in start(told, descriptors=[other.fileno() for other in manager.others]):
        assert code == 3, out
        assert "ConfigError PMI_RANK, PMI_SIZE: the ranks alternate between 2 hosts" in out
    assert not any(fields["cmd"] == "finalize" for fields in manager.heard)
    (code, out) = start([mpich(0, manager, MPI_LOCALRANKID=0, MPI_LOCALNRANKS=1)])[-1]
    assert code == 3, out
    assert "is no socket of this process" in out


def test_a_killed_rank_is_told(start):
    number = free_ports(2)
    told = [torch(rank, 3, number, SYNCVAR_STALL_WARNING_S=0.2) for rank in range(3)]
    results = start(told, "kill")
    assert results[1][0] == -signal.SIGKILL
    for code, out in (results[0], results[2]):
        assert code == 3, out
        assert "PeerLost rank 1" in out
    stall = re.search(
        r"ranks? .* waiting \d+ s in barrier \(call 2\) at script.py:\d+ in <module>: (.*) has not entered it; (.*)",
        results[0][1],
    )
    assert stall[1] == "rank 1", results[0][1]
    late = r"rank 1: last call all_reduce\(sum, float64\[3\]\) \(call 1\), \d+ s ago, now in user code, script.py:(\d+)"
    assert (
        SCRIPT.split("\n")[int(re.fullmatch(late, stall[2])[1]) - 1]
        .strip()
        .startswith(("time.sleep", "while"))
    ), stall[2]


UNCAUGHT = """
import os, sys
import syncvar as sv
if "hooked" in sys.argv:
    sys.excepthook = lambda kind, error, trace: print("own hook:", kind.__name__, file=sys.stderr)
sv.barrier()
if "forks" in sys.argv and os.fork() == 0:
    raise sv.PeerLost(0, "here", "as an example")
if "forks" in sys.argv:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
if sv.rank() == 1:
    raise ValueError("planted")
sv.barrier()
"""


@pytest.mark.parametrize("arguments", [(), ("hooked",)], ids=str)
def test_an_error_of_syncvar_ends_a_process_with_the_code_of_the_table(start, arguments):
    number = free_ports(2)
    (lost, said), (failed, _) = start(
        [torch(rank, 2, number) for rank in range(2)], *arguments, script=UNCAUGHT
    )
    assert (lost, failed) == (70, 1)
    assert said.count("own hook: PeerLost" if arguments else "Traceback") == 1, said
    assert "SystemExit" not in said


def test_a_forked_child_ends_with_the_code_of_python(start):
    number = free_ports(2)
    results = start([torch(rank, 2, number) for rank in range(2)], "forks", script=UNCAUGHT)
    assert [code for code, _ in results] == [1, 1], results


def test_a_contradiction_names_both_sources(launch):
    script = "import syncvar as sv\nsv.init()\n"
    job = launch(
        script,
        workers=2,
        env={
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
            )
        },
    )
    assert job.wait() != 0
    assert "TF_CONFIG says world_size 1" in job.err or "TF_CONFIG says rank 0" in job.err
    assert "SYNCVAR_RANK" in job.err


def test_a_process_of_mpirun_is_refused_until_it_says_that_it_is_alone(start):
    told = [
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank), "PMIX_RANK": str(rank)}
        for rank in range(2)
    ]
    for code, out in start(told, script=REFUSED):
        assert code == 0, out
        for name in ("init", "rank", "all_reduce", "barrier", "Variable", "MirroredStrategy"):
            assert (
                f"{name} refused: OMPI_COMM_WORLD_SIZE=2: mpirun of Open MPI has started 2 processes"
                in out
            )
        assert "alone 0 1" in out


def test_a_process_is_alone_by_a_variable_whatever_other_launchers_say(start):
    told = [{"PMI_SIZE": "2", "PMI_RANK": "0"}, torch(0, 2, free_ports(2))]
    for code, out in start([one | {"SYNCVAR_WORLD_SIZE": "1"} for one in told]):
        assert code == 0, out
        assert "met 0 1 0 0 1 2.0" in out


def test_workers_of_ours_in_a_step_of_srun_or_in_mpirun_are_ours(launch):
    foreign = {
        "OMPI_COMM_WORLD_SIZE": "3",
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
    }
    script = """
import syncvar as sv
try:
    sv.init(alone=True)
except sv.ConfigError as error:
    print("refused:", error)
print("joined", sv.all_reduce(1))
try:
    sv.init(alone=True)
except sv.ConfigError as error:
    print("late:", error)
"""
    job = launch(script, workers=2, env=foreign)
    assert job.wait() == 0, str(job)
    assert job.out.count("joined 2") == 2
    for rank in range(2):
        assert (
            f"refused: sv.init(alone=True) contradicts SYNCVAR_RANK={rank} and SYNCVAR_WORLD_SIZE=2"
            in job.out
        )
        assert (
            f"late: sv.init(alone=True), but this process has joined already: as rank {rank} of 2"
            in job.out
        )


LIKE = """
import logging, os, sys
import numpy as np
import syncvar as sv
rank = int(os.environ["RANK"])
if rank == 1:
    np.__version__ = "0.1.2"
    sys.modules["__main__"].__file__ = np.__file__
    os.environ["SYNCVAR_CHECK_FINITE"] = sys.argv[1]
try:
    sv.init()
    print("met", sv.all_reduce(1), flush=True)
except sv.SyncvarError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


def test_ranks_that_differ(start):
    number = free_ports(2)
    told = [torch(rank, 2, number, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2) for rank in range(2)]
    (code, out), (other_code, other) = start(told, "off", script=LIKE)
    assert (code, other_code) == (0, 0), out + other
    assert other == "met 2\n", "it is said once"
    assert "the ranks differ: NumPy " in out
    assert "'0.1' (rank 1); script 'script.py " in out
    refused = start(told, "raise", script=LIKE)[2:]
    for code, out in refused:
        assert code == 3, out
        assert (
            "HandshakeError the ranks differ in what must be equal:\n  check_finite: 'off' (rank 0), 'raise' (rank 1)\n"
            in out
        )
