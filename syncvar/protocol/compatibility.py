"""Compare what the ranks of a job must and should have in common, when all have joined.

In the handshake each rank sends `about`, a map of short texts and numbers. If ranks differ in
package, protocol, byte order or certain settings, the job cannot start. If they differ in Python,
NumPy or script, the launcher warns once: usually one host was not updated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import WireError
from syncvar.core.process_ids import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTING = "set."
"""Prefix of settings in `about` that must be equal on all ranks."""

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
    """Raise WireError if a rank sends too many entries, or too long ones."""
    if len(about) > _ENTRIES_MAX:
        raise WireError(f"a rank sent {len(about)} entries about itself, more than {_ENTRIES_MAX}")
    for name, value in about.items():
        if len(name) > _NAME_MAX or (isinstance(value, str) and len(value) > _TEXT_MAX):
            raise WireError(f"the entry {name[:_NAME_MAX]!r} of a rank about itself is too long")


def compare_abouts(abouts: Mapping[int, Mapping[str, int | str]]) -> tuple[str, str]:
    """Return (error or "", warning or "") for the `about` of each rank; absent entries are skipped.

    Example:
        >>> about = {0: {"syncvar": "1"}, 1: {"syncvar": "2"}}
        >>> print(compare_abouts(about)[0])
        the ranks differ in what all must have alike:
          syncvar: '1' (rank 0), '2' (rank 1)
        install the same syncvar everywhere, and give all ranks the same settings
    """
    settings = sorted(
        {name for about in abouts.values() for name in about if name.startswith(SETTING)}
    )
    must = {**_MUST_AGREE, **{name: _shown(name.removeprefix(SETTING))[1:-1] for name in settings}}
    lines = [
        f"  {label}: {values}"
        for name, label in must.items()
        if (values := _values(abouts, name, skips_empty=False))
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
        f"{label} {values}"
        for name, label in _SHOULD_AGREE.items()
        if (values := _values(abouts, name, skips_empty=True))
    ]
    return refusal, f"the ranks differ: {'; '.join(parts)}" if parts else ""


def _values(abouts: Mapping[int, Mapping[str, int | str]], name: str, *, skips_empty: bool) -> str:
    """Return an entry's values, each with its ranks; empty if all ranks have the same."""
    ranks: dict[int | str, list[int]] = {}
    for rank, about in sorted(abouts.items()):
        value = about.get(name)
        if value is not None and not (skips_empty and value == ""):
            ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return ""
    shown = [f"{_shown(value)} ({rank_list(having)})" for value, having in ranks.items()]
    more = len(shown) - _VALUES_MAX
    return ", ".join(shown[:_VALUES_MAX]) + (f", and {more} more" if more > 0 else "")


def _shown(value: int | str) -> str:
    """Return a value from a rank without control characters, for the terminal."""
    return ascii(value[:_SHOWN_MAX]) if isinstance(value, str) else str(value)
