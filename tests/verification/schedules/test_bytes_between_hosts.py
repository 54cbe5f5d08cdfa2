"""What each collective sends between hosts, counted from the schedules of all ranks, beside the least possible.

tests/golden/bytes_between_hosts.txt has the counts. After a wanted change: SYNCVAR_REGENERATE_GOLDEN=1 pytest of this
file, read the diff.
"""

import os
from typing import NamedTuple

import pytest

from syncvar.algorithms.builders import ALGORITHMS, SCHEDULES, WorkLayout, build_all
from syncvar.algorithms.hierarchical import COMPOSED
from syncvar.algorithms.schedule import Send
from syncvar.algorithms.selection import choose
from tests.support.paths import GOLDEN
from tests.verification.schedules.schedule_checker import flattened

HOSTS = [(2, 2), (4, 4), (8, 8), (2, 2, 2), (3, 2)]
ITEM = {"small": 8, "medium": 1 << 10, "large": 1 << 18}  # bytes of an element
COUNT = 24  # of a vector
MORE_BYTES = {
    ("all_gather", "small"): "each rank of a host sends for itself",
    ("all_reduce", "small"): "each rank of a host sends for itself",
    ("header_exchange", "small"): "each rank of a host sends for itself",
    ("reduce", "large"): "with three hosts each of them sums a third, and sends it to the root",
    **{(name, size): "not composed" for name in ("scan", "exscan") for size in ITEM},
}
"""The only collectives that may send a byte more than once to a host, and why."""


class Crossing(NamedTuple):
    """What crosses between hosts in one call."""

    elements: int
    frames: int


def arguments(collective, n):
    """Blocks and pairs of uneven counts; the root is in the middle."""
    uneven = [(7 * rank + 3) % 4 + 1 for rank in range(n)]
    work = SCHEDULES[collective].work
    chosen = {
        WorkLayout.NOTHING: {},
        WorkLayout.VECTOR: {"count": COUNT},
        WorkLayout.BLOCKS: {"counts": uneven},
        WorkLayout.PAIRS: {"matrix": [[(one + other) % 4 for other in uneven] for one in uneven]},
    }[work]
    if collective == "header_exchange":
        chosen = {"count": 3}
    return {**chosen, **({"root": n // 2} if SCHEDULES[collective].has_root else {})}


def hosts_of(sizes):
    """Return the host of each rank."""
    return [host for host, size in enumerate(sizes) for _ in range(size)]


def counted(plans, sizes):
    hosts = hosts_of(sizes)
    sent = [
        step.chunk.count
        for plan in plans
        for steps in plan.rounds
        for step in steps
        if isinstance(step, Send) and hosts[step.peer] != hosts[plan.rank]
    ]
    return Crossing(sum(sent), len(sent))


def composed(collective, sizes, itemsize):
    case = arguments(collective, sum(sizes))
    if collective not in COMPOSED:
        return alone(collective, sizes, itemsize)
    return counted(flattened(collective, sizes, itemsize=itemsize, **case), sizes)


def alone(collective, sizes, itemsize):
    """The same call as if each rank were alone on its host."""
    n = sum(sizes)
    case = arguments(collective, n)
    matrix = case.get("matrix")
    if matrix:
        total = sum(map(sum, matrix)) // n
    else:
        total = sum(case["counts"]) if "counts" in case else case.get("count", 0)
    even = "counts" not in case and "matrix" not in case
    algorithm = choose(collective, total * itemsize, n, even=even).algorithm
    return counted(build_all(collective, algorithm, n, **case), sizes)


def least_elements(collective, sizes):
    """The elements that must cross: each host needs them, and none of its ranks has them."""
    n, others = sum(sizes), len(sizes) - 1
    case = arguments(collective, n)
    count, hosts = case.get("count", 0), hosts_of(sizes)
    counts = case.get("counts", [count] * n)
    if collective == "all_reduce":
        return 2 * others * count
    if collective in ("broadcast", "reduce", "scan", "exscan"):
        return others * count
    if collective in ("all_gather", "header_exchange", "reduce_scatter"):
        return others * sum(counts)
    if collective in ("gather", "scatter"):
        home = hosts[case["root"]]
        return sum(one for rank, one in enumerate(counts) if hosts[rank] != home)
    if collective == "all_to_all":
        return sum(
            one
            for source, row in enumerate(case["matrix"])
            for target, one in enumerate(row)
            if hosts[source] != hosts[target]
        )
    assert collective == "barrier"
    return 0


@pytest.mark.parametrize("size", ITEM)
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_each_byte_crosses_once_for_a_host(collective, size):
    for sizes in HOSTS:
        least = least_elements(collective, sizes)
        sent = composed(collective, sizes, ITEM[size]).elements
        assert sent >= least, (sizes, sent)
        if (collective, size) not in MORE_BYTES:
            assert sent == least, (sizes, sent)
        elif collective in COMPOSED:
            times = max(sizes) if size == "small" else 1
            assert sent <= times * least or len(sizes) > 2, (sizes, sent)


@pytest.mark.parametrize(("collective", "size"), MORE_BYTES)
def test_each_exception_is_one(collective, size):
    assert any(
        composed(collective, sizes, ITEM[size]).elements > least_elements(collective, sizes)
        for sizes in HOSTS
    )


@pytest.mark.parametrize("size", ["medium", "large"])
@pytest.mark.parametrize("collective", COMPOSED)
def test_composed_collectives_send_no_more_than_ranks_that_are_alone(collective, size):
    for sizes in HOSTS:
        ours, theirs = (way(collective, sizes, ITEM[size]) for way in (composed, alone))
        assert ours.elements <= theirs.elements, sizes
        assert ours.frames <= theirs.frames, sizes


def test_small_blocks_for_a_host_travel_in_one_frame():
    assert composed("gather", (2, 2, 2), ITEM["small"]).frames == 2
    assert composed("scatter", (2, 2, 2), ITEM["small"]).frames == 2
    assert composed("all_to_all", (2, 2, 2), ITEM["small"]).frames == 6 * 2, "one for each rank"


def table():
    rows = [("collective", "hosts", "size", "bytes", "frames", "alone: bytes", "alone: frames")]
    for collective in ALGORITHMS:
        for sizes in HOSTS:
            least = least_elements(collective, sizes)
            for size, itemsize in ITEM.items():
                cells = []
                for way in (composed, alone):
                    found = way(collective, sizes, itemsize)
                    ratio = f"{found.elements / least:.2f}" if least else "-"
                    cells += [ratio, str(found.frames)]
                rows.append((collective, "+".join(map(str, sizes)), size, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    head = "Bytes between hosts of a call, as a multiple of the least possible, and frames; then"
    more = "the same as if each rank were alone on its host. hosts: ranks of each."
    return "".join(f"{line}\n" for line in (head, more, "", *lines))


def test_the_table_of_bytes_is_up_to_date():
    golden = GOLDEN / "bytes_between_hosts.txt"
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        golden.write_text(table(), encoding="utf-8")
    assert table() == golden.read_text(encoding="utf-8")
