"""Silence: suspicion, then loss, each told once; a sign of life ends it."""

from syncvar.protocol.membership import Health


def test_silence_is_suspected_then_lost_and_each_is_told_once():
    health = Health(5.0, 15.0)
    told = [
        (now, opinion.is_lost)
        for now in range(30)
        if (opinion := health.observe(1, "stopped", float(now)))
    ]
    assert told == [(5, False), (15, True)]


def test_a_sign_of_life_begins_the_count_anew():
    health = Health(5.0, 15.0)
    for now in range(5):
        assert health.observe(1, "stopped", float(now)) is None
    assert health.observe(1, "", 5.0) is None
    assert [health.observe(1, "stopped", now) for now in (6.0, 10.9)] == [None, None]
    assert health.observe(1, "stopped", 11.0).is_lost is False


def test_ranks_are_counted_apart_and_reasons_name_time_and_sign():
    health = Health(5.0, 15.0)
    health.observe(1, "stopped", 0.0)
    health.observe(2, "stopped", 3.0)
    opinion = health.observe(1, "its process is stopped", 6.0)
    assert (opinion.rank, opinion.reason) == (
        1,
        "suspect: silent for 6.0 s: its process is stopped",
    )
    assert health.observe(2, "stopped", 6.0) is None


def test_equal_limits_lose_without_suspicion_and_endless_ones_do_nothing():
    assert Health(0.0, 0.0).observe(0, "x", 1.0).is_lost
    health = Health(float("inf"), float("inf"))
    assert all(health.observe(0, "x", float(now)) is None for now in range(0, 10**6, 10**4))


def test_a_number_that_a_new_process_has_can_be_lost_again():
    health = Health(5.0, 15.0)
    health.observe(0, "stopped", 0.0)
    assert health.observe(0, "stopped", 20.0).is_lost
    assert health.observe(0, "", 21.0) is None
    assert health.observe(0, "stopped", 22.0) is None
    assert health.observe(0, "stopped", 40.0).is_lost
