"""Draw what is encrypted between two hosts, in each mode of --encryption."""

import svg

ROW, TOP = 104, 84
LOCKED, TICKET, OPEN = "#1a7f37", "#9a4a00", "#b42318"
# mode, its explanation, and the colors: launcher to rank, rank to rank
MODES = [
    ("required (default)", LOCKED, LOCKED),
    ("control-only", LOCKED, TICKET),
    ("off, with --insecure", OPEN, OPEN),
]
WORDS = [
    (LOCKED, "encrypted, members only"),
    (TICKET, "readable; a ticket keeps strangers out"),
    (OPEN, "readable, and open to anybody who reaches the port"),
]


def draw():
    """Return the picture."""
    picture = svg.Picture(528, TOP + ROW * len(MODES) + 84, "What is encrypted between hosts")
    for x, words in ((64, "launcher"), (264, "a rank of host A"), (464, "a rank of host B")):
        picture.text(x, 24, words, anchor="middle", color=svg.MUTED)
    picture.text(164, 50, "control", anchor="middle", bold=True)
    picture.text(364, 50, "data", anchor="middle", bold=True)
    for at, (mode, control, data) in enumerate(MODES):
        y = TOP + at * ROW
        picture.text(12, y, mode, bold=True, size=16)
        for x, kind in ((16, "plain"), (216, "blue"), (416, "blue")):
            picture.label(x, y + 14, 96, 40, "launcher" if x == 16 else "rank", kind=kind)
        picture.arrow((114, y + 26), (214, y + 26), color=control, both=True)
        picture.arrow((314, y + 34), (414, y + 34), color=data, both=True)
        path = f"M64 {y + 56} L64 {y + 70} L464 {y + 70} L464 {y + 56}"
        picture.path(path, color=control, both=True)
    y = TOP + ROW * len(MODES) + 8
    for color, words in WORDS:
        picture.line((16, y - 5), (56, y - 5), color=color)
        picture.text(68, y, words)
        y += 26
    return picture.render()
