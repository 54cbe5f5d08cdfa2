"""A launcher's private socket that answers from a script: for floods, odd data and states that are rare."""

import contextlib
import os
import socket
import threading
import time

import msgpack

SOCKET = "status"


class FakeLauncher:
    """Answers questions at `path`; `answers` maps a question to its answer or to a function of the request.

    An answer of bytes goes out as it is, None closes the connection without one. `asked` has the time and the request of
    each question.
    """

    def __init__(self, folder, **answers):
        self.path = os.path.join(folder, SOCKET)
        self.answers = answers
        self.asked = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve)
        self._is_closed = False

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def questions(self, name):
        """Return the times of all questions of one kind."""
        return [at for at, request in self.asked if request.get("question") == name]

    def _serve(self):
        while not self._is_closed:
            with contextlib.suppress(OSError):
                end, _ = self._listener.accept()
                with end:
                    request = msgpack.unpackb(end.recv(1 << 16))
                    self.asked.append((time.monotonic(), request))
                    answer = self.answers.get(request["question"])
                    answer = answer(request) if callable(answer) else answer
                    if answer is not None:
                        end.sendall(answer if isinstance(answer, bytes) else msgpack.packb(answer))


def rank_status(rank, **changed):
    """Return what the launcher says of one rank, with some fields changed."""
    return {
        "rank": rank,
        "host": "ab"[rank % 2],
        "pid": 100 + rank,
        "program": "",
        "state": "running",
        "call": "all_reduce(sum, float32[10]) (call 5)",
        "is_in_call": False,
        "age_s": 0.25,
        "site": "",
        "waits_for": [],
        "call_share": 0.25,
        "wait_share": 0.125,
        "waits": {},
        "rss_bytes": 1 << 27,
        "cpu_share": 0.75,
        "calls": 1000 + rank,
        "calls_per_s": 10.0,
        "bytes_per_s": 4e6,
        "steps": 100,
        "steps_per_s": 5.0,
        "clock_offset_ns": 1500 * rank,
        "clock_error_ns": 200,
    } | changed


def job_status(ranks=4, *, slow=2, folder="/job", **changed):
    """Return the answer to the question "status": all ranks wait for the slow one."""
    waits = {
        "state": "waiting",
        "is_in_call": True,
        "site": "train.py:49 in step",
        "waits_for": [slow],
        "call_share": 0.5,
        "wait_share": 0.4375,
    }
    rows = []
    for rank in range(ranks):
        other = {(rank + 1) % ranks: 0.03125, slow: 0.40625 + rank / 64}
        rows.append(rank_status(rank) if rank == slow else rank_status(rank, **waits, waits=other))
    return {
        "format": "syncvar status 1",
        "job": {
            "name": "1b2c3d4e",
            "pid": os.getpid(),
            "workers": ranks,
            "servers": 1,
            "lasted_s": 3725.0,
            "command": f"syncvar-launch --workers {ranks} train.py",
            "folder": folder,
            "programs": [["train.py", ranks]],
            "restarts": 1,
            "hosts": ["a", "b"],
            "records": folder,
            "log_dir": "",
        },
        "window_s": 5.2,
        "ranks": rows,
        "servers": [
            {
                "server": 0,
                "host": "b",
                "pid": 99,
                "state": "running",
                "position": "serves 3 variables",
                "rss_bytes": 1 << 28,
                "cpu_share": 0.1,
            }
        ],
        "calls": [
            {
                "call": "all_reduce(sum)",
                "variable": "grad/dense",
                "path": "shm ring",
                "calls_per_s": 8.0,
                "bytes_per_s": 3e6,
                "share": 0.3,
            },
            {
                "call": "broadcast",
                "variable": "",
                "path": "links",
                "calls_per_s": 2.0,
                "bytes_per_s": 1e6,
                "share": 0.125,
            },
        ],
        "links": [{"rank": 0, "peer": slow, "path": "tcp", "bytes_per_s": 1e6}],
        "stragglers": [
            {
                "rank": slow,
                "late_share": 0.9375,
                "cost_share": 0.40625,
                "since_s": 30.0,
                "text": f"rank {slow} is late: each other rank waited for it 41 % of the last 30 s (94 % of all waiting)",
            }
        ],
        "log": ["[0] epoch 1  loss 0.5", f"[{slow}] <b>reading</b> shard 7"],
    } | changed
