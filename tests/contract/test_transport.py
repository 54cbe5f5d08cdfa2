"""Every transport fulfils the one contract, and the real one refuses what is not its own."""

import contextlib
import shutil
import tempfile

import pytest
import zmq

from syncvar.config import RuntimeConfig
from syncvar.testing import TRANSPORT_CHECKS, TransportFactory
from syncvar.transports.memory import MemoryNetwork, MemoryTransport
from syncvar.transports.zeromq import ZeromqTransport


def start_the_collector_of_pyzmq():
    """Borrow memory once: pyzmq keeps a thread and sockets for that, for good, which no test leaks."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://borrow")
        other.connect("inproc://borrow")
        one.send(bytes(1 << 20), copy=False, track=True)
        other.recv()


start_the_collector_of_pyzmq()

CONFIG = RuntimeConfig(heartbeat_interval_s=0.2, suspect_after_s=1.0, lost_after_s=3.0, handshake_timeout_s=5.0)


@contextlib.contextmanager
def memory(world_size, generation):
    network = MemoryNetwork(world_size)
    world = [MemoryTransport(network, rank) for rank in range(world_size)]
    for transport in world:
        transport.open({rank: one.address for rank, one in enumerate(world)}, generation)
    yield world
    for transport in world:
        transport.close(0)


@contextlib.contextmanager
def zeromq(endpoint, world_size, generation, config=CONFIG, job="job"):
    """A world whose ranks share one process but no ZeroMQ context, like processes."""
    contexts = [zmq.Context() for _ in range(world_size)]
    world = []
    try:
        for rank, context in enumerate(contexts):
            world.append(ZeromqTransport(context, rank, endpoint, job, config))
        for transport in world:
            transport.open({rank: one.address for rank, one in enumerate(world)}, generation)
        yield world
    finally:
        for transport in world:
            transport.close(0)
        for context in contexts:
            context.term()


@contextlib.contextmanager
def ipc(world_size, generation, **more):
    directory = tempfile.mkdtemp(prefix="sv")
    try:
        with zeromq(f"ipc://{directory}", world_size, generation, **more) as world:
            yield world
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def tcp(world_size, generation, **more):
    with zeromq("tcp://127.0.0.1", world_size, generation, **more) as world:
        yield world


FACTORIES = {name: TransportFactory(connect) for name, connect in (("memory", memory), ("ipc", ipc), ("tcp", tcp))}


@pytest.mark.parametrize("check", TRANSPORT_CHECKS)
@pytest.mark.parametrize("transport", FACTORIES)
def test_the_transport_fulfils_its_contract(transport, check):
    TRANSPORT_CHECKS[check](FACTORIES[transport])
