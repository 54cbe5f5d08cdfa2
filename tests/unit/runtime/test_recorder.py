"""The flight recorder of a rank: what it keeps, when it writes, and that it never gets in the way."""

import json
import os
import signal
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.cli.explain import divergences
from syncvar.cli.record_files import as_record, load
from syncvar.core.errors import MismatchError, PeerLost, UsageError, error_line
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.call_record import UNRECORDED, CallInfo, ErrorFields
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.recorder import RING, Recorder
from syncvar.testing import run_ranks
from tests.support.launching import await_true

TOLD = CallInfo(CollectiveSpec("all_reduce(sum, float32[2])"), 3, (0, 1), 77, 8, "shm small")


def in_file(folder):
    return json.loads((folder / "flight-rank0.json").read_text())


def test_an_operation_has_a_beginning_and_one_end():
    recorder = Recorder()
    entry = recorder.begin(TOLD, 4)
    started = recorder.events()[0]
    assert (started.state, started.ended_ns, started.call, started.group) == ("started", 0, 4, 3)
    entry.stage("ring", 100)
    entry.end()
    entry.end(ValueError("late"))
    event = recorder.events()[0]
    assert (event.state, event.detail, event.path, event.nbytes) == (
        "done",
        "",
        "shm small ring",
        108,
    )
    assert event.began_ns <= event.ended_ns
    assert event.thread == threading.get_ident()


def test_short_and_long_entries_stand_in_one_stream():
    recorder = Recorder()
    recorder.add((TOLD, 0, 10, 20, 5))
    recorder.note("left", "rank 1")
    recorder.begin(TOLD, 1).end(MismatchError("no", {0: "a"}))
    first, second, third = recorder.events()
    assert (first.state, first.began_ns, first.ended_ns, first.thread) == ("done", 10, 20, 5)
    assert (second.label, second.group, second.state, second.detail) == (
        "left",
        -1,
        "noted",
        "rank 1",
    )
    assert (third.state, third.detail) == ("failed", "MismatchError: no\n  rank 0: a")
    assert (third.error, third.is_deadlock, third.lost_rank) == ("MismatchError", False, -1)


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (MismatchError("no", is_deadlock=True), {"is_deadlock": True}),
        (PeerLost(3, "box", "signal 9", status=-9), {"lost_rank": 3, "lost_status": -9}),
        (PeerLost(3, "box", "uncaught ValueError: no"), {"lost_rank": 3}),
        (KeyError("x"), {}),
    ],
)
def test_an_error_is_recorded_as_data(error, fields):
    recorder = Recorder()
    recorder.begin(TOLD, 1).end(error)
    recorder.broke(error)
    failed, broke = recorder.events()
    wanted = ErrorFields(error_line(error), type(error).__name__)._replace(**fields)
    for event in (failed, broke):
        assert {name: getattr(event, name) for name in wanted._fields} == wanted._asdict()


def test_the_ring_holds_the_last():
    recorder = Recorder()
    for number in range(RING + 10):
        recorder.add((TOLD, number, number, number + 1, 5))
    events = recorder.events()
    assert [events[0].call, events[-1].call, len(events)] == [10, RING + 9, RING]
    assert not as_record(recorder.record()).is_whole
    assert as_record(Recorder().record()).is_whole


@pytest.mark.slow
def test_threads_may_add_while_another_reads():
    recorder, over = Recorder(), threading.Event()

    def write(thread):
        number = 0
        while not over.is_set():
            recorder.add((TOLD, number, 0, 1, thread))
            number += 1

    threads = [threading.Thread(target=write, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        for thread in range(3):
            calls = [event.call for event in recorder.events() if event.thread == thread]
            assert calls == sorted(set(calls))
    over.set()
    for thread in threads:
        thread.join()


def test_a_refused_call_is_written_once_and_the_end_replaces_it(tmp_path):
    recorder = Recorder(folder=str(tmp_path / "new"))
    recorder.failed(ValueError("no failure of ours"))
    assert not (tmp_path / "new").exists()
    recorder.failed(MismatchError("first"))
    recorder.failed(MismatchError("second"))
    assert (in_file(tmp_path / "new")["reason"], in_file(tmp_path / "new")["is_final"]) == (
        "MismatchError: first",
        False,
    )
    recorder.broke(PeerLost(1))
    assert recorder.is_due
    recorder.ended("uncaught PeerLost")
    assert not recorder.is_due
    recorder.ended("later")
    record = in_file(tmp_path / "new")
    assert (record["reason"], record["is_final"]) == ("PeerLost: rank 1 was lost", True)
    assert [event[0] for event in record["events"]] == ["broke"]
    assert os.listdir(tmp_path / "new") == ["flight-rank0.json"]


def test_a_record_is_for_this_user_only_and_goes_where_no_other_user_leads_it(
    tmp_path, foreign_link
):
    before = os.umask(0)
    try:
        Recorder(folder=str(tmp_path / "new"), trace=str(tmp_path)).ended("x")
        (tmp_path / "open").mkdir(mode=0o755)  # as the folder of --log-dir
        Recorder(trace=str(tmp_path / "open")).closed()
    finally:
        os.umask(before)
    modes = [
        oct((tmp_path / name).stat().st_mode & 0o777)
        for name in ("new", "new/flight-rank0.json", "open/flight-rank0.json")
    ]
    assert modes == ["0o700", "0o600", "0o666"], (
        "the umask decides in a folder that others may enter"
    )

    (tmp_path / "theirs").mkdir()
    foreign_link(tmp_path / "link", tmp_path / "theirs")
    Recorder(folder=str(tmp_path / "link")).ended("x")
    Recorder(folder=str(tmp_path / "link" / "below")).ended("x")
    assert os.listdir(tmp_path / "theirs") == []
    target = tmp_path / "target"
    target.write_text("theirs")
    (tmp_path / "open" / f"flight-rank0.json.{os.getpid()}.tmp").symlink_to(target)
    Recorder(folder=str(tmp_path / "open")).ended("y")
    assert (in_file(tmp_path / "open")["reason"], target.read_text()) == ("y", "theirs")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    recorder.failed(MismatchError("x"))
    recorder.broke(PeerLost(1))
    recorder.ended("x")
    recorder.closed()
    assert os.listdir(tmp_path) == []


def test_what_goes_wrong_while_writing_is_not_told(tmp_path):
    (tmp_path / "file").write_text("")
    recorder = Recorder(folder=str(tmp_path / "file" / "x"), trace=str(tmp_path / "file"))
    recorder.failed(MismatchError("x"))
    recorder.broke(PeerLost(1))
    recorder.ended()
    recorder.closed()
    recorder = Recorder(folder=str(tmp_path))
    recorder.add("no entry")
    recorder.ended("x")
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_is_small_and_whatever_is_in_it_can_be_read(tmp_path):
    recorder = Recorder(folder=str(tmp_path))
    for number in range(3 * RING):
        recorder.begin(TOLD, number).end(ValueError("\udcff\n" * 10_000))
    recorder.ended("x" * 10**6)
    assert (tmp_path / "flight-rank0.json").stat().st_size < 64 << 20
    assert len(load([str(tmp_path)])[0].events) == RING


def test_a_writer_that_comes_again_in_a_signal_handler_does_not_wait_for_itself(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("syncvar.runtime.recorder._WRITING_S", 0.05)
    recorder = Recorder(folder=str(tmp_path))
    with recorder._writing:
        recorder.ended("x")
    assert os.listdir(tmp_path) == []
    recorder.ended("y")
    assert in_file(tmp_path)["reason"] == "y"


def test_a_forked_copy_writes_nothing(tmp_path):
    recorder = Recorder(folder=str(tmp_path))
    child = os.fork()
    if child == 0:
        recorder.ended("x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(tmp_path) == []


def test_what_operations_without_a_recorder_do_is_in_no_record(tmp_path):
    recorder = Recorder(folder=str(tmp_path))
    UNRECORDED.stage("x", 1)
    UNRECORDED.end(sv.PeerLost(1, "", "gone"))
    assert recorder.events() == []
    assert os.listdir(tmp_path) == []


# -- worlds ----------------------------------------------------------------------------------------


def program():
    x = np.ones(4)
    for _ in range(3):
        sv.all_reduce(x)
    work = sv.all_reduce(x, async_op=True)
    sv.broadcast(np.zeros(100_000))
    work.wait()
    sv.barrier()
    sv.all_reduce([x, x])
    return current().recorder.events()


@pytest.mark.parametrize("shared", [False, True])
def test_every_rank_records_the_same_calls(shared):
    each = run_ranks(3, program, shared=shared)
    told = [
        [(e.label, e.group, e.call, e.fingerprint, e.state) for e in events if e.state != "noted"]
        for events in each
    ]
    assert sorted(told[0]) == sorted(told[1]) == sorted(told[2])
    calls = [event for event in each[0] if event.group == 0]
    assert sorted(event.call for event in calls) == list(range(7))
    assert all(event.state == "done" and event.began_ns <= event.ended_ns for event in calls)
    assert all(event.path.startswith("shm" if shared else "links") for event in calls)
    for event in calls:
        at_least = (
            800_000
            if "broadcast" in event.label
            else 64
            if "64 bytes" in event.label
            else 32
            if "all_reduce" in event.label
            else 0
        )
        assert (
            at_least <= event.nbytes < at_least + 1000
        )  # and what the ranks tell each other beforehand
    assert each[0][0].label == "joined"


@pytest.mark.parametrize("shared", [False, True])
def test_calls_that_differ_are_found_in_the_records(shared):
    def differ():
        for _ in range(3):
            sv.all_reduce(1.0)
        with pytest.raises(MismatchError):
            if sv.rank() == 1:
                sv.barrier()
            else:
                sv.all_reduce(1.0)
        with pytest.raises((MismatchError, sv.ConfigError)):
            sv.all_reduce(1.0, "sun" if sv.rank() == 0 else "sum")
        return current().recorder.record()

    records = [as_record(one) for one in run_ranks(3, differ, shared=shared)]
    first = divergences(records)[0]
    assert (first.group, first.call, first.absent) == (0, 3, ())
    assert {rank: event.label.split("(")[0] for rank, event in first.entered.items()} == {
        0: "all_reduce",
        1: "barrier",
        2: "all_reduce",
    }
    refused = [event for event in records[0].events if event.call == 4]
    assert [(event.label, event.fingerprint, event.state) for event in refused] == [
        ("all_reduce", 0, "failed")
    ]
    assert "sun" in refused[0].detail


@pytest.mark.parametrize("shared", [False, True])
def test_a_break_ends_every_entry(shared):
    recorders = {}

    def is_in_the_call(rank):
        return any(event.call == 1 for event in recorders[rank].events())

    def lose():
        recorders[sv.rank()] = current().recorder
        sv.all_reduce(1.0)
        if sv.rank() == 1:
            await_true(lambda: is_in_the_call(0) and is_in_the_call(2))
            raise ValueError("no")
        sv.all_reduce(np.ones(3))

    run_ranks(3, lose, shared=shared)
    for rank in (0, 2):
        events = recorders[rank].events()
        assert [event.state for event in events if event.call == 1] == ["failed"]
        assert "broke" in [event.label for event in events]
        assert not [event for event in events if event.state == "started"]


def test_a_question_is_recorded():
    def ask():
        with sv.MirroredStrategy().scope():
            v = sv.Variable(float(sv.rank()), synchronization=sv.VariableSynchronization.NONE)
        if sv.rank() == 0:
            v.read_from(1)
        sv.barrier()
        return current().recorder.events()

    asked = [event for event in run_ranks(2, ask)[0] if event.path == "question to rank 1"]
    assert asked[-1].state == "done"


def test_a_trace_is_written_at_the_end_of_a_run_that_went_well(tmp_path):
    run_ranks(2, lambda: sv.barrier(), config=RuntimeConfig(trace=str(tmp_path)))
    records = load([str(tmp_path)])
    assert [record.rank for record in records] == [0, 1]
    assert [event.label for event in records[1].events][:2] == ["joined", "barrier"]
    assert divergences(records) == []


def test_a_world_of_one_records_as_well():
    sv.all_reduce(np.ones(2))
    event = current().recorder.events()[-1]
    assert (event.label, event.state) == ("all_reduce(sum, float64[2])", "done")
    with pytest.raises(sv.ConfigError):
        sv.all_reduce(1, "sun")
    assert current().recorder.events()[-1].state == "failed"


def test_a_rank_that_computes_writes_when_the_others_break(tmp_path):
    folder = str(tmp_path)

    def compute():
        current().recorder._folder = folder
        sv.barrier()
        out_of_it.wait(50)
        if sv.rank() == 1:
            raise ValueError("no")
        await_true((tmp_path / f"flight-rank{sv.rank()}.json").exists, 50.0)

    out_of_it = threading.Barrier(3)
    assert run_ranks(3, compute)[0] is None
    assert {record.rank: record.reason.split(":")[0] for record in load([folder])} == {
        0: "PeerLost",
        1: "it did not leave in order",
        2: "PeerLost",
    }


def test_an_interrupted_call_has_failed():
    recorders = {}
    interrupted = threading.Event()

    class Alarm(BaseException):
        pass

    def interrupt():
        recorders[sv.rank()] = current().recorder
        if sv.rank() == 0:
            engine = current().engine

            def look(*_):
                raise Alarm

            engine.look = look
            with pytest.raises(Alarm):
                sv.all_reduce(1.0)
            interrupted.set()
            with pytest.raises((sv.GroupBroken, UsageError)):
                sv.barrier()
        else:
            assert interrupted.wait(20.0)
            with pytest.raises(PeerLost):
                sv.barrier()

    assert run_ranks(2, interrupt) == [None, None]
    failed = [event for event in recorders[0].events() if event.state == "failed"]
    assert [event.detail for event in failed] == ["Alarm: "]
