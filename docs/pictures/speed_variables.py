"""Draw how fast writes of variables are beside MPI's all-reduce, for docs/benchmarks.md."""

import speed

CALLS = {
    "v.assign_add(x)": "a write",
    "v.assign_add(x), then a read": "a write and a read",
    "strategy.run(step) of one v.assign_add(x)": "strategy.run of a write",
}


def draw():
    """Return the picture of three ways to write, by size."""
    rows = [
        (f"{words}, {speed.size_name(size)}", speed.row_of(call, size)["ratio"])
        for call, words in CALLS.items()
        for size in (8, 1 << 16, 1 << 20)
    ]
    return speed.bars("Writes of a variable, 2 workers: fastest peer / syncvar", rows)
