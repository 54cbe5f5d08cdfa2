"""The random calls of tests/support/rank_scripts/random_collectives.py, repeated_calls.py and pytree_calls.py on real processes, with segments as long as they are."""

import pytest

from tests.support.paths import RANK_SCRIPTS, REPOSITORY

LIMITS = {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60", "PYTHONPATH": str(REPOSITORY)}
ENV = {**LIMITS, "SYNCVAR_CHECK_SHM": "on"}
LAYOUTS = {
    "kernel": {"env": LIMITS},
    "shm": {"env": ENV},
    "zmq": {"env": {**ENV, "SYNCVAR_TRANSPORT": "zmq"}},
    "hosts": {"env": ENV, "options": ["--fake-hosts", "2"]},
}


@pytest.mark.parametrize(
    ("layout", "workers", "cases", "pairs"),
    [
        ("kernel", 2, 40, []),  # where shared memory is checked, Python runs all
        pytest.param("shm", 2, 12, [], marks=pytest.mark.slow),
        pytest.param("kernel", 2, 600, ["all_reduce", "broadcast"], marks=pytest.mark.nightly),
        pytest.param("kernel", 3, 400, ["all_gather", "scan"], marks=pytest.mark.nightly),
        pytest.param("kernel", 4, 400, ["reduce_scatter", "all_to_all"], marks=pytest.mark.nightly),
        pytest.param("shm", 3, 100, ["all_reduce", "broadcast"], marks=pytest.mark.slow),
        pytest.param("shm", 4, 100, ["reduce_scatter"], marks=pytest.mark.slow),
        pytest.param("zmq", 3, 60, ["all_reduce"], marks=pytest.mark.slow),
        pytest.param("hosts", 4, 60, ["all_reduce"], marks=pytest.mark.nightly),
        pytest.param("hosts", 3, 60, ["all_gather"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(400)
def test_random_calls_on_processes(launch, layout, workers, cases, pairs):
    job = launch(
        None,
        workers=workers,
        target=[str(RANK_SCRIPTS / "random_collectives.py")],
        arguments=["7", str(cases), *pairs],
        **LAYOUTS[layout],
    )
    assert job.wait(300) == 0, str(job)
    assert "cases over" in job.out


@pytest.mark.parametrize(
    ("workers", "cases"),
    [
        (2, 30),
        pytest.param(3, 60, marks=pytest.mark.slow),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((2, 400), (3, 250), (4, 150))),
    ],
)
@pytest.mark.timeout(300)
def test_everyday_calls_on_processes(launch, workers, cases):
    job = launch(
        None,
        workers=workers,
        target=[str(RANK_SCRIPTS / "repeated_calls.py")],
        arguments=[str(workers), str(cases)],
        **LAYOUTS["kernel"],
    )
    assert job.wait(250) == 0, str(job)
    assert job.out.count(f"made {cases} cases") == workers


@pytest.mark.parametrize(
    ("layout", "workers", "turns"),
    [
        ("kernel", 2, 4),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("shm", 2, 15),
                ("zmq", 2, 15),
                ("hosts", 3, 15),
            )
        ),
        *(
            pytest.param("kernel", *one, marks=pytest.mark.nightly)
            for one in ((2, 40), (3, 25), (4, 25))
        ),
    ],
)
@pytest.mark.timeout(300)
def test_structures_on_processes(launch, layout, workers, turns):
    job = launch(
        None,
        workers=workers,
        target=[str(RANK_SCRIPTS / "pytree_calls.py")],
        arguments=["7", str(turns)],
        **LAYOUTS[layout],
    )
    assert job.wait(250) == 0, str(job)
    assert job.out.count("all structures are right") == workers


TRAINING = """
import numpy as np
import syncvar as sv
from probe import note

strategy = sv.MirroredStrategy()
with strategy.scope():
    w = sv.Variable(np.zeros(20_000))
    optimizer = sv.optimizers.SGD(1.0)
held, step = [], 4 << 20
sv.all_reduce(np.zeros(100_000))
while sv.rank() == 1 and step >= 1 << 16:
    try:
        held.append(sv.empty(step, np.uint8))
    except sv.SharedMemoryFull:
        step //= 2
for call in range(10):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(20_000, call + sv.rank(), float), w)]))
note("trained", first=float(w.numpy()[0]), last=float(w.numpy()[-1]), equal=len(np.unique(w.numpy())) == 1, held=len(held))
"""


def test_training_where_the_shm_of_one_rank_is_full(launch):
    """Its buffer for gradients is private there, in shared memory elsewhere: that once added up what lies at offset 0."""
    job = launch(TRAINING, env={"SYNCVAR_SHM_BYTES": str(64 << 20)})
    assert job.wait(120) == 0, str(job)
    wanted = -sum(call + 0.5 for call in range(10))
    seen = {
        event["rank"]: (event["first"], event["last"], event["equal"], event["held"] > 0)
        for event in job.events("trained")
    }
    assert seen == {0: (wanted, wanted, True, False), 1: (wanted, wanted, True, True)}
    assert "variables of this rank use private memory from now on" in job.err


PARTS = """
import numpy as np
import syncvar as sv
from probe import note

rank, size = sv.rank(), sv.world_size()
rows, made = np.arange(2.0 * size).reshape(2 * size, 1) + 100 * rank, np.empty((2 * size, 1))
wanted = [(np.arange(2.0 * rank, 2.0 * rank + 2) + 100 * peer).reshape(2, 1) for peer in range(size)]
for _ in range(3):
    for into in (None, made, [np.empty((2, 1)) for _ in range(size)]):
        parts = sv.all_to_all(rows, out=into)
        assert type(parts) is list and all(map(np.array_equal, parts, wanted)), parts
        assert into is not made or all(np.shares_memory(part, made) for part in parts)
        assert type(into) is not list or all(one is part for one, part in zip(parts, into, strict=True))
    flat = sv.all_to_all(np.arange(float(size)))
    assert [part.shape for part in flat] == [(1,)] * size
    numbers = sv.all_to_all([float(rank)] * size)  # a list has a part for each rank: these are no rows of an array
    assert [part.shape for part in numbers] == [()] * size and numbers == list(range(size)), numbers
    try:
        sv.all_to_all(rows, out=rows)
    except sv.ConfigError as error:
        assert "overlaps" in str(error)
    else:
        raise AssertionError("an out that overlaps the parts was taken")
note("over")
"""


def test_parts_that_are_exchanged_again_and_again(launch):
    job = launch(PARTS, workers=2)
    assert job.wait(120) == 0, str(job)
    assert len(job.events("over")) == 2
