"""Reading the memory of another process: what is there, what is not there any more, and what was never there."""

import os
import subprocess
import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.shm.channel_table import ProbeCell, ProcessReader

CHILD = """
import ctypes, sys
memory = ctypes.create_string_buffer(bytes(range(250)) * 400)
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child():
    """Another process: its number, where 100 000 bytes lie in it, and a function that ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:

        def end():
            process.stdin.close()
            process.wait(120)

        try:
            yield process.pid, int(process.stdout.readline()), end
        finally:
            process.kill()


def test_the_memory_of_another_process_is_read(child):
    process, address, _ = child
    reach = ProcessReader([process, os.getpid()])
    wanted = np.tile(np.arange(250, dtype=np.uint8), 400)
    own = np.arange(300_000, dtype=np.float32)
    for hold in (False, True):
        made, copy = np.zeros(100_000, np.uint8), np.zeros_like(own)
        assert reach.read(0, address, made, hold=hold)
        assert np.array_equal(made, wanted)
        assert reach.read(0, address + 250, made[:500], hold=hold)
        assert reach.read(1, own.ctypes.data, copy, hold=hold)
        assert np.array_equal(copy, own)


def test_a_spot_is_found_only_where_it_is(child):
    process, address, end = child
    spot = ProbeCell()
    reach = ProcessReader([process, os.getpid()])
    assert reach.finds(1, spot.address, spot.number)
    assert not reach.finds(1, spot.address, spot.number ^ 1)
    assert not reach.finds(1, 4096, spot.number)
    number = int.from_bytes(bytes(range(8)), "little")
    assert reach.finds(0, address, number)
    end()
    assert not reach.finds(0, address, number)


def test_the_end_of_a_process_and_a_refusal_are_told_apart(child):
    process, _, end = child
    reach = ProcessReader([process])
    made = np.zeros(10)
    with pytest.raises(
        sv.SyncvarError, match=r"rank 0 .* cannot be read any more .*SYNCVAR_SINGLE_COPY=off"
    ):
        reach.read(0, 4096, made)
    end()
    assert reach.read(0, 4096, made) is False
