"""Find names that scheduled functions need and a script defines too late.

Workers run the script down to `ClusterCoordinator(...)`, and no line below it. This module reads
the source of the modules that run at that moment.
"""

from __future__ import annotations

import ast
import linecache
import symtable
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_TAKING_FUNCTIONS = ("schedule", "create_per_worker_dataset")


class RunningModule(NamedTuple):
    """A module whose top level is running: its file, the present line, and the source or ""."""

    file: str
    line: int
    source: str


class LateName(NamedTuple):
    """A name that a scheduled function needs, and that its module binds below the present line."""

    name: str  # the name
    line: int  # first line that binds it
    user: str  # scheduled function that needs it, which may be the name itself

    def __str__(self) -> str:
        used = "" if self.name == self.user else f" (which {self.user} uses)"
        return f"{self.name}{used}, line {self.line}"


def running_modules(frame: FrameType | None) -> list[RunningModule]:
    """Return the modules whose top level calls a frame, innermost first."""
    found = []
    while frame is not None:
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        is_top_level = frame.f_code.co_name == "<module>"
        if is_top_level and getattr(module, "__dict__", None) is frame.f_globals:
            file = frame.f_code.co_filename
            source = "".join(linecache.getlines(file, frame.f_globals))
            found.append(RunningModule(file, frame.f_lineno, source))
        frame = frame.f_back
    return found


def line_of(module: str, name: str) -> str:
    """Return the line where a module's top level binds a name, "train.py line 7", or ""."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None or not file:
        return ""
    bound = _bindings(_parsed("".join(linecache.getlines(file, vars(loaded)))))
    return f"{PurePath(file).name} line {bound[name][0]}" if name in bound else ""


def late_names(module: RunningModule) -> list[LateName]:
    r"""Return the names that scheduled functions need and that a module binds only below its line.

    It leaves out names that the module binds above too, names that a function binds by `global`,
    and variables that hold a scheduled function.
    """
    tree = _parsed(module.source)
    late = {name: lines[0] for name, lines in _bindings(tree).items() if lines[0] > module.line}
    if not late:
        return []
    functions, set_by_functions = _globals_of_functions(module)
    found: dict[str, LateName] = {}
    for user in _scheduled(tree):
        waiting, seen = [user], set()
        while waiting:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            is_needed = name != user or name in functions  # functions travel by their own names
            if name in late and name not in set_by_functions and is_needed:
                found.setdefault(name, LateName(name, late[name], user))
            waiting += functions.get(name, ())
    return list(found.values())


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # the file has changed since the program read it
        return ast.Module([], [])


def _bindings(tree: ast.Module) -> dict[str, list[int]]:
    """Return each name that the top level of a module binds, with its lines in order."""
    bound: dict[str, list[int]] = {}
    for node in _at_top_level(tree):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(one.asname or one.name).partition(".")[0] for one in node.names]
        for name in names:
            bound.setdefault(name, []).append(node.lineno)  # type: ignore[attr-defined]
    return {name: sorted(lines) for name, lines in bound.items()}


def _at_top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that are not inside a function or a class."""
    inside = (
        *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
        *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    )
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, inside):
            yield from _at_top_level(child)


def _scheduled(tree: ast.Module) -> list[str]:
    """Return the functions that a module passes to `schedule` and `create_per_worker_dataset`."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in _TAKING_FUNCTIONS:
            passed = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "fn")]
            found.update({one.id: None for one in passed if isinstance(one, ast.Name)})
    return list(found)


def _globals_of_functions(module: RunningModule) -> tuple[dict[str, list[str]], set[str]]:
    """Return the globals that each function and class uses, and those that any of them sets."""
    used: dict[str, list[str]] = {}
    bound: set[str] = set()

    def look(table: symtable.SymbolTable, names: list[str]) -> None:
        for symbol in table.get_symbols():
            if symbol.is_global():
                names.append(symbol.get_name())
                if symbol.is_assigned():
                    bound.add(symbol.get_name())
        for child in table.get_children():
            look(child, names)

    for child in symtable.symtable(module.source, module.file, "exec").get_children():
        look(child, used.setdefault(child.get_name(), []))
    return used, bound
