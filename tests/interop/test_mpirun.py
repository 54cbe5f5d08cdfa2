"""Scripts that know nothing of it run under the mpirun of Open MPI and of MPICH, and under torchrun, as under syncvar-launch.

`pytest -m mpi`, and of torchrun `pytest -m tensors`, where PyTorch is. The links are ours: no MPI library is used, but where
SYNCVAR_TRANSPORT asks for it.
"""

import re
import subprocess
import sys
import time

import pytest

from tests.support.mpi_jobs import MPIS, MpiJob, notes, run, script

DIGITS = ["-m", "syncvar.examples.digits", "--epochs", "6"]
PATHS = {  # name -> setting, and how many ranks are on each host, of four
    "shm": ({}, 4),
    "links": ({"SYNCVAR_TRANSPORT": "zmq"}, 4),
    "hosts": ({}, 2),
    "MPI": ({"SYNCVAR_TRANSPORT": "mpi-only"}, 4),
    "MPI between hosts": ({"SYNCVAR_TRANSPORT": "mpi"}, 2),
}

RECOVER = (
    "--mca",
    "orte_enable_recovery",
    "1",
    "--mca",
    "orte_abort_on_non_zero_status",
    "0",
)  # of Open MPI: others may go on


def WITH_MPI(test):
    return pytest.mark.mpi(pytest.mark.timeout(300)(test))


@pytest.fixture(params=MPIS)
def mpi(request):
    return request.param


def digest(text):
    """Return the digest of the weights that the chief has written."""
    (found,) = re.findall("weights_sha256=([0-9a-f]{64})", text)
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """Return the digest of the weights of a job of syncvar-launch."""
    line = [sys.executable, "-m", "syncvar_launcher", "--workers", "4", *DIGITS]
    done = subprocess.run(
        line,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path_factory.mktemp("launched"),
    )
    return digest(done.stdout)


@WITH_MPI
@pytest.mark.parametrize("path", PATHS)
def test_the_digits_are_trained_to_the_same_weights_under_mpirun(mpi, path, wanted):
    settings, each = PATHS[path]
    code, text = run(mpi, 4, DIGITS, each=each % 4, **settings)
    assert code == 0, text
    assert digest(text) == wanted
    assert "workers=4" in text


@pytest.mark.tensors
@pytest.mark.timeout(300)
def test_the_digits_are_trained_to_the_same_weights_under_torchrun(wanted, tmp_path):
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        *DIGITS,
    ]
    done = subprocess.run(
        line, check=False, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert digest(done.stdout) == wanted


KILLED = """
sv.init()
sv.all_reduce(np.ones(1000))
note("ready", current().transport)
try:
    if sv.rank() == 1:
        while not os.path.exists(f"{sys.argv[1]}/go"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    sv.all_reduce(np.ones(1000))
except sv.PeerLost as error:
    note("lost", error.rank, "after", time.monotonic() - float(open(f"{sys.argv[1]}/go").read()))
    sys.exit(9)
"""


def go(job, folder, count):
    """Let the rank be killed as soon as all are there."""
    job.until_noted(folder, "ready", count)
    (folder / "draft").write_text(str(time.monotonic()))
    (folder / "draft").rename(folder / "go")


@WITH_MPI
@pytest.mark.parametrize("path", ["shm", "links", "hosts"])
def test_a_killed_rank_ends_the_job(mpi, path, tmp_path):
    settings, each = PATHS[path]
    with MpiJob(mpi, 4, script(tmp_path, KILLED), each=each % 4, **settings) as job:
        go(job, tmp_path, 4)
        code, text = job.wait(120)
    assert code not in (0, None), text
    assert {
        "shm": "shared memory: 4 ranks",
        "links": "zmq: ",
        "hosts": "encrypted tcp between 2 hosts",
    }[path] in notes(tmp_path)[0]


@WITH_MPI
@pytest.mark.parametrize("path", ["shm", "links", "hosts"])
def test_survivors_of_a_killed_rank_raise_peer_lost_where_mpirun_lets_them_live(path, tmp_path):
    settings, each = PATHS[path]
    with MpiJob(
        "openmpi", 4, script(tmp_path, KILLED), options=RECOVER, each=each % 4, **settings
    ) as job:
        go(job, tmp_path, 4)
        job.until_noted(
            tmp_path, "lost 1 ", 3
        )  # the mpirun of several hosts does not end then; it is ended here
    assert (
        max(float(noted.rpartition("after")[2]) for noted in notes(tmp_path) if "lost" in noted)
        < 60.0
    )


ENDS = """
sv.init()
sv.barrier()
if sv.rank() == 1 and sys.argv[2] == "exits":
    sys.exit(7)
if sv.rank() == 1 and sys.argv[2] == "raises":
    raise ValueError("planted")
if sv.rank() and sys.argv[2] == "early":
    sys.exit(0)  # in order, while others go on
if sv.rank() == 0 and sys.argv[2] == "early":
    time.sleep(1)
    note("to its end")
    sys.exit(0)
if sys.argv[2] == "raises":
    time.sleep(600)
"""


@WITH_MPI
@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize(
    ("how", "codes"), [("good", {0}), ("early", {0}), ("exits", {7}), ("raises", {1, 9})]
)
def test_a_job_ends_as_its_ranks_do_and_at_an_exception_wherever_the_others_are(
    mpi, transport, how, codes, tmp_path
):
    """The mpirun of MPICH gives 9 for ranks that it has killed."""
    code, text = run(mpi, 3, [*script(tmp_path, ENDS), how], SYNCVAR_TRANSPORT=transport)
    assert code in codes, text
    assert ("ValueError: planted" in text) == (how == "raises")
    assert ("to its end" in notes(tmp_path, 1)[0]) == (how == "early")


CONTRADICTED = """
try:
    sv.init()
    note("met", sv.world_size())
except sv.SyncvarError as error:
    note(type(error).__name__, error)
"""


@WITH_MPI
def test_variables_that_contradict_mpirun_are_refused_and_both_are_named(mpi, tmp_path):
    other = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    run(mpi, 2, script(tmp_path, CONTRADICTED), SYNCVAR_RENDEZVOUS_TIMEOUT_S="5", **other)
    name = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}[mpi]
    assert re.match(
        rf"ConfigError RANK, .* says rank 1, {name}, .* says rank 0", notes(tmp_path, 1)[0]
    ), notes(tmp_path, 2)


@WITH_MPI
def test_processes_of_mpirun_may_each_be_alone_on_purpose(mpi, tmp_path):
    code, text = run(mpi, 2, script(tmp_path, CONTRADICTED), SYNCVAR_WORLD_SIZE="1")
    assert (code, text) == (0, "")
    assert notes(tmp_path, 2) == ["met 1\n"] * 2


@WITH_MPI
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_single_process_of_mpirun_is_a_world_of_one(mpi, transport, tmp_path):
    code, text = run(mpi, 1, script(tmp_path, CONTRADICTED), SYNCVAR_TRANSPORT=transport)
    assert (code, text) == (0, "")
    assert notes(tmp_path, 1) == ["met 1\n"]


MET = """
note(os.path.basename(sys.argv[0]), sv.world_size(), sv.all_reduce(1))
"""


@WITH_MPI
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_programs_of_mpirun_with_a_colon_share_one_world(mpi, transport, tmp_path):
    """The mpiexec of MPICH does not tell a process its program: there syncvar warns that scripts differ."""
    first = script(tmp_path, MET)
    second = tmp_path / "second.py"
    second.write_text(first[0].read_text())
    program = [*first, ":", "-n", "1", sys.executable, second, tmp_path]
    code, text = run(mpi, 2, program, SYNCVAR_TRANSPORT=transport)
    assert code == 0, text
    assert notes(tmp_path, 3) == ["script.py 3 3\n", "script.py 3 3\n", "second.py 3 3\n"]
    is_known = mpi == "openmpi" or transport == "mpi"
    assert ("the ranks differ: script" in text) != is_known
