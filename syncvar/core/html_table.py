"""Tables in HTML, which notebooks show in place of the text of an object.

Everything is escaped. The tables inherit the colours of the page, so they suit light and dark
themes, and they load nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LENGTH = 300  # characters of a cell
_ROWS = 64
_CELL = (
    "text-align:left;vertical-align:top;padding:2px 10px 2px 0;color:inherit;background:none;"
    "border:0;border-bottom:1px solid rgba(128,128,128,.35)"
)
_TABLE = "border-collapse:collapse;margin:4px 0;color:inherit;background:none;font-size:92%"
_CODE = "font-family:monospace;white-space:pre-wrap;"


def is_kernel() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def html_table(
    title: str,
    rows: Iterable[Sequence[object]],
    header: Sequence[str] = (),
    code: Sequence[int] = (),
) -> str:
    """Return a table in HTML, with at most 64 rows.

    Args:
        title: The text above the table.
        rows: The cells of each row; without a header the first cell of a row is its name.
        header: The names of the columns.
        code: The columns whose text is shown as code.

    Example:
        >>> text = html_table("a < b", [("dtype", "float32")])
        >>> "a &lt; b" in text, "float32" in text, "<script" in text
        (True, True, False)
    """
    lines = [tuple(row) for row in rows]
    body = [_row(row, code, is_named=not header) for row in lines[:_ROWS]]
    if len(lines) > _ROWS:
        more = f"... and {len(lines) - _ROWS} more"
        body.append(f'<tr><td style="{_CELL}" colspan="9">{more}</td></tr>')
    names = "".join(f'<th scope="col" style="{_CELL}">{_escape(name)}</th>' for name in header)
    head = f"<thead><tr>{names}</tr></thead>" if header else ""
    table = f'<table style="{_TABLE}">{head}<tbody>{"".join(body)}</tbody></table>' if body else ""
    return f'<div><div style="font-weight:600">{_escape(title)}</div>{table}</div>'


def array_rows(value: Any) -> list[tuple[str, str]]:
    """Return the rows of a value: type, shape and dtype of an array, and a preview.

    Example:
        >>> import numpy as np
        >>> array_rows(np.zeros(2))
        [('shape', '(2,)'), ('dtype', 'float64'), ('value', '[0., 0.]')]
        >>> array_rows("text")
        [('type', 'str'), ('value', "'text'")]
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return [("type", type(value).__name__), ("value", preview(value))]
    return [("shape", str(tuple(shape))), ("dtype", str(dtype)), ("value", preview(value))]


def preview(value: Any) -> str:
    """Return a value as text; of a large array its first and last elements.

    Example:
        >>> preview({"loss": 0.5})
        "{'loss': 0.5}"
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        text = str(numpy.array2string(value, threshold=20, edgeitems=3, separator=", "))
    else:
        try:
            text = repr(value)
        except Exception as error:  # an object of the program
            text = f"<{type(value).__name__}: repr raised {type(error).__name__}>"
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."


class RankResults(list[Any]):
    """The results of `sv.run` in a notebook: a list by rank that shows itself as a table.

    Copies of it, and what workers get, are plain lists.

    Example:
        >>> results = RankResults([0, 10])
        >>> results == [0, 10], "rank" in results._repr_html_()
        (True, True)
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (list, (list(self),))

    def _repr_html_(self) -> str:
        rows = [(rank, type(one).__name__, preview(one)) for rank, one in enumerate(self)]
        title = f"sv.run: results of {len(self)} rank{'s' * (len(self) != 1)}"
        return html_table(title, rows, ("rank", "type", "result"), code=(2,))


def _row(row: Sequence[object], code: Sequence[int], *, is_named: bool) -> str:
    cells = []
    for index, cell in enumerate(row):
        text = _escape(cell)
        if index == 0 and is_named:
            cells.append(f'<th scope="row" style="{_CELL}">{text}</th>')
        else:
            style = (_CODE if is_named or index in code else "") + _CELL
            cells.append(f'<td style="{style}">{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _escape(value: object) -> str:
    import html  # few programs need it

    return html.escape(str(value), quote=True)
