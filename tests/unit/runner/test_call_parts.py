"""Which place of an engine is which rank, what each is told, and which arguments `sv.run` refuses before it asks any engine."""

import errno
import socket
import sys

import pytest
import zmq

import syncvar as sv
from syncvar.bootstrap.launch_env.detection import launcher_info
from syncvar.runner.engines import CallPart, End, EngineSlot, pack, parts, unpack
from syncvar.runner.remote_call import _release_port, arrive


def told(grounds, **more):
    places = [
        EngineSlot(ground, f"host-{ground}", f"10.0.0.{number}", 5000 + number, 100 + number)
        for number, ground in enumerate(grounds, 1)
    ]
    handed = parts(
        places, b"call", "run", "5e" * 32, {"SYNCVAR_LOST_AFTER_S": "3"}, ["/there"], **more
    )
    return [(part, launcher_info(part.environ)) for part in handed]


def test_ranks_of_a_host_follow_each_other():
    found = told("abacb")
    assert [part.rank for part, _ in found] == [0, 2, 1, 4, 3]
    assert [(one.local_rank, one.local_world_size, one.host_index) for _, one in found] == [
        (0, 2, 0),
        (0, 2, 1),
        (1, 2, 0),
        (0, 1, 2),
        (1, 2, 1),
    ]
    assert {(one.world_size, one.host_count, one.address) for _, one in found} == {
        (5, 3, "10.0.0.1")
    }
    assert [part.pid for part, _ in found] == [101, 102, 103, 104, 105]


def test_each_start_is_another_job_and_knows_its_number():
    (part, one), *_ = told("aa", restarts=2)
    assert one.restarts == 2
    assert one.run.startswith("run")
    assert part.environ["SYNCVAR_KEY"] == "5e" * 32
    assert part.environ["SYNCVAR_LOST_AFTER_S"] == "3"


@pytest.mark.parametrize(
    "value",
    [
        EngineSlot("g", "h", "::1", 1, 2),
        CallPart(1, {"A": "b"}, b"\0", ["x"], 3),
        End(b"\1"),
        End(error="E", message="m", traceback="t", exit_code=3, has_met=False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_engines_carry_comes_back_as_it_was(value):
    assert unpack(type(value), pack(value)) == value


def test_the_port_of_a_place_is_kept_for_it():
    place = unpack(EngineSlot, arrive("127.0.0.1"))
    with socket.socket() as other:
        with pytest.raises(OSError) as raised:
            other.bind((place.address, place.port))
        assert raised.value.errno == errno.EADDRINUSE
    with zmq.Context() as context, context.socket(zmq.ROUTER) as rank_0:
        rank_0.bind(f"tcp://{place.address}:{place.port}")
    assert unpack(EngineSlot, arrive("127.0.0.1")).port != place.port, "the place of another call"
    _release_port()


@pytest.mark.parametrize(("name", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_package_is_named_with_what_to_install(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"syncvar.runner.{name}_engine", raising=False)
    with pytest.raises(
        sv.ConfigError,
        match=rf"engine='{name}' needs {name.capitalize()}: pip install (ray|distributed) cloudpickle",
    ):
        sv.run(divmod, workers=2, args=(7, 2), engine=name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"engine": "spark"},
            "engine must be one of local, ray, dask, or an object of sv.engines, not 'spark'",
        ),
        (
            {"engine": [3]},
            "engine must be one of local, ray, dask, or an object of sv.engines, not [3]",
        ),
        ({"max_restarts": -1}, "max_restarts must be a whole number of at least 0, not -1"),
        ({"max_restarts": True}, "max_restarts must be a whole number of at least 0, not True"),
    ],
    ids=str,
)
def test_wrong_arguments_ask_no_engine(arguments, words):
    with pytest.raises(sv.ConfigError) as raised:
        sv.run(divmod, **arguments)
    assert words in str(raised.value)
