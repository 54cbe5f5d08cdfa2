"""Where in the user's program a waiting thread stands; read from its frames when somebody asks, never per call."""

from __future__ import annotations

import os
import sys

__all__ = ["call_site"]


def call_site(thread: int) -> str:
    """Return file:line and function of the innermost frame of a thread that is not ours."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("syncvar.") or module.startswith("syncvar.examples."):
            path = frame.f_code.co_filename
            relative = os.path.relpath(path)
            return f"{path if relative.startswith('..') else relative}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "a place unknown"
