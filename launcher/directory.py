"""The private directory of a job; see `syncvar.runtime.directory`."""

from __future__ import annotations

from syncvar.runtime.directory import JobDirectory, base_directory, runtime_directory

__all__ = ["JobDirectory", "base_directory", "runtime_directory"]
