"""The tables of `syncvar collectives`, `rules` and `coming-from`, and the sections of error codes.

The first two tables come from the code itself, the sections from `errors.md`, and the table of
other libraries from `migration_table.toml`. A test runs every syncvar spelling of it. In the
spellings `x` is an array, `out` another one, `grads` a list of arrays, `w` a variable, `comm` is
`MPI.COMM_WORLD`, `dist` is `torch.distributed`, `ctx` is `tf.distribute.get_replica_context()`,
`ds` a dataset.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import syncvar as sv
from syncvar.algorithms.builders import ALGORITHMS
from syncvar.collectives.collective_registry import available, ops_of
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import OPS
from syncvar.variables.policy import (
    AccessKind,
    Action,
    CallContext,
    Effect,
    Travel,
    VariableAggregation,
    VariableSynchronization,
    decide,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from syncvar.collectives.collective_registry import Collective

_COMMON = {"group": None, "async_op": False, "timeout": None}
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
_COLUMNS = ("call", "a rank gives", "a rank gets", "algorithms", "cost", "busbw")


def error_sections() -> dict[str, str]:
    """Return the section of each error code, in Markdown."""
    text = Path(__file__).with_name("errors.md").read_text(encoding="utf-8")
    parts = re.split(r"^(?=###? )", text, flags=re.MULTILINE)  # of a code, or of a family
    sections = [part for part in parts if part.startswith("### SV-")]
    return {part[len("### ") :][: len("SV-000")]: part for part in sections}


def is_error_code(word: str) -> bool:
    """Return whether a word has the form of an error code: SV-301, sv-301 or 301."""
    return re.fullmatch(r"(sv-?)?\d{3}", word, re.IGNORECASE) is not None


def explain_code(word: str) -> str:
    """Return the section of an error code as text for a terminal."""
    sections, number = error_sections(), int(word[-3:])
    code = f"SV-{number:03}"
    if code not in sections:
        near = sorted(sections, key=lambda one: abs(int(one[-3:]) - number))[:3]
        raise ConfigError(
            f"there is no error code {code}; near it are {', '.join(sorted(near))}. "
            "All codes stand in docs/reference/errors.md"
        )
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", sections[code].removeprefix("### "))
    text = re.sub(r"^```.* file=(\S+)$", r"\1:\n\g<0>", text, flags=re.MULTILINE)
    blocks = re.split(r"^```.*\n", text, flags=re.MULTILINE)  # every other part is code
    blocks[1::2] = [re.sub(r"^(?=.)", "    ", one, flags=re.MULTILINE) for one in blocks[1::2]]
    return "".join(blocks).replace("**", "").rstrip() + "\n"


def collectives_text() -> str:
    """Return the table of all collectives, and below it the dtypes of each op."""
    rows = []
    for one in available():
        calls = "<br>".join(f"`{signature_of(name)}`" for name in one.names)
        rows.append((calls, one.gives, one.gets, _algorithms(one), one.cost, one.bus or "-"))
    return "\n".join([_grid(_COLUMNS, rows), *_notes()]) + "\n"


def with_collectives(page: str) -> str:
    """Return a page of the reference with the functions of a kind for each "collectives" line."""

    def entries(found: re.Match[str]) -> str:
        names = [name for one in available() if one.kind.name == found[1] for name in one.names]
        return "\n\n".join(f".. autofunction:: syncvar.{name}" for name in names)

    return re.sub(r"^\.\. collectives:: (\w+)$", entries, page, flags=re.MULTILINE)


def signature_of(name: str) -> str:
    """Return a function's signature with defaults and without types; "…" stands for `_COMMON`."""
    parameters = inspect.signature(getattr(sv, name)).parameters
    is_common = all(one in parameters for one in _COMMON)
    words = []
    for one in parameters.values():
        if one.kind is inspect.Parameter.VAR_KEYWORD:  # keywords of other libraries, for errors
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        if not (is_common and one.name in _COMMON):
            words.append(str(one.replace(annotation=inspect.Parameter.empty)).replace("'", '"'))
    return f"{name}({', '.join([*words, '…'] if is_common else words)})"


def _algorithms(one: Collective) -> str:
    if one.name in ALGORITHMS:
        return ", ".join(ALGORITHMS[one.name])
    return ", ".join(f"as {key}" for key in one.schedules) or "-"


def _notes() -> list[str]:
    """Return the legend of the table, and the dtypes of each op."""
    rows: dict[tuple[str, ...], list[str]] = {}
    reducing = next(one for one in available() if one.takes("op"))
    for op in OPS:
        supported = tuple(dtype for dtype in DTYPE_NAMES if op in ops_of(reducing, dtype))
        rows.setdefault(supported, []).append(f"`{op}`")
    common = ", ".join(f"{name}={default}" for name, default in _COMMON.items())
    lines = [
        f"`…` is `{common}`. n is the number of ranks. busbw is the factor",
        "by which `syncvar bench` multiplies size / time, for the rate at the bottleneck. The size",
        "is that of the vector, or of all ranks' pieces together.",
        "",
        f"dtypes: {', '.join(DTYPE_NAMES)}. ops:",
        "",
    ]
    for supported, ops in rows.items():
        missing = [dtype for dtype in DTYPE_NAMES if dtype not in supported]
        which = "all dtypes" if not missing else f"all but {', '.join(missing)}"
        if len(missing) >= len(supported):
            which = ", ".join(supported)
        lines.append(f"- {', '.join(ops)}: {which}")
    return lines


_WORDS = {
    (Travel.NOTHING, Effect.RETURN): "own copy",
    (Travel.MEETING, Effect.RETURN): "own copy, after all replicas have called",
    (Travel.SUM, Effect.RETURN): "sum of the copies",
    (Travel.MEAN, Effect.RETURN): "mean of the copies",
    (Travel.FIRST, Effect.RETURN): "replica 0's copy",
    (Travel.NOTHING, Effect.CHANGE): "own copy changes, nothing sent",
    (Travel.SUM, Effect.CHANGE): "sum of what all pass",
    (Travel.MEAN, Effect.CHANGE): "mean of what all pass",
    (Travel.FIRST, Effect.CHANGE): "what replica 0 passes",
    (Travel.SAME, Effect.CHANGE): "x, equal on all (checked)",
    (Travel.FIRST, Effect.SHARE): "what replica 0 passes, divided",
    (Travel.SAME, Effect.SHARE): "x, equal on all (checked), divided",
    (Travel.SAME, Effect.SPLIT_ANEW): "rows equal on all (checked) change the sum, divided again",
    (Travel.ALL_ROWS, Effect.CHANGE): "rows of all replicas",
    (Travel.MEAN_ROWS, Effect.CHANGE): "rows of all replicas, scaled by 1/N",
    (Travel.FIRST_ROWS, Effect.CHANGE): "rows of replica 0",
    (Travel.QUESTION, Effect.RETURN): "that replica's copy",
}
_CONTEXTS = (CallContext.REPLICA, CallContext.CROSS, CallContext.MERGE, CallContext.SPMD)
_Cells = tuple[str, ...]


def rules_text() -> str:
    """Return the decision table of variables; rows and columns with equal cells are joined."""
    joined = _columns()
    titles = ["operation", "synchronization", "aggregation"]
    titles += [", ".join(context.value for context in same) for same in joined]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for operations, rows in _operations():
        for synchronizations, aggregations, cells in rows:
            shown = [cells[_CONTEXTS.index(same[0])] for same in joined]
            row = " | ".join([operations, synchronizations, aggregations, *shown])
            lines.append(f"| {row} |")
    return "\n".join(lines) + "\n"


def _cell(action: Action) -> str:
    if action.error is not None:
        return action.error.__name__
    return _WORDS[action.travel, action.effect]


def _cells(s: VariableSynchronization, a: VariableAggregation, o: AccessKind) -> _Cells:
    return tuple(_cell(decide(s, a, context, o)) for context in _CONTEXTS)


def _columns() -> list[list[CallContext]]:
    """Return the contexts, in groups that agree in every cell."""
    joined: list[list[CallContext]] = []
    for context in _CONTEXTS:
        for same in joined:
            if all(
                decide(s, a, context, o) == decide(s, a, same[0], o)
                for s in VariableSynchronization
                for a in VariableAggregation
                for o in AccessKind
            ):
                same.append(context)
                break
        else:
            joined.append([context])
    return joined


def _operations() -> list[tuple[str, list[tuple[str, str, _Cells]]]]:
    """Return the operations with their rows, in groups with equal rows."""
    groups: list[tuple[list[str], list[tuple[str, str, _Cells]]]] = []
    for operation in AccessKind:
        rows = _rows(operation)
        for names, known in groups:
            if known == rows:
                names.append(operation.value)
                break
        else:
            groups.append(([operation.value], rows))
    return [(", ".join(names), rows) for names, rows in groups]


def _rows(operation: AccessKind) -> list[tuple[str, str, _Cells]]:
    """Return (synchronizations, aggregations, cells), joined over aggregations first."""
    by_aggregations: dict[tuple[str, _Cells], list[str]] = {}
    for synchronization in VariableSynchronization:
        same: dict[_Cells, list[str]] = {}
        for aggregation in VariableAggregation:
            cells = _cells(synchronization, aggregation, operation)
            same.setdefault(cells, []).append(aggregation.name)
        for cells, aggregations in same.items():
            every = len(aggregations) == len(VariableAggregation)
            shown = "any" if every else ", ".join(aggregations)
            by_aggregations.setdefault((shown, cells), []).append(synchronization.name)
    return [
        ("any" if len(names) == len(VariableSynchronization) else ", ".join(names), shown, cells)
        for (shown, cells), names in by_aggregations.items()
    ]


class Task(NamedTuple):
    """One task."""

    title: str  # the task in words
    spellings: dict[str, str]  # call of each library, "-" for none
    syncvar: str  # call of syncvar
    notes: list[tuple[list[str], str]]  # (libraries, difference); no libraries means all


def tasks() -> list[Task]:
    """Return the table."""
    text = Path(__file__).with_name("migration_table.toml").read_text("utf-8")
    found = []
    for row in tomllib.loads(text)["task"]:
        spellings = {library: row.get(key, _NONE) for library, key in _KEYS.items()}
        notes = [(note["libraries"], note["text"]) for note in row.get("notes", ())]
        found.append(Task(row["task"], spellings, row["syncvar"], notes))
    return found


def add_migration_options(parser: argparse.ArgumentParser) -> None:
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
