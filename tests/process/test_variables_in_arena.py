"""Variables come and go under a small arena; what is too much is said in words, and variables go on without it."""

SCRIPT = """
import numpy as np
import syncvar as sv

for number in range(400):
    v = sv.Variable(np.full(1 << 18, number, np.float32), name=f"v{number}")
    if number % 100 == 0:
        sv.get_strategy().run(lambda: None)
        assert float(v.numpy()[-1]) == number
    del v
try:
    sv.empty(200 << 20, np.uint8)
except sv.ArenaFull as error:
    print("said", "arena_bytes" in str(error) and "256 MiB" in str(error))
kept = [sv.Variable(np.zeros(1 << 22, np.float32), name=f"kept{number}", aggregation="SUM") for number in range(12)]
strategy = sv.MirroredStrategy()
with strategy.scope():
    last = sv.Variable(np.zeros(1 << 22, np.float32), aggregation="SUM")
strategy.run(lambda: last.assign_add(np.ones(1 << 22, np.float32)))
print("sum", float(last.numpy()[7]), len(kept))
"""


def test_400_variables_of_1_mib_one_after_another_under_256_mib(launch):
    job = launch(SCRIPT, workers=2, env={"SYNCVAR_ARENA_BYTES": str(256 << 20)})
    assert job.wait(60) == 0, str(job)
    text = job.out
    assert text.count("said True") == 2
    assert text.count("sum 2.0 12") == 2
