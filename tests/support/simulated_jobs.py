"""Jobs of workers and servers in virtual time: what each seed makes, and what must hold in all of them."""

import random
from typing import NamedTuple

import numpy as np

from syncvar.parameter_server.request_client import RequestBuilder
from syncvar.parameter_server.shard import Spec
from syncvar.testing import Ask, Cluster

_NUMBER = np.int64


class Job(NamedTuple):
    """What one seed makes."""

    workers: int
    servers: int
    steps: int
    replicas: int
    staleness: int | None
    loss: float
    double: float
    kills: bool
    more: bool


def job_of(seed):
    rng = random.Random(seed)
    servers = rng.randint(1, 4)
    return Job(
        rng.randint(1, 4),
        servers,
        rng.randint(3, 10),
        int(servers > 1 and rng.random() < 0.6),
        rng.choice([None, 0, 1, 3]),
        rng.choice([0, 0.05, 0.2]),
        rng.choice([0, 0.1]),
        rng.random() < 0.5,
        rng.random() < 0.7,
    )


def run(seed, *, through_wire=False):
    """Run the job of a seed and check it; returns the cluster.

    Each worker adds to `a`, `b` and its place of `progress` in one transaction, reads now and then, and ticks; one that was
    killed goes on where `progress` says. An evaluator takes snapshots meanwhile. Servers and workers are killed by the seed.
    """
    job = job_of(seed)
    rng = random.Random(seed + 1)
    home = rng.randrange(job.servers)  # of progress
    program = _Program(seed, job, home)
    cluster = Cluster(
        job.workers,
        job.servers,
        seed,
        program,
        replicas=job.replicas,
        evaluators=1,
        loss=job.loss,
        double=job.double,
        through_wire=through_wire,
    )
    if job.kills:
        if job.replicas:
            first, *others = rng.sample(range(job.servers), min(job.servers, 3))
            at = rng.uniform(0, 0.4)
            cluster.kill_server(first, at)
            for other in (
                others if job.more else ()
            ):  # each once what the one before held has a copy again
                at += rng.uniform(0, 0.3)
                cluster.kill_server(other, at)
        for _ in range(2):
            cluster.kill_worker(rng.randrange(job.workers), rng.uniform(0, 0.5))
    cluster.run()
    total = sum(added(rank, step) for rank in range(job.workers) for step in range(job.steps))
    sums = [int(cluster.value(0, "a")), int(cluster.value(job.servers - 1, "b"))]
    assert sums == [total, total], (
        f"seed {seed}: a, b are {sums}, not {total}: a push was lost or applied twice"
    )
    assert cluster.value(home, "progress").tolist() == [job.steps] * job.workers
    assert program.snapshots == 6, seed
    return cluster


def added(rank, step):
    return rank + 1 + step


class _Program:
    def __init__(self, seed, job, home):
        self.seed, self.job, self.home = seed, job, home
        self.snapshots = 0

    def __call__(self, rank, incarnation):
        yield Ask(self._made())
        if rank >= self.job.workers:
            yield from self._evaluate()
        else:
            yield from self._train(rank, incarnation)

    def _made(self):
        job, asking = self.job, RequestBuilder()
        scalar, row = (
            Spec((), "int64", "SUM", (), 0),
            Spec((job.workers,), "int64", "SUM", (job.workers,), 0),
        )
        asking.create(0, "a", scalar, None, np.zeros((), _NUMBER))
        asking.create(job.servers - 1, "b", scalar, None, np.zeros((), _NUMBER))
        asking.create(self.home, "progress", row, job.staleness, np.zeros(job.workers, _NUMBER))
        return asking

    def _evaluate(self):
        last = 0
        for _ in range(6):
            asking = RequestBuilder()
            at_a, at_b = asking.pull(0, "a"), asking.pull(self.job.servers - 1, "b")
            ticket = yield Ask(asking, snapshot=True)
            a, b = int(ticket.array(*at_a)), int(ticket.array(*at_b))
            assert a == b, f"seed {self.seed}: a snapshot has a = {a}, b = {b}"
            assert a >= last, f"seed {self.seed}: a snapshot went back from {last} to {a}"
            last = a
            self.snapshots += 1

    def _train(self, rank, incarnation):
        job, home = self.job, self.home
        asking = RequestBuilder()
        at, clocks = asking.pull(home, "progress"), asking.add(home, "position")
        ticket = yield Ask(asking)
        seen, clock = ticket.array(*at), ticket.results[home][clocks[1]]["clock"]
        rng = random.Random(self.seed * 1000 + rank * 10 + incarnation)
        for step in range(int(seen[rank]), job.steps):
            asking = RequestBuilder()
            asking.push(0, "a", "assign_add", np.asarray(added(rank, step)))
            asking.push(job.servers - 1, "b", "assign_add", np.asarray(added(rank, step)))
            asking.push(home, "progress", "scatter_add", np.ones(1, _NUMBER), np.array([rank]))
            yield Ask(asking, waits=rng.random() < 0.5)
            if rng.random() < 0.6:
                asking = RequestBuilder()
                at = asking.pull(home, "progress")
                asking.pull(0, "a")
                ticket = yield Ask(asking)
                new = ticket.array(*at)
                assert (new >= seen).all(), f"seed {self.seed}: rank {rank} read {seen}, then {new}"
                assert new[rank] == step + 1, (
                    f"seed {self.seed}: rank {rank} misses its own push: {new}"
                )
                if job.staleness is not None and not job.kills:
                    assert (new >= step - job.staleness).all(), (
                        f"seed {self.seed}: {new} in step {step} is too old"
                    )
                seen = new
            clock += 1
            asking = RequestBuilder()
            for server in range(job.servers):
                asking.add(server, "tick", clock=clock)
            yield Ask(asking, waits=False)
        asking = RequestBuilder()
        for server in range(job.servers):
            asking.add(server, "leave")
        yield Ask(asking)
