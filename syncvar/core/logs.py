"""The library's log, `logging.getLogger("syncvar")`, as ranks and servers show it."""

from __future__ import annotations

import logging


def log_at(level: str) -> None:
    """Show the library's log on standard error, unless the program has its own way or asks for no more than usual."""
    log = logging.getLogger("syncvar")
    if level != "warning":
        log.setLevel(level.upper())
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("syncvar %(levelname)s: %(message)s"))
            log.addHandler(handler)
