"""`syncvar coming-from`: one task in tf.distribute, Horovod, mpi4py, torch.distributed and here.

    syncvar coming-from              the whole table
    syncvar coming-from horovod      one library beside syncvar, with the differences
    syncvar coming-from words        single words of theirs (names, keywords, ops, options) and ours

The table is `migration_table.toml`. A test runs every syncvar spelling. In the spellings `x` is an
array, `out` another one, `grads` a list of arrays, `w` a variable, `comm` is `MPI.COMM_WORLD`,
`dist` is `torch.distributed`, `ctx` is `tf.distribute.get_replica_context()`, `ds` a dataset.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

LIBRARIES = ("tf.distribute", "horovod", "mpi4py", "torch.distributed")
SHORT = {
    "torch": "torch.distributed",
    "tf": "tf.distribute",
    "tensorflow": "tf.distribute",
    "hvd": "horovod",
    "mpi": "mpi4py",
}
WORDS = "words"
_TITLES = ("tf.distribute", "Horovod", "mpi4py", "torch.distributed")
_KEYS = dict(zip(LIBRARIES, ("tensorflow", "horovod", "mpi4py", "torch"), strict=True))
_NONE = "-"


class Task(NamedTuple):
    """One task."""

    title: str  # the task in words
    spellings: dict[str, str]  # call of each library, "-" for none
    syncvar: str  # call of syncvar
    notes: list[tuple[list[str], str]]  # (libraries, difference); no libraries means all


def tasks() -> list[Task]:
    """Return the table."""
    text = files(__package__).joinpath("migration_table.toml").read_text("utf-8")
    found = []
    for row in tomllib.loads(text)["task"]:
        spellings = {library: row.get(key, _NONE) for library, key in _KEYS.items()}
        notes = [(note["libraries"], note["text"]) for note in row.get("notes", ())]
        found.append(Task(row["task"], spellings, row["syncvar"], notes))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `syncvar coming-from`."""
    parser.add_argument(
        "library",
        nargs="?",
        choices=(*LIBRARIES, WORDS),
        type=lambda name: SHORT.get(name.lower(), name),
        metavar="LIBRARY",
        help=f"{', '.join(LIBRARIES)}: its rows and notes; {WORDS}: their single words [all]",
    )


def coming_from_text(library: str | None = None) -> str:
    """Return the whole table in Markdown, or one library beside syncvar and the differences."""
    shown = LIBRARIES if library is None else (library,)
    titles = [_TITLES[LIBRARIES.index(one)] for one in shown]
    rows = [
        (one.title, *(_code(one.spellings[name]) for name in shown), _code(one.syncvar))
        for one in tasks()
    ]
    table = _grid(("task", *titles, "syncvar"), rows)
    if library is None:
        return table
    notes = []
    for one in tasks():
        texts = [text for libraries, text in one.notes if not libraries or library in libraries]
        if texts:
            notes.append(f"- {one.title}: {' '.join(texts)}\n")
    return f"{table}\nNotes by task:\n\n{''.join(notes)}"


def _code(spelling: str) -> str:
    return spelling if spelling == _NONE else f"`{spelling}`"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n"
        for line in (head, *rows)
    ]
    return "".join([shown[0], "|---" * len(head) + "|\n", *shown[1:]])
