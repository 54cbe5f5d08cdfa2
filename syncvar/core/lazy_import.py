"""Imports the attributes of packages at first use, and adds migration hints to errors about names.

Every process imports this module, so it loads the table of names only for an error.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def attribute_hint(kind: type[Any], name: str) -> str:
    """Return the migration hint for an attribute that a class lacks, or an empty text."""
    from syncvar.core.migration_hints import hint_for

    return next((text for one in kind.__mro__ if (text := hint_for(one.__name__, name))), "")


class ClassWithHints(type):
    """Metaclass: errors about missing class attributes contain the migration hint."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            text = "" if name.startswith("_") else attribute_hint(cls, name)
            hint = f": {text}" if text else ""
            message = f"type object {cls.__name__!r} has no attribute {name!r}{hint}"
            raise AttributeError(message, name=name, obj=None)


class MigrationHintsMixin:
    """Errors about missing attributes contain the migration hint."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers need the real attributes

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and (text := attribute_hint(type(self), name)):
                message = f"{type(self).__name__!r} object has no attribute {name!r}: {text}"
                raise AttributeError(message, name=name, obj=None)
            return object.__getattribute__(self, name)  # raises again, also errors of a property


def object_named(module: str, name: str) -> Any:
    """Return the object with a qualified name, such as "Outer.Inner", from a module."""
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def attributes_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a name from its home at first use."""

    def found(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return found
