"""A table of a million rows of 64 floats is made shard by shard: no worker ever holds more than a few shards of it."""

import pytest

ROWS, COLUMNS, SHARD_BYTES = 1_000_000, 64, 8 << 20
SCRIPT = f"""
import re
from pathlib import Path
import numpy as np
import syncvar as sv
import probe


def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])


def rows(shard_info):
    first = shard_info.offset[0]
    calls.append(shard_info.shape)
    numbers = np.arange(first, first + shard_info.shape[0], dtype=np.float32)
    return np.broadcast_to(numbers[:, None], shard_info.shape)


calls = []
strategy = sv.ParameterServerStrategy(sv.partitioners.MaxSize({SHARD_BYTES}), staleness=None)
with strategy.scope():
    sv.Variable(np.zeros((4, 4), np.float32), name="first")  # all that is loaded and mapped once is there now
    before = peak()
    table = sv.Variable(rows, shape=({ROWS}, {COLUMNS}), dtype="float32", name="table")
grown = peak() - before
chosen = np.random.default_rng(sv.rank()).integers({ROWS}, size=4096)
found = table.lookup(chosen)
assert (found == chosen[:, None]).all() and found.shape == (4096, {COLUMNS})
probe.note("made", grown=grown, calls=len(calls), shards=table.num_shards)
"""


@pytest.mark.slow
def test_a_large_table_is_made_shard_by_shard(launch):
    job = launch(SCRIPT, workers=2, options=("--servers", "2"))
    assert job.wait(120) == 0, str(job)
    made = {event["rank"]: event for event in job.events("made")}
    assert made[0]["shards"] == made[1]["shards"] == made[0]["calls"] > 30
    assert made[1]["calls"] == 0
    table_nbytes = 4 * ROWS * COLUMNS
    assert made[0]["grown"] < table_nbytes / 4, (
        job
    )  # it holds one shard, its copy and what is on its way
    assert made[1]["grown"] < table_nbytes / 16, job
