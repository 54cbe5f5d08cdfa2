"""Python interpreter of programs: NumPy executes one instruction after the other.

It always works, and tests compare the C extension (`syncvar._native`) with it.
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
    from syncvar.shm.group_channel import GroupChannel


def opened(code: CompiledProgram, memories: Sequence[NDArray[Any]], copy: Copier) -> None:
    """Make the copies of an opening; `copy` takes (target, value)."""
    for parts, target, start in code.joins:
        values = [memories[source][first : first + count] for source, first, count in parts]
        into = memories[target][start : start + sum(map(len, values))]
        if len(values) == 1:
            copy(into, values[0])
        else:
            np.concatenate(values, out=into, casting="same_kind")


def interpret(
    channel: GroupChannel,
    steps: Iterable[tuple[Any, ...]],
    memories: Sequence[NDArray[Any]],
    copy: Copier,
    store: Copier,
    fold: Callable[[list[NDArray[Any]], NDArray[Any]], Any],
) -> Iterator[int]:
    """Run the steps of a program; yield the publications to wait for.

    Args:
        channel: This rank's channel.
        steps: Steps of a compiled program.
        memories: Flat arrays, by their numbers.
        copy: Function of (target, value).
        store: Function of (target, value): copies to a result, or applies a ufunc to it.
        fold: Function of (terms, target): combines them; the target may be the first term.
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
