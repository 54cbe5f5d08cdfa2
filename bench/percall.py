"""Where each microsecond of a small call goes: `python bench/percall.py`.

Two workers in shared memory make 8-byte all-reduces and writes to an ON_WRITE variable. The whole
call is timed; then each of its parts by itself, on the very objects that the call uses: finding the
persistent call, bringing the value, publishing it, comparing, combining, taking it down in the
flight recorder. "alone" is the whole call with nobody to wait for (its group's other words are its
own). What the call takes more than that is waiting: the other worker's turn, the way of a cache
line between cores, cold caches. The floor is two processes that do nothing but publish a word and
wait for the other's. Blocks that a call leaves allocated in the steady state are counted as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from threading import get_ident
from time import monotonic_ns, perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.collectives.groups import communicator_of
from syncvar.core.reduce_ops import reduction
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.persistent_reduce import ReduceForm, persist_reduction
from syncvar.runtime.recorder import Recorder
from syncvar.runtime.shm_reduce import is_direct
from syncvar.shm.channel_table import CHECK, DONE, PHASE
from syncvar.variables.variable_owner import scope_stack

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 7


def microseconds(body: Callable[[], object], calls: int) -> float:
    """Return the median time of a call of `body`, less that of calling nothing."""

    def nothing() -> None:
        pass

    times = []
    for _ in range(_ROUNDS):
        begin = perf_counter()
        for _ in range(calls):
            body()
        middle = perf_counter()
        for _ in range(calls):
            nothing()
        times.append((2 * middle - begin - perf_counter()) / calls * 1e6)
    return median(times)


def together(body: Callable[[], object], calls: int) -> float:
    """Return the median time of a call that all workers make."""
    times = []
    for _ in range(_ROUNDS):
        sv.barrier()
        begin = perf_counter()
        for _ in range(calls):
            body()
        times.append((perf_counter() - begin) / calls * 1e6)
    return median(times)


def the_words_alone(calls: int) -> float:
    """Return the time of publishing a word and waiting for the other's, in a group of its own that makes no call."""
    group = sv.new_group(range(sv.world_size()))
    sv.barrier(group=group)
    channel: Any = communicator_of(group).channel
    words, entry, others, wait = channel.words, channel.entry, channel.others, channel.wait
    state = [channel.last]

    def body() -> None:
        state[0] += 2
        words[entry] = state[0]
        for other in others:
            if words[other] < state[0]:
                while not wait(others, state[0]):
                    pass

    return together(body, calls)


def alone(x: Any, out: Any, calls: int, apply: np.ufunc | None = None) -> float:
    """Return the time of a persistent all-reduce that finds all others where it needs them."""
    group = sv.new_group(range(sv.world_size()))
    sv.all_reduce(x, out=out, group=group)
    sv.barrier()  # the other worker has left that call, and would take what follows for another one
    communicator = communicator_of(group)
    channel: Any = communicator.channel
    channel.others = (channel.entry,) * len(
        channel.others
    )  # the group makes no call with the other worker any more
    kinds = [(reduction("sum", x.dtype), [0])]
    form = ReduceForm(kinds, x.shape, is_direct(x.nbytes, communicator.size), apply=apply)
    ready: Any = persist_reduction(communicator, form, CollectiveSpec("all_reduce"))
    return microseconds(lambda: ready(x, out), calls)


def allocations(body: Callable[[], object]) -> int:
    """Return how many blocks a call leaves allocated, of 200 calls in the steady state."""
    for _ in range(3000):  # the flight recorder's ring is full
        body()
    before = sys.getallocatedblocks()
    for _ in range(200):
        body()
    return round((sys.getallocatedblocks() - before) / 200)


def parts_of_a_call(x: Any, out: Any, calls: int) -> list[tuple[str, float]]:
    """Return (part, time) of an all-reduce."""
    communicator = communicator_of(None)
    channel: Any = communicator.channel
    persistent_calls, recorder = communicator.persistent_calls, Recorder()
    made_by = next(key[0] for key in persistent_calls)
    words, scratch = channel.words, memoryview(bytearray(64 * 8)).cast("Q")
    slots = [channel.small(rank, 0, x.size, x.dtype) for rank in range(channel.size)]
    mine, empty = np.empty_like(slots[0]), communicator.busy
    told = CallInfo(CollectiveSpec("all_reduce(sum, float64[1])"), 0, (0, 1), 1, 8, "shm small")

    def find() -> None:
        same = communicator_of(None)
        if type(x) is np.ndarray and same.channel is not None:
            persistent_calls.get((made_by, ("sum", False, None, None), x.dtype, x.shape))

    def bring() -> None:
        mine[...] = x

    def publish() -> None:
        scratch[CHECK] = (12345 + 7 * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        if channel.phase or scratch[DONE]:
            scratch[PHASE] = 0
        scratch[0] = 14

    def look() -> None:
        for other in channel.others:
            if words[other] < 0 or words[other + CHECK] == -1:
                break

    def lock() -> None:
        with empty:
            pass

    def record() -> None:
        begin = monotonic_ns()
        recorder.add((told, 1, begin, monotonic_ns(), get_ident()))

    return [
        ("finding the persistent call", microseconds(find, calls)),
        ("the group's lock", microseconds(lock, calls)),
        ("bringing the value to the slot", microseconds(bring, calls)),
        ("publishing check and word", microseconds(publish, calls)),
        ("looking at the other's word and check", microseconds(look, calls)),
        (
            "adding two slots into the result",
            microseconds(lambda: np.add(slots[0], slots[1], out=out), calls),
        ),
        ("two clocks and an entry of the recorder", microseconds(record, calls)),
    ]


def parts_of_a_write(v: Any, x: Any, calls: int) -> list[tuple[str, float]]:
    """Return (part, time) of what a variable's write does around the all-reduce."""
    storage, owner, context = v._state.storage, v._owner, current()  # noqa: SLF001  (that is what is measured)

    def check() -> None:
        persistent = v._persistent_writes.get("assign_add")  # noqa: SLF001
        if (
            persistent is not None
            and type(x) is np.ndarray
            and x.dtype == v._dtype  # noqa: SLF001
            and x.shape == v._shape  # noqa: SLF001
        ):  # noqa: SLF001
            stack = scope_stack(context)
            if stack and stack[-1].owner is owner and owner.communicator.channel is not None:
                pass

    target = np.empty_like(x)
    return [
        ("the variable: is the persistent write right here", microseconds(check, calls)),
        ("the variable: does anybody hold a view", microseconds(storage.writable, calls)),
        (
            "the variable: adding to the copy",
            microseconds(lambda: np.add(target, x, out=target, casting="same_kind"), calls),
        ),
        ("the variable: errors of arithmetic off and on", microseconds(_errstate, calls)),
    ]


def _errstate() -> None:
    with np.errstate(all="ignore"):
        pass


def work(calls: int) -> None:
    """Measure, as one of two workers; rank 0 prints."""
    x = np.ones(1)
    out = np.empty_like(x)
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        v = sv.Variable(np.zeros(1), synchronization="ON_WRITE", aggregation="SUM")

    def reduce() -> None:
        sv.all_reduce(x, out=out)

    def write() -> None:
        v.assign_add(x)

    def read() -> None:
        v.read_value(copy=False)

    whole, single = together(reduce, calls), alone(x, out, calls)
    floor = the_words_alone(calls)
    left = allocations(reduce)
    found: dict[str, Any] = {}

    def step() -> None:
        found["write"] = together(write, calls)
        found["read"] = microseconds(read, calls)
        found["left"] = allocations(write)
        found["alone"] = alone(x, np.zeros_like(x), calls, np.add)
        found["parts"] = parts_of_a_write(v, x, calls)

    strategy.run(step)
    parts = parts_of_a_call(x, out, calls)
    sv.barrier()
    if sv.rank():
        return
    show("8-byte all_reduce(x, out=out)", whole, single + parts[0][1], parts, floor)
    print(f"blocks that a call leaves allocated: {left}\n")
    around = sum(time for _, time in found["parts"][:2])
    show(
        "ON_WRITE assign_add of 8 bytes",
        found["write"],
        found["alone"] + around,
        [*found["parts"], *parts[1:]],
        floor,
    )
    print(f"blocks that a write leaves allocated: {found['left']}")
    print(f"read_value(copy=False): {found['read']:.2f} us")


def show(
    name: str, whole: float, single: float, parts: list[tuple[str, float]], floor: float
) -> None:
    """Print a table."""
    print(
        f"{name}: {whole:.2f} us (two processes that exchange words and do nothing else: "
        f"{floor:.2f} us)"
    )
    rows = [
        *parts,
        ("the rest of the call's own steps", single - sum(time for _, time in parts)),
        ("all own steps, alone", single),
        ("waiting, and cold caches", whole - single),
    ]
    for part, time in rows:
        print(f"  {time:6.2f} us  {time / whole:4.0%}  {part}")


def main() -> int:
    """Run the workers, or work as one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calls", type=int, default=20_000, help="calls in each of seven rounds [20000]"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen.calls)
        return 0
    line = [sys.executable, "-m", "syncvar_launcher", "--workers", "2", "--bind", "auto"]
    return subprocess.run(
        [*line, __file__, "--worker", "--calls", str(chosen.calls)], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
