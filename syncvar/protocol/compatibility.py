"""What the ranks of a job must have in common, and what they had better: compared when they have all come.

Each rank tells of itself by short texts and numbers. Where ranks differ in what decides how they speak with each other or
what comes out (package, protocol, byte order, certain settings), nobody is taken in. Where they differ in what usually
shows that a machine was forgotten (Python, NumPy, the script), that is said once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import WireError
from syncvar.core.rank_text import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTING = "set."
"""Before the name of a setting that all ranks must have alike."""

_MUST_AGREE = {"syncvar": "syncvar", "protocol": "protocol", "byte_order": "byte order"}
_SHOULD_AGREE = {"python": "Python", "numpy": "NumPy", "script": "script"}

_ENTRIES_MAX = 64
_NAME_MAX = 64
_TEXT_MAX = 1024
_SHOWN_MAX = 60  # characters of a value
_VALUES_MAX = 6  # of one line
_LINES_MAX = 12

_About = dict[str, int | str]


def check_about(about: Mapping[str, int | str]) -> None:
    """Refuse what no rank tells of itself: too much of it.

    Raises:
        WireError: So it is.
    """
    if len(about) > _ENTRIES_MAX:
        raise WireError(f"a rank tells {len(about)} things about itself, more than {_ENTRIES_MAX}")
    for name, value in about.items():
        if len(name) > _NAME_MAX or (isinstance(value, str) and len(value) > _TEXT_MAX):
            raise WireError(
                f"what a rank tells about itself under {name[:_NAME_MAX]!r} is too long"
            )


def differences(told: Mapping[int, Mapping[str, int | str]]) -> tuple[str, str]:
    """Compare what the ranks tell of themselves; what a rank does not tell, or leaves empty, is not compared.

    Args:
        told: By rank, what `check_about` has let pass.

    Returns:
        (why nobody can be taken in, as a table, or ""; what to warn of in one sentence, or "").

    Example:
        >>> print(differences({0: {"syncvar": "1", "set.algorithm": ""}, 1: {"syncvar": "2", "set.algorithm": ""}})[0])
        the ranks differ in what all must have alike:
          syncvar: '1' (rank 0), '2' (rank 1)
        install the same syncvar everywhere, and give all ranks the same settings
        >>> differences({0: {"python": "3.11"}, 1: {"python": "3.12"}, 2: {"python": "3.11"}})[1]
        "the ranks differ: Python '3.11' (ranks 0, 2), '3.12' (rank 1)"
    """
    settings = sorted(
        {name for about in told.values() for name in about if name.startswith(SETTING)}
    )
    must = {**_MUST_AGREE, **{name: _shown(name.removeprefix(SETTING))[1:-1] for name in settings}}
    lines = [
        f"  {words}: {values}"
        for name, words in must.items()
        if (values := _values(told, name, skips_empty=False))
    ]
    refusal = ""
    if lines:
        rest = [f"  ({len(lines) - _LINES_MAX} more)"] if len(lines) > _LINES_MAX else []
        refusal = "\n".join(
            (
                "the ranks differ in what all must have alike:",
                *lines[:_LINES_MAX],
                *rest,
                "install the same syncvar everywhere, and give all ranks the same settings",
            )
        )
    parts = [
        f"{words} {values}"
        for name, words in _SHOULD_AGREE.items()
        if (values := _values(told, name, skips_empty=True))
    ]
    return refusal, f"the ranks differ: {'; '.join(parts)}" if parts else ""


def _values(told: Mapping[int, Mapping[str, int | str]], name: str, *, skips_empty: bool) -> str:
    """Return the values of an entry with the ranks that have them, or an empty text where all have the same."""
    ranks: dict[int | str, list[int]] = {}
    for rank, about in sorted(told.items()):
        value = about.get(name)
        if value is not None and not (skips_empty and value == ""):
            ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return ""
    shown = [f"{_shown(value)} ({rank_list(having)})" for value, having in ranks.items()]
    return ", ".join(shown[:_VALUES_MAX]) + (
        f", and {len(shown) - _VALUES_MAX} more" if len(shown) > _VALUES_MAX else ""
    )


def _shown(value: int | str) -> str:
    """Return a value that a rank has told, as a text that does nothing to a terminal."""
    return ascii(value[:_SHOWN_MAX]) if isinstance(value, str) else str(value)
