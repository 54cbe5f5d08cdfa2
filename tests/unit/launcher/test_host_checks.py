"""The number of workers on each host: by slots or one host after another, never above a host's limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.host_checks import HostCapacity, place_workers
from syncvar_launcher.options.option_table import MAP_BY


def rooms(*sizes):
    return [
        HostCapacity(f"n{index}", *(size if isinstance(size, tuple) else (size,)))
        for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "workers", "by_slot", "by_host"),
    [
        ((4, 4), 8, (4, 4), (4, 4)),
        ((4, 4), 3, (3, 0), (2, 1)),
        ((1, 3), 4, (1, 3), (1, 3)),
        ((3, 1, 2), 5, (3, 1, 1), (2, 1, 2)),
        ((2, 2), None, (2, 2), (2, 2)),
        (((1, 4), 1), 4, (3, 1), (3, 1)),
        (((2, 3), (2, 3)), 5, (3, 2), (3, 2)),
        (((4, 2), 1), 5, (4, 1), (4, 1)),
    ],
)
def test_how_workers_are_dealt(sizes, workers, by_slot, by_host):
    assert place_workers(rooms(*sizes), workers) == by_slot
    assert place_workers(rooms(*sizes), workers, "host") == by_host


def test_too_many_are_refused_with_what_there_is():
    with pytest.raises(ConfigError) as raised:
        place_workers(rooms(2, (1, 3)), 6)
    assert str(raised.value) == (
        "6 workers have no place: the hosts have 5 slots (n0 2, n1 3); write --workers 5, or give a host more: name:N in -H, slots=N or max_slots=N in a host file [SV-101]"
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(1, 12)), min_size=1, max_size=5),
    st.data(),
)
def test_all_have_a_place_and_no_host_has_more_than_it_may(sizes, data):
    hosts = rooms(*sizes)
    most = [max(slots, limit or 0) for slots, limit in sizes]
    workers = data.draw(st.integers(1, sum(most)))
    for map_by in MAP_BY:
        found = place_workers(hosts, workers, map_by)
        assert sum(found) == workers
        assert all(one <= limit for one, limit in zip(found, most, strict=True))
        if workers <= sum(slots for slots, _ in sizes):
            assert all(one <= slots for one, (slots, _) in zip(found, sizes, strict=True))
