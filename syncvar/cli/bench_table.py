"""The table of `syncvar bench`, with the columns and widths of nccl-tests, and its plot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


SHOWN = ("rank 0", "average", "minimum", "maximum")  # choices of `-a`, by number


@dataclass(frozen=True, slots=True)
class Half:
    """One measurement: out of place, or in place."""

    time: float  # shown time of one call in microseconds
    alg_bw: float  # size / time, in GB/s (1e9 bytes)
    bus_bw: float  # `alg_bw` times the factor of the collective
    nwrong: int | None  # wrong elements on all ranks; None without a check
    # Microseconds of one call: of rank 0, average, minimum and maximum over the ranks
    times: tuple[float, float, float, float]
    iterations: int  # number of timed calls


@dataclass(slots=True)
class Row:
    """One line of the table."""

    size: int  # bytes by which the call is rated
    count: int  # elements of the vector, or of one rank's piece or block
    type: str  # dtype
    redop: str  # op, or "none"
    root: int  # root, or -1
    out_of_place: Half  # measurement with another array as the result
    # Measurement with the input as the result; None if the collective has no such call
    in_place: Half | None = None
    model_us: float | None = None  # predicted time in microseconds


def rate(
    seconds: Sequence[float],
    nbytes: int,
    factor: float,
    nwrong: int | None,
    iterations: int,
    shown: int = 1,
) -> Half:
    """Return the measurement from the times of all ranks."""
    microseconds = [one * 1e6 for one in seconds]
    average = sum(microseconds) / len(microseconds)
    times = microseconds[0], average, min(microseconds), max(microseconds)
    time = times[shown]
    rate = nbytes / time / 1e3 if time else 0.0
    return Half(round(time, 6), round(rate, 9), round(rate * factor, 9), nwrong, times, iterations)


def parse_size(text: str) -> int:
    """Return a number of bytes: 8, 4K, 1.5M, 64MiB; each letter is a power of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"a size is a number of bytes such as 8, 4K or 64M, not {text!r}")
    value = float(found[1]) * (1 << _POWERS[found[2].lower()])
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(value)


def sizes(
    first: int, last: int, *, factor: float | None = None, step: int | None = None
) -> list[int]:
    """Return the sizes from `first` to `last`: by a factor (default 2), or by a step."""
    if first > last:
        raise ConfigError(f"the first size ({first}) is larger than the last ({last})")
    if factor is not None and step is not None:
        raise ConfigError("give either -f, a factor, or -i, a step")
    if step is not None and step <= 0:
        raise ConfigError(f"-i must be more than 0, not {step}")
    factor = 2.0 if factor is None else factor
    if step is None and not factor > 1:
        raise ConfigError(f"-f must be more than 1, not {factor:g}")
    found, size = [], first
    while size <= last:
        found.append(size)
        size = size + step if step is not None else max(size + 1, int(size * factor))
    return found


def header(*, predicted: bool = False) -> str:
    """Return the titles of the columns."""
    blank = "# " + " " * 10 + "  " + " " * 12 + "  " + " " * 8 + "  " + " " * 6 + "  " + " " * 6
    lines = [
        blank + "           out-of-place                       in-place          ",
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        + f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}" * 2,
        f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        + f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}" * 2,
    ]
    if predicted:
        lines[1] += f"  {'model':>7}"
        lines[2] += f"  {'(us)':>7}"
    return "\n".join(text.rstrip() for text in lines)


def line(row: Row, *, predicted: bool = False) -> str:
    """Return a line of the table."""
    text = f"{row.size:>12}  {row.count:>12}  {row.type:>8}  {row.redop:>6}  {row.root:>6}"
    text += _half(row.out_of_place) + _half(row.in_place)
    if predicted:
        text += f"  {'-' if row.model_us is None else format_number(row.model_us, 7):>7}"
    return text.rstrip()


def _half(half: Half | None) -> str:
    if half is None:
        return f"  {'-':>7}  {'-':>6}  {'-':>6}  {'N/A':>6}"
    wrong = "N/A" if half.nwrong is None else str(half.nwrong)
    rates = f"{format_number(half.alg_bw, 6):>6}  {format_number(half.bus_bw, 6):>6}"
    return f"  {format_number(half.time, 7):>7}  {rates}  {wrong:>6}"


def format_number(value: float, width: int) -> str:
    """Format a number with up to two decimals, as many as the width allows."""
    digits = len(str(int(value)))
    for places in (2, 1):
        if digits + 1 + places <= width:
            return f"{value:.{places}f}"
    return f"{value:.0f}" if digits <= width else f"{value:.{max(0, width - 6)}e}"


def summary(rows: Sequence[Row]) -> tuple[int, float]:
    """Return the number of wrong elements, and the average bus bandwidth in GB/s."""
    halves = [half for row in rows for half in (row.out_of_place, row.in_place) if half is not None]
    wrong = sum(half.nwrong or 0 for half in halves)
    return wrong, sum(half.bus_bw for half in halves) / len(halves) if halves else 0.0


def require_matplotlib() -> None:
    """Raise ConfigError, before anything is measured, if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib: pip install matplotlib")


def draw(path: str, title: str, rows: Sequence[Row]) -> None:
    """Write a plot; the suffix of `path` chooses the file type."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 8), layout="constrained")
    FigureCanvasAgg(figure)
    times, rates = figure.subplots(2, 1, sharex=True)
    for (dtype, op, root), group in _grouped(rows).items():
        name = f"{dtype}{'' if op == 'none' else f' {op}'}{'' if root < 0 else f' root {root}'}"
        sizes = [row.size for row in group]
        halves = [row.out_of_place for row in group]
        (drawn,) = times.plot(sizes, [half.time for half in halves], marker=".", label=name)
        color = drawn.get_color()
        rates.plot(sizes, [half.bus_bw for half in halves], marker=".", color=color, label=name)
        inside = [(row.size, row.in_place) for row in group if row.in_place is not None]
        if inside:
            sizes = [size for size, _ in inside]
            halves = [half for _, half in inside]
            style: dict[str, Any] = {"ls": "--", "color": color, "label": f"{name}, in place"}
            times.plot(sizes, [half.time for half in halves], **style)
            rates.plot(sizes, [half.bus_bw for half in halves], **style)
        model = [(row.size, row.model_us) for row in group if row.model_us is not None]
        if model:
            times.plot(*zip(*model, strict=True), ls=":", color=color, label=f"{name}, model")
    times.set(title=title, ylabel="time (us)", yscale="log")
    rates.set(xlabel="size (B)", ylabel="bus bandwidth (GB/s)")
    rates.set_xscale("log", base=2)
    for part in (times, rates):
        part.grid(visible=True, alpha=0.3)
        part.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.type, row.redop, row.root), []).append(row)
    return groups
