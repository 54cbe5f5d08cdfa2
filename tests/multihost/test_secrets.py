"""What goes to other hosts goes there as it is, to nobody else, and runs nothing on its way."""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest
import zmq.utils.z85
from test_several_hosts import at, start

from syncvar.transports.curve import link_keys
from syncvar_launcher.hosts.agent_connection import remote_command, ssh_command
from syncvar_launcher.options.hostfile import Host

pytestmark = pytest.mark.slow

CANARY = "canary-6f1e0c"
KEEPS = f"""
    import os
    import probe
    import syncvar as sv
    secret = os.pread(int(os.environ["SYNCVAR_KEY_FD"]), 32, 0)
    sv.barrier()
    if sv.rank() == 0:
        with open(os.path.join(probe.FOLDER, "told"), "wb") as file:
            file.write(secret)
    assert os.environ["MY_TOKEN"] == "{CANARY}"
    assert not os.get_inheritable(int(os.environ["SYNCVAR_KEY_FD"]))
    probe.note("met")
    probe.gate("go")
    if sv.rank() == 1:
        raise ValueError("on purpose")
    sv.barrier()
"""


def forms(secret):
    """Return how a secret, and what is derived from it, could be written down."""
    keys = link_keys(secret)
    found = [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        secret[:16],
        zmq.utils.z85.encode(secret),
    ]
    return [
        *found,
        keys.member[1],
        keys.listener[1],
        keys.tickets,
        keys.lanes,
        keys.lanes.hex().encode(),
        keys.tickets.hex().encode(),
        keys.ticket(0, 1),
        keys.ticket(1, 0),
    ]


def test_the_secret_and_what_a_variable_hides_are_nowhere(hosts, tmp_path):
    job = start(
        hosts,
        tmp_path,
        KEEPS,
        at(hosts, 0, 1, 1),
        "--log-dir",
        str(tmp_path / "logs"),
        "--events",
        str(tmp_path / "events"),
        "-v",
        "-x",
        "MY_TOKEN",
        start="spawn",
        env={
            "MY_TOKEN": CANARY,
            "SYNCVAR_TRACE": str(tmp_path / "trace"),
            "SYNCVAR_LOG_LEVEL": "debug",
        },
    )
    job.await_events("met", 2, limit_s=120)
    words = forms((tmp_path / "told").read_bytes())
    processes = [(index, pid) for index in range(3) for pid in hosts.processes(index)]
    assert len(processes) >= 2 + 2 + 2 + 1, "ranks, agents, ssh and the launcher"
    ranks = set(job.pids().values())
    for index, pid in processes:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert CANARY.encode() not in line
        assert not any(word in line for word in words), line
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert not any(word in environ for word in words), line
        if index:
            assert (CANARY.encode() in environ) == (pid in ranks), line
    job.open_gate("go")
    assert job.wait(120) == 1, job
    (tmp_path / "told").unlink()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "script.py"]
    assert {"launcher.err", "events", "flight-rank1.json"} <= {path.name for path in written}
    for path in written:
        data = path.read_bytes()
        assert not any(word in data for word in words), path
        assert CANARY.encode() not in data, path


HOSTILE = [
    "",
    " ",
    "a b",
    "x;echo INJECTED",
    "$(touch CANARY)",
    "`touch CANARY`",
    "|touch CANARY",
    "&& touch CANARY",
    "\ntouch CANARY\n",
    "'; touch CANARY; '",
    '"; touch CANARY; "',
    "${IFS}touch${IFS}CANARY",
    "$HOME",
    "~",
    "*",
    "?",
    "[a-z]",
    "{a,b}",
    "!!",
    "#no comment",
    "\\",
    "\\\\n",
    "\\'",
    "--",
    "-oProxyCommand=touch CANARY",
    "--help",
    "%h",
    "%s%n",
    "{0.__class__}",
    "\t",
    "\r\n",
    "\x1b[31mred",
    "\x07",
    "ä",
    "\u202etxt",
    "\u0430",
    "\U0001f600",
    "\udcff",
    "=",
    "A=B",
    "<CANARY",
    ">CANARY",
    "2>&1",
    "\\$(touch CANARY)",
    "$((1+1))",
    "(touch CANARY)",
    "'",
    '"',
    "''",
    "x" * 5000,
]
ECHO = """
    import sys, os
    import probe
    probe.note("got", argv=sys.argv[1:], values=[os.environ[f"HOSTILE_{number}"] for number in range(int(os.environ["COUNT"]))], cwd=os.getcwd())
"""


def test_what_a_shell_would_run_arrives_as_it_is(hosts, tmp_path):
    folder = tmp_path / "a 'b' $(touch CANARY) \"c\" ;touch CANARY;"
    folder.mkdir()
    canary = str(tmp_path / "canary")
    texts = [text.replace("CANARY", canary) for text in HOSTILE]
    given = [f"-xHOSTILE_{number}={text}" for number, text in enumerate(texts)]
    (tmp_path / "echo.py").write_text(textwrap.dedent(ECHO))
    job = start(
        hosts,
        tmp_path,
        ECHO,
        at(hosts, 0, 1, 1),
        "--cwd",
        str(folder),
        f"-xCOUNT={len(texts)}",
        *given,
        arguments=texts,
    )
    assert job.wait(120) == 0, job
    got = job.events("got")
    assert len(got) == 2
    for event in got:
        assert event["argv"] == texts
        assert event["values"] == texts
        assert event["cwd"] == str(folder)
    assert not os.path.exists(canary)
    assert not list(tmp_path.rglob("CANARY"))


def test_what_runs_on_a_host_is_the_fixed_command(hosts, tmp_path):
    job = start(
        hosts,
        tmp_path,
        """
        import probe
        import syncvar as sv
        probe.note("met")
        probe.gate("go")
    """,
        at(hosts, 0, 1, 1),
        "-xHIDDEN=not-on-a-line",
        arguments=["not-on-a-line"],
    )
    job.await_events("met", 2, limit_s=120)
    lines = [hosts.processes(index)[hosts.agent(index)] for index in (1, 2)]
    ways = [words for words in hosts.processes(0).values() if words.startswith("ssh ")]
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert [f"exec {line}".split() for line in lines] == [
        remote_command(job.line[len(hosts.prefix)]).replace("'", "").split()
    ] * 2
    assert len(ways) == 2
    assert not any("not-on-a-line" in words or "script.py" in words for words in ways)


def test_ssh_takes_our_options_before_those_of_the_user_and_keeps_the_rest(tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "Host *\nForwardAgent yes\nForwardX11 yes\nBatchMode no\nConnectTimeout 999\nLocalForward 7777 localhost:7\n"
        "StrictHostKeyChecking ask\nUserKnownHostsFile /of/the/user\nProxyJump somewhere\n"
    )
    line = ssh_command(("ssh", "-F", str(config), "-A", "-X"), Host("n1"), None, "python3")
    shown = subprocess.run(
        [line[0], "-G", *line[1:-1]], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    told = dict(one.split(" ", 1) for one in shown.splitlines() if " " in one)
    wanted = {
        "batchmode": "yes",
        "forwardagent": "no",
        "forwardx11": "no",
        "clearallforwardings": "yes",
        "connecttimeout": "10",
    }
    assert {name: told[name] for name in wanted} == wanted
    assert told["stricthostkeychecking"] == "ask"
    assert told["userknownhostsfile"] == "/of/the/user"
    assert told["proxyjump"] == "somewhere"
    assert "localforward" not in told
    assert json.dumps(told).count("7777") == 0
