import importlib
import json
import re
import sys
import tomllib
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support import host_testbed
from tests.support.paths import BENCH, REPOSITORY
from tests.tidy.generated_block import check_block


@pytest.fixture
def bench(monkeypatch):
    """Import a module of the benches, which are scripts beside each other and no package."""
    for folder in ("", "peers", "sizes"):
        monkeypatch.syspath_prepend(BENCH / folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (
            "comparison",
            "values",
            "timing",
            "resnet50",
            "rows",
            "rows_worker",
        ):
            del sys.modules[name]


def everywhere(values, collective, world, count=12, dtype="float32", op="sum"):
    return [values.Values(collective, dtype, count, rank, world, op) for rank in range(world)]


def test_what_every_rank_must_have_is_the_collective_of_what_all_bring(bench):
    values = bench("values")
    for world in (1, 2, 3, 4):
        for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
            ranks = everywhere(values, collective, world)
            brought = [one.brought() for one in ranks]
            assert [part.size for part in brought] == [one.brought_count for one in ranks]
            cut = [np.split(part, world) for part in brought] if collective != "all_gather" else []
            for rank, one in enumerate(ranks):
                match collective:
                    case "all_reduce":
                        expected = sum(brought)
                    case "broadcast":
                        expected = brought[0]
                    case "all_gather":
                        expected = np.concatenate(brought)
                    case "reduce_scatter":
                        expected = sum(parts[rank] for parts in cut)
                    case _:
                        expected = np.concatenate([parts[rank] for parts in cut])
                assert np.array_equal(one.expected(), expected), (collective, world, rank)
                assert one.expected().size == one.result_count


def test_the_mean(bench):
    ranks = everywhere(bench("values"), "all_reduce", 4, op="mean")
    assert np.array_equal(ranks[0].expected(), np.mean([one.brought() for one in ranks], axis=0))


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "float16", "float32", "float64", "int64"]
)
@pytest.mark.parametrize("world", [2, 4, 7])
def test_every_dtype_holds_the_values_and_their_sums(bench, dtype, world):
    for one in everywhere(bench("values"), "all_reduce", world, 3000, dtype):
        for numbers in (one.brought(), one.expected()):
            assert np.array_equal(numbers.astype(dtype).astype(np.float32), numbers)
            assert np.all(numbers > 0)


def test_bfloat16_holds_them_too(bench):
    bfloat16 = ml_dtypes.bfloat16
    for one in everywhere(bench("values"), "all_reduce", 4, 3000, "bfloat16"):
        assert np.array_equal(one.expected().astype(bfloat16).astype(np.float32), one.expected())


def test_a_size_is_that_of_the_larger_buffer(bench):
    values = bench("values")
    assert values.Values.sized("all_reduce", "float16", 8, 0, 4).count == 4
    gathered = values.Values.sized("all_gather", "float32", 1 << 16, 1, 4)
    assert (gathered.brought_count * 4, gathered.result_count * 4) == (1 << 14, 1 << 16)
    scattered = values.Values.sized("reduce_scatter", "float64", 1 << 16, 1, 4)
    assert (scattered.brought_count * 8, scattered.result_count * 8) == (1 << 16, 1 << 14)
    assert values.Values.sized("all_to_all", "float32", 4, 0, 3).count == 3, "a piece for each rank"


def test_a_wrong_element_is_found(bench):
    timing, values = bench("timing"), bench("values")
    team = timing.Team(0, 1, lambda: None, lambda number: number, lambda number: number)
    x, out = np.empty(8, np.float32), np.zeros(8, np.float32)

    def right():
        out[:] = x

    def wrong():
        out[:] = x
        out[5] += 1

    one = values.Values("all_reduce", "float32", 8, 0, 1)
    assert timing.measure(team, timing.array_case(x, right, out), one, 0.001)["calls"] >= 3
    with pytest.raises(SystemExit, match="1 of 8 elements"):
        timing.measure(team, timing.array_case(x, wrong, out), one, 0.001)


def row(ratio, **more):
    times = {"syncvar": (1, 1, 1), "openmpi": (0, ratio, 9), "torch": (0, 2 * ratio, 9)}
    return {
        "collective": "all_reduce",
        "kind": "private",
        "workers": 2,
        "size": 1 << 20,
        "us": times,
        **more,
    }


def words(verdicts):
    return [one.word for one in verdicts]


def test_a_ratio_is_judged_against_must_and_aim(bench):
    bounds = bench("comparison.bounds")
    found = [words(bounds.judge_rows([row(ratio)], "float32")) for ratio in (1.1, 1.2, 1.3, 2.0)]
    assert found == [
        ["MISSED", "MISSED"],
        ["reached", "MISSED"],
        ["reached", "reached"],
        ["aim", "aim"],
    ], "all, and all but Intel MPI"
    (all_of_them, all_but_one) = bounds.judge_rows(
        [row(1.0, us={"syncvar": (1, 1, 1), "intelmpi": (0, 1.2, 9), "openmpi": (0, 2, 9)})],
        "float32",
    )
    assert (all_of_them.value, all_but_one.value) == (1.2, 2.0)
    assert bounds.judge_rows([row(1.2)], "float64") == [], "the bounds are for float32"


def test_a_time_that_may_be_longer_is_judged_the_other_way(bench):
    bounds = bench("comparison.bounds")
    small = [one for one in bounds.judge_rows([row(0.5, size=8)], "float32") if one.bound.at_most]
    assert [(one.value, one.word) for one in small] == [(2.0, "reached")]
    assert words(bounds.judge_rows([row(0.2, size=8)], "float32"))[:2] == ["MISSED", "MISSED"]


def test_what_was_not_measured_is_said(bench):
    bounds = bench("comparison.bounds")
    verdicts = bounds.judge_rows([row(40, size=8)], "float32")
    assert words(verdicts) == ["aim", "aim", "not measured", "reached"], (
        "all, MPI, TensorFlow, gloo"
    )
    assert (
        bounds.lines(verdicts)[-1]
        == "bounds: 3 of 4 reached, 2 of them the aim too; 0 missed, 1 not measured"
    )
    assert bounds.judge("launch mpirun", None, "launch").word == "not measured"


def test_what_a_worker_script_is_told(bench):
    rounds = bench("comparison.rounds")
    works = (
        rounds.Work("all_reduce", "private", (8, 64)),
        rounds.Work("all_reduce", "resident", (64, 128)),
    )
    plan = rounds.Plan(works, "float16", rounds.Effort(0.5, 1, 10))
    ends = ["--dtype", "float16", "--seconds", "0.5"]
    assert plan.arguments("syncvar") == [
        "--measure",
        "all_reduce/private/8,64",
        "--measure",
        "all_reduce/resident/64,128",
        *ends,
    ]
    assert plan.arguments("mpich") == ["--measure", "all_reduce/private/8,64,128", *ends], (
        "each size once"
    )
    limited = rounds.Plan(works, "float16", rounds.Effort(0.5, 1, 10), {"tensorflow": 64})
    assert limited.arguments("tensorflow") == ["--measure", "all_reduce/private/8,64", *ends]
    assert limited.arguments("mpich") == plan.arguments("mpich")


def test_turns_alternate_and_end_with_the_first_failure(bench, capsys):
    rounds = bench("comparison.rounds")
    order = []

    def good():
        order.append("a")
        return {"n": len(order)}, ""

    def bad():
        order.append("b")
        return (None, "broken") if order.count("b") == 2 else ({}, "")

    found = rounds.interleave("it", {"a": good, "b": bad}, 3)
    assert order == ["a", "b", "a", "b", "a"]
    assert found.problems == {"b": "failed in round 2: broken"}
    assert (len(found.results["a"]), len(found.results["b"])) == (3, 1)
    assert "round 3 of 3: a" in capsys.readouterr().err


def test_the_parameters_of_resnet_50(bench):
    script = bench("resnet50")
    text = (BENCH / "sizes" / "resnet50.toml").read_text(encoding="utf-8")
    assert script.text() == text, "the file is what its script writes"
    tensors = tomllib.loads(text)["tensors"]
    assert (len(tensors), sum(prod(tensor["shape"]) for tensor in tensors)) == (161, 25_557_032)
    assert len({tensor["name"] for tensor in tensors}) == 161


def test_what_is_written_every_day_is_told_beside_the_fastest_and_as_a_multiple_within_one_run(
    bench, monkeypatch
):
    everyday, rounds, part = (
        bench("comparison.everyday"),
        bench("comparison.rounds"),
        bench("comparison.part"),
    )

    def runs(**us):
        return [
            {
                "results": [
                    {"row": row, "size": 8, "us": times * time} for row, time in us.items()
                ],
                "refused": {},
            }
            for times in (1, 10, 2)
        ]

    ours = runs(
        **{
            everyday.PLAIN: 3.0,
            "sv.all_reduce(1.0)": 7.5,
            "sv.barrier()": 2.0,
            everyday.WRITE: 3.5,
            everyday.STEP: 6.0,
        }
    )
    theirs = {
        "openmpi": runs(**{everyday.PLAIN: 6.0, "sv.barrier()": 1.7}),
        "intelmpi": runs(**{"sv.barrier()": 1.8}),
        "torch": [],
    }
    libraries = bench("comparison.libraries")
    present = {
        name: libraries.library(name, "", Path("none"))
        for name in ("syncvar", "tensorflow", *theirs)
    }
    setting = part.Setting(present, (2,), rounds.Effort(0.1, 3, 10), 64)
    started = []
    monkeypatch.setattr(
        everyday,
        "interleave",
        lambda what, turns, _: (
            started.extend(turns) or rounds.Found({"syncvar": ours, **theirs}, {"torch": "broken"})
        ),
    )
    made = everyday.everyday(setting)
    assert started == ["syncvar", "openmpi", "intelmpi", "torch"]
    assert not made.failed
    told = {one.what: (one.value, one.word) for one in made.verdicts if one.value is not None}
    assert told["sv.all_reduce(1.0), 8 B, 2 workers"] == (2.5, "MISSED")
    assert told["sv.barrier(), 8 B, 2 workers, against best peer"] == (0.85, "reached")
    assert told[f"{everyday.STEP}, 8 B, 2 workers, beyond {everyday.WRITE}"] == (5.0, "reached")
    lines = "\n".join(made.lines)
    assert re.search(r"Open MPI +2\.00 +1\.00 +8 B  sv\.all_reduce\(x\)\n", lines), lines
    assert "torch: broken" in lines
    monkeypatch.setattr(
        everyday,
        "interleave",
        lambda *_: rounds.Found({"syncvar": [], "openmpi": []}, {"syncvar": "broken"}),
    )
    made = everyday.everyday(setting)
    assert made.failed
    assert set(words(made.verdicts)) == {"not measured"}


def test_every_row_says_what_its_texts_mean(bench):
    rows = bench("rows")
    worker = bench("rows_worker")
    assert len({row.title for row in rows.ROWS}) == len(rows.ROWS)
    assert {row.group for row in rows.ROWS} == set(rows.GROUPS)
    plain = next(row for row in rows.ROWS if row.title == rows.PLAIN)
    for row in rows.ROWS:
        for text in (row.syncvar, row.mpi, row.torch):
            made = {}
            exec(worker._function(text) if text else "call = None", made)
            assert callable(made["call"]) == bool(text)
        for text in row.setup.values():
            compile(text, row.title, "exec")
        compile(row.check, row.title, "eval")
        assert row.times is None or set(row.sizes) <= set(plain.sizes), row.title


def test_plain_variables_are_compared_as_those_in_run(bench):
    bounds, table = bench("comparison.bounds"), bench("comparison.table")
    assert table.rivals_of("plain variable", ["torch", "mpich", "intelmpi"]) == [
        "mpich",
        "intelmpi",
    ]
    for kind in ("variable", "plain variable"):
        assert kind in table.COLLECTIVES["all_reduce"]
        assert words(bounds.judge_rows([row(1.2, kind=kind)], "float32")) == ["MISSED"]


def test_intel_mpi_is_started_from_its_own_environment(bench, tmp_path):
    libraries = importlib.import_module("comparison.libraries")
    one = libraries.library("intelmpi", "", tmp_path)
    assert one.start(3) == [
        f"{tmp_path}/intelmpi/bin/mpiexec.hydra",
        "-n",
        "3",
        f"{tmp_path}/intelmpi/bin/python",
    ]
    assert one.environment(3)["LD_LIBRARY_PATH"] == f"{tmp_path}/intelmpi/lib"
    told = one.started_as(3)
    assert (
        told
        == "I_MPI_ROOT=ENV LD_LIBRARY_PATH=ENV/lib I_MPI_FABRICS=shm ENV/bin/mpiexec.hydra -n 3 python peer_mpi.py"
    )
    assert one.probe() == (None, "not set up, see --setup")


def test_every_part_and_every_kind_is_described(bench):
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    for name in (*bench("compare").PARTS, *bench("comparison.table").KINDS):
        assert f"\n| `{name}` |" in text


def test_where_there_can_be_no_hosts_their_parts_say_why(bench, monkeypatch):
    part = bench("comparison.part")
    monkeypatch.setattr(host_testbed, "why_none", lambda: "only root may")
    library = bench("comparison.libraries").library("syncvar", sys.executable, Path("none"))
    setting = part.Setting(
        {"syncvar": library},
        (2,),
        bench("comparison.rounds").Effort(0.1, 1, 10.0),
        2,
        tuple(bench("comparison.host_table").SCENES.values()),
    )
    for name, function in (("hosts", "hosts"), ("starting", "launch_over_hosts")):
        found = getattr(bench(f"comparison.{name}"), function)(setting)
        assert "not measured: only root may" in found.lines[-1]
        assert found.verdicts
        assert {one.word for one in found.verdicts} == {"not measured"}
        assert not found.failed


def test_calls_over_hosts_are_judged_by_scene(bench):
    hosts = bench("comparison.host_table")
    cells = {
        ("2x1", "unencrypted"): 90.0,
        ("2x1", "syncvar"): 50.0,
        ("2x1", "torch"): 180.0,
        ("2x2", "unencrypted"): 99.0,
        ("3x1@1", "syncvar"): 400.0,
        ("3x1@1", "links"): 300.0,
    }
    us = {
        hosts.Cell(hosts.SCENES[scene], "all_reduce", 8, column): time
        for (scene, column), time in cells.items()
    }

    def judged(scene, size=8, collective="all_reduce"):
        found = hosts.judge_call(hosts.SCENES[scene], collective, size, us)
        return {one.what.partition(": ")[2]: one.word for one in found}

    assert judged("2x1") == {
        "gloo / ours, unencrypted": "reached",
        "us, unencrypted": "MISSED",
        "us, encrypted": "reached",
    }
    assert judged("2x2") == {"2x2 / 2x1, unencrypted": "reached"}
    assert judged("3x1@1") == {"ours / links, encrypted": "MISSED"}
    assert judged("2x1", 1 << 20)["ours / Intel MPI, unencrypted"] == "not measured"
    assert judged("2x1@10") == {}


def test_the_share_of_the_line_counts_the_bytes_that_must_cross(bench):
    hosts = bench("comparison.host_table")
    ten, size = hosts.SCENES["2x1@10"], 16 << 20
    us = {
        hosts.Cell(ten, "all_reduce", size, "unencrypted"): 13_422.0,
        hosts.Cell(ten, "all_gather", size, "unencrypted"): 13_422.0,
    }
    shares = [
        hosts.judge_call(ten, name, size, us)[0].value for name in ("all_reduce", "all_gather")
    ]
    assert shares == pytest.approx([1.0, 0.5], rel=1e-3)


def test_a_table_over_hosts_says_its_bounds(bench):
    page = bench("comparison.page")
    row = {
        "scene": "2 x 1, unlimited",
        "collective": "broadcast",
        "size": 8,
        "us": {"syncvar": [1, 2.5, 3], "torch": [9, 1234.5, 9999]},
        "bounds": [{"what": "it", "text": "gloo / ours 494 ≥ 1"}],
    }
    lines = page.over_hosts({"hosts": {"rows": [row]}})
    assert lines[0] == "**2 x 1, unlimited**"
    assert lines[-2] == "| broadcast | 8 B | - | 2.5 | - | 1,234 | - | - | gloo / ours 494 ≥ 1 |"
    assert page.over_hosts({}) == []


def test_the_benchmarks_page_has_the_run_over_hosts(bench):
    report = json.loads((BENCH / "results" / "hosts.json").read_text())
    lines = bench("comparison.page").over_hosts(report)
    begin = (
        "<!-- written from bench/results/hosts.json by tests/unit/bench/test_bench_compare.py -->\n"
    )
    wanted = "\n".join(["", *lines, ""])
    check_block(REPOSITORY / "docs" / "benchmarks.md", begin, "<!-- end -->\n", wanted)


def test_a_barrier_leaves_the_values(bench):
    for one in everywhere(bench("values"), "barrier", 3):
        assert np.array_equal(one.expected(), one.brought())
        assert one.result_count == one.brought_count


def test_the_page_of_a_run_marks_what_misses_its_bound(bench):
    bounds, page = bench("comparison.bounds"), bench("comparison.page")
    rows = [
        {
            "workers": 2,
            "collective": "all_reduce",
            "kind": "private",
            "size": 8,
            "us": {"mpich": [1, 1, 1], "syncvar": [2, 2, 2]},
            "ratio": 0.5,
        },
        {
            "workers": 2,
            "collective": "broadcast",
            "kind": "private",
            "size": 65536,
            "us": {"mpich": [9, 9, 9], "syncvar": [3, 3, 3]},
            "ratio": 3.0,
        },
        {
            "workers": 2,
            "collective": "scan",
            "kind": "private",
            "size": 8,
            "us": {"syncvar": [3, 3, 3]},
        },
    ]
    everyday = [
        {
            "group": "calls",
            "row": "sv.barrier()",
            "size": 8,
            "us": {"syncvar": [1, 1234.4, 1]},
            "ratio": 0.7,
            "times": [1, 1.5, 1],
        }
    ]
    found = bounds.judge_rows(rows[:2], "float32")
    found.append(
        bounds.Verdict("sv.barrier(), 8 B, 2 workers, against best peer", 0.7, bounds.Bound(0.8))
    )
    found.append(bounds.judge("import", 70.0, "import of syncvar"))
    told = [{**one._asdict(), "bound": one.bound._asdict(), "verdict": one.word} for one in found]
    lines = page.page(
        {
            "comparison": [{"rows": rows}],
            "everyday": [{"workers": 2, "rows": everyday}],
            "bounds": told,
        }
    )
    assert "| 2 workers, ordinary arrays, `out=` given | 0.50 (2) † |" in lines
    assert "| broadcast, 2 workers | 3.00 (3) |" in lines
    assert "| `sv.barrier()` | 8 B | 1 234 | 1.50 | 0.70 † |" in lines
    assert "| import of syncvar | 70 † | <= 60 ms |" in lines
    missed = sum(one.word == "MISSED" for one in found)
    assert missed >= 3
    assert (
        lines[-1]
        == f"Of {len(found)} bounds {len(found) - missed - 2} were reached, {missed} missed, 2 not measured."
    )
    assert page.page({}) == []


def test_the_newest_results_as_data_give_the_tables_beside_them(bench):
    data = BENCH / "results" / "2026-11-26.json"
    tables = bench("comparison.page").page(json.loads(data.read_text()))
    rows = [line for line in tables if line.startswith("|")]
    assert len(rows) > 250
    shown = data.with_suffix(".md").read_text().splitlines()
    assert rows == [line for line in shown if line.startswith("|")]
