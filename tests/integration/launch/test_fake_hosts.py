"""One machine poses as several hosts: segments of their own, encrypted tcp between them."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.intruder_attacks import LASTING, SUMS, besiege
from tests.support.launching import check_bound, last_exception
from tests.support.rank_scripts.intruders import KINDS

ABOUT = """
import os
import numpy as np
import syncvar as sv
from probe import note
from syncvar.bootstrap.process import current
sv.init()
total = sv.all_reduce(np.arange(1000.0) * (sv.rank() + 1))
note("me", local=[sv.local_rank(), sv.local_world_size()], host=[sv.host_index(), sv.host_count()],
     total=float(total[1]), transport=current().transport, inheritable=os.get_inheritable(int(os.environ["SYNCVAR_KEY_FD"])))
"""


@pytest.mark.parametrize(("workers", "hosts", "sizes"), [(5, 2, (3, 2)), (2, 2, (1, 1))])
def test_workers_are_divided_over_fake_hosts(launch, workers, hosts, sizes):
    job = launch(ABOUT, workers=workers, options=["--fake-hosts", str(hosts)])
    assert job.wait() == 0, str(job)
    seen = {event["rank"]: event for event in job.events("me")}
    expected = [(local, size, host) for host, size in enumerate(sizes) for local in range(size)]
    for rank, (local, size, host) in enumerate(expected):
        event = seen[rank]
        assert event["local"] == [local, size]
        assert event["host"] == [host, hosts]
        assert event["total"] == workers * (workers + 1) / 2
        assert f"tcp between {hosts} hosts" in event["transport"]
        assert ("shared memory" in event["transport"]) == (size > 1)
        assert not event["inheritable"], "programs that a rank starts must not have the secret"


def test_more_hosts_than_workers_are_refused(launch):
    job = launch(ABOUT, workers=2, options=["--fake-hosts", "3"])
    assert job.wait() == 78
    assert "--fake-hosts 3: 2 workers cannot be divided over 3 hosts" in job.err


LISTEN = """
import syncvar as sv
from probe import gate, note
sv.barrier()
note("ready")
gate("on")
sv.barrier()
"""


def listeners(pids):
    """Return the addresses on which processes listen, from /proc."""
    return {(pid, table, address) for pid, table, address, _ in _listening(pids)}


def _listening(pids):
    found = set()
    for pid in pids:
        sockets = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    found.add((pid, table, *fields[1].split(":")))
    return found


def ports(pids):
    """Return where processes listen on loopback, as address:port."""
    return sorted(f"127.0.0.1:{int(port, 16)}" for _, _, _, port in _listening(pids))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["required", "control-only"])
def test_strangers_of_all_kinds_cost_a_job_nothing(launch, tmp_path, mode):
    job = launch(SUMS, workers=2, options=["--fake-hosts", "2", "--encryption", mode], env=LASTING)
    kinds = [
        kind for kind in KINDS if mode == "required" or kind not in ("replayed", "truncated")
    ]  # who hears a ticket has it
    besiege(job, tmp_path, ",".join(kinds), 30, lambda: ports(job.pids().values()), size=2)


def processes_below(pid):
    """Return the children of a process, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *processes_below(child))]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("required", marks=pytest.mark.slow),
        "control-only",
        pytest.param("off", marks=pytest.mark.slow),
    ],
)
def test_huge_frames_of_strangers_take_no_memory_at_servers_either(launch, tmp_path, mode):
    chosen = [
        "--fake-hosts",
        "2",
        "--servers",
        "2",
        "--encryption",
        mode,
        *(["--insecure"] if mode == "off" else []),
    ]
    job = launch(SUMS, workers=2, options=chosen, env=LASTING)

    def processes():
        return [job.process.pid, *processes_below(job.process.pid)]

    def places():
        found = ports(processes())
        return found if len(found) >= 4 else []

    besieged = besiege(job, tmp_path, "flooding", 1, places, size=2, more=processes)
    assert len(besieged) >= 4, "two ranks and two servers"


@pytest.mark.parametrize("hosts", [1, 2])
def test_only_loopback_is_listened_on_and_the_secret_is_nowhere(launch, hosts):
    # Started afresh: what /proc tells of the variables of a forked process are those of the one that it was forked from.
    job = launch(LISTEN, workers=2, options=["--fake-hosts", str(hosts)], start="spawn")
    job.await_events("ready", 2)
    pids = job.pids().values()
    found = listeners([*pids, job.process.pid])
    if hosts == 1:
        assert not found, "one host needs no tcp at all"
    else:
        assert found == {(pid, "tcp", "0100007F") for pid in pids}
        for pid in pids:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            keys = [one for one in environ if one.startswith(b"SYNCVAR_KEY")]
            assert len(keys) == 1
            assert re.fullmatch(rb"SYNCVAR_KEY_FD=\d+", keys[0])
    job.open_gate("on")
    assert job.wait() == 0, str(job)


FAULT = """
import os, signal
import numpy as np
import syncvar as sv
from probe import failure, note, gate
sv.init()
x = np.ones(1000)
sv.all_reduce(x)
note("ready")
gate("on")
if sv.rank() == {rank}:
    {what}

def many():
    for _ in range(3):
        sv.{call}
failure(many)
"""


@pytest.mark.parametrize(
    ("rank", "call"),
    [
        (1, "all_reduce(x)"),
        pytest.param(2, "barrier()", marks=pytest.mark.slow),
        (3, "all_reduce(np.ones(1 << 20))"),
    ],
)
def test_a_killed_rank_is_told_on_every_host(launch, rank, call):
    job = launch(
        FAULT.format(rank=rank, what="os.kill(os.getpid(), signal.SIGKILL)", call=call),
        workers=4,
        options=["--fake-hosts", "2"],
    )
    job.await_events("ready", 4)
    job.open_gate("on")
    assert job.wait() == 128 + signal.SIGKILL, str(job)
    _, events = last_exception(job, set(range(4)) - {rank})
    for event in events.values():
        assert event["error"] == "PeerLost", str(job)
        assert event["lost"] == rank, str(job)
    assert f"rank {rank}" in job.report
    assert f"#{rank // 2}" in job.report, "the report names the fake host"


def test_an_exception_on_one_rank_is_told_on_every_host(launch):
    job = launch(
        FAULT.format(rank=0, what="raise KeyError('planted')", call="all_reduce(x)"),
        workers=4,
        options=["--fake-hosts", "2"],
    )
    job.await_events("ready", 4)
    job.open_gate("on")
    assert job.wait() == 1, str(job)
    _, events = last_exception(job, {1, 2, 3})
    assert {(event["error"], event["lost"]) for event in events.values()} == {("PeerLost", 0)}, str(
        job
    )
    assert "KeyError: 'planted'" in job.report


@pytest.mark.slow
def test_a_stopped_rank_is_lost_on_every_host(launch):
    job = launch(
        FAULT.format(rank=3, what="os.kill(os.getpid(), signal.SIGSTOP)", call="all_reduce(x)"),
        workers=4,
        options=["--fake-hosts", "2"],
    )
    job.await_events("ready", 4)
    job.open_gate("on")
    assert job.wait() != 0
    last, events = last_exception(job, {0, 1, 2})
    assert {event["error"] for event in events.values()} == {"PeerLost"}, str(job)
    assert {event["lost"] for event in events.values()} == {3}, str(job)
    check_bound(
        "a stopped rank on another host", last - max(e["at"] for e in job.events("ready")), 5.0
    )


MISMATCH = """
import numpy as np
import syncvar as sv
from probe import failure, note
CASES = [
    ((0,), lambda: sv.all_reduce(np.ones(4)), lambda: sv.all_reduce(object())),
    ((3,), lambda: sv.all_reduce(np.ones(4)), lambda: sv.barrier()),
    ((2, 3), lambda: sv.all_reduce(np.ones(1 << 17)), lambda: sv.all_reduce(np.ones(5))),
]
sv.init()
for number, (odd, call, other) in enumerate(CASES):
    error = failure(other if sv.rank() in odd else call)
    note("told", case=number, error=type(error).__name__)
    note("after", total=float(sv.all_reduce(np.ones(3))[0]))
"""


def test_ranks_that_disagree_are_told_and_go_on(launch):
    job = launch(MISMATCH, workers=4, options=["--fake-hosts", "2"])
    assert job.wait() == 0, str(job)
    told = {(event["case"], event["rank"]): event["error"] for event in job.events("told")}
    refused = {
        (0, 0): "ConfigError"
    }  # an object is no array, and rank 0 knows it before anything is sent
    assert (
        told == {(case, rank): "MismatchError" for case in range(3) for rank in range(4)} | refused
    ), str(job)
    assert [event["total"] for event in job.events("after")] == [4.0] * 12


STRATEGIES = """
import numpy as np
import syncvar as sv
from probe import note
sv.init()
seen = []
for make in (sv.MirroredStrategy, sv.MirroredStrategy, sv.MultiWorkerMirroredStrategy, sv.CentralStorageStrategy):
    strategy = make()
    with strategy.scope():
        v = sv.Variable(np.zeros(3), aggregation="SUM")
    strategy.run(lambda: v.assign_add(np.full(3, sv.rank() + 1.0)))
    seen.append([strategy.num_replicas_in_sync, float(v.numpy()[0])])
note("seen", seen=seen)
"""


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_strategies_span_this_host_or_all(launch, transport):
    job = launch(
        STRATEGIES, workers=4, options=["--fake-hosts", "2"], env={"SYNCVAR_TRANSPORT": transport}
    )
    assert job.wait() == 0, str(job)
    for event in job.events("seen"):
        here = [2, 3.0] if event["rank"] < 2 else [2, 7.0]
        assert event["seen"] == [here, here, [4, 10.0], [4, 10.0]]
    assert job.err.count("MirroredStrategy spans the 2 ranks of this host") == 2, (
        "once on each host"
    )
