"""`syncvar test`: prove on this machine, with real processes, that every collective gives what it must."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.cli.selftest_options import SelfTestResult, outcome_lines, wanted
from syncvar.cli.start_workers import is_launched, start_workers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_CALL_TIMEOUT_S = 30.0


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 when everything was as it must be, else 1.

    Args:
        chosen: The parsed options.
        arguments: The same, as they were given.

    Raises:
        ConfigError: An option is wrong; nothing was started.
    """
    wanted(chosen.collectives)
    if is_launched():
        from syncvar.cli.selftest_worker import work

        return work(chosen)
    begin = time.monotonic()
    paths: dict[str, list[SelfTestResult]] = {}
    broken = []
    for transport in ("auto", "zmq") if chosen.transport is None else (chosen.transport,):
        with tempfile.TemporaryDirectory(prefix="syncvar-test-") as folder:
            result = Path(folder) / "result.json"
            code = start_workers(
                "syncvar.cli.selftest_worker",
                ["--result", str(result), *arguments],
                workers=chosen.workers,
                timeout_s=chosen.timeout,
                settings={
                    "SYNCVAR_TRANSPORT": transport,
                    "SYNCVAR_COLLECTIVE_TIMEOUT_S": str(_CALL_TIMEOUT_S),
                },
            )
            told = json.loads(result.read_text()) if result.exists() else None
        if told is not None:
            if told["path"] in paths:
                continue
            paths[told["path"]] = [SelfTestResult(**one) for one in told["outcomes"]]
        if code:
            broken.append(
                f"the job over {transport if told is None else told['path']} ended with exit code "
                f"{code}"
            )
    lines, is_good = outcome_lines(paths)
    print("\n".join([*lines, *(f"FAIL  {words}" for words in broken)]))
    is_good = is_good and not broken and bool(paths)
    print(
        f"{'OK' if is_good else 'FAIL'}: --workers {chosen.workers} over "
        f"{' and '.join(paths) or 'nothing'}, {time.monotonic() - begin:.1f} s"
    )
    return 0 if is_good else 1
