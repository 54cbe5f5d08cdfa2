"""`syncvar bench` and `syncvar test` as a user starts them."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys

import pytest

from tests.support.paths import BENCH


@pytest.fixture
def syncvar(tmp_path):
    """Run the command in an empty folder."""

    def run(*arguments, limit_s=120, **env):
        line = [
            sys.executable,
            "-c",
            "import sys; from syncvar.cli.commands import main; sys.exit(main())",
            *arguments,
        ]
        return subprocess.run(
            line,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "SYNCVAR_LAUNCH_START_METHOD": "fork", **env},
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.mark.parametrize("transport", ["auto", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_benchmark_starts_its_own_workers(syncvar, tmp_path, transport):
    ended = syncvar(
        "bench",
        "all_reduce",
        "-b",
        "8",
        "-e",
        "4K",
        "-f",
        "8",
        "-n",
        "5",
        "--workers",
        "2",
        "--json",
        "x.json",
        "--transport",
        transport,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    rows = [line.split() for line in ended.stdout.splitlines() if not line.startswith("#")]
    sizes = [8 << power for power in range(0, 10, 3)]
    assert [int(row[0]) for row in rows] == sizes
    assert [int(row[1]) for row in rows] == [size // 4 for size in sizes]
    assert {tuple(row[2:5]) for row in rows} == {("float32", "sum", "-1")}
    assert {(row[8], row[12]) for row in rows} == {("0", "0")}, "no element is wrong"
    assert re.search(r"^# Out of bounds values : 0 OK$", ended.stdout, re.MULTILINE)
    assert re.search(r"^# Avg bus bandwidth    : [0-9.e-]+$", ended.stdout, re.MULTILINE)
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["ranks"] == 2
    assert record["transport"].startswith("zmq" if transport == "zmq" else "shared memory")
    assert record["out_of_bounds"] == {"count": 0, "okay": True}
    assert [row["size"] for row in record["results"]] == sizes
    for row in record["results"]:
        for half in (row["out_of_place"], row["in_place"]):
            assert half["nwrong"] == 0
            assert half["iterations"] == 5
            assert half["time_min"] <= half["time_avg"] <= half["time_max"]
            assert half["alg_bw"] == pytest.approx(
                row["size"] / half["time"] / 1e3, rel=1e-3, abs=1e-6
            )
            assert half["bus_bw"] == pytest.approx(half["alg_bw"], abs=1e-6), (
                "the factor on two ranks is 1"
            )


INSIDE = (
    "reduce -r all -o sum,max --resident",
    "reduce_scatter -d int64,bfloat16",
    "all_gather --async -m 3",
    "gather -r 2 -a 0",
    "scatter -a 3 --resident",
    "all_to_all -a 2",
    "broadcast -i 1K -c 3",
    "exscan -o prod",
    "send_recv -m 2",
    "barrier -w 0",
    "all_reduce -o all -c 0 -d int32",
    "all_reduce --reproducible --async",
)


def test_benchmarks_inside_a_job(launch):
    script = """
    import sys
    import syncvar as sv
    from syncvar.cli.bench import parse_arguments, work
    for line in sys.argv[1:]:
        if sv.rank() == 0:
            print("#", line)
        assert work(parse_arguments([*line.split(), "-b", "8", "-e", "2K", "-n", "2", *([] if "-i" in line else ["-f", "16"])])) == 0
    """
    job = launch(script, workers=3, arguments=INSIDE)
    assert job.wait(120) == 0, str(job)
    rows = {line: [] for line in INSIDE}
    for line in job.out.splitlines():
        mark, _, text = line.partition(" ")
        assert mark == "[0]", "only rank 0 speaks"
        if text.removeprefix("# ") in rows:
            current = rows[text.removeprefix("# ")]
        elif not text.startswith("#"):
            current.append(text.split())
    for line, found in rows.items():
        assert len(found) >= (1 if line.startswith("barrier") else 2), line
        for row in found:
            assert {row[8], row[12]} <= {"0", "N/A"}, (line, row)


PLANTED = """
import sys
from functools import wraps
from pathlib import Path
import numpy as np, syncvar as sv
from syncvar.collectives.collective_registry import COLLECTIVES
real = sv.all_reduce

@wraps(real)
def all_reduce(x, op="sum", **options):
    made = real(x, op, **options)
    if sv.rank() == 1 and getattr(made, "dtype", None) == np.int16 and made.size > 4:
        made = made.copy()
        made[4] += 1
    return made

COLLECTIVES["all_reduce"] = COLLECTIVES["all_reduce"]._replace(functions=(all_reduce,))
"""


def test_wrong_elements_are_counted(launch):
    script = (
        PLANTED
        + "from syncvar.cli.bench import parse_arguments, work\nsys.exit(work(parse_arguments()))"
    )
    job = launch(
        script, arguments=["all_reduce", "-b", "8", "-e", "16", "-d", "int16", "-n", "2", "-c", "2"]
    )
    assert job.wait() == 1, str(job)
    small, large = (
        [*line.split()][1:] for line in job.out.splitlines() if not line.startswith("[0] #")
    )
    assert (small[8], small[12]) == ("0", "0")
    assert (large[8], large[12]) == ("3", "2"), (
        "two checks and the last timed call; in place two checks"
    )
    assert "Out of bounds values : 5 FAILED" in job.out


def test_the_proof_of_a_few_collectives(syncvar):
    ended = syncvar(
        "test", "--workers", "2", "broadcast", "gather", "send_recv", "barrier", "scatter_object"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *lines, last = ended.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["broadcast", "OK"],
        ["gather", "OK"],
        ["send_recv", "OK"],
        ["barrier", "OK"],
        ["scatter_object", "OK"],
    ]
    assert all(line.endswith(" calls over shared memory and zmq") for line in lines)
    assert "15 dtypes" in lines[0]
    assert "counts 0, 1, 2, 3, 10007" in lines[0]
    assert re.fullmatch(r"OK: --workers 2 over shared memory and zmq, [0-9.]+ s", last)


def test_what_a_failed_proof_says(launch):
    script = (
        PLANTED
        + "from syncvar.cli.selftest import parse_arguments, work\nsys.exit(work(parse_arguments()))"
    )
    job = launch(script, arguments=["all_reduce", "broadcast"])
    assert job.wait() == 1, str(job)
    first, *failures, last = (line.removeprefix("[0] ") for line in job.out.splitlines())
    assert first.startswith("all_reduce         FAIL  ")
    assert re.match(
        r" +shared memory: rank 1: all_reduce: int16, sum, count 10007: index 4 is -?\d+ instead of -?\d+$",
        failures[0],
    )
    assert last.startswith("broadcast          OK  ")


@pytest.mark.slow
def test_the_proof_finds_a_call_that_takes_nowhere_for_a_place(launch):
    """Prepared in-place calls did once, where one rank's array is private; only calls that are repeated with such show it."""
    script = """
    import sys
    from syncvar.cli.selftest import parse_arguments, work
    from syncvar.runtime import shm_reduce as shared_reduce
    shared_reduce._are_known = lambda places: True
    sys.exit(work(parse_arguments()))
    """
    job = launch(script, arguments=["all_reduce"], env={"SYNCVAR_CHECK_SHM": "on"})
    assert job.wait(120) != 0, str(job)
    assert "InternalError" in job.err
    assert "unallocated memory" in job.err


def test_a_rank_that_dies_fails_the_proof(syncvar, tmp_path):
    # The module is found first in the folder of the workers' start; it ends rank 1 in the middle.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from functools import wraps\n"
        "if os.environ.get('SYNCVAR_RANK') in ('0', '1'):\n"
        "    import syncvar as sv\n"
        "    from syncvar.collectives.collective_registry import COLLECTIVES\n"
        "    gather, waits = sv.gather, [sv.barrier]\n"
        "    @wraps(gather)\n"
        "    def replaced(*given, **named):\n"
        "        while waits:\n"
        "            waits.pop()()\n"  # rank 0 is past the broadcasts, and in its gather
        "        if sv.rank() == 1:\n"
        "            os._exit(3)\n"
        "        return gather(*given, **named)\n"
        "    COLLECTIVES['gather'] = COLLECTIVES['gather']._replace(functions=(replaced,))\n"
    )
    ended = syncvar(
        "test",
        "--workers",
        "2",
        "--transport",
        "zmq",
        "broadcast",
        "gather",
        SYNCVAR_LAUNCH_START_METHOD="spawn",
        PYTHONPATH=str(tmp_path),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"^broadcast +OK ", ended.stdout, re.MULTILINE)
    assert re.search(r"^gather +FAIL ", ended.stdout, re.MULTILINE)
    assert "rank 0: gather: bool, count 0, root 0: PeerLost" in ended.stdout
    assert "FAIL  the job over zmq ended with exit code 3" in ended.stdout
    assert "rank 1" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_workers_end_with_the_command(tmp_path, number):
    line = [
        sys.executable,
        "-c",
        "import sys; from syncvar.cli.commands import main; sys.exit(main())",
    ]
    line += ["bench", "barrier", "-n", "100000000", "--workers", "2"]
    process = subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while "(GB/s)" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(120) == (128 + number if number == signal.SIGINT else -number)
    finally:
        process.kill()
        process.communicate(timeout=120)  # the pipes are closed when the workers have ended too
    # The fixture of all tests sees to it that the workers are gone.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "all_reduc"], "did you mean all_reduce"),
        (["bench", "reduce", "-r", "2", "--workers", "2"], "no such rank"),
        (["test", "gater"], "did you mean gather"),
    ],
)
def test_a_wrong_command_line(syncvar, arguments, words):
    ended = syncvar(*arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert ended.stdout == ""


def test_what_is_written_every_day_is_measured_and_verified(syncvar, tmp_path):
    """The worker scripts of bench/compare.py: each call is compared with what must come out before it is timed."""
    peers = BENCH / "peers"
    small = ["--library", "syncvar", "--largest", "8192", "--slices", "1"]
    for script, more in (
        ("rows_worker.py", small),
        ("peer_syncvar.py", ["--measure", "all_reduce/plain variable/8,4096"]),
    ):
        command = [
            sys.executable,
            "-m",
            "syncvar_launcher",
            "--workers",
            "2",
            peers / script,
            "--seconds",
            "0.003",
            *more,
            "--result",
            tmp_path / script,
        ]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "rows_worker.py").read_text())["results"]
    expected = runpy.run_path(str(peers / "rows.py"))["ROWS"]
    assert [(row["row"], row["size"]) for row in rows] == [
        (row.title, size) for row in expected for size in row.sizes if size <= 8192
    ]
    assert min(row["us"] for row in rows) > 0
    rows = json.loads((tmp_path / "peer_syncvar.py").read_text())["results"]
    assert [(row["kind"], row["size"]) for row in rows] == [
        ("plain variable", 8),
        ("plain variable", 4096),
    ]


def test_a_row_that_gives_something_wrong_is_not_timed(launch):
    script = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv.pop(1))
    import rows_worker, syncvar as sv
    real = sv.scan
    sv.scan = lambda x, out: real(x + 1, out=out)
    sys.argv[1:] = ["--library", "syncvar", "--groups", "moves", "--largest", "8"]
    rows_worker.main()
    """
    job = launch(script, arguments=[str(BENCH / "peers")])
    assert job.wait() == 1, str(job)
    assert "sv.scan(x, out=out) of 8 bytes is wrong" in job.err, str(job)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("peer", ["openmpi", "mpich", "intelmpi", "torch"])
def test_what_others_write_instead_is_measured_and_verified(tmp_path, peer):
    """`pytest -m peers` after `python bench/compare.py --setup`, as for test_against_others."""
    command = [
        sys.executable,
        BENCH / "compare.py",
        "--peers",
        os.environ.get("SYNCVAR_PEERS", ".peers"),
    ]
    command += [
        "--libraries",
        f"syncvar,{peer}",
        "--parts",
        "everyday",
        "--workers",
        "2",
        "--rounds",
        "1",
        "--seconds",
        "0.003",
        "--json",
        tmp_path / "x",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads((tmp_path / "x").read_text())["everyday"]
    assert found["problems"] == {}
    assert sum("ratio" in row for row in found["rows"]) > 40
