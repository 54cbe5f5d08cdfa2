"""Python objects as bytes: plain data by default, pickle where the program asks for it."""

from __future__ import annotations

import pickle as standard_pickle
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable

_ADVICE = (
    "The mpi4py layer sends plain data. To send objects by pickle, run `python -m "
    "syncvar.compat.mpi4py --pickle SCRIPT`, or call MPI.pickle.__init__(pickle.dumps, "
    "pickle.loads) on every rank. Every rank then executes what the pickles of other ranks "
    "contain, so it must trust them"
)


def _dumps_plain(value: Any) -> bytes:
    try:
        return pack_object(value, place="the object")
    except ConfigError as error:
        error.add_note(_ADVICE)
        raise


def _loads_plain(data: Any) -> Any:
    return unpack_object(bytes(data))


class Pickle:
    """How lower-case calls turn objects into bytes.

    Without arguments objects travel as plain data, and nothing is pickled. With functions such as
    `pickle.dumps` and `pickle.loads` or those of dill, the ranks trust each other's bytes.

    Args:
        dumps: Function of an object, or of an object and the protocol, that returns bytes.
        loads: Function of bytes that returns the object.
        protocol: Protocol of pickle; None for its highest.
        threshold: Accepted for mpi4py's sake; this layer sends no part of an object by itself.

    Example:
        >>> from syncvar.compat.mpi4py import MPI
        >>> MPI.pickle.loads(MPI.pickle.dumps({"a": (1, 2)}))
        {'a': (1, 2)}
    """

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[[Any], Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps, self._loads = dumps, loads
        self.PROTOCOL = protocol
        self.THRESHOLD = 1 << 18 if threshold is None else threshold

    @classmethod
    def standard(cls) -> Pickle:
        """Return Python's pickle, as mpi4py uses it."""
        loads = standard_pickle.loads  # noqa: S301  (the program has asked for it)
        return cls(standard_pickle.dumps, loads, standard_pickle.HIGHEST_PROTOCOL)

    def dumps(self, obj: Any) -> bytes:
        """Return the bytes of an object."""
        if self._dumps is None:
            return _dumps_plain(obj)
        if self.PROTOCOL is None:
            return self._dumps(obj)
        return self._dumps(obj, self.PROTOCOL)

    def loads(self, data: Any) -> Any:
        """Return the object of bytes."""
        return (self._loads or _loads_plain)(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Return the bytes of an object; this layer sends no part of it by itself."""
        return self.dumps(obj), []

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """Return the object of `dumps_oob`."""
        return self.loads(data)


pickle = Pickle()
