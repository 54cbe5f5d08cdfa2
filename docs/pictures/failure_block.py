"""Draw the block that the launcher printed for a job that failed, with notes.

`failure-block.txt` is what the launcher printed for the first program of
docs/explanation/failure-model.md with three workers.
"""

import textwrap

import svg

COLUMNS, SIZE, LINE = 57, 14, 20
BLOCK = svg.HERE / "failure-block.txt"
# (beginning of the line, its note)
NOTES = [
    ("syncvar: rank", "The rank that failed first, how it ended, and why."),
    ("evidence: traceback", "Its traceback. Frames of syncvar are folded; -v shows them."),
    ("others:", "Where the other ranks stood, and what they raised then."),
    ("try:", "Commands that show more: a debugger, a log for each rank."),
    ("evidence: flight", "The last calls of each rank; syncvar explain reads them."),
    ("more:", "The code of the failure: what happened, and what to do."),
]


def wrapped(text):
    """Return the lines, with those that are too long on two or more."""
    folded = textwrap.TextWrapper(
        COLUMNS, subsequent_indent="      ", break_on_hyphens=False, drop_whitespace=True
    )
    return [part.rstrip() for line in text.splitlines() for part in (folded.wrap(line) or [""])]


def draw():
    """Return the picture."""
    lines = wrapped(BLOCK.read_text())
    height = LINE * len(lines) + 24
    picture = svg.Picture(
        560, height + 34 * len(NOTES) + 44, "The block of a failed job, with notes"
    )
    picture.box(8, 8, 544, height, kind="dark")
    for at, line in enumerate(lines):
        y = 8 + 26 + at * LINE
        color = "#ff9b8e" if line.startswith("syncvar: ") else "#e6edf3"
        picture.text(20, y, line, mono=True, size=SIZE, color=color)
        for number, (beginning, _) in enumerate(NOTES, 1):
            if line.startswith(beginning):
                circle(picture, 532, y - 5, number)
    for number, (_, note) in enumerate(NOTES, 1):
        y = height + 6 + 34 * number
        circle(picture, 28, y - 5, number)
        picture.text(50, y, note, size=15)
    return picture.render()


def circle(picture, x, y, number):
    """Draw a number in a circle."""
    picture.parts.append(
        f'<circle cx="{x}" cy="{svg.number(y)}" r="12" fill="#fdf0e1" stroke="#9a4a00"/>'
    )
    picture.text(x, y + 5, str(number), anchor="middle", bold=True, color="#9a4a00")
