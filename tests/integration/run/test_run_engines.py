"""`sv.run` with an engine: results and failures come back, who is killed is lost to the others, all are started again.

The engine here has processes of this host; those of Ray and Dask are in tests/interop. Places are used again and again, so
that whatever a rank left in one of them would disturb the next.
"""

import os
import threading
import time

import numpy as np
import pytest

import syncvar as sv
from tests.support.process_engine import Processes
from tests.support.rank_scripts.engine_jobs import fails, is_killed


@pytest.fixture
def engine(monkeypatch):
    for name, value in {
        "LOST_AFTER_S": 20,
        "SUSPECT_AFTER_S": 10,
        "HEARTBEAT_INTERVAL_S": 0.1,
        "RESTART_DELAY_S": 0.01,
        "ABORT_GRACE_S": 5,
        "SHUTDOWN_TIMEOUT_S": 0.3,
    }.items():
        monkeypatch.setenv(f"SYNCVAR_{name}", str(value))
    made = Processes()
    yield made
    made.close()


class Kept(Processes):
    """One whose processes outlive a call, as those of a cluster do."""

    def close(self):
        self.is_closed = True


def who(scale):
    total = sv.all_reduce(np.arange(3.0) * scale)
    return (
        sv.rank(),
        sv.world_size(),
        sv.local_rank(),
        sv.host_count(),
        total,
        os.getpid(),
        threading.active_count(),
    )


def leaves_early(rank):
    if sv.rank() == rank:
        raise SystemExit(0)
    return 1


def idles():
    sv.shutdown()
    sv.init()  # anew, as whoever it was
    if sv.rank() == 1:
        time.sleep(60)
    return sv.all_reduce(1)


@pytest.mark.slow
def test_places_are_used_again_and_nothing_of_a_rank_stays_in_them(engine):
    kept = Kept()
    try:
        first = sv.run(who, 2, (2,), engine=kept)
        assert [one[:4] for one in first] == [(0, 2, 0, 1), (1, 2, 1, 1)]
        assert all((one[4] == [0, 4, 8]).all() for one in first)
        with pytest.raises(sv.RankFailed) as raised:
            sv.run(fails, 2, (1,), engine=kept)
        assert (raised.value.rank, raised.value.exit_code) == (1, 1), (
            "the cause, not who heard of it"
        )
        assert raised.value.last_lines.startswith("Traceback"), raised.value
        assert raised.value.last_lines.strip().endswith("ValueError: of its own")
        assert type(raised.value.__cause__) is ValueError
        assert raised.value.__cause__.args == ("of its own",)
        assert "syncvar/engines" not in raised.value.last_lines
        with pytest.raises(sv.LaunchError, match="rank 0 ended without returning a result"):
            sv.run(leaves_early, 2, (0,), engine=kept)
        with pytest.raises(sv.RankFailed) as late:
            sv.run(idles, 2, engine=kept, timeout=1)
        assert late.value.exit_code == 124
        assert "the time limit of 1 s passed" in str(late.value)
        assert len(sv.run(who, 2, (1,), engine=kept)) == 2, (
            "and the folder that killed processes have left is swept"
        )
        assert kept.is_closed
    finally:
        Processes.close(kept)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_who_is_killed_is_lost_to_the_others_and_all_are_started_again(
    rank, engine, tmp_path, caplog
):
    assert sv.run(is_killed, 3, (rank, str(tmp_path)), engine=engine, max_restarts=1) == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"lost-{other}" for other in range(3) if other != rank
    ]
    for path in tmp_path.iterdir():
        assert path.read_text().startswith(f"{rank} rank {rank} "), path.read_text()
    assert "restart 1 of 1" in caplog.text
    assert engine.is_closed


def test_what_would_only_come_again_is_not_tried_again(engine, caplog):
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(os.getenv, 1, (), {"no_such": 1}, engine=engine, max_restarts=3, timeout=60)
    assert "TypeError" in str(raised.value)
    engine.ends.clear()
    with pytest.raises(sv.RankFailed, match="cannot be returned"):
        sv.run(threading.Lock, 1, engine=engine, max_restarts=3)
    assert "not started again: ConfigError would come again" in caplog.text
    assert len(engine.asked) == 5, "four starts of the first, one of the second"


class Own:
    def __init__(self, value):
        self.value = value


def doubled(own):
    return Own(own.value * 2 + sv.rank())


def asks():
    return input("name? ")


def test_any_object_travels_with_an_engine_and_input_is_answered(engine):
    results = sv.run(doubled, 2, (Own(4),), engine=engine, pickle=True)
    assert [(type(one), one.value) for one in results] == [(Own, 8), (Own, 9)]
    with pytest.raises(sv.RankFailed, match=r"workers of sv\.run have no terminal to read from"):
        sv.run(asks, 1, engine=engine)


def test_several_ranks_in_one_process_are_refused(engine):
    class Twice(Processes):
        def gather(self, workers, timeout_s):
            return super().gather(1, timeout_s) * workers

    with pytest.raises(
        sv.LaunchError, match="2 ranks were given 1 processes: each rank needs one of its own"
    ):
        sv.run(who, 2, (1,), engine=Twice())


def test_a_part_is_not_played_again_by_another_process():
    from syncvar.runner.engines import CallPart, End, pack, unpack
    from syncvar.runner.remote_call import play

    end = unpack(End, play(pack(CallPart(0, {}, b"", [], os.getpid() + 1))))
    assert (end.error, end.exit_code) == ("PeerLost", 70)
    assert "started again by the engine" in end.message


def test_a_rank_cannot_be_where_one_is_already(engine):
    sv.init()
    try:
        from syncvar.runner.engines import CallPart, End, pack, unpack
        from syncvar.runner.remote_call import play

        end = unpack(End, play(pack(CallPart(0, {}, b"", [], os.getpid()))))
        assert end.error == "UsageError"
        assert "is a rank already: each rank needs a process of its own" in end.message
    finally:
        sv.shutdown()
