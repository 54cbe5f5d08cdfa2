"""When an AUTO variable's increments travel: a pure decision from what all replicas have counted.

Eager, each increment is one all-reduce. Deferred, it is put into the strategy's queue, and the queue is sent at the end of
a run, or before whatever needs what waits: a read of such a variable, another kind of write. So deferring pays where many
increments come between two such **breaks**, and costs where they take turns. In shared memory it never pays: an increment is
sent in the time that putting one into the queue takes.

The costs of a write, of a place in the queue, and of sending the queue are a fixed table, measured once with two ranks for
each path, and not on the machine where a job runs; only their ratios count. A change has to promise a fifth less time than staying, and staying has to cost a quarter
more than estimated before it is left: so what is about even does not change to and fro.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "COSTS",
    "IDLE_RUNS",
    "Costs",
    "DeferralDecision",
    "Hysteresis",
    "SampleWindow",
    "choose",
    "period",
]

IDLE_RUNS = 20  # between two decisions where nothing was incremented
_MANY = (
    4  # of more variables a decision is made half as often: it costs about 20 us and 2 us for each
)
_WORTH = 0.8  # the new way must cost at most so much of the old one
_BEARABLE = 1.25  # a way is kept as long as it costs at most so much of the other
_BAR_MIN, _BAR_MAX = 4, 64


class Costs(NamedTuple):
    """Time that is spent on one path.

    Args:
        runs: From one decision to the next; at most half of the 20 steps within which a change must be answered.
        eager_us: Of an increment that is sent by itself, in microseconds.
        eager_ns: More of it for each byte, in nanoseconds.
        queued_us: Of an increment in the queue.
        queued_ns: More of it for each byte.
        send_us: Of sending the queue.
    """

    runs: int
    eager_us: float
    eager_ns: float
    queued_us: float
    queued_ns: float
    send_us: float

    def eager(self, increments: int, nbytes: int) -> float:
        """Return the microseconds of increments that are sent one by one."""
        return increments * (self.eager_us + self.eager_ns * nbytes / 1000)

    def queued(self, increments: int, nbytes: int) -> float:
        """Return the microseconds of increments in the queue, without those of sending it."""
        return increments * (self.queued_us + self.queued_ns * nbytes / 1000)

    @property
    def may_pay(self) -> bool:
        """Whether an increment of some length had better wait, if the queue were sent for nothing; else nothing is counted or decided.

        Example:
            >>> COSTS["links", False].may_pay, COSTS["shm", False].may_pay
            (True, False)
        """
        return self.queued_us <= _WORTH * self.eager_us or self.queued_ns <= _WORTH * self.eager_ns


# (path, reproducible): two launched ranks on two cores, medians, one write after the other. Reproducible increments travel one beside the
# other instead of summed, which costs more in the queue.
COSTS = {
    ("shm", False): Costs(
        5, 4.3, 0.3, 4.4, 2.0, 105.0
    ),  # by the Python runner; the C runner takes 0.9 for an eager one
    ("shm", True): Costs(5, 4.3, 0.3, 8.0, 5.0, 105.0),
    ("links", False): Costs(10, 150.0, 3.5, 10.0, 3.0, 215.0),
    ("links", True): Costs(10, 150.0, 3.5, 14.0, 9.0, 215.0),
}


class SampleWindow(NamedTuple):
    """What has happened to a variable since the last decision: of each number the largest of all replicas.

    Args:
        nbytes: Of its value.
        is_deferred: It is now.
        increments: Writes that can be deferred.
        breaks: How often the queue has to be sent because of it: it is read after an increment, or written otherwise.
    """

    nbytes: int
    is_deferred: bool
    increments: int
    breaks: int


class Hysteresis(NamedTuple):
    """Deferring did not pay though the counts promised it (other calls send the queue): it is not tried for a while.

    Args:
        length: Decisions that it lasts, doubled each time.
        left: Decisions that are left of it.
    """

    length: int = 0
    left: int = 0


class DeferralDecision(NamedTuple):
    """The pace of a variable until the next decision, and why."""

    is_deferred: bool
    why: str


def period(costs: Costs, variables: int, *, is_idle: bool) -> int:
    """Return after how many runs the next decision is made.

    Example:
        >>> period(COSTS["shm", False], 1, is_idle=False), period(COSTS["shm", False], 1, is_idle=True)
        (5, 20)
    """
    if is_idle:
        return IDLE_RUNS
    return min(costs.runs * (2 if variables > _MANY else 1), IDLE_RUNS // 2)


def choose(
    windows: Sequence[SampleWindow],
    runs: int,
    sends: int,
    bar: Hysteresis,
    costs: Costs,
    bucket_bytes: int = 1 << 20,
) -> tuple[list[DeferralDecision], Hysteresis]:
    """Return the pace of each variable, and the bar: a pure function of what is the same on all replicas.

    Args:
        windows: Of all AUTO variables of a strategy that are not pinned.
        runs: Ended since the last decision; 0 where there are none (spmd).
        sends: How often the queue was sent, at most, on any replica.
        bar: As the last decision left it.
        costs: Of the path.
        bucket_bytes: The queue is sent when it holds so much.

    First each variable by itself: one that breaks too often stays eager, or it would have the others' increments sent
    with its own. Then those that are left together, because they share the sending.

    Example:
        >>> busy, turns = SampleWindow(4, False, 400, 4), SampleWindow(4, False, 40, 40)  # increments, reads after one
        >>> [choice.is_deferred for choice in choose([busy, turns], 4, 0, Hysteresis(), COSTS["links", False])[0]]
        [True, False]
    """
    alone: list[str] = []  # why it does not pay for each
    chosen = total = filled = breaks = 0
    now = queued = 0.0
    are_deferred = True
    for one in windows:
        eager, waiting = (
            costs.eager(one.increments, one.nbytes),
            costs.queued(one.increments, one.nbytes),
        )
        own_breaks = min(one.breaks, one.increments)
        limit = _BEARABLE if one.is_deferred else _WORTH
        least = waiting + costs.send_us * own_breaks  # if sending at the ends of runs cost nothing
        is_worth = least <= limit * eager
        alone.append("" if is_worth else f"at least {least:.0f} us deferred, {eager:.0f} us eager")
        if is_worth and one.increments:
            chosen += 1
            total += one.increments
            filled += one.increments * one.nbytes
            breaks += own_breaks
            now += eager
            queued += waiting
            are_deferred = are_deferred and one.is_deferred
    are_deferred = are_deferred and chosen > 0
    expected = max(min(max(runs, 1), total) + breaks, filled // bucket_bytes)
    late = queued + costs.send_us * (max(sends, 1) if are_deferred else expected)
    together = late <= now * (_BEARABLE if are_deferred else _WORTH)
    since = f" in {runs} runs" if runs else ""
    because = f"{total} increments of {chosen} variables{since}"
    estimate = f"{late:.0f} us deferred, {now:.0f} us eager"
    if are_deferred:
        if together:
            bar = Hysteresis()
        elif queued + costs.send_us * expected <= now * _WORTH:
            length = min(max(bar.length * 2, _BAR_MIN), _BAR_MAX)
            bar = Hysteresis(length, length)
            because += f", sent {sends} times because of other calls"
    elif chosen and together and bar.left:
        bar = bar._replace(left=bar.left - 1)
        together = False
        estimate += (
            f"; not tried for {bar.left} more decisions, because other calls have sent the queue"
        )
    shared = DeferralDecision(together, f"{because}: {estimate}")
    choices = []
    for place, one in enumerate(windows):
        if not one.increments:
            choices.append(DeferralDecision(one.is_deferred, "nothing was added"))
        elif alone[place]:
            said = (
                f"{one.increments} increments, {one.breaks} reads or other writes after one{since}"
            )
            choices.append(
                DeferralDecision(
                    is_deferred=False, why=f"{said}: waiting does not pay ({alone[place]})"
                )
            )
        else:
            choices.append(shared)
    return choices, bar
