"""When a start counts as standing still, and when it has failed; time is an argument."""

from syncvar.core.process_ids import server_number
from syncvar_launcher.job.start_progress import StartProgress


def test_it_is_told_after_the_notice_then_after_twice_as_long_and_fails_at_the_limit():
    progress = StartProgress([0, 1], 5.0, 30.0, 100.0)
    assert progress.look(104.9) is None
    told = [(now, one) for now in range(105, 140) if (one := progress.look(float(now))) is not None]
    assert [(now, one.waited_s, one.has_failed) for now, one in told[:4]] == [
        (105, 5.0, False),
        (110, 10.0, False),
        (120, 20.0, False),
        (130, 30.0, True),
    ]
    assert told[0][1].missing == (0, 1)


def test_each_step_begins_the_wait_anew_and_the_last_one_ends_it():
    progress = StartProgress([0, 1], 5.0, 30.0, 0.0)
    progress.advance(4.0)
    assert progress.due() == 9.0
    progress.reached(0, 8.0)
    progress.reached(0, 12.0)  # a second time it is no progress
    assert progress.due() == 13.0
    assert progress.look(13.0).missing == (1,)
    progress.reached(1, 14.0)
    assert progress.due() == float("inf")
    assert progress.look(1000.0) is None
    progress.expect(1, 2000.0)
    assert progress.look(2005.0).missing == (1,)


def test_many_processes_are_told_in_one_sentence():
    overdue = StartProgress([*range(20), server_number(0)], 5.0, 30.0, 0.0).look(5.0)
    sentence = overdue.sentence((f"rank {rank}: process {rank}" for rank in range(21)), [])
    assert sentence.startswith(
        "the start has made no progress for 5 s: ranks 0-19 and server 0 have not reached their script"
    )
    assert sentence.endswith("rank 7: process 7; 13 more)")
