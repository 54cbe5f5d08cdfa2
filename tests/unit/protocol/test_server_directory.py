"""Where servers are and which processes have ended, as it is told to who asks; and what processes are called."""

import pytest

from syncvar.core.errors import PeerLost
from syncvar.core.process_ids import (
    SERVER_0,
    is_server,
    process_name,
    replica_holders,
    server_hosts,
    short_name,
)
from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.server_directory import ServerTable
from syncvar_launcher.job.failure_report import (
    EvidenceFiles,
    FailureReport,
    SecondaryFailure,
    failure_block,
)


def serve(server, job="job", generation=2, host_index=0):
    return {
        "kind": "serve",
        "server": server,
        "job": job,
        "generation": generation,
        "address": f"ipc://s{server}",
        "outside": f"tcp://h{host_index}:{server}",
        "host": f"h{host_index}",
        "host_index": host_index,
        "pid": 100 + server,
    }


def test_who_asks_is_told_where_servers_are_reached_from_its_host():
    table = ServerTable("job", 2)
    assert table.add_server(serve(0)) == ""
    assert table.add_server(serve(1, host_index=1)) == ""
    told = [parse_message(table.message_for(host)) for host in (0, 1)]
    assert [one["addresses"] for one in told] == [
        {0: "ipc://s0", 1: "tcp://h1:1"},
        {0: "tcp://h0:0", 1: "ipc://s1"},
    ]
    assert told[0]["hosts"] == {0: "h0", 1: "h1"}


def test_another_job_and_another_start_of_it_are_refused():
    table = ServerTable("job", 2)
    assert table.refusal(serve(0)) == ""
    assert table.refusal(serve(0, job="other")) == "this is another job"
    assert (
        table.refusal(serve(0, generation=1))
        == "the processes of generation 1 have been replaced by those of 2"
    )


def test_a_place_is_taken_once_and_not_after_it_was_given_up():
    table = ServerTable("job", 2)
    table.add_server(serve(0))
    assert table.add_server(serve(0)) == "server 0 is already process 100 on h0"
    table.ended(SERVER_0 + 1, "signal 9")
    assert table.add_server(serve(1)) == "server 1 was given up: signal 9"


def test_every_change_is_a_new_version_and_the_first_reason_stays():
    table = ServerTable("job", 2)
    versions = [table.version]
    for step in (
        lambda: table.add_server(serve(0)),
        lambda: table.ended(3, "signal 9"),
        lambda: table.restarted(3, 1),
        lambda: table.ended(SERVER_0, "its process is stopped"),
    ):
        step()
        versions.append(table.version)
    assert versions == sorted(set(versions))
    table.ended(SERVER_0, "signal 9")
    told = parse_message(table.message_for(0))
    assert told["version"] == versions[-1]
    assert told["ended"] == {SERVER_0: "its process is stopped"}
    assert told["incarnations"] == {3: 1}
    assert told["addresses"] == {}


def test_what_is_known_of_a_server_is_told():
    table = ServerTable("job", 2)
    told = [table.position(SERVER_0)]
    table.add_server(serve(0))
    told.append(table.position(SERVER_0))
    table.ended(SERVER_0, "")
    table.ended(SERVER_0 + 1, "signal 9")
    assert [*told, table.position(SERVER_0), table.position(SERVER_0 + 1)] == [
        "not serving yet",
        "serving",
        "finished",
        "ended: signal 9",
    ]


def test_a_server_that_has_a_copy_is_noted_once_and_one_of_another_start_is_not():
    table = ServerTable("job", 2)
    holds = {"kind": "holds", "server": 2, "job": "job", "generation": 2, "of": 0}
    for message in (holds, {**holds, "generation": 1}, {**holds, "job": "other"}):
        table.add_replica(parse_message(pack_message(**message)))
    assert [table.take_copies(), table.take_copies()] == [[(2, 0)], []]


def test_processes_are_called_what_they_are():
    assert [process_name(one) for one in (0, 7, SERVER_0, SERVER_0 + 1)] == [
        "rank 0",
        "rank 7",
        "server 0",
        "server 1",
    ]
    assert [short_name(one) for one in (7, SERVER_0 + 1)] == ["7", "server 1"]
    assert [is_server(one) for one in (SERVER_0 - 1, SERVER_0)] == [False, True]
    assert (
        str(PeerLost(SERVER_0 + 1, "b", "signal 9")) == "server 1 on b was lost: signal 9 [SV-306]"
    )


def test_the_failure_block_names_a_server():
    others = [
        SecondaryFailure(0, "computing"),
        SecondaryFailure(SERVER_0, "serving"),
        SecondaryFailure(SERVER_0 + 2, "serving"),
    ]
    text = failure_block(
        FailureReport(SERVER_0 + 1, -9, "b", elapsed_s=1.0),
        others,
        arguments=["-n", "1", "a.py"],
        files=EvidenceFiles("logs"),
    )
    assert text.splitlines() == [
        "syncvar: server 1 on b was killed by signal 9 (SIGKILL) after 1.0 s",
        "evidence: server 1 wrote nothing",
        "others:",
        "  rank 0: computing",
        "  servers 0, 2: serving",
        "whole output: logs (server-1.out and server-1.err)",
    ]


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("servers", [2, 3, 4, 7])
def test_each_server_has_its_copy_elsewhere_on_another_host_where_there_is_one(servers, hosts):
    places = server_hosts(servers, hosts)
    assert max(map(places.count, range(hosts))) - min(map(places.count, range(hosts))) <= 1
    for server in range(servers):
        (mirror,) = replica_holders(server, places, 1)
        assert mirror != server
        assert len(set(places)) == 1 or places[mirror] != places[server]
        assert replica_holders(server, places, 0) == ()
