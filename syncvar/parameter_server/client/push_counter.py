"""How many pushes a worker has made, kept in a file: whoever is started in its place after all have ended can tell how many are lost.

The file is mapped memory, so a count costs no call of the system, and what was counted last is there whoever is killed.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_NAME = "pushes-{}"

_CONTENT = struct.Struct("<QQ")  # generation + 1, so that a new file has none; pushes


def tally_path(folder: str, rank: int) -> str:
    """Return where the file of a worker is."""
    return str(Path(folder) / _NAME.format(rank))


def take_tallies(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder that is about to be removed, by name."""
    return {path.name: path.read_bytes() for path in folder.glob(_NAME.format("*"))}


def put_tallies(tallies: dict[str, bytes], folder: Path) -> None:
    """Put files into the folder that takes its place."""
    for name, content in tallies.items():
        (folder / name).write_bytes(content)


class PushCounter:
    """The file of one worker.

    Args:
        path: It; made if need be.
        generation: Which start of the job this is.

    Attributes:
        before: What the process of an earlier start had counted; 0 where there was none.
    """

    def __init__(self, path: str, generation: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _CONTENT.size)
            self._memory = mmap.mmap(descriptor, _CONTENT.size)
        finally:
            os.close(descriptor)
        self._generation = generation + 1
        written_in, pushes = _CONTENT.unpack_from(self._memory)
        self.before = pushes if 0 < written_in <= generation else 0

    def count(self, pushes: int) -> None:
        """Keep a count."""
        _CONTENT.pack_into(self._memory, 0, self._generation, pushes)

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._memory.close()
