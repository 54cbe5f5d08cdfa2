"""A world of threads that lives on and executes one program after another; it is made anew only after a failure."""

import contextlib
import itertools
import queue
import threading

from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from tests.verification.programs.program_executor import Replica
from tests.verification.programs.reference_model import predict

DEADLINE_S = 60.0
CONFIG = RuntimeConfig(
    collective_timeout_s=DEADLINE_S, stall_warning_s=4.0, rendezvous_timeout_s=DEADLINE_S
)


class World:
    """Replicas that wait for programs."""

    def __init__(self, size, faults=None, *, shared=False):
        self.size = size
        self.faults = faults
        self.shared = shared
        self.names = itertools.count()
        self.inboxes = [queue.SimpleQueue() for _ in range(size)]
        self.done = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._live, name=f"world of {size}", daemon=True)
        self.thread.start()

    def _live(self):
        run_ranks(
            self.size,
            self._replica,
            faults=self.faults,
            shared=self.shared,
            config=CONFIG,
            timeout_s=1_700.0,
        )

    def _replica(self):
        replica = Replica()
        while True:
            work = self.inboxes[replica.rank].get()
            if work is None:
                return
            try:
                seen = replica.execute(*work)
            except BaseException as error:
                self.done.put((replica.rank, [*replica.seen, error]))
                raise
            self.done.put((replica.rank, seen))

    def execute(self, program):
        """Return the outcomes of each replica."""
        name = f"p{next(self.names)}"
        for inbox in self.inboxes:
            inbox.put((program, name))
        seen = [None] * self.size
        for _ in range(self.size):
            try:
                rank, outcomes = self.done.get(timeout=2 * DEADLINE_S)
            except queue.Empty:
                break
            seen[rank] = outcomes
        return seen

    def close(self):
        for inbox in self.inboxes:
            inbox.put(None)
        self.thread.join(20)


class Worlds(contextlib.ExitStack):
    """Worlds of each size, made when they are needed."""

    def __init__(self, faults=None, *, shared=False):
        super().__init__()
        self.faults = faults
        self.shared = shared
        self.living = {}

    def __enter__(self):
        self.callback(self.close_all)
        return super().__enter__()

    def close_all(self):
        while self.living:
            self.living.popitem()[1].close()

    def difference(self, program):
        """Execute a program and return where it differs from the model, in words; None where it does not."""
        world = self.living.get(program.size)
        if world is None:
            world = self.living[program.size] = World(program.size, self.faults, shared=self.shared)
        found = difference(predict(program), world.execute(program))
        if found is not None:
            self.living.pop(program.size).close()
        return found


def difference(expected, seen):
    """Compare the model's outcomes (by call, by replica) with the replicas' (by replica, by call)."""
    for rank, outcomes in enumerate(seen):
        if outcomes is None:
            return f"replica {rank} did not answer; the others: {[len(one or ()) for one in seen]} calls of {len(expected)}"
    for call, wanted in enumerate(expected):
        for rank, outcomes in enumerate(seen):
            got = outcomes[call] if call < len(outcomes) else "nothing"
            if not agrees(wanted[rank], got):
                return f"call {call} on replica {rank}: expected {wanted[rank]}, got {got!r}"
    if any(len(outcomes) != len(expected) for outcomes in seen):
        return f"the replicas made {[len(outcomes) for outcomes in seen]} calls of {len(expected)}"
    return None


def agrees(wanted, got):
    if wanted is None or got is None or got == "nothing":
        return wanted is got
    if wanted[0] == "error":
        return isinstance(got, tuple) and got[0] == "error" and got[1] in wanted[1]
    return got == wanted
