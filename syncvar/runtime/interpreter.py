"""The plain runner of programs: NumPy does what each instruction says, one after the other.

It is always there, and what the C runner (`syncvar.kernel`) is compared with. See `syncvar.execution.program`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.execution.program import AWAIT, COPY, FOLD, STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel

    Copier = Callable[[NDArray[Any], NDArray[Any]], Any]  # of (target, value)

__all__ = ["interpret", "opened"]


def opened(opening: Iterable[tuple[int, ...]], memories: Sequence[NDArray[Any]], copy: Copier) -> None:
    """Make the copies of an opening.

    Args:
        opening: Of an assembled program.
        memories: Flat arrays, by their numbers.
        copy: Of (target, value).
    """
    for _, source, first, target, start, count in opening:
        copy(memories[target][start : start + count], memories[source][first : first + count])


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
        if kind == FOLD:
            _, terms, target, start, count = step
            fold([memories[term][first : first + count] for term, first in terms], memories[target][start : start + count])
        elif kind in (COPY, STORE):
            _, source, first, target, start, count = step
            into, value = memories[target][start : start + count], memories[source][first : first + count]
            (copy if kind == COPY else store)(into, value)
        elif kind == AWAIT:
            yield step[1] - channel.phase
        else:
            channel.publish()
