"""Links over IPv6: by addresses in brackets, by ssh or without, by a network of it, and joined by variables."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest
from test_several_hosts import WORLD, start

from tests.support.intruder_attacks import LASTING, SUMS, besiege
from tests.support.launching import Job, await_true

pytestmark = pytest.mark.slow

STAYS = (
    WORLD
    + """
    probe.note("stays")
    probe.gate("go")
    sv.barrier()
"""
)


def at_6(hosts, *slots):
    return ",".join(
        f"[{name}]:{count}" for name, count in zip(hosts.names_6, slots, strict=True) if count
    )


def test_ranks_meet_over_ipv6(hosts, tmp_path):
    lines = [
        f"[{name}] slots={count}\n" for name, count in zip(hosts.names_6, (1, 2, 1), strict=True)
    ]
    (tmp_path / "hosts").write_text("".join(lines))
    job = Job(
        tmp_path,
        STAYS,
        workers=4,
        prefix=hosts.prefix,
        options=(*hosts.ssh, "--hostfile", str(tmp_path / "hosts")),
    )
    job.await_events("stays", 4, limit_s=120)
    listening = [set(hosts.listening(index)) for index in range(3)]
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert {event["total"] for event in job.events("met")} == {10.0}
    assert [event["host"] for event in sorted(job.events("met"), key=lambda one: one["rank"])] == [
        hosts.names_6[index] for index in (0, 1, 1, 2)
    ]
    assert listening == [{name} for name in hosts.names_6]


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("v6", ("--ssh-always",)),
        ("v4", ("--iface", "fd77::/64")),
        ("v4", ("--iface", "^10.0.0.0/8,^lo")),
        ("v6", ("--iface", "10.77.0.0/24")),
        ("addr", ()),
        ("v6", ("--encryption", "control-only")),
        ("v6", ("--encryption", "off", "--insecure")),
    ],
    ids=str,
)
def test_which_family_links_use(hosts, tmp_path, where, options):
    if where == "addr":
        (tmp_path / "hosts").write_text(
            "".join(
                f"{name} slots=1 addr={other}\n"
                for name, other in zip(hosts.names, hosts.names_6, strict=True)
            )
        )
        options = ("--hostfile", str(tmp_path / "hosts"))
    else:
        names = hosts.names_6 if where == "v6" else hosts.names
        options = (
            "-H",
            ",".join(f"[{name}]:1" if ":" in name else f"{name}:1" for name in names),
            *options,
        )
    job = Job(tmp_path, STAYS, workers=3, prefix=hosts.prefix, options=(*hosts.ssh, *options))
    job.await_events("stays", 3, limit_s=120)
    listening = [
        [
            one
            for one in hosts.listening(index)
            if index or not one.startswith("10.") or where != "addr"
        ]
        for index in range(3)
    ]
    job.open_gate("go")
    assert job.wait(120) == 0, job
    expected = hosts.names if "10.77.0.0/24" in options else hosts.names_6
    assert [set(one) for one in listening] == [{name} for name in expected]


def test_strangers_over_ipv6_cost_a_job_nothing(hosts, tmp_path):
    job = start(hosts, tmp_path, SUMS, at_6(hosts, 0, 1, 1), env=LASTING)
    places = besiege(
        job,
        tmp_path,
        "http,tls,no_key,wrong_key,another_job,again,random,idle",
        60,
        lambda: [one for index in range(3) for one in hosts.ports(index)],
        size=2,
        prefix=hosts.prefix,
    )
    assert len(places) == 4  # of the launcher and two ranks, and one for the lane
    assert all(one.startswith("[fd77::") for one in places)


@pytest.mark.parametrize("address", ["fd77::11", "[fd77::11]"])
def test_ranks_that_another_launcher_has_started_meet_over_ipv6(hosts, tmp_path, address):
    script = """
        import sys
        import syncvar as sv
        from syncvar.bootstrap.process import current
        sv.init()
        print("met", sv.all_reduce(sv.rank() + 1), current().transport, flush=True)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    key, ranks, folders = secrets.token_hex(32), [], []
    for rank in range(2):
        folders.append(tempfile.mkdtemp(prefix="sv"))  # paths of sockets are short
        told = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": rank,
            "GROUP_WORLD_SIZE": 2,
            "MASTER_ADDR": address,
            "MASTER_PORT": 29500,
            "SYNCVAR_KEY": key,
            "XDG_RUNTIME_DIR": folders[-1],
        }
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("SYNCVAR_")
        } | {name: str(value) for name, value in told.items()}
        line = ["ip", "netns", "exec", hosts.spaces[1 + rank], sys.executable, "script.py"]
        ranks.append(
            subprocess.Popen(
                line,
                cwd=tmp_path,
                env=environ,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        for one in ranks:
            out, _ = one.communicate(timeout=120)
            assert one.returncode == 0, out
            assert "met 3 " in out, out
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
            one.communicate()
        for folder in folders:
            shutil.rmtree(folder)
    await_true(lambda: not hosts.listening(1) and not hosts.listening(2), what="nobody to listen")
