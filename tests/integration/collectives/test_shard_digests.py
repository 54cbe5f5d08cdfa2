"""24 shards have one SHA on any number of real workers, over every path, however they are cut."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

DTYPES, COUNTS = (np.float32, np.float64, ml_dtypes.bfloat16), (5, 30_011)
PROGRAM = """
import hashlib
import ml_dtypes, numpy as np, syncvar as sv

def shard(number, dtype, count):
    draw = np.random.default_rng(number)
    return (draw.normal(size=count) * 10.0 ** draw.integers(-3, 4, count)).astype(dtype)

rank, size = sv.rank(), sv.world_size()
digest = hashlib.sha256()
for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
    for count in (5, 30_011):
        owners = [[one * size // 24 for one in range(24)], [one % size for one in range(24)], [size - 1] * 24]
        owners.append(np.random.default_rng(size).integers(0, size, 24).tolist())
        made = {
            sv.all_reduce_shards({one: shard(one, dtype, count) for one in range(24) if of[one] == rank}).tobytes()
            for of in owners
        }
        assert len(made) == 1, f"rank {rank} of {size}: the cut shows in the result"
        digest.update(made.pop())
every = sv.all_gather_object(digest.hexdigest())
assert len(set(every)) == 1, every
if rank == 0:
    print("hosts", sv.host_count(), "sha256", digest.hexdigest())
"""


def expected():
    """Return the SHA of the sums, added here by the definition of the tree."""

    def shard(number, dtype, count):
        draw = np.random.default_rng(number)
        return (draw.normal(size=count) * 10.0 ** draw.integers(-3, 4, count)).astype(dtype)

    def tree(parts):
        if len(parts) == 1:
            return parts[0]
        half = 1 << ((len(parts) - 1).bit_length() - 1)
        return tree(parts[:half]) + tree(parts[half:])

    digest = hashlib.sha256()
    for dtype in DTYPES:
        wide = np.float32 if dtype is ml_dtypes.bfloat16 else dtype
        for count in COUNTS:
            digest.update(
                tree([shard(one, dtype, count).astype(wide) for one in range(24)])
                .astype(dtype)
                .tobytes()
            )
    return digest.hexdigest()


def check(launch, workers, path):
    options, env = (
        (["--fake-hosts", "2"], {}) if path == "hosts" else ([], {"SYNCVAR_TRANSPORT": path})
    )
    job = launch(PROGRAM, workers=workers, options=options, env=env)
    assert job.wait(120) == 0, str(job)
    assert f"hosts {2 if path == 'hosts' else 1} sha256 {expected()}" in job.out, str(job)


@pytest.mark.parametrize(
    "path", ["hosts", *(pytest.param(path, marks=pytest.mark.slow) for path in ("auto", "zmq"))]
)
def test_24_shards_on_three_workers(launch, path):
    check(launch, 3, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "path"),
    [
        (1, "auto"),
        *((workers, path) for workers in (2, 5, 8, 24) for path in ("auto", "zmq", "hosts")),
    ],
)
def test_24_shards_on_1_2_5_8_and_24_workers(launch, workers, path):
    check(launch, workers, path)
