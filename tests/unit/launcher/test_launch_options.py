"""Options beside --listen and --join, the form of addresses, and the greeting of a host that joins."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError, WireError
from syncvar_launcher.hosts.agent_protocol import Hello
from syncvar_launcher.options.option_table import parse_address
from syncvar_launcher.options.parse_options import parse

HELLO = Hello("n1", "10.0.0.7", None, None, "0.1.0", 1, "3.11.7", "little")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "10.0.0.1:",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:x",
        "-oProxyCommand=x",
        "[fd00::7",
        "[fd00::7]x",
        "[n1]:x",
        "a b",
        "a:b:c",
        "*",
        "*:1",
        "n1:-1",
        "\n",
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="must be an address such as"):
        parse_address(text)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--listen", "10.0.0.1", "-m", "x"], "give --hosts N, or --workers N"),
        (
            ["--listen", "10.0.0.1", "--hosts", "n1:2", "-m", "x"],
            "--hosts n1:2: with --listen it is how many hosts join",
        ),
        (["--listen", "10.0.0.1", "--hosts", "0", "-m", "x"], "--hosts 0"),
        (["--listen", "0.0.0.0", "--hosts", "2", "-m", "x"], "would listen on all networks"),
        (["--listen", "[::]:29400", "--hosts", "2", "-m", "x"], "would listen on all networks"),
        (
            ["--listen", "10.0.0.1", "--hostfile", "h", "-n", "2", "-m", "x"],
            "--hostfile is for hosts that the launcher logs in to",
        ),
        (
            ["--listen", "10.0.0.1", "--hosts", "2", "--slots", "2", "-m", "x"],
            "--slots is an option of each host that joins",
        ),
        (["--join", "10.0.0.1", "--key-file", "k"], "the port is missing"),
        (["--join", "10.0.0.1:9", "train.py"], "leave train.py out"),
        (["--join", "10.0.0.1:9", ":", "b.py"], "leave b.py out"),
        (["--join", "10.0.0.1:9", "--workers", "2"], "--workers is for syncvar-launch --listen"),
        (
            ["--join", "10.0.0.1:9", "--listen", "10.0.0.1"],
            "--listen is for syncvar-launch --listen",
        ),
    ],
)
def test_what_contradicts_is_refused_with_its_remedy(tmp_path, words, why):
    with pytest.raises(ConfigError) as caught:
        parse(words, {}, tmp_path)
    assert why in str(caught.value)


def test_a_job_that_waits_for_hosts(tmp_path):
    chosen = parse(
        ["--listen", "10.0.0.1:29400", "--hosts", "3", "-m", "x"], {"HOME": "/home/ann"}, tmp_path
    )
    assert (
        chosen.has_hosts,
        chosen.hosts.entries,
        chosen.join.host_count,
        chosen.ranks.workers,
        str(chosen.join.key_file),
    ) == (True, (), 3, 0, "/home/ann/.syncvar-key")
    chosen = parse(
        ["--listen", "node1", "--workers", "3", "--key-file", "k", "-m", "x"], {}, tmp_path
    )
    assert (chosen.join.host_count, chosen.ranks.workers, chosen.join.key_file) == (
        None,
        3,
        tmp_path / "k",
    )
    chosen = parse(["--join", "node1:9", "--slots", "2", "--cwd", str(tmp_path)], {}, tmp_path)
    assert (chosen.join.address, chosen.join.slots, str(chosen.program.cwd), chosen.has_hosts) == (
        "node1:9",
        2,
        str(tmp_path),
        False,
    )


def test_a_greeting_is_read_as_it_was_packed():
    assert Hello.read(HELLO.pack()) == HELLO
    assert Hello.read(HELLO._replace(slots=3, cwd="/there").pack()) == HELLO._replace(
        slots=3, cwd="/there"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a\x1b[2J"},
        {"address": "nowhere"},
        {"slots": 0},
        {"slots": True},
        {"name": 3},
        {"cwd": "x" * 5000},
        {"protocol": "1"},
    ],
)
def test_a_greeting_with_wrong_values_is_refused(wrong):
    with pytest.raises(WireError):
        Hello.read(HELLO._replace(**wrong).pack())


def test_a_host_of_another_version_gets_an_explanation():
    data = msgpack.packb({"form": 1, **HELLO._asdict()})
    with pytest.raises(WireError, match="another version of syncvar; install the same on all"):
        Hello.read(data)


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_greeting(data):
    with pytest.raises(WireError):
        Hello.read(data)
