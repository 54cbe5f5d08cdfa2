"""Agents of hosts that end while the launcher still asks them: it waits for nothing that cannot come."""

import os

import pytest

from syncvar.errors import HostUnreachable
from syncvar_launcher import fleet, options, staging
from syncvar_launcher.hostfile import Host
from syncvar_launcher.remote import RemoteHost, started


@pytest.fixture
def gone():
    """The way to an agent that has ended, as the launcher knows already."""
    one = RemoteHost(Host("node1"), started(["true"]))
    one.process.wait(60)
    one.drain()
    assert one.why_gone
    yield one
    one.close()


def refuse(remotes, timeout_s, others=()):
    raise AssertionError(f"the launcher waits up to {timeout_s} s for hosts that are gone")


def chosen(folder, *arguments):
    (folder / "script.py").touch()
    words = ["-H", "node1:2", *arguments, str(folder / "script.py")]
    return options.parse(words, os.environ, folder)


def test_no_answer_is_awaited_of_an_agent_that_is_gone(gone, monkeypatch, tmp_path):
    monkeypatch.setattr(fleet, "polled", refuse)
    job = fleet.Fleet(chosen(tmp_path), print)
    job.sites = [fleet.Site(gone, "node1", 2, "127.0.0.1", {})]
    with pytest.raises(HostUnreachable, match="node1"):
        job.free_port()


def test_a_copy_for_a_host_that_is_gone_is_given_up_at_once(gone, monkeypatch, tmp_path):
    asked = []
    polled = staging.polled
    monkeypatch.setattr(staging, "polled", lambda *given: asked.append(given[1]) or polled(*given))
    why = staging.stage([gone], staging.collected(chosen(tmp_path, "--stage")))
    assert list(why) == ["node1"]
    assert set(asked) == {0.0}
