"""What a rank says last may come later than the news that its process has ended: they go different ways."""

import sys
import textwrap

from tests.support.launching import Job

RELAY = """
    # Passes on what goes to the store, and keeps the last of it back until its sender has been gone for a while.
    import contextlib, os, selectors, socket, sys, time

    store, late, keep_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(late)
    listener.listen(1)
    print("ready", flush=True)
    rank, _ = listener.accept()
    os.unlink(late)
    other = socket.socket(socket.AF_UNIX)
    other.connect(store)
    selector = selectors.DefaultSelector()
    selector.register(rank, selectors.EVENT_READ, other)
    selector.register(other, selectors.EVENT_READ, rank)
    held, since = b"", time.monotonic()
    while True:
        for key, _ in selector.select(0.05):
            data = key.fileobj.recv(1 << 16)
            if not data and key.fileobj is rank:
                time.sleep(keep_s)
                other.sendall(held)
                sys.exit()
            if not data:
                sys.exit()
            if key.fileobj is rank and os.path.exists(late + ".keep"):
                held += data
            else:
                with contextlib.suppress(BrokenPipeError):  # the rank has gone
                    key.data.sendall(data)
"""
SCRIPT = """
    import os, subprocess, sys
    import probe

    if probe.RANK == 1:
        store = os.environ["SYNCVAR_RENDEZVOUS"].removeprefix("ipc://")
        late = os.path.join(os.path.dirname(store), "late")
        relay = subprocess.Popen([sys.executable, os.path.join(probe.FOLDER, "relay.py"), store, late, "0.7"],
                                 stdout=subprocess.PIPE, start_new_session=True)
        assert relay.stdout.readline() == b"ready\\n"
        os.environ["SYNCVAR_RENDEZVOUS"] = f"ipc://{late}"
    import syncvar as sv

    sv.barrier()
    if probe.RANK == 1:
        open(late + ".keep", "w").close()
    sv.shutdown()
"""


def test_a_rank_that_left_is_no_failure_though_its_words_come_behind_its_end(tmp_path):
    (tmp_path / "relay.py").write_text(textwrap.dedent(RELAY))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    job = Job(
        tmp_path, workers=2, target=["--no-python", sys.executable, str(tmp_path / "train.py")]
    )
    assert job.wait(120) == 0, job.err
