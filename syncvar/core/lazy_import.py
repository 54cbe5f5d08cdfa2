"""Names of a package that are loaded when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def explained_attribute(kind: type[Any], name: str) -> str:
    """Return what to write instead of an attribute that a class does not have, or an empty text."""
    from syncvar.core.migration_hints import explained

    return next((text for one in kind.__mro__ if (text := explained(one.__name__, name))), "")


class ClassWithHints(type):
    """Classes that say what to write where other libraries have a method of the class."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            text = "" if name.startswith("_") else explained_attribute(cls, name)
            hint = f": {text}" if text else ""
            message = f"type object {cls.__name__!r} has no attribute {name!r}{hint}"
            raise AttributeError(message, name=name, obj=None)


class MigrationHintsMixin:
    """Objects that say what to write where other libraries have an attribute that they have not."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker is to know the attributes that there are

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and (text := explained_attribute(type(self), name)):
                message = f"{type(self).__name__!r} object has no attribute {name!r}: {text}"
                raise AttributeError(message, name=name, obj=None)
            return object.__getattribute__(
                self, name
            )  # raises what it raised, also what a property raised


def object_named(module: str, name: str) -> Any:
    """Return an object of a module, which is imported where it is not loaded.

    Args:
        module: The name of the module.
        name: The qualified name of the object, such as "Outer.Inner".

    Example:
        >>> object_named("collections", "OrderedDict.fromkeys").__name__
        'fromkeys'
    """
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def unexpected(function: Callable[..., Any], foreign: Iterable[str]) -> TypeError:
    """Return the error for keywords that a function does not have; see `foreign_names.unexpected`."""
    from syncvar.core.migration_hints import unexpected as explained

    return explained(function, foreign)


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
