"""Messages that nobody receives are named at the end: with sender, receiver, tag and the line of the send."""

import pytest

SENDING = """
import sys
import numpy as np
import syncvar as sv

x = np.ones(int(sys.argv[1]))
if sv.rank() == 0:
    sv.send(x, 1, tag=6)
    sv.send_object({"a": 1}, 1, tag=9)
    for _ in range(5):
        sv.send(x, 1, tag=7)
    sv.send(x, 0, tag=3)
    if sys.argv[2] == "late":
        sv.send(np.ones(100_000), 1, tag=8, async_op=True)
elif sv.rank() == 1:
    sv.recv_object(0, tag=9)
    sv.recv(0, tag=7)
if sys.argv[2] == "barrier":
    sv.barrier()
if sys.argv[2] == "shutdown":
    sv.shutdown()
    sv.init()
"""


@pytest.mark.parametrize(
    ("transport", "end"),
    [("auto", "barrier"), ("auto", "late"), ("auto", "shutdown"), ("zmq", "barrier")],
)
def test_messages_that_nobody_receives_are_named(launch, transport, end):
    job = launch(SENDING, workers=3, arguments=["3", end], env={"SYNCVAR_TRANSPORT": transport})
    assert job.wait() == 0, str(job)
    text = str(job)
    assert "rank 0 sent a message with tag 6 to rank 1 at " in text, text
    assert "script.py:8 in <module>, and rank 1 ended without receiving it" in text, text
    assert "rank 0 sent 4 messages with tag 7 to rank 1 (the first of 5 at " in text, text
    assert "rank 0 sent a message with tag 3 to itself, and it ended without receiving it" in text
    assert ("a message with tag 8 to rank 1 at " in text) is (end == "late"), text
    assert "with tag 9" not in text, text
    assert text.count("ended without receiving") == (4 if end == "late" else 3), text


BALANCED = """
import numpy as np
import syncvar as sv

rank, size = sv.rank(), sv.world_size()
for tag in range(300):  # more than the pairs and tags that are kept
    sv.send(np.ones(3), (rank + 1) % size, tag=tag)
    sv.recv((rank - 1) % size, tag=tag)
group = sv.new_group([0, 2])
if rank != 1:
    other = 1 - group.rank
    sv.send(2.0, other, group=group)
    assert sv.recv(other, group=group) == 2.0
sv.send(2.0, rank)
sv.recv(rank)
"""


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_nothing_is_named_where_all_messages_are_received(launch, transport):
    job = launch(BALANCED, workers=3, env={"SYNCVAR_TRANSPORT": transport})
    assert job.wait() == 0, str(job)
    assert "without receiving" not in str(job), str(job)
