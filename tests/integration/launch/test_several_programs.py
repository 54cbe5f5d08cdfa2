"""Several programs in one job: they share a world, and each has its own ranks, arguments and variables."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from syncvar.cli.commands import main
from tests.support.launching import Job, await_true

SCRIPT = """
import json, os, sys, time
import syncvar as sv

name, words = os.path.basename(__file__), sys.argv[1:]
about = {"script": name, "words": words, "total": int(sv.all_reduce(sv.rank())), "size": sv.world_size()}
about |= {variable: os.environ.get(variable) for variable in ("SYNCVAR_PROGRAM", "OWN", "JOB")}
print(json.dumps({**about, "restarts": sv.restart_count(), "folder": sys.path[0]}))
if "fail" in words and name == "second.py" and not sv.restart_count():
    raise ValueError("no model")
if "wait" in words and name == "second.py":
    time.sleep(600)
sv.barrier()
"""


@pytest.fixture
def start(tmp_path):
    """Start jobs in a folder with two programs; those that still run at the end are ended."""
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text(SCRIPT)
    jobs = []

    def begin(*words, **keywords):
        jobs.append(Job(tmp_path, target=list(words), **keywords))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def run(folder, *words, **variables):
    """Run a job with the default settings to its end; return rank -> what it printed."""
    (folder / "first.py").write_text(SCRIPT)
    (folder / "second.py").write_text(SCRIPT)
    job = subprocess.run(
        [sys.executable, "-m", "syncvar_launcher", *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert "the ranks differ" not in job.stderr
    return printed(job.stdout)


def printed(text):
    lines = [line.split("] ", 1) for line in text.splitlines() if "] {" in line]
    return {int(rank.removeprefix("[")): json.loads(about) for rank, about in lines}


def programs_of(text):
    """Return the programs in lines about ranks, which are alike or not."""
    return set(re.findall(r"^ *ranks? [-, 0-9]+ \(([^)]+)\): ", text, re.MULTILINE))


def of(ranks, name):
    """Return one thing that the ranks printed, in their order."""
    return [about[name] for _, about in sorted(ranks.items())]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_two_programs_share_one_world(start, tmp_path, method):
    job = start(
        *("--env", "OWN=a", "first.py", "x", "\\:", ":"),
        *("--env", "OWN=b", "-m", "second", "-n", "9", "\\\\:"),
        start=method,
        env={"SYNCVAR_LAUNCH_ENV": "JOB=j"},
    )
    assert job.wait() == 0, str(job)
    ranks = printed(job.out)
    assert sorted(ranks) == [0, 1, 2], str(job)
    assert of(ranks, "script") == ["first.py", "first.py", "second.py"]
    assert of(ranks, "words") == [["x", ":"], ["x", ":"], ["-n", "9", "\\:"]]
    assert of(ranks, "OWN") == ["a", "a", "b"]
    assert of(ranks, "SYNCVAR_PROGRAM") == ["0", "0", "1"]
    assert of(ranks, "JOB") == ["j"] * 3
    assert of(ranks, "total") == of(ranks, "size") == [3] * 3
    assert of(ranks, "folder") == [str(tmp_path)] * 3
    assert job.err == "", "no warning that the scripts of the ranks differ"


def test_a_failure_names_the_program(start):
    job = start("first.py", "fail", ":", "second.py", "fail")
    assert job.wait() == 1, str(job)
    assert job.report.startswith("syncvar: rank 2 (second.py) on "), job.report
    assert programs_of(job.report.partition("others:")[2]) == {"first.py"}, job.report
    assert " first.py fail : second.py fail\n" in job.report, "a command to try"


@pytest.mark.slow
def test_all_programs_start_again_after_a_failure(start, tmp_path):
    events = tmp_path / "events"
    job = start(
        *("--max-restarts", "1", "--events", str(events), "first.py", "fail"),
        *(":", "second.py", "fail"),
        env={"SYNCVAR_RESTART_DELAY_S": "0"},
    )
    assert job.wait() == 0, str(job)
    ranks = printed(job.out)  # the last line of each
    assert of(ranks, "script") == ["first.py", "first.py", "second.py"]
    assert of(ranks, "restarts") == [1, 1, 1]
    assert "rank 2 (second.py) on " in job.report
    assert json.loads(events.read_text().split("\n")[0])["programs"] == [
        {"kind": "script", "target": "first.py", "workers": 2},
        {"kind": "script", "target": "second.py", "workers": 1},
    ]


@pytest.mark.slow
def test_stacks_and_an_interruption_name_the_programs(start, capsys):
    job = start("first.py", ":", "-m", "second", "wait")

    def stacks():
        capsys.readouterr()
        main(["stacks", str(job.process.pid)])
        return programs_of(capsys.readouterr().out) == {"first.py", "-m second"}

    await_true(lambda: len(printed(job.out)) == 3, what="three lines")
    await_true(stacks, what="the stacks of both programs")
    job.send(signal.SIGINT)
    assert job.wait() == 130, str(job)
    assert programs_of(job.report) == {"first.py", "-m second"}, job.report


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--stage",)], ids=str)
def test_hosts_run_several_programs(tmp_path, option):
    """The first program takes the slots that the others leave."""
    ranks = run(
        tmp_path,
        *("--hosts", "localhost:4", *option, "-x", "OWN=a", "first.py", "x"),
        *(":", "-x", "OWN=b", "second.py", ":", "-m", "second"),
        SYNCVAR_LAUNCH_ENV="JOB=j",
    )
    assert of(ranks, "script") == ["first.py", "first.py", "second.py", "second.py"]
    assert of(ranks, "SYNCVAR_PROGRAM") == ["0", "0", "1", "2"]
    assert of(ranks, "OWN") == ["a", "a", "b", None]
    assert of(ranks, "JOB") == ["j"] * 4
    assert of(ranks, "size") == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("where", [("--fake-hosts", "2"), ("--hosts", "localhost:3")], ids=str)
def test_a_command_stands_beside_python_programs(tmp_path, where):
    """Only the command finds the secret of the job in a file, as its wrapper may close descriptors."""
    ranks = run(
        tmp_path,
        *(*where, "-n", "2", "first.py", ":", "--no-python", "sh", "-c"),
        f"OWN=${{SYNCVAR_KEY_FILE:+file}} exec {sys.executable} second.py",
        PYTHONPATH=os.getcwd(),
    )
    assert of(ranks, "script") == ["first.py", "first.py", "second.py"]
    assert of(ranks, "OWN") == [None, None, "file"]


@pytest.mark.slow
def test_a_forked_program_in_another_folder_finds_its_own_modules(start, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "second.py").rename(tmp_path / "other" / "second.py")
    job = start("first.py", ":", "other/second.py", start="fork")
    assert job.wait() == 0, str(job)
    folders = of(printed(job.out), "folder")
    assert folders == [str(tmp_path)] * 2 + [str(tmp_path / "other")]
