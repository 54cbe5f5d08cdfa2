"""Entry point of every process of a job.

The command is `python …/worker_entry.py syncvar.bootstrap.worker_main script.py …`. It names this
file by its path, so that every process imports the launcher's package. `python -m` would search
the working directory first. Neither that nor PYTHONPATH can replace the package, because this
module puts it into `sys.modules`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_LENGTH_BYTES = 8  # prefix of the packed path


def command_of(module: str) -> list[str]:
    """Return the start of a command line that imports a module and calls its `main`."""
    return [sys.executable, os.path.abspath(__file__), module]


def pack_path() -> bytes:
    """Return this program's module path, as the head of a call of `sv.run`.

    The path must not travel in PYTHONPATH: programs that a worker starts would inherit it, even
    other Pythons.
    """
    folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    data = os.fsencode("\0".join([sys.executable, *folders]))
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def adopt_path(descriptor: int) -> None:
    """Use the module path of the caller of `sv.run`, from a file that begins with `pack_path()`.

    Another interpreter searches its own folders first. The position of the file stays.
    """
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    executable, *folders = os.fsdecode(os.pread(descriptor, length, _LENGTH_BYTES)).split("\0")
    if executable == sys.executable:
        sys.path[:] = folders
    else:
        sys.path += [one for one in folders if one not in sys.path and os.path.exists(one)]


def unpack_call(descriptor: int) -> bytes:
    """Return the data after the path in such a file."""
    start = _LENGTH_BYTES + int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    data, size = bytearray(), os.fstat(descriptor).st_size - start
    while len(data) < size:  # one system call reads 2 GiB at most
        data += os.pread(descriptor, size - len(data), start + len(data))
    return bytes(data)


def main() -> None:
    """Call `main` of the module that the first argument names, with the other arguments."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    if "syncvar" not in sys.modules:
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            "syncvar", os.path.join(here, "__init__.py"), submodule_search_locations=[here]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["syncvar"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    if "SYNCVAR_CALL_FD" in os.environ:
        adopt_path(int(os.environ["SYNCVAR_CALL_FD"]))
    sys.exit(importlib.import_module(sys.argv.pop(1)).main())


if __name__ == "__main__":
    main()
