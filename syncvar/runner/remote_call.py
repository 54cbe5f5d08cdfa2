"""The worker's side of `sv.run`.

Read the call from the inherited descriptor, make it, write the result to a file.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from syncvar.bootstrap.worker_entry import adopt_path, unpack_call
from syncvar.core.errors import ConfigError
from syncvar.protocol.exception_codec import CALLER_MAIN, pack_exception
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runner.local import finding


def main() -> None:
    """Make the call of `sv.run`."""
    descriptor = int(os.environ.pop("SYNCVAR_CALL_FD"))
    folder = Path(os.environ.pop("SYNCVAR_RESULT_DIR"))
    rank = int(os.environ["SYNCVAR_RANK"])
    adopt_path(descriptor)  # again, because `-m` has put the working folder before it
    call = unpack_call(descriptor)
    os.close(descriptor)
    (folder / f"error.{rank}").unlink(missing_ok=True)  # left by an earlier start
    (folder / f"of.{os.environ['SYNCVAR_WORLD_SIZE']}").touch()
    try:
        data = called(call, rank, folder)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the user's error matters more
            _write(folder / f"error.{rank}", pack_exception(error))
        raise
    _write(folder / f"result.{rank}", data)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(f"{path.suffix}.part")
    partial.write_bytes(data)
    partial.rename(path)


def called(call: bytes, rank: int, folder: Path | None = None) -> bytes:
    """Make a call and return its packed result.

    Raises:
        ConfigError: The function cannot be found, or its result cannot travel.
    """
    fields = unpack_object(call)
    builtins_input, builtins.input = builtins.input, _refuse_input
    try:
        return _called(fields, rank, folder)
    finally:
        builtins.input = builtins_input


def _refuse_input(_prompt: object = "", /) -> NoReturn:
    raise EOFError(
        "workers of sv.run have no terminal to read from: pass what input() asks for in args="
    )


def _called(fields: dict[str, Any], rank: int, folder: Path | None) -> bytes:
    function, module = _find(folder, *fields["fn"])
    if "pickled" not in fields:
        args, kwargs = unpack_object(fields["args"]), unpack_object(fields["kwargs"])
        return _packed_result(function(*args, **kwargs), rank)
    from syncvar.runner.by_value import loaded_main, pack_values, unpack_values

    main_names = (CALLER_MAIN, fields["fn"][1]) if fields["is_main"] else ()
    with loaded_main(module if fields["is_main"] else None):
        args, kwargs = unpack_values(fields["pickled"], "the arguments of the function")
        result = function(*args, **kwargs)
        return pack_values(result, f"the result of the function on rank {rank}", main_names)


def _packed_result(result: Any, rank: int) -> bytes:
    try:
        return pack_object(result, place="result", advice="sv.run(..., pickle=True)")
    except ConfigError as error:
        raise ConfigError(
            f"the result of the function on rank {rank} cannot be returned: {error}"
        ) from None


def _find(folder: Path | None, method: str, *where: Any) -> tuple[Any, Any]:
    """Return the function, and its module or the names of its script; None for a copy."""
    if method == "copy":
        from syncvar.runner.by_value import unpack_function

        return unpack_function(*where), None
    module_name, name = where
    with finding(module_name, folder):
        if method == "module":
            module: Any = importlib.import_module(module_name)
        else:
            script_folder = str(Path(module_name).parent)
            if script_folder not in sys.path:
                sys.path.insert(0, script_folder)
            module = SimpleNamespace(**runpy.run_path(module_name, run_name=CALLER_MAIN))
    found = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError(
            f"a worker has imported {module_name} and found no {name!r} in it: define it at the "
            "top of the file, not under if __name__ == '__main__':, which workers do not run"
        ) from None
    return found, module


if __name__ == "__main__":
    main()
