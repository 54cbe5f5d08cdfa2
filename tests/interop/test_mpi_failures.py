"""What goes wrong where MPI carries the data: what is refused, and how a job ends: `pytest -m mpi`."""

import re
import time

import pytest

from tests.support.mpi_jobs import MPIS, MpiJob, environment, notes, run, script

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

RECOVER = (
    "--mca",
    "orte_enable_recovery",
    "1",
    "--mca",
    "orte_abort_on_non_zero_status",
    "0",
)  # of Open MPI: others may go on
OTHER = {"openmpi": "mpich", "mpich": "openmpi"}


@pytest.fixture(params=MPIS)
def mpi(request):
    return request.param


@pytest.fixture(params=["mpi", "mpi-only"])
def transport(request):
    return request.param


KILLED = """
sv.init()
sv.all_reduce(np.ones(100_000))
note("ready")
try:
    if sv.rank() == 1:
        while not os.path.exists(f"{sys.argv[1]}/go"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    sv.all_reduce(np.ones(100_000))
except sv.PeerLost as error:
    note("lost", error.rank, "after", time.monotonic() - float(open(f"{sys.argv[1]}/go").read()))
    sys.exit(9)
"""


def test_survivors_of_a_killed_rank_raise_peer_lost_where_mpirun_lets_them_live(
    transport, tmp_path
):
    """That of MPICH does not: it ends them within a tenth of a second, with -disable-auto-cleanup too."""
    with MpiJob(
        "openmpi", 3, script(tmp_path, KILLED), options=RECOVER, SYNCVAR_TRANSPORT=transport
    ) as job:
        job.until_noted(tmp_path, "ready", 3)
        (tmp_path / "draft").write_text(str(time.monotonic()))
        (tmp_path / "draft").rename(tmp_path / "go")
        job.until_noted(tmp_path, "lost 1 ", 2)
        job.wait(120)  # with the exit code that mpirun has for it: 0
    seen = [float(one.rpartition("after")[2]) for one in notes(tmp_path, 3) if "lost" in one]
    assert max(seen) < 60.0


def test_a_killed_rank_ends_the_job(mpi, transport, tmp_path):
    with MpiJob(mpi, 3, script(tmp_path, KILLED), SYNCVAR_TRANSPORT=transport) as job:
        job.until_noted(tmp_path, "ready", 3)
        (tmp_path / "draft").write_text(str(time.monotonic()))
        (tmp_path / "draft").rename(tmp_path / "go")
        code, text = job.wait(120)
    assert code != 0, text


RAISES = """
sv.init()
sv.barrier()
if sv.rank() == 1:
    raise ValueError("planted")
note("computes")
time.sleep(600)
"""


def test_an_exception_on_one_rank_ends_the_job_also_where_the_others_compute(
    mpi, transport, tmp_path
):
    code, text = run(mpi, 3, script(tmp_path, RAISES), SYNCVAR_TRANSPORT=transport)
    assert code != 0
    assert "ValueError: planted" in text


WAITS = """
from mpi4py import MPI
sv.init()
sv.barrier()
if sv.rank() == 0:
    time.sleep(2)
    sv.send(np.ones(3), 1)
elif sv.rank() == 1:
    begun = time.process_time()
    sv.recv(0)
    note("took", time.process_time() - begun)
sv.barrier()
"""


def test_a_rank_that_waits_leaves_its_core_to_others(mpi, tmp_path):
    code, text = run(mpi, 2, script(tmp_path, WAITS), SYNCVAR_TRANSPORT="mpi-only")
    assert code == 0, text
    assert float(notes(tmp_path, 2)[1].split()[1]) < 1.0


BESIDE = """
from mpi4py import MPI
world = MPI.COMM_WORLD
sv.init()
assert (sv.rank(), sv.world_size()) == (world.rank, world.size)
for turn in range(20):
    work = sv.all_reduce(np.full(50_000, sv.rank(), np.float32), async_op=True)
    if world.rank:
        world.send((turn, world.rank), 0, tag=turn)
    else:
        heard = sorted(world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) for _ in range(world.size - 1))
        assert heard == [(turn, rank) for rank in range(1, world.size)], heard
    assert (work.wait() == world.size * (world.size - 1) / 2).all()
    assert world.allreduce(1) == world.size
sv.shutdown()
assert world.allreduce(world.rank) == world.size * (world.size - 1) / 2
note("good")
"""


def test_the_programs_own_messages_and_ours_do_not_meet(mpi, tmp_path):
    code, text = run(mpi, 3, script(tmp_path, BESIDE), SYNCVAR_TRANSPORT="mpi-only")
    assert (code, text) == (0, "")
    assert notes(tmp_path, 3) == ["good\n"] * 3


REFUSED = """
try:
    sv.init()
    note("met")
except sv.SyncvarError as error:
    note(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"MPI4PY_RC_THREAD_LEVEL": "funneled"},
            "ConfigError .*needs MPI_THREAD_SERIALIZED at least",
        ),
        ({"SYNCVAR_ENCRYPTION": "required"}, "ConfigError SYNCVAR_ENCRYPTION=required contradicts"),
        (
            {"RANK": "0", "WORLD_SIZE": "7", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
            "ConfigError .*7.*",
        ),
        (
            {
                "SYNCVAR_RANK": "0",
                "SYNCVAR_WORLD_SIZE": "2",
                "SYNCVAR_LOCAL_RANK": "0",
                "SYNCVAR_LOCAL_WORLD_SIZE": "2",
                "SYNCVAR_HOST_INDEX": "0",
                "SYNCVAR_GENERATION": "0",
                "SYNCVAR_RENDEZVOUS": "ipc:///tmp/x",
                "SYNCVAR_JOB_ID": "j",
            },
            "ConfigError SYNCVAR_TRANSPORT=mpi contradicts SYNCVAR_RANK=0",
        ),
    ],
)
def test_what_contradicts_mpi_is_refused_on_every_rank(mpi, variables, words, tmp_path):
    run(mpi, 2, script(tmp_path, REFUSED), SYNCVAR_TRANSPORT="mpi", **variables)
    assert all(re.match(words, noted) for noted in notes(tmp_path, 2)), notes(tmp_path, 2)


def test_the_library_of_another_mpi_than_that_of_mpirun_is_refused(mpi, tmp_path):
    """Each process would be alone, and compute numbers of its own."""
    other = environment(OTHER[mpi], tmp_path)
    more = {name: other[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH") if name in other}
    run(mpi, 2, script(tmp_path, REFUSED), SYNCVAR_TRANSPORT="mpi", **more)
    library = {"openmpi": "Open MPI", "mpich": "MPICH"}[OTHER[mpi]]
    for rank, noted in enumerate(notes(tmp_path, 2)):
        assert re.match(
            rf"ConfigError .* says rank {rank} of 2, {library}.* says rank 0 of 1: the MPI library is not that of the mpirun",
            noted,
        ), noted


ABSENT = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    while not os.path.exists(f"{sys.argv[1]}/go"):
        time.sleep(0.01)
else:
    try:
        sv.init()
    except sv.RendezvousError as error:
        note(error)
        open(f"{sys.argv[1]}/go", "w").close()
MPI.COMM_WORLD.Abort(3)
"""


def test_a_process_that_does_not_come_is_not_waited_for_for_ever(mpi, tmp_path):
    code, _ = run(
        mpi, 2, script(tmp_path, ABSENT), SYNCVAR_TRANSPORT="mpi", SYNCVAR_RENDEZVOUS_TIMEOUT_S="2"
    )
    assert code != 0
    assert (
        "process 0 of MPI waited 2 s for all 2 of them to come to sv.init()"
        in notes(tmp_path, 1)[0]
    )
