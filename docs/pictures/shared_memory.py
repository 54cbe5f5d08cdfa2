"""Draw two hosts: shared memory inside each, links between them."""

import svg

HOSTS = [("host A", 0, 8), ("host B", 2, 352)]
WIDTH = 280
STEPS = [
    ("1", "The ranks of a host add up their arrays in shared memory."),
    ("2", "Between hosts the sums travel over links, encrypted unless you choose otherwise."),
    ("3", "Each rank takes the total from shared memory."),
]


def draw():
    """Return the picture."""
    picture = svg.Picture(640, 452, "Shared memory on a host, links between hosts")
    for name, first, left in HOSTS:
        picture.box(left, 8, WIDTH, 300, kind="plain")
        picture.text(left + 14, 32, name, bold=True, size=16)
        for at in (0, 1):
            x = left + 16 + at * 128
            picture.label(x, 48, 120, 44, f"rank {first + at}", kind="blue", size=16)
            picture.arrow((x + 60, 94), (x + 60, 154), color=svg.INK, both=True)
        picture.box(left + 16, 158, WIDTH - 32, 136, kind="green")
        picture.text(left + 28, 180, "shared memory", bold=True)
        picture.text(left + 28, 199, "one segment, mapped by all", size=14)
        for at, words in enumerate(["progress", "arrays", "messages"]):
            box = left + 26 + at * 77, 212, 73, 36
            picture.label(*box, words, kind="paper", size=14)
        picture.text(left + 28, 276, "no socket, no lock", size=14, color=svg.MUTED)
        picture.text(left + 24, 130, "1", bold=True, size=16, color="#b42318")
        picture.text(left + 246, 130, "3", bold=True, size=16, color="#b42318")
    picture.arrow((266, 62), (366, 62), color="#b42318", both=True)
    picture.arrow((266, 78), (366, 78), color="#b42318", both=True)
    picture.text(320, 44, "links", bold=True, anchor="middle")
    picture.text(320, 104, "2", bold=True, size=16, color="#b42318", anchor="middle")
    picture.text(12, 336, "all_reduce over both hosts:", bold=True, size=16)
    y = 362
    for number, words in STEPS:
        picture.text(12, y, number, bold=True, size=16, color="#b42318")
        y = picture.paragraph(34, y, words, columns=76, size=15) + 6
    return picture.render()
