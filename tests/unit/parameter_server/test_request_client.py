"""A worker that only reads for long, and then writes: requests that change nothing are not counted by a server."""

import numpy as np
import pytest

from syncvar.core.process_ids import SERVER_0
from syncvar.parameter_server.request_client import Client, RequestBuilder
from syncvar.parameter_server.server_machine import Server
from syncvar.parameter_server.shard import Spec


def answered(client, server, asking):
    """Let a request and its answer come; return the ticket."""
    ticket, outgoing = client.request(asking.parts(), 0.0)
    for one in outgoing:
        for answer in server.handle(("worker", client.rank), one.message, one.arrays, 0.0):
            client.handle(("server", 0), answer.message, answer.arrays, 0.0)
    assert ticket.is_over
    assert ticket.error is None
    return ticket


@pytest.mark.parametrize("reads", [1, 127, 128, 1000])
def test_a_worker_reads_as_often_as_it_likes(reads):
    server, client = Server(0, 1, [()]), Client(0, 0, 1)
    value = np.arange(4)
    asking = RequestBuilder()
    asking.create(0, "v", Spec((4,), "int64", "SUM", (4,), 0), None, value)
    answered(client, server, asking)
    for _ in range(reads):
        asking = RequestBuilder()
        asking.pull(0, "v")
        assert np.array_equal(answered(client, server, asking).array(0, 0), value)
    asking = RequestBuilder()
    asking.push(0, "v", "assign_add", value)
    asking.pull(0, "v")
    assert np.array_equal(answered(client, server, asking).array(0, 1), 2 * value)


def test_a_lost_server_without_a_copy_fails_requests_by_its_name():
    client = Client(0, 0, 2, [(), ()])
    asking = RequestBuilder()
    asking.pull(1, "v")
    ticket, _ = client.request(asking.parts(), 0.0)
    client.server_lost(1, 0.0, "signal 9")
    assert str(ticket.error) == "server 1 was lost: signal 9 [SV-306]"
    assert ticket.error.rank == SERVER_0 + 1
