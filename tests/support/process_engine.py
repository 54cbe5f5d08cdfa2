"""An engine for tests: places are processes that wait for work on a pipe, as workers of Ray and Dask do, and are used again."""

import os
import select
import struct
import subprocess
import sys

WORKER = """
import os, struct, sys
from syncvar.runner.remote_call import arrive, play
source, sink = int(sys.argv[1]), int(sys.argv[2])
while head := os.read(source, 5):
    kind, size = struct.unpack("<BI", head)
    data = b""
    while len(data) < size:
        data += os.read(source, size - len(data))
    before = dict(os.environ)
    answer = play(data) if kind else arrive("127.0.0.1")
    assert dict(os.environ) == before
    os.write(sink, struct.pack("<I", len(answer)) + answer)
"""


class Processes:
    def __init__(self):
        self.workers = []
        self.busy = {}
        self.asked, self.ends, self.is_closed = [], [], False

    def gather(self, workers, timeout_s):
        self.asked.append(timeout_s)
        while len(self.workers) < workers:
            source, out = os.pipe()
            inward, sink = os.pipe()
            child = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(inward), str(out)], pass_fds=(inward, out)
            )
            os.close(inward)
            os.close(out)
            self.workers.append((child, source, sink))
        for _, _, sink in self.workers:
            os.write(sink, struct.pack("<BI", 0, 0))
        return [self.answer(source) for _, source, _ in self.workers]

    def begin(self, parts):
        for number, (part, (_, source, sink)) in enumerate(zip(parts, self.workers, strict=True)):
            os.write(sink, struct.pack("<BI", 1, len(part)) + part)
            self.busy[source] = number

    def ended(self, timeout_s):
        ready, _, _ = select.select(list(self.busy), [], [], timeout_s)
        return {
            self.busy.pop(source): self.answer(source) or "its process is gone" for source in ready
        }

    def end(self, grace_s):
        """End all that are busy still or gone; what came back in order stays for the next start."""
        self.ends.append(grace_s)
        for one in list(self.workers):
            child, source, sink = one
            if source in self.busy or child.poll() is not None:
                self.workers.remove(one)
                child.kill()
                child.wait(120)
                os.close(source)
                os.close(sink)
        self.busy.clear()

    def close(self):
        self.is_closed = True
        self.busy = {source: 0 for _, source, _ in self.workers}
        self.end(0.0)

    @staticmethod
    def answer(source):
        head = os.read(source, 4)
        if not head:
            return b""
        size, data = struct.unpack("<I", head)[0], b""
        while len(data) < size:
            data += os.read(source, size - len(data))
        return data
