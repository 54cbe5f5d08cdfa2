"""Hosts that join a job without ssh: the same job, refusals told on both sides, and nothing left whoever ends or is killed.

On loopback one machine poses as several hosts. tests/multihost has the same with hosts of their own.
"""

import os
import re
import signal
import socket
import stat
import sys
import textwrap
import time

import pytest

from tests.support.joined_jobs import Joined, agents
from tests.support.launching import await_true, check_bound, state

WORLD = """
    import os
    import numpy as np
    import probe
    import syncvar as sv

    total = sv.all_reduce(np.full(50_000, sv.rank() + 1.0))
    probe.note("met", total=float(total[-1]), index=sv.host_index(), size=sv.world_size(), per_host=sv.local_world_size(),
               restarts=int(os.environ["SYNCVAR_RESTARTS"]))
"""
WAITS = (
    WORLD
    + """
    try:
        if os.environ["SYNCVAR_RESTARTS"] == "0":
            probe.gate("go", 60) if sv.rank() else sv.recv(1)
    except BaseException as error:
        probe.raised(error)
        raise
"""
)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(script=WORLD, hosts=2, *options, **named):
        jobs.append(
            Joined(
                tmp_path,
                script,
                hosts,
                *options,
                env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"},
                **named,
            )
        )
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def gone(pids):
    return await_true(lambda: not any(map(state, pids)), what=f"the end of {pids}")


def test_two_hosts_join_and_all_refusals_are_told_on_both_sides(start, tmp_path):
    job = start(WAITS.replace("sv.recv(1)", 'probe.gate("go", 60)'), workers=3)
    where = job.where
    assert stat.S_IMODE(job.key.stat().st_mode) == 0o600
    (tmp_path / "other").write_text("0" * 64)
    (tmp_path / "other").chmod(0o600)
    (tmp_path / "open").write_text(job.key.read_text())
    (tmp_path / "open").chmod(0o644)
    raw = socket.create_connection((where.partition(":")[0], int(where.partition(":")[2])))
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    first = job.join("--slots", "2")
    other, readable = job.join(key=tmp_path / "other"), job.join(key=tmp_path / "open")
    assert other.wait(120) == 77, job
    assert f"does not accept the key of {tmp_path}/other" in other.words()
    assert readable.wait(120) == 78, job
    assert (
        f"--key-file {tmp_path}/open must be a file of yours that nobody else can read: chmod 600"
        in readable.words()
    )
    said = await_true(
        lambda: re.search(
            r"who came from (\S+) was refused: it has another key than that of --key-file", job.err
        ),
        what="the word of it",
    )
    assert said[1] in ("127.0.0.1", "somewhere")  # which ZeroMQ may have closed before it was asked
    second = job.join("--slots", "1")
    job.await_events("met", 3)
    third = job.join("--slots", "1")
    assert third.wait(120) == 69, job
    assert "refused by the launcher at" in third.words()
    assert "all 2 hosts that the job waits for have joined" in third.words()
    job.open_gate("go")
    assert job.wait() == 0, job
    raw.close()
    assert [first.wait(120), second.wait(120)] == [0, 0], job
    assert "was refused: all 2 hosts that the job waits for have joined" in job.err
    met = job.events("met")
    assert sorted((event["rank"], event["per_host"]) for event in met) == [(0, 2), (1, 2), (2, 1)]
    assert {event["total"] for event in met} == {6.0}


def test_a_host_that_joins_twice_is_refused(start):
    job = start(WORLD, 2, "--fake-hosts", "1", "--start-timeout", "60")
    one = job.join("--slots", "3")
    await_true(lambda: "has joined with 3 slots" in job.err, what="the first host")
    two = job.join()
    assert two.wait(120) == 69, job
    assert "this machine has joined already, as" in two.words()
    await_true(
        lambda: "was refused: this machine has joined already, as" in job.err, what="the word of it"
    )
    job.send(signal.SIGINT)
    assert job.wait() == 130, job
    assert one.wait(120) == 70, job


@pytest.mark.slow
def test_who_has_joined_is_told_where_too_few_have_in_time(start):
    job = start(WORLD, 2, "--start-timeout", "4")
    one = job.join("--slots", "3")
    assert job.wait() == 69, job
    assert one.wait(120) == 69, job
    assert (
        "2 hosts did not join within 4 s; nothing was started. Each runs: syncvar-launch --join 127.0.0.1:"
        in job.err
    )
    assert re.search(r"\n  \S+ \(127\.0\.0\.1\): has joined, with 3 slots\n", job.err), job


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    [
        "launcher",
        "joiner",
        "agent",
        "interrupt joiner",
        "terminate joiner",
        "interrupt launcher",
        "interrupt launcher twice",
    ],
)
def test_whoever_ends_nothing_is_left(start, victim):
    job = start(WAITS)
    first, second = job.join("--slots", "1"), job.join("--slots", "1")
    job.await_events("met", 2)
    workers = list(job.pids().values())
    there = [*agents(first), *agents(second)]
    assert len(there) == 2, job
    began = time.monotonic()
    if victim == "launcher":
        job.process.kill()
    elif victim == "joiner":
        first.kill()
    elif victim == "agent":
        os.kill(there[0], signal.SIGKILL)
    elif victim == "interrupt joiner":
        first.send_signal(signal.SIGINT)
    elif victim == "terminate joiner":
        first.send_signal(signal.SIGTERM)
    else:
        job.send(signal.SIGINT)
        if victim.endswith("twice"):
            job.send(signal.SIGINT)
    gone([*workers, *there])
    check_bound(f"{victim}: all ended", time.monotonic() - began, 3.0)
    code, codes = job.wait(), job.codes()
    if victim == "launcher":
        assert codes == [70, 70], job
        assert "the connection to the launcher is lost; its workers here are ended" in first.words()
    elif "launcher" in victim:
        assert (code, codes) == (130, [130, 130]), job
    else:
        expected = {"joiner": -9, "interrupt joiner": 130, "terminate joiner": 143}.get(victim, 70)
        assert (code, codes) == ((143 if victim.startswith("term") else 70), [expected, code]), job
        why = {
            "joiner": "its connection ended with 255 (the connection to it is lost)",
            "agent": "its connection ended with -9",
            "interrupt joiner": "it was ended there by SIGINT",
            "terminate joiner": "exited with status 143",
        }[victim]
        assert why in job.err, job
        assert {event["error"] for event in job.events("raised")} <= {
            "PeerLost",
            "SystemExit",
        }  # the latter of who was told to end


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "joiner"])
def test_a_host_serves_the_next_start_after_its_agent_was_lost_and_joins_again_after_it_was(
    start, victim
):
    job = start(WAITS, 2, "--max-restarts", "1")
    first, second = job.join("--slots", "1"), job.join("--slots", "1")
    job.await_events("met", 2)
    if victim == "agent":
        os.kill(agents(first)[0], signal.SIGKILL)
    else:
        first.kill()
        demand = r"is to join again, within \d+ s; run there: syncvar-launch --join"
        await_true(lambda: re.search(demand, job.err), what="the demand")
        job.join("--slots", "1")
    assert job.wait() == 0, job
    assert job.codes() == ([0, 0] if victim == "agent" else [-9, 0, 0]), job
    assert [event["restarts"] for event in job.events("met")].count(1) == 2
    assert second.poll() == 0


@pytest.mark.slow
def test_hosts_wait_for_a_launcher_that_begins_later_and_give_up_in_time(start, tmp_path):
    job = start(WORLD)
    assert job.where
    late = job.join("--start-timeout", "1", where="127.0.0.1:9")
    assert late.wait(120) == 69, job
    assert "no syncvar-launch --listen answers at 127.0.0.1:9 since 1 s" in late.words()


@pytest.mark.slow
def test_slots_say_when_there_are_enough_hosts(start):
    job = start(WORLD, None, workers=5)
    for slots in ("2", "1", "2"):
        job.join("--slots", slots)
    assert job.wait() == 0, job
    assert job.codes() == [0, 0, 0], job
    assert sorted(event["rank"] for event in job.events("met")) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_another_version_of_syncvar_is_refused_on_both_sides(start, tmp_path):
    program = tmp_path / "older.py"
    program.write_text(
        textwrap.dedent("""
        import sys
        import syncvar
        syncvar.__version__ = "0.0.9"
        from syncvar_launcher.main import main
        sys.exit(main())
    """)
    )
    job = start(WORLD)
    older = job.join(program=(sys.executable, str(program)))
    assert older.wait(120) == 69, job
    assert "it has syncvar 0.0.9" in older.words()
    assert "was refused: it has syncvar 0.0.9" in job.err
    job.join("--slots", "1")
    job.join("--slots", "1")
    assert job.wait() == 0, job


@pytest.mark.slow
def test_much_output_of_hosts_that_joined_arrives_whole_and_input_goes_there(start):
    script = """
        import sys
        import syncvar as sv
        if sv.rank() == 0:
            print("read", len(sys.stdin.buffer.read()), flush=True)
        else:
            for _ in range(30_000):
                sys.stdout.write("x" * 999 + "\\n")
            sys.stdout.flush()
        sv.barrier()
    """
    job = start(script, 2, stdin=b"y" * 3_000_000)
    job.join("--slots", "1")
    job.join("--slots", "1")
    assert job.wait(120) == 0, job.err
    assert job.lines(0) == ["read 3000000"]
    assert job.lines(1) == ["x" * 999] * 30_000
