"""`syncvar test`: check every collective on this machine, with real processes."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.cli.start_workers import is_launched, start_workers
from syncvar.collectives.collective_registry import (
    Case,
    CollectiveKind,
    available,
    find,
    ops_of,
)
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.errors import SyncvarError, TransportError
from syncvar.shm.channel_table import SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.collective_registry import Collective

_SHOWN_FAILURES = 3
_CALL_TIMEOUT_S = 30.0
_MANY = 10_007
# Each of these sizes takes another path in shared memory.
_LONG_BYTES = (SMALL_BYTES + 4096, SEGMENT_BYTES, SEGMENT_BYTES + 4096)
_TURNS = 8
_MEMORY = ("private", "in shared memory", "part of a private array", "part of a shared array")
_FAILURES_MAX = 5
_BARRIERS = 20


@dataclass(slots=True)
class SelfTestResult:
    """Result of one collective on one data path."""

    name: str  # the collective
    proves: str  # checked properties, in words
    calls: int = 0  # number of calls of each rank
    seconds: float = 0.0  # their duration
    failures: list[str] = field(default_factory=list)  # texts of failures on all ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("collectives", nargs="*", metavar="collective", help="only these (all)")
    parser.add_argument("--workers", metavar="N", default="4", help="how many processes (4)")
    parser.add_argument(
        "--transport", choices=("auto", "zmq"), help="only this data path (first auto, then zmq)"
    )
    parser.add_argument(
        "-T",
        "--timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="limit of each job, in seconds (120)",
    )
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)


def parse_arguments(arguments: Sequence[str] | None = None) -> Any:
    """Parse the command line of a worker."""
    parser = argparse.ArgumentParser(prog="syncvar test", allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(arguments)


def select_collectives(names: Sequence[str]) -> list[Collective]:
    """Return the collectives to test; raise ConfigError for an unknown name."""
    chosen = [find(name, available()) for name in names]
    return [one for one in available() if not names or one in chosen]


def different_array(wanted: NDArray[Any]) -> NDArray[Any]:
    """Return an array that differs in every element, to detect elements that nobody writes."""
    return np.asarray((wanted == 0).astype(wanted.dtype))


def compare_results(  # noqa: PLR0911  (one for each kind of difference)
    got: Any, wanted: Any
) -> tuple[int, str]:
    """Return the number of wrong elements, and the first difference in words; (0, "") for none.

    If a shape or a dtype is wrong, all elements count, at least one.
    """
    if wanted is None:
        return (0, "") if got is None else (1, f"a {type(got).__name__} instead of None")
    if isinstance(wanted, list | tuple):
        everything = max(1, sum(int(one.size) for one in wanted))
        if not isinstance(got, list | tuple):
            return everything, f"a {type(got).__name__} instead of {len(wanted)} arrays"
        if len(got) != len(wanted):
            return everything, f"{len(got)} arrays instead of {len(wanted)}"
        each = [compare_results(mine, theirs) for mine, theirs in zip(got, wanted, strict=True)]
        texts = (f"array {index}: {text}" for index, (_, text) in enumerate(each) if text)
        return sum(count for count, _ in each), next(texts, "")
    if not isinstance(got, np.ndarray):
        return max(1, int(wanted.size)), f"a {type(got).__name__} instead of an array"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        shapes = f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
        return max(1, int(wanted.size)), shapes
    indexes = np.argwhere(got != wanted)
    if not len(indexes):
        return 0, ""
    where = tuple(int(one) for one in indexes[0])
    shown = where[0] if len(where) == 1 else where
    more = f" ({len(indexes)} of {wanted.size} are wrong)" if len(indexes) > 1 else ""
    return len(indexes), f"index {shown} is {got[where]} instead of {wanted[where]}{more}"


def outcome_lines(paths: Mapping[str, Sequence[SelfTestResult]]) -> tuple[list[str], bool]:
    """Return a line for each collective, with its failures below, and whether all succeeded."""
    together: dict[str, dict[str, SelfTestResult]] = defaultdict(dict)
    for path, outcomes in paths.items():
        for one in outcomes:
            together[one.name][path] = one
    lines, is_good = [], True
    for name, by_path in together.items():
        failures = [f"{path}: {words}" for path, one in by_path.items() for words in one.failures]
        calls = {one.calls for one in by_path.values()}
        shown = " and ".join(str(one.calls) for one in by_path.values())
        if len(calls) == 1:
            shown = str(calls.pop())
        proves = next(iter(by_path.values())).proves
        lines.append(
            f"{name:<18} {'FAIL' if failures else 'OK':<5} {proves}; {shown} calls over "
            f"{' and '.join(by_path)}"
        )
        lines += [f"    {words}" for words in failures[:_SHOWN_FAILURES]]
        if len(failures) > _SHOWN_FAILURES:
            lines.append(f"    and {len(failures) - _SHOWN_FAILURES} more")
        is_good = is_good and not failures
    return lines, is_good


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 if all results were correct, else 1."""
    select_collectives(chosen.collectives)
    if is_launched():
        return work(chosen)
    begin = time.monotonic()
    paths: dict[str, list[SelfTestResult]] = {}
    broken = []
    for transport in ("auto", "zmq") if chosen.transport is None else (chosen.transport,):
        with tempfile.TemporaryDirectory(prefix="syncvar-test-") as folder:
            result = Path(folder) / "result.json"
            settings = {
                "SYNCVAR_TRANSPORT": transport,
                "SYNCVAR_COLLECTIVE_TIMEOUT_S": str(_CALL_TIMEOUT_S),
            }
            code = start_workers(
                "syncvar.cli.selftest",
                ["--result", str(result), *arguments],
                workers=chosen.workers,
                timeout_s=chosen.timeout,
                settings=settings,
            )
            report = json.loads(result.read_text()) if result.exists() else None
        path = transport if report is None else report["path"]
        if report is not None:
            if path in paths:
                continue
            paths[path] = [SelfTestResult(**one) for one in report["outcomes"]]
        if code:
            broken.append(f"the job over {path} ended with exit code {code}")
    lines, is_good = outcome_lines(paths)
    print("\n".join([*lines, *(f"FAIL  {words}" for words in broken)]))
    is_good = is_good and not broken and bool(paths)
    print(
        f"{'OK' if is_good else 'FAIL'}: --workers {chosen.workers} over "
        f"{' and '.join(paths) or 'nothing'}, {time.monotonic() - begin:.1f} s"
    )
    return 0 if is_good else 1


def work(chosen: argparse.Namespace) -> int:
    """Test as one rank of a job; return the exit code: 1 if a result was wrong on any rank."""
    path = current().transport.partition(":")[0] if sv.world_size() > 1 else "nothing: one process"
    mine: list[SelfTestResult] = []
    broken: SyncvarError | None = None
    for one in select_collectives(chosen.collectives):
        outcome = SelfTestResult(one.name, _proves(one))
        mine.append(outcome)
        begin = time.perf_counter()
        try:
            _test(one, outcome)
        except TransportError as error:
            broken = error
        outcome.seconds = time.perf_counter() - begin
        if broken is not None:
            break
    if broken is None:
        every = sv.all_gather_object([[one.calls, one.failures] for one in mine])
        for index, outcome in enumerate(mine):
            outcome.failures = [words for rank in every for words in rank[index][1]]
    failed = any(outcome.failures for outcome in mine)
    if sv.rank() == 0 and chosen.result is not None:
        report = json.dumps({"path": path, "outcomes": list(map(asdict, mine))})
        Path(chosen.result).write_text(report, "utf-8")
    elif sv.rank() == 0:
        print("\n".join(outcome_lines({path: mine})[0]), flush=True)
    if broken is not None:
        raise broken
    return int(failed and chosen.result is None)


def _proves(one: Collective) -> str:
    size = sv.world_size()
    if one.name == "barrier":
        return "no rank leaves before the last has entered"
    if one.name == "send_recv" and size == 1:
        return "not called: it needs two ranks"
    if one.kind is CollectiveKind.OBJECT:
        roots = ", every root" * one.takes("root")
        return f"{one.gets}; {len(_objects(0))} types of plain data{roots}"
    words = [one.gets, f"{len(DTYPE_NAMES)} dtypes"]
    if one.takes("op"):
        words.append(f"{len({op for dtype in DTYPE_NAMES for op in ops_of(one, dtype)})} ops")
    if one.takes("root"):
        words.append("every root")
    ways = ["out="] * (one.takes("out") and one.name != "all_to_all")
    ways += ["in place"] * one.in_place
    ways += ["async"] * one.takes("async_op") or ["inputs in reverse order"]
    ways.append("repeated with arrays in private and shared memory")
    counts = f"counts {', '.join(map(str, _counts(size)))} and {_matrix(size)}"
    return "; ".join([*words, counts, ", ".join(ways)])


def _counts(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, _MANY})


def _matrix(size: int) -> tuple[int, int]:
    return size + 1, 3


def _test(one: Collective, outcome: SelfTestResult) -> None:
    if one.has_arrays:
        _test_arrays(one, outcome)
    elif one.kind is CollectiveKind.WAIT:
        _test_barrier(outcome)
    else:
        _test_objects(one, outcome)


def _test_arrays(one: Collective, outcome: SelfTestResult) -> None:
    if one.name == "send_recv" and sv.world_size() == 1:
        return
    size = sv.world_size()
    shapes = [(length,) for length in _counts(size)] + [_matrix(size)]
    number = count()
    for dtype in DTYPE_NAMES:
        ops = ops_of(one, dtype) if one.takes("op") else ("",)
        for op, shape in product(ops, shapes):
            root = next(number) % size
            case = Case(sv.rank(), size, shape, dtype, op or "sum", root)
            for way, got in _ways(one, case, is_first=op == ops[0]):
                title = f"{dtype}{f', {op}' if op else ''}, {_shape_text(shape)}"
                title += f", root {root}" * one.takes("root") + way
                _judge(outcome, title, got, case, one)
    _test_places(one, outcome)


def _test_places(one: Collective, outcome: SelfTestResult) -> None:
    """Repeat calls, beyond the point where they are cached, with arrays in different memory."""
    rank, size = sv.rank(), sv.world_size()
    draw = np.random.default_rng(0)
    for nbytes in _LONG_BYTES:
        case = Case(rank, size, one.shape(nbytes // 4, size), root=size - 1)
        x, target = one.contribution(case), one.wanted(case)
        for turn in range(_TURNS):
            where = _MEMORY[draw.integers(0, len(_MEMORY), size)[rank]]
            is_same = one.in_place and turn % 2 == 0
            mine = _copy_in(where, x if x is not None else case.part(rank) if is_same else None)
            out = {"out": mine} if is_same and target is not None else {}
            title = f"call {turn + 1} of {_shape_text(case.shape)}{', in place' * is_same}, {where}"
            call = one.bound(case, None if x is None else mine, **out)
            _judge(outcome, title, call, case, one)


def _copy_in(where: str, x: Any) -> Any:
    """Return a copy of an array in the named memory."""
    if x is None:
        return None
    make = np.empty if "private" in where else sv.empty
    if where.startswith("part"):
        copy = make(x.size + 2, x.dtype)[1:-1].reshape(x.shape)
    else:
        copy = make(x.shape, x.dtype)
    copy[...] = x
    return copy


def _ways(
    one: Collective, case: Case, *, is_first: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield calls of a case; with the first op of a dtype also with out=, in place and async."""
    x = one.contribution(case)
    if x is None and case.rank % 2 and one.name == "broadcast":
        x = case.part(case.rank)  # other ranks pass None, or an array of the same shape
    yield "", lambda: _unchanged(one, case, x)
    if case.shape != (_MANY,) or not is_first:
        return
    target = one.wanted(case)
    if one.takes("out") and isinstance(target, np.ndarray | None):
        out = None if target is None else np.zeros_like(target)
        yield ", out=", one.bound(case, x, out=out)
    if one.in_place and case.has_result_like_input():
        for words, make in (("in place", np.empty), ("in place, resident", sv.empty)):
            same = None if x is None and target is None else make(case.shape, case.part(0).dtype)
            if same is not None and x is not None:
                same[...] = x
            if target is not None or x is not None:
                source, out = None if x is None else same, None if target is None else same
                yield f", {words}", one.bound(case, source, out=out)
    if one.takes("async_op"):
        yield ", async", lambda: one.bound(case, x, async_op=True)().wait()


def _unchanged(one: Collective, case: Case, x: Any) -> Any:
    """Make the call, and check that it does not change its input."""
    before = None if x is None else x.copy()
    result = one.bound(case, x)()
    changed = "" if x is None else compare_results(x, before)[1]
    if changed:
        raise AssertionError(f"the call changed its input: {changed}")
    return result


def _judge(
    outcome: SelfTestResult, title: str, call: Callable[[], Any], case: Case, one: Collective
) -> None:
    outcome.calls += 1
    try:
        words = compare_results(call(), one.wanted(case))[1]
    except TransportError as error:
        _fail(outcome, case.rank, f"{one.name}: {title}: {type(error).__name__}: {error}")
        raise
    except (SyncvarError, AssertionError, ValueError, TypeError, IndexError) as error:
        words = f"{type(error).__name__}: {error}"
    if words:
        _fail(outcome, case.rank, f"{one.name}: {title}: {words}")


def _fail(outcome: SelfTestResult, rank: int, words: str) -> None:
    if len(outcome.failures) < _FAILURES_MAX:
        outcome.failures.append(f"rank {rank}: {words.partition(chr(10))[0]}")


def _test_barrier(outcome: SelfTestResult) -> None:
    """Check that no rank leaves before the last has entered, by the clock of the host."""
    rank, size = sv.rank(), sv.world_size()
    for turn in range(_BARRIERS):
        if turn % size == rank:
            time.sleep(0.002)  # another rank is late each time
        entered = time.monotonic()
        sv.barrier()
        left = time.monotonic()
        outcome.calls += 1
        every = sv.all_gather_object([entered, left])
        if sv.host_count() == 1 and min(one[1] for one in every) < max(one[0] for one in every):
            _fail(outcome, rank, f"barrier: turn {turn}: a rank left before the last had entered")


def _test_objects(one: Collective, outcome: SelfTestResult) -> None:
    rank, size = sv.rank(), sv.world_size()
    for root, index in product(range(size), range(len(_objects(0)))):
        everyone = tuple(_objects(other)[index] for other in range(size))
        case = Case(rank, size, (), root=root, objects=everyone)
        target = one.wanted(case)
        title = f"{one.name}: object {index}, root {root}"
        outcome.calls += 1
        try:
            got = one.bound(case, one.contribution(case))()
        except SyncvarError as error:
            _fail(outcome, rank, f"{title}: {type(error).__name__}: {error}")
            if isinstance(error, TransportError):
                raise
            continue
        if _plain(got) != _plain(target):
            _fail(outcome, rank, f"{title}: {got!r} instead of {target!r}"[:300])


def _objects(rank: int) -> list[Any]:
    return [
        None,
        True,
        rank,
        rank / 2,
        1 << 60,
        complex(rank, 1),
        "é" * rank,
        b"\0" * rank,
        [],
        [rank, [None, "x"]],
        (rank, ()),
        {"rank": rank, "nested": {"list": [1.5] * rank}},
        np.arange(rank + 1),
        {"array": np.full((2, rank), rank, np.float32)},
    ]


def _plain(value: Any) -> Any:
    """Return a value that `==` compares, arrays with their dtype and shape."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype.name, value.shape, value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_plain(one) for one in value]
    return type(value).__name__, value


def _shape_text(shape: Iterable[int]) -> str:
    lengths = list(shape)
    return f"count {lengths[0]}" if len(lengths) == 1 else f"shape {tuple(lengths)}"


if __name__ == "__main__":
    sys.exit(work(parse_arguments()))
