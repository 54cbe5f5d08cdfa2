"""What a process of a job is started with: `python …/syncvar/begin.py syncvar.bootstrap script.py …`.

It is run by its path, so that every process imports the package that the launcher has: `python -m` would look into the
working directory first, where anything may be called `syncvar`. What a folder or PYTHONPATH has under that name is not
looked at either, for the package stands in `sys.modules` before anybody asks for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

__all__ = ["command_of", "main"]


def command_of(module: str) -> list[str]:
    """Return the start of a command line that imports a module beside this very package, and calls its `main`.

    Args:
        module: Name of a module of this package, or of the launcher.
    """
    return [sys.executable, os.path.abspath(__file__), module]


def main() -> None:
    """Call `main` of the module that the first argument names; the others are left to it."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file; whoever runs a script puts that script's folder there
    if "syncvar" not in sys.modules:
        here = os.path.dirname(os.path.abspath(__file__))
        spec = importlib.util.spec_from_file_location("syncvar", os.path.join(here, "__init__.py"), submodule_search_locations=[here])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["syncvar"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    sys.exit(importlib.import_module(sys.argv.pop(1)).main())


if __name__ == "__main__":
    main()
