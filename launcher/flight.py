"""The flight records that workers leave when something goes wrong."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FlightRecords"]


class FlightRecords:
    """The records in a folder, which need not exist.

    Args:
        folder: Where workers write them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def paths(self) -> list[Path]:
        """Return the records that are there."""
        with contextlib.suppress(OSError):
            return sorted(self._folder.glob("flight-rank*.json"))
        return []

    def remove(self) -> None:
        """Remove the records, with what a killed worker may have left of one, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):
            for path in (*self.paths(), *self._folder.glob("flight-rank*.json.*.tmp")):
                path.unlink(missing_ok=True)
            if self._folder.name.startswith("syncvar-flight-"):
                self._folder.rmdir()
