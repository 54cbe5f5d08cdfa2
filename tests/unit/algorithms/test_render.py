"""Plans as text. The figures in tests/golden are read by people; they are made here and by nothing else.

After a wanted change: SYNCVAR_REGENERATE_GOLDEN=1 pytest tests/unit/algorithms/test_render.py, read the diff, commit what you can
explain.
"""

import os

import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    schedule_text,
    step_text,
)
from tests.support.paths import GOLDEN

FIGURES = {
    "ring_5": ("all_reduce", "ring", 5, {"count": 7}),
    "ring_all_gather_3": ("all_gather", "ring", 3, {"counts": [2, 0, 3]}),
    "direct_3": ("all_reduce", "direct", 3, {"count": 2}),
    "direct_all_gather_3": ("all_gather", "direct", 3, {"counts": [2, 0, 3]}),
    "tree_5": ("all_reduce", "tree", 5, {"count": 2}),
    "tree_broadcast_5": ("broadcast", "tree", 5, {"count": 2, "root": 3}),
    "dissemination_5": ("all_gather", "dissemination", 5, {"count": 2}),
    "dissemination_barrier_5": ("barrier", "dissemination", 5, {}),
    "owners_3": ("all_reduce", "owners", 3, {"count": 4}),
    "direct_broadcast_3": ("broadcast", "direct", 3, {"count": 2, "root": 1}),
    "direct_barrier_3": ("barrier", "direct", 3, {}),
    "direct_reduce_3": ("reduce", "direct", 3, {"count": 2, "root": 1}),
    "direct_gather_3": ("gather", "direct", 3, {"counts": [2, 0, 3], "root": 1}),
    "direct_scatter_3": ("scatter", "direct", 3, {"counts": [2, 0, 3], "root": 1}),
    "direct_reduce_scatter_3": ("reduce_scatter", "direct", 3, {"counts": [2, 1, 3]}),
    "direct_all_to_all_3": (
        "all_to_all",
        "direct",
        3,
        {"matrix": [[1, 2, 0], [3, 0, 1], [2, 2, 2]]},
    ),
    "direct_scan_3": ("scan", "direct", 3, {"count": 2}),
    "direct_exscan_3": ("exscan", "direct", 3, {"count": 2}),
    "doubling_5": ("all_reduce", "doubling", 5, {"count": 2}),
    "doubling_all_gather_4": ("all_gather", "doubling", 4, {"counts": [2, 0, 3, 1]}),
    "doubling_scan_5": ("scan", "doubling", 5, {"count": 2}),
    "doubling_exscan_5": ("exscan", "doubling", 5, {"count": 2}),
    "halving_5": ("all_reduce", "halving", 5, {"count": 6}),
    "double_tree_broadcast_4": ("broadcast", "double_tree", 4, {"count": 16, "root": 1}),
    "double_tree_reduce_4": ("reduce", "double_tree", 4, {"count": 16, "root": 1}),
    "scattered_4": ("broadcast", "scatter_gather", 4, {"count": 7, "root": 1}),
    "tree_reduce_5": ("reduce", "tree", 5, {"count": 2, "root": 3}),
    "tree_gather_5": ("gather", "tree", 5, {"counts": [2, 0, 3, 1, 2], "root": 3}),
    "tree_scatter_5": ("scatter", "tree", 5, {"counts": [2, 0, 3, 1, 2], "root": 3}),
    "owners_reduce_3": ("reduce", "owners", 3, {"count": 4, "root": 1}),
    "pairwise_reduce_scatter_3": ("reduce_scatter", "pairwise", 3, {"counts": [2, 1, 3]}),
    "pairwise_all_to_all_3": (
        "all_to_all",
        "pairwise",
        3,
        {"matrix": [[1, 2, 0], [3, 0, 1], [2, 2, 2]]},
    ),
    "bruck_3": ("all_to_all", "bruck", 3, {"count": 2}),
    "reproducible_5": ("all_reduce", "reproducible", 5, {"count": 7}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figure_is_what_the_plan_says(name):
    collective, algorithm, world_size, arguments = FIGURES[name]
    text = schedule_text(build_all(collective, algorithm, world_size, **arguments))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN") == "1":
        path.write_text(text, encoding="ascii")
    assert path.read_text(encoding="ascii") == text


def test_a_group_of_one_is_a_heading():
    assert (
        schedule_text(build_all("all_reduce", "ring", 1, count=4))
        == "all_reduce by ring: world size 1, 4 elements, scratch 0\n"
    )


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Send(1, Chunk(2, 4)), "w[2:4] to 1"),
        (Recv(1, Chunk(2, 4, Buffer.SCRATCH)), "s[2:4] = <1>"),
        (RecvReduce(1, Chunk(2, 4), incoming_left=True), "w[2:4] = <1> + w[2:4]"),
        (RecvReduce(1, Chunk(2, 4), incoming_left=False), "w[2:4] = w[2:4] + <1>"),
        (Copy(Chunk(0, 2), Chunk(2, 4, Buffer.SCRATCH)), "s[2:4] = w[0:2]"),
        (
            Reduce(Chunk(0, 2, Buffer.SCRATCH), Chunk(2, 4), source_left=True),
            "w[2:4] = s[0:2] + w[2:4]",
        ),
        (
            Reduce(Chunk(0, 2, Buffer.SCRATCH), Chunk(2, 4), source_left=False),
            "w[2:4] = w[2:4] + s[0:2]",
        ),
    ],
)
def test_a_step_reads_as_an_assignment(step, text):
    assert step_text(step) == text


def test_no_line_ends_in_a_space():
    for collective, algorithm, world_size, arguments in FIGURES.values():
        for line in schedule_text(
            build_all(collective, algorithm, world_size, **arguments)
        ).splitlines():
            assert line == line.rstrip()


def test_a_long_figure_is_shortened_by_dots():
    text = schedule_text(
        build_all(
            "all_to_all", "direct", 9, matrix=[[(s + d) % 3 for d in range(9)] for s in range(9)]
        ),
        most=4,
    )
    rows = text.splitlines()[2:]
    assert [row.split("|")[0].strip() for row in rows] == [
        "round 0",
        "rank 0",
        "rank 1",
        "rank 2",
        "...",
        "rank 8",
    ]
    assert rows[1].split("|")[1].count(" to ") == 3
    assert "; ...; " in rows[1]
    assert text.splitlines()[
        0
    ] == "all_to_all by direct: world size 9, 18 / 18 / 18 / ... / 18 elements, scratch 0" or (
        "world size 9, 18 elements" in text
    )
    rounds = [
        line
        for line in schedule_text(build_all("all_reduce", "ring", 6, count=6), most=4).splitlines()
        if line[:3] in ("rou", "...")
    ]
    assert [line.split("|")[0].strip() for line in rounds if line.startswith("round")] == [
        f"round {k}" for k in (0, 1, 2, 9)
    ]


def test_what_is_short_is_shown_whole():
    plans = build_all("all_reduce", "ring", 3, count=6)
    assert schedule_text(plans, most=4) == schedule_text(plans)
