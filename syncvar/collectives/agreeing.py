"""Small agreements that are made again and again: the largest of a few numbers, by a call that is prepared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.collectives._preparing import key_of, prepare_array
from syncvar.collectives.all_reduce import reduce_request
from syncvar.engine.group import Request, fingerprint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator

__all__ = ["largest"]


def largest(communicator: Communicator, name: str, numbers: NDArray[Any], timeout: float | None, *, what: str = "") -> NDArray[Any]:
    """Return the elementwise maximum of all ranks' numbers. Collective.

    Args:
        communicator: The group.
        name: What all such calls are called.
        numbers: A flat array, of the same dtype and length on every rank.
        timeout: Seconds; None for the job's default.
        what: This call in words, which is compared too; empty for its name.
    """
    said = (what, fingerprint(what)) if what else None
    ready = communicator.prepared_calls.get(key_of(name, "max", numbers, False))
    if ready is not None:
        made = ready(numbers, None, said, timeout)
        if made is not None:
            return made

    def check() -> Request:
        request = reduce_request(communicator, numbers, "max", name=name)
        return request if said is None else Request(*said, request.body)

    found: NDArray[Any] = communicator.perform(what or name, check, timeout)
    prepare_array(communicator, numbers, "max", name, reproducible=False)
    return found
