"""Key-value stores through which ranks of several hosts find rank 0, if no port is configured.

The first rank of each host puts an entry with its host's name and size. Rank 0 puts one with its
address and the secret. `ProcessManager` uses PMI 1.1 (Flux RFC 13; MPICH, Flux) on an inherited
descriptor. `FolderStore` uses a private folder that all hosts see, named after the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import select
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.bootstrap.launch_env.rank_placement import add_host, host_of_each
from syncvar.core.errors import ConfigError, RendezvousError
from syncvar.core.exit_status import is_failing
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.output_files import PRIVATE, make_private_folder, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.bootstrap.launch_env.base import LaunchInfo

_VARIABLE = "SYNCVAR_RENDEZVOUS_DIR"
_FOLDER_NAME = "folder in which the ranks meet"
_REMEDY = f"set {_VARIABLE} to a folder that all hosts have, and in which you may make one"
_STALE_S = 7 * 86400.0
_PAUSE_S = 0.05
_CARD_MAX = 4096
_LINE_MAX = 4096


def shared_folder(environ: Mapping[str, str]) -> Path:
    """Return the checked private folder that all hosts see.

    Raises:
        ConfigError: It is not private to this user, or cannot be created.
    """
    folder = environ.get(_VARIABLE, "")
    path = (
        Path(folder) / f"syncvar-{os.getuid()}"
        if folder
        else Path(environ.get("HOME") or "/") / ".syncvar"
    )
    make_private_folder(path, _FOLDER_NAME, _REMEDY)
    return path


class KeyValueStore:
    """A store for small texts; subclasses define where they are."""

    def add_host(self, info: LaunchInfo) -> LaunchInfo:
        """Add what the store knows about the hosts to the identity of this rank."""
        return info

    def put(self, key: str, text: str) -> None:
        """Put an entry that all ranks can read after the next `turn`."""
        raise NotImplementedError

    def read(self, key: str, owner: str) -> str:
        """Return an entry; wait for it if necessary.

        `owner` names the rank that puts it, for messages.
        """
        raise NotImplementedError

    def turn(self) -> None:
        """Wait until all ranks have put their entries."""

    def done(self) -> None:
        """Declare that this rank has read what it needs."""

    def remove(self) -> None:
        """Remove the entries; rank 0 calls this when all ranks have met. Idempotent."""


class FolderStore(KeyValueStore):
    """Entries as files. Readers wait for a file, so there are no turns.

    Raises:
        ConfigError: The folder is not private to this user, or cannot be created.
    """

    def __init__(self, environ: Mapping[str, str], run: str, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._path = (
            shared_folder(environ) / hashlib.blake2b(run.encode(), digest_size=12).hexdigest()
        )
        make_private_folder(self._path, _FOLDER_NAME, _REMEDY)
        with contextlib.suppress(OSError):
            now = self._path.lstat().st_mtime
            for other in self._path.parent.iterdir():  # left over by runs that were killed
                if (
                    now - other.lstat().st_mtime > _STALE_S
                    and other.is_dir()
                    and not other.is_symlink()
                ):
                    shutil.rmtree(other)

    def put(self, key: str, text: str) -> None:
        """Put an entry atomically."""
        write_file(self._path, key, text, PRIVATE)

    def read(self, key: str, owner: str) -> str:
        """Return an entry once it exists."""
        while True:
            with contextlib.suppress(OSError):
                os.listdir(self._path)  # refreshes the cache of a network file system
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(self._path / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                with os.fdopen(descriptor, "rb") as file:
                    status = os.fstat(descriptor)
                    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                        raise ConfigError(f"{self._path / key} is not of this user")
                    return file.read(_CARD_MAX).decode("ascii", "replace")
            if time.monotonic() > self._until:
                raise RendezvousError(
                    f"{owner} has put nothing down in {self._path} for {self._timeout_s:g} s; do "
                    f"all ranks run, and do all hosts have this folder? {_VARIABLE} names "
                    "another; or set MASTER_ADDR and MASTER_PORT to a free port of rank 0's "
                    "host, and SYNCVAR_KEY_FILE"
                )
            time.sleep(_PAUSE_S)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._path, ignore_errors=True)


class ProcessManager(KeyValueStore):
    """Entries that the process manager keeps for the run, over PMI 1.1.

    An MPI library in this process may use the same descriptor, so nothing of it is changed. A
    process that ends without `finalize` counts as crashed, and the manager kills all others. If an
    MPI library is in use, it sends `finalize`.

    Attributes:
        name: The process manager's name of this run.

    Raises:
        ConfigError: This process has no such descriptor.
        RendezvousError: No answer came, or one that cannot be parsed.
    """

    def __init__(self, environ: Mapping[str, str], timeout_s: float) -> None:
        text = environ["PMI_FD"]
        self._descriptor = int(text)
        self._timeout_s = timeout_s
        self._rest = b""
        try:
            is_socket = stat.S_ISSOCK(os.fstat(self._descriptor).st_mode)
        except OSError:
            is_socket = False
        if not is_socket:
            raise ConfigError(
                f"PMI_FD={text} is no socket of this process: mpiexec has started another one, "
                "which started this. Let mpiexec start this one, keep the descriptor open "
                "(close_fds=False), or set SYNCVAR_WORLD_SIZE=1 where this process is alone on "
                "purpose"
            )
        self._process = os.getpid()
        self.name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, text: str) -> None:
        """Put an entry."""
        self._ask(
            f"put kvsname={self.name} key=syncvar-{key} value={text.encode().hex()}", "put_result"
        )

    def turn(self) -> None:
        """Wait until all ranks have come here."""
        self._ask("barrier_in", "barrier_out")

    def read(self, key: str, owner: str) -> str:
        """Return an entry that was put before the last turn."""
        try:
            return bytes.fromhex(
                self._ask(f"get kvsname={self.name} key=syncvar-{key}", "get_result")["value"]
            ).decode()
        except (ValueError, RendezvousError) as error:
            raise RendezvousError(
                f"{owner} has put no entry {key!r} with the process manager (PMI): {error}"
            ) from error

    def add_host(self, info: LaunchInfo) -> LaunchInfo:
        """Add the hosts, as the process manager knows them, to the identity of this rank.

        Raises:
            ConfigError: The ranks of a host do not follow each other.
        """
        mapping = self._ask(f"get kvsname={self.name} key=PMI_process_mapping", "get_result")[
            "value"
        ]
        hosts = host_of_each(mapping, info.world_size)
        info = add_host(
            info,
            hosts,
            [f"host {host}" for host in hosts],
            "Give each host all of its ranks at once, for instance by mpiexec -ppn N",
        )
        return info._replace(run=f"{info.run} {self.name}")

    def done(self) -> None:
        """Declare that this rank may end without the others."""
        register_exit(self._finish)

    def _finish(self) -> None:
        # If this process fails, the manager should end the others.
        if os.getpid() == self._process and not is_failing() and not _is_mpi_in_use():
            with contextlib.suppress(RendezvousError):
                self._ask("finalize", "finalize_ack")

    def _ask(self, words: str, expected: str) -> dict[str, str]:
        """Send a request and return the fields of its answer."""
        until = time.monotonic() + self._timeout_s
        line = f"cmd={words}\n".encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            answer = self._line(until)
        except OSError as error:
            raise RendezvousError(
                f"the process manager (PMI_FD={self._descriptor}) is not to be spoken to: "
                f"{error.strerror}"
            ) from error
        fields = dict(part.partition("=")[::2] for part in answer.split())
        if fields.get("cmd") != expected or fields.get("rc", "0") != "0":
            raise RendezvousError(
                f"the process manager answers {words.partition(' ')[0]!r} with {answer!r}"
            )
        return fields

    def _line(self, until: float) -> str:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        while b"\n" not in self._rest:
            left_s = until - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise RendezvousError(
                    f"the process manager (PMI_FD={self._descriptor}) has not answered for "
                    f"{self._timeout_s:g} s: do all ranks come to sv.init()?"
                )
            more = os.read(self._descriptor, _LINE_MAX)
            if not more or len(self._rest) > _LINE_MAX:
                raise RendezvousError(
                    f"the process manager (PMI_FD={self._descriptor}) is gone, or not understood"
                )
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("ascii", "replace")


def _is_mpi_in_use() -> bool:
    """Return whether an MPI library of this process is initialized.

    It then finalizes PMI itself.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines if "/libmpi" in line}
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            flag = ctypes.c_int(0)
            ctypes.CDLL(path).MPI_Initialized(ctypes.byref(flag))
            if flag.value:
                return True
    return False
