"""The number of a worker's pushes in a file, so that a restart of all ranks can report lost pushes.

The file is mapped memory: counting costs no system call, and survives the death of the process.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_NAME = "pushes-{}"

_CONTENT = struct.Struct("<QQ")  # attempt + 1, so that 0 marks a new file; number of pushes


def tally_path(folder: str, rank: int) -> str:
    """Return the path of a worker's file."""
    return str(Path(folder) / _NAME.format(rank))


def take_tallies(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder that the launcher is about to remove, by name."""
    return {path.name: path.read_bytes() for path in folder.glob(_NAME.format("*"))}


def put_tallies(tallies: dict[str, bytes], folder: Path) -> None:
    """Write the files to the new folder."""
    for name, content in tallies.items():
        (folder / name).write_bytes(content)


class PushCounter:
    """The file of one worker.

    Attributes:
        before: Pushes that an earlier attempt counted; 0 if there was none.
    """

    def __init__(self, path: str, generation: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _CONTENT.size)
            self._memory = mmap.mmap(descriptor, _CONTENT.size)
        finally:
            os.close(descriptor)
        self._generation = generation + 1
        attempt, pushes = _CONTENT.unpack_from(self._memory)
        self.before = pushes if 0 < attempt <= generation else 0

    def count(self, pushes: int) -> None:
        """Store a count."""
        _CONTENT.pack_into(self._memory, 0, self._generation, pushes)

    def close(self) -> None:
        """Unmap the memory; the file stays."""
        self._memory.close()
