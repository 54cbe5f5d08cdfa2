"""The lines of `syncvar doctor`: what is found wrong, and what is said of it. Nothing is started."""

import json

import pytest

from syncvar.cli.commands import main
from syncvar.cli.doctor import machine_checks
from syncvar.cli.doctor.doctor_check import DoctorCheck, report_text
from syncvar.cli.doctor.host_jobs import (
    clock_check,
    groups_of_hosts,
    job_checks,
    rate_check,
    survey_checks,
    versions_check,
)
from syncvar.cli.doctor.pair_probe import pairs_to_measure
from syncvar.shm.host_limits import MemoryLimits

RANK = {
    "transport": "shared memory: 2 ranks of this host share memory",
    "versions": machine_checks.package_versions(),
    "offset_ns": 0,
    "error_ns": 1000,
    "pairs": [],
    "checks": [],
    "reads_memory_of": {},
}


def named(checks, name):
    """Return the check of a name."""
    (found,) = [check for check in checks if check.name == name]
    return found


def here(name, **environ):
    return named(machine_checks.machine_checks(environ), name)


def test_an_ordinary_environment_has_nothing_wrong():
    for name in ("settings", "BLAS threads", "launcher around this process", "Python", "packages"):
        check = here(name, HOME="/root")
        assert check.is_ok, check
        assert not check.remedy


@pytest.mark.parametrize(
    ("name", "environ", "value", "remedy"),
    [
        ("BLAS threads", {"OMP_NUM_THREADS": "4096"}, "OMP_NUM_THREADS=4096", "unset OMP_NUM"),
        ("BLAS threads", {"MKL_NUM_THREADS": "all"}, "MKL_NUM_THREADS=all", "unset MKL_NUM"),
        ("settings", {"SYNCVAR_LOST_AFTER": "5"}, "defaults", "SYNCVAR_LOST_AFTER_S"),
        ("settings", {"SYNCVAR_LOST_AFTER_S": "x"}, "SYNCVAR_LOST_AFTER_S", "SYNCVAR_LOST_AFTER_S"),
        (
            "launcher around this process",
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "29500",
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": ["a:1", "b:1", "c:1"]},
                        "task": {"type": "worker", "index": 0},
                    }
                ),
            },
            "torchrun",
            "TF_CONFIG says world_size 3",
        ),
        (
            "launcher around this process",
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE",
            "syncvar-launch --workers 4",
        ),
    ],
)
def test_a_wrong_variable_is_named_with_the_remedy(name, environ, value, remedy):
    check = here(name, **environ)
    assert not check.is_ok
    assert value in check.value
    assert remedy in check.remedy


def test_a_quota_and_an_affinity_that_leave_too_little_are_named(monkeypatch):
    monkeypatch.setattr(machine_checks, "core_quota", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    check = here("CPU quota")
    assert not check.is_ok
    assert "about 1 of 2 cores" in check.value
    assert here("cores").is_ok
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2})
    check = here("cores")
    assert not check.is_ok
    assert check.value == "1 of 8 usable (core 2)"


def test_a_memory_limit_that_is_too_low_is_named(monkeypatch, tmp_path):
    group = tmp_path / "memory" / "box"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{64 << 20}\n")
    (group / "memory.usage_in_bytes").write_text("4096\n")
    monkeypatch.setattr(
        machine_checks, "MemoryLimits", lambda: MemoryLimits("5:memory:/box\n", str(tmp_path))
    )
    check = here("memory")
    assert not check.is_ok
    assert "64 MiB" in check.value
    assert "memory.limit_in_bytes" in check.remedy


def test_a_limit_of_processes_is_named(monkeypatch, tmp_path):
    (tmp_path / "pids.max").write_text("12\n")
    (tmp_path / "pids.current").write_text("9\n")
    monkeypatch.setattr(
        machine_checks,
        "control_groups",
        lambda name, *_: [(2, str(tmp_path))] if name == "pids" else [],
    )
    check = here("processes")
    assert not check.is_ok
    assert f"3 more by {tmp_path}/pids.max" in check.value


def test_missing_shared_memory_and_a_missing_extension_are_named(monkeypatch):
    monkeypatch.setattr(machine_checks, "create", lambda *_: (None, "it cannot be made: memfd"))
    check = here("shared memory")
    assert not check.is_ok
    assert "it cannot be made: memfd" in check.value
    monkeypatch.setattr("syncvar._native.missing_reason", lambda: "no compiler")
    check = here("C extension")
    assert not check.is_ok
    assert check.value == "not used: no compiler"
    monkeypatch.setattr(machine_checks, "read_file", lambda _: b"3\n")
    assert not here("single copy").is_ok


def test_an_old_package_is_named(monkeypatch):
    monkeypatch.setattr(
        machine_checks.metadata, "version", lambda name: "1.0.2" if name == "msgpack" else "99.1"
    )
    check = here("packages")
    assert not check.is_ok
    assert "msgpack 1.0.2" in check.value
    assert "msgpack>=1.0.8" in check.remedy
    assert "numpy" not in check.remedy


def test_what_a_job_measures_is_judged():
    assert clock_check(400_000_000, 1000, "b").is_ok
    assert "NTP" in clock_check(-2_000_000_000, 1000, "b").remedy
    assert clock_check(2_000_000_000, 1_900_000_000, "b").is_ok  # it may be the way
    ours = {"python": "3.11.7", "numpy": "2.1.0"}
    check = versions_check({"python": "3.11.7", "numpy": "1.26.4"}, ours, "b")
    assert check.value == "numpy 1.26.4, here 2.1.0"
    assert "numpy==2.1.0" in check.remedy
    assert versions_check(ours, ours, "b").is_ok
    pair = {"first": 0, "second": 1, "latency_s": 1e-4, "bytes_per_s": 1e9}
    hosts = {0: "a", 1: "b"}
    assert rate_check(pair, hosts, "tcp", is_local=False).is_ok
    assert rate_check(pair, hosts, "tcp", is_local=False).numbers == (100_000, 1_000_000)
    slow = {**pair, "latency_s": 0.2}, {**pair, "bytes_per_s": 1e6}
    for one in slow:
        check = rate_check(one, hosts, "tcp", is_local=False)
        assert not check.is_ok
        assert check.host == "a to b"
    blind = [{**RANK, "rank": 0, "host": "vm", "reads_memory_of": {"1": False}, "checks": [{}]}]
    check = named(job_checks(blind, is_local=True), "single copy between ranks")
    assert not check.is_ok
    assert "SYS_PTRACE" in check.remedy


def test_the_links_show_the_path_and_the_algorithms(monkeypatch):
    monkeypatch.delenv("SYNCVAR_ALGORITHM_CHOICE", raising=False)
    one = {**RANK, "path": "lanes in plain"}
    fast, slow = ({"latency_s": 4e-5, "bytes_per_s": rate} for rate in (2.5e9, 1e6))
    pairs = {0: [{**fast, "first": 0, "second": 1}, {**fast, "first": 0, "second": 2}]}
    pairs[1] = [{**slow, "first": 1, "second": 2}]
    ranks = [
        {**one, "rank": rank, "host": "abc"[rank], "pairs": pairs.get(rank, [])}
        for rank in range(3)
    ]
    checks = list(job_checks(ranks, is_local=False))
    assert named(checks, "data between hosts").value == "lanes in plain"
    assert "broadcast: direct from" in named(checks, "algorithms between hosts").value
    alike = [{**one, "pairs": pairs[0]} for one in ranks[:1]] + ranks[1:2]
    alike[0]["pairs"], alike[1]["pairs"] = pairs[0][:1], []
    checks = list(job_checks(alike, is_local=False))
    assert named(checks, "algorithms between hosts").value == "those of the rules"
    assert [check.name for check in job_checks(ranks[2:], is_local=False)] == []


def test_the_survey_becomes_lines():
    survey = {
        "scheduler": {"name": "", "error": ""},
        "interfaces": [["eth0", "10.0.0.1"]],
        "addresses": ["10.0.0.1"],
        "hosts": [
            {"name": "a", "origin": "f:1", "reason": "", "line": "a", "interfaces": []},
            {"name": "b", "origin": "f:2", "reason": "it is off; turn it on", "interfaces": []},
        ],
        "reach": [{"from": "a", "to": "c", "tried": ["10.0.0.3"], "reached": []}],
    }
    checks = list(survey_checks(survey, has_hosts=True))
    logins = {check.host: check for check in checks if check.name == "login"}
    assert logins["a"].is_ok
    assert logins["b"].value == "it is off (named in f:2)"
    assert logins["b"].remedy == "turn it on"
    ports = named(checks, "ports")
    assert not ports.is_ok
    assert ports.host == "a to c"
    assert "10.0.0.3" in ports.value


def test_hosts_that_do_not_reach_each_other_get_jobs_of_their_own():
    hosts = [{"name": name, "reason": "", "line": name} for name in "abcd"]
    hosts[3]["reason"] = "off"
    blind = [{"from": "a", "to": "c", "reached": []}, {"from": "b", "to": "c", "reached": []}]
    assert groups_of_hosts({"hosts": hosts, "reach": blind}) == [["a", "b"], ["c"]]
    far = [{"from": "b", "to": "this machine", "reached": []}]
    assert groups_of_hosts({"hosts": hosts, "reach": far}) == [["a", "c"], ["b"]]


def test_many_hosts_are_measured_in_few_pairs():
    pairs = pairs_to_measure([f"h{one}" for one in range(20)])
    assert len(pairs) == 19 + 18
    assert (0, 19) in pairs
    assert (7, 8) in pairs


def test_the_text_names_equal_lines_once_and_each_failure():
    checks = [DoctorCheck("cores", True, "2 of 2", "speed", host=host) for host in ("", "b")]
    checks.append(DoctorCheck("login", False, "refused", "ranks start by it", "add the key", "b"))
    assert report_text(checks).splitlines() == [
        "[ok] cores (this machine, b): 2 of 2",
        "[no] login (b): refused",
        "     why: ranks start by it",
        "     do:  add the key",
        "1 of 3 checks failed: login (b)",
    ]
    assert "     why: speed" in report_text(checks, verbose=True)


def test_the_exit_code_and_json(monkeypatch, capsys):
    good = DoctorCheck("cores", True, "2", "")
    bad = DoctorCheck("login", False, "off", "", "turn it on")
    for checks, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(
            "syncvar.cli.doctor.doctor_command.all_checks", lambda _, found=checks: iter(found)
        )
        assert main(["doctor", "--json"]) == code
        data = json.loads(capsys.readouterr().out)
        assert data["format"] == "syncvar doctor 1"
        assert data["is_ok"] is (code == 0)
        assert [one["name"] for one in data["checks"]] == [one.name for one in checks]
