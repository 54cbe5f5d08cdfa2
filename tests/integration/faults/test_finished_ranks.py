"""A rank that has finished is told to those who wait for it, and to those who call it later: on every path, by every call."""

import pytest

from tests.support.launching import check_bound

SCRIPT = """
import numpy as np
import syncvar as sv
from probe import failure, gate, note

ODD, RANK, SIZE = {odd}, sv.rank(), sv.world_size()
others = [rank for rank in range(SIZE) if rank != ODD]
pairs = {{rank: sv.new_group([rank, ODD]) for rank in others}}
turned = sv.new_group(range(SIZE - 1, -1, -1))  # over hosts: composed
mixed = sv.new_group([*range(0, SIZE, 2), *range(1, SIZE, 2)])  # over hosts: over links alone
x, long = np.ones(2 * SIZE), np.ones(60_000)


def calls(group):
    for array in (x, long):
        yield lambda: sv.all_reduce(array, group=group)
        yield lambda: sv.reduce(array, group=group)
        yield lambda: sv.broadcast(array, root=1, group=group)
        yield lambda: sv.all_gather(array, group=group)
        yield lambda: sv.gather(array, group=group)
        yield lambda: sv.scatter(array, group=group)
        yield lambda: sv.reduce_scatter(array, group=group)
        yield lambda: sv.all_to_all(array, group=group)
        yield lambda: sv.scan(array, group=group)
        yield lambda: sv.exscan(array, group=group)
    yield lambda: sv.barrier(group=group)


for group in (None, turned, mixed):
    for call in calls(group):
        call()
note("ready")
if RANK == ODD:
    gate("end")
    note("ends")
    raise SystemExit(0)
waiting = [lambda: sv.recv(ODD, tag=3), lambda: sv.all_reduce(x, group=pairs[RANK]), lambda: sv.send(long, ODD),
           lambda: sv.reduce(long, group=mixed)]
first = waiting[others.index(RANK) % 4]
seen = []
for call in [first, *(call for group in (None, turned, mixed) for call in calls(group)), *waiting]:
    error = failure(call)
    seen.append([type(error).__name__, getattr(error, "rank", -1), getattr(error, "reason", "")])
note("seen", seen=seen)
"""

LAYOUTS = {
    "links": (4, {"env": {"SYNCVAR_TRANSPORT": "zmq"}}),
    "two hosts": (4, {"options": ["--fake-hosts", "2"]}),
    "three hosts": (5, {"options": ["--fake-hosts", "3"]}),
}


@pytest.mark.parametrize(
    "layout", ["links", pytest.param("two hosts", marks=pytest.mark.slow), "three hosts"]
)
@pytest.mark.parametrize("odd", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_finished_is_told(launch, layout, odd):
    workers, options = LAYOUTS[layout]
    job = launch(SCRIPT.format(odd=odd), workers=workers, **options)
    job.await_events("ready", workers)
    job.open_gate("end")
    assert job.wait() == 0, str(job)
    seen = {event["rank"]: event["seen"] for event in job.events("seen")}
    assert set(seen) == set(range(workers)) - {odd}, str(job)
    for rank, errors in seen.items():
        assert errors == [["PeerLost", odd, "finished"]] * len(errors), f"rank {rank}: {errors}"
    (ended,) = (event["at"] for event in job.events("ends"))
    for rank in seen:
        check_bound(f"finished-{layout}-{rank}", job.events("raised", rank)[0]["at"] - ended, 1.0)
