"""Draw the steps of an all_reduce, the first time and repeated, from docs/internals.md."""

import re

import svg

PAGE = svg.HERE.parent / "internals.md"
PATHS = [
    ("all_reduce, first", "The first call of a group", "orange"),
    ("all_reduce, persistent", "Each later call, in shared memory", "green"),
]
STEP = re.compile(
    r"^\d+\. `([\w/.]+)` `([\w.]+)` (.*?)(?=^\d+\. |\n\n|\Z)", re.MULTILINE | re.DOTALL
)


def steps_of(title):
    """Return (file, function, what it does) for each step of a path of the page."""
    text = PAGE.read_text()
    begin = text.index(f"### {title}")
    found = STEP.findall(text[begin : text.index("\n### ", begin + 4)])
    return [(file, name, sentence(words)) for file, name, words in found]


def sentence(words):
    """Return the first sentence, without the marks of Markdown."""
    plain = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words).replace("`", "").split())
    return re.split(r"(?<=[.]) ", re.sub(r" \([^)]*\)", "", plain))[0].rstrip(".") + "."


def draw():
    """Return the picture."""
    paths = [(heading, kind, steps_of(title)) for title, heading, kind in PATHS]
    rows = sum(len(steps) for _, _, steps in paths)
    picture = svg.Picture(528, 60 * rows + 48 * len(paths) + 8, "The steps of an all_reduce")
    y = 8
    for heading, kind, steps in paths:
        picture.text(12, y + 26, f"{heading}: {len(steps)} steps", bold=True, size=17)
        y += 48
        for at, (file, name, words) in enumerate(steps, 1):
            picture.box(12, y - 8, 504, 50, kind=kind)
            picture.text(26, y + 23, str(at), bold=True, size=17)
            picture.text(54, y + 13, name, mono=True, size=14, bold=True)
            picture.text(508, y + 13, file, mono=True, size=12, color=svg.MUTED, anchor="end")
            picture.paragraph(54, y + 32, words, columns=70, size=14)
            if at < len(steps):
                picture.arrow((33, y + 42), (33, y + 52), color=svg.INK)
            y += 60
    return picture.render()
