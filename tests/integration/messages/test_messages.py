"""Messages over real processes: both runners and links, cycles where nobody can move, a rank that is killed in the middle."""

import pytest

from tests.support.sanitizers import loaded, sanitized

SENDING = """
import numpy as np
import probe, syncvar as sv

error = probe.failure(sv.send, np.zeros(100_000), (sv.rank() + 1) % sv.world_size())
assert isinstance(error, sv.MismatchError), error
assert int(sv.all_reduce(1)) == sv.world_size()
"""
RECEIVING = """
import probe, syncvar as sv

error = probe.failure(sv.recv, (sv.rank() + 1) % sv.world_size())
assert isinstance(error, sv.MismatchError), error
assert int(sv.all_reduce(1)) == sv.world_size()
"""


@pytest.mark.parametrize(
    ("script", "workers"), [(SENDING, 3), (RECEIVING, 2)], ids=["sending", "receiving"]
)
def test_a_cycle_gets_a_verdict_and_the_world_goes_on(launch, script, workers):
    job = launch(script, workers=workers)
    assert job.wait() == 0, str(job)
    for event in job.events("raised"):
        assert "deadlock" in event["text"]
        assert len(event["table"]) == workers


TALKING = """
import hashlib, random, sys
import numpy as np
import probe, syncvar as sv
from syncvar.collectives import send_recv as point_to_point

steps, asked, digest = int(sys.argv[1]), [0], hashlib.sha256()
for name in ("_send", "_receive"):
    def counted(*arguments, through=getattr(point_to_point, name), **keywords):
        asked[0] += 1
        return through(*arguments, **keywords)

    setattr(point_to_point, name, counted)
rank, chance = sv.rank(), random.Random(5)
outs = {}
for step in range(steps):
    source = chance.randrange(2)
    dtype = chance.choice(["float64", "int16", "bool"])
    shape = chance.choice([(), (1,), (3, 4), (500,), (5000,), (2, 8192), (50_001,), (500_000,)][: 7 + (step % 8 == 0)])
    tag, has_out, values = chance.randrange(3), chance.random() < 0.5, np.random.default_rng(step)
    x = values.integers(0, 2, shape).astype(dtype)
    if rank == source:
        sv.send(x, 1 - rank, tag=tag)
        continue
    out = outs.setdefault((dtype, shape), np.empty(shape, dtype)) if has_out else None
    got = sv.recv(source, tag=tag, out=out)
    assert out is None or got is out
    assert got.dtype == x.dtype and got.shape == x.shape and got.tobytes() == x.tobytes(), (step, got, x)
    digest.update(got.tobytes())
probe.note("talked", asked=asked[0], digest=digest.hexdigest())
"""


@pytest.mark.needs_c_extension
@pytest.mark.parametrize(
    ("steps", "transports"),
    [(600, ["auto"]), pytest.param(6000, ["auto", "zmq"], marks=pytest.mark.nightly)],
)
def test_both_runners_and_links_bring_the_same_messages(launch, steps, transports):
    seen = {}
    for transport in transports:
        for runner in ("c", "python"):
            job = launch(
                TALKING,
                arguments=[str(steps)],
                env={"SYNCVAR_CALL_RUNNER": runner, "SYNCVAR_TRANSPORT": transport},
            )
            assert job.wait(120) == 0, str(job)
            seen[transport, runner] = job.events("talked")
    assert (
        len({tuple(sorted(event["digest"] for event in events)) for events in seen.values()}) == 1
    ), seen
    assert all(event["asked"] < steps * 0.9 for event in seen["auto", "c"]), seen
    assert all(
        event["asked"] == steps
        for way, events in seen.items()
        if way != ("auto", "c")
        for event in events
    ), seen


@pytest.mark.needs_c_extension
@pytest.mark.nightly
def test_no_byte_outside_a_message_is_touched(launch, tmp_path):
    variables = sanitized("native", tmp_path)
    job = launch(
        TALKING,
        arguments=["3000"],
        options=[
            "--start-method",
            "spawn",
            *(f"--env={name}={value}" for name, value in variables.items()),
        ],
        env={"SYNCVAR_CALL_RUNNER": "c"},
    )
    assert job.wait(200) == 0, str(job)
    assert all(event["asked"] < 2700 for event in job.events("talked")), str(job)
    assert loaded(tmp_path) >= 2


LATE = """
import numpy as np
import probe, syncvar as sv
from syncvar.runtime.p2p_channel import P2PChannel

handed = []
def go_on(*arguments, through=P2PChannel.continue_in_engine):
    handed.append(arguments[4])
    probe.open_gate(f"handed-{turn}-{rank}")
    return through(*arguments)

P2PChannel.continue_in_engine = go_on
rank = sv.rank()
for turn in range(12):
    x = np.full(300_000, turn + 0.5)
    if rank == turn % 2:
        sv.send(x, 1 - rank)
    else:
        if turn > 5:
            probe.gate(f"handed-{turn}-{1 - rank}")  # it comes late
        assert (sv.recv(1 - rank) == x).all(), turn
probe.note("ended", handed=len(handed))
"""


@pytest.mark.needs_c_extension
def test_a_long_message_whose_receiver_comes_late_is_gone_on_with_by_the_engine(launch):
    job = launch(LATE, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait() == 0, str(job)
    assert all(event["handed"] >= 3 for event in job.events("ended")), str(job)


KILLED = """
import os, signal, sys
import numpy as np
import probe, syncvar as sv

what, other, x = sys.argv[1], 1 - sv.rank(), np.ones(1_000_000)
if sv.rank() == 1:
    for _ in range(20):
        sv.recv(0)
    sv.send(np.ones(3), 0)
    if what == "told":
        work = sv.send(x, 0, async_op=True)  # nobody answers any more
        sv.recv(0)
    os.kill(os.getpid(), signal.SIGKILL)


def until_it_fails():
    while True:
        if what == "sending":
            sv.send(x, 1)
        elif what == "any source":
            sv.recv_any(tag=None)
        else:
            sv.recv(1)


for _ in range(20):
    sv.send(x, 1)
if what == "told":
    sv.recv(1)
    sv.send(1.0, 1)
error = probe.failure(until_it_fails)
assert isinstance(error, sv.PeerLost), error
raise error
"""


@pytest.mark.parametrize(
    "what",
    [
        "sending",
        *(
            pytest.param(what, marks=pytest.mark.slow)
            for what in ("any source", "receiving", "told")
        ),
    ],
)
def test_a_rank_that_is_killed_between_messages_is_named(launch, what):
    job = launch(
        KILLED,
        arguments=[what],
        env={"SYNCVAR_SINGLE_COPY": "off" if what == "sending" else "auto"},
    )
    assert job.wait(120) != 0, str(job)
    assert [event["rank"] for event in job.events("raised")] == [0], str(job)
    assert "rank 1" in job.events("raised")[0]["text"], str(job)
