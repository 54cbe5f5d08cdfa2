"""`syncvar bench`: time a collective by size, check its results, print the table of nccl-tests.

Started by the launcher, it measures on the ranks of that job; otherwise it starts its own workers.
Options, sizes and rates are defined as in nccl-tests: `size` as `syncvar collectives` shows it,
algbw = size / time, and busbw = algbw times a factor that makes it comparable with the hardware.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.cli.bench_options import make_plan
from syncvar.cli.start_workers import is_launched, start_workers
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import check_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def check_files(chosen: argparse.Namespace) -> None:
    """Raise ConfigError before the measurement if a result file cannot be written."""
    for path, origin in ((chosen.json, "--json"), (chosen.plot, "--plot")):
        is_writer = os.environ.get("SYNCVAR_RANK", "0") == "0"
        if path is not None and is_writer:
            check_file(path, origin)


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    make_plan(chosen)
    check_files(chosen)
    if is_launched():
        from syncvar.cli.bench_worker import work

        return work(chosen)
    workers, root = chosen.workers, chosen.root
    if workers.isdigit() and root.isdigit() and int(root) >= int(workers):
        raise ConfigError(f"-r {root}: a job of {workers} workers has no such rank")
    settings = {} if chosen.transport is None else {"SYNCVAR_TRANSPORT": chosen.transport}
    return start_workers(
        "syncvar.cli.bench_worker",
        arguments,
        workers=chosen.workers,
        timeout_s=chosen.timeout,
        settings=settings,
    )
