"""Exceptions as plain data and back, without pickle.

A class travels as its module and name, its arguments as plain objects (`object_codec`).
"""

from __future__ import annotations

import sys
from typing import Any

from syncvar.core.errors import ConfigError
from syncvar.core.lazy_import import object_named
from syncvar.protocol.object_codec import pack_object, unpack_object

CALLER_MAIN = "__syncvar_main__"
"""Module name under which a worker of `sv.run` imports its caller's script."""

_BASES = (BaseException, Exception, object)


def pack_exception(error: BaseException) -> bytes:
    """Return an exception as bytes."""
    builtin: Any = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        _, args, *state = builtin.__reduce__(error)
        attributes = dict(state[0]) if state and state[0] else {}
        pack_object(args)
    except Exception:  # arguments that are no plain data, or an unusual __reduce__
        args, attributes = None, {}
    kinds = [kind for kind in type(error).__mro__ if kind not in _BASES]
    classes = [[kind.__module__, kind.__qualname__] for kind in kinds]
    plain = {str(name): value for name, value in attributes.items() if _travels(value)}
    return pack_object([classes, args, plain, _text(error).encode(errors="backslashreplace")])


def unpack_exception(data: bytes) -> BaseException:
    """Return the exception in `data`, or a stand-in with the same name and text.

    The exception keeps its class if this process can import it and the same arguments give the same
    text. Otherwise the result is a new class of that name, with the first built-in base.
    """
    classes, args, attributes, encoded = unpack_object(data)
    text = encoded.decode()
    error = None if args is None or not classes else _rebuilt(classes[0], args, attributes)
    return error if error is not None and _text(error) == text else _stand_in(classes, text)


def _rebuilt(
    name: list[str], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException | None:
    kind = _class_of(*name)
    if kind is None:
        return None
    try:
        if kind.__module__ == "builtins":
            error: BaseException = kind(*args)
        else:  # skip the class's own __init__: it may take other arguments or have effects
            error = kind.__new__(kind, *args)
            error.args = args
        for attribute, value in attributes.items():
            setattr(error, attribute, value)
    except Exception:  # a user's class may raise anything
        return None
    return error


def _class_of(module: str, name: str) -> type[BaseException] | None:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if module == CALLER_MAIN or (spec is not None and spec.name in (module, f"{module}.__main__")):
        module = "__main__"
    try:
        found = object_named(module, name)
    except Exception:  # a module may raise anything when it is imported
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _stand_in(classes: list[list[str]], text: str) -> BaseException:
    builtins = (_class_of(*one) for one in classes if one[0] == "builtins")
    base = next((kind for kind in builtins if kind is not None), RuntimeError)
    module, name = classes[0] if classes else ("builtins", "Exception")
    module = "__main__" if module == CALLER_MAIN else module
    members = {"__module__": module, "__qualname__": name, "__str__": lambda _: text}
    for one in (base, RuntimeError):
        try:
            kind: Any = type(name.rpartition(".")[2], (one,), members)
            error: BaseException = kind.__new__(kind, text)
        except TypeError:  # the class needs other arguments, as ExceptionGroup does
            continue
        error.args = (text,)
        return error
    raise AssertionError("RuntimeError takes one argument")


def _travels(value: Any) -> bool:
    try:
        pack_object(value)
    except ConfigError:
        return False
    return True


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may raise anything
        return f"<{type(error).__name__} has no text>"
