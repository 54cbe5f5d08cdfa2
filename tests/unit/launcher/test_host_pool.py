"""Which hosts an elastic job may use, and what its discovery script says."""

import time

import pytest

from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.host_discovery import HostDiscovery
from syncvar_launcher.hosts.host_pool import HostPool
from syncvar_launcher.options.hostfile import Host
from tests.support.launching import await_true, state

A, B, C = Host("a", 2), Host("b", 2), Host("c", 1)


def names(hosts):
    return [host.name for host in hosts]


def test_a_host_that_fails_is_excluded_for_a_growing_time():
    pool = HostPool(10.0)
    pool.update([A, B])
    assert names(pool.available(0.0, ())) == ["a", "b"]
    pauses, now = [], 0.0
    for _ in range(8):
        pauses.append(pool.fail("a", now))
        assert names(pool.available(now + pauses[-1] - 0.1, ())) == ["b"]
        now += pauses[-1]
        assert names(pool.available(now, ())) == ["a", "b"]
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]


def test_a_host_that_has_worked_for_long_begins_anew():
    pool = HostPool(10.0)
    pool.fail("a", 0.0)
    assert pool.fail("a", 10.0) == 20.0
    assert pool.fail("a", 30.0 + 199.0) == 40.0
    assert pool.fail("a", 269.0 + 400.0) == 10.0


def test_hosts_in_use_are_not_offered_and_those_that_are_gone_are_named():
    pool = HostPool(10.0)
    pool.update([A, B])
    assert names(pool.available(0.0, {"a"})) == ["b"]
    assert pool.removed({"a", "b"}) == []
    pool.update([B, C])
    assert pool.removed(["a", "b"]) == ["a"]
    assert names(pool.available(0.0, {"b"})) == ["c"]


def discovery(folder, text, interval_s=0.05):
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return HostDiscovery(script, interval_s)


def answer(one):
    until = time.monotonic() + 60
    while (found := one.ask()) is None and not (said := one.take_messages()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found if found is not None else said


def test_the_script_prints_hosts_as_a_host_file_has_them(tmp_path):
    one = discovery(tmp_path, "echo 'node1:4  # a comment'; echo; echo node2 slots=2; echo node3")
    assert [(host.name, host.slots) for host in answer(one)] == [
        ("node1", 4),
        ("node2", 2),
        ("node3", 1),
    ]
    (tmp_path / "discover").write_text("#!/bin/sh\n")
    assert answer(one) == ()  # no host is there
    one.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 3", "it ended with status 3"),
        ("echo 'node1 slots=many'", "slots"),
    ],
)
def test_a_script_that_fails_changes_nothing_and_is_named_once(tmp_path, text, reason):
    one = discovery(tmp_path, text)
    (said,) = answer(one)
    assert reason in said
    assert "the hosts stay as they are" in said
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert one.ask() is None
        time.sleep(0.01)
    assert one.take_messages() == []
    one.close()


def test_what_a_script_has_started_ends_with_it(tmp_path):
    one = discovery(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/started; wait")
    one.ask()
    started = tmp_path / "started"
    pid = int(
        await_true(lambda: started.exists() and started.read_text().strip(), what="the start")
    )
    assert state(pid)
    one.close()
    await_true(lambda: not state(pid), what="the end of the command")


def test_a_script_that_is_not_there(tmp_path):
    one = HostDiscovery(tmp_path / "none", 0.05)
    (said,) = answer(one)
    assert "it cannot be started: No such file or directory" in said


def test_the_start_waits_for_enough_slots(tmp_path):
    counter = f"cat {tmp_path}/hosts"
    (tmp_path / "hosts").write_text("a:1\n")
    one, said = discovery(tmp_path, counter), []

    def show(text):
        said.append(text)
        (tmp_path / "hosts").write_text("a:1\nb:1\n")

    assert names(one.first(2, 60.0, show)) == ["a", "b"]
    assert said == ["waiting for hosts: --host-discovery names 1 of at least 2 slots"]
    one.close()
    (tmp_path / "hosts").write_text("a:1\n")
    with pytest.raises(ConfigError, match=r"it names [01] slots, and 2 are needed"):
        discovery(tmp_path, counter).first(2, 1.0, said.append)
