"""`syncvar collectives`: all collectives as a table, from the functions and the registry."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import syncvar as sv
from syncvar.algorithms.builders import ALGORITHMS
from syncvar.cli.collective_registry import available, dtypes, ops_of
from syncvar.core.reduce_ops import OPS

if TYPE_CHECKING:
    from syncvar.cli.collective_registry import Collective


_COST = re.compile(r"^Cost: (.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_COMMON = {"group": None, "async_op": False, "timeout": None}
_COLUMNS = ("call", "a rank gives", "a rank gets", "algorithms", "cost", "busbw", "tests")


def collectives_text() -> str:
    """Return the table in Markdown, and below it the dtypes of each op."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for one in available():
        calls = "<br>".join(f"`{signature_of(name)}`" for name in one.functions)
        costs = "; ".join(filter(None, map(cost_of, one.functions))) or "-"
        test = f"[{one.tests.rpartition('/')[2]}](../{one.tests})"
        cells = (calls, one.gives, one.gets, _algorithms(one), costs, one.bus or "-", test)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", *_notes()]) + "\n"


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


def cost_of(name: str) -> str:
    """Return the section "Cost" of a function's docstring on one line, without its full stop."""
    found = _COST.search(inspect.getdoc(getattr(sv, name)) or "")
    return " ".join(found[1].split()).rstrip(".") if found else ""


def _algorithms(one: Collective) -> str:
    if one.name in one.plans:
        return ", ".join(ALGORITHMS.get(one.name, ())) or "-"
    return ", ".join(f"as {key}" for key in one.plans) or "-"


def _notes() -> list[str]:
    """Return the legend of the table, and the dtypes of each op."""
    rows: dict[tuple[str, ...], list[str]] = {}
    reducing = next(one for one in available() if one.has_op)
    for op in OPS:
        supported = tuple(dtype for dtype in dtypes() if op in ops_of(reducing, dtype))
        rows.setdefault(supported, []).append(f"`{op}`")
    common = ", ".join(f"{name}={default}" for name, default in _COMMON.items())
    lines = [
        f"`…` is `{common}`. n is the number of ranks. busbw is the factor of `syncvar bench`",
        "between size / time and the rate at the bottleneck; size is that of the vector, or of",
        "all ranks' pieces together.",
        "",
        f"dtypes: {', '.join(dtypes())}. ops:",
        "",
    ]
    for supported, ops in rows.items():
        missing = [dtype for dtype in dtypes() if dtype not in supported]
        which = "all dtypes" if not missing else f"all but {', '.join(missing)}"
        if len(missing) >= len(supported):
            which = ", ".join(supported)
        lines.append(f"- {', '.join(ops)}: {which}")
    return lines
