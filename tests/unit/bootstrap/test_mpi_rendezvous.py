"""Ranks that are to exchange data by MPI: what is refused before MPI is asked, and what an MPI library may not contradict.

That they meet and compute, under real MPIs, is the claim of tests/interop.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest

from syncvar.bootstrap import connect, context, kv_store
from syncvar.bootstrap.context import join_handshake
from syncvar.bootstrap.launch_env import LaunchInfo, add_host
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError, RendezvousError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.transports.base import Control, Transport
from syncvar_launcher.options.parse_options import parse

MPI = {"SYNCVAR_TRANSPORT": "mpi"}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_syncvar_launch_starts_no_processes_of_mpi(tmp_path):
    (tmp_path / "script.py").touch()
    assert parse(["--workers", "2", "script.py"], {}, tmp_path).ranks.workers == 2
    with pytest.raises(ConfigError, match="start the script with mpirun"):
        parse(["--workers", "2", "script.py"], MPI, tmp_path)


def test_a_rank_of_syncvar_launch_does_not_join_by_mpi():
    with pytest.raises(
        ConfigError, match=r"SYNCVAR_TRANSPORT=mpi contradicts SYNCVAR_RANK=0.*mpirun"
    ):
        connect.connect(
            MPI | RankEnvironment(0, 2, 0, 2, 0, 1, 0, "ipc:///x", "j").to_mapping(), 0, alone=False
        )


def test_encryption_that_is_asked_for_is_not_given_up_silently():
    with pytest.raises(ConfigError, match="what MPI carries it does not encrypt"):
        kv_store._join(RuntimeConfig(transport="mpi"), MPI | {"SYNCVAR_ENCRYPTION": "required"})


def test_without_mpi4py_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"needs mpi4py and an MPI library.*pip install mpi4py"):
        kv_store._join(RuntimeConfig(transport="mpi"), MPI)


@pytest.mark.parametrize("about", [(0, 2), (1, 3), (0, 1)])
def test_a_library_that_contradicts_a_launcher_is_refused_and_both_are_named(about):
    kv_store._compare(1, 2, "Some MPI", TORCH)
    with pytest.raises(
        ConfigError,
        match=rf"MASTER_PORT says rank 1 of 2, Some MPI says rank {about[0]} of {about[1]}",
    ):
        kv_store._compare(*about, "Some MPI", TORCH)


def test_a_library_that_thinks_it_is_alone_under_the_mpirun_of_another_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)PMI_SIZE.*3.*Some MPI says .*MPI4PY_MPIABI"):
        kv_store._compare(
            0,
            1,
            "Some MPI",
            {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"},
        )


def test_ranks_that_do_not_follow_each_other_on_a_host_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"are on a, b, a.*--map-by slot"):
        add_host(
            LaunchInfo("MPI", 0, 3, 0, 0, -1, 0, "", 0),
            [("a", "1"), ("b", "2"), ("a", "1")],
            ["a", "b", "a"],
            kv_store._MPI_REMEDY,
        )
    of_one_name = [
        add_host(
            LaunchInfo("MPI", rank, 3, 0, 0, -1, 0, "", 0),
            [("a", "1"), ("a", "2"), ("b", "2")],
            ["a", "a", "b"],
            "",
        )
        for rank in range(3)
    ]
    assert [
        (told.host_index, told.host_count, told.local_rank, told.local_world_size)
        for told in of_one_name
    ] == [(host, 3, 0, 1) for host in range(3)]


class _Channel(Control):
    def __init__(self, *messages):
        self.messages = list(messages)

    def send(self, data):
        assert parse_message(data)["kind"] == "join"

    def receive(self):
        return parse_message(self.messages.pop(0))


class _Links(Transport):
    address = outside = "x"

    def open(self, addresses, generation):
        self.opened = dict(addresses), generation


def test_who_joins_anew_does_not_mind_that_others_leave_the_generation_before():
    """The launcher may tell it on the new channel: that rank 1 leaves, or what became of a call, of the generation before."""
    roll = pack_message(
        "members",
        generation=1,
        addresses={0: "a", 1: "b"},
        hosts={},
        host_indices={0: 0, 1: 0},
        without_shm={},
        probes=False,
        rates=[],
    )
    verdict = pack_message(
        "decision",
        group=0,
        call=1,
        last_call=1,
        text="",
        table={},
        has_waiting_ranks=False,
        is_deadlock=False,
    )
    rank = RankEnvironment(0, 2, 0, 2, 0, 1, 0, "ipc:///x", "j")
    links, channel = (
        _Links(),
        _Channel(pack_message("leave_notice", rank=1, entered={}, skipped=[]), verdict, roll),
    )
    join_handshake(rank, RuntimeConfig(), links, channel, 1, "")
    assert links.opened == ({0: "a", 1: "b"}, 1)


@pytest.mark.parametrize(
    ("keeper", "local_rank", "says"), [(0, 0, True), (0, 1, False), (3, 0, False), (None, 0, False)]
)
def test_a_rank_that_waits_for_who_keeps_the_roll_says_so_once(
    monkeypatch, caplog, keeper, local_rank, says
):
    class Silent(_Channel):
        def receive(self):
            return None

    channel = Silent()
    channel.keeper = keeper
    clock = itertools.count()
    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(_Links, "wait", lambda self, timeout_s: None, raising=False)
    rank = RankEnvironment(3, 4, local_rank, 2, 1, 2, 0, "tcp://h:1", "j")
    with pytest.raises(RendezvousError):
        join_handshake(rank, RuntimeConfig(rendezvous_timeout_s=20), _Links(), channel, 0, "")
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert len(said) == says
    assert all(
        "s for the others at tcp://h:1, where rank 0 runs the rendezvous" in one for one in said
    )


@pytest.mark.parametrize(
    ("keeper", "told"),
    [
        (None, "syncvar-launch did not answer rank 3 at tcp://h:1 within 11 s"),
        (
            0,
            "rank 0 did not answer rank 3 at tcp://h:1 within 11 s: no syncvar-launch started these ranks, so",
        ),
    ],
)
def test_a_roll_call_without_an_answer_names_who_was_asked(monkeypatch, keeper, told):
    class Silent(_Channel):
        def receive(self):
            return None

    channel = Silent()
    channel.keeper = keeper
    clock = itertools.count(0, 4)
    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(_Links, "wait", lambda self, timeout_s: None, raising=False)
    rank = RankEnvironment(3, 4, 1, 2, 1, 2, 0, "tcp://h:1", "j")
    with pytest.raises(RendezvousError) as raised:
        join_handshake(rank, RuntimeConfig(rendezvous_timeout_s=1), _Links(), channel, 0, "")
    assert str(raised.value).startswith(told)
    assert ("4 ranks run on 2 hosts, 2 of them on this one" in str(raised.value)) == (keeper == 0)
