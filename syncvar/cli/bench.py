"""`syncvar bench`: time a collective by size, check every element of its results, print the table of nccl-tests.

Started by the launcher, it measures on the ranks of that job; otherwise it starts workers of its own. The options have
the letters of nccl-tests where they mean the same. Sizes and rates are defined as there: `size` is what `syncvar
collectives` says, algbw is size / time, and busbw is algbw times a factor that makes it comparable with the rate of the
hardware.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.cli.bench_options import planned
from syncvar.cli.start_workers import is_launched, start_workers
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import check_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def check_files(chosen: argparse.Namespace) -> None:
    """Check, before anything is measured, that the files for the results can be written.

    Raises:
        ConfigError: One of them cannot be written.
    """
    for path, origin in ((chosen.json, "--json"), (chosen.plot, "--plot")):
        is_writer = os.environ.get("SYNCVAR_RANK", "0") == "0"
        if path is not None and is_writer:
            check_file(path, origin)


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Args:
        chosen: The parsed options.
        arguments: The same, as they were given.

    Raises:
        ConfigError: An option is wrong; nothing was started.
    """
    planned(chosen)
    check_files(chosen)
    if is_launched():
        from syncvar.cli.bench_worker import work

        return work(chosen)
    if (
        chosen.workers.isdigit()
        and chosen.root.isdigit()
        and int(chosen.root) >= int(chosen.workers)
    ):
        raise ConfigError(f"-r {chosen.root}: there is no such rank among {chosen.workers}")
    settings = {} if chosen.transport is None else {"SYNCVAR_TRANSPORT": chosen.transport}
    return start_workers(
        "syncvar.cli.bench_worker",
        arguments,
        workers=chosen.workers,
        timeout_s=chosen.timeout,
        settings=settings,
    )
