"""--stage: the script's folder is copied to hosts, no more than is said, the ranks run the copy, and nothing of it is left."""

import os
import signal
import stat
import textwrap
from pathlib import Path

import pytest

from syncvar.core.errors import ConfigError, WireError
from syncvar_launcher.hosts import file_transfer
from syncvar_launcher.hosts.file_transfer import HostCopy, collect_files
from syncvar_launcher.options.parse_options import parse
from tests.support.joined_jobs import Joined, agents
from tests.support.launching import Job, await_true

SCRIPT = """
    import os, stat, sys
    from pathlib import Path
    here = Path(__file__).parent
    origin = Path(sys.argv[1])
    sys.path.insert(0, str(origin))  # where `probe` notes
    import probe
    import helper
    import syncvar as sv

    sv.barrier()
    probe.note("met", here=str(here), cwd=os.getcwd(), helper=helper.VALUE, found=sorted(str(one.relative_to(here)) for one in here.rglob("*") if one.name not in ("__pycache__",) and one.suffix != ".pyc"),
               tool=stat.S_IMODE((here / "tools" / "run.sh").stat().st_mode), link=os.readlink(here / "tools" / "same"), argv=sys.argv[1:],
               restarts=int(os.environ["SYNCVAR_RESTARTS"]))
    sv.barrier()  # all have noted
    if sv.rank() == 1 and "fail" in sys.argv and os.environ["SYNCVAR_RESTARTS"] == "0":
        raise ValueError("once")
    if "wait" in sys.argv:
        probe.gate("go", 60)
"""


def folder_of(tmp_path):
    """Make a folder with all that may be met there."""
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    (folder / "helper.py").write_text("VALUE = 7\n")
    (folder / "tools" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "tools" / "run.sh").chmod(0o750)
    (folder / "tools" / "same").symlink_to(folder / "helper.py")
    (folder / "empty").mkdir()
    (folder / "big.bin").write_bytes(os.urandom(1 << 20))
    for name in (".git", "__pycache__", "venv"):
        (folder / name).mkdir()
        (folder / name / "thing").write_text("x")
    (folder / "venv" / "pyvenv.cfg").write_text("")
    (tmp_path / "secret").write_text("of nobody's business")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "pipe")
    return folder


def there(tmp_path, runtime):
    return [path for path in runtime.rglob("*") if path.name in ("stage", "helper.py")]


def target_of(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    return folder, [str(folder / "train.py"), str(tmp_path)]


@pytest.fixture
def runtime(runtime, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime


def check(job, folder, runtime, count=2):
    met = job.events("met")
    assert len(met) == count, job
    for event in met:
        assert event["cwd"] == event["here"], event
        assert Path(event["here"]).is_relative_to(runtime), event
        assert event["found"] == [
            "big.bin",
            "empty",
            "helper.py",
            "tools",
            "tools/run.sh",
            "tools/same",
            "train.py",
        ], event
        assert (event["helper"], stat.S_IMODE(event["tool"]), event["link"]) == (
            7,
            0o750,
            "../helper.py",
        ), event
    assert "--stage copies to each host 4 files (1.0 MiB) of " in job.err, job
    for name in (".git/", "__pycache__/", "out (a link out of it) and 3 more"):
        assert name in job.err, job


def test_ranks_run_the_copy_on_hosts_of_a_list_again_after_a_failure_and_it_is_removed(
    tmp_path, runtime
):
    folder, target = target_of(tmp_path)
    job = Job(
        tmp_path,
        target=target,
        arguments=["fail"],
        options=("-H", "localhost:2", "--stage", "--max-restarts", "1"),
    )
    try:
        assert job.wait(120) == 0, job
    finally:
        job.close()
    check(job, folder, runtime, 4)
    assert len({event["here"] for event in job.events("met")}) == 1  # copied once
    assert not there(tmp_path, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["order", "launcher killed", "agent killed"])
def test_ranks_run_the_copy_on_hosts_that_join_and_it_is_removed_whoever_ends(
    tmp_path, runtime, end
):
    folder, target = target_of(tmp_path)
    job = Joined(tmp_path, None, 2, "--stage", target=target, arguments=["wait"])
    try:
        first = job.join("--slots", "1")
        job.join("--slots", "1")
        job.await_events("met", 2)
        assert there(tmp_path, runtime)
        if end == "order":
            job.open_gate("go")
        elif end == "launcher killed":
            job.process.kill()
        else:
            os.kill(agents(first)[0], signal.SIGKILL)
        assert job.wait(120) == {"order": 0, "launcher killed": -9, "agent killed": 70}[end], job
        job.codes()
    finally:
        job.close()
    check(job, folder, runtime)
    await_true(lambda: not there(tmp_path, runtime), what="the end of the copy")


def options_of(tmp_path, *words):
    return parse([*words, "-H", "other:2", "--stage", "train.py"], {}, tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        ("../x", "file", ""),
        ("/tmp/x", "file", ""),
        ("a/../../x", "folder", ""),
        ("x", "link", "../y"),
        ("x", "link", "/etc/passwd"),
        ("x", "device", ""),
    ],
    ids=str,
)
def test_an_agent_makes_nothing_outside_the_copy(tmp_path, runtime, entry):
    path, what, leads_to = entry
    copy = HostCopy()
    try:
        with pytest.raises(WireError):
            copy.take(
                {
                    "kind": "stage",
                    "path": path,
                    "type": what,
                    "mode": 0o644,
                    "link_target": leads_to,
                }
            )
    finally:
        copy.close()
    assert not list(tmp_path.rglob("*"))
    assert list(runtime.rglob("*")) == [runtime / "syncvar", runtime / "syncvar" / ".lock"]


def test_a_copy_that_has_no_room_is_told_with_the_reason(runtime):
    copy = HostCopy()
    try:
        copy.take({"kind": "stage", "path": "x", "type": "file", "mode": 0o644, "link_target": ""})
        copy.take({"kind": "stage", "path": "x", "type": "file", "mode": 0o644, "link_target": ""})
        answer = copy.take({"kind": "stage_end"})
    finally:
        copy.close()
    assert answer["folder"] == ""
    assert "File exists" in answer["reason"]


def test_what_is_too_much_is_refused_before_anything_is_sent(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("x" * 100)
    assert collect_files(options_of(tmp_path)).nbytes == 100
    monkeypatch.setattr(file_transfer, "FILES_MAX", 0)
    with pytest.raises(
        ConfigError,
        match=r"--stage copies at most 0 files and 100 MiB, and .* has more: give the script a folder of its own",
    ):
        collect_files(options_of(tmp_path))
    monkeypatch.setattr(file_transfer, "FILES_MAX", 10)
    with (tmp_path / "data").open("wb") as file:
        file.truncate((100 << 20) + 1)
    with pytest.raises(ConfigError, match=r"at most 10 files and 100 MiB"):
        collect_files(options_of(tmp_path))


def test_the_key_is_never_copied(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "key").write_text("0" * 64)
    found = collect_files(
        parse(
            ["--listen", "127.0.0.1", "--hosts", "2", "--key-file", "key", "--stage", "train.py"],
            {},
            tmp_path,
        )
    )
    assert [path for path, *_ in found.entries] == ["train.py"]
    assert found.left_out == ("key (the key)",)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--stage", "train.py"], "none are named"),
        (["-H", "a:1", "--stage", "--cwd", "/", "train.py"], "--cwd names another folder"),
    ],
)
def test_what_contradicts_is_refused(tmp_path, words, why):
    with pytest.raises(ConfigError, match=why):
        parse(words, {}, tmp_path)


def test_a_script_that_is_not_here_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file train\.py in"):
        collect_files(options_of(tmp_path))
