"""How many processes control groups allow: the least that any of them leaves, in both versions of control groups."""

from pathlib import Path

import pytest

from syncvar_launcher.hosts.agent_main import facts_of
from syncvar_launcher.hosts.host_checks import missing_resources
from syncvar_launcher.local import host_resources as resource_limits
from syncvar_launcher.options.hostfile import parse_hosts
from syncvar_launcher.options.parse_options import parse


def group(folder, allowed, current):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.max").write_text(f"{allowed}\n")
    (folder / "pids.current").write_text(f"{current}\n")


@pytest.mark.parametrize(
    ("groups", "top"),
    [("0::/a/b\n", ""), ("9:name=systemd:/\n8:pids:/a/b\n1:cpu:/x\n0::/\n", "pids")],
)
def test_the_least_that_a_group_leaves_counts(tmp_path, groups, top):
    assert resource_limits.tasks_left(groups, tmp_path) == -1
    group(tmp_path / top / "a" / "b", "max", 5)
    assert resource_limits.tasks_left(groups, tmp_path) == -1
    group(tmp_path / top / "a", 20, 8)
    assert resource_limits.tasks_left(groups, tmp_path) == 12
    group(tmp_path / top / "a" / "b", 6, 7)
    assert resource_limits.tasks_left(groups, tmp_path) == 0


def test_a_host_without_room_for_one_rank_is_refused():
    facts, chosen = (
        facts_of("command", "true", "/"),
        parse(["-n", "2", "--no-python", "true"], {}, Path("/")),
    )
    (host,) = parse_hosts("a").hosts
    assert missing_resources({**facts, "tasks_left": -1}, host, chosen) == ""
    assert "allows 3 more processes and threads (pids.max)" in missing_resources(
        {**facts, "tasks_left": 3}, host, chosen
    )


def test_this_process_has_a_limit_or_none():
    assert resource_limits.tasks_left() >= -1
