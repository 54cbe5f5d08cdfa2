"""`syncvar status` and `syncvar top`: what the ranks of a running job do, from its launcher."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from syncvar.cli.running_jobs import add_job_argument, ask, ask_job, choose_job, job_text
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

_INTERVAL_S = 2.0
_INTERVAL_MIN_S = 0.5
_CALL_WIDTH = 48
_RANKS_SHOWN = 3  # late ranks in a row
_KINDS_SHOWN = 8
_MEMORY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_RATE_UNITS = ("B", "kB", "MB", "GB", "TB")
_WAITED_MIN = 0.03  # share of time below which a late rank has no place in the table

_TITLES = (
    *("rank", "host", "state", "call", "age", "waits", "for rank"),
    *("CPU", "memory", "calls/s", "bytes/s", "steps/s"),
)
_SERVER_TITLES = ["server", "host", "state", "CPU", "memory", "position"]
_KIND_TITLES = ["calls of all ranks", "variable", "path", "calls/s", "bytes/s", "share of time"]
_LINK_TITLES = ["link", "path", "bytes/s"]
# What a terminal without room leaves out first, and the widths to which it cuts texts.
_LESS_NEEDED = ("memory", "CPU", "bytes/s", "calls/s", "steps/s", "variable", "host")
_CUT_WIDTHS = {
    "state": 9,
    "call": 24,
    "calls of all ranks": 24,
    "path": 12,
    "for rank": 8,
    "for worker": 8,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `syncvar status`."""
    add_job_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def add_top_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `syncvar top`."""
    add_options(parser)
    parser.add_argument(
        "--interval",
        type=float,
        default=_INTERVAL_S,
        metavar="S",
        help=f"seconds between two looks ({_INTERVAL_S:g}); at least {_INTERVAL_MIN_S:g}",
    )


def run(chosen: argparse.Namespace) -> int:
    """Print once what the ranks do."""
    answer = ask_job(choose_job(chosen.job), question="status")
    print(json.dumps(answer, indent=1) if chosen.json else status_text(answer), end="")
    if chosen.json:
        print()
    return 0


def run_top(chosen: argparse.Namespace) -> int:
    """Show what the ranks do until the job ends; print it once if nobody looks."""
    if chosen.interval < _INTERVAL_MIN_S:
        raise ConfigError(f"--interval {chosen.interval:g} is below {_INTERVAL_MIN_S:g} seconds")
    if chosen.json or not sys.stdout.isatty():
        return run(chosen)
    try:
        from rich.live import Live
    except ImportError:
        raise ConfigError(
            'syncvar top needs rich: pip install "syncvar[watch]". `syncvar status` does without'
        ) from None
    path = choose_job(chosen.job)
    answer = ask_job(path, question="status")
    last: dict[str, Any] | None = answer
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while last is not None:
                answer = last
                live.update(_screen(answer, live.console.width), refresh=True)
                time.sleep(chosen.interval)
                last = ask(path, question="status")
    except KeyboardInterrupt:
        return 0
    print(f"{status_text(answer)}the job has ended, or its launcher does not answer")
    return 0


def status_text(answer: Mapping[str, Any]) -> str:
    """Return an answer as text."""
    lines = [f"job {job_text(answer['job'])}", _about(answer), ""]
    lines += _aligned([_titles(answer), *map(_row, answer["ranks"])])
    if answer["servers"]:
        lines += ["", *_aligned([_SERVER_TITLES, *map(_server_row, answer["servers"])])]
    if kinds := _kinds(answer):
        lines += ["", *_aligned([_KIND_TITLES, *kinds])]
    if links := _links(answer):
        lines += ["", *_aligned([_LINK_TITLES, *links])]
    lines += [""] * bool(answer["stragglers"])
    lines += [one["text"] for one in answer["stragglers"]]
    return "\n".join(lines) + "\n"


def _titles(answer: Mapping[str, Any]) -> list[str]:
    """Return the titles of the table; an elastic job has the numbers of workers in it."""
    word = answer["job"].get("process_word", "rank")
    return [title.replace("rank", word) for title in _TITLES]


def _about(answer: Mapping[str, Any]) -> str:
    job = answer["job"]
    parts = [f"{len(job['hosts'])} host{'s' * (len(job['hosts']) != 1)}"]
    if job["restarts"]:
        parts.append(f"restarted {job['restarts']} time{'s' * (job['restarts'] != 1)}")
    if answer["window_s"] > 0:
        parts.append(f"shares and rates of the last {answer['window_s']:.1f} s")
    error_ns = max((rank["clock_error_ns"] for rank in answer["ranks"]), default=0)
    if error_ns > 0:
        parts.append(f"clocks of hosts compared within {error_ns / 1e6:.1f} ms")
    return ", ".join(parts)


def _row(rank: Mapping[str, Any]) -> list[str]:
    call = rank["call"] if rank["is_in_call"] else ""
    if not call and rank["call"]:
        call = f"after {rank['call']}"
    return [
        str(rank["rank"]) + (f" ({rank['program']})" if rank["program"] else ""),
        rank["host"],
        rank["state"] + (f" at {rank['site']}" if rank["site"] else ""),
        _shortened(call),
        _age(rank["age_s"]) if rank["call"] else "",
        percent_text(rank["wait_share"]),
        _late(rank),
        percent_text(rank["cpu_share"]),
        _memory(rank["rss_bytes"]),
        _rate(rank["calls_per_s"]),
        _nbytes_rate(rank["bytes_per_s"]),
        f"{rank['steps_per_s']:.3g}" if rank["steps"] else "-",
    ]


def _late(rank: Mapping[str, Any]) -> str:
    """Return the ranks that a rank waits for: now, or most of its time."""
    if rank["waits_for"]:
        texts = [f"{late} (now)" for late in rank["waits_for"]]
    else:
        waits = sorted(rank["waits"].items(), key=lambda one: -one[1])
        texts = [f"{late} ({percent_text(share)})" for late, share in waits if share >= _WAITED_MIN]
    return ", ".join(texts[:_RANKS_SHOWN]) + ", ..." * (len(texts) > _RANKS_SHOWN)


def _server_row(server: Mapping[str, Any]) -> list[str]:
    return [
        str(server["server"]),
        server["host"],
        server["state"],
        percent_text(server["cpu_share"]),
        _memory(server["rss_bytes"]),
        server["position"],
    ]


def _kinds(answer: Mapping[str, Any]) -> list[list[str]]:
    kinds = sorted(answer["calls"], key=lambda one: -one["share"])[:_KINDS_SHOWN]
    return [
        [
            _shortened(one["call"]),
            one["variable"],
            one["path"],
            _rate(one["calls_per_s"]),
            _nbytes_rate(one["bytes_per_s"]),
            percent_text(one["share"]),
        ]
        for one in kinds
    ]


def _links(answer: Mapping[str, Any]) -> list[list[str]]:
    return [
        [f"{one['rank']} to {one['peer']}", one["path"], _nbytes_rate(one["bytes_per_s"])]
        for one in answer["links"]
        if one["bytes_per_s"] > 0
    ]


def _aligned(rows: Sequence[Sequence[str]], width: int = 0) -> list[str]:
    """Return the lines of a table; columns without a text below their title are left out.

    If `width` is not 0, the lines have at most that many characters: less needed columns are left
    out, then texts are cut.

    Example:
        >>> _aligned([["rank", "call", "memory"], ["0", "all_reduce" * 3, "1 B"]], 30)
        ['rank  call', '0     all_reduceall_reduceall…']
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = {column[0]: max(map(len, column)) for column in columns}
    gaps = 2 * len(widths) - 2
    for title in _LESS_NEEDED:
        least = sum(min(one, _CUT_WIDTHS.get(name, one)) for name, one in widths.items())
        if not width or least + gaps <= width or len(widths) < 2:
            break
        if widths.pop(title, 0):
            gaps -= 2
    for title, least in _CUT_WIDTHS.items():
        if width and title in widths:
            excess = sum(widths.values()) + gaps - width
            widths[title] -= max(0, min(excess, widths[title] - least))
    cells = [
        [_shortened(text, widths[column[0]]).ljust(widths[column[0]]) for text in column]
        for column in columns
        if column[0] in widths
    ]
    return ["  ".join(row).rstrip() for row in zip(*cells, strict=True)]


def _screen(answer: Mapping[str, Any], width: int) -> RenderableType:
    """Return what `syncvar top` shows."""
    from rich.console import Group
    from rich.text import Text

    title, *lines = _aligned([_titles(answer), *map(_row, answer["ranks"])], width)
    parts = [
        Text(f"job {job_text(answer['job'])}", style="bold", no_wrap=True, overflow="ellipsis"),
        Text(_about(answer)),
        *(Text(one["text"], style="bold yellow") for one in answer["stragglers"]),
        Text(f"\n{title}", style="bold", no_wrap=True),
    ]
    for line, rank in zip(lines, answer["ranks"], strict=True):
        parts.append(Text(line, style=_STYLES.get(rank["state"], ""), no_wrap=True))
    blocks = (
        [_SERVER_TITLES, *map(_server_row, answer["servers"])],
        [_KIND_TITLES, *_kinds(answer)],
        [_LINK_TITLES, *_links(answer)],
    )
    for block in blocks:
        if len(block) > 1:
            title, *lines = _aligned(block, width)
            parts += [Text(f"\n{title}", style="bold", no_wrap=True)]
            parts += [Text("\n".join(lines), no_wrap=True)]
    parts.append(Text("\nCtrl-C ends this view; the job goes on", style="dim"))
    return Group(*parts)


_STYLES = {
    "failed": "bold red",
    "lost": "red",
    "silent": "bold red",
    "stopped": "red",
    "finished": "dim",
}


def _shortened(text: str, width: int = _CALL_WIDTH) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent_text(share: float) -> str:
    """Return a share as text, as in "41 %"."""
    return f"{share:.0%}".replace("%", " %")


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _memory(nbytes: float) -> str:
    return _scaled(nbytes, 1024, _MEMORY_UNITS)


def _nbytes_rate(nbytes: float) -> str:
    return _scaled(nbytes, 1000, _RATE_UNITS)


def _scaled(nbytes: float, base: int, units: Sequence[str]) -> str:
    """Return a number of bytes with its unit.

    Example:
        >>> _scaled(1, 1024, _MEMORY_UNITS), _scaled(35.5 * 2**20, 1024, _MEMORY_UNITS)
        ('1 B', '35.5 MiB')
    """
    power = 0
    while nbytes >= base and power < len(units) - 1:
        nbytes, power = nbytes / base, power + 1
    return f"{nbytes:.{1 if power and nbytes < 100 else 0}f} {units[power]}"
