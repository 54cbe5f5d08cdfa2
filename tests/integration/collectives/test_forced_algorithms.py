"""A setting that demands algorithms for the whole job; a forked child and its parent's variables; an op that is replaced."""

import pytest

FORCED = """
import numpy as np
import syncvar as sv
from syncvar.bootstrap.process import current

world = current().world
assert world.forced("all_reduce") == "ring" and world.forced("all_gather") == "dissemination"
assert sv.all_reduce(np.ones(5)).tolist() == [3.0] * 5
assert sv.all_reduce(np.ones(5), reproducible=True).tolist() == [3.0] * 5
assert sv.all_gather(np.ones(sv.rank())).size == 3  # uneven: the demand cannot hold
assert sv.all_gather_object(sv.rank()) == [0, 1, 2]
print("forced")
"""
FORKED = """
import os
import numpy as np
import syncvar as sv

x = sv.Variable(np.zeros(4), synchronization="NONE")
child = os.fork()
if child == 0:
    x.assign([7, 7, 7, 7])
    os._exit(0 if x.numpy().tolist() == [7.0] * 4 else 3)
assert os.waitpid(child, 0)[1] == 0
assert x.numpy().tolist() == [0.0] * 4
sv.barrier()
y = np.array([sv.rank() + 1.0])
for function, wanted in ((lambda left, right: left, 1.0), (lambda left, right: right, 2.0)):
    sv.register_op("mine", function, replace=True)
    assert [float(sv.all_reduce(y, "mine")[0]) for _ in range(3)] == [wanted] * 3
sv.register_op("mine", np.maximum, element_shape=(2,) if sv.rank() else (), replace=True)
try:
    sv.all_reduce(np.ones(2), "mine")
except sv.MismatchError:
    print("apart")
"""


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_a_demand_for_the_job_holds_where_it_can(launch, transport):
    demand = "all_reduce:ring, all_gather:dissemination"
    job = launch(
        FORCED, workers=3, env={"SYNCVAR_ALGORITHM": demand, "SYNCVAR_TRANSPORT": transport}
    )
    assert job.wait() == 0, str(job)
    assert job.out.count("forced") == 3


WAITING = """
import os
import numpy as np
import probe, syncvar as sv

kind, count = sys.argv[1], int(sys.argv[2])
rank = sv.rank()
if kind == "recv":
    work = sv.recv(1 - rank, async_op=True)
else:
    if rank:
        probe.gate("forked")  # rank 0 forks while the call is under way
    work = sv.all_reduce(np.ones(count), async_op=True)
ends, given = os.pipe()
child = os.fork()
if child == 0:
    told = []
    for what in (lambda: work.wait(timeout=5.0), work.wait, work.done):
        try:
            told.append(str(what() is not None))
        except sv.UsageError as error:
            told.append("refused" if "forked" in str(error) else str(error))
    os.write(given, ",".join(told).encode())
    os._exit(0)
told = os.read(ends, 1000).decode()
assert os.waitpid(child, 0)[1] == 0
if rank == 0:
    probe.open_gate("forked")
if kind == "recv":
    sv.send(np.ones(count), 1 - rank)
result = work.wait()
probe.note("over", told=told.split(","), sum=float(result.sum()), after=float(sv.all_reduce(1.0)))
"""


@pytest.mark.parametrize(
    ("kind", "count", "kernel"),
    [("recv", 5, "auto"), ("all_reduce", 500_000, "python")]
    + [
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("recv", 5, "python"),
            ("all_reduce", 500_000, "auto"),
            ("all_reduce", 10, "auto"),
            ("all_reduce", 10, "python"),
        )
    ],
)
def test_a_forked_child_does_not_wait_for_its_parents_calls(launch, kind, count, kernel):
    """A short call that is over by then may give its result there, from the memory that the child has a copy of."""
    job = launch(
        "import sys\n" + WAITING,
        arguments=[kind, str(count)],
        env={"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {},
    )
    assert job.wait(120) == 0, str(job)
    seen = {event["rank"]: event for event in job.events("over")}
    for rank in (0, 1):
        assert seen[rank]["sum"] == count * (1 if kind == "recv" else 2), str(job)
        assert seen[rank]["after"] == 2.0
        assert set(seen[rank]["told"]) <= {"refused", "True"}, str(job)
    if count != 10:
        assert seen[0]["told"] == ["refused"] * 3, str(job)


def test_a_forked_child_writes_to_its_own_memory(launch):
    job = launch(FORKED, workers=2)
    assert job.wait() == 0, str(job)
    assert job.out.count("apart") == 2
