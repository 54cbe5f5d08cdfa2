"""Objects of a program's own classes in messages and collectives of objects."""

import dataclasses
import enum

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol import object_codec
from syncvar.protocol.object_codec import may_travel, pack_object, unpack_object
from syncvar.testing import run_ranks

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0)


@dataclasses.dataclass
class Job:
    number: int
    data: object = None


class Colour(enum.IntEnum):
    RED = 1


class Wide(Job):
    """A subclass, which is not registered with its base."""


def _job_of(data):
    return Job(*data)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Give each test empty lists of classes."""
    monkeypatch.setattr(object_codec, "_classes", {})
    monkeypatch.setattr(object_codec, "_names", {})


def fields(job):
    return job.number, job.data


def register(**options):
    sv.register_object(Job, fields, _job_of, **options)


def test_objects_of_a_class_come_back():
    register()
    sv.register_object(Colour, int, Colour, name="colour")
    value = {"jobs": [Job(1, Job(2)), Job(3, np.arange(3))], "colour": Colour.RED}
    got = unpack_object(pack_object(value))
    assert got["jobs"][0] == Job(1, Job(2))
    assert got["jobs"][1].data.tolist() == [0, 1, 2]
    assert got["colour"] is Colour.RED
    assert may_travel(Job)


def test_the_bytes_contain_the_name():
    register(name="a job")
    assert b"a job" in pack_object(Job(1))
    register(name="a job")  # again, as in a cell of a notebook


def test_a_subclass_is_another_class():
    register()
    with pytest.raises(sv.ConfigError, match=r"value\[0\] is a .*Wide, which cannot travel"):
        pack_object([Wide(1)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((Job(1), fields, _job_of), "takes a class"),
        ((Job, None, _job_of), "encode must be a function"),
        ((Job, fields, 5), "decode must be a function"),
        ((dict, fields, _job_of), "without register_object"),
        ((np.ndarray, fields, _job_of), "without register_object"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(sv.ConfigError, match=text):
        sv.register_object(*arguments)


def test_names_are_unique():
    with pytest.raises(sv.ConfigError, match="name must be a text"):
        register(name=5)
    register(name="job")
    with pytest.raises(sv.ConfigError, match=r"the name 'job' belongs to .*Job"):
        sv.register_object(Wide, fields, _job_of, name="job")
    with pytest.raises(sv.ConfigError, match="registered as 'job' already"):
        register(name="another")


def test_errors_of_the_programs_functions_name_the_class():
    sv.register_object(Job, lambda job: 1 // job.number, lambda data: Job(1 // 0), name="job")
    with pytest.raises(sv.ConfigError, match="value cannot travel: the encode function of 'job'"):
        pack_object(Job(0))
    with pytest.raises(sv.ConfigError, match="decode function of 'job' raised ZeroDivisionError"):
        unpack_object(pack_object(Job(1)))


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "links"])
def test_collectives_and_messages_of_objects(shared):
    register()

    def fn():
        rank, size = sv.rank(), sv.world_size()
        task = sv.broadcast_object({"job": Job(7)} if rank == 0 else None)["job"]
        every = sv.all_gather_object(Job(rank))
        mine = sv.scatter_object([Job(10 + one) for one in range(size)] if rank == 0 else None)
        sv.send_object(Job(100 + rank), (rank + 1) % size)
        got = sv.recv_any().value
        return task.number, [one.number for one in every], mine.number, got.number

    results = run_ranks(3, fn, config=SOON, shared=shared, timeout_s=120)
    assert results == [(7, [0, 1, 2], 10 + rank, 100 + (rank - 1) % 3) for rank in range(3)]


UNKNOWN = """
import sys
import syncvar as sv

class Job:
    pass

rank = sv.rank()
if rank != 1:
    sv.register_object(Job, lambda job: 1, lambda data: Job(), name="job")

def attempt(call):
    try:
        return type(call()).__name__
    except sv.ConfigError as error:
        assert "has not registered such a class: call sv.register_object" in str(error), error
        return "ConfigError"

seen = [
    attempt(lambda: sv.broadcast_object(Job() if rank == 0 else None)),
    attempt(lambda: sv.all_gather_object(Job() if rank == 0 else 5)),
    attempt(lambda: sv.scatter_object([Job()] * sv.world_size() if rank == 0 else None)),
]
if rank == 0:
    sv.send_object(Job(), 1)
    sv.send_object(Job(), 1)
    sv.send(5, 1)
if rank == 1:
    seen += [attempt(lambda: sv.recv_object(0)), attempt(lambda: sv.recv_any())]
    assert int(sv.recv(0)) == 5
expected = [["Job", "list", "Job"], ["ConfigError"] * 5, ["Job", "list", "Job"]][rank]
assert seen == expected, seen
assert int(sv.all_reduce(1)) == sv.world_size()
"""


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_a_rank_without_the_class_has_an_error_and_the_others_go_on(launch, transport):
    job = launch(UNKNOWN, workers=3, env={"SYNCVAR_TRANSPORT": transport})
    assert job.wait() == 0, str(job)
