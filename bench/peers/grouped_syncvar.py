"""1 000 ON_WRITE variables of 100 floats in one grouped call: `syncvar-launch --workers 2 bench/peers/grouped_syncvar.py`.

Kinds: "grouped" (`sv.assign_add_all` of all variables, SUM, in a step of a strategy) and "calls"
    (an `sv.all_reduce` for
each of as many arrays). Under plain `python` it is a world of one, where "grouped" is the Python
cost of the call and the additions alone.

Transfers are counted of one grouped call on rank 0: the operations that the flight recorder has
seen in it, and the frames with a payload that went into this rank's transport, which are none in
shared memory.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np
from model import mean_of, pieces_case
from peer_syncvar import syncvar_team
from timing import Case, arguments, finish, measure

import syncvar as sv
from syncvar.bootstrap.process import current

VARIABLES = 1000
COUNT = 100


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    team = syncvar_team()
    strategy = sv.MirroredStrategy()
    values = mean_of([(COUNT,)] * VARIABLES, team.rank, team.world, "sum")
    grouped, write = _grouped(strategy)
    cases = {"grouped": grouped, "calls": _calls()}
    results = [
        {"kind": kind, **measure(team, case, values, chosen.seconds)}
        for kind, case in cases.items()
    ]
    transfers = strategy.run(partial(_transfers, write))
    finish(team, chosen, results, transport=current().transport, **transfers)


def _grouped(strategy: sv.Strategy) -> tuple[Case, Any]:
    arrays = [np.empty(COUNT, np.float32) for _ in range(VARIABLES)]
    with strategy.scope():
        variables = [
            sv.Variable(
                np.zeros(COUNT, np.float32),
                synchronization=sv.VariableSynchronization.ON_WRITE,
                aggregation=sv.VariableAggregation.SUM,
            )
            for _ in range(VARIABLES)
        ]

    def write() -> None:
        sv.assign_add_all(zip(variables, arrays, strict=True))

    def result() -> list[np.ndarray[Any, Any]]:
        return [variable.read_value(copy=False) for variable in variables]

    return pieces_case(arrays, write, result, in_place=True, within=strategy.run), write


def _calls() -> Case:
    arrays = [np.empty(COUNT, np.float32) for _ in range(VARIABLES)]
    sums = [np.zeros(COUNT, np.float32) for _ in range(VARIABLES)]

    def call() -> None:
        for array, total in zip(arrays, sums, strict=True):
            sv.all_reduce(array, out=total)

    return pieces_case(arrays, call, lambda: sums)


def _transfers(write: Any) -> dict[str, int]:
    """Make one grouped call and count what it sends."""
    context = current()
    frames = 0
    transport: Any = type(context._transport)  # noqa: SLF001
    send = getattr(transport, "send", None)

    def counted(self: Any, peer: int, header: bytes, payload: Any = None, **more: Any) -> Any:
        nonlocal frames
        frames += payload is not None
        return send(self, peer, header, payload, **more)

    if send is not None:
        transport.send = counted
    begin = time.monotonic_ns()
    write()
    if send is not None:
        transport.send = send
    operations = sum(
        event.began_ns >= begin and event.group >= 0 for event in context.recorder.events()
    )
    if sv.world_size() > 1 and not operations:
        sys.exit(
            "the flight recorder saw no operation of the grouped call: transfers cannot be counted"
        )
    return {"operations": operations, "frames": frames}


if __name__ == "__main__":
    main()
