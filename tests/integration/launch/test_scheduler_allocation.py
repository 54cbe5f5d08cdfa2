"""Jobs inside a scheduler's: agents started by its own command in place of ssh. The commands are stand-ins, of which each says for what.

All their hosts are this machine, which therefore counts once, with the slots of all.
"""

import os
import re
import signal
import sys

import pytest

SCRIPT = """
import os
import syncvar as sv
print("met", sv.rank(), sv.world_size(), sv.all_reduce(1), "SYNCVAR_KEY" in os.environ, flush=True)
"""
# srun: options first, then words that are run as they are, without a shell; input and output of its one task are its own.
SRUN = """
words = sys.argv[1:]
with open(log, "a") as file:
    print(words, sorted(name for name in os.environ if name.startswith(("SLURM_", "SYNCVAR_KEY"))), file=file)
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    if name == "--nodelist":
        os.environ["SLURMD_NODENAME"] = value
os.environ.update(SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
os.execvp(words[0], words)
"""
# blaunch: a host, then words that it hands to a shell there, as rsh does; input and output are its own.
BLAUNCH = """
open(log, "a").write(sys.argv[1] + "\\n")
os.execv("/bin/sh", ["sh", "-c", " ".join(sys.argv[2:])])
"""
# pbsdsh -n PLACE -- words: tm_spawn starts them with no input, and what they write goes to the output of the job, not here.
PBSDSH = """
option, place, dashes, *words = sys.argv[1:]
assert (option, dashes) == ("-n", "--")
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
nothing = os.open("/dev/null", os.O_RDONLY)
for number, descriptor in enumerate((nothing, out, out)):
    os.dup2(descriptor, number)
os.environ.update(PBS_VNODENUM=place, PBS_TASKNUM=str(int(place) + 1))
os.execvp(words[0], words)
"""
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "n1",
    "SLURM_LABELIO": "1",
}


@pytest.fixture
def inside(launch, tmp_path):
    """Start a job inside a scheduler's whose command is a stand-in; `inside.log` is what that wrote."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()

    def start(name, program, script=SCRIPT, **named):
        stand_in = bin_folder / name
        stand_in.write_text(
            f"#!{sys.executable}\nimport os, sys\nlog = {str(tmp_path / 'log')!r}\n{program}"
        )
        stand_in.chmod(0o755)
        environ = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(tmp_path)} | named.pop(
            "env"
        )
        return launch(script, env=environ, **named)

    start.log = tmp_path / "log"
    return start


def test_srun_starts_the_agents_of_other_hosts_in_place_of_ssh(inside):
    job = inside("srun", SRUN, workers=3, env=SLURM | {"SYNCVAR_KEY": "5" * 64})
    assert job.wait(120) == 0, job
    assert sorted(re.findall(r"met (\d) 3 3 False", job.out)) == ["0", "1", "2"]
    (line,) = inside.log.read_text().splitlines()
    assert "'--nodelist=n2', '--overlap'" in line
    assert "'--unbuffered'" in line
    assert "n1" not in line, "the launcher's own host needs no way"
    assert "SLURM_JOB_ID" in line
    assert "SLURM_LABELIO" not in line, "a label before each line would be no message"
    assert "SYNCVAR_KEY" not in line
    assert "n2 and n1 are one machine" in job.err


@pytest.mark.slow
def test_blaunch_starts_the_agents_in_a_job_of_lsf(inside):
    job = inside("blaunch", BLAUNCH, workers=2, env={"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "a 1 b 1"})
    assert job.wait(120) == 0, job
    assert job.out.count(" 2 2 False") == 2
    assert sorted(inside.log.read_text().split()) == ["a", "b"]


@pytest.mark.slow
def test_where_pbsdsh_has_no_pipes_the_hosts_join(inside, tmp_path):
    (tmp_path / "nodes").write_text("r1\nr1\nr2\nr2\n")
    environ = {"PBS_JOBID": "12", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_VNODENUM": "0"}
    job = inside("pbsdsh", PBSDSH, workers=2, options=("-H", "r2"), env=environ)
    assert job.wait(120) == 0, job
    assert job.out.count(" 2 2 False") == 2
    assert "joined" in inside.log.read_text()
    assert "waiting for" not in job.err, "nobody is to do anything"
    assert not list((tmp_path / ".syncvar").iterdir()), "the key is gone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environ", "line"),
    [
        ("srun", SLURM | {"SLURMD_NODENAME": ""}, ()),
        ("pbsdsh", {"PBS_JOBID": "12", "PBS_NODEFILE": "nodes"}, ()),
    ],
    ids=["srun", "pbsdsh"],
)
def test_a_command_that_fails_is_told_with_its_words_and_nothing_is_started(
    inside, tmp_path, name, environ, line
):
    if "PBS_NODEFILE" in environ:
        (tmp_path / "nodes").write_text("r1\n")
        environ = environ | {"PBS_NODEFILE": str(tmp_path / "nodes")}
    job = inside(name, "sys.exit('it is forbidden')", options=line, workers=1, env=environ)
    assert job.wait(120) == 69, job
    assert "nothing was started" in job.err
    assert "it is forbidden" in job.err
    assert f"{name} ended with 1" in job.err


@pytest.mark.slow
def test_a_rank_that_is_killed_where_srun_has_started_it_ends_the_job(inside):
    script = f"import os, syncvar as sv\nsv.barrier()\nif sv.rank() == 0: os.kill(os.getpid(), {signal.SIGKILL})\nsv.barrier()\n"
    job = inside("srun", SRUN, script, workers=2, options=("-H", "n2:2"), env=SLURM)
    assert job.wait(120) == 128 + signal.SIGKILL, job
    assert "rank 0" in job.err
