"""A rank that ends on a slow link: what it has sent arrives, and where it cannot, whoever waits for it raises PeerLost."""

import contextlib
import subprocess
import time

import pytest

from tests.support.launching import PATIENT

pytestmark = pytest.mark.slow

SLOW = (
    "ip link set lo up && tc qdisc replace dev lo root tbf rate 10mbit burst 128kb latency 50ms"
    ' && exec "$@"'
)
# Signs of life wait behind the bulk.
QUICK_END = {**PATIENT, "SYNCVAR_SHUTDOWN_TIMEOUT_S": "0.1", "SYNCVAR_COLLECTIVE_TIMEOUT_S": "120"}


def slow_loopback():
    """Return the start of a command that has a slow loopback of its own; nothing where nobody may have one.

    The tests then run on the usual loopback, where the same must hold.
    """
    for flags in ("-n", "-rn"):
        start = ("unshare", flags, "sh", "-c", SLOW, "sh")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([*start, "true"], check=True, capture_output=True, timeout=120)
            return start
    return ()


GATHERING = """
import numpy as np
import probe, syncvar as sv

for turn in range(2):
    made = sv.gather(np.full(500_000, sv.rank() + turn + 1.0), root=0)
    assert sv.rank() or (made == np.repeat([turn + 1.0, turn + 2.0], 500_000)).all()
probe.note("end")
"""


def test_what_a_rank_has_sent_before_its_end_arrives(launch):
    job = launch(
        GATHERING, workers=2, prefix=slow_loopback(), options=["--fake-hosts", "2"], env=QUICK_END
    )
    assert job.wait() == 0, str(job)
    assert {event["rank"] for event in job.events("end")} == {0, 1}, str(job)


CUT = """
import os, socket, sys, threading
import numpy as np
import probe, syncvar as sv

def cut():
    probe.gate("waits")
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
            try:
                one.getpeername()  # not what listens: ZeroMQ aborts where that ends
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        one.close()

sv.barrier()
try:
    for _ in range(2):
        sv.gather(np.full(500_000, 1.0), root=0)
except sv.PeerLost as error:
    probe.raised(error)
if sv.rank() == 1:
    threading.Thread(target=cut, daemon=True).start()
    probe.note("sent")
"""


def test_who_waits_for_lost_bytes_of_a_rank_that_has_finished_raises(launch):
    prefix = slow_loopback()
    job = launch(CUT, workers=2, prefix=prefix, options=["--fake-hosts", "2"], env=QUICK_END)
    job.await_events("sent", 1)
    time.sleep(2.0)  # rank 1 is at its end now, and 8 MB take 6 s
    job.open_gate("waits")
    assert job.wait() in (0, 70), str(job)
    raised = {event["rank"]: event for event in job.events("raised")}
    if prefix:
        assert set(raised) == {0}, str(job)
        assert (raised[0]["lost"], raised[0]["reason"]) == (1, "finished"), str(job)
        assert "its link was lost before that arrived" in raised[0]["text"], str(job)
