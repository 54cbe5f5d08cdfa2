"""Small agreements that are made again and again: a few numbers of all ranks are combined, by a call that is prepared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.collectives._preparing import key_of, prepare_array
from syncvar.collectives.all_reduce import reduce_request
from syncvar.engine.group import Request
from syncvar.engine.timeouts import is_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator

__all__ = ["agree", "agreement_request"]


def agree(
    communicator: Communicator, name: str, op: str, numbers: NDArray[Any], timeout: float | None, said: tuple[str, int] | None = None
) -> NDArray[Any]:
    """Return all ranks' numbers, combined elementwise. Collective.

    Args:
        communicator: The group.
        name: What all such calls are called.
        op: A built-in op.
        numbers: A flat array, of the same dtype and length on every rank.
        timeout: Seconds; None for the job's default.
        said: This call in words, and the fingerprint that is compared; None for those of `name`.
    """
    ready = communicator.prepared_calls.get(key_of(name, op, numbers, False))
    if ready is not None and (timeout is None or is_seconds(timeout)):
        made = ready(numbers, None, said, timeout)
        if made is not None:
            return made
    what = name if said is None else said[0]
    found: NDArray[Any] = communicator.perform(what, lambda: agreement_request(communicator, name, op, numbers, said), timeout)
    prepare_array(communicator, numbers, op, name, reproducible=False)
    return found


def agreement_request(communicator: Communicator, name: str, op: str, numbers: NDArray[Any], said: tuple[str, int] | None) -> Request:
    """Return the request of such a call; see `agree`."""
    request = reduce_request(communicator, numbers, op, name=name)
    return request if said is None else Request(*said, request.body)
