"""How a rank waits for a word of another: look, yield, sleep, by how many cores there are for the ranks.

With a core for every rank a look costs 50 ns and the answer comes within a microsecond, so it is best to keep looking.
Where ranks share cores the one that is waited for needs the core: yields, then the shortest sleeps. What does
not come within `BUDGET_S` is left to the engine, which sleeps in proportion to the time it has waited already, hears the
launcher and looks at deadlines.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Waiter = Callable[..., bool]

__all__ = ["BUDGET_S", "PAUSE_MAX_S", "holding_waiter", "pause_after", "waiter"]

BUDGET_S = 0.001
HOLD_BUDGET_S = 0.02  # several turns of the threads that compute
PAUSE_MAX_S = 0.01
_LOOKS = 400  # about 20 us
_LOOKS_PER_YIELD = 4
_LOOKS_SHARED = 10
_TURNS_PER_CLOCK = 4
_YIELDS_SHARED = (
    200  # about 0.2 ms; shorter made a small call of 4 ranks on 2 cores 2-4 times slower (measured)
)
_SLEEP_S = 1e-6
_NEVER = 1 << 64  # above every word


def pause_after(waited_s: float) -> float:
    """Return how long to sleep after a wait of `waited_s` seconds: an eighth of it, at most PAUSE_MAX_S.

    Example:
        >>> pause_after(0.008), pause_after(10.0)
        (0.001, 0.01)
    """
    return min(PAUSE_MAX_S, 0.125 * waited_s)


def waiter(words: memoryview, abort: int, phase: int, done: int, *, has_own_core: bool) -> Waiter:
    """Return a function that waits a short while until other ranks have come as far as this one needs.

    Args:
        words: Shared memory as 64-bit words.
        abort: Index of the abort word.
        phase: How far behind a rank's word its phase is.
        done: How far behind it the last phase of its call before is.
        has_own_core: There are at least as many usable cores as ranks on this host.

    Returns:
        wait(indices, need, limit): True as soon as every indexed word is at least `need`; or, for a negative need, every
        phase is at least -need, or the word at least `limit` and the last phase of the call before at least -need. False when that takes longer than BUDGET_S, or the abort
        word is set.
    """
    give_way, sleep, clock = os.sched_yield, time.sleep, time.perf_counter

    def alone(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
        offset, need = (0, need) if need > 0 else (phase, -need)
        for index in indices:
            place = index + offset
            if words[place] >= need:
                continue
            for _ in range(_LOOKS):
                if words[place] >= need:
                    break
            else:
                until = clock() + BUDGET_S
                while words[place] < need and (words[index] < limit or words[index + done] < need):
                    for _ in range(_LOOKS_PER_YIELD):
                        if words[place] >= need:
                            break
                    else:
                        give_way()
                        if words[abort] or clock() > until:
                            return False
        return True

    def shared(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
        offset, need = (0, need) if need > 0 else (phase, -need)
        for index in indices:
            place = index + offset
            if words[place] >= need:
                continue
            until = clock() + BUDGET_S
            for turn in range(_YIELDS_SHARED):
                give_way()
                for _ in range(_LOOKS_SHARED):
                    if words[place] >= need:
                        break
                else:
                    if words[index] < limit or words[index + done] < need:
                        # Beside other busy processes each turn may take milliseconds.
                        if turn % _TURNS_PER_CLOCK == 0 and (words[abort] or clock() > until):
                            return False
                        continue
                break
            else:
                while words[place] < need and (words[index] < limit or words[index + done] < need):
                    sleep(_SLEEP_S)
                    if words[abort] or clock() > until:
                        return False
        return True

    return alone if has_own_core else shared


def holding_waiter(words: memoryview, abort: int, phase: int, done: int) -> Waiter:
    """Return a function as of `waiter` that keeps the interpreter's lock: beside a busy thread, giving way takes long."""
    clock = time.perf_counter

    def hold(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
        offset, need = (0, need) if need > 0 else (phase, -need)
        until = 0.0
        for index in indices:
            while words[index + offset] < need and (
                words[index] < limit or words[index + done] < need
            ):
                now = clock()
                until = until or now + HOLD_BUDGET_S
                if now > until or words[abort]:
                    return False
        return True

    return hold
