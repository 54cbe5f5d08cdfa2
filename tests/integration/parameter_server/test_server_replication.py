"""A server that is lost is copied again: whole ledgers as messages, who is the mirror then, and what happens without a copy."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import PeerLost
from syncvar.parameter_server.primary import ReplicationStream, seed_of, state_of_seed
from syncvar.parameter_server.replicated_state import ReplicatedState
from syncvar.parameter_server.request_client import Client, RequestBuilder
from syncvar.parameter_server.server_machine import Server
from syncvar.parameter_server.session import LocalServers
from syncvar.parameter_server.shard import Spec
from syncvar.testing import run_ranks

HEIRS = [(1, 2), (2, 0), (0, 1)]
SPEC = Spec((4, 2), "float32", "MEAN", (4, 2), 0)


def request(rank, number, asking, parts=(0,)):
    part = asking.parts()[0]
    message = {
        "kind": "request",
        "server": 0,
        "rank": rank,
        "incarnation": 0,
        "number": number,
        "previous_change": number - 1,
        "ack": number - 1,
        "transaction": number,
        "participants": list(parts),
        "last_changes": [number],
        "operations": part.operations,
    }
    return message, part.arrays


def pushed(rank, number, key="w/0", parts=(0,)):
    asking = RequestBuilder()
    asking.push(
        0,
        key,
        "step",
        np.full((4, 2), rank + 1, np.float32),
        rule=("Adam", {"beta_1": 0.5}),
        rate=0.1,
    )
    return request(rank, number, asking, parts)


def rich():
    """Return a ledger that has some of everything: slots, rounds that are not over, a staged part, refusals, tasks."""
    ledger = ReplicatedState(0, 3)
    asking = RequestBuilder()
    asking.create(0, "w/0", SPEC, 0, np.ones((4, 2), np.float32))
    asking.create(0, "free/0", SPEC._replace(dtype="float16"), None, np.ones((4, 2), np.float16))
    asking.put(0, 5, np.arange(3, dtype=np.uint8))
    asking.put(0, 6, np.arange(4, dtype=np.uint8))
    asking.add(0, "request_task")
    asking.finish(0, 5, np.arange(2, dtype=np.uint8), failed=True)
    ledger.execute(*request(0, 1, asking))
    ledger.execute(*pushed(0, 2))
    ledger.execute(*pushed(1, 1))
    ledger.execute(*pushed(2, 1))
    ledger.execute(*pushed(0, 3))  # waits for the others'
    ledger.execute(*pushed(1, 2, "free/0"))
    ledger.execute(*pushed(1, 3, parts=(0, 1)))  # staged
    ledger.execute(*pushed(2, 2, "unknown"))  # refused
    ledger.execute({"kind": "fence", "rank": 2, "incarnation": 1}, ())
    return ledger


def same(one, other):
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_ledger_is_the_same_after_its_journey_and_goes_on_in_the_same_way():
    first = rich()
    second = state_of_seed(0, 3, seed_of(first), np.empty)
    assert same(first.state(), second.state())
    assert second.undecided == {1}
    before = second.shards["w/0"].array.copy()
    decision = {
        "kind": "decision",
        "rank": 1,
        "incarnation": 0,
        "transaction": 3,
        "home": 0,
        "reason": "",
    }
    for ledger in (first, second):
        ledger.execute(decision, ())  # the round is over now: rank 2 takes no part
        ledger.execute(*pushed(0, 4, "free/0"))
    assert same(first.state(), second.state())
    assert not np.array_equal(second.shards["w/0"].array, before)


def test_what_a_mirror_does_not_confirm_is_sent_again_the_ledger_first():
    ledger = rich()
    copying = ReplicationStream(0, ledger.entries, None, 0.5)
    assert copying.wake_at() == float("inf")
    copying.move_to(2, ledger, now=10.0)
    (seed,) = copying.ready()
    assert (seed.target, seed.message["kind"], seed.message["index"]) == (
        ("server", 2),
        "seed",
        ledger.entries,
    )
    copying.enter({"kind": "fence", "rank": 0, "incarnation": 1}, (), 10.0)
    copying.enqueue(seed)  # whatever follows from that entry
    assert [one.message["kind"] for one in copying.ready()] == ["copy"]
    assert copying.wake_at() == 12.0
    copying.wake(12.0)
    assert [one.message["kind"] for one in copying.ready()] == ["seed", "copy"]
    copying.acknowledge(ledger.entries)
    copying.wake(100.0)
    assert [one.message["kind"] for one in copying.ready()] == ["copy"]
    copying.acknowledge(ledger.entries + 1)
    assert copying.ready() == [seed]
    assert copying.wake_at() == float("inf")


def test_a_worker_is_told_when_both_copies_are_lost_before_there_was_another():
    last = Server(2, 1, HEIRS)
    moved = last.server_lost(0, 1.0)  # of which server 1 has the copy, and sends it
    assert [(one.target, one.message["server"]) for one in moved] == [
        (("server", 1), 2)
    ]  # its own had its copy there
    assert last.server_lost(1, 1.1) == []  # it was lost first
    assert sorted(last.primaries) == [1, 2]
    client = Client(0, 0, 3, HEIRS)
    for server in (0, 1):
        client.server_lost(server, 1.2)
    asking = RequestBuilder()
    asking.add(0, "tick", clock=1)
    ticket, (sent,) = client.request(asking.parts(), 1.3)
    assert sent.target == ("server", 2)
    (told,) = last.handle(("worker", 0), sent.message, sent.arrays, 1.4)
    assert told.message == {"kind": "state_lost", "server": 0}
    client.handle(("server", 2), told.message, (), 1.5)
    assert isinstance(ticket.error, PeerLost)
    assert "server 0" in str(ticket.error)


def test_a_seed_of_a_server_that_was_given_up_is_not_taken():
    one, two = Server(1, 1, HEIRS), Server(2, 1, HEIRS)
    seeds = [out for out in one.server_lost(0, 1.0) if out.message["kind"] == "seed"]
    assert [(out.target, out.message["server"]) for out in seeds] == [(("server", 2), 0)]
    two.server_lost(0, 1.0)
    two.server_lost(1, 1.0)
    assert two.handle(("server", 1), seeds[0].message, seeds[0].arrays, 1.1) == []
    assert 0 not in two.primaries
    assert two.new_copies == []


@pytest.mark.parametrize("order", [(0, 1), (1, 2), (2, 0), (1, 0)])
def test_two_of_three_servers_are_lost_one_after_the_other_and_nothing_with_them(order):
    def program(local):
        strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(3), staleness=None)
        with strategy.scope():
            table = sv.Variable(np.zeros((7, 2)), name="table", dtype="float64")
        adam = sv.optimizers.Adam(0.1)
        for number in range(9):
            with strategy.transaction():
                table.assign_add(np.full((7, 2), sv.rank() + 1.0))
            sv.barrier()
            if number in (2, 5) and sv.rank() == 0:
                local.lose(order[number // 3])
            sv.barrier()
        exact = table.numpy().tolist() == [[27.0, 27.0]] * 7
        sv.barrier()
        adam.apply_gradients([(np.ones((7, 2)), table)])
        sv.barrier()
        return exact, np.round(table.numpy(), 6).tolist() == [[26.8, 26.8]] * 7

    local = LocalServers(2, 3, 1)
    assert run_ranks(2, program, local, servers=local, timeout_s=120) == [(True, True)] * 2


def test_the_last_two_servers_are_lost_and_everything_with_them():
    def program(local):
        strategy = sv.ParameterServerStrategy(staleness=None)
        with strategy.scope():
            v = sv.Variable(1)
        for server in (0, 1):
            assert int(v) == 1
            local.lose(server)
        with pytest.raises(PeerLost, match="server 1"):
            v.numpy()

    local = LocalServers(1, 2, 1)
    assert run_ranks(1, program, local, servers=local, timeout_s=120) == [None]
