"""The worker's side of `sv.run`, in a process of the launcher (`main`) or of an engine (`play`).

`main` reads the call from the inherited descriptor, makes it, and writes the result to a file.

A worker of an engine belongs to the engine before and after, so nothing of a rank stays in it,
neither threads nor variables. Only such a worker imports what it needs to join and to leave.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import runpy
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from syncvar.bootstrap.worker_entry import adopt_path, unpack_call
from syncvar.core.errors import ConfigError
from syncvar.protocol.exception_codec import CALLER_MAIN, pack_exception
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runner.local import import_guard

if TYPE_CHECKING:
    from collections.abc import Iterator

_INHERITED = ("XDG_RUNTIME_DIR", "TMPDIR")
_held: list[socket.socket] = []  # at most one


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
        data = make_call(call, rank, folder)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the user's error matters more
            _write(folder / f"error.{rank}", pack_exception(error))
        raise
    _write(folder / f"result.{rank}", data)


def make_call(call: bytes, rank: int, folder: Path | None = None) -> bytes:
    """Make a call and return its packed result; ConfigError if either cannot be found or travel."""
    fields = unpack_object(call)
    builtins_input, builtins.input = builtins.input, _refuse_input
    try:
        return _make_call(fields, rank, folder)
    finally:
        builtins.input = builtins_input


def arrive(address: str) -> bytes:
    """Return a packed `EngineSlot`."""
    from syncvar.bootstrap.job_private import base_directory
    from syncvar.core.host_clock import boot_identity
    from syncvar.runner.engines import EngineSlot, pack

    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("mnt", "pid", "net")]
    ground = "/".join([boot_identity(), *spaces, str(os.getuid()), str(base_directory(os.environ))])
    return pack(EngineSlot(ground, socket.gethostname(), address, _held_port(address), os.getpid()))


def play(data: bytes) -> bytes:
    """Act as a rank for one call; return a packed `End`."""
    from syncvar.bootstrap.process import is_initialized, member
    from syncvar.bootstrap.rendezvous import leave
    from syncvar.bootstrap.worker_main import failure_of
    from syncvar.runner.engines import CallPart, End, pack, unpack

    part = unpack(CallPart, data)
    if part.pid != os.getpid():
        return pack(
            End(
                error="PeerLost",
                message="its process was lost, and started again by the engine",
                exit_code=70,
            )
        )
    environ = {name: os.environ[name] for name in _INHERITED if name in os.environ} | part.environ
    patience_s, has_met = 0.0, False
    try:
        with _with_folders(part.folders), member(environ):
            try:
                result = make_call(part.call, part.rank)
            finally:
                has_met = is_initialized()
        patience_s = float("inf")  # until all have left; the driver may end it earlier
        end = End(result, has_met=has_met)
    except BaseException as error:  # the engine would report a different error
        fault = failure_of(error)
        raised = pack_exception(error)
        end = End(b"", fault.error, fault.message, fault.text, fault.exit_code, has_met, raised)
    leave(patience_s)
    _release_port()
    return pack(end)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(f"{path.suffix}.part")
    partial.write_bytes(data)
    partial.rename(path)


def _refuse_input(_prompt: object = "", /) -> NoReturn:
    raise EOFError(
        "workers of sv.run have no terminal to read from: pass what input() asks for in args="
    )


def _make_call(fields: dict[str, Any], rank: int, folder: Path | None) -> bytes:
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
    with import_guard(module_name, folder):
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


def _held_port(address: str) -> int:
    """Return a port that is reserved for this process until it has been a rank.

    A socket stays bound to it, so that the system gives it to no other process. Both that socket
    and ZeroMQ's set SO_REUSEADDR, and the first never listens. So the second may bind.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    _release_port()
    _held.append(held)
    return int(held.getsockname()[1])


def _release_port() -> None:
    while _held:
        _held.pop().close()


@contextlib.contextmanager
def _with_folders(folders: list[str]) -> Iterator[None]:
    """Append the caller's module path to this process's own."""
    before = list(sys.path)
    sys.path += [folder for folder in folders if folder not in before and os.path.exists(folder)]
    try:
        yield
    finally:
        sys.path[:] = before


if __name__ == "__main__":
    main()
