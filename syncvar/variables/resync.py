"""Resynchronization of variables after `sv.uneven`, for replicas that left the block early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.broadcast import broadcast_request
from syncvar.collectives.stage_builders import gather_objects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.variables.registry import VariableRegistry
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import VariableState

_WHAT = "values of variables after sv.uneven"
_TOGETHER_BYTES = 16 << 20


def resynchronize(owner: VariableOwner, registry: VariableRegistry, calls: int) -> None:
    """Give every replica the values of the one that has made most calls. Collective.

    Cost: an exchange of some bytes; if the numbers of calls differ, a broadcast of all values.
    """
    communicator = owner.communicator
    variables = registry.living()  # keeps them alive until the end
    counts = {name: [one.tally.writes, one.tally.added] for name, one in variables.items()}
    mine = [calls, sum(writes for writes, _ in counts.values()), registry.runs, counts]
    everyone = gather_objects(communicator, _WHAT, lambda: mine, owner.timeout)
    ages = [tuple(one[:2]) for one in everyone]
    if all(age == ages[0] for age in ages):
        return
    newest = ages.index(max(ages))
    _, _, registry.runs, theirs = everyone[newest]
    shared = [
        (name, one) for name, one in variables.items() if all(name in told[3] for told in everyone)
    ]
    for part in _batches(shared):
        together = np.concatenate([_bytes_of(one) for _, one in part])

        def check(together: Any = together) -> Any:
            return broadcast_request(communicator, together, root=newest, name=_WHAT)

        values = communicator.perform(_WHAT, check, owner.timeout)
        start = 0
        for name, one in part:
            stop = start + _bytes_of(one).size
            if communicator.member_rank != newest:
                one.keep(values[start:stop].view(one.dtype).reshape(one.shape))
                one.tally.writes, one.tally.added = theirs[name]
            start = stop


def _bytes_of(state: VariableState) -> Any:
    return np.ascontiguousarray(state.storage.array).reshape(-1).view(np.uint8)


def _batches(shared: list[tuple[str, VariableState]]) -> Iterator[list[tuple[str, VariableState]]]:
    part: list[tuple[str, VariableState]] = []
    nbytes = 0
    for name, one in shared:
        part.append((name, one))
        nbytes += one.storage.array.nbytes
        if nbytes >= _TOGETHER_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part
