"""`syncvar plan`: what it prints, and what it refuses."""

import json

import pytest

from syncvar.algorithms.builders import ALGORITHMS, build_all
from syncvar.algorithms.schedule import schedule_text
from syncvar.cli.commands import main


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("SYNCVAR_ALGORITHM", "SYNCVAR_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("collective", ALGORITHMS)
@pytest.mark.parametrize("path", ["links", "shm"])
def test_every_collective_has_a_figure_a_reason_and_a_table(capsys, collective, path):
    text = printed(capsys, collective, "--ranks", "3", "--bytes", "3K", "--path", path)
    first, *rest = text.splitlines()
    algorithm = first.split(":")[0]
    assert algorithm in ALGORITHMS[collective]
    assert f"{collective} by {algorithm}: world size 3" in text
    table = [
        line.replace("*", " ").split()[0]
        for line in rest
        if line.startswith((" ", "* ")) and line.split()[0] != "algorithm"
    ]
    assert set(table) <= set(ALGORITHMS[collective])
    assert len(table) >= len(ALGORITHMS[collective]) - 1  # doubling needs a power of two
    assert sum(line.startswith("* ") for line in rest) == 1
    assert (
        "in shared memory with 10 us per phase"
        if path == "shm"
        else "over links with 45 us per message"
    ) in text


def test_bytes_become_elements(capsys):
    assert "world size 5, 262144 elements" in printed(
        capsys, "all_reduce", "--ranks", "5", "--bytes", "1M"
    )
    assert "world size 5, 131072 elements" in printed(
        capsys, "all_reduce", "--ranks", "5", "--bytes", "1M", "--dtype", "float64"
    )
    assert "world size 4, 256 elements" in printed(
        capsys, "all_gather", "--ranks", "4", "--bytes", "1K"
    )
    assert "world size 4, 512 elements" in printed(
        capsys, "all_to_all", "--ranks", "4", "--bytes", "1K"
    )
    assert "world size 4, 8 elements" in printed(capsys, "all_reduce")
    assert "world size 4, 12 elements" in printed(capsys, "scatter", "--count", "3")


def test_a_demanded_algorithm_is_shown_with_what_would_be_chosen(capsys):
    text = printed(capsys, "all_reduce", "--ranks", "3", "--algorithm", "ring")
    assert text.startswith("ring: the caller demands it\nelse direct: 32 bytes on 3 ranks: ")
    assert schedule_text(build_all("all_reduce", "ring", 3, count=8)) in text


def test_the_jobs_settings_count_as_in_a_job(capsys, monkeypatch):
    usual = printed(capsys, "all_reduce", "--ranks", "3")
    assert "in shared memory with" in usual
    assert "--path links" in usual
    monkeypatch.setenv("SYNCVAR_TRANSPORT", "zmq")
    assert "over links with" in printed(capsys, "all_reduce", "--ranks", "3")
    monkeypatch.setenv("SYNCVAR_ALGORITHM", "all_reduce:ring,all_gather:doubling")
    text = printed(capsys, "all_reduce", "--ranks", "3")
    assert text.startswith("ring: SYNCVAR_ALGORITHM names it\nelse direct: 32 bytes on 3 ranks: ")
    assert schedule_text(build_all("all_reduce", "ring", 3, count=8)) in text
    assert printed(capsys, "all_reduce", "--ranks", "3", "--algorithm", "tree").startswith(
        "tree: the caller demands it"
    )
    for where_it_cannot_be in (
        ("all_gather", "--ranks", "3"),
        ("all_reduce", "--ranks", "3", "--reproducible"),
    ):
        assert "SYNCVAR_ALGORITHM" not in printed(capsys, *where_it_cannot_be)
    monkeypatch.setenv("SYNCVAR_ALGORITHM", "all_reduce:rign")
    assert "did you mean ring" in refused(capsys, "all_reduce")


def test_the_root_is_shown(capsys):
    assert "rank 2  | w[0:8] to" in printed(capsys, "broadcast", "--root", "2")


def test_a_reduction_by_the_tree(capsys):
    text = printed(
        capsys, "all_reduce", "--ranks", "5", "--bytes", "1M", "--reproducible", "--path", "links"
    )
    assert text.startswith("reproducible: 1048576 bytes on 5 ranks: ")
    assert "tree: sums by the fixed tree over the ranks, as reproducible=True demands." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("all_reduce", "--ranks", "2", "--program", "1"),
            "fold     slot of rank 0 [0:8], slot of rank 1 [0:8] -> target[0:8]",
        ),
        (
            ("all_reduce", "--ranks", "2", "--bytes", "1M", "--program", "0"),
            "fold     source[0:32768], cells of rank 1, side 0 [0:32768] -> target[0:32768]",
        ),
        (
            ("all_reduce", "--ranks", "4", "--bytes", "1M", "--program", "3"),
            "copy     combined of rank 0, side 0 [0:8192] -> target[0:8192]",
        ),
        (
            ("broadcast", "--ranks", "3", "--program", "2"),
            "copy     slot of rank 0 [0:8] -> target[0:8]",
        ),
        (
            ("all_gather", "--ranks", "2", "--bytes", "1M", "--program", "0"),
            "copy     source[0:8192] -> cells of rank 0, side 0 [0:8192]",
        ),
        (
            ("all_to_all", "--ranks", "3", "--bytes", "8M", "--program", "0"),
            "copy     array of rank 1 [0:699051] -> target[0:699051]",
        ),
        (
            ("scan", "--ranks", "3", "--program", "1"),
            "fold     slot of rank 0 [0:8], slot of rank 1 [0:8] -> target[0:8]",
        ),
        (
            ("reduce", "--ranks", "2", "--bytes", "1M", "--program", "1"),
            "copy     source[0:32768] -> cells of rank 1, side 0 [0:32768]",
        ),
        (
            ("reduce_scatter", "--ranks", "2", "--program", "1"),
            "fold     slot of rank 0 [0:8], source 1[0:8] -> target[0:8]",
        ),
        (
            ("all_gather", "--ranks", "3", "--algorithm", "ring", "--program", "0"),
            "copy     slot of rank 2 [0:8] -> target[16:24]",
        ),
    ],
)
def test_the_program_of_a_rank_is_shown(capsys, arguments, words):
    lines = [line.strip() for line in printed(capsys, *arguments).splitlines()]
    assert words in lines
    assert "phase 0  all ranks publish their call, and compare" in lines


def test_a_long_figure_is_short_unless_all_of_it_is_wanted(capsys):
    short = printed(capsys, "all_reduce", "--ranks", "32", "--algorithm", "ring")
    full = printed(capsys, "all_reduce", "--ranks", "32", "--algorithm", "ring", "--full")
    assert "\n...\n" in short
    assert len(short) < 10_000 < len(full)
    assert "round 60" in full
    assert "round 61" in short


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_reduce", "--ranks", "0"), "--ranks must be 1 to 1024, not 0"),
        (("all_reduce", "--ranks", "2000"), "--ranks must be 1 to 1024, not 2000"),
        (("all_reduce", "--count", "-1"), "--count must not be negative"),
        (("all_reduce", "--algorithm", "rign"), "did you mean ring"),
        (
            ("all_gather", "--ranks", "3", "--algorithm", "doubling"),
            "needs a power of two of ranks, not 3",
        ),
        (("broadcast", "--root", "4"), "root 4 is not in a group of 4"),
        (("all_reduce", "--bytes", "many"), "'many'"),
        (("all_reduce", "--program", "4"), "--program must be a rank from 0 to 3"),
        (
            ("all_reduce", "--program", "0", "--path", "links"),
            "shares memory (--path shm), not 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def doctor_file(tmp_path, **rates):
    """Write what `syncvar doctor --json` prints about links such as a_b."""
    links = [
        {"name": "link", "host": pair.replace("_", " to "), "numbers": list(rate)}
        for pair, rate in rates.items()
    ]
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"checks": [{"name": "cores", "host": "a"}, *links]}))
    return str(path)


def test_measured_links_decide_as_in_a_job(capsys, monkeypatch, tmp_path):
    fast, slow = (60_000, 120_000), (60_000, 1_200)
    path = doctor_file(tmp_path, a_b=fast, a_c=fast, b_c=slow)
    query = ("broadcast", "--ranks", "3", "--bytes", "1M", "--measured", path)
    text = printed(capsys, *query)
    assert text.startswith("direct: 1048576 bytes on 3 hosts: by the measured network ")
    assert "\nelse scatter_gather: 1048576 bytes on 3 ranks: " in text
    assert f"Predicted over links with what {path} says" in text
    assert "\nBetween hosts data take lanes" in text
    sums = ("all_reduce", *query[1:])
    assert printed(capsys, *sums).startswith("ring: ")
    monkeypatch.setenv("SYNCVAR_ALGORITHM_CHOICE", "measured")
    assert printed(capsys, *sums).startswith("halving: ")
    assert printed(capsys, *sums, "--algorithm", "tree").startswith("tree: the caller demands it")
    assert printed(capsys, *sums, "--reproducible").splitlines()[0].split(":")[0] in (
        "owners",
        "tree",
        "direct",
    )
    monkeypatch.setenv("SYNCVAR_ALGORITHM_CHOICE", "rules")
    assert printed(capsys, *query).startswith("scatter_gather: ")
    monkeypatch.setenv("SYNCVAR_TRANSPORT", "zmq")
    assert "Between hosts data take encrypted ZeroMQ links (SYNCVAR_TRANSPORT=zmq" in printed(
        capsys, *query
    )


def test_a_file_without_the_links_of_all_ranks_is_refused(capsys, tmp_path):
    path = doctor_file(tmp_path, a_b=(60_000, 120_000))
    assert "has the links of 2 hosts" in refused(capsys, "all_reduce", "--measured", path)
    (tmp_path / "other").write_text("[]")
    for name in ("other", "absent"):
        assert "must be the output of syncvar doctor --json" in refused(
            capsys, "all_reduce", "--measured", str(tmp_path / name)
        )
