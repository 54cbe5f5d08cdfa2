"""Collects the files that the launcher, ranks and servers could not write."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from syncvar.core.output_files import AUTO_LOG, EVIDENCE, LostFile, check_file, check_folder
from syncvar.core.process_ids import process_name
from syncvar_launcher.io.output import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncvar_launcher.options.launch_options import LaunchOptions

_SHOWN = 20


class LostFiles:
    """Collects lost files, each once, in the order in which they were lost."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, str, str], LostFile] = {}

    def add(self, files: Iterable[LostFile], where: str = "") -> None:
        """Add files; `where` is the rank or server that wrote them, empty for the launcher."""
        for lost in files:
            self._lost.setdefault((lost.path, lost.origin, where), lost)

    def add_record(self, number: int, record: Mapping[str, Any]) -> None:
        """Add the file that a rank or server reports; ignore a malformed record."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            path, origin, reason = (
                str(record[name])[:4096] for name in ("path", "origin", "reason")
            )
            self.add(
                [LostFile(path, origin, reason, int(record["missing_nbytes"]))],
                process_name(number),
            )

    def lines(self, *, has_failed: bool) -> list[str]:
        """Return a sentence for each file, for flight records only after a failure."""
        shown = [
            f"{f'{where}: ' if where else ''}{lost}"
            + (
                "; set XDG_STATE_HOME to a folder with free space"
                if lost.origin == EVIDENCE
                else ""
            )
            for (_, _, where), lost in self._lost.items()
            if has_failed or lost.origin != EVIDENCE
        ]
        rest = len(shown) - _SHOWN
        return [
            *map(escape, shown[:_SHOWN]),
            *([f"{rest} more files could not be written"] if rest > 0 else []),
        ]

    @property
    def has_result(self) -> bool:
        """Whether one of them is a file that the user asked for."""
        return any(lost.origin != EVIDENCE for lost in self._lost.values())


def check_requested_files(chosen: LaunchOptions, *, is_local: bool) -> None:
    """Check before the start that every requested file can be written."""
    if chosen.output.log_dir is not None:
        check_folder(str(chosen.output.log_dir), "--log-dir")
    if chosen.output.events is not None:
        check_file(str(chosen.output.events), "--events")
    if chosen.output.stats and not isinstance(chosen.output.stats, bool | str):
        check_file(str(chosen.output.stats), "--stats")
    if is_local and chosen.runtime.trace:
        check_folder(chosen.runtime.trace, "SYNCVAR_TRACE")
    if is_local and chosen.runtime.auto_log:
        check_file(chosen.runtime.auto_log, AUTO_LOG)
