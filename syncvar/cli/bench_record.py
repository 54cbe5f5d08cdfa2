"""What one line of the benchmark's table says, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SHOWN", "Half", "Row", "rated"]

SHOWN = ("rank 0", "average", "minimum", "maximum")
"""Which of the ranks' times is shown, by the number that `-a` takes."""


@dataclass(frozen=True, slots=True)
class Half:
    """One measurement: out of place, or in place.

    Args:
        time: Microseconds of one call, as shown.
        alg_bw: Size / time, in GB/s (1e9 bytes).
        bus_bw: That times the collective's factor.
        nwrong: Wrong elements on all ranks together; None when they were not looked at.
        times: Microseconds of one call by rank 0, and over all ranks their average, minimum and maximum.
        iterations: How many calls were timed.
    """

    time: float
    alg_bw: float
    bus_bw: float
    nwrong: int | None
    times: tuple[float, float, float, float]
    iterations: int


@dataclass(slots=True)
class Row:
    """One line.

    Args:
        size: Bytes by which the call is rated.
        count: Elements of the vector, or of one rank's piece or block.
        type: The dtype.
        redop: The op, or "none".
        root: The root, or -1.
        out_of_place: The result is another array.
        in_place: The result is the array that was passed; None where the collective does not do this.
        model_us: What the plan's cost says, in microseconds.
    """

    size: int
    count: int
    type: str
    redop: str
    root: int
    out_of_place: Half
    in_place: Half | None = None
    model_us: float | None = None


def rated(
    seconds: Sequence[float],
    nbytes: int,
    factor: float,
    nwrong: int | None,
    iterations: int,
    shown: int = 1,
) -> Half:
    """Return the measurement that the ranks' times make.

    Args:
        seconds: Of one call, for each rank: the time of all calls between two barriers, by their number.
        nbytes: The size of the call.
        factor: The collective's factor.
        nwrong: Wrong elements.
        iterations: How many calls were timed.
        shown: Which of the times is shown, an index of `SHOWN`.

    Example:
        >>> half = rated([2e-6, 4e-6], 3000, 2 * (2 - 1) / 2, 0, 20)
        >>> half.time, half.alg_bw, half.bus_bw
        (3.0, 1.0, 1.0)
    """
    microseconds = [one * 1e6 for one in seconds]
    times = (
        microseconds[0],
        sum(microseconds) / len(microseconds),
        min(microseconds),
        max(microseconds),
    )
    time = times[shown]
    rate = nbytes / time / 1e3 if time else 0.0
    return Half(round(time, 6), round(rate, 9), round(rate * factor, 9), nwrong, times, iterations)
