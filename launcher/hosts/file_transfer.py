"""Copies files between the launcher and its hosts, through the connections to their agents.

`--stage` copies the script's folder. It finds and counts all files before it sends any. It never
follows links. A link within the folder stays a link. It leaves out links that lead out of the
folder, and names them. The copy ends with the agent; if the agent is killed, its cleanup process
removes the copy.

A call of `sv.run` travels to the hosts in parts, and its results travel back in parts. Flight
records and totals of calls come back whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.bootstrap.job_private import JobDirectory
from syncvar.core.errors import ConfigError, SyncvarError, WireError, error_message
from syncvar.core.output_files import EVIDENCE, PRIVATE, LostFile, create_file, write_error_text
from syncvar.core.progress_line import size_text
from syncvar_launcher.hosts.agent_connection import poll_hosts
from syncvar_launcher.hosts.agent_protocol import CALL_PART_NBYTES
from syncvar_launcher.local.local_workers import LocalWorkers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncvar.core.progress_line import ProgressLine
    from syncvar_launcher.hosts.agent_connection import RemoteHost
    from syncvar_launcher.hosts.agent_protocol import Message
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.options.launch_options import LaunchOptions, RankProgram

NBYTES_MAX = 100 << 20
FILES_MAX = 10_000
_CHUNK = 1 << 18
_CACHES = (".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__")
_SKIPPED = frozenset((".git", ".hg", ".svn", ".tox", ".nox", *_CACHES))
_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
_SHOWN = 3
_UNSENT_MAX = 2 << 20
_PROGRESS_S = 60.0
_OF_THE_CALL = ("SYNCVAR_CALL_FD", "SYNCVAR_RESULT_DIR", "SYNCVAR_OUTCOME_FILE", "SYNCVAR_PASS_FDS")
_RESULT = re.compile(r"(?:result|error|of)\.\d{1,7}|unguarded")

_Entry = tuple[str, str, int, str]
"""Path within the folder, kind ("folder", "file" or "link"), mode, and the target of a link."""


class Collection(NamedTuple):
    """The files to copy."""

    folder: Path  # the source
    entries: tuple[_Entry, ...]  # what is in it; folders come first, links last
    nbytes: int  # the size of all files together
    left_out: tuple[str, ...]  # what is not copied, with the reasons

    def describe(self) -> str:
        """Return how much is copied, and what is not, as text."""
        files = sum(kind == "file" for _, kind, _, _ in self.entries)
        size = f"{self.nbytes / 1024:.1f} KiB"
        if self.nbytes >= 1 << 20:
            size = f"{self.nbytes / (1 << 20):.1f} MiB"
        text = f"{files} file{'s' * (files != 1)} ({size}) of {self.folder}"
        if self.left_out:
            more = f" and {len(self.left_out) - _SHOWN} more" if len(self.left_out) > _SHOWN else ""
            text += f", without {', '.join(self.left_out[:_SHOWN])}{more}"
        return text

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages from which an agent makes the copy."""
        for path, kind, mode, target in self.entries:
            fields = {"path": path, "type": kind, "mode": mode, "link_target": target}
            yield {"kind": "stage", **fields}
            if kind == "file":
                try:
                    with open(self.folder / path, "rb", opener=_open_no_follow) as file:
                        while data := file.read(_CHUNK):
                            yield {"kind": "stage_data", "data": data}
                except OSError as error:
                    raise ConfigError(
                        f"--stage: {self.folder / path} cannot be read: {error.strerror}"
                    ) from None
        yield {"kind": "stage_end"}


def collect_files(options: LaunchOptions) -> Collection:
    """Return the files that `--stage` copies, which never include the key file."""
    return _FileCollector(_source_of(options), os.path.realpath(options.join.key_file)).collect()


class _FileCollector:
    """Finds the files to copy: all in a folder, except environments, caches and the key."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._root = Path(os.path.realpath(folder))
        self._key = key
        self._folders: list[_Entry] = []
        self._files: list[_Entry] = []
        self._links: list[_Entry] = []
        self._left_out: list[str] = []
        self._nbytes = 0

    def collect(self) -> Collection:
        waiting = [PurePosixPath()]
        while waiting:
            inner = waiting.pop()
            entries = self._list(inner)
            if inner.parts and any(one.name in _OF_ENVIRONMENTS for one in entries):
                self._left_out.append(f"{inner}/ (an environment)")
                continue
            if inner.parts:
                mode = stat.S_IMODE(os.stat(self._root / inner).st_mode) & 0o777
                self._folders.append((str(inner), "folder", mode, ""))
            for one in entries:
                if one.is_dir(follow_symlinks=False) and one.name not in _SKIPPED:
                    waiting.append(inner / one.name)
                else:
                    self._add(one, inner / one.name)
                self._check_size()
        entries_found = (*self._folders, *self._files, *self._links)
        return Collection(self._folder, entries_found, self._nbytes, tuple(self._left_out))

    def _list(self, inner: PurePosixPath) -> list[os.DirEntry[str]]:
        path = self._root / inner
        try:
            return sorted(os.scandir(path), key=lambda one: one.name)
        except OSError as error:
            raise ConfigError(f"--stage: {path} cannot be read: {error.strerror}") from None

    def _add(self, one: os.DirEntry[str], path: PurePosixPath) -> None:
        """Add a file or link, or name what is left out."""
        if one.is_symlink():
            target = os.path.realpath(self._root / path)
            if not Path(target).is_relative_to(self._root):
                self._left_out.append(f"{path} (a link out of it)")
            else:
                link_target = os.path.relpath(target, self._root / path.parent)
                self._links.append((str(path), "link", 0, link_target))
        elif one.is_dir():
            self._left_out.append(f"{path}/")
        elif not one.is_file():
            self._left_out.append(f"{path} (no file)")
        elif str(self._root / path) == self._key:
            self._left_out.append(f"{path} (the key)")
        else:
            status = one.stat(follow_symlinks=False)
            self._files.append((str(path), "file", stat.S_IMODE(status.st_mode) & 0o777, ""))
            self._nbytes += status.st_size

    def _check_size(self) -> None:
        count = len(self._files) + len(self._folders) + len(self._links)
        if self._nbytes > NBYTES_MAX or count > FILES_MAX:
            raise ConfigError(
                f"--stage copies at most {FILES_MAX} files and {NBYTES_MAX >> 20} MiB, and "
                f"{self._folder} has more: give the script a folder of "
                f"its own, without its data, or use a shared folder and leave --stage out"
            )


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _source_of(options: LaunchOptions) -> Path:
    sources = [_folder_of(one, options.program.cwd) for one in options.programs]
    others = [one for one in sources if not os.path.samefile(one, sources[0])]
    if others:
        raise ConfigError(
            f"--stage copies one folder, and the programs are in {sources[0]} and {others[0]}: "
            "put them into one folder, or use a shared folder"
        )
    return sources[0]


def _folder_of(program: RankProgram, cwd: Path) -> Path:
    if program.kind == "module":
        return cwd
    path = cwd / program.target
    is_searched = program.kind == "command" and "/" not in program.target
    if is_searched or not path.is_file():
        raise ConfigError(
            f"--stage copies the folder of a script, and there is no file {program.target} in {cwd}"
        )
    return path.parent


def stage(
    remotes: Sequence[RemoteHost], collection: Collection, line: ProgressLine
) -> dict[str, str]:
    """Send the copy to hosts; return the reason for each host, by name, that has none.

    Each gets no more at once than its connection takes. A `RemoteHost` with the copy knows its
    folder. `line` shows how many bytes each host has.
    """
    failed: dict[str, str] = {}
    sources = {one.host.name: collection.messages() for one in remotes}
    sent_at = {one.host.name: time.monotonic() for one in remotes}
    nbytes = dict.fromkeys(sources, 0)  # of files, queued for each host
    waiting = list(remotes)
    while waiting:
        if line.is_due():
            line.show(_progress_text(waiting, nbytes, collection.nbytes))
        for one in waiting:
            source = sources[one.host.name]
            while one.unsent_nbytes < _UNSENT_MAX and (message := next(source, None)) is not None:
                sent_at[one.host.name] = time.monotonic()
                nbytes[one.host.name] += len(message.get("data", b""))
                one.send(**message)
        limit_s = 0.0 if any(one.loss_reason for one in waiting) else 1.0
        received, _ = poll_hosts(waiting, min(limit_s, line.due_s()))
        now = time.monotonic()
        for one, messages in zip(waiting, received, strict=True):
            name = one.host.name
            if reason := _take_folder(one, messages):
                failed[name] = f"the copy cannot be made: {reason}"
            if not one.staged and not one.loss_reason and now - sent_at[name] > _PROGRESS_S:
                one.end(f"it has taken nothing of the copy for {_PROGRESS_S:g} s")
            if one.loss_reason:
                failed[name] = one.words() or one.loss_reason
        waiting = [one for one in waiting if not one.staged and one.host.name not in failed]
    return failed


def _take_folder(one: RemoteHost, messages: Sequence[Message]) -> str:
    """Note the folder of the copy; return why there is none, "" without a failure."""
    reason = ""
    for message in messages:
        if message["kind"] == "staged":
            one.staged, reason = message["folder"], message["reason"]
    return reason


def _progress_text(waiting: Sequence[RemoteHost], nbytes: dict[str, int], total: int) -> str:
    copied = {one.host.name: max(0, nbytes[one.host.name] - one.unsent_nbytes) for one in waiting}
    slowest = sorted(copied, key=lambda name: copied[name])[:_SHOWN]
    shown = [f"{name} has {size_text(copied[name], total)}" for name in slowest]
    done = len(nbytes) - len(waiting)
    return f"--stage: {done} of {len(nbytes)} hosts have the copy; {', '.join(shown)}"


def folder_and_targets(remote: RemoteHost, options: LaunchOptions) -> tuple[str, list[str]]:
    """Return the folder in which workers start on a host, and the target of each program there."""
    programs = options.programs
    if not remote.staged:
        return remote.host.cwd or str(options.program.cwd), [one.target for one in programs]
    targets = [
        one.target if one.kind == "module" else f"{remote.staged}/{os.path.basename(one.target)}"
        for one in programs
    ]
    has_module = any(one.kind == "module" for one in programs)  # found in the folder of the start
    return remote.staged if has_module else remote.host.cwd or remote.staged, targets


class HostCopy:
    """The copy on a host: its agent makes it from messages of the launcher, and removes it."""

    def __init__(self) -> None:
        self._directory: JobDirectory | None = None
        self._keeper: LocalWorkers | None = None
        self._folder = Path()
        self._modes: list[tuple[Path, int]] = []
        self._file = -1
        self._failure = ""

    def take(self, message: Message) -> Message | None:
        """Handle a message; return the answer after the last one."""
        try:
            if not self._failure:
                self._create_folder()
                self._write(message)
        except WireError:
            raise
        except (OSError, SyncvarError) as error:
            self._failure = error_message(error)
        if message["kind"] != "stage_end":
            return None
        return {"folder": "" if self._failure else str(self._folder), "reason": self._failure}

    def close(self) -> None:
        """Remove the copy. Idempotent."""
        self._end_file()
        if self._directory is not None:
            self._directory.remove()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end_cleanup()

    def _create_folder(self) -> None:
        if self._directory is None:
            self._directory = JobDirectory(os.environ)
            # Without workers: its cleanup process removes the folder.
            self._keeper = LocalWorkers(self._directory.path, self._directory.lock)
            self._folder = self._directory.path / "stage"
            self._folder.mkdir(mode=0o700)

    def _write(self, message: Message) -> None:
        if message["kind"] == "stage_data":
            if self._file < 0:
                raise WireError("there is no file to write to")
            view = memoryview(message["data"])
            while view:
                view = view[os.write(self._file, view) :]
            return
        self._end_file()
        if message["kind"] == "stage_end":
            for place, mode in reversed(self._modes):
                place.chmod(mode & 0o777)
            self._modes.clear()
            return
        path, kind = PurePosixPath(message["path"]), message["type"]
        place = self._inside(path)
        if kind == "folder":
            place.mkdir(mode=0o700)
            self._modes.append((place, message["mode"] | 0o700))
        elif kind == "file":
            self._file = create_file(place, PRIVATE)
            self._modes.append((place, message["mode"] | 0o400))
        elif kind == "link":
            self._inside(PurePosixPath(os.path.normpath(path.parent / message["link_target"])))
            place.symlink_to(message["link_target"])
        else:
            raise WireError("what is to be copied is no folder, file or link")

    def _inside(self, path: PurePosixPath) -> Path:
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise WireError("a path of the copy leads out of it")
        return self._folder / path

    def _end_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def without_call(environ: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of the program that reaches a host, without the call of `sv.run`.

    Messages carry the call to that host.
    """
    chosen = os.environ if environ is None else environ
    return {name: value for name, value in chosen.items() if name not in _OF_THE_CALL}


def call_parts(environ: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the call that `sv.run` passed to the launcher, in parts; nothing without a call."""
    descriptor = int(environ.get("SYNCVAR_CALL_FD", "-1"))
    if descriptor < 0:
        return
    at = 0
    while part := os.pread(descriptor, CALL_PART_NBYTES, at):
        at += len(part)
        yield part


def forget_results(environ: Mapping[str, str]) -> None:
    """Remove what an earlier attempt has left for the caller: partial results, and exceptions."""
    folder = environ.get("SYNCVAR_RESULT_DIR")
    for path in Path(folder).glob("*") if folder is not None else ():
        if path.suffix == ".part" or path.name.startswith("error."):
            path.unlink(missing_ok=True)


def result_parts(folder: Path) -> Iterator[tuple[str, bytes, bool]]:
    """Yield what ranks have left in a folder, in parts.

    Each part is the name of a file, some bytes of it, and whether they are its last. After the
    last part of a file this function removes it.
    """
    for path in sorted(folder.iterdir()):
        if not _RESULT.fullmatch(path.name):
            continue  # still being written
        with path.open("rb") as file:
            part = file.read(CALL_PART_NBYTES)
            while following := file.read(CALL_PART_NBYTES):
                yield path.name, part, False
                part = following
            yield path.name, part, True
        path.unlink()


def keep_result(environ: Mapping[str, str], name: str, data: bytes, *, is_last: bool) -> None:
    """Append a part to a result, in the folder where the caller of `sv.run` looks for it."""
    folder = environ.get("SYNCVAR_RESULT_DIR")
    if folder is None or not _RESULT.fullmatch(name):
        raise WireError(f"a result {name[:40]!r} was not asked for")
    partial = Path(folder, f"{name}.part")
    with contextlib.suppress(FileNotFoundError):  # the caller has gone, and its folder with it
        with partial.open("ab") as file:
            file.write(data)
        if is_last:
            partial.rename(Path(folder, name))


class ReceivedFiles:
    """Writes files that ranks of other hosts leave, and reports those that it cannot write."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._lost_results: set[str] = set()

    def keep_record(self, name: str, data: bytes, host: str) -> None:
        """Write a flight record, or totals of calls."""
        from syncvar.core.output_files import is_record, write_record  # only after failures

        origin, folder = "--stats", str(self._folder)
        if is_record(name):
            origin, folder = EVIDENCE, str(self._job.records.folder or "")
        elif re.fullmatch(r"stats-\d+\.\d+\.json", name) is None:
            return
        if folder:
            try:
                write_record(folder, name, data.decode("utf-8", "backslashreplace"))
            except OSError as error:
                lost = LostFile(str(Path(folder, name)), origin, write_error_text(error))
                self._job.lost_files.add([lost], host)

    def keep_result(self, name: str, data: bytes, host: str, *, is_last: bool) -> None:
        """Write a part of a result; if that fails, drop the rest and name the result at the end."""
        if name in self._lost_results:
            return
        try:
            keep_result(self._job.environ, name, data, is_last=is_last)
        except OSError as error:
            self._lost_results.add(name)
            self._job.lost_files.add([LostFile(name, "sv.run", write_error_text(error))], host)
