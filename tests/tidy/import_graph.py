"""The rooms of syncvar and what they import, for docs/pictures/rooms.py and docs/internals.md."""

import tomllib

import house

LAUNCHER = "launcher"


def layers():
    """Return the rooms of each layer, top first, as import-linter checks them."""
    settings = tomllib.loads((house.REPOSITORY / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return [
        [name.strip().removeprefix("syncvar.") for name in line.replace("|", ":").split(":")]
        for line in contract["layers"]
    ]


def room_of(module):
    package, _, rest = module.partition(".")
    return LAUNCHER if package == "syncvar_launcher" else rest.partition(".")[0]


def edges(found):
    """Return room -> rooms that it imports, without those that it reaches through another one."""
    rooms = {room for layer in layers() for room in layer} | {LAUNCHER}
    direct = {room: set() for room in rooms}
    for module, targets in house.imports(found).items():
        for target in map(room_of, targets):
            if room_of(module) in rooms and target in rooms and target != room_of(module):
                direct[room_of(module)].add(target)

    def reached(room):
        return direct[room].union(*map(reached, direct[room]))

    return {
        room: sorted(targets - set().union(*map(reached, targets)))
        for room, targets in direct.items()
    }
