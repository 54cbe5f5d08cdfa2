"""`python -m syncvar_launcher` is `syncvar-launch`."""

from __future__ import annotations

import os
import sys

# By `-m` Python looks into the working directory first, where anything may be called `syncvar`.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(
    os.path.dirname(os.path.abspath(__file__))
):
    del sys.path[0]

from syncvar_launcher.main import program

program()
