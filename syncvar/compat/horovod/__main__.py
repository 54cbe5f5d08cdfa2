"""Run a program that imports `horovod.torch`, unchanged.

syncvar-launch --workers 2 -m syncvar.compat.horovod train.py --epochs 3
"""

from __future__ import annotations

import importlib
import runpy
import sys

_PACKAGE = "syncvar.compat.horovod"
_MODULES = ("", ".torch", ".torch.elastic")


def main() -> None:
    """Give our modules Horovod's names, and run the script of the command line."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {_PACKAGE} SCRIPT [ARGUMENT ...]")
    for name in _MODULES:
        sys.modules[f"horovod{name}"] = importlib.import_module(_PACKAGE + name)
    del sys.argv[0]
    sys.path[0] = sys.argv[0].rpartition("/")[0] or "."
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
