"""`syncvar test`: prove on this machine, with real processes, that every collective gives what it must."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.cli.start_workers import is_launched, start_workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SelfTestResult", "add_options", "outcome_lines", "run"]

_CALL_TIMEOUT_S = 30.0
_SHOWN_FAILURES = 3


@dataclass(slots=True)
class SelfTestResult:
    """What became of one collective on one data path.

    Args:
        name: The collective.
        proves: What its calls prove, in words.
        calls: How many were made by each rank.
        seconds: How long they took.
        failures: In words, with rank; on all ranks.
    """

    name: str
    proves: str
    calls: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("collectives", nargs="*", metavar="collective", help="only these (all)")
    parser.add_argument("--workers", metavar="N", default="4", help="how many processes (4)")
    parser.add_argument(
        "--transport", choices=("auto", "zmq"), help="only this data path (first auto, then zmq)"
    )
    parser.add_argument(
        "-T",
        "--timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="limit of each job, in seconds (120)",
    )
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 when everything was as it must be, else 1.

    Args:
        chosen: The parsed options.
        arguments: The same, as they were given.

    Raises:
        ConfigError: An option is wrong; nothing was started.
    """
    from syncvar.cli.selftest_worker import wanted, work

    wanted(chosen.collectives)
    if is_launched():
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
                f"the job over {transport if told is None else told['path']} ended with exit code {code}"
            )
    lines, is_good = outcome_lines(paths)
    print("\n".join([*lines, *(f"FAIL  {words}" for words in broken)]))
    is_good = is_good and not broken and bool(paths)
    print(
        f"{'OK' if is_good else 'FAIL'}: --workers {chosen.workers} over {' and '.join(paths) or 'nothing'}, "
        f"{time.monotonic() - begin:.1f} s"
    )
    return 0 if is_good else 1


def outcome_lines(paths: Mapping[str, Sequence[SelfTestResult]]) -> tuple[list[str], bool]:
    """Return a line for each collective, with its failures beneath, and whether there are none.

    Args:
        paths: For each data path the outcomes there.

    Example:
        >>> lines, is_good = outcome_lines({"zmq": [SelfTestResult("barrier", "nobody leaves early", 20, 0.1)]})
        >>> lines, is_good
        (['barrier            OK    nobody leaves early; 20 calls over zmq'], True)
    """
    together: dict[str, dict[str, SelfTestResult]] = defaultdict(dict)
    for path, outcomes in paths.items():
        for one in outcomes:
            together[one.name][path] = one
    lines, is_good = [], True
    for name, by_path in together.items():
        failures = [f"{path}: {words}" for path, one in by_path.items() for words in one.failures]
        calls = {one.calls for one in by_path.values()}
        shown = (
            str(calls.pop())
            if len(calls) == 1
            else " and ".join(str(one.calls) for one in by_path.values())
        )
        proves = next(iter(by_path.values())).proves
        lines.append(
            f"{name:<18} {'FAIL' if failures else 'OK':<5} {proves}; {shown} calls over {' and '.join(by_path)}"
        )
        lines += [f"    {words}" for words in failures[:_SHOWN_FAILURES]]
        if len(failures) > _SHOWN_FAILURES:
            lines.append(f"    and {len(failures) - _SHOWN_FAILURES} more")
        is_good = is_good and not failures
    return lines, is_good


def parsed(arguments: Sequence[str] | None = None) -> Any:
    """Read the command line of a worker."""
    parser = argparse.ArgumentParser(prog="syncvar test", allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(arguments)
