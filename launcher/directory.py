"""The private directory of a job; see `syncvar.joining.directory`."""

from __future__ import annotations

from syncvar.joining.directory import JobDirectory, base_directory, runtime_directory

__all__ = ["JobDirectory", "base_directory", "runtime_directory"]
