"""`check_shm`: memory that nobody was given is neither read nor written."""

import os
import re

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import InternalError
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import shm_reduce as shared_reduce
from syncvar.shm import segment_file
from syncvar.shm.segment import SharedSegment
from syncvar.shm.segment_file import create
from syncvar.testing import run_ranks

MIB = 1 << 20
CHECKED = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0, check_shm="on")


@pytest.fixture
def segments():
    """Two ranks' views of one shared memory."""
    created, reason = create(64 * MIB, 2, 2)
    assert created is not None, reason
    made = [SharedSegment.attach(os.dup(created.fd), rank, checks=True) for rank in range(2)]
    yield made
    for shm in made:
        shm.close()
    created.close()


def test_what_has_been_given_out_may_be_used_by_all_ranks(segments):
    for owner in segments:
        for nbytes in (1, 100, 5000, 300_000, 3 * MIB):
            offset = owner.allocate(nbytes)
            for shm in segments:
                assert shm.view(offset, nbytes, np.uint8).size == nbytes
                assert (
                    shm.view(offset + nbytes // 2, nbytes - nbytes // 2, np.uint8).size
                    == nbytes - nbytes // 2
                )


def test_what_has_not_may_be_used_by_nobody(segments):
    offset = segments[1].allocate(5000)
    plan = segment_file.SegmentLayout(64 * MIB, 2)
    start, stop = plan.arrays(1)
    nobodys = [
        (0, 8),
        (0, 20_000),
        (segment_file.HEADER_BYTES, 8),
        (plan.table(0), 64),
        (plan.table(1), 64),
        (plan.region(1)[1] - 64, 64),
        (offset + 8192, 8),
        (offset, 8193),
        (start, stop - start),
        (64 * MIB - 64, 64),
        (64 * MIB, 64),
        (plan.arrays(0)[0], 64),
    ]
    for shm in segments:
        for where, nbytes in nobodys:
            with pytest.raises(
                InternalError,
                match=rf"local rank {shm.local_rank} .* bytes \[{where}, {where + nbytes}\)",
            ):
                shm.view(where, nbytes, np.uint8)


def test_what_has_been_given_back_is_nobodys_again(segments):
    mine, other = segments
    array = mine.empty(10 * MIB, np.uint8)
    offset = mine.locate(array)
    other.view(offset, 10 * MIB, np.uint8)
    del array
    mine.allocate(1)  # reads the note that the array has left
    for shm in segments:
        with pytest.raises(InternalError, match="local rank 0 has not allocated"):
            shm.view(offset, 10 * MIB, np.uint8)


def test_without_the_setting_nothing_is_looked_at():
    created, reason = create(64 * MIB, 1, 1)
    assert created is not None, reason
    shm = SharedSegment.attach(os.dup(created.fd), 0)
    assert not shm.is_checked
    assert shm.view(0, 8, np.uint8).size == 8
    shm.close()
    created.close()


def test_a_call_that_takes_nowhere_for_a_place_is_stopped(monkeypatch):
    """As it once did: the in-place way of persistent calls took 0, which stood for private memory, for an offset."""
    monkeypatch.setattr(shared_reduce, "_are_known", lambda _places: True)

    def fn():
        assert current().shm.is_checked
        x = sv.empty(20_000) if sv.rank() == 0 else np.empty(20_000)
        before = current().shm.entries(0, 20_000).tobytes()
        try:
            for _ in range(5):
                x[...] = 1.0
                sv.all_reduce(x, out=x)
        except sv.SyncvarError as error:
            assert current().shm.entries(0, 8).tobytes() == before[:64]
            return error
        return None

    errors = run_ranks(2, fn, shared=True, config=CHECKED, timeout_s=60)
    assert all(isinstance(error, sv.SyncvarError) for error in errors), errors
    found = [error for error in errors if isinstance(error, InternalError)]
    assert found
    for error in found:
        assert "call " in str(error)
        assert "rank " in str(error)
        assert re.search(
            r"bytes \[0, (80000|160000)\) of shared memory are outside the memory for arrays",
            str(error),
        )
