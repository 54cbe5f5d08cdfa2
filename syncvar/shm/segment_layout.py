"""Where everything is in shared memory: a header, then one region for each local rank.

The header is a page of 64-bit words (native order: all readers are on one host). The abort word has a line of the cache
for itself, because everybody looks at it while waiting. A region begins with the rank's table of channels; the rest of
it is for arrays.
"""

from __future__ import annotations

from syncvar.core.errors import ConfigError

__all__ = [
    "ABORT",
    "GENERATION",
    "HEADER_BYTES",
    "HOST",
    "HUGE_BYTES",
    "LAYOUT_VERSION",
    "LINE_BYTES",
    "LOCAL_WORLD_SIZE",
    "MAGIC",
    "MAGIC_VALUE",
    "PAGE_BYTES",
    "SEGMENT_TOKEN",
    "SHM_BYTES",
    "TABLE_BYTES",
    "USABLE_CORES",
    "VERSION",
    "SegmentLayout",
    "bytes_in_words",
]

LINE_BYTES = 64
PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
HEADER_BYTES = 64 << 10
TABLE_BYTES = 256 << 10

# Indices of the header's words.
MAGIC, VERSION, SHM_BYTES, LOCAL_WORLD_SIZE, USABLE_CORES, GENERATION, HOST, SEGMENT_TOKEN = range(
    8
)
ABORT = LINE_BYTES // 8

_MOST_BYTES = 1 << 46  # half of what a process can address

MAGIC_VALUE = int.from_bytes(b"SYNCVAR\x01", "little")
LAYOUT_VERSION = 2


class SegmentLayout:
    """The offsets of one shared memory, all in bytes from its beginning.

    Args:
        shm_bytes: Size of the whole, a multiple of a page.
        local_world_size: How many ranks share it.

    Raises:
        ConfigError: There is no room for so many ranks, or more than a process can map; the message says how much there
            must be, or may be.

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
                f"shm_bytes ({shm_bytes}) is too small for {local_world_size} ranks on a host: they need at least {least}"
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
        """Return where a rank's region begins and ends."""
        start = HUGE_BYTES + local_rank * self.region_bytes
        return start, start + self.region_bytes

    def table(self, local_rank: int) -> int:
        """Return where a rank's table of channels begins; it has TABLE_BYTES."""
        return self.region(local_rank)[0]

    def arrays(self, local_rank: int) -> tuple[int, int]:
        """Return where the memory for a rank's arrays begins and ends."""
        start, stop = self.region(local_rank)
        return start + TABLE_BYTES, stop


def bytes_in_words(count: int) -> str:
    """Return a size in the largest unit that fits, as messages show it.

    Example:
        >>> bytes_in_words(1 << 40), bytes_in_words(3 << 19), bytes_in_words(100), bytes_in_words(1 << 20)
        ('1 TiB', '1.5 MiB', '100 B', '1 MiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"
