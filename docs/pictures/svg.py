"""A small writer of SVG pictures: boxes, arrows and text on a light background of their own.

Each other file of this folder draws one picture, in `draw()`. This command writes them all:
`SYNCVAR_REGENERATE_GOLDEN=1 pytest tests/tidy/test_pictures.py`.
"""

import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
INK, MUTED, PAPER, EDGE = "#1f2328", "#57606a", "#ffffff", "#8c959f"
# name -> color of the frame, color inside
KINDS = {
    "plain": ("#8c959f", "#f6f8fa"),
    "paper": ("#8c959f", "#ffffff"),
    "blue": ("#0b5cad", "#e7f0fa"),
    "green": ("#1a7f37", "#e6f4ea"),
    "orange": ("#9a4a00", "#fdf0e1"),
    "red": ("#b42318", "#fdecea"),
    "violet": ("#6639ba", "#f3edfc"),
    "dark": ("#0d1117", "#0d1117"),
}
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def number(value):
    """Return a coordinate, the same text on every machine."""
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """A picture of a width and a height in pixels; `title` is what a screen reader says."""

    def __init__(self, width, height, title):
        self.width, self.height, self.title = width, height, title
        self.parts = []
        self.heads = set()

    def box(self, x, y, width, height, *, kind="plain", dashed=False, radius=6):
        """Draw a box with its upper left corner at (x, y)."""
        frame, inside = KINDS[kind]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}" rx="{radius}" fill="{inside}" stroke="{frame}" '
            f'stroke-width="1.5"{dash}/>'
        )

    def text(self, x, y, words, *, size=15, color=INK, anchor="start", bold=False, mono=False):
        """Write a line of text with its base line at (x, y)."""
        weight = ' font-weight="600"' if bold else ""
        font = ' class="mono" xml:space="preserve"' if mono else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" fill="{color}"'
            f"{where}{weight}{font}>{escape(words)}</text>"
        )

    def label(self, x, y, width, height, words, *, kind="plain", size=15, **style):
        """Draw a box with lines of text in its middle."""
        self.box(x, y, width, height, kind=kind, dashed=style.pop("dashed", False))
        lines = words.split("\n")
        top = y + height / 2 - (len(lines) - 1) * size * 0.62 + size * 0.35
        for at, line in enumerate(lines):
            self.text(
                x + width / 2, top + at * size * 1.24, line, size=size, anchor="middle", **style
            )

    def paragraph(self, x, y, words, *, columns, size=14, **style):
        """Write text in lines of at most so many letters; return the place of the next line."""
        for line in textwrap.wrap(words, columns, break_long_words=False, break_on_hyphens=False):
            self.text(x, y, line, size=size, **style)
            y += size * 1.35
        return y

    def arrow(self, start, end, *, color=EDGE, dashed=False, both=False, bend=0.0):
        """Draw an arrow between two points; `bend` moves its middle aside by so many pixels."""
        (x1, y1), (x2, y2) = start, end
        length = max(1.0, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
        middle = (
            (x1 + x2) / 2 - (y2 - y1) / length * bend * 2,
            (y1 + y2) / 2 + (x2 - x1) / length * bend * 2,
        )
        path = f"M{number(x1)} {number(y1)} "
        path += f"Q{number(middle[0])} {number(middle[1])} " if bend else "L"
        self.path(path + f"{number(x2)} {number(y2)}", color=color, dashed=dashed, both=both)

    def path(self, path, *, color=EDGE, dashed=False, both=False, head=True):
        """Draw a line along a path of SVG, with a head at its end, or at both."""
        name = f"head{color[1:]}"
        self.heads |= {color} if head else set()
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        ends = f' marker-end="url(#{name})"' if head else ""
        ends += f' marker-start="url(#{name})"' if both else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash}{ends}/>'
        )

    def line(self, start, end, *, color=EDGE, dashed=False):
        """Draw a line without a head."""
        (x1, y1), (x2, y2) = start, end
        self.path(
            f"M{number(x1)} {number(y1)} L{number(x2)} {number(y2)}",
            color=color,
            dashed=dashed,
            head=False,
        )

    def render(self):
        """Return the text of the file."""
        heads = "".join(
            f'<marker id="head{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 1 L10 5 L0 9 Z" '
            f'fill="{color}"/></marker>'
            for color in sorted(self.heads)
        )
        width, height = number(self.width), number(self.height)
        begin = '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        lines = [
            f'{begin}width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            f"<title>{escape(self.title)}</title>",
            f"<style>text {{ font-family: {SANS}; }} .mono {{ font-family: {MONO}; }}</style>",
            *([f"<defs>{heads}</defs>"] if heads else []),
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join([*lines, ""])
