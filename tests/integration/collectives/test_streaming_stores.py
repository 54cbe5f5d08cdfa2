"""Results of 32 MiB and more are written past the caches: also where they end a few bytes after a line."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import everywhere

CONFIG = RuntimeConfig(collective_timeout_s=60.0, rendezvous_timeout_s=60.0)
MORE = (0, 1, 2, 3, 5, 15, 16, 17)  # elements of four bytes


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("all_gather", 2, 2 << 20),
        ("broadcast", 2, 4 << 20),
        ("all_reduce", 4, 2 << 20),
        ("gather", 2, 4 << 20),
    ],
)
def test_no_byte_is_written_beside_a_result_that_ends_behind_a_line(name, size, count):
    def fn():
        for more in MORE:
            x = np.full(count + more, sv.rank() + 1, np.float32)
            wanted = {
                "all_gather": [1.0, 2.0],
                "broadcast": [1.0],
                "all_reduce": [10.0],
                "gather": [1.0, 2.0] if sv.rank() == 0 else None,
            }[name]
            for _ in range(2):
                if wanted is None:
                    getattr(sv, name)(x)
                    continue
                guarded = np.zeros(32 + x.size * len(wanted), np.float32)
                out = guarded[16:-16]
                made = getattr(sv, name)(x, out=out)
                assert made is out
                assert (out.reshape(len(wanted), -1) == np.array(wanted, np.float32)[:, None]).all()
                assert not guarded[:16].any()
                assert not guarded[-16:].any()

    everywhere(size, fn, shared=True, config=CONFIG)
