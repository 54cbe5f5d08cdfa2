"""Arguments that are one of several words, as text or as a member of an enum."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def word_of(given: Any, known: Iterable[str]) -> str | None:
    """Return the word in `known` that an argument means, or None.

    The argument is text in any case or a member of any enum, also of another library. Of a member
    the name counts, and the value if it is text.

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
