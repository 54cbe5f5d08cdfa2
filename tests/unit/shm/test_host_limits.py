"""What control groups and the machine allow, read from made-up files."""

import pytest

from syncvar.shm.host_limits import MemoryLimits, core_quota

MIB = 1 << 20
MACHINE = "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\nSwapTotal: 4000 kB\nSwapFree: 2000 kB\n"


@pytest.fixture
def tree(tmp_path):
    """Write files below a root; return it."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    (tmp_path / "meminfo").write_text("")
    return write


def room(root, membership):
    return MemoryLimits(membership, root, f"{root}/meminfo")


def second_version(folder, limit, usage, stat=""):
    return {
        f"{folder}__memory_DOT_max": f"{limit}\n",
        f"{folder}__memory_DOT_current": f"{usage}\n",
        f"{folder}__memory_DOT_stat": stat,
    }


def test_the_innermost_limit_that_does_not_allow_it(tree):
    root = tree(
        **second_version("a", 100 * MIB, 90 * MIB),
        **second_version("a__b", "max", 1),
        **second_version("a__b__c", 50 * MIB, 1),
    )
    found = room(root, "0::/a/b/c\n")
    assert found.shortage(9 * MIB) is None
    short = found.shortage(11 * MIB)
    assert (short.used, short.limit) == (90 * MIB, 100 * MIB)
    assert short.limit_name == f"the container's limit ({root}/a/memory.max)"
    assert found.shortage(51 * MIB).limit == 50 * MIB


def test_a_limit_may_change(tree):
    root = tree(**second_version("a", 10 * MIB, 0))
    found = room(root, "0::/a")
    assert found.shortage(20 * MIB) is not None
    tree(**second_version("a", "max", 0))
    assert found.shortage(20 * MIB) is None


def test_what_can_be_dropped_does_not_count(tree):
    stat = f"anon 5\nfile {80 * MIB}\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\nslab_reclaimable {5 * MIB}\nshmem 7\n"
    root = tree(**second_version("a", 100 * MIB, 95 * MIB, stat))
    assert room(root, "0::/a").shortage(60 * MIB) is None
    assert room(root, "0::/a").shortage(61 * MIB).used == 40 * MIB


def test_a_container_that_sees_its_own_group_as_the_top(tree):
    root = tree(memory_DOT_max="1000\n", memory_DOT_current="10\n")
    for membership in ("0::/\n", "0::/docker/0123/not/mounted/here\n", "0::/../..\n"):
        found = room(root, membership).shortage(991)
        assert (found is None) == (membership == "0::/../..\n")


def test_first_version(tree):
    root = tree(
        memory__job__memory_DOT_limit_in_bytes="5000\n",
        memory__job__memory_DOT_usage_in_bytes="4000\n",
        memory__job__memory_DOT_stat="inactive_file 9\ntotal_inactive_file 1000\ntotal_active_file 0\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
        memory__memory_DOT_usage_in_bytes="999999\n",
    )
    membership = "8:pids:/\n4:memory:/job\n1:cpu,cpuacct:/\n0::/\n"
    assert room(root, membership).shortage(2000) is None
    assert room(root, membership).shortage(2001).used == 3000


def test_the_machine_s_memory(tree):
    root = tree(meminfo=MACHINE)
    assert room(root, "").shortage(10_000 * 1024) is None
    short = room(root, "").shortage(10_000 * 1024 + 1)
    assert (short.used, short.limit, short.limit_name) == (
        10_000 * 1024,
        20_000 * 1024,
        "the machine's memory",
    )


def test_nothing_readable_is_no_limit(tree):
    assert MemoryLimits("", "/nonexistent", "/nonexistent").shortage(1 << 60) is None
    assert (
        MemoryLimits("garbage\n\n:::\n0::", "/nonexistent", "/nonexistent").shortage(1 << 60)
        is None
    )
    root = tree(**second_version("a", "what?", "is this"))
    assert room(root, "0::/a").shortage(1 << 60) is None


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"cpu_DOT_max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu_DOT_max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu_DOT_max": "10000 100000\n"}, "0::/\n", 1),
        ({"cpu_DOT_max": "max 100000\n"}, "0::/\n", None),
        (
            {"a__cpu_DOT_max": "300000 100000\n", "a__b__cpu_DOT_max": "800000 100000\n"},
            "0::/a/b\n",
            3,
        ),
        ({"unified__a__cpu_DOT_max": "300000 100000\n"}, "0::/a\n", 3),
        (
            {
                "cpu__a__cpu_DOT_cfs_quota_us": "250000\n",
                "cpu__a__cpu_DOT_cfs_period_us": "100000\n",
            },
            "1:cpu:/a\n",
            3,
        ),
        (
            {"cpu,acct__cpu_DOT_cfs_quota_us": "1\n", "cpu,acct__cpu_DOT_cfs_period_us": "10\n"},
            "1:cpu,acct:/a\n",
            1,
        ),
        (
            {"cpu__a__cpu_DOT_cfs_quota_us": "-1\n", "cpu__a__cpu_DOT_cfs_period_us": "100000\n"},
            "1:cpu:/a\n",
            None,
        ),
        ({"cpu_DOT_max": "nonsense\n"}, "0::/\n", None),
        ({}, "", None),
    ],
)
def test_a_quota_of_core_time(tree, files, membership, cores):
    assert core_quota(membership, tree(**files)) == cores


def test_this_machine_can_be_asked():
    assert MemoryLimits().shortage(1) is None
    assert core_quota() is None or core_quota() >= 1
