"""The process that workers are forked from; it has the arguments of `worker_main`.

The launcher may start it before it knows the job; the first message has the variables, and the
arguments of each program of the job. The server imports NumPy and syncvar once
(`preloaded_imports`) and reports whether it can fork. Then each request on the socket
SYNCVAR_FORK_FD sends environment, cores and descriptors, and gets a PID. A forked worker unwinds to
`main` here, so that exit codes, tracebacks and exit handlers are the interpreter's own.

With all workers forked, the launcher ends the server and, as a subreaper, becomes the workers'
parent. A worker runs nothing of the script before that.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import select
import socket
import sys
import threading
from typing import Any

import msgpack

from syncvar.bootstrap import worker_main
from syncvar.bootstrap.preloaded_imports import Preloaded, unsupported_blas_reason
from syncvar.core.fork_cleanup import end_with

_FORK_FD = "SYNCVAR_FORK_FD"
_IMPORTED = (
    "numpy",
    "syncvar.transports.zeromq_transport",
    "syncvar.transports.zeromq_links",
    "syncvar.transports.zeromq_sockets",
    "syncvar.shm.fd_passing",
    "syncvar.collectives",
    "syncvar.bootstrap.process",
    "syncvar.core.settings",
    "syncvar.bootstrap.connect",
    "hashlib",
)
"""Modules that a worker needs up to its first collective."""

_REQUEST_MAX = 1 << 20
_LENGTH_BYTES = 8  # prefix of an order
_DESCRIPTORS_MAX = 16
_TEXT_MAX = 500
_EMPTIED = ("__main__", "builtins", "sys")  # modules that the interpreter clears as usual
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def main() -> None:
    """Serve until the launcher ends this process; returns in each worker after its script."""
    end = socket.socket(fileno=int(os.environ.pop(_FORK_FD)))
    programs = _await_order(end)
    shared: dict[str, Any] = {}
    atexit.register(_keep_modules, shared)  # registered first, so it runs last
    worker_main.add_folder(sys.argv[1:])  # so that this imports the same modules as the script
    gc.disable()  # imports create hardly any garbage
    try:
        preloaded = Preloaded(_IMPORTED)
    except Exception as error:
        reason = (
            "importing NumPy and syncvar failed in the process that workers are forked from "
            f"({type(error).__name__}: {str(error)[:_TEXT_MAX]})"
        )
        end.send(msgpack.packb({"cannot": reason, "doubt": ""}))
        end.recv(1)  # waits until the launcher ends this process
        os._exit(1)
    shared |= {name: module for name, module in sys.modules.items() if name not in _EMPTIED}
    shared[""] = shared  # an uncollected cycle keeps them alive
    doubt = unsupported_blas_reason() or _foreign_threads()
    preloaded.hide()
    gc.freeze()  # garbage collections in workers then leave these pages shared
    me, cannot = threading.current_thread(), ""
    if others := [thread.name for thread in threading.enumerate() if thread is not me]:
        cannot = (
            f"the process that workers are forked from has threads ({', '.join(others)}), which a "
            "forked worker would not have"
        )
    end.send(msgpack.packb({"cannot": cannot, "doubt": doubt}))
    request, descriptors, begin = _serve(end)
    end.close()
    gc.enable()
    _become(request, descriptors)
    if request["program"]:
        worker_main.remove_folder(programs[0])
        _set_arguments(programs[request["program"]])
        worker_main.add_folder(sys.argv[1:])
    preloaded.seed()
    if not os.read(begin, 1):
        os._exit(1)  # the server died before it had forked all workers
    os.close(begin)
    worker_main.work()


def _await_order(end: socket.socket) -> list[list[str]]:
    """Wait for the variables of the workers, and for the arguments of each program they may run.

    This process takes the arguments of the first program, as nearly all workers do.
    """
    data = end.recv(_REQUEST_MAX)
    length = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    while data and len(data) < length:
        more = end.recv(_REQUEST_MAX)
        data = data + more if more else b""
    if not data:  # the launcher needs no workers
        os._exit(0)
    order = msgpack.unpackb(data[_LENGTH_BYTES:], unicode_errors="surrogateescape")
    os.environ.update(order["environ"])
    programs: list[list[str]] = order["programs"]
    _set_arguments(programs[0])
    return programs


def _set_arguments(arguments: list[str]) -> None:
    """Replace the arguments of this process, as `sys` shows them."""
    sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] = sys.argv[1:] = arguments


def _foreign_threads() -> str:
    """Return a warning if there are threads that no Python code has started; else an empty text."""
    count = len(os.listdir("/proc/self/task")) - threading.active_count()
    if count <= 0:
        return ""
    return (
        f"the process that workers are forked from has {count} threads beside those of Python, "
        "which a forked worker would not have"
    )


def _serve(end: socket.socket) -> tuple[dict[str, Any], list[int], int]:
    """Fork on request; return only in a worker, with a pipe whose byte says that it may begin."""
    lead_read, lead_write = os.pipe2(os.O_CLOEXEC)
    begin_read, begin_write = os.pipe2(os.O_CLOEXEC)
    count = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(end, _REQUEST_MAX, _DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        request = msgpack.unpackb(data, unicode_errors="surrogateescape")
        answer: dict[str, Any] = {}
        if not request:  # all workers are forked
            # The launcher knows a worker by its session: wait until each leads one.
            os.close(lead_write)
            os.read(lead_read, 1)
            os.write(begin_write, b"." * count)
        else:
            try:
                pid = os.fork()
            except OSError as error:
                answer["errno"] = error.errno
            else:
                if pid == 0:
                    os.setsid()
                    for descriptor in (lead_read, lead_write, begin_write):
                        os.close(descriptor)
                    return request, list(descriptors), begin_read
                answer["pid"] = pid
                count += 1
            for descriptor in descriptors:
                os.close(descriptor)
        end.send(msgpack.packb(answer))


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Apply the environment of a fresh process, and wait until the launcher is the parent."""
    for name, descriptor in zip(request["names"], descriptors, strict=True):
        if name in _STREAMS:
            os.dup2(descriptor, _STREAMS[name])
            os.close(descriptor)
            _open_stream(name)
        else:
            os.set_inheritable(descriptor, True)  # noqa: FBT003  (its parameters have no names)
            os.environ[name] = str(descriptor)
    os.environ.update(request["environ"])
    if request["cores"] is not None:
        os.sched_setaffinity(0, request["cores"])
    _leave_server(request["server"])
    end_with(request["launcher"])


def _open_stream(name: str) -> None:
    """Recreate a stream of `sys`, because the kind of its file has changed."""
    old = getattr(sys, name)
    writes = name != "stdin"
    raw = io.FileIO(_STREAMS[name], "w" if writes else "r", closefd=False)
    raw.name = f"<{name}>"
    buffer: Any = raw  # a second buffer that is dropped would close it
    if not writes:
        buffer = io.BufferedReader(raw)
    elif not old.write_through:
        buffer = io.BufferedWriter(raw)
    more = {"line_buffering": old.line_buffering, "write_through": old.write_through}
    wrapper: Any = io.TextIOWrapper(buffer, old.encoding, old.errors, newline="\n", **more)
    wrapper.mode = "w" if writes else "r"
    for attribute in (name, f"__{name}__"):
        setattr(sys, attribute, wrapper)


def _keep_modules(shared: dict[str, Any]) -> None:
    """Remove preloaded modules from `sys.modules`: the interpreter would clear them at its end.

    Their memory is shared with other workers; clearing would copy nearly all of it. The script and
    its own imports end as usual. Values that it has put into preloaded modules stay until the
    process has ended.
    """
    for name, module in shared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _leave_server(server: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(server)
        while os.getppid() == server:
            select.select([pidfd], [], [])
        os.close(pidfd)
