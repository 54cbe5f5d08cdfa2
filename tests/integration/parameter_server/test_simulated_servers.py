"""Workers and servers in virtual time: nothing is lost, doubled or seen by halves, whatever the network and crashes do."""

import pytest

from tests.support import simulated_jobs


@pytest.mark.parametrize("block", range(5))
def test_ten_seeds(block):
    for seed in range(block * 10, block * 10 + 10):
        simulated_jobs.run(seed, through_wire=seed % 5 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_hundred_seeds(block):
    for seed in range(1000 + block * 100, 1100 + block * 100):
        simulated_jobs.run(seed)


def test_a_seed_gives_the_same_messages_at_the_same_times_again():
    digests = [simulated_jobs.run(seed).digest for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]


def test_servers_are_lost_one_after_another_once_what_the_one_before_held_has_a_copy_again():
    jobs = {seed: simulated_jobs.job_of(seed) for seed in range(200)}
    seeds = [
        seed
        for seed, job in jobs.items()
        if job.replicas and job.kills and job.more and job.servers > 2
    ][:12]
    lost = [len(simulated_jobs.run(seed, through_wire=True).lost) for seed in seeds]
    assert max(lost) == 3
    assert sum(count > 1 for count in lost) >= 6, lost
