"""The plot of `syncvar bench --plot`: time and bus bandwidth by size."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.cli.bench_table import Row


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
