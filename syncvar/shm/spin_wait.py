"""Spin waits: how a rank waits for a word of another rank.

With a core for each rank the word changes within a microsecond, so the rank keeps looking. Ranks
that share cores yield, then sleep briefly, because the other rank needs the core. After `BUDGET_S`
the engine takes over: it sleeps longer and longer, listens to the launcher and checks deadlines.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Waiter = Callable[..., bool]

BUDGET_S = 0.001
HOLD_BUDGET_S = 0.02  # several switch intervals of the interpreter
PAUSE_MAX_S = 0.01
_LOOKS = 400  # about 20 us
_LOOKS_PER_YIELD = 4
_LOOKS_SHARED = 10
_TURNS_PER_CLOCK = 4
_YIELDS_SHARED = 200  # about 0.2 ms; fewer yields slow down small calls on shared cores
_SLEEP_S = 1e-6
_NEVER = 1 << 64  # above every word


def pause_after(waited_s: float) -> float:
    """Return how long to sleep after `waited_s` seconds of waiting: an eighth, at most PAUSE_MAX_S.

    Example:
        >>> pause_after(0.008), pause_after(10.0)
        (0.001, 0.01)
    """
    return min(PAUSE_MAX_S, 0.125 * waited_s)


def waiter(words: memoryview, abort: int, phase: int, done: int, *, has_own_core: bool) -> Waiter:
    """Return a function `wait(indices, need, limit)` that spins until others have published `need`.

    It returns True when every indexed word is at least `need`, or every phase at least -`need`. A
    rank whose word is at least `limit` has begun a later call: its DONE word counts then. It
    returns False after BUDGET_S or an abort.

    Args:
        words: The segment as 64-bit words.
        abort: Index of the abort word.
        phase: Distance from a rank's word to its phase.
        done: Distance from a rank's word to its last phase of the call before.
        has_own_core: Whether there are as many usable cores as ranks on this host.
    """
    make = _own_core_waiter if has_own_core else _shared_core_waiter
    return make(words, abort, phase, done)


def _own_core_waiter(words: memoryview, abort: int, phase: int, done: int) -> Waiter:
    give_way, clock = os.sched_yield, time.perf_counter

    def wait(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
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

    return wait


def _shared_core_waiter(  # noqa: C901  (its loop must not call Python functions)
    words: memoryview, abort: int, phase: int, done: int
) -> Waiter:
    give_way, sleep, clock = os.sched_yield, time.sleep, time.perf_counter

    def wait(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
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

    return wait


def holding_waiter(words: memoryview, abort: int, phase: int, done: int) -> Waiter:
    """Return a `wait` as from `waiter` that keeps the interpreter lock.

    Beside a thread that computes, getting the lock back takes long.
    """
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
