"""Makes the C library keep freed memory, so that results of later calls reuse it."""

import numpy as np

_NBYTES = 31 << 20  # a little less than glibc's largest dynamic threshold


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory instead of returning it to the system array by array.

    glibc maps arrays of 128 KiB and more anew each time, until it has seen a longer one freed. Then
    it takes arrays of up to that length from its heap, and trims the heap beyond twice as much. A
    page from the system costs four times as much as reducing it. So this frees one untouched array
    of 31 MiB; at most 62 MiB stay. MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ override this;
    other C libraries ignore it.
    """
    np.empty(_NBYTES, np.uint8)
