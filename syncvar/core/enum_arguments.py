"""Arguments that are one of some words: as text, or as a member of an enumeration."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def word_of(given: Any, known: Iterable[str]) -> str | None:
    """Return which of some words is given: as text in any case, or as a member of any enumeration.

    The members of enumerations of other libraries count by their names, or by their values where
    these are texts.

    Args:
        given: Anything.
        known: The words.

    Returns:
        The word as `known` spells it; None where it is none of them.

    Example:
        >>> from enum import Enum
        >>> word_of("Mean", ["sum", "mean"]), word_of(Enum("Op", "SUM MEAN").SUM, ["sum", "mean"])
        ('mean', 'sum')
    """
    texts = [given] if isinstance(given, str) else []
    if isinstance(given, Enum):
        texts += [given.value, given.name]
    lower = [text.lower() for text in texts if isinstance(text, str)]
    return next((word for text in lower for word in known if word.lower() == text), None)
