"""The picture of a comparison: time and ratio against size, a column for each number of workers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from comparison.libraries import LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["draw", "missing"]


def missing() -> str:
    """Return why no picture can be drawn, or nothing."""
    return (
        ""
        if find_spec("matplotlib")
        else "--png needs the package matplotlib: pip install matplotlib"
    )


def draw(path: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a picture; its kind is the end of the file's name.

    Args:
        path: The file.
        title: Above everything.
        rows: As `table.compare` makes them, for all numbers of workers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workers = sorted({row["workers"] for row in rows})
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    figure = Figure(figsize=(6 * len(workers), 6 * len(collectives)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2 * len(collectives), len(workers), sharex=True, squeeze=False)
    for column, count in enumerate(workers):
        for index, collective in enumerate(collectives):
            chosen = [
                row for row in rows if (row["workers"], row["collective"]) == (count, collective)
            ]
            times, ratios = panels[2 * index][column], panels[2 * index + 1][column]
            _draw_times(times, chosen)
            _draw_ratios(ratios, chosen)
            times.set(title=f"{collective}, {count} workers", ylabel="time (us)", yscale="log")
            ratios.set(ylabel="best peer / syncvar", yscale="log", xlabel="size (B)")
            for one in (times, ratios):
                one.set_xscale("log", base=2)
                one.grid(visible=True, alpha=0.3)
                if one.get_legend_handles_labels()[0]:
                    one.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _draw_times(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for name, (_, middle, _) in row["us"].items():
            key = (name, row["kind"] if name == "syncvar" else "private")
            if (row["size"], middle) not in series.setdefault(key, []):
                series[key].append((row["size"], middle))
    for (name, kind), points in series.items():
        label = f"{LABELS[name]} {kind}" if name == "syncvar" else LABELS[name]
        panel.plot(
            *zip(*sorted(points), strict=True),
            marker=".",
            ls="-" if name == "syncvar" else "--",
            label=label,
        )


def _draw_ratios(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    panel.axhline(1, color="black", lw=0.8)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        points = sorted(
            (row["size"], *row["ratio_by_round"], row["ratio"])
            for row in rows
            if row["kind"] == kind and "ratio" in row
        )
        if points:
            sizes, low, _, high, ratio = zip(*points, strict=True)
            (drawn,) = panel.plot(sizes, ratio, marker=".", label=f"syncvar {kind}")
            panel.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.2)
