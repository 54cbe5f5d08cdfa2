"""Messages between the launcher and the agents of other hosts, and the bytes that wait for a full pipe."""

import os

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.errors import WireError
from syncvar_launcher.hosts.agent_main import facts_of
from syncvar_launcher.hosts.agent_protocol import (
    GREETING,
    MESSAGE_NBYTES_MAX,
    PipeOutbox,
    RankSpec,
    Reader,
    StartRequest,
    checked_facts,
    checked_list,
    pack,
)
from syncvar_launcher.options.launch_options import RankProgram

PROGRAM = {
    "kind": "script",
    "target": "a.py",
    "args": ["--lr", "1"],
    "env": {"C": "3"},
    "workers": 4,
}
RANK = {
    "rank": 3,
    "environ": {"B": "2"},
    "cores": [0, 1],
    "has_input": False,
    "terminal": None,
    "program": 0,
}
ORDER = {
    "job": "1a2b",
    "generation": 0,
    "secret": b"s" * 32,
    "programs": [PROGRAM],
    "cwd": "/data",
    "environ": {"A": "1"},
    "start_method": "spawn",
    "shm_bytes": 1 << 40,
    "core_count": 2,
    "shm_unavailable_reason": "",
    "requests_shm": True,
    "env_clear": False,
    "saves_call_totals": False,
    "server_count": 0,
    "ranks": [RANK],
}


def test_messages_come_out_as_they_went_in_however_they_are_cut():
    data = (
        pack("output", rank=2, stream="out", data=b"\0\xff" * 10)
        + pack("end_attempt")
        + pack("abort", generation=None)
    )
    wanted = [
        {"kind": "output", "rank": 2, "stream": "out", "data": b"\0\xff" * 10},
        {"kind": "end_attempt"},
        {"kind": "abort", "generation": None},
    ]
    assert Reader().feed(data) == wanted
    reader = Reader()
    assert [
        message for index in range(len(data)) for message in reader.feed(data[index : index + 1])
    ] == wanted


def test_what_a_login_shell_prints_first_does_no_harm():
    reader = Reader(awaits_greeting=True)
    assert reader.feed(b"Welcome to n1\nsyncvar-") == []
    assert reader.before == b"Welcome to n1\nsyncvar-"
    assert reader.feed(b"agent?\n" + GREETING + pack("heartbeat")) == [{"kind": "heartbeat"}]
    assert reader.before == b"Welcome to n1\nsyncvar-agent?\n"
    with pytest.raises(WireError, match="none of them is the agent's greeting"):
        Reader(awaits_greeting=True).feed(b"x" * 100_000)


def test_an_agent_of_another_protocol_version_is_refused_by_its_greeting():
    text = "it speaks version 1 of the agent protocol, and the launcher speaks version 5"
    reader = Reader(awaits_greeting=True)
    assert reader.feed(b"Welcome\nsyncvar-agent 1") == []
    with pytest.raises(WireError, match=text):
        reader.feed(b"\n")


def body(value):
    data = msgpack.packb(value)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "data",
    [
        body([1]),
        body({"kind": "what"}),
        body({"kind": 3}),
        b"\0\0\0\3\x81\x90\x01",
        body({"kind": "stop", "more": 1}),
        body({"kind": "credit", "rank": 1, "stream": "out"}),
        body({"kind": "credit", "rank": "1", "stream": "out", "nbytes": 2}),
        body({"kind": "credit", "rank": True, "stream": "out", "nbytes": 2}),
        (MESSAGE_NBYTES_MAX + 1).to_bytes(4, "big"),
        b"\0\0\0\1\xc1",
        b"\0\0\0\2\x81\xa4",
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(WireError):
        Reader().feed(data)


def test_a_wrong_message_is_not_sent():
    with pytest.raises(WireError, match="there is no message 'shout'"):
        pack("shout")
    with pytest.raises(WireError, match="rank of a message 'credit' is no int"):
        pack("credit", rank="1", stream="out", nbytes=1)
    with pytest.raises(WireError, match="is above"):
        pack("input", data=b"x" * (MESSAGE_NBYTES_MAX + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(data):
    reader = Reader()
    try:
        messages = reader.feed(len(data).to_bytes(4, "big") + data)
    except WireError:
        return
    assert all(isinstance(one["kind"], str) for one in messages)


def test_an_order_is_read():
    order = StartRequest.read(ORDER)
    assert order.ranks == [RankSpec(3, {"B": "2"}, [0, 1], False, None, 0)]
    assert order.programs == [RankProgram("script", "a.py", ("--lr", "1"), {"C": "3"}, 4)]
    lists = {"ranks": ORDER["ranks"], "programs": ORDER["programs"]}
    assert order._replace(**lists)._asdict() == ORDER


@pytest.mark.parametrize(
    "change",
    [
        {"job": 1},
        {"generation": -1},
        {"generation": True},
        {"secret": "text"},
        {"programs": None},
        {"programs": []},
        {"programs": [{"kind": "script"}]},
        {"programs": [{**PROGRAM, "args": ["a", 1]}]},
        {"programs": [{**PROGRAM, "args": "a"}]},
        {"programs": [{**PROGRAM, "env": {"A": 1}}]},
        {"programs": [{**PROGRAM, "workers": "1"}]},
        {"ranks": [{**RANK, "program": 1}]},
        {"ranks": [{**RANK, "program": -1}]},
        {"ranks": [{**RANK, "program": "0"}]},
        {"environ": {"A": 1}},
        {"environ": {"A": "1\0"}},
        {"ranks": None},
        {"ranks": [3]},
        {"ranks": [{"rank": 3}]},
        {"more": 1},
        {"ranks": [{**RANK, "rank": "3"}]},
        {"ranks": [{**RANK, "terminal": [24]}]},
        {"ranks": [{**RANK, "cores": "0"}]},
    ],
    ids=str,
)
def test_an_order_that_is_none_is_refused(change):
    with pytest.raises(WireError):
        StartRequest.read({**ORDER, **change})


def test_facts_of_a_host_are_taken_as_they_are_told():
    facts = facts_of(["train.py"], "/")
    assert checked_facts(msgpack.unpackb(msgpack.packb(facts))) == facts


@pytest.mark.parametrize(
    "change",
    [
        {"core_count": 10**9},
        {"core_count": 0},
        {"cores": ["0"]},
        {"interfaces": [["eth0"]]},
        {"interfaces": [["eth0", "x"]]},
        {"python": 3},
        {"login_address": "here"},
        {"more": 1},
        {"protocol": True},
    ],
    ids=str,
)
def test_facts_that_cannot_be_are_refused(change):
    facts = facts_of(["train.py"], "/")
    with pytest.raises(WireError):
        checked_facts({**facts, **change})
    with pytest.raises(WireError):
        checked_facts({})


@pytest.mark.parametrize("values", [None, [1], [1, 2, 3], [1, "2"], [1, True], {}], ids=str)
def test_a_list_of_another_form_is_refused(values):
    with pytest.raises(WireError):
        checked_list(values, int, 2)


@pytest.fixture
def pipe():
    source, sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ends = {"source": source, "sink": sink}
    yield ends
    for descriptor in ends.values():
        os.close(descriptor)


def test_a_full_pipe_takes_the_rest_later_and_in_order(pipe):
    box = PipeOutbox(pipe["sink"])
    assert box.descriptors() == []
    parts = [bytes([index]) * 50_000 for index in range(8)]
    for part in parts:
        box.add(part)
    assert box.nbytes == 400_000
    taken = b""
    while True:
        assert box.flush()
        left = box.nbytes
        assert box.descriptors() == ([pipe["sink"]] if left else [])
        taken += os.read(pipe["source"], 1 << 20)
        assert len(taken) == 400_000 - left
        if not left:
            break
    assert taken == b"".join(parts)


def test_where_nobody_reads_any_more_it_says_so_and_forgets(pipe):
    box = PipeOutbox(pipe["sink"])
    os.close(pipe.pop("source"))
    box.add(b"x")
    assert not box.flush()
    assert (box.nbytes, box.descriptors()) == (0, [])
    assert box.flush()
