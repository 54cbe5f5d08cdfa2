"""Ranks divided over hosts, and read back from what each rank says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.environment import HostMap, split_evenly
from syncvar.core.errors import ConfigError

maps = st.lists(st.integers(1, 6), min_size=1, max_size=6).map(lambda sizes: HostMap(tuple(sizes)))


@given(st.integers(1, 200), st.integers(1, 200))
def test_ranks_are_divided_evenly_and_none_is_lost(workers, hosts):
    if hosts > workers:
        with pytest.raises(ConfigError, match="each host needs at least one"):
            split_evenly(workers, hosts)
        return
    sizes = split_evenly(workers, hosts)
    assert len(sizes) == hosts
    assert sum(sizes) == workers
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(maps)
def test_a_map_reads_back_what_it_says(hosts):
    places = {rank: hosts.host_of(rank) for rank in range(sum(hosts.sizes))}
    assert HostMap.of_places(places) == hosts
    for rank, host in places.items():
        assert hosts.ranks(host)[hosts.local_rank(rank)] == rank
    assert hosts.blocks(range(sum(hosts.sizes))) == hosts.sizes


@pytest.mark.parametrize(
    "places", [{0: 1}, {0: 0, 1: 2}, {0: 0, 1: 1, 2: 0}, {0: -1}, {1: 0}, {0: 0, 1: 1, 2: 1, 3: 0}]
)
def test_ranks_of_a_host_that_do_not_follow_each_other_are_refused(places):
    with pytest.raises(ConfigError, match="SYNCVAR_HOST_INDEX"):
        HostMap.of_places(places)


def test_the_blocks_of_a_group():
    hosts = HostMap((2, 3))
    assert hosts.blocks((3, 2)) == (2,)
    assert hosts.blocks((4, 0, 1)) == (1, 2)
    assert hosts.blocks((0, 2, 1)) is None
