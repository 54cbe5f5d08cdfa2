"""Hints for names of tf.distribute, Horovod, mpi4py and torch.distributed: what to write instead.

The table of these names is `migration_hints.txt`: attributes, keywords, ops and options of
launchers. It is read when a name is not found, and by `syncvar coming-from words`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SEVERAL_HOSTS = (
    "syncvar-launch logs in to other hosts by itself: write --hostfile FILE, with lines such as "
    "node1 slots=4, or -H node1:4,node2:4 (see --help-hosts)"
)
_WITHOUT_SSH = (
    f"{_SEVERAL_HOSTS}. Without ssh, start the script on each host with torchrun --nnodes 2 "
    "--nproc-per-node 4 --node-rank 0 --master-addr HOST --master-port 29500 train.py. Or start "
    "each rank with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. "
    "All need the same SYNCVAR_KEY (64 hexadecimal digits) or SYNCVAR_KEY_FILE"
)
_MODEL = (
    "a strategy takes no model, and makes none equal: keep your model and optimizer, and write the "
    'lines of "A module of PyTorch" (docs/migration/torch-distributed.md) or "A model of Keras" '
    "(docs/migration/tf-distribute.md)"
)
_PLACES = {
    "op": "op",
    "option": "option of the launcher",
    "keyword": "keyword",
    "coming-from": "`syncvar coming-from`",
}


class ForeignName(NamedTuple):
    """Names of one meaning in other libraries, and what to write instead.

    `place` is where they are looked up, see the head of the table. Syncvar itself takes a name that
    `is_accepted`.
    """

    place: str
    names: tuple[str, ...]
    text: str
    is_accepted: bool = False


@cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Return the table."""
    with open(os.path.splitext(__file__)[0] + ".txt", encoding="utf-8") as file:
        text = file.read()
    text = text.replace("{several_hosts}", _SEVERAL_HOSTS).replace("{without_ssh}", _WITHOUT_SSH)
    rows = []
    for line in text.splitlines():
        if not line.startswith("#"):
            place, names, hint = line.split(" | ")
            is_accepted = place.endswith(" (accepted)")
            place = place.removesuffix(" (accepted)")
            rows.append(ForeignName(place, tuple(names.split()), hint, is_accepted))
    return tuple(rows)


@cache
def _texts() -> dict[tuple[str, str], str]:
    return {(word.place, name): word.text for word in foreign_names() for name in word.names}


def _nearest(name: str, known: Iterable[str]) -> str:
    from syncvar.core.settings import nearest  # most programs import this module and no settings

    return nearest(name, known)


def hint_for(place: str, name: str) -> str:
    """Return what to write instead of a name, or ""; options may have underscores and one dash."""
    if place == "option" and (place, name) not in _texts() and len(name) > 2:
        name = "--" + name.lstrip("-").replace("_", "-")
    return _texts().get((place, name), "")


def missing_attribute(place: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that a module ("sv", "sv.data") lacks.

    `known` are the attributes that it has, for a guess at typing mistakes.
    """
    module = "syncvar" + place.removeprefix("sv")
    text = hint_for(place, name)
    hint = f": {text}" if text else _nearest(name, known)
    # With obj= Python would add its own guess.
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=None)


def unexpected_keyword(
    function: Callable[..., Any], foreign: Iterable[str], known: Iterable[str] = ()
) -> TypeError:
    """Return the error for keywords that a function or class lacks.

    `known` are keywords that it takes and its signature does not name.
    """
    from inspect import signature

    name, shown = min(foreign), function.__name__
    text = hint_for(f"{shown}()", name) or hint_for("keyword", name)
    hint = f": {text}" if text else _nearest(name, (*signature(function).parameters, *known))
    return TypeError(f"{shown}() got an unexpected keyword argument {name!r}{hint}")


def op_of(name: str) -> str:
    """Return the op that an accepted alias stands for, or the name itself."""
    is_alias = any(
        one.place == "op" and one.is_accepted and name in one.names for one in foreign_names()
    )
    return "mean" if is_alias else name


def op_hint(op: Any, known: Iterable[str]) -> str:
    """Return what to write instead of a wrong op, or an empty text.

    The op may be a member of another library, such as ReduceOp.AVG of torch or MPI.SUM; then its
    last name counts. `known` are the ops in lower case.
    """
    known = tuple(known)
    last = str(getattr(op, "name", op)).lower().replace("_", ".").rpartition(".")[2]
    if op_of(last) in known:
        return f": write {op_of(last)!r}"
    if text := hint_for("op", last):
        return f": {text}"
    return _nearest(op.lower(), known) if isinstance(op, str) else ""


def object_hint(value: Any) -> str:
    """Return what to do with another library's object that was passed to a strategy, or "".

    It knows resolvers of tf.distribute, names of devices, and models.
    """
    names = value if isinstance(value, list | tuple) and value else [value]
    if all(isinstance(name, str) for name in names):
        return f": {hint_for('keyword', 'devices')}"
    if "Resolver" in type(value).__name__:
        return f": {hint_for('keyword', 'cluster_resolver')}"
    if hasattr(value, "named_parameters") or hasattr(value, "trainable_variables"):
        return f": {_MODEL}"
    return ""


def group_hint(value: Any) -> str:
    """Return what to write instead of a wrong group, or an empty text."""
    if isinstance(value, list | tuple | range) and all(isinstance(rank, int) for rank in value):
        return f": write group = sv.new_group({value!r:.60}), on all ranks of the world"
    if hasattr(value, "Get_rank") or type(value).__name__ in ("ProcessGroup", "ProcessSet"):
        return f": {hint_for('sv', 'Comm')}"
    return object_hint(value)


def table_text() -> str:
    """Return the table in Markdown, in the order of the alphabet."""
    lines = ["| word | where | here |", "|---|---|---|"]
    for word in sorted(foreign_names(), key=lambda one: one.names[0].strip("-").lower()):
        names = ", ".join(f"`{name}`" for name in word.names)
        where = (
            _PLACES.get(word.place)
            or f"{'keyword of' if word.place.endswith('()') else 'of'} `{word.place}`"
        )
        text = ("accepted: " if word.is_accepted else "") + word.text
        lines.append(f"| {names} | {where} | {text} |")
    return "\n".join(lines) + "\n"
