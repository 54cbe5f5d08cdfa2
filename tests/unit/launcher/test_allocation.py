"""The hosts of a scheduler's job, and what starts there: from its environment, as it was taken down, to the command line."""

import pytest

from syncvar.core.errors import ConfigError
from syncvar_launcher.dry_run import dry_run_hosts
from syncvar_launcher.hosts.agent_connection import ssh_error_text
from syncvar_launcher.options.hostfile import parse_hosts
from syncvar_launcher.options.parse_options import parse, restrict_hosts
from syncvar_launcher.schedulers.allocation import allocation, find_allocation

SLURM = {  # of a batch script on n1, of sbatch --nodes=3 --ntasks=5
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_JOB_NODELIST": "n[1-2],gpu03",
    "SLURM_NODELIST": "n[1-2],gpu03",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "4(x3)",
    "SLURM_NNODES": "3",
    "ENVIRONMENT": "BATCH",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n1",
}
LSF = {
    "LSB_JOBID": "311",
    "LSB_MCPU_HOSTS": "a 2 b 4",
    "LSB_HOSTS": "a a b b b b",
    "LSB_DJOB_NUMPROC": "6",
}
PBS = {
    "PBS_JOBID": "12.pbs",
    "PBS_NODEFILE": "/var/spool/pbs/aux/12.pbs",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
    "PBS_VNODENUM": "0",
    "PBS_NP": "3",
}
NODES = "r1.cluster\nr1.cluster\nr2.cluster\n"


def found(environ, own="login"):
    return allocation(environ, own, lambda _: NODES)


def chosen(environ, folder, *line):
    (folder / "x.py").touch()
    return parse([*line, "x.py"], environ, folder, find_allocation)


def test_slurm():
    job = found(SLURM)
    assert [(one.name, one.slots, one.max_slots, one.origin) for one in job.hosts] == [
        ("n1", 2, 4, "SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE"),
        ("n2", 2, 4, "SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE"),
        ("gpu03", 1, 4, "SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE"),
    ]
    assert (job.name, job.here) == ("job 7 of Slurm", "n1")
    salloc = {
        name: value
        for name, value in SLURM.items()
        if name not in ("SLURMD_NODENAME", "SLURM_PROCID", "SLURM_NODEID", "ENVIRONMENT")
    }
    assert found(salloc).here == "", (
        "its shell runs where it was called, which is none of the job's hosts"
    )
    assert found(salloc, "n2.cluster").here == "n2"


def test_without_a_number_of_tasks_slurm_gives_processors():
    plain = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS"}
    assert [one.slots for one in found(plain).hosts] == [4, 4, 4]
    assert [one.slots for one in found(plain | {"SLURM_CPUS_PER_TASK": "2"}).hosts] == [2, 2, 2]
    assert [one.slots for one in found(plain | {"SLURM_NTASKS_PER_NODE": "2"}).hosts] == [2, 2, 1]
    assert found(plain).hosts[0].origin == "SLURM_JOB_NODELIST, SLURM_JOB_CPUS_PER_NODE"


def test_lsf_and_pbs():
    assert [(one.name, one.slots) for one in found(LSF).hosts] == [("a", 2), ("b", 4)]
    assert found(LSF, "b").here == "b"
    job = found(PBS, "r1")
    assert [(one.name, one.slots) for one in job.hosts] == [("r1.cluster", 2), ("r2.cluster", 1)]
    assert job.here == "r1.cluster"
    assert job.command(job.hosts[1], ["true"]) == ["pbsdsh", "-n", "2", "--", "true"], (
        "it counts lines of the file"
    )


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_JOB_ID": "7"}, {"LSB_JOBID": "1"}, {"PBS_JOBID": "1"}, {"PBS_NODEFILE": "/x"}],
)
def test_what_is_no_job(environ):
    assert found(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            SLURM | {"SLURM_TASKS_PER_NODE": "2"},
            "SLURM_TASKS_PER_NODE=2 has 1 numbers, and the job has 3 hosts (n1, n2, gpu03)",
        ),
        (SLURM | {"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST=n[1- cannot be understood"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}, "give -H, or --allocation off"),
        (LSF | {"LSB_MCPU_HOSTS": "a 2 b"}, "pairs of a host and a number"),
        (LSF | {"LSB_MCPU_HOSTS": "a none"}, "LSB_MCPU_HOSTS has 'none'"),
    ],
)
def test_what_cannot_be_understood_is_named(environ, words):
    with pytest.raises(ConfigError) as caught:
        found(environ)
    assert words in str(caught.value)


def test_the_node_file_of_pbs_is_on_the_first_host_only(tmp_path):
    with pytest.raises(
        ConfigError,
        match="it is only on the first host of the job: start syncvar-launch in the job's script",
    ):
        chosen(PBS | {"PBS_NODEFILE": str(tmp_path / "none")}, tmp_path)


def test_a_file_takes_away_and_adds_nothing():
    kept, said = restrict_hosts(found(SLURM), parse_hosts("gpu03.cluster:9,n1:1").hosts)
    assert [(one.name, one.slots) for one in kept] == [("gpu03", 4), ("n1", 1)]
    assert said == ("-H gives gpu03.cluster 9 slots, and job 7 of Slurm has 4 there: 4 count",)
    assert kept[0].origin == "-H, within SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE"
    with pytest.raises(
        ConfigError,
        match=r"-H names n9, which is not in job 7 of Slurm \(n1, n2, gpu03\); leave it out, or give --allocation off",
    ):
        restrict_hosts(found(SLURM), parse_hosts("n9:1").hosts)


def test_the_launcher_takes_hosts_and_slots_from_the_job(tmp_path):
    options = chosen(SLURM, tmp_path)
    assert [one.name for one in options.hosts.entries] == ["n1", "n2", "gpu03"]
    assert options.hosts.scheduled.starter.program == "srun"
    assert options.ranks.workers == 0, "all slots"
    assert [one.name for one in chosen(SLURM, tmp_path, "--exclude", "n2").hosts.entries] == [
        "n1",
        "gpu03",
    ]
    (tmp_path / "hosts").write_text("n2 slots=1\n")
    assert [
        (one.name, one.slots)
        for one in chosen(SLURM, tmp_path, "--hostfile", "hosts").hosts.entries
    ] == [("n2", 1)]
    by_ssh = chosen(SLURM, tmp_path, "--ssh", "ssh -q")
    assert [one.name for one in by_ssh.hosts.entries] == ["n1", "n2", "gpu03"]
    assert by_ssh.hosts.scheduled is None
    assert chosen(SLURM | {"SYNCVAR_LAUNCH_SSH": "ssh -q"}, tmp_path).hosts.scheduled is None
    for line in (("--allocation", "off"), ("--fake-hosts", "2", "-n", "2")):
        assert chosen(SLURM, tmp_path, *line).hosts.entries == ()
    assert (
        chosen(SLURM, tmp_path, "--allocation", "off", "-H", "elsewhere:2").hosts.entries[0].name
        == "elsewhere"
    )


def test_a_job_of_this_host_alone_is_one_as_anywhere(tmp_path):
    here = SLURM | {
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_TASKS_PER_NODE": "3",
        "SLURM_JOB_CPUS_PER_NODE": "4",
    }
    options = chosen(here, tmp_path)
    assert (options.hosts.entries, options.ranks.workers, options.origin["workers"]) == (
        (),
        3,
        "SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE",
    )
    assert chosen(here, tmp_path, "-n", "2").ranks.workers == 2
    assert chosen(here | {"SLURMD_NODENAME": ""}, tmp_path).hosts.entries[0].name == "n1", (
        "a shell of salloc is elsewhere"
    )


def test_what_others_have_started_in_the_job_takes_no_hosts(tmp_path):
    step = SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert chosen(step, tmp_path).hosts.entries == (), "each task would start on all of them"
    assert (
        len(
            chosen(
                step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, tmp_path
            ).hosts.entries
        )
        == 3
    )


def test_the_dry_run_says_where_each_figure_came_from_and_the_command(tmp_path):
    text = dry_run_hosts(chosen(SLURM, tmp_path, "--remote-python", "python3"))
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line}
    line = "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=n2 --overlap --mem=0 --cpu-bind=none --mpi=none --unbuffered python3 -P -c "
    assert f"n2 2, at most 4 SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE {line}" in " ".join(
        text.split()
    )
    assert "srun" not in lines["n1"].partition("TASKS_PER_NODE")[2]
    assert (
        "job 7 of Slurm: srun starts the agents on all hosts but n1; --ssh CMD does it otherwise"
        in text
    )
    assert "n2: ranks 2, 3" in text
    text = dry_run_hosts(chosen(LSF, tmp_path, "--remote-python", "python3"))
    assert "blaunch b 'exec python3 -P -c " in text
    (tmp_path / "nodes").write_text(NODES)
    text = dry_run_hosts(
        chosen(
            PBS | {"PBS_NODEFILE": str(tmp_path / "nodes")}, tmp_path, "--remote-python", "python3"
        )
    )
    assert f"PBS_NODEFILE={tmp_path}/nodes  pbsdsh -n 2 -- python3 -P -c " in text
    assert "syncvar_launcher.main --join ADDRESS:PORT --key-file KEYFILE --slots 1" in text


def test_what_srun_says_of_a_failure_is_told():
    (host,) = parse_hosts("n2:1").hosts
    words = "srun: error: Unable to create step for job 7: Requested node configuration is not available"
    assert ssh_error_text(host, 1, words, "python3", "srun") == f"srun ended with 1: {words}"
    assert "there is no python3 there" in ssh_error_text(
        host,
        2,
        "slurmstepd: error: execve(): python3: No such file or directory",
        "python3",
        "srun",
    )
    assert (
        ssh_error_text(host, None, "", "python3", "srun")
        == "it does not answer in time; does srun start anything there?"
    )
