"""Jobs on real hosts that have joined, without any sshd: they listen where they should, strangers are refused, and cuts are noticed."""

import signal
import subprocess
import sys

import pytest

from tests.support.joined_jobs import Joined
from tests.support.launching import await_true

WORLD = """
    import os
    import numpy as np
    import probe
    import syncvar as sv

    total = sv.all_reduce(np.full(50_000, sv.rank() + 1.0))
    probe.note("met", total=float(total[-1]), host=os.environ["SYNCVAR_HOST"], index=sv.host_index(), size=sv.world_size())
    probe.gate("go", 60)
"""


@pytest.fixture
def start(hosts, tmp_path):
    jobs = []

    def begin(slots, *options, script=WORLD, **named):
        job = Joined(
            tmp_path,
            script,
            sum(count > 0 for count in slots),
            *options,
            address=hosts.names[0],
            prefix=hosts.prefix,
            workers=sum(slots),
            env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"},
            **named,
        )
        jobs.append(job)
        for index, count in enumerate(slots):
            if count:
                job.join("--slots", str(count), prefix=at(hosts, index))
        return job

    yield begin
    for job in jobs:
        job.close()


def at(hosts, index):
    """Return what starts a program on a host."""
    return ["ip", "netns", "exec", hosts.spaces[index]]


@pytest.mark.parametrize(
    "slots",
    [
        (0, 2, 1),
        pytest.param((1, 1, 1), marks=pytest.mark.slow),
        pytest.param((2, 3, 0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hosts_that_joined_meet_and_listen_at_their_own_address_only(hosts, start, slots):
    job = start(slots)
    met = job.await_events("met", sum(slots), limit_s=120)
    listening = [set(hosts.listening(index)) for index in range(3)]
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert job.codes() == [0] * len(job.joiners), job
    size = sum(slots)
    assert {event["total"] for event in met} == {size * (size + 1) / 2}
    used = [(name, count) for name, count in zip(hosts.names, slots, strict=True) if count]
    expected = [(name, index) for index, (name, count) in enumerate(used) for _ in range(count)]
    assert [
        (event["host"], event["index"]) for event in sorted(met, key=lambda one: one["rank"])
    ] == expected
    for index, count in enumerate(slots):
        assert listening[index] == ({hosts.names[index]} if count or not index else set()), (
            listening
        )


@pytest.mark.slow
def test_strangers_at_the_port_disturb_nobody(hosts, start, tmp_path):
    program = tmp_path / "intruders.py"
    program.write_text("""
import os, socket, sys
import zmq
host, port = sys.argv[1].rsplit(":", 1)
held = []
for data in [b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n", b"\\x16\\x03\\x01" + bytes(200), os.urandom(5000), b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00", b""] * 40:
    one = socket.create_connection((host, int(port)))
    try:
        one.sendall(data)
    except OSError:
        pass
    held.append(one)
context = zmq.Context()
public, secret = zmq.curve_keypair()
for keys in [None, (zmq.curve_keypair()[0], public, secret)]:
    one = context.socket(zmq.DEALER)
    one.linger = 0
    if keys:
        one.curve_serverkey, one.curve_publickey, one.curve_secretkey = keys
    one.connect(f"tcp://{host}:{port}")
    one.send(b"hello")
    assert not one.poll(1500)
    one.close()
context.term()
print("done", flush=True)
sys.stdin.read()
""")
    job = start((0, 1, 0), script=WORLD)
    await_true(lambda: "has joined with 1 slot" in job.err, what="the first host")
    with subprocess.Popen(
        [*at(hosts, 2), sys.executable, str(program), job.where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as strangers:
        try:
            assert strangers.stdout.readline() == b"done\n"
        finally:
            strangers.stdin.close()
    job.open_gate("go")
    assert job.wait(120) == 0, job
    assert {event["total"] for event in job.events("met")} == {1.0}


@pytest.mark.slow
def test_a_cut_between_the_launcher_and_a_host_ends_both_sides(hosts, start):
    job = start((0, 1, 1))
    job.await_events("met", 2, limit_s=120)
    hosts.set_link(2, "down")
    try:
        assert job.wait(120) == 70, job
        assert job.joiners[1].wait(60) == 70, job  # on its own: nothing reaches it
    finally:
        hosts.set_link(2, "up")
    assert job.joiners[0].wait(20) == 70, job
    assert f"its host {hosts.names[2]} is gone: nothing has come from it for" in job.err
    assert not hosts.await_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "joiner"])
def test_whoever_is_killed_nothing_is_left_on_any_host(hosts, start, victim):
    for _ in range(3):
        job = start((0, 1, 2))
        job.await_events("met", 3, limit_s=120)
        (job.process if victim == "launcher" else job.joiners[1]).send_signal(signal.SIGKILL)
        assert job.wait(120) in (-9, 70), job
        assert not hosts.await_quiet()
        job.close()
        for path in job.folder.glob("events-*"):
            path.unlink()


GROWS = """
    import os
    import probe
    import syncvar as sv

    state = sv.elastic.State(step=0)

    @sv.elastic.run
    def train(state):
        while sv.world_size() < 3:
            state.step += 1
            state.commit()
        probe.note("complete", step=state.step)

    train(state)
"""


@pytest.mark.slow
def test_hosts_that_come_while_an_elastic_job_begins_are_not_refused(hosts, tmp_path):
    job = Joined(tmp_path, GROWS, None, workers="1:3", address=hosts.names[0], prefix=hosts.prefix)
    try:
        for index in range(3):  # the first one is enough to begin
            job.join("--slots", "1", prefix=at(hosts, index))
        assert job.wait(120) == 0, job
        assert job.codes() == [0] * 3, job
        assert len(job.events("complete")) == 3, job
    finally:
        job.close()
