"""`syncvar test`: check every collective on this machine, with real processes."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.cli.selftest_options import SelfTestResult, outcome_lines, select_collectives
from syncvar.cli.start_workers import is_launched, start_workers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_CALL_TIMEOUT_S = 30.0


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 if all results were correct, else 1."""
    select_collectives(chosen.collectives)
    if is_launched():
        from syncvar.cli.selftest_worker import work

        return work(chosen)
    begin = time.monotonic()
    paths: dict[str, list[SelfTestResult]] = {}
    broken = []
    for transport in ("auto", "zmq") if chosen.transport is None else (chosen.transport,):
        with tempfile.TemporaryDirectory(prefix="syncvar-test-") as folder:
            result = Path(folder) / "result.json"
            settings = {
                "SYNCVAR_TRANSPORT": transport,
                "SYNCVAR_COLLECTIVE_TIMEOUT_S": str(_CALL_TIMEOUT_S),
            }
            code = start_workers(
                "syncvar.cli.selftest_worker",
                ["--result", str(result), *arguments],
                workers=chosen.workers,
                timeout_s=chosen.timeout,
                settings=settings,
            )
            report = json.loads(result.read_text()) if result.exists() else None
        path = transport if report is None else report["path"]
        if report is not None:
            if path in paths:
                continue
            paths[path] = [SelfTestResult(**one) for one in report["outcomes"]]
        if code:
            broken.append(f"the job over {path} ended with exit code {code}")
    lines, is_good = outcome_lines(paths)
    print("\n".join([*lines, *(f"FAIL  {words}" for words in broken)]))
    is_good = is_good and not broken and bool(paths)
    print(
        f"{'OK' if is_good else 'FAIL'}: --workers {chosen.workers} over "
        f"{' and '.join(paths) or 'nothing'}, {time.monotonic() - begin:.1f} s"
    )
    return 0 if is_good else 1
