"""What workers are forked from: `syncvar.bootstrap.prefork.fork_server script.py …` or `… -m module …`, as for `syncvar.bootstrap.worker_main`.

Where workers are forked the launcher starts one such process, perhaps before it knows what for: its first message tells.
Then the process imports NumPy and syncvar once (`preloaded`), and says whether it can fork workers that are as fresh
ones. Then the launcher asks for one worker after the other, over the socket SYNCVAR_FORK_FD: environment, cores and
descriptors in, the number of a process out. A forked process becomes the worker: it unwinds to the top of this module
and runs the bootstrap there, so that exit codes, tracebacks and handlers at the end are the interpreter's own.

When the launcher has all its workers it ends the server. It is a subreaper then, so that the system makes the workers
its own children, as those that it starts itself. A worker runs nothing of the script before that.
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
from syncvar.bootstrap.prefork.preloaded_imports import Preloaded, why_not_carried
from syncvar.core.parent_death import end_with

__all__ = ["main"]

_FORK_FD = "SYNCVAR_FORK_FD"
_IMPORTED = (
    "numpy",
    "syncvar.transports.zeromq_transport",
    "syncvar.transports.zeromq_control",
    "syncvar.core.network",
    "syncvar.shm.fd_passing",
    "syncvar.collectives",
    "syncvar.bootstrap.identity",
    "syncvar.core.settings",
    "syncvar.bootstrap.connect",
    "hashlib",
)
"""What a worker needs up to its first collective."""

_REQUEST_MAX = 1 << 20
_LENGTH_BYTES = 8  # before an order
_DESCRIPTORS_MAX = 16
_TEXT_MAX = 500
_EMPTIED = ("__main__", "builtins", "sys")  # these end as ever
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def main() -> None:
    """Serve until the launcher ends this process; returns in each worker, when that has run its script."""
    end = socket.socket(fileno=int(os.environ.pop(_FORK_FD)))
    _await_order(end)
    shared: dict[str, Any] = {}
    atexit.register(_leave_whole, shared)  # registered first, so it runs last
    worker_main.add_folder(sys.argv[1:])  # what is imported here is what the script would import
    gc.disable()  # next to nothing of what is imported is garbage
    try:
        preloaded = Preloaded(_IMPORTED)
    except Exception as error:
        why = f"importing NumPy and syncvar failed in the process that workers are forked from ({type(error).__name__}: {str(error)[:_TEXT_MAX]})"
        end.send(msgpack.packb({"cannot": why, "doubt": ""}))
        end.recv(1)  # until the launcher ends this process
        os._exit(1)
    shared |= {name: module for name, module in sys.modules.items() if name not in _EMPTIED}
    shared[""] = shared  # a cycle that no collection looks at keeps them
    doubt = why_not_carried() or _foreign_threads()
    preloaded.hide()
    gc.freeze()  # a collection in a worker leaves these pages alone, so that they stay shared
    others = [
        thread.name for thread in threading.enumerate() if thread is not threading.current_thread()
    ]
    cannot = (
        f"the process that workers are forked from has threads ({', '.join(others)}), which a forked worker would not have"
        if others
        else ""
    )
    end.send(msgpack.packb({"cannot": cannot, "doubt": doubt}))
    request, descriptors, begin = _serve(end)
    end.close()
    gc.enable()
    _become(request, descriptors)
    preloaded.seed()
    if not os.read(begin, 1):
        os._exit(1)  # the server was killed before it had forked all
    os.close(begin)
    worker_main.work()


def _await_order(end: socket.socket) -> None:
    """Wait until it is known what the workers are to run, and with which variables: this process may have been started ahead."""
    data = end.recv(_REQUEST_MAX)
    length = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    while data and len(data) < length:
        more = end.recv(_REQUEST_MAX)
        data = data + more if more else b""
    if not data:  # nothing is to be forked
        os._exit(0)
    order = msgpack.unpackb(data[_LENGTH_BYTES:], unicode_errors="surrogateescape")
    os.environ.update(order["environ"])
    sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] = sys.argv[1:] = order["arguments"]


def _foreign_threads() -> str:
    """Return that there are threads which no Python code has started; empty where there are none."""
    count = len(os.listdir("/proc/self/task")) - threading.active_count()
    return (
        f"the process that workers are forked from has {count} threads beside those of Python, which a forked worker would not have"
        if count > 0
        else ""
    )


def _serve(end: socket.socket) -> tuple[dict[str, Any], list[int], int]:
    """Fork on request; returns in the worker only, with a descriptor that a byte can be read from if it is to begin."""
    led, leads = os.pipe2(os.O_CLOEXEC)
    begin, begins = os.pipe2(os.O_CLOEXEC)
    count = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(end, _REQUEST_MAX, _DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        request = msgpack.unpackb(data, unicode_errors="surrogateescape")
        answer: dict[str, Any] = {}
        if (
            not request
        ):  # that was all: each worker is to lead its session, by which the launcher knows it
            os.close(leads)
            os.read(led, 1)
            os.write(begins, b"." * count)
        else:
            try:
                pid = os.fork()
            except OSError as error:
                answer["errno"] = error.errno
            else:
                if pid == 0:
                    os.setsid()
                    for descriptor in (led, leads, begins):
                        os.close(descriptor)
                    return request, list(descriptors), begin
                answer["pid"] = pid
                count += 1
            for descriptor in descriptors:
                os.close(descriptor)
        end.send(msgpack.packb(answer))


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over what a fresh process is given, and wait until the launcher is the parent."""
    for name, descriptor in zip(request["names"], descriptors, strict=True):
        if name in _STREAMS:
            os.dup2(descriptor, _STREAMS[name])
            os.close(descriptor)
            _open_stream(name)
        else:
            os.set_inheritable(descriptor, True)
            os.environ[name] = str(descriptor)
    os.environ.update(request["environ"])
    if request["cores"] is not None:
        os.sched_setaffinity(0, request["cores"])
    _leave_server(request["server"])
    end_with(request["launcher"])


def _open_stream(name: str) -> None:
    """Make a stream of `sys` anew, as the interpreter does at its start: it remembers what kind of file it had."""
    old = getattr(sys, name)
    writes = name != "stdin"
    raw = io.FileIO(_STREAMS[name], "w" if writes else "r", closefd=False)
    raw.name = f"<{name}>"
    buffer: Any = (
        raw
        if writes and old.write_through
        else io.BufferedWriter(raw)
        if writes
        else io.BufferedReader(raw)
    )
    made: Any = io.TextIOWrapper(
        buffer,
        old.encoding,
        old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    made.mode = "w" if writes else "r"
    for place in (name, f"__{name}__"):
        setattr(sys, place, made)


def _leave_whole(shared: dict[str, Any]) -> None:
    """Take what was imported before the fork from the modules that the interpreter's end empties one after the other.

    They share their memory with other workers: to empty them would copy nearly all of it, and only then free the copy.
    The script and what it has imported itself end as ever, but for what it has put into these modules or their classes:
    that stays until the process has ended.
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
