"""The agent's side of `--stage`: the copy of a script's folder, which ends with the agent.

If the agent is killed, its cleanup process removes the copy.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from syncvar.bootstrap.job_private import JobDirectory
from syncvar.core.errors import SyncvarError, WireError
from syncvar.core.output_files import PRIVATE, create_file
from syncvar_launcher.local.local_workers import LocalWorkers

if TYPE_CHECKING:
    from syncvar_launcher.hosts.agent_protocol import Message


class HostCopy:
    """The copy that the launcher sends."""

    def __init__(self) -> None:
        self._directory: JobDirectory | None = None
        self._keeper: LocalWorkers | None = None
        self._folder = Path()
        self._modes: list[tuple[Path, int]] = []
        self._file = -1
        self._why_not = ""

    def take(self, message: Message) -> Message | None:
        """Handle a message; return the answer after the last one."""
        try:
            if not self._why_not:
                self._make()
                self._do(message)
        except WireError:
            raise
        except (OSError, SyncvarError) as error:
            self._why_not = str(error)
        if message["kind"] != "stage_end":
            return None
        return {"folder": "" if self._why_not else str(self._folder), "reason": self._why_not}

    def close(self) -> None:
        """Remove the copy. Idempotent."""
        self._end_file()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            list(keeper.close())
        if self._directory is not None:
            self._directory.remove()

    def _make(self) -> None:
        if self._directory is None:
            self._directory = JobDirectory(os.environ)
            self._keeper = LocalWorkers(
                self._directory.path, self._directory.lock
            )  # without workers: its guardian removes the folder
            self._folder = self._directory.path / "stage"
            self._folder.mkdir(mode=0o700)

    def _do(self, message: Message) -> None:
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
        path, what = PurePosixPath(message["path"]), message["what"]
        place = self._inside(path)
        if what == "folder":
            place.mkdir(mode=0o700)
            self._modes.append((place, message["mode"] | 0o700))
        elif what == "file":
            self._file = create_file(place, PRIVATE)
            self._modes.append((place, message["mode"] | 0o400))
        elif what == "link":
            self._inside(PurePosixPath(os.path.normpath(path.parent / message["leads_to"])))
            place.symlink_to(message["leads_to"])
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
