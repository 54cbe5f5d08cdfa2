"""Steps of optimizers in shared memory: the persistent call gives the same bits as the long way, and still compares."""

import pytest

STEPS = """
import numpy as np
import syncvar as sv
from syncvar.bootstrap.process import current

def trained(count, timeout, weighted):
    strategy = sv.MirroredStrategy(timeout=timeout)  # with a timeout every call goes the long way
    with strategy.scope():
        w = sv.Variable(np.arange(count, dtype=np.float32))
        b = sv.Variable(np.ones(3, np.float32))
    optimizer = sv.optimizers.Momentum(lambda step: 0.1 / (step + 1))
    draw = np.random.default_rng(sv.rank())
    def step():
        grads = draw.normal(size=count), draw.normal(size=3)
        pairs = [(one.astype(np.float32), v) for one, v in zip(grads, (w, b))]
        optimizer.apply_gradients(pairs, weight=1.0 + sv.rank() if weighted else None)
    for _ in range(6):
        strategy.run(step)
    persistent_calls = [key for key in strategy.communicator.persistent_calls if key[0] == "apply_gradients"]
    return w.numpy().tobytes() + b.numpy().tobytes(), persistent_calls

for count in (5, 5000, 300_000):
    for weighted in (False, True):
        short, found = trained(count, None, weighted)
        assert [key[1] for key in found if key[-1] == (count + 3 + weighted,)] == ["sum" if weighted else "mean"], found
        long, _ = trained(count, 30.0, weighted)
        assert short == long, (count, weighted)
        assert sv.all_gather_object(short) == [short] * sv.world_size()
print("same bits")
"""

REFUSED = """
import numpy as np
import syncvar as sv
import probe

strategy = sv.MirroredStrategy()
with strategy.scope():
    w = sv.Variable(np.zeros(COUNT, np.float32))
optimizer = sv.optimizers.SGD(0.5)
ones = np.ones(COUNT, np.float32)

def step(gradient=ones):
    strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))

for _ in range(3):
    step()
before = w.numpy().copy()
optimizer.learning_rate = 0.5 + (sv.rank() == 1)
probe.failure(step)
assert (w.numpy() == before).all() and optimizer.iterations == 3
optimizer.learning_rate = 0.5
step()
before = w.numpy().copy()
probe.failure(step, np.ones(COUNT + (sv.rank() == 1), np.float32))
assert (w.numpy() == before).all() and optimizer.iterations == 4
step()
assert optimizer.iterations == 5
print("value", float(w.numpy()[0]))
"""


def test_the_prepared_call_gives_the_bits_of_the_long_way(launch):
    job = launch(STEPS, workers=3)
    assert job.wait(120) == 0, str(job)
    assert job.out.count("same bits") == 3


@pytest.mark.parametrize("count", [4, 300_000])
def test_ranks_that_disagree_are_told_and_go_on(launch, count):
    job = launch(REFUSED.replace("COUNT", str(count)), workers=2)
    assert job.wait(120) == 0, str(job)
    assert job.out.count("value -2.5") == 2
    raised = {
        rank: [event for event in job.events("raised") if event["rank"] == rank] for rank in (0, 1)
    }
    for rank in (0, 1):
        rates, shapes = raised[rank]
        assert rates["error"] == "MismatchError"
        assert "learning_rate=0.5," in rates["text"]
        assert "learning_rate=1.5," in rates["text"]
        assert "step 3" in rates["text"]
        assert shapes["error"] == ("ConfigError" if rank else "MismatchError")
