"""Cores and BLAS threads of workers, kills for lack of memory, and the processes that control groups allow."""

from pathlib import Path

import pytest

from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.agent_main import facts_of
from syncvar_launcher.hosts.host_checks import missing_resources
from syncvar_launcher.local.host_resources import (
    BLAS_VARIABLES,
    OUT_OF_MEMORY,
    OutOfMemory,
    blas_environment,
    blas_threads,
    plan_binding,
    tasks_left,
)
from syncvar_launcher.options.hostfile import parse_hosts
from syncvar_launcher.options.parse_options import parse


def test_auto_gives_each_worker_cores_of_its_own():
    plan = plan_binding(2, range(4), 4)
    assert plan.cores == ((0, 1), (2, 3))
    assert plan.reason == "bound: 2 cores of its own for each worker"


def test_auto_leaves_the_remaining_cores_free():
    assert plan_binding(3, range(8), 8).cores == ((0, 1), (2, 3), (4, 5))


def test_auto_binds_in_turn_where_the_cores_get_equally_many():
    plan = plan_binding(4, [0, 1], 2)
    assert plan.cores == ((0,), (1,), (0,), (1,))
    assert plan.reason == "bound in turn: 4 workers share 2 usable cores"
    assert plan_binding(4, [0, 1], 8).cores == (None,) * 4


def test_auto_does_not_bind_where_one_core_would_get_more_workers():
    plan = plan_binding(3, [0, 1], 2)
    assert plan.cores == (None, None, None)
    assert plan.reason == "not bound: 3 workers share 2 usable cores"


def test_auto_respects_an_affinity_of_the_user():
    plan = plan_binding(2, [4, 5], 8)
    assert plan.cores == (None, None)
    assert "an affinity is set already (2 of 8 cores usable)" in plan.reason


def test_none_never_binds():
    assert plan_binding(1, range(4), 4, "none").cores == (None,)


def test_cores_binds_inside_an_affinity_and_with_any_numbers():
    assert plan_binding(2, [3, 7, 9], 16, "cores").cores == ((3,), (7,))


def test_cores_in_turn_when_there_are_too_few():
    plan = plan_binding(5, [2, 3], 4, "cores")
    assert plan.cores == ((2,), (3,), (2,), (3,), (2,))
    assert plan.reason == "bound in turn: 5 workers share 2 usable cores"


@pytest.mark.parametrize("mode", ["auto", "cores"])
def test_cores_per_worker_is_bound_even_inside_an_affinity(mode):
    assert plan_binding(2, [1, 2, 3, 4, 5], 8, mode, 2).cores == ((1, 2), (3, 4))


@pytest.mark.parametrize("mode", ["auto", "cores", "none"])
def test_too_few_cores_for_cores_per_worker_names_numbers_and_remedy(mode):
    with pytest.raises(ConfigError) as caught:
        plan_binding(4, range(6), 6, mode, 2)
    assert str(caught.value) == (
        "4 workers with 2 cores each need 8 cores, but this host lets us use 6: "
        "use --cores-per-worker 1 or at most 3 workers, or leave --cores-per-worker out [SV-101]"
    )


def test_remedy_offers_no_zero_cores():
    with pytest.raises(ConfigError, match="use at most 2 workers, or"):
        plan_binding(4, range(2), 2, "cores", 1)
    with pytest.raises(
        ConfigError, match="use --cores-per-worker 2, or leave --cores-per-worker out"
    ):
        plan_binding(1, range(2), 2, "cores", 9)
    with pytest.raises(ConfigError, match="lets us use 2: leave --cores-per-worker out"):
        plan_binding(4, range(2), 2, "cores", 9)


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="bind must be one of auto, none, cores"):
        plan_binding(1, [0], 1, "sockets")


@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("usable", range(1, 10))
@pytest.mark.parametrize("mode", ["auto", "none", "cores"])
def test_plans_are_fair_and_disjoint_where_they_can_be(workers, usable, mode):
    plan = plan_binding(workers, range(usable), usable, mode)
    assert len(plan.cores) == workers
    bound = [cores for cores in plan.cores if cores is not None]
    assert len(bound) in (0, workers)
    assert len({len(cores) for cores in bound}) <= 1
    if workers <= usable:
        assert len({core for cores in bound for core in cores}) == sum(map(len, bound))
    for cores in bound:
        assert set(cores) <= set(range(usable))


def test_blas_threads_share_the_cores_and_are_never_zero():
    assert [blas_threads(workers, 8) for workers in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert blas_threads(2, 8, 3) == 3


def test_blas_variables_of_the_user_stay():
    assert set(blas_environment(1, {})) == set(BLAS_VARIABLES)
    assert "OMP_NUM_THREADS" not in blas_environment(1, {"OMP_NUM_THREADS": ""})


# Recorded on Linux 6.18: a group of version 1, and one of version 2.
FILES = {
    1: (
        "memory/job/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
        b"5:cpu:/x\n4:memory:/job\n0::/\n",
    ),
    2: (
        "job/memory.events",
        "low 0\nhigh 12\nmax 31\noom {0}\noom_kill {0}\noom_group_kill 0\n",
        b"0::/job\n",
    ),
}


@pytest.fixture(params=FILES)
def group(request, tmp_path):
    """Return (what the groups are read with, what a process says of its group, how to set the count)."""
    name, text, membership = FILES[request.param]
    (tmp_path / name).parent.mkdir(parents=True)

    def count(number):
        (tmp_path / name).write_text(text.format(number))

    count(7)
    return OutOfMemory(0.0, str(tmp_path)), membership, count


def test_a_kill_that_was_counted_explains_one_end(group):
    memory, membership, count = group
    for rank in (0, 1):
        memory.belongs(rank, membership)
    memory.look({}, 0.5)
    count(8)
    assert memory.ended(1, -9, 1.0) == OUT_OF_MEMORY
    assert memory.ended(0, -9, 1.1) == ""


def test_what_was_counted_before_or_long_ago_explains_nothing(group):
    memory, membership, count = group
    memory.belongs(0, membership)
    memory.look({}, 0.5)
    count(9)
    memory.look({}, 1.0)
    assert memory.ended(0, -9, 12.0) == ""


def test_a_process_that_is_ending_and_says_it_is_in_the_root_is_not_believed(group, tmp_path):
    memory, membership, count = group
    for name in ("memory/memory.oom_control", "memory.events"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("oom_kill 0\n")
    memory.belongs(0, membership)
    memory.look({}, 0.5)
    memory.belongs(0, membership.replace(b"/job", b"/"))
    count(8)
    assert memory.ended(0, -9, 1.0) == OUT_OF_MEMORY


@pytest.mark.parametrize("status", [0, 1, -15, -11, 137])
def test_another_end_is_none_of_memory(group, status):
    memory, membership, count = group
    memory.belongs(0, membership)
    memory.look({}, 0.5)
    count(8)
    assert memory.ended(0, status, 1.0) == ""


def test_a_kill_in_another_group_or_without_any_explains_nothing(group):
    memory, membership, count = group
    memory.belongs(0, membership.replace(b"job", b"none"))
    memory.belongs(1, membership)
    memory.belongs(2, b"")
    memory.look({}, 0.5)
    count(8)
    assert [memory.ended(rank, -9, 1.0) for rank in (0, 2, 1)] == ["", "", OUT_OF_MEMORY]


def write_group(folder, allowed, current):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.max").write_text(f"{allowed}\n")
    (folder / "pids.current").write_text(f"{current}\n")


@pytest.mark.parametrize(
    ("groups", "top"),
    [("0::/a/b\n", ""), ("9:name=systemd:/\n8:pids:/a/b\n1:cpu:/x\n0::/\n", "pids")],
)
def test_the_least_that_a_group_leaves_counts(tmp_path, groups, top):
    assert tasks_left(groups, tmp_path) == -1
    write_group(tmp_path / top / "a" / "b", "max", 5)
    assert tasks_left(groups, tmp_path) == -1
    write_group(tmp_path / top / "a", 20, 8)
    assert tasks_left(groups, tmp_path) == 12
    write_group(tmp_path / top / "a" / "b", 6, 7)
    assert tasks_left(groups, tmp_path) == 0


def test_a_host_without_room_for_one_rank_is_refused():
    facts, chosen = (
        facts_of([], "/"),
        parse(["-n", "2", "--no-python", "true"], {}, Path("/")),
    )
    (host,) = parse_hosts("a").hosts
    assert missing_resources({**facts, "tasks_left": -1}, host, chosen) == ""
    assert "allows 3 more processes and threads (pids.max)" in missing_resources(
        {**facts, "tasks_left": 3}, host, chosen
    )


def test_this_process_has_a_limit_or_none():
    assert tasks_left() >= -1
