"""Shows a running `sv.run` in a notebook: a table of its ranks that changes in place.

The launcher answers what each rank does, on its private socket. The view asks while the notebook
waits. It needs IPython's kernel and nothing else; elsewhere there is no view.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.status_client import ask, job_folders, running_jobs
from syncvar.core.html_table import html_table

if TYPE_CHECKING:
    from collections.abc import Mapping

_AFTER_S = 1.0  # shorter jobs show nothing
_EVERY_S = 1.0


class NotebookView:
    """The table of one call of `sv.run`.

    Args:
        pid: The process of its launcher.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = self._next = time.monotonic()
        self._next += _AFTER_S
        self._path = ""
        self._handle: Any = None
        self._count = 0

    def due_s(self) -> float:
        """Return the seconds until `refresh` should be called."""
        return max(0.0, self._next - time.monotonic())

    def refresh(self) -> None:
        """Ask the launcher, and show its answer. An error of the view does not end the job."""
        with contextlib.suppress(Exception):
            status = self._ask()
            if status is not None:
                self._count = len(status["ranks"])
                self._show(status_html(status))
        self._next = time.monotonic() + _EVERY_S

    def finish(self, ending: str) -> None:
        """Replace the table by one line: how the job ended, and how long it took."""
        if self._handle is not None:
            lasted_s = time.monotonic() - self._began
            self._show(
                html_table(f"sv.run: {_ranks(self._count)} {ending} after {lasted_s:.1f} s", [])
            )

    def _ask(self) -> Mapping[str, Any] | None:
        answer = ask(self._path, question="status", log=False) if self._path else None
        if answer is None:  # the first time, and after a restart
            found = running_jobs(job_folders(os.environ))
            self._path = next((path for path, job in found if job["pid"] == self._pid), "")
            answer = ask(self._path, question="status", log=False) if self._path else None
        return answer

    def _show(self, text: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(text), display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(HTML(text))  # type: ignore[no-untyped-call]


def status_html(status: Mapping[str, Any]) -> str:
    """Return the answer to the question "status" as a table in HTML."""
    job, ranks = status["job"], status["ranks"]
    has_hosts = len({one["host"] for one in ranks}) > 1
    rows = []
    for one in ranks:
        waits_for = ", ".join(map(str, one["waits_for"]))
        state = f"{one['state']} for rank {waits_for}" if waits_for else one["state"]
        call = one["call"]
        if call:
            call += f", {'for' if one['is_in_call'] else 'ended'} {one['age_s']:.1f} s"
            call += "" if one["is_in_call"] else " ago"
        host = (one["host"],) if has_hosts else ()
        rows.append((one["rank"], *host, state, call, f"{100 * one['wait_share']:.0f} %"))
    title = f"sv.run: {_ranks(len(ranks))}, {job['lasted_s']:.0f} s"
    if job["restarts"]:
        title += f", {job['restarts']} restart{'s' * (job['restarts'] != 1)}"
    header = ("rank", *(("host",) if has_hosts else ()), "state", "call", "waits")
    return html_table(title, rows, header, code=(3 if has_hosts else 2,))


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
