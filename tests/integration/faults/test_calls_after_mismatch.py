"""After a call on which the ranks did not agree, a program that is right from there on goes on, whatever was counted meanwhile."""

import pytest

WRITES = """
import random, sys
import numpy as np
import probe, syncvar as sv

rank, size, wrong = sv.rank(), sv.world_size(), sys.argv[1]
draw = random.Random(5)  # the same on all ranks
first, second = [sv.Variable(np.zeros(shape), aggregation="SUM", name=name) for name, shape in (("first", 3), ("second", (2, 2)))]
optimizer = sv.optimizers.SGD(1.0)
weights = sv.Variable(np.zeros(4), aggregation="MEAN", name="weights")
ones, fours, made = np.ones(3), np.ones((2, 2)), [0, 0, 0]


def write(kind):
    if kind == 0:
        first.assign_add(ones)
    elif kind == 1:
        sv.assign_add_all([(first, ones), (second, fours)])
    elif kind == 2:
        second.assign_add(fours)
    else:
        optimizer.apply_gradients([(np.ones(4), weights)])


def counted(kind):
    made[0] += kind in (0, 1)
    made[1] += kind in (1, 2)
    made[2] += kind == 3


errors = 0
for step in range(400):
    kind = draw.choice([0, 0, 0, 1, 2, 3])
    if draw.random() < 0.15:
        odd = draw.randrange(size)
        try:
            if rank != odd:
                write(kind)
            elif wrong == "barrier":
                sv.barrier()
            elif wrong == "other":
                write((kind + 1) % 4)
            elif wrong == "argument":
                first.assign_add("text")
            else:
                sv.all_reduce("text")
        except (sv.MismatchError, sv.ConfigError):
            errors += 1
        else:
            raise AssertionError(f"step {step}: kind {kind} went well")
    write(kind)
    counted(kind)
values = [float(variable.numpy().ravel()[0]) for variable in (first, second, weights)]
probe.note("over", errors=errors, values=values, wanted=[made[0] * size, made[1] * size, -float(made[2])])
"""


@pytest.mark.parametrize(
    ("workers", "kernel", "every", "wrong"),
    [
        (2, "auto", "7", "barrier"),
        (3, "python", "3", "other"),
        *(
            pytest.param(*how, wrong, marks=pytest.mark.slow)
            for how in ((2, "auto", "1"), (2, "auto", "7"), (3, "python", "3"), (3, "auto", "100"))
            for wrong in ("barrier", "other", "argument", "refused")
        ),
    ],
)
def test_the_copies_are_compared_at_the_same_writes_after_calls_that_failed(
    launch, workers, kernel, every, wrong
):
    env = {"SYNCVAR_CHECK_EVERY": every, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "20"} | (
        {"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {}
    )
    job = launch(WRITES, workers=workers, arguments=[wrong], env=env)
    assert job.wait(120) == 0, str(job)
    for event in job.events("over"):
        assert event["errors"] > 20
        assert event["values"] == event["wanted"], str(job)
