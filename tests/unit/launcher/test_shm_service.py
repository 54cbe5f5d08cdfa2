"""Whether a job shares memory, and the reason where it does not."""

from types import SimpleNamespace

import pytest

from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.agent_connection import HostSlot
from syncvar_launcher.hosts.agent_protocol import Reader, StartRequest, pack
from syncvar_launcher.hosts.remote_workers import RemoteWorkers
from syncvar_launcher.job.job import Job
from syncvar_launcher.local.shm_service import shm_unavailable_reason
from syncvar_launcher.options import option_table
from syncvar_launcher.options.hostfile import Host
from syncvar_launcher.options.option_table import core_count
from syncvar_launcher.options.parse_options import parse


def chosen(*argv, **environ):
    return parse([*argv, "-m", "x"], environ, "/")


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_shared_where_several_ranks_are_on_a_proven_processor(machine):
    assert shm_unavailable_reason(chosen("-n", "2"), machine, 2) == ""


def test_reasons():
    assert shm_unavailable_reason(chosen("-n", "1"), "x86_64", 1) == "a single rank sends nothing"
    assert (
        shm_unavailable_reason(chosen("-n", "2", SYNCVAR_TRANSPORT="zmq"), "x86_64", 2)
        == "SYNCVAR_TRANSPORT=zmq asks for it"
    )
    reason = shm_unavailable_reason(chosen("-n", "2"), "aarch64", 2)
    assert reason.startswith(
        "unix sockets; no shared memory because other cores of aarch64 may see stores out of order"
    )


def test_a_size_too_small_for_the_ranks():
    with pytest.raises(
        ConfigError, match="too small for 8 ranks on a host: they need at least 18874368"
    ):
        shm_unavailable_reason(chosen("-n", "8", SYNCVAR_SHM_BYTES="16777216"), "x86_64", 8)
    assert shm_unavailable_reason(
        chosen("-n", "8", SYNCVAR_SHM_BYTES="16777216", SYNCVAR_TRANSPORT="zmq"), "x86_64", 8
    )


@pytest.mark.parametrize("text", ["16777215", "0", "-1", "1e12", "256M"])
def test_a_size_that_is_none(text):
    with pytest.raises(ConfigError, match="SYNCVAR_SHM_BYTES"):
        chosen(SYNCVAR_SHM_BYTES=text)


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (1, 1), (3, 3), (4, 4), (100, 4)])
def test_a_container_s_quota_counts_where_cores_are_counted(monkeypatch, quota, cores):
    monkeypatch.setattr(option_table, "core_quota", lambda: quota)
    monkeypatch.setattr(option_table.os, "sched_getaffinity", lambda pid: {3, 1, 8, 9})
    assert core_count() == cores
    assert chosen("-n", "auto").ranks.workers == cores
    assert option_table.usable_cores() == (1, 3, 8, 9), "but nothing is bound because of it"


def test_each_host_of_a_job_has_its_own_reason():
    options = chosen("-n", "9", SYNCVAR_SHM_BYTES="16777216")
    assert shm_unavailable_reason(options, "x86_64", 2) == ""
    assert shm_unavailable_reason(options, "x86_64", 1) == "there is one rank on this host"
    assert "aarch64 may see stores" in shm_unavailable_reason(options, "aarch64", 8)
    with pytest.raises(ConfigError, match="too small for 8 ranks on a host"):
        shm_unavailable_reason(options, "x86_64", 8)


class Told:
    """Stands for the way to a host, and keeps what is said to it."""

    def __init__(self):
        self.host = Host("n")
        self.staged = ""
        self.orders = []

    def send(self, kind, **fields):
        (message,) = Reader().feed(pack(kind, **fields))
        self.orders.append(StartRequest.read(message["request"]))


def test_hosts_of_other_processors_are_told_to_make_no_shm(tmp_path):
    facts = {"cores": [0, 1], "cpu_count": 2, "core_count": 2}
    sites = [
        HostSlot(Told(), name, 2, "10.0.0.1", {**facts, "processor": name})
        for name in ("x86_64", "aarch64")
    ]
    host_group = SimpleNamespace(sites=sites, secret=b"s" * 32)
    agents = RemoteWorkers(
        host_group,
        Job(chosen("-n", "4"), [], {}, host_group),
        None,
        tmp_path,
        "tcp://10.0.0.1:1",
        generation=0,
        restarts=0,
    )
    assert not list(agents.start())
    (first,), (second,) = (site.remote.orders for site in sites)
    assert first.shm_unavailable_reason == ""
    assert "other cores of aarch64 may see stores out of order" in second.shm_unavailable_reason
    assert second.requests_shm, "its ranks ask, and are told the reason"
    assert not agents.is_complete
