"""The picture of a benchmark: time and bus bandwidth by size."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.cli.bench_table import Row


def require_matplotlib() -> None:
    """Make sure that pictures can be drawn, before anything is measured.

    Raises:
        ConfigError: The package is not there.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib: pip install matplotlib")


def draw(path: str, title: str, rows: Sequence[Row]) -> None:
    """Write a picture; its kind is the end of the file's name.

    Args:
        path: The file.
        title: Above both parts.
        rows: What was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 8), layout="constrained")
    FigureCanvasAgg(figure)
    times, rates = figure.subplots(2, 1, sharex=True)
    for (dtype, op, root), group in _grouped(rows).items():
        name = f"{dtype}{'' if op == 'none' else f' {op}'}{'' if root < 0 else f' root {root}'}"
        sizes = [row.size for row in group]
        (drawn,) = times.plot(
            sizes, [row.out_of_place.time for row in group], marker=".", label=name
        )
        color = drawn.get_color()
        rates.plot(
            sizes, [row.out_of_place.bus_bw for row in group], marker=".", color=color, label=name
        )
        inside = [(row.size, row.in_place) for row in group if row.in_place is not None]
        if inside:
            where = [size for size, _ in inside]
            times.plot(
                where,
                [half.time for _, half in inside],
                ls="--",
                color=color,
                label=f"{name}, in place",
            )
            rates.plot(
                where,
                [half.bus_bw for _, half in inside],
                ls="--",
                color=color,
                label=f"{name}, in place",
            )
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
