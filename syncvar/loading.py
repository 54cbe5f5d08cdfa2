"""Names of a package that are loaded when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["attributes_of"]


def attributes_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return what serves as a package's `__getattr__`; each name is looked for once.

    Args:
        package: The package.
        homes: For each name the module that has it.

    Raises:
        AttributeError: When called with another name.

    Example:
        >>> attributes_of("syncvar", {"pi": "math"})("e")
        Traceback (most recent call last):
        ...
        AttributeError: module 'syncvar' has no attribute 'e'
    """

    def found(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return found
