"""Calls by which ranks meet at a point of their programs: with nothing, or with an object of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.stage_builders import gather_bytes
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.communicator import CollectiveSpec, Communicator, fingerprint
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

__all__ = ["gather_objects", "meet", "meeting"]

_NOTHING = np.empty(0, np.uint8)


def meet(
    communicator: Communicator,
    what: str,
    parts: tuple[Hashable, ...],
    timeout: float | None,
    check: Callable[[], None] | None = None,
) -> None:
    """Meet at a point that all ranks name alike; `parts` is compared."""

    def request() -> CollectiveSpec:
        if check is not None:
            check()
        return CollectiveSpec(what, fingerprint(*parts), meeting(communicator))

    communicator.perform(what, request, timeout)


def meeting(communicator: Communicator) -> Generator[Stage, None, None]:
    """Wait for all ranks: the stages of a call to which they bring nothing."""
    yield Stage(communicator.plan("barrier", 0), _NOTHING)


def gather_objects(
    communicator: Communicator,
    name: str,
    make: Callable[[], Any],
    timeout: float | None,
    *,
    async_op: bool = False,
) -> Any:
    """Gather what `make` returns; what it raises is the caller's error, of which the group is told."""

    def check() -> CollectiveSpec:
        mine = pack_object(make())

        def body() -> Generator[Stage, None, list[Any]]:
            return [unpack_object(data) for data in (yield from gather_bytes(communicator, mine))]

        return CollectiveSpec(name, fingerprint(name), body())

    return communicator.perform(name, check, timeout, async_op=async_op)
