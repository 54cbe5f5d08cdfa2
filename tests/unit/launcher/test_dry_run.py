import pytest

from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.dry_run import dry_run_hosts, dry_run_text
from syncvar_launcher.job.settings_table import settings_rows
from syncvar_launcher.local.worker_start import server_command
from syncvar_launcher.options.option_table import BY_KEY
from syncvar_launcher.options.parse_options import parse


@pytest.fixture
def options(tmp_path):
    return parse(
        ["-n", "3", "--env", "API_KEY=hunter2", "--timeout", "90", "-m", "train", "--lr", "0.1"],
        {"SYNCVAR_LAUNCH_TIMESTAMPS": "1", "SYNCVAR_LOST_AFTER_S": "1.5"},
        tmp_path,
    )


def test_text_tells_ranks_command_environment_and_settings(options, tmp_path):
    environments = [
        {"SYNCVAR_RANK": str(rank), "OMP_NUM_THREADS": "2", "API_KEY": "hunter2"}
        for rank in range(3)
    ]
    argv = [
        "/usr/bin/python3",
        "-m",
        "syncvar.bootstrap.worker_main",
        "-m",
        "train",
        "--lr",
        "0.1",
        "a b",
    ]
    text = dry_run_text(
        options,
        [(0, 1), (2, 3), None],
        environments,
        [argv],
        host="b",
        notes=["bound: 2 cores", "transport x: y"],
    )
    head, settings = text.split("settings:\n")
    assert head == (
        "rank  host  cores  BLAS threads\n"
        "0     b     0,1    2\n"
        "1     b     2,3    2\n"
        "2     b     any    2\n"
        "bound: 2 cores\n"
        "transport x: y\n"
        f"folder {tmp_path}\n"
        "\n"
        "command:\n"
        "  /usr/bin/python3 -m syncvar.bootstrap.worker_main -m train --lr 0.1 'a b'\n"
        "\n"
        "environment set for rank 0:\n"
        "  API_KEY='***'\n"
        "  OMP_NUM_THREADS=2\n"
        "  SYNCVAR_RANK=0\n"
        "\n"
    )
    rows = [line.split() for line in settings.splitlines()]
    assert ["workers", "3", "command", "line"] in rows
    assert ["timeout", "90", "s", "command", "line"] in rows
    assert ["timestamps", "yes", "environment"] in rows
    assert ["lost_after_s", "1.5", "s", "environment"] in rows
    assert ["window_bytes", "67108864", "B", "default"] in rows
    assert "hunter2" not in text


def test_servers_are_shown_with_their_copies_and_a_command_line_that_names_them(tmp_path):
    chosen = parse(["--servers", "2", "--server-replicas", "1", "-m", "train"], {}, tmp_path)
    commands = [server_command("module", "train", server) for server in range(2)]
    text = dry_run_text(
        chosen, [None], [{}], [["x"]], servers=[("a", (1,), commands[0]), ("b", (0,), commands[1])]
    )
    assert "server  host  copies on\n0       a     1\n1       b     0\n" in text
    assert "command of server 0:\n" in text
    assert "syncvar.parameter_server.server_main server 0 -m train\n" in text
    assert "copies on" not in dry_run_text(chosen, [None], [{}], [["x"]])


def test_a_cleared_environment_is_shown_whole(tmp_path):
    cleared = parse(["--env-clear", "-m", "train"], {}, tmp_path)
    assert "environment of rank 0, and nothing else:\n  HOME=/h\n" in dry_run_text(
        cleared, [None], [{"HOME": "/h"}], [["x"]]
    )
    assert ("env_clear", "yes", "command line") in settings_rows(cleared)


def test_every_setting_is_shown(options):
    names = {name for name, _, _ in settings_rows(options)}
    assert names >= (set(BY_KEY) - {"env", "hostfile", "include", "exclude"}) | set(
        RuntimeConfig.names()
    ) | {"config", "env.API_KEY"}


def test_control_characters_of_values_are_escaped(tmp_path):
    options = parse(["--env", "A=\x1b[2J", "-m", "t"], {}, tmp_path)
    assert "\x1b" not in dry_run_text(options, [None], [{"A": "\x1b]"}], [["a\x1b"]], host="\x1b")


def test_no_blas_variable_is_said(options):
    assert "as set" in dry_run_text(options, [None], [{}], [["x"]])


def test_several_programs_are_shown_with_their_ranks(tmp_path):
    chosen = parse(
        ["-n", "2", "-x", "A=1", "-m", "a", ":", "-x", "A=2", "-x", "KEY=3", "-m", "b"],
        {},
        tmp_path,
    )
    text = dry_run_text(chosen, [None] * 3, [{"A": "1"}] * 3, [["run", "a"], ["run", "b"]])
    assert "command of ranks 0, 1:\n  run a\ncommand of rank 2:\n  run b\n" in text
    assert "environment set for rank 0:\n  A=1\n--env of rank 2:\n  A=2\n  KEY='***'\n" in text


@pytest.mark.parametrize(
    ("workers", "lines"),
    [
        (["-n", "2"], "ranks 0, 1: -m a --lr 1\nrank 2: b.py\n"),
        ([], "all other ranks: -m a --lr 1\n1 rank: b.py\n"),
    ],
)
def test_several_programs_on_hosts_are_shown(tmp_path, workers, lines):
    words = ["-H", "a:3", *workers, "-m", "a", "--lr", "1", ":", "b.py"]
    assert lines in dry_run_hosts(parse(words, {}, tmp_path))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["--workers", "2:5", "--spares", "1", "--hosts", "a:2,b:2"],
            ["a: workers 0, 1", "elastic: 2 to 5 workers, and 1 spare; "],
        ),
        (
            ["--workers", "2:4", "--host-discovery", "./find"],
            ["hosts: those that", "elastic: 2 to 4 workers; "],
        ),
    ],
)
def test_an_elastic_job_on_hosts_says_so_and_begins_with_the_slots_there_are(
    words, lines, tmp_path
):
    script = tmp_path / "find"
    script.write_text("#!/bin/sh")
    script.chmod(0o755)
    text = dry_run_hosts(parse([*words, "-m", "train"], {}, tmp_path))
    assert all(line in text for line in lines), text
