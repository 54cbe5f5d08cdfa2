"""Freed memory is kept: results and copies of calls lie where those of earlier calls lay."""

import numpy as np

__all__ = ["keep_freed_memory"]

_NBYTES = 31 << 20  # a little less than the longest whose end glibc learns from


def keep_freed_memory() -> None:
    """Let the C library keep what is freed instead of giving it back to the system, array by array.

    glibc maps arrays of 128 KiB and more anew each time, until it has seen a longer one freed; then it takes arrays of up to that
    length from its heap, and gives the heap's end back when twice as much is free. A page that comes back from the system costs a
    quarter of a microsecond or more, four times what it takes to reduce it. So one array of 31 MiB, of which nothing is touched,
    is freed here: at most 62 MiB stay. Who sets MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ has decided otherwise, and glibc
    learns nothing; nor do other C libraries.
    """
    np.empty(_NBYTES, np.uint8)
