"""The `syncvar` command: look at what the package would do, without starting a job."""

from __future__ import annotations

from syncvar.cli.main import main

__all__ = ["main"]
