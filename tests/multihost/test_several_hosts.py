"""Jobs on several real hosts: started by ssh, refused with reasons, ended whatever happens, and nothing is left anywhere."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from syncvar_launcher.hosts.agent_protocol import pack
from tests.integration.launch.test_suspended_job import SCRIPT, Terminal, stopped
from tests.support.launching import Job, await_true

WORLD = """
    import os
    import numpy as np
    import probe
    import syncvar as sv

    total = sv.all_reduce(np.full(50_000, sv.rank() + 1.0))
    probe.note("met", total=float(total[-1]), host=os.environ["SYNCVAR_HOST"], index=sv.host_index(), local=sv.local_rank(),
               size=sv.world_size(), per_host=sv.local_world_size(), secret="SYNCVAR_KEY" in os.environ,
               program=os.environ["SYNCVAR_PROGRAM"])
"""
WAITS = """
    import time
    import probe
    import syncvar as sv

    sv.barrier()
    probe.note("met")
    try:
        sv.recv((sv.rank() + 1) % sv.world_size())
    except BaseException as error:
        probe.raised(error)
        raise
"""


def start(hosts, folder, script, where, *options, **named):
    return Job(
        folder,
        script,
        workers=named.pop("workers", 0)
        or sum(int(one.rpartition(":")[2]) for one in where.split(",")),
        prefix=(*named.pop("prefix", ()), *hosts.prefix),
        options=(*hosts.ssh, "-H", where, *options),
        **named,
    )


def at(hosts, *slots):
    """Return the value of -H for so many slots on each host; 0 leaves it out."""
    return ",".join(
        f"{name}:{count}" for name, count in zip(hosts.names, slots, strict=False) if count
    )


@pytest.mark.slow
def test_programs_share_the_hosts_in_the_order_of_their_ranks(hosts, tmp_path):
    """On the second host all ranks run the second program, which is then the only one there."""
    second = tmp_path / "second" / "second.py"
    second.parent.mkdir()
    second.write_text(
        textwrap.dedent(WORLD).replace(
            "import probe", "import sys; sys.path.append('..'); import probe"
        )
    )
    where, more = at(hosts, 0, 2, 2), [":", "-n", "2", "-x", "PYTHONUTF8=1", str(second)]
    job = start(
        hosts,
        tmp_path,
        WORLD,
        where,
        "--cwd",
        str(second.parent),
        workers=2,
        arguments=more,
        start="auto",
    )
    assert job.wait(120) == 0, job
    met = {event["rank"]: event for event in job.events("met")}
    assert [met[rank]["index"] for rank in range(4)] == [0, 0, 1, 1]
    assert [met[rank]["program"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert {(one["total"], one["size"]) for one in met.values()} == {(10.0, 4)}


@pytest.mark.parametrize(
    ("slots", "method"),
    [
        ((0, 2, 1), "spawn"),
        ((1, 0, 3), "auto"),
        pytest.param((1, 1, 1), "fork", marks=pytest.mark.slow),
        pytest.param((0, 3, 0), "spawn", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_of_several_hosts_meet(hosts, tmp_path, slots, method):
    job = start(hosts, tmp_path, WORLD, at(hosts, *slots), start=method)
    assert job.wait(120) == 0, job
    met = {event["rank"]: event for event in job.events("met")}
    size = sum(slots)
    used = [(name, count) for name, count in zip(hosts.names, slots, strict=True) if count]
    expected = [
        (name, index, local, count)
        for index, (name, count) in enumerate(used)
        for local in range(count)
    ]
    assert [
        (met[rank]["host"], met[rank]["index"], met[rank]["local"], met[rank]["per_host"])
        for rank in range(size)
    ] == expected
    assert {event["total"] for event in met.values()} == {size * (size + 1) / 2}
    assert not any(event["secret"] for event in met.values())


@pytest.mark.slow
def test_links_listen_at_one_address_of_each_host(hosts, tmp_path):
    script = """
        import probe
        import syncvar as sv
        sv.barrier()
        probe.note("met")
        probe.gate("go")
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 2, 1))
    job.await_events("met", 3, limit_s=120)
    listening = [hosts.listening(index) for index in range(3)]
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert listening[0] == [hosts.names[0]]  # where the ranks meet
    assert set(listening[1]) == {hosts.names[1]}
    assert set(listening[2]) == {hosts.names[2]}


def test_all_hosts_that_cannot_be_used_are_told_at_once_and_nothing_is_started(hosts, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    lines = [
        f"{hosts.names[1]} slots=1",
        "10.77.0.99 slots=1",
        f"nobody@{hosts.names[2]} slots=1",
        "no-such-host.invalid slots=1",
    ]
    (tmp_path / "list").write_text("\n".join(lines))
    job = Job(
        tmp_path,
        WORLD,
        workers=2,
        prefix=hosts.prefix,
        options=(*hosts.ssh, "--hostfile", str(tmp_path / "list")),
    )
    assert job.wait(120) == 69, job
    assert "3 hosts cannot be used; nothing was started:" in job.err
    assert f"  10.77.0.99 ({tmp_path}/list:2): it cannot be reached" in job.err
    assert (
        f"  {hosts.names[2]} ({tmp_path}/list:3): the login is refused; `ssh nobody@{hosts.names[2]} true` must work"
        in job.err
    )
    assert f"  no-such-host.invalid ({tmp_path}/list:4): its name is unknown" in job.err
    assert not job.events("began")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--remote-python", "/no/python"), "there is no /no/python there; give python=PATH"),
        pytest.param(
            ("--remote-python", "/usr/bin/python3"),
            "syncvar is not installed for /usr/bin/python3 there; install syncvar",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--workers", "9"),
            "9 workers have no place: the hosts have 2 slots",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--cores-per-worker", "999"),
            "1 worker with 999 cores each need 999 cores, but this host lets us use",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--iface", "wlan7"),
            "is not reached by all others: it has no address",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--ssh", "/no/ssh"), "/no/ssh cannot be started", marks=pytest.mark.slow),
        pytest.param(
            ("--ssh-port", "2222"), "nobody listens for ssh there", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_its_remedy(hosts, tmp_path, options, words):
    job = start(hosts, tmp_path, WORLD, at(hosts, 0, 1, 1), *options, workers=2)
    assert job.wait(120) in (69, 78), job
    assert words in job.err, job
    assert not job.events("began")


@pytest.mark.slow
def test_a_program_that_cannot_be_started_there_is_told(hosts, tmp_path):
    job = Job(
        tmp_path,
        workers=3,
        prefix=hosts.prefix,
        options=(*hosts.ssh, "-H", at(hosts, 0, 2, 1)),
        target=["--no-python", "/no/such/program"],
    )
    assert job.wait(120) == 78, job
    assert (
        "it cannot be started: a worker cannot be started: /no/such/program: No such file or directory"
        in job.err
    )


@pytest.mark.slow
def test_an_unknown_host_key_is_refused_and_explained(hosts, tmp_path):
    known = hosts.known.read_text()
    hosts.known.write_text(
        "".join(
            line for line in known.splitlines(keepends=True) if not line.startswith(hosts.names[2])
        )
    )
    try:
        job = start(hosts, tmp_path, WORLD, at(hosts, 0, 1, 1))
        assert job.wait(120) == 69, job
        assert (
            f"{hosts.names[2]} (-H): its host key is not known, or has changed; compare" in job.err
        )
    finally:
        hosts.known.write_text(known)


def test_a_rank_that_fails_on_another_host_is_told_with_its_host_and_traceback(hosts, tmp_path):
    script = """
        import probe
        import syncvar as sv
        if sv.rank() == 2:
            sv.barrier()
            raise ValueError("of rank 2")
        try:
            sv.barrier()
            sv.recv(2)
        except BaseException as error:
            probe.raised(error)
            raise
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 2, 1), "--log-dir", str(tmp_path / "logs"))
    assert job.wait(120) == 1, job
    assert f"rank 2 on {hosts.names[2]}" in job.err
    assert "ValueError: of rank 2" in job.err
    assert {event["error"] for event in job.events("raised")} == {"PeerLost"}
    assert sorted(path.name for path in (tmp_path / "logs").glob("flight-rank*.json")) == [
        f"flight-rank{rank}.json" for rank in range(3)
    ]


def test_ctrl_c_ends_all_hosts(hosts, tmp_path):
    job = start(hosts, tmp_path, WAITS, at(hosts, 0, 2, 1))
    job.await_events("met", 3, limit_s=120)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(120) == 130, job
    assert "interrupted by SIGINT" in job.err


@pytest.mark.parametrize(
    "victim",
    [
        "agent",
        pytest.param("ssh", marks=pytest.mark.slow),
        pytest.param("launcher", marks=pytest.mark.slow),
    ],
)
def test_whoever_is_killed_nothing_is_left_on_any_host(hosts, tmp_path, victim):
    job = start(hosts, tmp_path, WAITS, at(hosts, 0, 1, 2))
    job.await_events("met", 3, limit_s=120)
    if victim == "agent":
        os.kill(hosts.agent(2), signal.SIGKILL)
    elif victim == "ssh":
        ways = [
            pid
            for pid, words in hosts.processes(0).items()
            if words.startswith("ssh ") and hosts.names[2] in words
        ]
        assert len(ways) == 1, hosts.processes(0)
        os.kill(ways[0], signal.SIGKILL)
    else:
        job.process.kill()
    code = job.wait(120)
    if victim != "launcher":
        assert code == 70, job
        assert f"its host {hosts.names[2]} is gone: its agent has ended" in job.err
        assert "was lost" in job.events("raised", 0)[0]["text"]
    assert not hosts.await_quiet()


@pytest.mark.slow
def test_a_host_that_was_lost_is_logged_in_to_again_for_a_restart(hosts, tmp_path):
    script = """
        import os
        import probe
        import syncvar as sv
        sv.barrier()
        probe.note("met", restarts=int(os.environ["SYNCVAR_RESTARTS"]))
        if os.environ["SYNCVAR_RESTARTS"] == "0":
            sv.recv((sv.rank() + 1) % sv.world_size())
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 1, 2), "--max-restarts", "1")
    job.await_events("met", 3, limit_s=120)
    os.kill(hosts.agent(2), signal.SIGKILL)
    assert job.wait(120) == 0, job
    assert [event["restarts"] for event in job.events("met")].count(1) == 3


def test_input_and_output_pass_through(hosts, tmp_path):
    script = """
        import sys
        import syncvar as sv
        if sv.rank() == 0:
            print("read", len(sys.stdin.buffer.read()), flush=True)
        if sv.rank() == 1:
            for _ in range(2000):
                sys.stdout.write("x" * 999 + "\\n")
            sys.stdout.flush()
        sv.barrier()
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 1, 1), stdin=b"y" * 3_000_000)
    assert job.wait(120) == 0, job
    assert job.lines(0) == ["read 3000000"]
    assert job.lines(1) == ["x" * 999] * 2000


@pytest.mark.slow
def test_a_link_that_is_down_for_a_moment_costs_nothing(hosts, tmp_path):
    script = """
        import numpy as np
        import probe
        import syncvar as sv
        sv.barrier()
        probe.note("met")
        probe.gate("go")
        assert sv.all_reduce(np.ones(10))[0] == 2
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 1, 1))
    job.await_events("met", 2, limit_s=120)
    hosts.set_link(2, "down")
    job.open_gate("go")
    await_true(lambda: job.process.poll() is None, what="the job to go on")
    hosts.set_link(2, "up")
    assert job.wait(120) == 0, job


def test_a_running_job_says_where_its_ranks_stand_on_all_hosts(hosts, tmp_path):
    script = """
        import probe
        import syncvar as sv

        def stands_here():
            probe.note("met")
            probe.gate("go")

        sv.barrier()
        stands_here()
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 2, 1))
    job.await_events("met", 3, limit_s=120)
    asked = subprocess.run(
        [sys.executable, "-m", "syncvar", "stacks", str(job.process.pid)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert asked.returncode == 0, asked
    assert "stands_here" in asked.stdout
    assert "ranks 0-2" in asked.stdout, asked.stdout


def test_why_a_rank_shows_no_stack_is_told_of_other_hosts_too(tmp_path):
    script = """
        import probe
        probe.note("begun")
        probe.gate("go")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    target = ["--no-python", sys.executable, str(tmp_path / "train.py")]
    job = Job(tmp_path, workers=2, options=("-H", "localhost:2"), target=target)
    job.await_events("begun", 2)
    asked = subprocess.run(
        [sys.executable, "-m", "syncvar", "stacks", str(job.process.pid)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert (
        "ranks 0, 1: not joined yet; it is no Python program of ours (--no-python)" in asked.stdout
    ), asked


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            b"syncvar-agent 5\n\xff\xff\xff\xff",
            "its agent is not understood: a message of 4294967295 bytes is above",
        ),
        (
            b"syncvar-agent 5\n" + pack("facts", facts={"host": "n"}),
            "its agent is not understood: its facts about its host have other fields",
        ),
        (
            b"syncvar-agent 1\n",
            (
                "its agent is not understood: it speaks version 1 of the agent protocol, and the "
                "launcher speaks version 5; install the same syncvar on all"
            ),
        ),
    ],
    ids=["no messages", "other facts", "another version"],
)
def test_an_agent_that_is_not_understood_is_told_as_such(tmp_path, words, told):
    (tmp_path / "words").write_bytes(words)
    speaks = tmp_path / "speaks"
    speaks.write_text(f"#!/bin/sh\ncat {tmp_path}/words\nexec sleep 300\n")
    speaks.chmod(0o755)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "syncvar_launcher",
            "--ssh",
            str(speaks),
            "-H",
            "one:1,two:1",
            "-m",
            "nothing",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 69, done
    assert f"  one (-H): {told}" in done.stderr
    assert done.stderr.count("; install the same syncvar on all") == 2


@pytest.mark.parametrize(
    ("limit", "code", "words"),
    [
        ((), 69, "2 hosts cannot be used"),
        (("--timeout", "0.5"), 124, "the time limit of 0.5 s passed; 2 hosts cannot be used"),
    ],
)
def test_a_host_that_logs_in_and_says_nothing_is_given_up(hosts, tmp_path, limit, code, words):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 300\n")
    silent.chmod(0o755)
    script = f"""
        import sys
        from syncvar_launcher.hosts import multi_host
        multi_host._LOGIN_S = {30.0 if limit else 1.0}
        from syncvar_launcher.main import main
        sys.exit(main(["--ssh", {str(silent)!r}, "-H", "one:1,two:1", *{limit!r}, "-m", "nothing"]))
    """
    (tmp_path / "start.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, tmp_path / "start.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done
    assert f"syncvar-launch: {words}; nothing was started:" in done.stderr
    assert done.stderr.count("it does not answer in time") == 2


def test_ranks_of_other_hosts_are_what_they_are_on_one(hosts, tmp_path):
    script = """
        import os
        import signal
        import probe
        import syncvar as sv
        mask = os.umask(0)
        probe.note("is", mask=mask, int=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                   hup=signal.getsignal(signal.SIGHUP) is signal.SIG_DFL, token="API_TOKEN" in os.environ, chosen=os.environ.get("CHOSEN"))
        sv.barrier()
    """
    before = os.umask(0o022)
    try:
        job = start(
            hosts,
            tmp_path,
            script,
            at(hosts, 1, 1),
            "--env-clear",
            "-x",
            "CHOSEN=1",
            start="spawn",
            env={"API_TOKEN": "secret"},
        )
        assert job.wait(120) == 0, job
    finally:
        os.umask(before)
    for event in job.events("is"):
        assert (event["int"], event["hup"], event["token"], event["chosen"]) == (
            True,
            True,
            False,
            "1",
        ), event
    assert job.events("is", 0)[0]["mask"] == 0o022


@pytest.mark.slow
def test_a_job_that_was_stopped_longer_than_silence_may_last_goes_on(hosts, tmp_path):
    terminal = Terminal(tmp_path)
    try:
        job = Job(
            tmp_path,
            SCRIPT,
            workers=2,
            arguments=["computing"],
            prefix=(*terminal.prefix(), shutil.which("ip"), *hosts.prefix[1:]),
            options=(*hosts.ssh, "-H", at(hosts, 0, 1, 1)),
            env={"SYNCVAR_LOST_AFTER_S": "4"},
        )
        stopped(job, terminal)
        time.sleep(5.0)  # lost_after_s is 4
        (tmp_path / "fg").touch()
        job.open_gate("go")
        assert job.wait(120) == 0, job
    finally:
        os.close(terminal.end)


@pytest.mark.slow
def test_input_goes_on_while_its_reader_pauses(hosts, tmp_path):
    script = """
        import sys
        import time
        import syncvar as sv
        if sv.rank() == 0:
            count = 0
            while data := sys.stdin.buffer.raw.read(65536):
                count += len(data)
                time.sleep(0.004)
            print("read", count, flush=True)
        sv.barrier()
    """
    job = start(hosts, tmp_path, script, at(hosts, 0, 1, 1), stdin=b"y" * 8_000_000)
    assert job.wait(120) == 0, job
    assert job.lines(0) == ["read 8000000"]
