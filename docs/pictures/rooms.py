"""Draw the rooms of syncvar and what they import, for docs/internals.md."""

import svg

ROW, WIDTH, HEIGHT = 68, 136, 34
# The middle of each room's box, from left to right. The rows are the layers.
PLACES = {
    "launcher": 162,
    "elastic": 84,
    "testing": 240,
    "examples": 396,
    "cli": 546,
    "checkpoint": 84,
    "parameter_server": 162,
    "strategies": 84,
    "optimizers": 330,
    "variables": 220,
    "runner": 84,
    "collectives": 240,
    "data": 440,
    "bootstrap": 220,
    "runtime": 220,
    "transports": 84,
    "shm": 240,
    "_native": 240,
    "protocol": 84,
    "algorithms": 440,
    "core": 240,
}
OUTSIDE = "launcher"
VIA = {("runtime", "algorithms"): 360}  # where a long arrow goes down; else below its beginning


def curve(x1, y1, x2, y2):
    """Return a path from a place to a lower one, which begins and ends straight down."""
    middle = svg.number((y1 + y2) / 2)
    return f" C{x1} {middle} {x2} {middle} {x2} {y2}"


def draw(layers, edges):
    """Return the picture of layers (top first) of rooms, and of room -> rooms that it imports."""
    rows = [[OUTSIDE], *layers]
    picture = svg.Picture(640, len(rows) * ROW, "The rooms of syncvar and their imports")
    level = {room: at for at, row in enumerate(rows) for room in row}
    for at in range(1, len(rows)):
        picture.box(8, at * ROW + 4, 624, HEIGHT + 12, kind="paper", dashed=True)
    for room in sorted(edges):
        for target in edges[room]:
            x, y = PLACES[room], level[room] * ROW + 10 + HEIGHT
            end = level[target] * ROW + 9
            path = f"M{x} {y}"
            if level[target] > level[room] + 1:
                via = VIA.get((room, target), x)
                path += curve(x, y, via, y + ROW - HEIGHT) + f" L{via} {end - ROW + HEIGHT}"
                x, y = via, end - ROW + HEIGHT
            picture.path(path + curve(x, y, PLACES[target], end), color=svg.INK)
    for room, at in level.items():
        kind = "orange" if room == OUTSIDE else "blue"
        left, top = PLACES[room] - WIDTH / 2, at * ROW + 10
        picture.label(left, top, WIDTH, HEIGHT, room, kind=kind, mono=True, size=13)
    return picture.render()
