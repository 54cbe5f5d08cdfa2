"""Agents of hosts that end while the launcher still asks them: it waits for nothing that cannot come."""

import os
import signal
from pathlib import Path

import pytest

from syncvar.core.errors import HostUnreachable
from syncvar.core.progress_line import ProgressLine
from syncvar_launcher.hosts import file_transfer, multi_host
from syncvar_launcher.hosts.agent_connection import RemoteHost, start_agent
from syncvar_launcher.options.hostfile import Host
from syncvar_launcher.options.parse_options import parse
from tests.support.launching import await_true, state


@pytest.fixture
def gone():
    """The way to an agent that has ended, as the launcher knows already."""
    one = RemoteHost(Host("node1"), start_agent(["true"]))
    one.process.wait(60)
    one.drain()
    assert one.loss_reason
    yield one
    one.close()


def refuse(remotes, timeout_s, others=()):
    raise AssertionError(f"the launcher waits up to {timeout_s} s for hosts that are gone")


def chosen(folder, *arguments):
    (folder / "script.py").touch()
    words = ["-H", "node1:2", *arguments, str(folder / "script.py")]
    return parse(words, os.environ, folder)


def test_no_answer_is_awaited_of_an_agent_that_is_gone(gone, monkeypatch, tmp_path):
    monkeypatch.setattr(multi_host, "poll_hosts", refuse)
    job = multi_host.JobHosts(chosen(tmp_path), print)
    job.sites = [multi_host.HostSlot(gone, "node1", 2, "127.0.0.1", {})]
    with pytest.raises(HostUnreachable, match="node1"):
        job.free_port()


def test_a_copy_for_a_host_that_is_gone_is_given_up_at_once(gone, monkeypatch, tmp_path):
    asked = []
    poll_hosts = file_transfer.poll_hosts
    monkeypatch.setattr(
        file_transfer, "poll_hosts", lambda *given: asked.append(given[1]) or poll_hosts(*given)
    )
    why = file_transfer.stage(
        [gone], file_transfer.collect_files(chosen(tmp_path, "--stage")), ProgressLine(None)
    )
    assert list(why) == ["node1"]
    assert set(asked) == {0.0}


WAITS = """
import time
import probe, syncvar as sv

sv.barrier()
probe.note("there")
time.sleep(600)
"""


def children(parent, word):
    """Return the children of a process whose command lines have a word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if above == parent and word in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_the_next_launch_removes_what_a_killed_agent_and_its_guardian_have_left(launch, runtime):
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    job = launch(WAITS, options=("-H", "localhost:2"), env=env)
    ranks = [event["pid"] for event in job.await_events("there", 2)]
    (agent,) = children(job.process.pid, b"agent_main")
    (guardian,) = children(agent, b"process_sessions.py")
    for pid in (guardian, agent):
        os.kill(pid, signal.SIGKILL)
    assert job.wait() == 70, str(job)
    assert "its agent has ended" in job.report, str(job)
    for pid in ranks:
        await_true(lambda rank=pid: not state(rank), what="the end of a rank")
    assert [one.name for one in (runtime / "syncvar").iterdir() if one.is_dir()], "nobody cleans"
    job = launch("import syncvar as sv; sv.barrier()", options=("-H", "localhost:2"), env=env)
    assert job.wait() == 0, str(job)
    assert not [one.name for one in (runtime / "syncvar").iterdir() if one.is_dir()]


KILLS = """
import os, signal, sys
from pathlib import Path

if "agent_main" in Path("/proc/self/cmdline").read_text():
    from syncvar.bootstrap.job_private import JobDirectory

    JobDirectory.remove = lambda self: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("options", [(), ("--stage",)], ids=str)
def test_the_folder_of_an_agent_that_is_killed_before_it_removes_it_is_removed(
    launch, tmp_path, runtime, options
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(KILLS)
    env = {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(tmp_path / "site")}
    job = launch(
        "import syncvar as sv; sv.barrier()", options=("-H", "localhost:2", *options), env=env
    )
    job.wait()
    await_true(
        lambda: not [one for one in (runtime / "syncvar").iterdir() if one.is_dir()],
        what="the removal of all folders",
    )


LINGERS = """
import time
from pathlib import Path

if "agent_main" in Path("/proc/self/cmdline").read_text():
    from syncvar_launcher.hosts.agent_main import HostAgent

    close = HostAgent.close
    HostAgent.close = lambda self: (close(self), time.sleep(0.7))
"""
STOPS = """
import os, signal, sys, time
import probe, syncvar as sv

signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
sv.barrier()
probe.note("there", restarts=os.environ["SYNCVAR_RESTARTS"])
if os.environ["SYNCVAR_RESTARTS"] == "0":
    time.sleep(600)
"""


def test_workers_start_again_by_a_new_agent_where_the_released_one_is_still_ending(
    launch, tmp_path
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LINGERS)
    job = launch(
        STOPS,
        options=("-H", "localhost:2", "--max-restarts", "1"),
        env={"PYTHONPATH": str(tmp_path / "site")},
    )
    job.await_events("there", 2)
    (agent,) = children(job.process.pid, b"agent_main")
    os.kill(agent, signal.SIGTERM)
    assert job.wait() == 0, str(job)
    assert [event["restarts"] for event in job.events("there")] == ["0", "0", "1", "1"], str(job)
