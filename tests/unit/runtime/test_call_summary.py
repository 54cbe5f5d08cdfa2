"""What a rank answers about its last calls."""

import pytest

from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.wait_shares import is_sampled
from syncvar.runtime import call_summary
from syncvar.runtime.call_record import EPOCH_CALLS, CallInfo
from syncvar.runtime.call_summary import ENTRIES_MAX, CallSummary
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.recorder import RING, Recorder
from syncvar.runtime.sequence import UNKNOWN_CALL

BARRIER = CallInfo(CollectiveSpec("barrier"), 0, (0, 1))
QUESTION = {"number": 0, "offset_ns": 0, "error_ns": -1}


class Rank:
    """A recorder, and the time at which the launcher asks."""

    def __init__(self, monkeypatch):
        self.now = 10**9
        self.recorder = Recorder()
        self.summary = CallSummary(self.recorder)
        monkeypatch.setattr(call_summary, "monotonic_ns", lambda: self.now)

    def add(self, call, lasts_ns=10, info=BARRIER):
        self.now += lasts_ns
        self.recorder.add((info, call, self.now - lasts_ns, self.now, 0))

    def answer(self):
        self.now += 1000
        fields = self.summary.fields(QUESTION, {}, {})
        return parse_message(pack_message("observation", **fields))


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def test_the_last_call_of_a_rank_that_computes(rank):
    assert rank.answer()["last_call"] == ""
    rank.add(0)
    rank.answer()
    rank.now += 10**9
    answer = rank.answer()
    assert answer["last_call"] == "barrier (call 1)"
    assert answer["age_s"] == pytest.approx(1, rel=1e-3)
    assert answer["counted"] == 0
    assert answer["window_ns"] == 10**9 + 1000


def test_an_answer_fits_into_a_message_whatever_the_calls_are(rank):
    for call in range(RING):
        spec = CollectiveSpec("x" * 100_000, variable=f"v{call}" * 50)
        rank.add(0, call, CallInfo(spec, call, tuple(range(3000))))
    answer = rank.answer()
    assert sum(answer["kind_numbers"][0::3]) == ENTRIES_MAX
    assert answer["kind_texts"][-3:] == ["other calls", "", ""]
    assert answer["counted"] == ENTRIES_MAX


def test_the_sample_has_all_long_waits(rank):
    for call in range(1500):
        rank.add(call, 100_000 if call % 300 == 7 else 10)
    calls = rank.answer()["calls"][1::5]
    recent = range(1500 - ENTRIES_MAX, 1500)
    assert set(calls) >= {call for call in recent if call % 300 == 7 or is_sampled(call, 16)}
    assert len(calls) < 200
    assert calls[-1] == 1499


def test_started_calls_that_overlap_take_their_time_once(rank):
    rank.add(0, 1000)
    rank.recorder.add((BARRIER, 1, rank.now - 900, rank.now + 100, 0))
    assert rank.answer()["kind_numbers"] == [2, 0, 1100]


def test_a_window_is_as_long_as_the_ring_goes_back(rank):
    rank.add(0)
    rank.answer()
    rank.now += 10**6
    for call in range(500):
        rank.add(call)
    assert rank.answer()["window_ns"] == 10**6 + 500 * 10 + 1000
    for call in range(RING):
        rank.add(call)
    assert rank.answer()["window_ns"] == ENTRIES_MAX * 10 + 1000


def test_numbers_that_belong_to_no_call_are_not_counted(rank):
    ask = rank.summary.fields
    answers = [ask(QUESTION, {0: 2}, {})]
    # `strategy.run` ends or begins a block of numbers, and no call has come since.
    rank.recorder.numbers.skip(0, 3, EPOCH_CALLS)
    answers.append(ask(QUESTION, {0: EPOCH_CALLS - 1}, {}))
    answers.append(ask(QUESTION, {0: EPOCH_CALLS + 1}, {}))
    rank.recorder.numbers.skip(0, EPOCH_CALLS + 2, 2 * EPOCH_CALLS)
    # Many calls outside of strategy.run are in blocks too.
    answers.append(ask(QUESTION, {0: 9 * EPOCH_CALLS}, {}))
    assert [one["made"] for one in answers] == [3, 3, 5, 7 * EPOCH_CALLS + 6]
    assert [one["steps"] for one in answers] == [0, 0, 0, 1]


def test_groups_whose_number_nobody_knows_do_not_count(rank):
    """Of groups that are about to be collected; many of them once made a number that no message can have."""
    entered = {0: 4, **dict.fromkeys(range(1, 20), UNKNOWN_CALL)}
    fields = rank.summary.fields(QUESTION, entered, {})
    assert parse_message(pack_message("observation", **fields))["made"] == 5
