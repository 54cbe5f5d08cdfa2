"""`--stage`: copies the script's folder to hosts, through the connections to their agents.

It finds and counts all files before it sends any. It never follows links. A link within the folder
stays a link. It leaves out links that lead out of the folder, and names them. `staged_copy`
receives the copy.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.agent_connection import poll_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar_launcher.hosts.agent_connection import RemoteHost
    from syncvar_launcher.options.launch_options import LaunchOptions

NBYTES_MAX = 100 << 20
FILES_MAX = 10_000
_CHUNK = 1 << 18
_SKIPPED = frozenset(
    (
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".tox",
        ".nox",
    )
)
_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
_SHOWN = 3
_UNSENT_MAX = 2 << 20
_PROGRESS_S = 60.0


class Collection(NamedTuple):
    """The files to copy.

    Args:
        folder: The source.
        entries: Path within the folder, kind ("folder", "file" or "link"), mode, and the target of
            a link. Folders come first, links last.
        nbytes: The size of all files together.
        left_out: What is not copied, with the reasons.
    """

    folder: Path
    entries: tuple[tuple[str, str, int, str], ...]
    nbytes: int
    left_out: tuple[str, ...]

    def describe(self) -> str:
        """Return how much is copied, and what is not, as text."""
        files = sum(kind == "file" for _, kind, _, _ in self.entries)
        size = (
            f"{self.nbytes / 1024:.1f} KiB"
            if self.nbytes < 1 << 20
            else f"{self.nbytes / (1 << 20):.1f} MiB"
        )
        words = f"{files} file{'s' * (files != 1)} ({size}) of {self.folder}"
        if self.left_out:
            more = f" and {len(self.left_out) - _SHOWN} more" if len(self.left_out) > _SHOWN else ""
            words += f", without {', '.join(self.left_out[:_SHOWN])}{more}"
        return words

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages from which an agent makes the copy."""
        for path, kind, mode, leads_to in self.entries:
            yield {"kind": "stage", "path": path, "what": kind, "mode": mode, "leads_to": leads_to}
            if kind == "file":
                try:
                    with open(self.folder / path, "rb", opener=_opened) as file:
                        while data := file.read(_CHUNK):
                            yield {"kind": "stage_data", "data": data}
                except OSError as error:
                    raise ConfigError(
                        f"--stage: {self.folder / path} cannot be read: {error.strerror}"
                    ) from None
        yield {"kind": "stage_end"}


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _source_of(options: LaunchOptions) -> Path:
    if options.program.kind == "module":
        return options.program.cwd
    path = options.program.cwd / options.program.target
    if not path.is_file() or (
        options.program.kind == "command" and "/" not in options.program.target
    ):
        raise ConfigError(
            "--stage copies the folder of a script, and there is no file "
            f"{options.program.target} in {options.program.cwd}"
        )
    return path.parent


def collect_files(options: LaunchOptions) -> Collection:
    """Return what `--stage` copies; the key file never is."""
    folder = _source_of(options)
    root = Path(os.path.realpath(folder))
    key = os.path.realpath(options.join.key_file)
    folders, files, links, left_out = [], [], [], []
    nbytes = 0
    waiting = [PurePosixPath()]
    while waiting:
        inner = waiting.pop()
        try:
            entries = sorted(os.scandir(root / inner), key=lambda one: one.name)
        except OSError as error:
            raise ConfigError(f"--stage: {root / inner} cannot be read: {error.strerror}") from None
        if inner.parts and any(one.name in _OF_ENVIRONMENTS for one in entries):
            left_out.append(f"{inner}/ (an environment)")
            continue
        if inner.parts:
            folders.append(
                (str(inner), "folder", stat.S_IMODE(os.stat(root / inner).st_mode) & 0o777, "")
            )
        for one in entries:
            path = inner / one.name
            status = one.stat(follow_symlinks=False)
            if one.is_symlink():
                leads_to = os.path.realpath(root / path)
                if not Path(leads_to).is_relative_to(root):
                    left_out.append(f"{path} (a link out of it)")
                else:
                    links.append((str(path), "link", 0, os.path.relpath(leads_to, root / inner)))
            elif one.is_dir():
                if one.name in _SKIPPED:
                    left_out.append(f"{path}/")
                else:
                    waiting.append(path)
            elif not one.is_file():
                left_out.append(f"{path} (no file)")
            elif str(root / path) == key:
                left_out.append(f"{path} (the key)")
            else:
                files.append((str(path), "file", stat.S_IMODE(status.st_mode) & 0o777, ""))
                nbytes += status.st_size
            if nbytes > NBYTES_MAX or len(files) + len(folders) + len(links) > FILES_MAX:
                raise ConfigError(
                    f"--stage copies at most {FILES_MAX} files and {NBYTES_MAX >> 20} MiB, and "
                    f"{folder} has more: give the script a folder of "
                    f"its own, without its data, or use a shared folder and leave --stage out"
                )
    return Collection(folder, (*folders, *files, *links), nbytes, tuple(left_out))


def stage(remotes: Sequence[RemoteHost], collection: Collection) -> dict[str, str]:
    """Send the copy to hosts; return the reason for each host, by name, that has none.

    Each gets no more at once than its connection takes. A `RemoteHost` with the copy knows its
    folder.
    """
    why: dict[str, str] = {}
    sources = {one.host.name: collection.messages() for one in remotes}
    moved = {one.host.name: time.monotonic() for one in remotes}
    waiting = list(remotes)
    while waiting:
        for one in waiting:
            while (
                one.unsent_nbytes < _UNSENT_MAX
                and (message := next(sources[one.host.name], None)) is not None
            ):
                moved[one.host.name] = time.monotonic()
                one.send(**message)
        said, _ = poll_hosts(waiting, 0.0 if any(one.loss_reason for one in waiting) else 1.0)
        for one, messages in zip(waiting, said, strict=True):
            for message in messages:
                if message["kind"] == "staged":
                    one.staged = message["folder"]
                    why |= (
                        {one.host.name: f"the copy cannot be made: {message['reason']}"}
                        if message["reason"]
                        else {}
                    )
            if (
                not one.staged
                and not one.loss_reason
                and time.monotonic() - moved[one.host.name] > _PROGRESS_S
            ):
                one.end(f"it has taken nothing of the copy for {_PROGRESS_S:g} s")
            if one.loss_reason:
                why[one.host.name] = one.words() or one.loss_reason
        waiting = [one for one in waiting if not one.staged and one.host.name not in why]
    return why


def folder_and_target(remote: RemoteHost, options: LaunchOptions) -> tuple[str, str]:
    """Return the folder in which workers start on a host, and their target there."""
    if not remote.staged:
        return remote.host.cwd or str(options.program.cwd), options.program.target
    if options.program.kind == "module":
        return remote.staged, options.program.target
    return (
        remote.host.cwd or remote.staged,
        f"{remote.staged}/{os.path.basename(options.program.target)}",
    )
