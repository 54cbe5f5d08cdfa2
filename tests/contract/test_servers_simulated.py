"""Workers and servers in virtual time: nothing is lost, doubled or seen by halves, whatever the network and crashes do."""

import pytest
import simulated_jobs


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
