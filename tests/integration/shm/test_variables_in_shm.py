"""Variables come and go under a small shared memory; what is too much is said in words, and variables go on without it."""

import pytest

VARIABLES = 1_000
A_FEW = 300  # more than would fit at once

SCRIPT = """
import sys
import numpy as np
import syncvar as sv

for number in range(int(sys.argv[1])):
    v = sv.Variable(np.full(1 << 18, number, np.float32), name=f"v{number}")
    if number % 100 == 0:
        sv.get_strategy().run(lambda: None)
        assert float(v.numpy()[-1]) == number
    del v
try:
    sv.empty(200 << 20, np.uint8)
except sv.SharedMemoryFull as error:
    print("said", "shm_bytes" in str(error) and "256 MiB" in str(error))
kept = [sv.Variable(np.zeros(1 << 22, np.float32), name=f"kept{number}", aggregation="SUM") for number in range(12)]
strategy = sv.MirroredStrategy()
with strategy.scope():
    last = sv.Variable(np.zeros(1 << 22, np.float32), aggregation="SUM")
strategy.run(lambda: last.assign_add(np.ones(1 << 22, np.float32)))
print("sum", float(last.numpy()[7]), len(kept))
"""


@pytest.mark.parametrize("count", [A_FEW, pytest.param(VARIABLES, marks=pytest.mark.slow)])
def test_variables_of_1_mib_one_after_another_under_256_mib(launch, count):
    job = launch(
        SCRIPT, workers=2, arguments=[str(count)], env={"SYNCVAR_SHM_BYTES": str(256 << 20)}
    )
    assert job.wait(120) == 0, str(job)
    text = job.out
    assert text.count("said True") == 2
    assert text.count("sum 2.0 12") == 2
