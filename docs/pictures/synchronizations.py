"""Draw what two ranks hold under each synchronization, and when messages travel."""

import svg

LEFT, COLUMN, PANEL = 66, 114, 142
STEPS = ["creation", "rank 0 adds 1,\nrank 1 adds 2", "again", "both read"]
# For each step: what the copies of ranks 0 and 1 hold, and whether messages travel.
# The example of docs/explanation/variables.md prints the same numbers.
KINDS = [
    (
        "ON_WRITE: a write communicates; the copies are equal",
        [("0", "0", True), ("3", "3", True), ("6", "6", True), ("reads 6", "reads 6", False)],
    ),
    (
        "ON_READ: a read communicates; the copies differ",
        [("0", "0", True), ("1", "2", False), ("2", "4", False), ("reads 6", "reads 6", True)],
    ),
    (
        "NONE: nothing communicates; the copies differ",
        [("0", "0", False), ("1", "2", False), ("2", "4", False), ("reads 2", "reads 4", False)],
    ),
    (
        "AUTO, deferred: writes wait until a read",
        [
            ("0", "0", True),
            ("0, +1 waits", "0, +2 waits", False),
            ("0, +2 waits", "0, +4 waits", False),
            ("reads 6", "reads 6", True),
        ],
    ),
]


def draw():
    """Return the picture."""
    top = 64
    picture = svg.Picture(528, top + len(KINDS) * PANEL, "The four synchronizations over time")
    for at, words in enumerate(STEPS):
        for line, text in enumerate(words.split("\n")):
            x = LEFT + COLUMN * (at + 0.5)
            picture.text(x, 24 + line * 19, text, anchor="middle", color=svg.MUTED)
    for name, steps in KINDS:
        picture.text(12, top + 14, name, bold=True, size=16)
        for rank in (0, 1):
            y = top + 24 + rank * 62
            picture.text(12, y + 23, f"rank {rank}")
            picture.line((LEFT, y + 18), (LEFT + 4 * COLUMN - 8, y + 18))
        for at, (*copies, travels) in enumerate(steps):
            x = LEFT + at * COLUMN + 8
            for rank, words in enumerate(copies):
                kind = "orange" if "waits" in words else "green" if "reads" in words else "blue"
                picture.label(x, top + 24 + rank * 62, COLUMN - 16, 36, words, kind=kind)
            if travels:
                middle = x + (COLUMN - 16) / 2
                ends = (middle, top + 62), (middle, top + 84)
                picture.arrow(*ends, color="#b42318", both=True)
        top += PANEL
    return picture.render()
