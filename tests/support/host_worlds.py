"""Worlds of transports in one process whose ranks pose as hosts of their own, joined by TCP on loopback."""

import contextlib
import shutil
import tempfile

import zmq

from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport


@contextlib.contextmanager
def world_of_hosts(config, keys, wrap=None, generation=0):
    """Open a transport for each rank; they share no ZeroMQ context, like processes.

    Args:
        config: The settings.
        keys: The keys of each rank's links; None for links in plain.
        wrap: Makes a rank's transport of its links, from (links, rank); None for the links alone.
        generation: The version of the membership.
    """
    directory = tempfile.mkdtemp(prefix="sv")
    contexts = [zmq.Context() for _ in keys]
    ranks = []
    try:
        for rank, (context, own) in enumerate(zip(contexts, keys, strict=True)):
            hosts = HostLinks("tcp://127.0.0.1", own)
            links = ZeromqTransport(context, rank, f"ipc://{directory}", "job", config, links=hosts)
            ranks.append(links if wrap is None else wrap(links, rank))
        for one in ranks:
            one.open({rank: other.outside for rank, other in enumerate(ranks)}, generation)
        yield ranks
    finally:
        for one in ranks:
            one.close(0)
        for context in contexts:
            context.term()
        shutil.rmtree(directory)
