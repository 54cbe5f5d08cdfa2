"""The plain runner of programs: NumPy does what each instruction says, one after the other.

It is always there, and what the C runner (`syncvar._native`) is compared with. See `syncvar.runtime.programs.instructions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.runtime.programs.instructions import AWAIT, COMBINE, COPY, STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.gil_contention import Copier
    from syncvar.runtime.programs.instructions import CompiledProgram
    from syncvar.shm.group_channel import Channel

__all__ = ["interpret", "opened"]


def opened(code: CompiledProgram, memories: Sequence[NDArray[Any]], copy: Copier) -> None:
    """Make the copies of an opening.

    Args:
        code: An assembled program.
        memories: Flat arrays, by their numbers.
        copy: Of (target, value).
    """
    for parts, target, start in code.joins:
        values = [memories[source][first : first + count] for source, first, count in parts]
        into = memories[target][start : start + sum(map(len, values))]
        if len(values) == 1:
            copy(into, values[0])
        else:
            np.concatenate(values, out=into, casting="same_kind")


def interpret(
    channel: Channel,
    steps: Iterable[tuple[Any, ...]],
    memories: Sequence[NDArray[Any]],
    copy: Copier,
    store: Copier,
    fold: Callable[[list[NDArray[Any]], NDArray[Any]], Any],
) -> Iterator[int]:
    """Run the steps of a program.

    Args:
        channel: This rank's.
        steps: Of an assembled program.
        memories: Flat arrays, by their numbers.
        copy: Of (target, value).
        store: Of (target, value): copies to a result, or applies to what it holds.
        fold: Of (terms, target): combines the terms into the target, which may be the first of them.

    Yields:
        What the others have to reach.
    """
    for step in steps:
        kind = step[0]
        if kind == COMBINE:
            _, terms, target, start, count = step
            fold(
                [memories[term][first : first + count] for term, first in terms],
                memories[target][start : start + count],
            )
        elif kind in (COPY, STORE):
            _, source, first, target, start, count = step
            into, value = (
                memories[target][start : start + count],
                memories[source][first : first + count],
            )
            (copy if kind == COPY else store)(into, value)
        elif kind == AWAIT:
            yield step[1] - channel.phase
        else:
            channel.publish()
