"""Layout of the segment: a header page, then one region for each local rank.

The header holds 64-bit words in native order. The abort word has a cache line of its own, because
all waiting ranks read it. A region begins with the rank's channel table; the rest is for arrays.
"""

from __future__ import annotations

from syncvar.core.errors import ConfigError

LINE_BYTES = 64
PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
HEADER_BYTES = 64 << 10
TABLE_BYTES = 256 << 10

# Indices of the header's words.
MAGIC, VERSION, SHM_BYTES, LOCAL_WORLD_SIZE = 0, 1, 2, 3
USABLE_CORES, GENERATION, HOST, SEGMENT_TOKEN = 4, 5, 6, 7
ABORT = LINE_BYTES // 8

_MOST_BYTES = 1 << 46  # half of what a process can address

MAGIC_VALUE = int.from_bytes(b"SYNCVAR\x01", "little")
LAYOUT_VERSION = 2


class SegmentLayout:
    """The offsets of one segment, in bytes.

    Args:
        shm_bytes: Size of the segment, a multiple of a page.
        local_world_size: Number of ranks that share it.

    Raises:
        ConfigError: The size is too small for so many ranks, or too large to map; the message has
            the limit.

    Example:
        >>> layout = SegmentLayout(16 << 20, 2)
        >>> layout.region_bytes >> 20, [layout.region(rank)[0] >> 20 for rank in range(2)]
        (6, [2, 8])
    """

    __slots__ = ("local_world_size", "shm_bytes")

    def __init__(self, shm_bytes: int, local_world_size: int) -> None:
        least = HUGE_BYTES * (1 + local_world_size)
        if local_world_size < 1 or shm_bytes < least:
            raise ConfigError(
                f"shm_bytes ({shm_bytes}) is too small for {local_world_size} ranks on a host: "
                f"they need at least {least}"
            )
        if shm_bytes > _MOST_BYTES:
            raise ConfigError(
                f"shm_bytes ({shm_bytes}) is more than a process can map: at most {_MOST_BYTES}"
            )
        self.shm_bytes = shm_bytes
        self.local_world_size = local_world_size

    @property
    def region_bytes(self) -> int:
        """Size of each rank's region: a multiple of 2 MiB, so that huge pages fit."""
        return (self.shm_bytes - HUGE_BYTES) // self.local_world_size // HUGE_BYTES * HUGE_BYTES

    def region(self, local_rank: int) -> tuple[int, int]:
        """Return start and end of a rank's region."""
        start = HUGE_BYTES + local_rank * self.region_bytes
        return start, start + self.region_bytes

    def table(self, local_rank: int) -> int:
        """Return the offset of a rank's channel table of TABLE_BYTES."""
        return self.region(local_rank)[0]

    def arrays(self, local_rank: int) -> tuple[int, int]:
        """Return start and end of the memory for a rank's arrays."""
        start, stop = self.region(local_rank)
        return start + TABLE_BYTES, stop


def bytes_in_words(count: int) -> str:
    """Return a size in the largest unit that fits.

    Example:
        >>> bytes_in_words(1 << 40), bytes_in_words(3 << 19), bytes_in_words(100)
        ('1 TiB', '1.5 MiB', '100 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"
