"""Output of the library's log, `logging.getLogger("syncvar")`, in ranks and servers."""

from __future__ import annotations

import logging


def log_at(level: str) -> None:
    """Write the log to standard error, unless the program configures it or `level` is "warning"."""
    log = logging.getLogger("syncvar")
    if level != "warning":
        log.setLevel(level.upper())
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("syncvar %(levelname)s: %(message)s"))
            log.addHandler(handler)
