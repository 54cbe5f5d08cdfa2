"""The transport over MPI fulfils the contract of every transport: between real processes, with Open MPI and with MPICH.

`pytest -m mpi` after tests/interop/install_mpi.sh. The processes of MPI are agents that do what the test's process says.
"""

import contextlib
import itertools
import threading
from multiprocessing.connection import Client

import pytest

from syncvar.protocol.frame import FrameType, Header
from syncvar.testing import TRANSPORT_CHECKS, TransportFactory
from syncvar.transports.base import Frame, PeerDisconnected
from tests.support.mpi_jobs import MPIS, MpiJob, await_true
from tests.support.paths import RANK_SCRIPTS

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

AGENT = RANK_SCRIPTS / "mpi_agent.py"
SIZE = 12
NBYTES_MAX = 1 << 20
_tags, _keys = itertools.count(1), itertools.count()


class Agent:
    """A process of MPI, for the time of one world; each thread that asks it something has a connection of its own."""

    def __init__(self, path):
        self.path = str(path)
        self.own = threading.local()
        self.connections = []

    def __call__(self, *words):
        if not hasattr(self.own, "connection"):
            self.own.connection = Client(self.path, "AF_UNIX")
            self.connections.append(self.own.connection)
        self.own.connection.send(words)
        is_good, answer = self.own.connection.recv()
        assert is_good, answer
        return answer

    def close(self):
        for one in self.connections:
            one.close()


class RemoteLoan:
    def __init__(self, agent, number):
        self.agent, self.number = agent, number

    def is_done(self):
        return self.agent("is_done", self.number)


class RemoteTransport:
    """A transport in a process of MPI."""

    def __init__(self, agent, rank, tag, nbytes_max):
        self.agent, self.key = agent, next(_keys)
        self.address = agent("make", self.key, rank, tag, nbytes_max)

    def open(self, addresses, generation):
        self.agent("call", self.key, "open", addresses, generation)

    def send(self, peer, header, payload=None, *, borrow=False):
        number = next(_keys)
        data = None if payload is None else bytes(payload)
        return (
            RemoteLoan(self.agent, number)
            if self.agent("send", self.key, number, peer, header, data, borrow)
            else None
        )

    def receive(self):
        arrival = self.agent("receive", self.key)
        if arrival is None:
            return None
        name, values = arrival
        return PeerDisconnected(*values) if name == "PeerDisconnected" else Frame(*values)

    def wait(self, timeout_s):
        return self.agent("call", self.key, "wait", timeout_s)

    def wait_idle(self, timeout_s):
        return self.agent("call", self.key, "wait_idle", timeout_s)

    def wake(self):
        return self.agent("call", self.key, "wake")

    def close(self, linger_s):
        return self.agent("call", self.key, "close", linger_s)


@pytest.fixture(
    scope="module",
    params=[(mpi, level) for mpi in MPIS for level in ("multiple", "serialized")],
    ids="-".join,
)
def paths(request):
    """Start the agents; return where they listen."""
    mpi, level = request.param
    with MpiJob(mpi, SIZE, [AGENT, "."], MPI4PY_RC_THREAD_LEVEL=level) as job:
        made = [job.folder / str(rank) for rank in range(SIZE)]
        await_true(
            lambda: all(path.exists() for path in made) or job.process.poll() is not None, 60.0
        )
        assert job.process.poll() is None, job.text
        with contextlib.closing(Agent(made[0])) as one:
            assert one("level") == (level == "multiple", level == "serialized")
        yield made
        for path in made:
            with contextlib.closing(Agent(path)) as one:
                one("end")
        code, text = job.wait(120)
        assert code == 0, text


@pytest.fixture
def factory(paths):
    @contextlib.contextmanager
    def connect(world_size, generation):
        tag = next(_tags)
        agents = [Agent(path) for path in paths[:world_size]]
        world = []
        try:
            for rank, agent in enumerate(agents):
                world.append(RemoteTransport(agent, rank, tag, NBYTES_MAX))
            for transport in world:
                transport.open({rank: one.address for rank, one in enumerate(world)}, generation)
            yield world
        finally:
            for transport in world:
                transport.close(0)
            for agent in agents:
                agent.close()

    return TransportFactory(connect, NBYTES_MAX)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS)
def test_the_transport_over_mpi_fulfils_the_contract(factory, check):
    TRANSPORT_CHECKS[check](factory)


GENERATION = 5


@pytest.mark.parametrize(
    ("header", "payload", "reason"),
    [
        (Header(FrameType.DATA, 2, GENERATION, 0, nbytes=3).pack(), b"abc", "claims rank 2"),
        (Header(FrameType.DATA, 1, GENERATION + 1, 0, nbytes=3).pack(), b"abc", "generation 6"),
        (
            Header(FrameType.DATA, 1, GENERATION, 0, nbytes=4).pack(),
            b"abc",
            "announces 4 bytes and has 3",
        ),
        (
            Header(FrameType.DATA, 1, GENERATION, 0, nbytes=9000).pack(),
            b"x" * 8000,
            "announces 9000 bytes and has 8000",
        ),
        (
            Header(FrameType.DATA, 1, GENERATION, 0, nbytes=NBYTES_MAX + 1).pack(),
            b"abc",
            "exceeds the limit",
        ),
        (bytes(60), None, "not a frame of syncvar"),
        (b"sv", None, "a header has"),
    ],
)
def test_a_message_that_is_not_what_it_claims_ends_its_link_and_is_not_delivered(
    factory, header, payload, reason
):
    with factory.connect(3, GENERATION) as world:
        good = Header(FrameType.DATA, 1, GENERATION, 0, 8).pack()
        for one in ((good, None), (header, payload and memoryview(payload)), (good, None)):
            world[1].send(0, *one)
        seen = []
        for _ in range(2000):
            if len(seen) == 2:
                break
            arrival = world[0].receive()
            if arrival is None:
                world[0].wait(0.01)
                world[1].wait(0.0)
            else:
                seen.append(arrival)
        first, lost = seen
        assert first.header.call == 8
        assert isinstance(lost, PeerDisconnected)
        assert lost.peer == 1
        assert reason in lost.reason
        world[2].send(0, Header(FrameType.DATA, 2, GENERATION, 0, 77).pack())
        while (arrival := world[0].receive()) is None:
            world[0].wait(0.5)
        assert arrival.header.call == 77
