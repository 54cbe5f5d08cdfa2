"""The flight records that workers leave when something goes wrong."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from syncvar.core.output_files import RECORDS, job_name, keep_newest, remove_job, state_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class FlightRecords:
    """The folder in which the workers of a job leave flight records; it need not exist.

    Args:
        log_dir: The folder for the output of the ranks, or None for a folder of the job's own.
        environ: The environment, which names the folder of all jobs.
        job_id: The identity of the job.
    """

    def __init__(self, log_dir: Path | None, environ: Mapping[str, str], job_id: str) -> None:
        self._has_own = log_dir is None
        self._job_id = job_id
        self.folder = log_dir
        self.refusal = ""
        if log_dir is None:
            top, self.refusal = state_folder(environ)
            self.folder = top / job_name(job_id) if top is not None else None

    def paths(self) -> list[Path]:
        """Return the records."""
        with contextlib.suppress(OSError):
            return sorted(self.folder.glob(RECORDS)) if self.folder is not None else []
        return []

    def remove(self) -> None:
        """Remove the records, partial ones of killed workers, and a folder of the job's own."""
        if self.folder is not None:
            remove_job(self.folder)

    def told(self) -> str:
        """Return the sentence that names the records, or an empty text without records.

        In the folder of all jobs this also removes records of older jobs.
        """
        if self.folder is None:
            return f"no flight records: {self.refusal}"
        if not self.paths():
            return ""
        if not self._has_own:
            return (
                f"flight records in {self.folder} (syncvar explain {shlex.quote(str(self.folder))})"
            )
        keep_newest(self.folder.parent)
        because = f"; {self.refusal}" if self.refusal else ""
        return f"flight records in {self.folder} (syncvar explain {self._job_id[:8]}){because}"
