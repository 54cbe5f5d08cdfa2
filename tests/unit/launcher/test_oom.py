"""How the launcher learns that the kernel killed a worker for memory: counters of control groups, as they were recorded."""

import pytest

from syncvar_launcher.local.host_resources import OUT_OF_MEMORY, OutOfMemory

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
