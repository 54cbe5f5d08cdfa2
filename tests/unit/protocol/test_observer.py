"""Rounds of questions to the ranks, and what follows from the answers."""

import pytest

from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.observer import Observer

BOOT = "b"


class Job:
    """An observer with two ranks and a clock."""

    def __init__(self, interval_s=5.0):
        self.now = 100.0
        self.observer = Observer(interval_s, BOOT, lambda: int(self.now * 1e9))
        self.made = {}

    def ask(self, ranks=(0, 1)):
        return self.observer.due(ranks, self.now)

    def answer(self, rank, calls=(), number=None, *, boot=BOOT, skew_s=0.0, **fields):
        """Answer as a rank: `calls` are (call, began, ended) in seconds before now; 0: running."""
        own = self.now + skew_s
        flat = [
            part
            for call, began, ended in calls
            for part in (
                0,
                call,
                int((own - began) * 1e9),
                int((own - ended) * 1e9) if ended else 0,
                int((own - began) * 1e9),
            )
        ]
        done = [one for one in calls if one[2]]
        spent = sum(int((began - ended) * 1e9) for _, began, ended in done)
        self.made[rank] = self.made.get(rank, 0) + len(done)
        message = {
            "number": self.observer.rounds if number is None else number,
            "received_ns": int(own * 1e9),
            "answered_ns": int(own * 1e9),
            "boot": boot,
            "window_ns": 1_000_000_000,
            "counted": len(done),
            "made": self.made[rank],
            "steps": 0,
            "last_call": "barrier (call 1)",
            "is_in_call": False,
            "age_s": 0.5,
            "calls": flat,
            "groups": {0: [0, 1]},
            "kind_texts": ["barrier", "", "shm"] if done else [],
            "kind_numbers": [len(done), 80, spent] if done else [],
            "sent": {},
            **fields,
        }
        self.observer.record(rank, parse_message(pack_message("observation", **message)), self.now)

    def round(self, late=0.4):
        """Let rank 1 enter each call so many seconds after rank 0."""
        number = self.observer.rounds
        assert self.ask()
        ended = 0.9 - abs(late) - 0.01
        self.answer(0, [(number, 0.9 + min(late, 0), ended)])
        self.answer(1, [(number, 0.9 - max(late, 0), ended)])


@pytest.fixture
def job():
    return Job()


def test_rounds_come_at_the_interval_and_when_wanted(job):
    assert set(job.ask()) == {0, 1}
    assert job.ask() == {}, "a round is open"
    job.answer(0)
    job.answer(1)
    assert job.observer.rounds == 1
    job.now += 4.9
    assert job.ask() == {}
    wanted = job.observer.want(job.now)
    assert wanted == 2
    assert set(job.ask()) == {0, 1}
    assert job.observer.want(job.now) == wanted, "two commands share a round"


def test_a_flood_of_questions_makes_no_flood_of_rounds(job):
    job.round()
    assert job.observer.want(job.now + 0.1) == job.observer.rounds, "the answers are new enough"
    assert job.observer.want(job.now + 0.3) == job.observer.rounds + 1


def test_zero_interval_asks_only_when_wanted():
    job = Job(interval_s=0)
    assert job.ask() == {}
    job.observer.want(job.now)
    assert set(job.ask()) == {0, 1}


def test_a_round_ends_without_a_silent_rank(job):
    job.ask()
    job.answer(0)
    job.now += 0.9
    job.ask()
    assert job.observer.rounds == 0
    job.now += 0.2
    job.ask()
    assert job.observer.rounds == 1
    job.answer(1, number=0)
    assert 1 not in job.observer.latest, "its answer came too late"


def test_a_late_answer_does_not_stand_for_that_of_the_next_round(job):
    job.ask()
    job.answer(0)
    job.now += 1.1
    job.ask()
    job.now += 5.0
    assert set(job.ask()) == {0, 1}
    job.answer(0)
    job.answer(1, number=0)
    assert job.observer.rounds == 1, "rank 1 has not answered yet"
    job.answer(1)
    assert job.observer.rounds == 2
    assert 1 in job.observer.latest


def test_a_round_ends_with_the_rank_that_it_waits_for(job):
    job.ask()
    job.answer(0)
    job.ask(ranks=[0])
    assert job.observer.rounds == 1


def test_nobody_to_ask_makes_an_empty_round(job):
    wanted = job.observer.want(job.now)
    assert job.ask(ranks=()) == {}
    assert job.observer.rounds == wanted
    assert job.observer.shares() == {}
    assert job.observer.window_s == 0


def test_shares_rates_and_kinds(job):
    job.round()
    shares = job.observer.shares()
    assert shares[0] == {1: pytest.approx(0.4)}
    assert shares[1] == {}
    job.now += 2.0
    job.observer.want(job.now)
    job.round()
    rates = job.observer.rates(0)
    assert rates.calls_per_s == pytest.approx(2 / 3), "a window of 1 s, then 1 call in 2 s"
    assert rates.call_share == pytest.approx(0.41)
    calls, nbytes, share = job.observer.kinds()["barrier", "", "shm"]
    assert (calls, nbytes) == pytest.approx((4 / 3, 80 * 4 / 3))
    assert share == pytest.approx((0.41 + 0.01) / 2)
    assert job.observer.window_s == 3.0


def test_links_from_the_bytes_of_two_rounds(job):
    job.ask()
    job.answer(0, sent={1: 1000})
    job.answer(1)
    job.now += 5
    job.ask()
    job.answer(0, sent={1: 6000})
    job.answer(1, sent={0: 50})
    assert job.observer.links() == {(0, 1): 1000.0, (1, 0): 10.0}
    job.now += 1
    job.observer.want(job.now)
    job.ask()
    job.answer(0, sent={1: 9000})
    job.answer(1, sent={0: 50})
    mean = {(0, 1): 8000 / 6, (1, 0): 50 / 6}
    assert job.observer.links() == pytest.approx(mean), "of both rounds, 5 s and 1 s"


def test_a_straggler_is_named_once_and_after_a_while(job):
    named = []
    for _ in range(12):
        job.round()
        named.append(job.observer.take_straggler(job.now))
        job.now += 5
    found = [one for one in named if one is not None]
    assert [one.rank for one in found] == [1]
    assert named.index(found[0]) >= 3, "not after a slow beginning"
    assert job.observer.straggler.rank == 1, "it is still late"
    for _ in range(8):
        job.round(late=0.001)
        assert job.observer.take_straggler(job.now) is None
        job.now += 5
    assert job.observer.straggler is None


def test_one_long_wait_makes_no_straggler(job):
    for _ in range(4):
        job.round(late=0.001)
        job.now += 5
    call = job.observer.rounds
    for second in (5, 10):  # rank 1 saves a checkpoint
        job.ask()
        job.answer(0, [(call, second, 0)], window_ns=5 * 10**9)
        job.answer(1, window_ns=5 * 10**9)
        assert job.observer.take_straggler(job.now) is None
        assert job.observer.straggler is None
        assert job.observer.shares()[0][1] > 0.5
        job.now += 5


def test_ranks_that_take_turns_are_no_stragglers(job):
    for late in (0.7, -0.3, 0.7, 0.7, -0.3, 0.7, 0.7):
        job.round(late)
        assert job.observer.take_straggler(job.now) is None
        job.now += 5
    assert job.observer.straggler is None


def test_numbers_beyond_a_message_are_no_clock(job):
    job.ask()
    job.answer(0)
    times = {"received_ns": 2**64 - 1, "answered_ns": 2**64 - 1}
    job.answer(1, boot="another", made=2**64 - 1, kind_numbers=[-1, 2, 3, 4], **times)
    assert not job.observer.offsets[1].is_known
    job.now += 5
    for fields in job.ask().values():
        pack_message("observe", **fields)


def test_clocks_of_other_hosts(job):
    job.ask()
    job.now += 0.010
    job.answer(0)
    job.answer(1, boot="another", skew_s=1000.0)
    assert job.observer.offsets[0] == (0, 0)
    offset = job.observer.offsets[1]
    assert abs(offset.offset_ns + 1000 * 10**9) <= offset.error_ns <= 6_000_000
    job.now += 0.3  # sooner than the interval: the rank needs the offset for its records
    question = job.ask()[1]
    assert question["offset_ns"] == offset.offset_ns
    assert question["error_ns"] == offset.error_ns


def test_waits_are_compared_on_one_clock(job):
    job.ask()
    job.answer(0, [(7, 0.9, 0.5)])
    job.answer(1, [(7, 0.6, 0.5)], boot="another", skew_s=-500.0)
    assert job.observer.shares()[0] == {1: pytest.approx(0.3, abs=0.001)}
