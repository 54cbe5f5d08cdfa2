"""Status, and operations that have begun: a receive is one, a send, and a started collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_datatypes import BYTE, Datatype

if TYPE_CHECKING:
    from syncvar.compat.mpi4py.mpi_errors import MpiException


class Status:
    """What a receive or a probe has found: source, tag, error and size.

    Args:
        status: Status to copy.
    """

    source = const.ANY_SOURCE
    tag = const.ANY_TAG
    error = const.SUCCESS
    _nbytes = 0
    _is_cancelled = False

    def __new__(cls, status: Status | None = None) -> Self:
        """Return a copy, or an empty status."""
        self = super().__new__(cls)
        self.source = const.ANY_SOURCE
        self.tag = const.ANY_TAG
        self.error = const.SUCCESS
        self._nbytes = 0
        self._is_cancelled = False
        if status is not None:
            self.assign(status)
        return self

    @classmethod
    def of(cls, source: int, tag: int, nbytes: int) -> Status:
        """Return the status of a message."""
        status = cls()
        status.source, status.tag, status._nbytes = source, tag, nbytes
        return status

    def assign(self, other: Status) -> None:
        """Copy another status."""
        self.__dict__.update(other.__dict__)

    def Get_source(self) -> int:
        """Return the rank of the sender."""
        return self.source

    def Set_source(self, source: int) -> None:
        """Set the rank of the sender."""
        self.source = source

    def Get_tag(self) -> int:
        """Return the tag."""
        return self.tag

    def Set_tag(self, tag: int) -> None:
        """Set the tag."""
        self.tag = tag

    def Get_error(self) -> int:
        """Return the error code."""
        return self.error

    def Set_error(self, error: int) -> None:
        """Set the error code."""
        self.error = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Return the number of elements received; UNDEFINED if the last one is incomplete."""
        size = datatype.layout.size
        if not size:
            return 0
        return const.UNDEFINED if self._nbytes % size else self._nbytes // size

    count = property(Get_count)

    def Get_elements(self, datatype: Datatype) -> int:
        """Return the number of basic elements received."""
        layout = datatype.layout
        if not layout.size:
            return 0
        whole, rest = divmod(self._nbytes, layout.size)
        if len(layout.basics) == 1:
            return self._nbytes // layout.basics[0]
        number = whole * layout.elements
        for size in layout.basics:
            if rest < size:
                break
            rest -= size
            number += 1
        return const.UNDEFINED if rest else number

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the number of basic elements."""
        layout = datatype.layout
        whole, rest = divmod(count, layout.elements) if layout.elements else (0, 0)
        sizes = layout.basics if len(layout.basics) > 1 else layout.basics * rest
        self._nbytes = whole * layout.size + sum(sizes[:rest])

    def Is_cancelled(self) -> bool:
        """Return whether the operation has been cancelled."""
        return self._is_cancelled

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether the operation has been cancelled."""
        self._is_cancelled = bool(flag)

    cancelled = property(Is_cancelled, Set_cancelled)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Status):
            return NotImplemented
        return self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Operation:
    """One operation that has begun. Its subclasses are receives, sends and collectives."""

    error: MpiException | None = None
    is_cancelled = False

    _status: Status | None = None
    value: Any = None  # the object of a lower-case call

    @property
    def status(self) -> Status:
        """The status, which is empty until the end."""
        if self._status is None:
            self._status = Status()
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        self._status = status

    def test(self) -> bool:
        """Return whether the operation has ended, after a little progress."""
        return True

    def wait(self) -> None:
        """Wait for the end."""

    def cancel(self) -> None:
        """Give up the operation if nothing has happened; else do nothing."""

    def forget(self) -> None:
        """Note that no request refers to the operation any more."""
