"""The command line of ssh, and what its failures mean."""

import shlex

import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.agent_connection import (
    SSH_OPTIONS,
    installation_text,
    remote_command,
    ssh_command,
    ssh_error_text,
)
from syncvar_launcher.hosts.host_checks import Interface, allowed_addresses, is_here
from syncvar_launcher.options.hostfile import Host, parse_hosts

TWO = [
    Interface("eth0", "10.0.0.7"),
    Interface("ib0", "10.9.0.7"),
    Interface("docker0", "172.17.0.1"),
    Interface("lo", "127.0.0.1"),
]


def test_the_host_comes_last_and_after_the_dashes():
    found = ssh_command(("ssh", "-F", "x"), Host("n1", user="ann", port=2222), 22, "python3")
    assert found == [
        "ssh",
        "-F",
        "x",
        *SSH_OPTIONS,
        "-p",
        "2222",
        "--",
        "ann@n1",
        remote_command("python3"),
    ]
    assert ssh_command(("ssh",), Host("n1"), 23, "python3")[-5:-1] == ["-p", "23", "--", "n1"]
    assert ssh_command(("ssh",), Host("n1", python="/p"), None, "python3")[-3:] == [
        "--",
        "n1",
        remote_command("/p"),
    ]


def test_the_policy_of_the_user_is_not_weakened():
    words = " ".join(SSH_OPTIONS)
    assert "StrictHostKeyChecking" not in words
    assert "UserKnownHostsFile" not in words
    for wanted in ("BatchMode=yes", "ClearAllForwardings=yes"):
        assert wanted in words
    assert {"-a", "-x"} <= set(
        SSH_OPTIONS
    )  # neither agent nor display, also where --ssh has -A or -X: -o would come too late


@pytest.mark.parametrize("python", ["/a b/python", "/x;rm -rf /", "$(x)", "`x`", "'", '"', "a\\b"])
def test_the_remote_command_is_fixed_and_quoted(python):
    words = shlex.split(remote_command(python))
    assert words[:2] == ["exec", python]
    assert words[2:4] == ["-P", "-c"]
    assert words[-1] == "syncvar_launcher.hosts.agent_main"


@pytest.mark.parametrize(
    ("status", "words", "told"),
    [
        (
            255,
            "ssh: Could not resolve hostname n9: Name or service not known",
            "its name is unknown",
        ),
        (
            255,
            "ssh: connect to host n1 port 22: Connection refused",
            "nobody listens for ssh there",
        ),
        (255, "Host key verification failed.", "ssh-keyscan"),
        (
            255,
            "ann@n1: Permission denied (publickey).",
            "`ssh ann@n1 true` must work without a password",
        ),
        (255, "ssh: connect to host n1 port 22: Connection timed out", "it cannot be reached"),
        (255, "something else", "ssh ended with 255: something else"),
        (127, "bash: line 1: exec: /p: not found", "there is no /p there"),
        (126, "", "there is no /p there"),
        (1, "ModuleNotFoundError: No module named 'syncvar'", "/p -m pip install "),
        (1, "a\n\nb\nc\nd\n", "the agent ended with 1: b | c | d"),
        (1, "", "the agent ended with 1, and said nothing"),
        (None, "", "it does not answer in time"),
    ],
)
def test_a_failure_is_told_with_its_remedy(status, words, told):
    assert told in ssh_error_text(Host("n1", user="ann"), status, words, "/p")


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ({}, "copy its folder or wheel to ann@n1 and run there: /p -m pip install PATH"),
        (
            {"url": "file:///a%20b/syncvar-1-py3.whl", "archive_info": {}},
            "copy '/a b/syncvar-1-py3.whl' to ann@n1 and run there: /p -m pip install '/a b/syncvar-1-py3.whl'",
        ),
        (
            {"url": "https://h/syncvar.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "run on ann@n1: /p -m pip install git+https://h/syncvar.git@abc",
        ),
    ],
)
def test_syncvar_comes_from_where_this_host_has_it(origin, told):
    assert (
        installation_text("/p", "ann@n1", origin)
        == f"install syncvar {sv.__version__} as on this host: {told}"
    )


@pytest.mark.parametrize(
    ("spec", "reached_at", "addresses"),
    [
        (None, "10.0.0.7", ["10.0.0.7", "10.9.0.7"]),
        (None, None, ["10.0.0.7", "10.9.0.7"]),
        (None, "127.0.0.1", ["127.0.0.1"]),
        (None, "192.168.3.3", ["192.168.3.3", "10.0.0.7", "10.9.0.7"]),
        ("ib0", "10.0.0.7", ["10.9.0.7"]),
        ("10.9.0.0/16,eth0", "10.0.0.7", ["10.0.0.7", "10.9.0.7"]),
        ("^eth0", "10.0.0.7", ["10.9.0.7", "172.17.0.1"]),
        ("^10.0.0.0/8", "10.0.0.7", ["172.17.0.1"]),
        ("lo", "10.0.0.7", ["127.0.0.1"]),
        ("wlan0", "10.0.0.7", []),
    ],
)
def test_which_addresses_a_job_may_use(spec, reached_at, addresses):
    assert allowed_addresses(TWO, spec, reached_at) == addresses


@pytest.mark.parametrize("spec", ["", "10.0.0.0/99", "a,,b", "a_name_that_is_too_long"])
def test_an_interface_that_is_none_is_refused(spec):
    with pytest.raises(ConfigError, match="--iface"):
        allowed_addresses(TWO, spec, None)


def test_this_machine_needs_no_ssh():
    for name in ("localhost", "127.0.0.1", "127.9.9.9", "10.9.0.7"):
        assert is_here(Host(name), TWO), name
    assert is_here(parse_hosts("[::1]").hosts[0], TWO)
    for host in (
        Host("10.0.0.8"),
        Host("n1"),
        Host("localhost", user="ann"),
        Host("localhost", port=2222),
    ):
        assert not is_here(host, TWO), host
