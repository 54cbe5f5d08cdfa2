"""An array that processes have in common: what one writes the others see, no element of at most 8 bytes is ever torn."""

PROGRAM = """
import time
import numpy as np
import syncvar as sv

ENDS = time.monotonic() + 30
for dtype in ("float64", "int32", "float16", "uint8"):
    x = sv.shared_array(1001, dtype)
    state = sv.shared_array(2, "int64")  # whether rank 0 goes on; how often rank 1 has looked
    kind = np.dtype(dtype)
    # all bytes of the one are unlike those of the other, so a torn element is neither of them
    one, two = (np.frombuffer(bytes([byte]) * kind.itemsize, kind)[0] for byte in (0x11, 0x6E))
    sources = [np.full(1001, value, kind) for value in (one, two)]
    sv.barrier()
    if sv.rank() == 0:
        enough = state[1] + 60             # the other may have looked before anything was written
        while state[1] < enough and time.monotonic() < ENDS:
            for source in sources:
                x[...] = source            # as much at once as the machine can
                x[3::2] = source[3::2]     # one by one
                x[501:] = source[:500]
        state[0] = 1
    else:
        while not state[0] and time.monotonic() < ENDS:
            for read in (x.copy(), x[1:][::3].copy(), np.array([x[500], x[-1]])):
                assert np.isin(read, (0, one, two)).all(), (dtype, read)
            state[1] += 1
    sv.barrier()
    assert time.monotonic() < ENDS and state[1] >= 60
    seen = sv.all_gather_object(x.tolist())
    assert seen[0] == seen[1] and x[0] == two and x[-1] == two
print("never torn")
"""


def test_no_element_is_torn(launch):
    job = launch(PROGRAM, workers=2)
    assert job.wait(120) == 0, str(job)
    assert job.out.count("never torn") == 2
