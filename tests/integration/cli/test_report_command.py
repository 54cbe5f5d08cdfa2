"""`syncvar report` of jobs that run or have failed, with secrets in every place that it reads."""

import io
import json
import os
import zipfile

import pytest

from syncvar.cli.commands import main

SECRETS = {
    "in the environment": "env0sEcRetValue17",
    "in the command": "cmd0sEcRetValue18",
    "in the output": "out0sEcRetValue19",
    "in an exception": "exc0sEcRetValue20",
    "in a key": "0123456789abcdef" * 4,
}
HOST = "node-of-the-test"
PRIVATE = {
    "REPORT_API_TOKEN": SECRETS["in the environment"],
    "SYNCVAR_TEST_SECRET": SECRETS["in the environment"] + "b",
    "OMP_NOTE": "aB3dE5gH7jK9mN1pQ3sT5vW7x",
}
SCRIPT = f"""
import numpy as np
import os, sys
import probe, syncvar as sv

sv.all_reduce(np.ones(3))
print("login with password={SECRETS["in the output"]} from", os.environ["HOME"] + "/data.csv")
print("sent", os.environ["REPORT_API_TOKEN"], "and", "{SECRETS["in a key"]}", "to {HOST}", flush=True)
probe.note("ready")
if "hang" in sys.argv:
    probe.gate("end")
    sys.exit()
if sv.rank() == 1:
    raise ValueError("https://ann:{SECRETS["in an exception"]}@example.org/ cannot be read")
sv.all_reduce(np.ones(3))
"""


@pytest.fixture
def report(capsys, monkeypatch, tmp_path, jobs_of_this_test):
    """Run `syncvar report` in this process; return name -> text of its files, and what it printed."""
    monkeypatch.setattr("syncvar.cli.redaction.socket.gethostname", lambda: HOST)
    for name, text in PRIVATE.items():
        monkeypatch.setenv(name, text)

    def run(*arguments):
        capsys.readouterr()
        path = tmp_path / "report.zip"
        assert main(["report", *map(str, arguments), "-o", str(path)]) == 0
        assert path.stat().st_mode & 0o777 == 0o600
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            files = {name: archive.read(name).decode() for name in archive.namelist()}
        return files, capsys.readouterr().out

    return run


def check_no_secret(files, printed, *others):
    for name, text in {**files, "what is printed": printed}.items():
        for place, secret in SECRETS.items():
            assert secret not in text, (name, place)
        for secret in (*PRIVATE.values(), *others):
            assert secret not in text, (name, secret)


def launched(launch, *arguments):
    home = {"HOME": "/data/people/ann", **PRIVATE}
    options = ("--log-dir", "logs", "--env", f"DB_PASSWORD={SECRETS['in the command']}")
    return launch(SCRIPT, options=options, arguments=arguments, env=home)


def test_a_failed_job_is_reported_without_secrets(launch, report, monkeypatch):
    job = launched(launch)
    assert job.wait() == 1, str(job)
    logs = next(job.folder.rglob("rank-0.out")).parent
    folder = next(path.parent for path in job.folder.rglob("flight-rank0.json"))
    monkeypatch.setenv("HOME", "/data/people/ann")
    files, printed = report(folder)
    assert {"doctor.txt", "doctor.json", "versions.txt", "settings.txt"} <= set(files)
    assert "ValueError" in files["explain.txt"], files["explain.txt"]
    assert "REPORT_API_TOKEN" not in files["environment.txt"]  # it is no variable of a launcher
    assert "SYNCVAR_TEST_SECRET=<secret SYNCVAR_TEST_SECRET>" in files["environment.txt"]
    assert "OMP_NOTE=<secret OMP_NOTE>" in files["environment.txt"]
    record = json.loads(files["records/flight-rank1.json"])
    assert record["format"] == "syncvar flight record 1"
    assert "<secret>@example.org" in record["reason"]
    check_no_secret(files, printed)
    if logs != folder:
        more, printed = report(logs)
        files |= {name: text for name, text in more.items() if name.startswith("logs/")}
    assert "password=<secret> from ~/data.csv" in files["logs/rank-0.out"], files["logs/rank-0.out"]
    assert "to host1" in files["logs/rank-0.out"]
    check_no_secret(files, printed, "/data/people/ann", HOST)
    assert "secrets (" in printed
    assert "logs/rank-0.out" in printed


def test_a_running_job_is_reported_with_its_stacks(launch, report, monkeypatch):
    job = launched(launch, "hang", "--token", SECRETS["in the command"])
    job.await_events("ready", 2)
    files, printed = report(job.process.pid)
    assert "running since" in files["README.txt"]
    assert "--token <secret>" in files["README.txt"], files["README.txt"]
    assert "in gate" in files["stacks.txt"], files["stacks.txt"]
    assert json.loads(files["status.json"])["format"] == "syncvar status 1"
    assert "password=<secret>" in files["log.txt"], files["log.txt"]
    check_no_secret(files, printed)
    kept, _ = report(job.process.pid, "--keep-hosts")
    assert len(kept) == len(files)
    job.open_gate("end")
    assert job.wait() == 0, str(job)


def test_the_answer_about_a_status_is_part_of_the_report(report, monkeypatch):
    about = {
        "name": "0a1b2c3d",
        "pid": os.getpid(),
        "lasted_s": 3.0,
        "command": "syncvar-launch a.py",
        "hosts": [HOST],
    }
    status = {
        "format": "syncvar status 1",
        "job": about,
        "ranks": [{"rank": 0, "waits": {2: 0.3}, "host": HOST}],
        "log": [f"[0] password={SECRETS['in the output']}"],
    }
    monkeypatch.setattr("syncvar.cli.report.find_jobs", lambda *_: ("socket", []))
    monkeypatch.setattr(
        "syncvar.cli.report.ask",
        lambda _, question, **__: dict(status) if question == "status" else {"job": about},
    )
    files, printed = report("0a1b2c3d")
    assert json.loads(files["status.json"])["ranks"] == [
        {"rank": 0, "waits": {"2": 0.3}, "host": "host1"}
    ]
    assert files["log.txt"] == "[0] password=<secret>\n"
    assert "stacks.txt" not in files
    check_no_secret(files, printed, HOST)


def test_without_a_job_it_is_about_the_machine(report, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    files, printed = report()
    assert "job: none" in files["README.txt"]
    assert "records" not in "".join(files)
    check_no_secret(files, printed, HOST)


def test_an_unknown_job_and_a_path_without_a_folder_are_errors(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    assert main(["report", "ffffffff"]) == 2
    assert "ffffffff" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no/such.zip")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not [*tmp_path.glob("*.tmp")]
