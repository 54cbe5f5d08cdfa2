"""Jobs with servers: how they are started, named, lost, replaced and ended, and that what was pushed is there once."""

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

from syncvar.cli.commands import main
from syncvar.core.process_ids import SERVER_0
from tests.fuzz import server_faults
from tests.support.launching import PATIENT, await_true
from tests.support.paths import RANK_SCRIPTS

ENV = {"PYTHONPATH": str(RANK_SCRIPTS)}

# Each worker pushes 1 in each of `STEPS` steps. The servers know how far a worker has come: its steps are counted there too.
STEPS = 60
SCRIPT = f"""
import os, time
import numpy as np
import probe
from server_arrays import *

way, servers = edge(), range(ME.servers)
first = begun(way, servers, np.zeros(1000, np.int64))
probe.note("joined", first=first, incarnation=ME.incarnation)
for count in range(first, {STEPS}):
    try:
        step(way, servers, np.ones(1000, np.int64))
    except Exception as error:
        probe.raised(error)
        raise
    if count == {STEPS // 2} and not ME.incarnation:
        probe.note("half")
        probe.gate("on")
until = time.monotonic() + 60
while (sums := [int(one[0]) for one in pulled(way, servers)]) != [{STEPS} * ME.world_size] * len(servers):
    assert time.monotonic() < until, sums
    time.sleep(0.01)
probe.note("sums", sums=[sorted(set(map(int, one))) for one in pulled(way, servers)])
way.close()
"""


def servers_of(job):
    """Return server -> process id, by the command lines of the launcher's children."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == job.process.pid and b"server" in words:
            found[int(words[words.index(b"server") + 1])] = int(status.parent.name)
    return found


def check_sums(job, workers=2, servers=2):
    assert [event["sums"] for event in job.events("sums")] == [
        [[STEPS * workers]] * servers
    ] * workers, job


def start(launch, *options, script=SCRIPT, env=None, **keywords):
    return launch(
        script, options=("--servers", "2", *options), env={**ENV, **(env or {})}, **keywords
    )


def test_servers_hold_what_workers_push_and_end_when_these_have_ended(launch, tmp_path, capsys):
    job = start(launch, "--events", str(tmp_path / "events"), env=PATIENT)
    job.await_events("half", 2)
    found = servers_of(job)
    assert sorted(found) == [0, 1]

    def answers():
        assert main(["stacks", str(job.process.pid)]) == 0
        asked = capsys.readouterr().out
        assert ": 2 ranks and 2 servers, launcher " in asked
        return "\nservers 0, 1: waiting for requests\n" in asked

    await_true(answers, what="an answer of both servers in time")
    job.open_gate("on")
    assert job.wait() == 0, job
    check_sums(job)
    assert job.err == ""
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    begun = {event["server"]: event["pid"] for event in events if event["event"] == "server_start"}
    assert begun == found
    assert [event["exit_code"] for event in events if event["event"] == "server_end"] == [0, 0]


def test_a_server_that_is_lost_without_a_copy_ends_the_job_and_is_named(launch):
    job = start(launch)
    job.await_events("half", 2)
    os.kill(servers_of(job)[1], signal.SIGKILL)
    job.open_gate("on")
    assert job.wait() == 137, job
    first = job.report.splitlines()[0]
    assert first.startswith("syncvar: server 1 on "), job
    assert "was killed by signal 9 (SIGKILL)" in first, job
    assert "  server 0: waiting for requests" in job.report.splitlines(), job
    tried = job.report.split("\ntry:\n")[1].splitlines()[:2]
    assert [line.split()[1:3] for line in tried] == [
        ["--server-replicas", "1"],
        ["--max-restarts", "3"],
    ], job
    (record,) = job.folder.glob("state/**/flight-server*.json")
    told = json.loads(record.read_text())
    assert (record.name, told["rank"], told["reason"]) == (
        "flight-server0.json",
        SERVER_0,
        "server 1 was lost: signal 9",
    )
    assert any(event[0].startswith("push of rank ") for event in told["events"])
    for event in job.events("raised"):
        assert event["error"] == "PeerLost", job
        assert event["text"].startswith("server 1 was lost: signal 9"), job


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_with_a_copy_is_replaced_and_nothing_is_lost(launch, number):
    job = start(launch, "--server-replicas", "1")
    job.await_events("half", 2)
    os.kill(servers_of(job)[1], number)
    job.open_gate("on")
    assert job.wait() == 0, job
    check_sums(job)
    assert "server 1 on" in job.err, job
    assert "server 0 has copies of its variables and takes its place" in job.err, job


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_alone_and_goes_on(launch):
    job = start(launch, "--max-restarts", "1", "--server-replicas", "1", workers=3)
    job.await_events("half", 3)
    job.kill_rank(1)
    job.open_gate("on")
    assert job.wait() == 0, job
    check_sums(job, workers=3)
    joined = job.events("joined", rank=1)
    assert [event["incarnation"] for event in joined] == [0, 1], job
    assert joined[1]["first"] == STEPS // 2 + 1, job
    assert "started again alone (1): signal 9" in job.err, job


# A process that has the name of worker 1, and outlives it: what it pushes is late.
LATE = """
import numpy as np
import probe
from server_arrays import *

way = edge()
probe.note("outlives")
probe.gate("late")
try:
    step(way, range(ME.servers), np.full(1000, 1000, np.int64))
    probe.note("pushed")
except Exception as error:
    probe.raised(error)
    raise SystemExit(0)
"""


@pytest.mark.slow
def test_what_an_earlier_incarnation_pushes_late_is_refused_and_the_later_one_goes_on(launch):
    outliving = f"""
    import subprocess, sys
    from server_arrays import ME
    if ME.rank == 1 and not ME.incarnation:
        path = os.pathsep.join(filter(None, sys.path))
        subprocess.Popen(
            [sys.executable, "-c", {LATE!r}], env={{**os.environ, "PYTHONPATH": path}}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
    """
    job = start(
        launch, "--max-restarts", "1", script="import os\n" + textwrap.dedent(outliving) + SCRIPT
    )
    job.await_events("half", 2, limit_s=120)
    job.await_events("outlives", 1, limit_s=120)
    os.kill(job.events("joined", rank=1)[0]["pid"], signal.SIGKILL)
    await_true(lambda: len(job.events("joined", rank=1)) == 2, 60, "the worker's return")
    job.open_gate("late")
    job.await_events("raised", 1, limit_s=120)
    job.open_gate("on")
    assert job.wait(120) == 0, job
    (event,) = job.events("raised")
    assert (event["error"], job.events("pushed")) == ("GroupBroken", []), job
    assert "another process has taken its place" in event["text"], job
    check_sums(job)


@pytest.mark.slow
def test_servers_over_hosts_are_placed_in_turns_and_reached_by_protected_links(launch):
    for encryption in ("required", "control-only"):
        job = start(
            launch, "--fake-hosts", "2", "--server-replicas", "1", "--encryption", encryption
        )
        job.await_events("half", 2)
        assert sorted(servers_of(job)) == [0, 1]
        job.open_gate("on")
        assert job.wait() == 0, job
        check_sums(job)


# Arrays of 160 kB: those of a worker's own host move through shared memory, the others over the network.
LONG = """
import numpy as np
import probe, syncvar as sv

COUNT, STEPS = 20_000, 6
strategy = sv.ParameterServerStrategy(staleness=None)
with strategy.scope():
    variables = [sv.Variable(np.full(COUNT, 7.0 + index), name=f"v{index}") for index in range(4)]
sv.barrier()
for step in range(1, STEPS + 1):
    for one in variables:
        one.assign_add(np.full(COUNT, sv.rank() + 1.0))
    if step == STEPS // 2:
        probe.note("half")
        probe.gate("on")
    sv.barrier()
    for index, one in enumerate(variables):
        wanted = 7.0 + index + step * sv.world_size() * (sv.world_size() + 1) / 2
        assert (one.read_value() == wanted).all(), (step, index, wanted, one.read_value())
    sv.barrier()
print("exact", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encryption", "server"),
    [
        ("required", 0),
        ("required", 1),
        ("control-only", 0),
        ("control-only", 1),
    ],
)
def test_long_arrays_are_exact_over_hosts_when_a_server_is_killed(launch, encryption, server):
    options = ("--fake-hosts", "2", "--server-replicas", "1", "--encryption", encryption)
    job = start(launch, *options, script=LONG, workers=4, env=PATIENT)
    job.await_events("half", 4)
    os.kill(servers_of(job)[server], signal.SIGKILL)
    job.open_gate("on")
    assert job.wait() == 0, job
    assert job.out.count("exact") == 4, job
    assert f"server {server} on" in job.err, job


@pytest.mark.slow
def test_what_a_server_prints_has_its_name_before_it(launch, tmp_path):
    job = start(launch, "--log-dir", "logs")
    job.await_events("half", 2)
    pid = servers_of(job)[1]
    os.kill(pid, signal.SIGABRT)  # its fault handler writes where it stands
    job.open_gate("on")
    assert job.wait() == 134, job
    assert "Fatal Python error: Aborted" in job.lines("server 1", job.err), job
    assert "Fatal Python error: Aborted" in (job.folder / "logs" / "server-1.err").read_text()


@pytest.mark.slow
def test_a_server_takes_no_part_in_calls_of_ranks_and_signals_for_ranks_pass_it_by(launch):
    script = """
    import os, signal
    import probe, syncvar as sv
    signal.signal(signal.SIGUSR1, lambda *_: probe.open_gate("on"))
    assert sv.world_size() == 2 and sv.all_reduce(1) == 2
    probe.note("half")
    probe.gate("on")
    """
    job = start(launch, script=script)
    job.await_events("half", 2)
    job.send(signal.SIGUSR1)
    assert job.wait() == 0, job


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_server(launch):
    job = start(launch)
    job.await_events("half", 2)
    found = servers_of(job)
    job.process.kill()
    job.process.wait(120)
    await_true(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in found.values()),
        60,
        "the end of the servers",
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_killed_at_any_moment_every_push_counts_once(seed, tmp_path):
    server_faults.run(seed, tmp_path)


@pytest.mark.slow
def test_servers_of_a_host_that_has_an_agent_are_its_children_and_workers_are_started_again_there(
    launch,
):
    job = start(
        launch, "-H", "localhost:2", "--max-restarts", "1", "--env", f"PYTHONPATH={RANK_SCRIPTS}"
    )
    job.await_events("half", 2)
    assert servers_of(job) == {}
    job.kill_rank(1)
    job.open_gate("on")
    assert job.wait() == 0, job
    check_sums(job)
    assert [event["incarnation"] for event in job.events("joined", rank=1)] == [0, 1], job


@pytest.mark.slow
def test_a_script_that_ends_before_its_pushes_are_there_fails(launch):
    script = """
import numpy as np
import probe
from server_arrays import ME, begun, edge, push

way = edge()
begun(way, range(ME.servers), np.zeros(10, np.int64))
probe.note("begun")
probe.gate("stopped")
way.request({1: push("v", np.ones(10, np.int64))})
"""
    job = start(
        launch,
        script=script,
        workers=1,
        env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "4", "SYNCVAR_LOST_AFTER_S": "60"},
    )
    job.await_events("begun", 1)
    stopped = servers_of(job)[1]
    os.kill(stopped, signal.SIGSTOP)
    job.open_gate("stopped")
    assert job.wait() == 70, str(job)
    assert "DeadlineExceeded: the end of the script: no answer of server 1 within 4 s" in job.err, (
        str(job)
    )
    assert "Exception ignored" not in job.err


@pytest.mark.slow
def test_servers_say_what_they_do_in_the_log_and_in_the_totals(launch, tmp_path):
    job = start(
        launch,
        "--server-replicas",
        "1",
        f"--stats={tmp_path / 'totals.json'}",
        env={"SYNCVAR_LOG_LEVEL": "info"},
    )
    job.await_events("half", 2)
    os.kill(servers_of(job)[1], signal.SIGKILL)
    job.open_gate("on")
    assert job.wait() == 0, str(job)
    check_sums(job)
    said = [line for line in job.err.splitlines() if line.startswith("[server ")]
    assert [line for line in said if line.startswith("[server 1] ")] == [
        "[server 1] syncvar INFO: server 1 of 2: serving 2 workers, copies on server 0, memory is shared with the workers of this host"
    ]
    assert "[server 0] syncvar INFO: server 0: server 1 is lost: signal 9" in said
    assert "[server 0] syncvar INFO: server 0: takes the place of server 1" in said
    assert (
        said[-1] == "[server 0] syncvar INFO: server 0: over, with 4 parts of variables, 15.7 KiB"
    )
    told = json.loads((tmp_path / "totals.json").read_text())
    assert (told["servers"], told["missing"], told["missing_servers"]) == (2, [0, 1], [1])
    rows = {(row["call"], row["class"]): row for row in told["rows"]}
    pushes = [row for (call, _), row in rows.items() if call == "served push"]
    assert {row["ranks"] for row in pushes} == {"server 0"}
    assert sum(row["calls"] for row in pushes) >= 2 * STEPS
    assert all(row["failed"] == 0 and row["mean_s"] > 0 for row in pushes)


BOUNDED = """
import probe, syncvar as sv

strategy = sv.ParameterServerStrategy(staleness=2)
with strategy.scope():
    v = sv.Variable(0, name="v")
for step in range(6):
    if strategy.replica_id == 1 and step == 1:
        probe.gate("slow")
    v.assign_add(1)
    strategy.tick()
    v.read_value()
    if strategy.replica_id == 0 and step == 2:
        probe.note("ahead")
sv.barrier()
"""


@pytest.mark.slow
def test_reads_are_no_more_ticks_ahead_than_the_bound_and_totals_tell_by_how_many(launch, tmp_path):
    job = start(launch, f"--stats={tmp_path / 'totals.json'}", script=BOUNDED)
    job.await_events("ahead", 1)  # two ticks ahead of the other, it has read
    job.open_gate("slow")
    assert job.wait() == 0, job
    rows = json.loads((tmp_path / "totals.json").read_text())["rows"]
    ahead = {
        int(row["call"].split()[1]): row["calls"] for row in rows if row["call"].endswith(" ahead")
    }
    assert sum(ahead.values()) == 12
    assert max(ahead) == 2
    assert min(ahead) == 0


BEFORE_JOINING = """
import os, signal, time
if os.environ["SYNCVAR_RANK"] == "1" and os.environ.get("SYNCVAR_INCARNATION", "0") == "0":
    time.sleep(0.5)  # the other worker waits
    os.kill(os.getpid(), signal.SIGKILL)
import probe, syncvar as sv
probe.note("met", total=sv.all_reduce(1).item())
"""


def test_a_worker_that_is_killed_before_it_joins_is_started_again_and_meets_the_others(launch):
    job = start(launch, "--max-restarts", "1", script=BEFORE_JOINING)
    assert job.wait() == 0, job
    assert [event["total"] for event in job.events("met")] == [2, 2], job
    assert "rank 1 on" in job.err, job
    assert "is started again alone (1): signal 9" in job.err, job
