"""Draw parameter servers with the shards of a variable, and a copy of each shard."""

import svg

SERVERS = [
    ("server 0", "table, rows 0 to 499", "table, rows 500 to 999"),
    ("server 1", "table, rows 500 to 999", "table, rows 0 to 499"),
]


def draw():
    """Return the picture."""
    picture = svg.Picture(640, 436, "Parameter servers with shards and copies")
    for rank in range(3):
        x = 110 + rank * 210
        picture.label(x - 70, 12, 140, 44, f"worker {rank}", kind="blue", size=16)
        for server in (0, 1):
            end = (165 + server * 310, 146)
            picture.arrow((x, 58), end, color=svg.INK, both=True)
    picture.text(632, 84, "push and pull", anchor="end")
    for at, (name, shard, copy) in enumerate(SERVERS):
        left = 16 + at * 310
        picture.box(left, 150, 298, 176, kind="plain")
        picture.text(left + 14, 175, name, bold=True, size=16)
        picture.label(left + 14, 188, 270, 50, f"primary\n{shard}", kind="green")
        picture.label(left + 14, 262, 270, 50, f"copy\n{copy}", kind="orange", dashed=True)
    picture.arrow((302, 222), (338, 276), color="#9a4a00")
    picture.arrow((338, 222), (302, 276), color="#9a4a00")
    y = 352
    for words in (
        "A variable is cut into shards. Each shard has one server, its primary.",
        "A push is acknowledged when the copy on the next server has it too.",
        "When a server is lost, the copy takes its place. No push is lost or applied twice.",
    ):
        y = picture.paragraph(16, y, words, columns=80, size=15) + 4
    return picture.render()
