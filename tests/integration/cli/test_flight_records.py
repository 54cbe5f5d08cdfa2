"""Real jobs leave flight records when something goes wrong, and only then; the commands read them."""

import json
import re
import signal

import pytest

from syncvar.cli.commands import main
from tests.support.launching import await_true


@pytest.fixture
def syncvar(capsys):
    """Run the command, in this process; return its exit code and what it wrote."""

    def run(*arguments):
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        return code, capsys.readouterr().out

    return run


def records(job):
    """Return the folder of a job's records, which the report names; None where there is none."""
    folders = list(job.folder.glob("state/syncvar/*"))
    assert len(folders) <= 1
    said = [line for line in job.report.split("\n") if "flight records in" in line]
    assert len(said) == len(folders), str(job)
    if not folders:
        return None
    name = folders[0].name.rpartition("-")[2]
    assert said == [f"evidence: flight records in {folders[0]} (syncvar explain {name})"], str(job)
    return folders[0]


BEGIN = """
import numpy as np
import os, signal, time
import probe, syncvar as sv

rank = sv.rank()
x = np.arange(12, dtype=np.float32)
for _ in range(3):
    sv.all_reduce(x)
sv.barrier()
"""


def test_a_mismatch_is_explained(launch, syncvar):
    job = launch(
        BEGIN + "if rank == 1:\n    sv.broadcast(x)\nelse:\n    sv.all_reduce(x, 'max')\n",
        workers=3,
    )
    assert job.wait() == 76, str(job)
    folder = records(job)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"flight-rank{rank}.json" for rank in range(3)
    ]
    code, text = syncvar("explain", folder)
    assert code == 1, text
    assert "first divergence: call 5 of the world" in text
    assert "ranks 0, 2: all_reduce(max, float32[12]), failed with" in text
    assert "rank 1: broadcast(" in text
    assert "call 4: barrier, ranks 0-2, done" in text


RAISES = """
if rank == 2:  # when the others are in the call: who hears of it before has another story
    probe.gate("0")
    probe.gate("1")
    raise ValueError('planted')
work = sv.all_reduce(x, async_op=True)
probe.open_gate(rank)
work.wait()
"""


def test_an_exception_between_calls_is_explained(launch, syncvar):
    job = launch(BEGIN + RAISES, workers=3)
    assert job.wait() == 1, str(job)
    code, text = syncvar("explain", records(job))
    assert code == 1, text
    assert "first divergence: call 5 of the world" in text
    assert "rank 2: never entered it; its call 4 was barrier, done" in text
    assert "uncaught ValueError: planted" in text


KILLED = """
if rank == 1:
    probe.gate("0")
    probe.gate("2")
    os.kill(os.getpid(), signal.SIGKILL)
work = sv.all_reduce(x, async_op=True)
probe.open_gate(rank)
work.wait()
"""


def test_a_killed_rank_leaves_none_and_is_named(launch, syncvar):
    job = launch(BEGIN + KILLED, workers=3)
    assert job.wait() == 137, str(job)
    folder = records(job)
    assert sorted(path.name for path in folder.iterdir()) == [
        "flight-rank0.json",
        "flight-rank2.json",
    ]
    code, text = syncvar("explain", folder)
    assert code == 0, text
    assert "rank 1 left none: killed by signal 9" in text
    assert "ranks 0, 2: failed: PeerLost: rank 1" in text


def test_a_rank_that_ended_without_a_message_that_another_waits_for_is_explained(launch, syncvar):
    job = launch(BEGIN + "if rank == 0:\n    sv.recv(1)\n", workers=2)
    assert job.wait() == 70, str(job)
    code, text = syncvar("explain", records(job))
    assert code == 1, text
    assert "rank 1 left none: ended (exit 0)" in text
    assert "first divergence: call 1 of send/recv between ranks 0 and 1" in text
    assert "rank 0: recv(from rank 1, tag 0), failed with PeerLost" in text
    assert "rank 1: ended (exit 0) without call 1" in text
    assert "worker_entry.py" not in text, "a place of ours is none of the script"


def test_ranks_that_wait_for_messages_of_each_other_are_explained_as_a_cycle(launch, syncvar):
    job = launch(BEGIN + "sv.recv(1 - rank)\n", workers=2)
    assert job.wait() == 76, str(job)
    code, text = syncvar("explain", records(job))
    assert code == 1, text
    assert (
        "deadlock: rank 0 waits for a message of rank 1, and rank 1 for a message of rank 0\n"
        in text
    )
    assert (
        "call 1 of send/recv between ranks 0 and 1, recv(from rank 0, tag 0), failed with MismatchError"
        in text
    )
    assert "the ranks raised:" in text
    for words in ("divergence", "never entered it", "also:"):
        assert words not in text


@pytest.mark.slow
def test_a_deadline_is_explained(launch, syncvar):
    ending = "if rank == 1:\n    time.sleep(30)\nsv.all_reduce(x, timeout=3.0)\n"
    job = launch(BEGIN + ending, workers=2)
    assert job.wait() == 70, str(job)
    code, text = syncvar("explain", records(job))
    assert code == 1, text
    assert "rank 1: never entered it; its call 4 was barrier, done" in text
    assert "script.py" in text.split("at the end")[1], "the place where rank 1 stood"


def test_with_a_folder_for_output_records_go_there_and_old_ones_go(launch):
    ending = "if rank == 1:\n    raise ValueError('planted')\nsv.all_reduce(x)\n"
    job = launch(BEGIN + ending, workers=2, options=["--log-dir", "logs"])
    (job.folder / "logs").mkdir(exist_ok=True)
    assert job.wait() == 1, str(job)
    logs = job.folder / "logs"
    assert f"evidence: flight records in {logs}" in job.report
    assert {path.name for path in logs.glob("*.json")} == {"flight-rank0.json", "flight-rank1.json"}
    assert not (job.folder / "state").exists()
    before = logs / "flight-rank7.json"
    before.write_text("{}")
    second = launch(BEGIN, workers=2, options=["--log-dir", str(logs)])
    assert second.wait() == 0, str(second)
    assert not list(logs.glob("*.json"))


def test_where_the_state_folder_cannot_be_used_another_private_one_takes_its_place(
    launch, syncvar, tmp_path, monkeypatch
):
    state = tmp_path / "state"
    (tmp_path / "tmp").mkdir()
    env = {"XDG_STATE_HOME": str(state), "HOME": "", "TMPDIR": str(tmp_path / "tmp")}
    (state / "syncvar").mkdir(parents=True)
    (state / "syncvar").chmod(0o777)
    # Rank 1 raises when the launcher has said that rank 0 waits: what rank 0 does then is certain.
    ending = "if rank == 1:\n    probe.gate('raise')\n    raise ValueError('planted')\nsv.all_reduce(x)\n"
    job = launch(BEGIN + ending, workers=2, env=env | {"SYNCVAR_STALL_WARNING_S": "0.3"})
    await_true(lambda: "has been waiting" in job.report, what="the sentence about the wait")
    job.open_gate("raise")
    assert job.wait() == 1, str(job)
    (folder,) = (tmp_path / "tmp").glob("syncvar-state-*/*")
    why = (
        f"{state}/syncvar is not used: others may write to it (mode 777); chmod 700 {state}/syncvar"
    )
    assert (
        f"evidence: flight records in {folder} (syncvar explain {folder.name[-8:]}); {why}\n"
        in job.report
    ), str(job)
    assert [
        oct(path.stat().st_mode & 0o777)
        for path in (folder.parent, folder, folder / "flight-rank1.json")
    ] == ["0o700", "0o700", "0o600"]
    assert not list((state / "syncvar").iterdir())
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, text = syncvar("explain")
    assert code == 1, text
    assert "uncaught ValueError: planted" in text


def test_what_the_program_deals_with_leaves_nothing(launch):
    ending = """
try:
    sv.all_reduce(x, "max" if rank else "min")
except sv.MismatchError:
    probe.note("told")
assert sv.all_reduce(1) == 2
"""
    job = launch(BEGIN + ending, workers=2)
    assert job.wait() == 0, str(job)
    assert len(job.events("told")) == 2
    assert records(job) is None


def test_after_an_interruption_records_stay_where_ranks_were_said_to_wait(launch, syncvar):
    ending = "probe.note('here')\nif rank == 1:\n    time.sleep(60)\nsv.all_reduce(x)\n"
    job = launch(BEGIN + ending, workers=2, env={"SYNCVAR_STALL_WARNING_S": "0.3"})
    waits = re.compile(r"waiting .*in all_reduce\(.*\(call 5\)")  # not in a call before it
    await_true(lambda: waits.search(job.report), what="the sentence about the wait")
    job.send(signal.SIGINT)
    assert job.wait() == 130, str(job)
    folder = next(job.folder.glob("state/syncvar/*"))
    assert f"syncvar: evidence: flight records in {folder}" in job.report
    code, text = syncvar("explain", folder)
    assert code == 1, text
    assert "rank 1: never entered it; its call 4 was barrier, done" in text


def test_after_an_interruption_of_a_healthy_job_nothing_stays(launch):
    job = launch(BEGIN + "probe.note('here')\ntime.sleep(60)\n", workers=2)
    job.await_events("here", 2)
    job.send(signal.SIGINT)
    assert job.wait() == 130, str(job)
    assert records(job) is None


def test_a_script_that_fails_before_it_joins_leaves_nothing(launch):
    job = launch("raise SystemExit(3)", workers=2)
    assert job.wait() == 3
    assert records(job) is None


def test_a_trace_of_a_job_that_went_well(launch, syncvar):
    script = (
        BEGIN
        + """
strategy = sv.MirroredStrategy()
with strategy.scope():
    v = sv.Variable(0.0, aggregation=sv.VariableAggregation.SUM)
for _ in range(5):
    strategy.run(lambda: v.assign_add(1.0))
    if rank == 1:
        time.sleep(0.002)
work = [sv.all_reduce(x, async_op=True) for _ in range(3)]
for one in work:
    one.wait()
"""
    )
    job = launch(script, workers=3, env={"SYNCVAR_TRACE": "traces"})
    assert job.wait() == 0, str(job)
    assert records(job) is None
    target = job.folder / "trace.json"
    code, text = syncvar("trace", "merge", job.folder / "traces", "-o", target)
    assert code == 0, text
    events = json.loads(target.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    operations = [e for e in events if e.get("cat") == "operation"]
    by_rank = [
        sorted(
            (e["args"]["group"], e["args"]["call"], e["args"]["what"])
            for e in operations
            if e["pid"] == rank
        )
        for rank in range(3)
    ]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert any("assign_add" in what for _, _, what in by_rank[0])
    for group, call, _ in by_rank[0]:  # one clock: nobody ends before the last has come
        same = [e for e in operations if (e["args"]["group"], e["args"]["call"]) == (group, call)]
        if "broadcast" not in same[0]["name"]:
            assert max(e["ts"] for e in same) <= min(e["ts"] + e["dur"] for e in same)
    assert [e for e in events if e["ph"] == "s"]
    code, text = syncvar("explain", job.folder / "traces")
    assert code == 0, text
    assert "no divergence" in text
