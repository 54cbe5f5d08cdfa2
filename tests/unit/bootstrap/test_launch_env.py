"""Who a process is by the engine that has started it: each engine's environment as it was taken down, and what misleads in it.

The environments are those of real processes (Open MPI 4.1, MPICH 4.0, Slurm), or what manuals and sources of the others say.
"""

import pytest

from syncvar.bootstrap.launch_env import ADDRESS, FOLDER, PMI, host_of_each
from syncvar.bootstrap.launch_env.detection import (
    launcher_info,
    started_with_others,
    unknown_identity_reason,
)
from syncvar.bootstrap.launch_env.schedulers import counts
from syncvar.core.environment import RankEnvironment, wants_world_of_one
from syncvar.core.errors import ConfigError, RendezvousError

OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "5",
    "OMPI_UNIVERSE_SIZE": "8",
    "OMPI_MCA_ess_base_jobid": "594477057",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_MCA_orte_precondition_transports": "e75bb0be670e28e6-3d7e3baa26968c3e",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "594477057",
    "PMIX_HOSTNAME": "node0",
    "PMIX_VERSION": "4.2.2rc2",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "prterun-node0-4711@1",
    "PRTE_LAUNCHED": "1",
}
MPICH = {
    "PMI_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_FD": "8",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node0",
}
MVAPICH = MPICH | {
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "node0",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
PALS = {  # the third of four, of which each host has two
    "PALS_RANKID": "2",
    "PALS_APID": "5f0c6a1e",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "0",
    "PALS_LOCAL_SIZE": "2",
    "PALS_DEPTH": "1",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "0",
    "PMI_LOCAL_SIZE": "2",
    "PBS_JOBID": "12.pbs",
    "PBS_NODEFILE": "/var/spool/pbs/aux/12.pbs",
}
FLUX = {
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_RANK": "2",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2aB",
    "PMI_SIZE": "4",
    "PMI_RANK": "2",
    "PMI_FD": "9",
    "FLUX_URI": "local:///run/flux/local",
}
JSRUN = {
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_RANK": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "3",
    "LSB_JOBID": "311",
    "LSB_DJOB_NUMPROC": "7",
    "LSB_MCPU_HOSTS": "batch1 1 a 3 b 3",
    "PMIX_RANK": "4",
    "PMIX_NAMESPACE": "2",
}
SLURM_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_CLUSTER_NAME": "ada",
    "SLURM_SUBMIT_DIR": "/home/me",
}
SALLOC = SLURM_JOB  # the shell runs where salloc was called
SALLOC_STEP = (
    SLURM_JOB
    | {  # with use_interactive_step the shell runs on the first node, in a step of its own
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEPID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
    }
)
SBATCH = SLURM_JOB | {
    "ENVIRONMENT": "BATCH",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURMD_NODENAME": "n1",
}
SRUN = SBATCH | {  # the third of the four tasks of a step
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "2,3",
    "SLURMD_NODENAME": "n2",
    "SLURM_STEP_LAUNCHER_PORT": "34301",
    "SLURM_SRUN_COMM_PORT": "34301",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-1",
}
TOLD_JOB = INDEXED_JOB | {"SYNCVAR_WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train"}
KUBEFLOW = {  # what its trainer gives to torchrun, which has not begun here
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-0.train",
    "PET_MASTER_PORT": "29500",
}
TORCH = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


def places(environ):
    told = launcher_info(environ)
    return (
        told.rank,
        told.world_size,
        told.local_rank,
        told.local_world_size,
        told.host_index,
        told.host_count,
        told.way,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPEN_MPI_4, (1, 2, 1, 2, 0, 1, FOLDER)),
        (OPEN_MPI_5, (2, 4, 0, 2, -1, 0, FOLDER)),  # on which of how many hosts: they find out
        (MPICH, (1, 2, 1, 2, 0, 1, PMI)),
        (MPICH | {"PMI_SIZE": "5"}, (1, 5, 1, 2, -1, 0, PMI)),
        (MVAPICH, (1, 2, 1, 2, 0, 1, PMI)),
        (HOROVOD, (1, 2, 1, 2, 0, 1, FOLDER)),
        (PALS, (2, 4, 0, 2, -1, 0, FOLDER)),
        (FLUX, (2, 4, 0, 0, -1, 0, PMI)),  # only PMI knows how many are here
        (FLUX | {"FLUX_JOB_NNODES": "1"}, (2, 4, 0, 4, 0, 1, PMI)),
        (JSRUN, (4, 6, 1, 3, -1, 0, FOLDER)),
        (SRUN, (2, 4, 0, 2, 1, 2, FOLDER)),
        (
            SRUN
            | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "1,2,3"},
            (2, 4, 1, 3, 1, 2, FOLDER),
        ),
        (TOLD_JOB, (1, 4, 0, 1, 1, 4, ADDRESS)),
        (TORCH, (2, 4, 0, 2, 1, 2, ADDRESS)),
    ],
)
def test_what_an_engine_says(environ, expected):
    assert places(environ) == expected
    assert unknown_identity_reason(environ | {"SYNCVAR_WORLD_SIZE": "1"}) == ""
    assert wants_world_of_one(environ | {"SYNCVAR_WORLD_SIZE": "1"})
    assert not wants_world_of_one(environ)


def test_the_innermost_counts():
    assert places(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"} | OPEN_MPI_4) == places(
        OPEN_MPI_4
    )  # srun has started the daemons
    assert places(SBATCH | OPEN_MPI_5) == places(OPEN_MPI_5), (
        "in a batch script SLURM_PROCID is 0 in every process"
    )
    assert places(SRUN | MPICH) == places(MPICH)
    assert places(FLUX | MPICH | {"PMI_SIZE": "3"}) == (1, 3, 1, 2, -1, 0, PMI)
    assert places(TOLD_JOB | OPEN_MPI_4) == places(OPEN_MPI_4)
    assert places(PALS | TORCH) == places(TORCH)
    both = SRUN | {
        "PMI_RANK": "2",
        "PMI_SIZE": "4",
        "PMI_FD": "9",
        "PMI_JOBID": "7.0",
    }  # srun --mpi=pmi2
    assert places(both) == places(SRUN)


def test_a_step_has_fewer_tasks_than_its_job_may_have():
    step = SRUN | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "1",
        "SLURM_GTIDS": "1",
    }
    assert places(step) == (1, 2, 0, 1, 1, 2, FOLDER)


def test_open_mpis_node_rank_is_no_host():
    assert launcher_info(OPEN_MPI_4 | {"OMPI_COMM_WORLD_NODE_RANK": "1"}) == launcher_info(
        OPEN_MPI_4
    )


def test_the_size_that_pals_always_gives_is_that_of_one_host():
    alone = {name: value for name, value in PALS.items() if not name.startswith("PMI_")}
    assert launcher_info(alone) is None
    assert (
        "PALS_LOCAL_SIZE=2: mpiexec of PALS has started 2 processes on this host"
        in unknown_identity_reason(alone)
    )
    assert places(alone | {"PALS_SIZE": "4"}) == places(PALS)


def test_runs_are_told_from_each_other():
    for environ, name, other in (
        (SRUN, "SLURM_STEP_ID", "1"),
        (SRUN, "SLURM_STEP_LAUNCHER_PORT", "2"),
        (SRUN, "SLURM_RESTART_COUNT", "1"),
        (SRUN, "SLURM_CLUSTER_NAME", "bob"),
        (OPEN_MPI_4, "OMPI_MCA_orte_precondition_transports", "1-2"),
        (OPEN_MPI_5, "PMIX_NAMESPACE", "prterun-node0-4712@1"),
        (PALS, "PALS_APID", "x"),
        (JSRUN, "PMIX_NAMESPACE", "3"),
        (FLUX, "FLUX_JOB_ID", "f3"),
        (HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_PORT", "1"),
    ):
        assert launcher_info(environ).run != launcher_info(environ | {name: other}).run, name
    others = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}
    assert launcher_info(SRUN).run == launcher_info(SRUN | others).run, "the same for all ranks"
    assert launcher_info(SRUN | {"SLURM_RESTART_COUNT": "2"}).restarts == 2


def test_where_the_address_of_rank_0_and_a_port_are_given_they_are_told():
    told = launcher_info(SRUN | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
    assert (told.address, told.port) == ("n1", 29500)
    assert launcher_info(SRUN | {"MASTER_PORT": "29500"}).port == 0
    assert launcher_info(TOLD_JOB).port == 29500
    assert launcher_info(TOLD_JOB | {"MASTER_PORT": "7"})[7:9] == ("train-0.train", 7)


def test_a_pod_of_a_set_of_jobs():
    several = TOLD_JOB | {
        "SYNCVAR_WORLD_SIZE": "6",
        "JOBSET_GLOBAL_REPLICAS": "3",
        "JOBSET_JOB_GLOBAL_INDEX": "2",
    }
    assert places(several) == (5, 6, 0, 1, 5, 6, ADDRESS)
    with pytest.raises(
        ConfigError, match="SYNCVAR_WORLD_SIZE=7 is no multiple of JOBSET_GLOBAL_REPLICAS=3"
    ):
        launcher_info(several | {"SYNCVAR_WORLD_SIZE": "7"})
    with pytest.raises(
        ConfigError, match="JOB_COMPLETION_INDEX=1 is rank 5, outside of SYNCVAR_WORLD_SIZE=2"
    ):
        launcher_info(several | {"SYNCVAR_WORLD_SIZE": "2", "JOBSET_GLOBAL_REPLICAS": "1"})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            SRUN | TORCH | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_WORLD_SIZE says world_size 2, SLURM_PROCID, SLURM_STEP_NUM_TASKS says world_size 4",
        ),
        (
            SRUN | TORCH | {"RANK": "0", "LOCAL_RANK": "0"},
            "says rank 0, SLURM_PROCID, SLURM_STEP_NUM_TASKS says rank 2",
        ),  # set once, in the batch script
        (
            OPEN_MPI_5 | TORCH | {"RANK": "3", "LOCAL_RANK": "1"},
            "says rank 3, OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE says rank 2",
        ),
        (
            SRUN
            | {
                "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
            },
            "TF_CONFIG says world_size 2, SLURM_PROCID, SLURM_STEP_NUM_TASKS says world_size 4",
        ),
        (
            SRUN | {"SLURM_PROCID": "1", "SLURM_GTIDS": "1,3"},
            "SLURM_PROCID=1 is the task 0 of host 1, which has 1,3, and ranks are numbered host by host",
        ),
        (
            SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,2"},
            "write srun --distribution=block",
        ),  # the others see it too
        (
            SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "1,3"},
            "write srun --distribution=block",
        ),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2"},
            "SLURM_STEP_TASKS_PER_NODE=2 contradicts SLURM_STEP_NUM_TASKS=4 and SLURM_NODEID=1",
        ),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is no number"),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 is outside of 2"),
        (
            OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            "OMPI_COMM_WORLD_LOCAL_RANK=2 is outside of 2",
        ),
        (MPICH | {"PMI_RANK": "0"}, "MPI_LOCALRANKID=1 of 2 contradicts PMI_RANK=0 of 2"),
        (TOLD_JOB | {"MASTER_PORT": "x"}, "MASTER_PORT has 'x'"),
    ],
)
def test_contradictions_name_both_sources(environ, words):
    with pytest.raises(ConfigError) as caught:
        launcher_info(environ)
    assert words in str(caught.value)


def test_what_is_no_contradiction():
    agents = SRUN | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_GTIDS": "1",
    }
    torchrun = TORCH | {"TORCHELASTIC_RUN_ID": "r"}
    assert places(agents | torchrun) == places(torchrun), "each task may start several"
    assert places(SRUN | torchrun | {"RANK": "1", "LOCAL_RANK": "1"})[0] == 1, (
        "torchrun numbers its agents as they come"
    )
    assert places(SRUN | TORCH) == places(TORCH)
    assert places(SBATCH | TORCH | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})[0] == 3
    own = RankEnvironment(1, 2, 1, 2, 0, 1, 0, "ipc:///x", "j")
    assert launcher_info(SRUN | OPEN_MPI_5, own) is None, (
        "where syncvar-launch has started it, nothing around that counts"
    )


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {name: OPEN_MPI_4[name] for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")},
            "OMPI_COMM_WORLD_SIZE=2: mpirun of Open MPI has started 2 processes",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        (
            {"MPI_LOCALNRANKS": "3"},
            "MPI_LOCALNRANKS=3: mpiexec, by PMI as of MPICH and Intel MPI, has started 3 processes on this host",
        ),
        (
            {name: value for name, value in MPICH.items() if name != "PMI_FD"},
            "PMI_SIZE=2: mpiexec, by PMI",
        ),
        ({"MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_SIZE=8"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, "HOROVOD_SIZE=2"),
        (
            {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1"},
            "PALS_RANKID=0: mpiexec of PALS may have started more processes than this one",
        ),
        (
            {"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "1"},
            "PALS_RANKID=1: mpiexec of PALS has started more processes than this one",
        ),
        (
            SBATCH | {"SLURM_STEPID": "0"},
            "SLURM_NTASKS=4: srun has started 4 processes",
        ),  # an old srun
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            "SLURM_NTASKS=2",
        ),
        (
            {name: value for name, value in FLUX.items() if name != "PMI_FD"},
            "FLUX_JOB_SIZE=4: flux run has started 4 processes",
        ),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0: a launcher that speaks PMIx may have started more"),
        (
            {"PBS_VNODENUM": "3", "PBS_TASKNUM": "4"},
            "PBS_VNODENUM=3: pbsdsh has started more processes than this one",
        ),
        (
            INDEXED_JOB | {"JOB_COMPLETION_INDEX": "0"},
            "JOB_COMPLETION_INDEX=0: an indexed job of Kubernetes may have started more",
        ),
        (INDEXED_JOB, "JOB_COMPLETION_INDEX=1: an indexed job of Kubernetes has started more"),
        (
            INDEXED_JOB | {"SYNCVAR_WORLD_SIZE": "4"},
            "SYNCVAR_WORLD_SIZE=4: an indexed job of Kubernetes has started 4 processes",
        ),
    ],
)
def test_a_process_of_several_that_is_not_told_how_to_meet_is_no_world_of_one(environ, words):
    assert launcher_info(environ) is None
    assert (
        started_with_others(environ)[0]
        == unknown_identity_reason(environ).partition(", and no variable says")[0]
    )
    reason = unknown_identity_reason(environ)
    assert reason.startswith(words)
    assert "syncvar-launch --workers" in reason
    assert "MASTER_ADDR" in reason
    for way in ("SYNCVAR_WORLD_SIZE=1", "sv.init(alone=True)"):
        assert way in reason
    assert unknown_identity_reason(environ | {"SYNCVAR_WORLD_SIZE": "1"}) == ""


def test_what_a_manifest_has_to_say_is_said():
    reason = unknown_identity_reason(INDEXED_JOB)
    for words in (
        "SYNCVAR_WORLD_SIZE, the number of pods",
        "headless service",
        "subdomain",
        "SYNCVAR_KEY_FILE",
        "coordinator",
    ):
        assert words in reason


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SALLOC,
        SALLOC_STEP,
        SALLOC_STEP | {"SLURM_STEP_NUM_TASKS": "4"},
        SBATCH,  # it has SLURM_PROCID=0 and SLURM_NTASKS=4, and runs once: to start the others
        SBATCH | {"SLURM_STEP_ID": "4294967291"},
        SBATCH | {"SLURM_STEP_ID": "batch"},
        SRUN
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # a step of one task in a job of four
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},
        OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        MPICH | {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "PMI_RANK": "0"},
        {"MPI_LOCALNRANKS": "1"},
        SRUN
        | MPICH
        | {"PMI_SIZE": "1", "PMI_RANK": "0"},  # mpiexec -n 1 whose agents srun has started
        INDEXED_JOB | OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        PALS | {"PMI_SIZE": "1", "PALS_RANKID": "0", "PMI_RANK": "0"},
        FLUX | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
        {"LSB_DJOB_NUMPROC": "7", "LSB_JOBID": "3"},  # bsub without jsrun: one process
        {
            "PBS_JOBID": "3",
            "PBS_VNODENUM": "0",
            "PBS_TASKNUM": "1",
            "PBS_NP": "8",
            "PBS_ENVIRONMENT": "PBS_BATCH",
        },  # a batch script
        {"NSLOTS": "4", "PE_HOSTFILE": "/x", "COBALT_JOBID": "1"},
        {"FLUX_URI": "local:///run/flux"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        KUBEFLOW,
        {"RANK": "3"},  # set by many programs
        {"SYNCVAR_WORLD_SIZE": ""},
    ],
)
def test_what_is_alone(environ):
    told = launcher_info(environ)
    assert told is None or told.world_size == 1
    assert told is not None or unknown_identity_reason(environ) == ""


def test_lists_of_slurm_and_of_pmi():
    assert counts("4,2(x3),1", "X") == [4, 2, 2, 2, 1]
    assert host_of_each("(vector,(0,2,2))", 4) == [0, 0, 1, 1]
    assert host_of_each("(vector,(0,1,1))", 3) == [0, 0, 0], "one that is too short begins anew"
    assert host_of_each("(vector,(0,1,4),(1,2,1))", 6) == [0, 0, 0, 0, 1, 2]
    for text in ("", "(vector)", "(vector,(0,1))", "(matrix,(0,1,1))", "(vector,(0,x,1))"):
        with pytest.raises(RendezvousError, match="cannot be understood"):
            host_of_each(text, 2)


@pytest.mark.parametrize(
    ("sizes", "program"),
    [("", 0), ("4", 0), ("3 1", 0), ("2 2", 1), ("1 1 2", 2), ("1 1", 0), ("x", 0)],
)
def test_open_mpi_says_which_program_of_several_a_rank_runs(sizes, program):
    info = launcher_info(OPEN_MPI_5 | {"OMPI_APP_CTX_NUM_PROCS": sizes})
    assert (info.rank, info.program) == (2, program)
