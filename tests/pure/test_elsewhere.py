"""What other launchers tell a process: read, checked, compared where several do, and refused where nobody is joined."""

import json

import pytest

from syncvar.env import RankEnvironment
from syncvar.errors import ConfigError
from syncvar.topology import is_meant_alone, told_elsewhere, why_not_alone

TORCH = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip


def tf(index, workers=("a:1", "a:2", "b:1", "b:2"), kind="worker", **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": list(workers)} | cluster, "task": {"type": kind, "index": index}})}


def test_torchrun():
    told = told_elsewhere(TORCH)
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (3, 4, 1, 2)
    assert (told.host_index, told.host_count, told.address, told.port) == (1, 2, "node0", 29500)
    assert told.restarts == 0
    assert told_elsewhere(TORCH | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2


def test_without_local_ranks_every_rank_is_its_own_host_unless_rank_0_is_here():
    far = {name: TORCH[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert told_elsewhere(far).host_count == 4
    here = told_elsewhere(far | {"MASTER_ADDR": "127.0.0.1"})
    assert (here.host_count, here.local_rank, here.local_world_size) == (1, 3, 4)


def test_tf_config():
    told = told_elsewhere(tf(2))
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (2, 4, 0, 2)
    assert (told.host_index, told.host_count, told.address, told.port) == (1, 2, "a", 1)
    chief = told_elsewhere(tf(0, ("b:1",), kind="worker", chief=["a:9"]))
    assert (chief.rank, chief.world_size, chief.address, chief.port) == (1, 2, "a", 9)
    assert told_elsewhere(tf(0)).run == told_elsewhere(tf(1)).run, "the same for all ranks of a run"


@pytest.mark.parametrize(
    "environ",
    [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"MASTER_ADDR": "x", "MASTER_PORT": "1"}, {"TF_CONFIG": " "}],
)
def test_what_says_nothing_of_this_process(environ):
    assert told_elsewhere(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCH | {"RANK": "4"}, "RANK=4 is outside of 4"),
        (TORCH | {"RANK": "x"}, "RANK must be a non-negative integer"),
        (TORCH | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is outside of 2"),
        (TORCH | {"GROUP_RANK": "7"}, "GROUP_RANK=7"),
        (TORCH | {"RANK": "0"}, "contradicts RANK=0"),
        (TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT has '0'"),
        (TORCH | {"MASTER_PORT": "70000"}, "must be 1 to 65535"),
        ({"TORCHELASTIC_RUN_ID": "r", "RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be read"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG cannot be read"),
        (tf(4), "no task worker 4"),
        (tf(True), "no task worker True"),
        (tf(0, kind="evaluator"), "only chief and worker"),
        (tf(0, ps=["p:1"]), "tasks of type ps"),
        (tf(0, ("a",)), "'a' is no host:port"),
        (tf(0, ("a:x",)), "TF_CONFIG has 'x' for a port"),
        (tf(0, ("a:1", "b:1", "a:2")), "do not follow each other"),
        (TORCH | tf(2), "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE says rank 3, TF_CONFIG says rank 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(environ, words):
    with pytest.raises(ConfigError) as caught:
        told_elsewhere(environ)
    assert words in str(caught.value)


def test_sources_that_agree_are_taken_and_contradictions_with_the_launcher_are_not():
    assert told_elsewhere(TORCH | tf(3)).rank == 3
    me = RankEnvironment(3, 4, 1, 2, 1, 2, 0, "ipc:///x", "j")
    assert told_elsewhere(TORCH | tf(3), me).rank == 3
    other = RankEnvironment(2, 4, 0, 2, 1, 2, 0, "ipc:///x", "j")
    for environ, source in ((TORCH, "MASTER_ADDR"), (tf(3), "TF_CONFIG")):
        with pytest.raises(ConfigError, match="SYNCVAR_RANK") as caught:
            told_elsewhere(environ, other)
        assert source in str(caught.value)


# What launchers set, taken down from them or from their sources; of N processes the first, unless it says otherwise.
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_UNIVERSE_SIZE": "2", "PMIX_RANK": "0", "PMIX_NAMESPACE": "1179254785", "PMIX_VERSION": "4.2.2rc2",
}  # fmt: skip
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "prterun-node0-4711@1", "PRTE_LAUNCHED": "1",
}  # fmt: skip
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "6", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "7"}
PALS = {"PALS_RANKID": "0", "PALS_APID": "5f0c", "PALS_NODEID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}
SLURM_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_SUBMIT_DIR": "/home/me",
}  # fmt: skip
SALLOC = SLURM_JOB  # the shell runs where salloc was called
SALLOC_STEP = SLURM_JOB | {  # with use_interactive_step the shell runs on the first node, in a step of its own
    "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
}  # fmt: skip
SBATCH = SLURM_JOB | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
SRUN = SBATCH | {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_GTIDS": "0,1"}
JSRUN = {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0", "LSB_DJOB_NUMPROC": "7", "PMIX_RANK": "0"}
FLUX = {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "0", "FLUX_JOB_ID": "f2", "PMI_SIZE": "4", "PMI_RANK": "0", "PMI_FD": "9"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE=2: mpirun of Open MPI has started 2 processes"),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE=4: mpirun of Open MPI has started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        (MPICH, "PMI_SIZE=2: mpiexec"),
        ({"MPI_LOCALNRANKS": "3"}, "MPI_LOCALNRANKS=3: mpiexec, by PMI as of MPICH and Intel MPI, has started 3 processes on this host"),
        ({"MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_SIZE=8"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, "HOROVOD_SIZE=2"),
        (PALS, "PALS_RANKID=0: mpiexec of PALS may have started more processes than this one"),  # its size is for this host alone
        (PALS | {"PALS_LOCAL_SIZE": "2"}, "PALS_LOCAL_SIZE=2: mpiexec of PALS has started 2 processes on this host"),
        (PALS | {"PALS_RANKID": "1"}, "PALS_RANKID=1: mpiexec of PALS has started more processes than this one"),
        (PALS | {"PALS_SIZE": "2"}, "PALS_SIZE=2"),
        (PALS | {"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE=4"),
        (SRUN, "SLURM_STEP_NUM_TASKS=4: srun has started 4 processes"),
        (SBATCH | {"SLURM_STEPID": "0"}, "SLURM_NTASKS=4: srun"),  # an old srun
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "SLURM_NTASKS=2"),
        (SRUN | {"PMIX_RANK": "0"}, "SLURM_STEP_NUM_TASKS=4"),
        (JSRUN, "JSM_NAMESPACE_SIZE=6: jsrun has started 6 processes"),
        (FLUX, "FLUX_JOB_SIZE=4: flux run has started 4 processes"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0: a launcher that speaks PMIx may have started more"),
        (INDEXED_JOB, "JOB_COMPLETION_INDEX=0: an indexed job of Kubernetes may have started more"),
        (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3: an indexed job of Kubernetes has started more"),
        (INDEXED_JOB | OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE=2"),
        (SBATCH | OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE=2"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2"} | OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE=4"),  # srun has started mpirun's agents
    ],
)  # fmt: skip
def test_a_process_of_a_launcher_that_is_not_joined_is_no_world_of_one(environ, words):
    assert told_elsewhere(environ) is None
    reason = why_not_alone(environ)
    assert reason.startswith(words)
    assert "syncvar-launch --workers" in reason
    assert "MASTER_ADDR" in reason
    for way in ("SYNCVAR_WORLD_SIZE=1", "sv.init(alone=True)"):
        assert way in reason
    assert not is_meant_alone(environ)
    assert is_meant_alone(environ | {"SYNCVAR_WORLD_SIZE": "1"})
    assert why_not_alone(environ | {"SYNCVAR_WORLD_SIZE": "1"}) == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SALLOC,
        SALLOC_STEP,
        SALLOC_STEP | {"SLURM_STEP_NUM_TASKS": "4"},
        SBATCH,
        SBATCH | {"SLURM_STEP_ID": "4294967291"},
        SBATCH | {"SLURM_STEP_ID": "batch"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # a step of one task in a job of four
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
        OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1"},
        MPICH | {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        {"MPI_LOCALNRANKS": "1"},
        SRUN | MPICH | {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},  # mpiexec -n 1 whose agents srun has started
        INDEXED_JOB | OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1"},
        PALS | {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"LSB_DJOB_NUMPROC": "7", "LSB_JOBID": "3"},  # bsub without jsrun: one process
        {"FLUX_URI": "local:///run/flux"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"SYNCVAR_WORLD_SIZE": ""},
    ],
)
def test_what_is_alone(environ):
    assert why_not_alone(environ) == ""


def test_a_size_of_our_own_without_a_rank_is_no_world_of_one():
    reason = why_not_alone({"SYNCVAR_WORLD_SIZE": "2"})
    assert reason.startswith("SYNCVAR_WORLD_SIZE=2 is set and SYNCVAR_RANK is not")
    assert "syncvar-launch --workers 2" in reason


def test_a_size_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE must be a non-negative integer, not 'many'"):
        why_not_alone({"OMPI_COMM_WORLD_SIZE": "many"})


def test_a_size_above_1_without_an_address_is_no_world_of_one():
    for given in ({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}):
        assert "set MASTER_ADDR and MASTER_PORT" in why_not_alone(given)
    for given in ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "first", "WORLD_SIZE": "2"}):
        assert why_not_alone(given) == ""
    assert why_not_alone({"RANK": "0", "WORLD_SIZE": "2", "SYNCVAR_WORLD_SIZE": "1"}) == ""
