"""Where evidence of failed jobs goes: private, refused where others could lay hands on it, the last ten jobs only."""

import os
import threading

import pytest

from syncvar.cli.commands import main
from syncvar.core.output_files import (
    JOBS_MAX,
    find_job,
    job_folders,
    job_name,
    keep_newest,
    remove_job,
    state_folder,
)


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "tmp").mkdir()
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
    }


def test_the_state_folder_else_the_home_else_a_folder_for_temporary_files(environ, tmp_path):
    assert state_folder(environ) == (tmp_path / "state/syncvar", "")
    assert state_folder(environ | {"XDG_STATE_HOME": "relative"}) == (
        tmp_path / "home/.local/state/syncvar",
        "",
    )
    spare = tmp_path / f"tmp/syncvar-state-{os.geteuid()}"
    path, refusal = state_folder({"TMPDIR": str(tmp_path / "tmp")})
    assert path == spare
    assert refusal == "neither XDG_STATE_HOME nor HOME names a folder; set one"
    assert not spare.exists(), "nothing is made by looking"
    assert not (tmp_path / "state").exists()


def spoil(folder, how, monkeypatch):
    """Make a folder one that must not be used; return what must be said of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if how == "link":
        (folder.parent / "elsewhere").mkdir()
        folder.symlink_to(folder.parent / "elsewhere")
        return "it is no folder; remove it"
    if how == "file":
        folder.write_text("")
        return "it is no folder; remove it"
    if how == "open parent":
        folder.parent.chmod(0o777)
        return "everybody may rename files in"
    folder.mkdir(mode=0o700)
    if how in ("group", "others"):
        folder.chmod(0o770 if how == "group" else 0o707)
        return f"chmod 700 {folder}"
    if how == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: 54321)  # everything here is another user's
        return "it belongs to user"
    assert how == "read-only"
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != str(folder) and access(path, mode)
    )  # root may write anywhere
    return "it cannot be written to"


@pytest.mark.parametrize(
    "how", ["link", "file", "open parent", "group", "others", "foreign", "read-only"]
)
def test_a_folder_that_others_could_lay_hands_on_is_refused_with_the_remedy(
    environ, tmp_path, how, monkeypatch
):
    words = spoil(tmp_path / "state/syncvar", how, monkeypatch)
    path, refusal = state_folder(environ)
    assert words in refusal
    assert str(tmp_path / "state/syncvar") in refusal
    assert path == tmp_path / f"tmp/syncvar-state-{os.geteuid()}"
    if how != "open parent":
        spoil(path, how, monkeypatch)
        assert state_folder(environ).path is None


def made(folder, number, name="flight-rank0.json"):
    path = folder / job_name(f"{number:08x}")
    path.mkdir(parents=True)
    (path / name).write_text("{}")
    os.utime(path / name, ns=(number * 10**9, number * 10**9))
    return path


def test_the_last_jobs_are_kept_and_what_is_not_a_job_stays(tmp_path):
    jobs = [made(tmp_path, number) for number in range(JOBS_MAX + 5)]
    draft = jobs[0] / "flight-rank1.generation2.json.77.tmp"  # of a worker that was killed
    draft.write_text("{}")
    os.utime(draft, ns=(1, 1))
    (jobs[1] / "notes.txt").write_text("mine")  # not ours: it stays, and its folder with it
    (tmp_path / "my-job").mkdir()
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "flight-rank0.json").write_text("{}")
    (tmp_path / job_name("f" * 32)).symlink_to(outside)
    keep_newest(tmp_path)
    assert job_folders(tmp_path) == list(reversed(jobs[5:]))
    assert not jobs[0].exists()
    assert [path.name for path in jobs[1].iterdir()] == ["notes.txt"]
    assert (tmp_path / "my-job").exists()
    assert (outside / "flight-rank0.json").exists()


def test_several_launchers_remove_old_jobs_at_once(tmp_path):
    jobs = [made(tmp_path, number) for number in range(40)]
    together, errors = threading.Barrier(4), []

    def remove():
        together.wait(10)
        try:
            keep_newest(tmp_path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert job_folders(tmp_path) == list(reversed(jobs[-JOBS_MAX:]))


def test_a_folder_for_logs_keeps_all_but_records(tmp_path):
    for name in (
        "flight-rank0.json",
        "flight-rank12.generation1.json",
        "rank-0.out",
        "flight-ranks.json",
    ):
        (tmp_path / name).write_text("")
    remove_job(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight-ranks.json", "rank-0.out"]


def test_explain_takes_the_newest_job_or_the_one_that_is_named(
    environ, tmp_path, monkeypatch, capsys
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["explain"]) == 2
    told = capsys.readouterr().err
    assert "there are no flight records of any job" in told
    assert "--log-dir" in told
    jobs = [made(tmp_path / "state/syncvar", number) for number in (3, 2, 1)]
    assert find_job(environ) == jobs[0]
    assert find_job(environ, jobs[2].name[-8:]) == jobs[2]
    assert main(["explain"]) == 2
    assert f"{jobs[0]}/flight-rank0.json is not a flight record" in capsys.readouterr().err
    assert main(["explain", jobs[1].name[-8:]]) == 2
    assert f"{jobs[1]}/flight-rank0.json is not a flight record" in capsys.readouterr().err
    assert main(["explain", "01234567"]) == 2
    assert "there are no flight records of job 01234567" in capsys.readouterr().err
