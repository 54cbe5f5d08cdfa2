"""AUTO: increments wait where that pays; all replicas change at the same step, and nothing else can be seen of it."""

import contextlib
import gc
import json
import logging
import re

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from syncvar.variables import deferral_tuner
from syncvar.variables import deferred_writes as queue_module


@pytest.fixture(params=["links", "shm"])
def ranks(request):
    def run(size, fn, *, may_fail=False, config=None):
        results = run_ranks(size, fn, shared=request.param == "shm", config=config, timeout_s=60)
        for result in results:
            if isinstance(result, BaseException) and not may_fail:
                raise result
        return results

    return run


@pytest.fixture(autouse=True)
def one_place(monkeypatch):
    """Threads that share an interpreter are never at one place; who waits for the other is not served before its time."""
    monkeypatch.setattr(queue_module, "_PATIENCE_S", 30.0)


@pytest.fixture(autouse=True)
def waiting_pays(monkeypatch):
    """Calls in shared memory are as slow as where waiting pays: what AUTO then does is the same on every path."""
    monkeypatch.setitem(
        deferral_tuner.COSTS, ("shm", False), deferral_tuner.Costs(5, 8.0, 0.3, 3.3, 2.0, 105.0)
    )
    monkeypatch.setitem(
        deferral_tuner.COSTS, ("shm", True), deferral_tuner.Costs(5, 8.0, 0.3, 8.0, 5.0, 105.0)
    )


def made(strategy, value=0.0, aggregation="SUM", **options):
    with strategy.scope():
        return sv.Variable(value, aggregation=aggregation, **options)


def write_heavy(v, x, count=60):
    for _ in range(count):
        v.assign_add(x)


def read_heavy(v, x, count=6):
    for _ in range(count):
        v.assign_add(x)
        v.numpy()


def phases(strategy, v, x, lengths=(24, 24, 24)):
    for number, length in enumerate(lengths):
        for _ in range(length):
            strategy.run(read_heavy if number % 2 else write_heavy, args=(v, x))
    return v.explain().changes


# -- changes ---------------------------------------------------------------------------------------


def test_runs_that_one_replica_has_left_while_there_was_nothing_to_decide(ranks):
    """Those that ended such runs must not know less of what is due than the one that left them."""

    def fn():
        strategy = sv.MirroredStrategy()
        made(strategy).pin("eager")

        def step():
            if sv.rank() == 0:
                raise ValueError("planted")

        for _ in range(30):
            with contextlib.suppress(ValueError):
                strategy.run(step)
        v = made(strategy)
        for _ in range(30):
            strategy.run(v.assign_add, args=(1.0,))
        return float(v)

    assert ranks(2, fn) == [60.0, 60.0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_workload_that_turns_is_answered_within_20_steps_on_all_replicas_at_the_same_step(
    ranks, size
):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy, np.zeros(2, np.float32))
        changes = phases(strategy, v, np.ones(2, np.float32))
        return changes, v.numpy().tolist(), v.explain().mode

    found = ranks(size, fn)
    assert all(one == found[0] for one in found)
    changes, value, mode = found[0]
    assert [(before, after) for _, before, after, _ in changes] == [
        ("eager", "deferred"),
        ("deferred", "eager"),
        ("eager", "deferred"),
    ]
    for (step, _, _, why), turn in zip(changes, (0, 24, 48), strict=True):
        assert turn < step <= turn + 20
        assert "increments" in why
    assert value == [size * (24 * 60 + 24 * 6 + 24 * 60)] * 2
    assert mode == "ON_WRITE (deferred)"


@pytest.mark.parametrize(("dtype", "aggregation"), [("float32", "MEAN"), ("float16", "SUM")])
def test_reproducible_bits_are_those_of_on_write(ranks, dtype, aggregation):
    def fn():
        strategy = sv.MultiWorkerMirroredStrategy(reproducible=True)
        auto = made(strategy, np.zeros(5, dtype), aggregation)
        plain = made(strategy, np.zeros(5, dtype), aggregation, synchronization="ON_WRITE")
        random = np.random.default_rng(sv.rank())
        bits = []

        def step(turns):
            for _ in range(12):
                x = (random.normal(size=5) * 100).astype(dtype)
                auto.assign_add(x)
                if turns:
                    auto.numpy()
                values.append(x)

        def same():
            for x in values:
                plain.assign_add(x)

        for number in range(60):
            if number == 40:
                auto.pin(
                    "deferred"
                )  # in shared memory AUTO does not choose it: there it costs reproducible increments as much
            values = []
            strategy.run(step, args=(20 <= number < 40,))
            strategy.run(same)
            bits.append((auto.numpy().tobytes(), plain.numpy().tobytes()))
        return bits, [change[:3] for change in auto.explain().changes], auto.explain().mode

    found = ranks(3, fn)
    assert all(one == found[0] for one in found)
    bits, changes, mode = found[0]
    assert all(auto == plain for auto, plain in bits)
    assert ("eager", "deferred") in [change[1:] for change in changes]
    assert mode.startswith("ON_WRITE (deferred")


def test_it_does_defer_reproducible_increments_over_links():
    def fn():
        strategy = sv.MirroredStrategy(reproducible=True)
        v = made(strategy)
        for _ in range(12):
            strategy.run(write_heavy, args=(v, 1.0))
        return [change[:3] for change in v.explain().changes], float(v)

    assert run_ranks(2, fn) == [([(10, "eager", "deferred")], 2.0 * 12 * 60)] * 2


def test_reads_on_some_replicas_only_count(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy)

        def step(count, reads):
            for _ in range(count):
                v.assign_add(1.0)
                if reads and sv.rank() == 1:
                    float(v)

        for _ in range(20):
            strategy.run(step, args=(60, False))
        for _ in range(20):
            strategy.run(step, args=(6, True))
        return v.explain().changes, v.explain().numbers["turns"]

    (changes, first), (others, second) = ranks(2, fn)
    assert changes == others
    assert [change[2] for change in changes] == ["deferred", "eager"]
    assert (first, second) == (0, 120)


def test_who_asks_for_on_write_gets_it_and_so_does_who_cannot_add(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        asked = made(strategy, synchronization="ON_WRITE")
        first = made(strategy, aggregation="ONLY_FIRST_REPLICA")
        assigned = made(strategy)
        for _ in range(24):
            strategy.run(write_heavy, args=(asked, 1.0, 30))
            strategy.run(write_heavy, args=(first, 1.0, 10))
            strategy.run(lambda: [assigned.assign(1.0) for _ in range(10)])
        return [v.explain().changes for v in (asked, first, assigned)], strategy.queue

    assert ranks(2, fn) == [([[], [], []], None)] * 2


def test_pin_fixes_it_and_none_lets_auto_decide_again(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy)
        v.pin("eager")
        for _ in range(24):
            strategy.run(write_heavy, args=(v, 1.0))
        assert v.explain().mode == "ON_WRITE (eager, pinned)"
        v.pin("eager")  # once more changes nothing
        v.pin(None)
        for _ in range(12):
            strategy.run(write_heavy, args=(v, 1.0))
        return [change[1:3] for change in v.explain().changes], v.explain().changes[-1][0], float(v)

    for changes, step, value in ranks(2, fn):
        assert changes == [("eager", "eager"), ("eager", "eager"), ("eager", "deferred")]
        assert 24 < step <= 36
        assert value == 2 * 36 * 60


def test_other_calls_between_the_increments_end_it(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy)
        x = np.ones(2)

        def step():
            for _ in range(15):
                v.assign_add(1.0)
                sv.all_reduce(x)

        for _ in range(60):
            strategy.run(step)
        return [change[1:3] for change in v.explain().changes], [
            change[3] for change in v.explain().changes
        ]

    (changes, why), second = ranks(2, fn)
    assert (changes, why) == second
    # Where it is tried, it is left again, and then not tried for a while.
    assert changes in (
        [],
        [("eager", "deferred"), ("deferred", "eager")],
        [("eager", "deferred"), ("deferred", "eager")] * 2,
    )
    assert all("because of other calls" in one for one in why[1::2])


def test_spmd_decides_at_every_64th_increment(ranks):
    def fn():
        v = sv.Variable(np.zeros(2, np.float32), aggregation="SUM")
        x = np.ones(2, np.float32)
        write_heavy(v, x, 200)
        read_heavy(v, x, 130)
        write_heavy(v, x, 200)
        return [change[:3] for change in v.explain().changes], v.numpy().tolist()

    found = ranks(2, fn)
    assert found[0] == found[1]
    changes, value = found[0]
    assert [after for _, _, after in changes] == ["deferred", "eager", "deferred"]
    assert [step % 64 for step, _, _ in changes] == [0, 0, 0]
    assert changes[0][0] == 64
    assert value == [1060.0, 1060.0]


def test_one_replica_counts_nothing_and_sends_nothing():
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy)
        calls = strategy.communicator
        for _ in range(30):
            strategy.run(write_heavy, args=(v, 1.0))
        epoch = calls.next_call % 10**6
        return strategy.registry, v.explain().changes, sorted(v.explain().numbers), epoch, float(v)

    assert run_ranks(1, fn) == [
        (None, [], ["collectives", "nbytes", "reads", "replicas", "writes"], 0, 1800.0)
    ]


# -- what may go wrong -----------------------------------------------------------------------------


def test_variables_that_some_replicas_have_dropped_are_left_out(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        kept = made(strategy, name="kept")
        dropped = [made(strategy, name=f"v{number}") for number in range(3)]
        if sv.rank() == 0:
            del dropped[1]
            gc.collect()
        for _ in range(100):
            strategy.run(write_heavy, args=(kept, 1.0, 20))
        return [change[:3] for change in kept.explain().changes], sorted(strategy.registry.entries)

    found = ranks(2, fn)
    assert found[0] == found[1]
    assert found[0][1] == ["kept", "v0", "v2"]


def test_a_run_that_an_exception_leaves_is_counted_on_all_replicas_and_decides_nothing(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy)

        def step(number):
            if number in (4, 9) and sv.rank() == 1:
                raise ValueError("on purpose")
            if number not in (4, 9):  # who does not wait for the other in these does not hear of it
                write_heavy(v, 1.0)

        raised = []
        for number in range(30):
            try:
                strategy.run(step, args=(number,))
            except (ValueError, sv.MismatchError) as error:
                raised.append((number, type(error).__name__))
        return raised, [change[:3] for change in v.explain().changes], float(v)

    first, second = ranks(2, fn)
    assert first[0] == []
    assert second[0] == [(4, "ValueError"), (9, "ValueError")]
    assert first[1:] == second[1:]
    assert [after for _, _, after in first[1]] == ["deferred"]


def test_a_refused_increment_leaves_the_decision_points_where_they_are(ranks):
    def fn():
        v = sv.Variable(np.zeros(2), aggregation="SUM")
        write_heavy(v, np.ones(2), 100)
        v.explain()
        for number in range(100):
            with contextlib.suppress(sv.ConfigError, sv.MismatchError):
                v.assign_add(np.ones(3 if number == 50 and sv.rank() == 1 else 2))
        with contextlib.suppress(sv.MismatchError):
            v.numpy()
        write_heavy(v, np.ones(2), 100)
        return v.numpy().tolist()

    first, second = ranks(2, fn)
    assert first == second


# -- the record ------------------------------------------------------------------------------------


def test_a_log_on_a_full_disk_is_named_once_and_the_run_goes_on(ranks, capsys):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy, np.zeros(2), name="v")
        return [after for _, _, after, _ in phases(strategy, v, np.ones(2), (20, 20, 20))]

    first, second = ranks(2, fn, config=RuntimeConfig(auto_log="/dev/full"))
    assert first == second == ["deferred", "eager", "deferred"]
    said = capsys.readouterr().err
    assert said.count("cannot write /dev/full of SYNCVAR_AUTO_LOG: No space left on device") == 1


def test_a_log_that_cannot_be_written_is_an_error_before_the_first_run(ranks, tmp_path):
    config = RuntimeConfig(auto_log=str(tmp_path / "missing" / "file"))
    with pytest.raises(
        sv.ConfigError, match="of SYNCVAR_AUTO_LOG: No such file or directory; make the folder"
    ):
        ranks(2, lambda: made(sv.MirroredStrategy(), np.zeros(2), name="v"), config=config)


def test_decisions_are_logged_and_a_run_can_be_replayed(ranks, tmp_path, caplog):
    path = tmp_path / "auto.jsonl"

    def fn():
        strategy = sv.MirroredStrategy()
        v, w = made(strategy, np.zeros(2), name="v"), made(strategy, name="w")
        changes = phases(strategy, v, np.ones(2), (20, 20, 20))
        spmd = sv.Variable(0.0, aggregation="SUM", name="spmd")
        write_heavy(spmd, 1.0, 100)
        return (
            [one[:3] for one in changes],
            [one[:3] for one in spmd.explain().changes],
            changes[0][3],
            w.explain().changes,
        )

    with caplog.at_level(logging.INFO, "syncvar"):
        first = ranks(2, fn, config=RuntimeConfig(auto_log=str(path)))
    assert [after for _, _, after in first[0][0]] == ["deferred", "eager", "deferred"]
    said = [record.message for record in caplog.records if "AUTO" in record.message]
    assert len(said) == 4
    assert "variable 'v' eager -> deferred" in said[0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["to"] for line in lines if line.get("variable") == "v"] == [
        "deferred",
        "eager",
        "deferred",
    ]
    assert [line["at"] for line in lines if line.get("variable") == "spmd"] == ["write"]

    # Move one decision; the run that follows the file does it there.
    moved = []
    for line in lines:
        if line.get("variable") == "v" and line["to"] == "eager":
            line["step"] += 3
        moved.append(json.dumps(line) + "\n")
    path.write_text("".join(['{"strategy": "0", "begins": true}\n', *moved]))
    again = ranks(2, fn, config=RuntimeConfig(auto_replay=str(path)))
    expected = [
        (step + 3 if after == "eager" else step, before, after)
        for step, before, after in first[0][0]
    ]
    for changes, spmd, why, other in again:
        assert changes == expected
        assert spmd == first[0][1]
        assert why == "replayed"
        assert other == []


@pytest.mark.parametrize("text", ["no json\n", "[]\n", '{"strategy": 3, "at": "run"}\n', None])
def test_a_file_that_holds_no_decisions_is_refused_on_all_replicas(tmp_path, text):
    path = tmp_path / "auto.jsonl"
    if text is not None:
        path.write_text(text)

    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy)
        strategy.run(write_heavy, args=(v, 1.0))

    first, second = run_ranks(2, fn, config=RuntimeConfig(auto_replay=str(path)))
    if text == '{"strategy": 3, "at": "run"}\n':  # of another strategy
        assert (first, second) == (None, None)
        return
    assert isinstance(first, sv.ConfigError)
    assert str(path) in str(first)
    assert isinstance(second, sv.MismatchError | sv.PeerLost)


def test_explain_says_why_a_variable_stays_eager(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = made(strategy, np.zeros(3))
        first = v.explain().reason

        def take_turns():
            for _ in range(5):
                v.assign_add(np.ones(3))
                v.numpy()

        for _ in range(12):
            strategy.run(take_turns)
        said = v.explain()
        assert str(said).endswith(f"now: {said.reason}")
        v.pin("deferred")
        return first, said.mode, said.changes, said.reason, v.explain().reason

    for first, mode, changes, reason, pinned in ranks(2, fn):
        assert "nothing was decided yet" in first
        assert (mode, changes) == ("ON_WRITE (eager)", [])
        assert re.fullmatch(
            r"eager: decided at step \d+: (25|50) increments, \1 reads or other writes after one in (5|10) runs: "
            r"waiting does not pay \(at least \d+ us deferred, \d+ us eager\)",
            reason,
        )
        assert pinned == "deferred: v.pin('deferred') fixes it"


def test_explain_says_why_there_is_nothing_to_decide():
    def fn():
        strategy = sv.MirroredStrategy()
        copied, own = made(strategy, aggregation="NONE"), made(strategy, synchronization="ON_READ")
        return copied.explain().reason, own.explain().reason

    assert (
        run_ranks(2, fn)
        == [("eager: float32 with aggregation NONE has no increments that could wait", "")] * 2
    )
    assert run_ranks(1, fn) == [("eager: with one replica nothing has to travel", "")]


def test_in_shared_memory_nothing_waits_and_nothing_is_decided(monkeypatch):
    """An increment is sent there in the time that putting one into the queue takes; whoever pins it is obeyed all the same."""
    monkeypatch.undo()
    agreed = []
    monkeypatch.setattr(
        "syncvar.variables.deferral_tuner.DeferralTuner.decide", lambda *_: agreed.append(1)
    )

    def fn():
        strategy = sv.MirroredStrategy()
        v, w = made(strategy), sv.Variable(0.0, aggregation="SUM")
        for _ in range(30):
            strategy.run(write_heavy, args=(v, 1.0))
        write_heavy(w, 1.0, 200)
        said = w.explain()
        w.pin("deferred")
        write_heavy(w, 1.0, 5)
        return (
            float(v),
            v.explain().changes,
            said.mode,
            said.changes,
            said.reason,
            w.explain().numbers["pending"],
            float(w),
        )

    why = "eager: in shared memory an increment is sent in less time than it takes to let it wait"
    assert (
        run_ranks(2, fn, shared=True, timeout_s=60)
        == [(3600.0, [], "ON_WRITE (eager)", [], why, 5, 410.0)] * 2
    )
    assert not agreed
