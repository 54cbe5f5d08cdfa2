"""Draw how fast all_reduce is beside its peers, for docs/benchmarks.md.

The numbers come from bench/results. The other pictures of that page draw their bars with `bars`.
"""

import json
import math

import svg

RESULTS = svg.HERE.parents[1] / "bench" / "results"
NEWEST = "2026-11-26.json"  # written by bench/compare.py --json
ARRAYS = {"private": ("ordinary arrays", "blue"), "resident": ("sv.empty, in place", "green")}
FASTER, SLOWER = "green", "orange"
WIDTH = 640  # as wide as the column of text on the site
UNITS = {1 << 20: "MiB", 1 << 10: "KiB", 1: "B"}


def results(name=NEWEST):
    """Return the numbers of a file of bench/results."""
    return json.loads((RESULTS / name).read_text())


def size_name(nbytes):
    """Return a size such as "64 KiB"."""
    unit = next(one for one in UNITS if nbytes >= one)
    return f"{nbytes // unit} {UNITS[unit]}"


def draw():
    """Return the picture of all_reduce: a bar for each size, up if syncvar is faster."""
    rows = [row for part in results()["comparison"] for row in part["rows"]]
    rows = [row for row in rows if row["collective"] == "all_reduce"]
    picture = svg.Picture(WIDTH, 556, "All-reduce: time of the fastest peer, divided by syncvar's")
    picture.text(20, 30, picture.title, size=16, bold=True)
    for at, (words, kind) in enumerate(ARRAYS.values()):
        picture.box(20 + at * 150, 44, 14, 14, kind=kind, radius=2)
        picture.text(40 + at * 150, 56, words, size=13, color=svg.MUTED)
    picture.text(WIDTH - 20, 56, "above the line syncvar is faster", size=13, anchor="end")
    for at, workers in enumerate((2, 4)):
        _panel(picture, 84 + at * 240, workers, [row for row in rows if row["workers"] == workers])
    return picture.render()


def _panel(picture, top, workers, rows):
    """Draw the bars of one number of workers, with `top` as the upper end of its scale."""
    step, base = 40, top + 4 * 40  # pixels for a factor of two; where the ratio is 1
    picture.text(20, top + 4, f"{workers} workers", size=14, bold=True)
    for power in range(4):
        y = base - power * step
        color = svg.INK if power == 0 else "#d0d7de"
        picture.line((60, y), (WIDTH - 20, y), color=color, dashed=power > 0)
        picture.text(52, y + 4, f"{2**power}x", size=12, anchor="end", color=svg.MUTED)
    sizes = sorted({row["size"] for row in rows})
    for at, size in enumerate(sizes):
        middle = 106 + at * 92
        picture.text(middle, base + 32, size_name(size), size=13, anchor="middle")
        for side, (arrays, (_, kind)) in enumerate(ARRAYS.items()):
            found = [row for row in rows if row["size"] == size and row["kind"] == arrays]
            for row in found:
                length = math.log2(row["ratio"]) * step
                left = middle - 38 + side * 40
                picture.box(left, min(base, base - length), 36, abs(length), kind=kind, radius=1)
                y = base - length - 5 if length >= 0 else base - length + 14
                picture.text(left + 18, y, f"{row['ratio']:.2f}", size=11, anchor="middle")


def bars(title, rows, *, ends=("a peer is faster", "syncvar is faster"), left=270):
    """Return a picture with a row for each (words, ratio), on a scale of powers of two.

    Bars go right from the line at 1 if the ratio is above 1, and left if it is below.
    """
    powers = [math.log2(ratio) for _, ratio in rows]
    lowest, highest = min(-1, math.floor(min(powers))), max(1, math.ceil(max(powers)))
    step = (WIDTH - left - 90) / (highest - lowest)
    line = left + 40 - lowest * step
    picture = svg.Picture(WIDTH, 96 + 28 * len(rows), title)
    picture.text(20, 30, title, size=16, bold=True)
    picture.text(line - 10, 56, ends[0], size=12, anchor="end", color=svg.MUTED)
    picture.text(line + 10, 56, ends[1], size=12, color=svg.MUTED)
    for power in range(lowest, highest + 1):
        x = line + power * step
        picture.line((x, 66), (x, 72 + 28 * len(rows)), color=svg.INK if power == 0 else "#d0d7de")
        words = f"{2**power}x" if power >= 0 else f"1/{2**-power}"
        picture.text(x, 88 + 28 * len(rows), words, size=11, anchor="middle", color=svg.MUTED)
    for at, ((words, ratio), power) in enumerate(zip(rows, powers, strict=True)):
        y, length = 72 + at * 28, power * step
        kind = FASTER if ratio >= 1 else SLOWER
        picture.text(left - 4, y + 14, words, size=13, anchor="end")
        picture.box(min(line, line + length), y, abs(length), 20, kind=kind, radius=1)
        x = line + length + (5 if ratio >= 1 else -5)
        anchor = "start" if ratio >= 1 else "end"
        picture.text(x, y + 14, f"{ratio:.2f}", size=12, anchor=anchor)
    return picture.render()


def row_of(call, nbytes, workers=2):
    """Return a row of the everyday calls."""
    parts = [part for part in results()["everyday"] if part["workers"] == workers]
    found = [row for part in parts for row in part["rows"]]
    return next(row for row in found if row["row"] == call and row["size"] == nbytes)


def value_of(what):
    """Return a measured number that has a bound, by its words."""
    return next(one["value"] for one in results()["bounds"] if one["what"] == what)
