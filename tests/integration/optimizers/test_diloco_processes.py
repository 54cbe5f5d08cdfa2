"""DiLoCo on real processes: digits, and how many bytes it saves."""

import json

import pytest

DIGITS = """
import hashlib, json
import numpy as np
import syncvar as sv
from syncvar.examples import digits

DATA, STEPS = digits.load(), 8

def gradients(weights, rows):
    whole, _, _ = digits.gradients(weights, DATA.train_images[rows], DATA.train_labels[rows])
    return [layer * np.float32(digits.ROWS / len(rows)) for layer in whole]

def train(wrap, **mode):
    draw = np.random.default_rng(1)
    shapes = {"w1": (64, digits.HIDDEN), "b1": (digits.HIDDEN,), "w2": (digits.HIDDEN, 10), "b2": (10,)}
    weights = [
        sv.Variable((draw.normal(0, (2 / shape[0]) ** 0.5, shape) * (len(shape) == 2)).astype(np.float32), name=name, **mode)
        for name, shape in shapes.items()
    ]
    optimizer = wrap(sv.optimizers.SGD(digits.LEARNING_RATE))
    draw, batch = np.random.default_rng(2), digits.MICRO_SHARDS * digits.ROWS
    with sv.ledger() as ledger:
        for _ in range(16):
            order = draw.permutation(len(DATA.train_labels))
            for start in range(0, len(order) - batch + 1, batch):
                mine = np.split(order[start : start + batch], sv.world_size())[sv.rank()]
                values = [one.read_value() for one in weights]
                optimizer.apply_gradients(zip(gradients(values, mine), weights))
        if hasattr(optimizer, "finish"):
            optimizer.finish()
    _, likely = digits.forward([one.read_value() for one in weights], DATA.test_images)
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()
    everyone = sv.all_gather_object(digest)
    return {
        "accuracy": float((likely.argmax(axis=1) == DATA.test_labels).mean()),
        "nbytes": sum(row.nbytes for row in ledger.rows if row.collective.endswith("(mean)")),
        "all": ledger.totals().nbytes,
        "same": everyone == [digest] * sv.world_size(),
    }

alone = lambda **options: train(lambda inner: sv.optimizers.DiLoCo(inner, steps=STEPS, **options), synchronization="NONE")
results = [train(lambda inner: inner, aggregation="MEAN"), alone(), alone(delay=4), alone(delay=8, fragments=2)]
if sv.rank() == 0:
    print("results", json.dumps(results))
"""

LOST = """
import numpy as np
import syncvar as sv

w = sv.Variable(np.zeros(1000, np.float32), synchronization="NONE")
optimizer = sv.optimizers.DiLoCo(sv.optimizers.SGD(0.1), steps=4, delay=2)
for step in range(100):
    if sv.rank() == 1 and step == 5:
        raise ValueError("batch 5 has no labels")
    optimizer.apply_gradients([(np.ones(1000, np.float32), w)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_digits_with_an_eighth_of_the_bytes_is_as_accurate(launch, workers):
    job = launch(DIGITS, workers=workers)
    assert job.wait(120) == 0, str(job)
    line = next(line for line in job.out.splitlines() if "results " in line)
    every_step, *alone = json.loads(line.partition("results ")[2])
    assert every_step["accuracy"] > 0.93
    assert alone[0]["nbytes"] * 8 == every_step["nbytes"]
    for one in alone:
        assert one["same"]
        assert one["accuracy"] > every_step["accuracy"] - 0.015
        assert one["all"] < every_step["all"] / 6


def test_a_rank_that_is_lost_while_a_change_travels_ends_the_job(launch):
    job = launch(LOST, workers=3)
    assert job.wait(60) == 1, str(job)
    assert "batch 5 has no labels" in job.err
