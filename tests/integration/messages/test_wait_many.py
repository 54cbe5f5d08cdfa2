"""sendrecv, wait_any, wait_all, and a root by position, between real processes."""

_EXCHANGE = """
import numpy as np, syncvar as sv
from probe import note

rank, size = sv.rank(), sv.world_size()
right, left = (rank + 1) % size, (rank - 1) % size
made = {}
for count in (3, 1_000, 1_000_000):  # up to eager_bytes a send does not wait for its receiver, and 8 MB do
    x = np.full(count, float(rank))
    y = sv.sendrecv(x, right, left)
    made[f"ring {count}"] = [y.size, float(y.min()), float(y.max())]
    same = sv.sendrecv(x, right, left, tag=5, out=x)
    made[f"in place {count}"] = [same is x, float(x.min()), float(x.max())]
    up = rank + 1 if rank + 1 < size else None
    down = rank - 1 if rank else None
    edge = sv.sendrecv(np.full(count, 10.0 + rank), up, down, tag=1 + rank, recv_tag=rank)
    made[f"edges {count}"] = None if edge is None else [edge.size, float(edge[-1])]
made["itself"] = float(sv.sendrecv(2.5, rank, rank))
made["root"] = [
    float(sv.broadcast(float(rank), 2)), float(sv.scatter(np.arange(size) * 1.0, 1)[0]),
    None if (sums := sv.reduce(1.0, "sum", 3)) is None else float(sums),
    None if (rows := sv.gather(np.ones(1), 3)) is None else rows.tolist(),
]
note("exchange", made=made)
"""


def test_neighbours_exchange_arrays_of_all_sizes(launch):
    job = launch(_EXCHANGE, workers=4)
    assert job.wait(120) == 0, str(job)
    for rank in range(4):
        (event,) = job.events("exchange", rank)
        made = event["made"]
        left = float((rank - 1) % 4)
        for count in (3, 1_000, 1_000_000):
            assert made[f"ring {count}"] == [count, left, left], (rank, made)
            assert made[f"in place {count}"] == [True, left, left], (rank, made)
            assert made[f"edges {count}"] == (None if rank == 0 else [count, 9.0 + rank]), (
                rank,
                made,
            )
        assert made["itself"] == 2.5
        assert made["root"] == [
            2.0,
            float(rank),
            *((4.0, [1.0] * 4) if rank == 3 else (None, None)),
        ], (rank, made)


_ANY = """
import numpy as np, syncvar as sv
from probe import note

rank, size = sv.rank(), sv.world_size()
NEXT = {3: 1, 1: 2, 2: None}  # who sends after whom
COUNTS = {3: 10, 1: 1_000_000, 2: 10}  # 8 MB wait for their receiver
pair = sv.new_group([0, 1])

def text(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if rank == 0:
    works = [sv.recv(source, tag=1, async_op=True) for source in (1, 2, 3)]
    order, sizes = [], []
    sv.send(1.0, 3, tag=3)
    while any(work is not None for work in works):
        index = sv.wait_any(works)
        order.append(index + 1)
        sizes.append(works[index].wait().size)
        works[index] = None
        if NEXT[index + 1]:
            sv.send(1.0, NEXT[index + 1], tag=3)
    own = sv.recv(0, async_op=True)
    errors = [
        text(sv.wait_any, works), text(sv.wait_any, [own]), text(sv.wait_any, [own, 1.0]), text(sv.wait_all, own),
        text(sv.wait_all, 3), text(sv.broadcast, 1.0, np.ones(2)), text(sv.recv), text(sv.all_reduce, 1.0, np.ones(2)),
    ]
    sv.send(9.0, 0)
    note("any", order=order, sizes=sizes, errors=errors, own=[sv.wait_any([None, own]), float(own.wait())])
else:
    sv.recv(0, tag=3)
    sv.send(np.ones(COUNTS[rank]), 0, tag=1)
    errors = [text(sv.broadcast, 1.0), text(sv.all_reduce, 1.0)]  # rank 0 makes them with a wrong argument
started = [sv.all_reduce(float(rank), async_op=True), None, sv.all_gather(rank, async_op=True), sv.barrier(async_op=True)]
first = sv.wait_any(started)
results = sv.wait_all(started)
note("all", first=first, results=[float(results[0]), results[1], results[2].tolist(), results[3]])
if rank < 2:  # a call that fails, among others: the others are waited for
    works = [sv.broadcast(np.ones(2 + rank), group=pair, async_op=True), sv.all_reduce(1.0, group=pair, async_op=True)]
    failed = text(sv.wait_all, works)
    note("failed", error=failed, other=float(works[1].wait()))
sv.barrier()
"""


def test_waits_for_the_first_and_for_all(launch):
    job = launch(_ANY, workers=4)
    assert job.wait(120) == 0, str(job)
    (event,) = job.events("any")
    assert event["order"] == [3, 1, 2], event
    assert event["sizes"] == [10, 1_000_000, 10]
    assert event["own"] == [1, 9.0]
    empty, own, number, one, no_list, root, source, op = event["errors"]
    assert empty.startswith(
        "ConfigError: wait_any: works holds no started call, but 3 times None"
    ), empty
    assert own.startswith("UsageError: recv from rank 0, which is this one"), own
    assert (
        number
        == "ConfigError: wait_any: works[1] must be what a call with async_op=True returns, not 1.0 [SV-101]"
    )
    assert (
        one
        == "ConfigError: wait_all takes a list of started calls, not one: write work.wait() [SV-101]"
    )
    assert (
        no_list
        == "ConfigError: wait_all takes a list of what calls with async_op=True return, not 3 [SV-101]"
    )
    assert (
        "root must be an integer, not array([1., 1.]): pass the array for the result by name, out=buffer"
        in root
    ), root
    assert source.startswith("ConfigError: source must be a rank, not None"), source
    assert "sv.recv_any()" in source, source
    assert "not array([1., 1.]): pass the array for the result by name, out=buffer" in op, op
    events = job.events("all")
    assert len(events) == 4
    assert all(one["first"] in (0, 2, 3) for one in events)
    assert [one["results"] for one in events] == [[6.0, None, [0, 1, 2, 3], None]] * 4
    failed = job.events("failed")
    assert len(failed) == 2
    for one in failed:
        assert one["error"].startswith("MismatchError"), one
        assert one["other"] == 2.0
