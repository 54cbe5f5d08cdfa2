"""Synchronization points: calls in which ranks wait for each other, or gather an object of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.stage_builders import gather_bytes
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.communicator import CollectiveSpec, Communicator, fingerprint
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

_NOTHING = np.empty(0, np.uint8)


def meet(
    communicator: Communicator,
    what: str,
    parts: tuple[Hashable, ...],
    timeout: float | None,
    check: Callable[[], None] | None = None,
) -> None:
    """Wait for all ranks at a point that they name alike; they compare `parts`."""

    def request() -> CollectiveSpec:
        if check is not None:
            check()
        return CollectiveSpec(what, fingerprint(*parts), meeting(communicator))

    communicator.perform(what, request, timeout)


def meeting(communicator: Communicator) -> Generator[Stage, None, None]:
    """Return the stages of a barrier."""
    yield Stage(communicator.plan("barrier", 0), _NOTHING)


def gather_objects(
    communicator: Communicator,
    name: str,
    make: Callable[[], Any],
    timeout: float | None,
    *,
    async_op: bool = False,
) -> Any:
    """Gather the objects that `make` returns; an error in `make` fails the call on all ranks."""

    def check() -> CollectiveSpec:
        mine = pack_object(make())

        def body() -> Generator[Stage, None, list[Any]]:
            return [unpack_object(data) for data in (yield from gather_bytes(communicator, mine))]

        return CollectiveSpec(name, fingerprint(name), body())

    return communicator.perform(name, check, timeout, async_op=async_op)
