"""`syncvar bench`: time a collective by size, check its results, print the table of nccl-tests.

Started by the launcher, it measures on the ranks of that job; otherwise it starts its own workers.
Options, sizes and rates are defined as in nccl-tests: `size` as `syncvar collectives` shows it,
algbw = size / time, and busbw = algbw times a factor that makes it comparable with the hardware.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.algorithms.builders import ALGORITHMS, build_all
from syncvar.algorithms.cost_model import LINKS, SHM, predicted_seconds
from syncvar.algorithms.selection import choose
from syncvar.bootstrap.process import current
from syncvar.cli.bench_options import make_plan, parse_arguments
from syncvar.cli.bench_table import SHOWN, Row, draw, header, line, rate, summary
from syncvar.cli.selftest import compare_results, different_array
from syncvar.cli.start_workers import is_launched, start_workers
from syncvar.collectives.collective_registry import Case
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.output_files import LostFile, check_file, report_lost_file, write_error_text
from syncvar.core.reduce_ops import reduction
from syncvar.runtime.call_record import BUS_FACTORS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.algorithms.cost_model import CostModel
    from syncvar.algorithms.schedule import Schedule
    from syncvar.cli.bench_options import BenchPlan
    from syncvar.cli.bench_table import Half
    from syncvar.collectives.collective_registry import Collective

_STEPS = 8
_STEP = 1e-3
_SECONDS = 0.05
_FEWEST, _MOST = 20, 5000
_PROBES = 5


def check_files(chosen: argparse.Namespace) -> None:
    """Raise ConfigError before the measurement if a result file cannot be written."""
    for path, origin in ((chosen.json, "--json"), (chosen.plot, "--plot")):
        is_writer = os.environ.get("SYNCVAR_RANK", "0") == "0"
        if path is not None and is_writer:
            check_file(path, origin)


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    make_plan(chosen)
    check_files(chosen)
    if is_launched():
        return work(chosen)
    workers, root = chosen.workers, chosen.root
    if workers.isdigit() and root.isdigit() and int(root) >= int(workers):
        raise ConfigError(f"-r {root}: a job of {workers} workers has no such rank")
    settings = {} if chosen.transport is None else {"SYNCVAR_TRANSPORT": chosen.transport}
    return start_workers(
        "syncvar.cli.bench",
        arguments,
        workers=chosen.workers,
        timeout_s=chosen.timeout,
        settings=settings,
    )


class Model:
    """Predicted times of a collective for one dtype, op and root.

    Two constants, the latency and the time of a byte, are fitted to the smallest and the largest
    size of the same run. Times of reductions and copies keep their ratio to the time of a byte.
    """

    def __init__(self, collective: Collective, chosen: argparse.Namespace) -> None:
        world = current().world
        self.collective = collective
        self.forced = chosen.algorithm or world.forced(collective.name)
        self.reproducible = bool(chosen.reproducible)
        self.is_shared = world.is_shared
        self.constants = SHM if self.is_shared else LINKS
        self.is_fitted = False

    @staticmethod
    def unsupported_reason(collective: Collective, chosen: argparse.Namespace, size: int) -> str:
        """Return why a run has no model, "" if it has one."""
        if chosen.no_model:
            return "--no-model"
        if collective.name not in ALGORITHMS:
            return f"{collective.name} runs no plan"
        if size == 1:
            return "one rank moves nothing"
        return "calls that are started together overlap" if chosen.asynchronous else ""

    def fit(self, measured: Mapping[Case, float]) -> None:
        """Fit latency and time of a byte to two measured times (s); fewer change nothing."""
        found = fit_constants(
            [(self._predictor(case), seconds) for case, seconds in measured.items()], self.constants
        )
        self.is_fitted = found is not None
        self.constants = found or self.constants

    def microseconds(self, case: Case) -> float:
        """Return the predicted time of a case."""
        return predicted_seconds(self._plans(case), self._itemsize(case), self.constants) * 1e6

    def note(self) -> str:
        """Return where the constants come from."""
        fit = "fitted to the first and the last size"
        source = fit if self.is_fitted else "not fitted, orders of magnitude"
        return f"{source}: {self.constants.text()}"

    def record(self) -> dict[str, Any]:
        """Return the constants as data."""
        return {
            "is_fitted": self.is_fitted,
            "latency_s": self.constants.latency,
            "s_per_byte": self.constants.per_byte,
            "s_per_byte_reduced": self.constants.per_reduced_byte,
            "s_per_byte_copied": self.constants.per_copied_byte,
        }

    def _predictor(self, case: Case) -> Callable[[CostModel], float]:
        plans, itemsize = self._plans(case), self._itemsize(case)
        return lambda constants: predicted_seconds(plans, itemsize, constants)

    def _itemsize(self, case: Case) -> int:
        kind = dtype_from_index(DTYPE_NAMES.index(case.dtype))
        if self.collective.takes("op"):
            return int(reduction(case.op, kind).accumulate.itemsize)
        return int(kind.itemsize)

    def _plans(self, case: Case) -> list[Schedule]:
        count = self.collective.total(case)
        chosen = choose(
            self.collective.name,
            count * self._itemsize(case),
            case.size,
            reproducible=self.reproducible,
            forced=self.forced,
            shared=self.is_shared,
        )
        count = count if self.collective.layout == "vector" else count // case.size
        name = self.collective.name
        return build_all(name, chosen.algorithm, case.size, count=count, root=case.root)


def fit_constants(
    points: Sequence[tuple[Callable[[CostModel], float], float]], start: CostModel
) -> CostModel | None:
    """Return the constants for which two predictions equal two measurements, or None.

    A predicted time is the maximum of sums of constants, hence piecewise linear: a few steps of
    Newton's method find the constants.
    """
    if len(points) != 2:
        return None

    def constants(latency: float, per_byte: float) -> CostModel:
        times = per_byte / start.per_byte
        return replace(
            start,
            latency=latency,
            per_byte=per_byte,
            per_reduced_byte=start.per_reduced_byte * times,
            per_copied_byte=start.per_copied_byte * times,
        )

    latency, per_byte = start.latency, start.per_byte
    for _ in range(_STEPS):
        rows = []
        for predict, seconds in points:
            here = predict(constants(latency, per_byte))
            beside = predict(constants(latency * (1 + _STEP), per_byte))
            by_latency = (beside - here) / (latency * _STEP)
            rows.append((by_latency, (here - by_latency * latency) / per_byte, seconds))
        (a, b, first), (c, d, second) = rows
        determinant = a * d - b * c
        if abs(determinant) <= 1e-9 * max(abs(a * d), abs(b * c), 1e-30):
            return None
        latency = (first * d - second * b) / determinant
        per_byte = (a * second - c * first) / determinant
        if latency <= 0 or per_byte <= 0:
            return None
    return constants(latency, per_byte)


def work(chosen: argparse.Namespace) -> int:
    """Measure as one rank of a job; return the exit code: 1 if an element was wrong."""
    plan = make_plan(chosen)
    transport = current().transport
    if chosen.transport == "zmq" and sv.world_size() > 1 and not transport.startswith("zmq"):
        raise UsageError(
            "--transport zmq is for a job's start: start this one with SYNCVAR_TRANSPORT=zmq"
        )
    measuring = _Measuring(plan)
    with _report(chosen.report_to) as write:
        write(_preamble(plan, transport))
        no_model = Model.unsupported_reason(plan.collective, chosen, sv.world_size())
        write(header(predicted=not no_model))
        rows: list[Row] = []
        models: list[tuple[Case, Model]] = []
        for cases in measuring.groups():
            done: dict[Case, Row] = {}
            if not no_model:
                ends = {cases[-1]: None, cases[0]: None}  # the large one first, as a warm-up
                done = {case: measuring.row(case) for case in ends}
                models.append((cases[0], Model(plan.collective, chosen)))
                models[-1][1].fit({case: row.out_of_place.time / 1e6 for case, row in done.items()})
            for case in cases:
                row = done[case] if case in done else measuring.row(case)
                if not no_model:
                    row.model_us = models[-1][1].microseconds(case)
                write(line(row, predicted=not no_model))
                rows.append(row)
        wrong, average = summary(rows)
        halves = [half for row in rows for half in (row.out_of_place, row.in_place) if half]
        if any(half.nwrong is not None for half in halves):
            write(f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}")
        write(f"# {'Avg bus bandwidth':<20} : {average:g}")
        for case, model in models:
            which = f", {_kind(plan, case)}" if len(models) > 1 else ""
            write(f"# {f'Model{which}':<20} : {model.note()}")
        if no_model:
            write(f"# {'Model':<20} : none: {no_model}")
        if sv.rank() == 0:
            constants = {_kind(plan, case): model.record() for case, model in models}
            _keep(plan, transport, rows, constants)
    sv.barrier()
    return 1 if wrong else 0


def _kind(plan: BenchPlan, case: Case) -> str:
    """Return the properties that the cases of a group share."""
    op = f" {case.op}" if plan.collective.takes("op") else ""
    return f"{case.dtype}{op}{f' root {case.root}' if plan.collective.takes('root') else ''}"


class _Measuring:
    """The cases of a run and their measurement."""

    def __init__(self, plan: BenchPlan) -> None:
        self.plan = plan
        self.chosen = plan.chosen
        self.collective = plan.collective
        self.rank, self.size = sv.rank(), sv.world_size()
        self.factor = BUS_FACTORS[plan.collective.bus](self.size) if plan.collective.bus else 0.0
        if plan.roots != "all" and int(plan.roots) >= self.size:
            raise ConfigError(f"-r {plan.roots}: ranks are 0 to {self.size - 1}")
        if plan.collective.name == "send_recv" and self.size == 1:
            raise ConfigError("send and recv need at least two workers")
        self.options: dict[str, Any] = {}
        if self.chosen.reproducible:
            self.options["reproducible"] = True
        if self.chosen.algorithm is not None:
            self._require("algorithm", "--algorithm")
            self.options["algorithm"] = self.chosen.algorithm
        if self.chosen.asynchronous:
            self._require("async_op", "--async")
            self.options["async_op"] = True

    def _require(self, parameter: str, option: str) -> None:
        if not self.collective.takes(parameter):
            raise ConfigError(f"{option}: sv.{self.collective.names[-1]} has no {parameter}=")

    def groups(self) -> Iterator[list[Case]]:
        """Yield the cases, in groups that differ only in size."""
        collective, plan = self.collective, self.plan
        roots = [0 if plan.roots == "all" else int(plan.roots)]
        if plan.roots == "all" and collective.takes("root"):
            roots = list(range(self.size))
        for dtype, op in plan.kinds:
            dtype = "uint8" if dtype == "-" else dtype  # noqa: PLW2901
            itemsize = _itemsize(dtype)
            shapes = [
                collective.shape(max(nbytes // itemsize, int(nbytes > 0)), self.size)
                for nbytes in plan.sizes
            ]
            for root in roots:
                yield [
                    Case(self.rank, self.size, shape, dtype, op or "sum", root)
                    for shape in dict.fromkeys(shapes)
                ]

    def row(self, case: Case) -> Row:
        """Measure one size."""
        collective = self.collective
        total = collective.total(case)
        count = total if collective.layout == "vector" else total // case.size
        wanted = collective.wanted(case)
        can = collective.in_place and self.chosen.agg_iters == 1 and case.has_result_like_input()
        return Row(
            size=total * _itemsize(case.dtype),
            count=count,
            type=case.dtype if collective.has_arrays else "-",
            redop=case.op if collective.takes("op") else "none",
            root=case.root if collective.takes("root") else -1,
            out_of_place=self._half(case, wanted, in_place=False),
            in_place=self._half(case, wanted, in_place=True) if can else None,
        )

    def _half(self, case: Case, wanted: Any, *, in_place: bool) -> Half:
        chosen, collective = self.chosen, self.collective
        x = self._resident(collective.contribution(case))
        is_same = in_place and x is not None and wanted is not None
        out = x if is_same else self._output(wanted)
        keep = x.copy() if is_same else None
        options = self.options if out is None else {**self.options, "out": out}

        call = collective.bound(case, x, **options)

        def finished() -> Any:
            result = call()
            return result.wait() if chosen.asynchronous else result

        checked = bool(chosen.check) and collective.has_arrays
        wrong = 0
        for _ in range(chosen.check if checked else 0):
            if keep is not None:
                x[...] = keep
            elif out is not None:
                out[...] = different_array(wanted)
            sv.barrier()
            wrong += compare_results(finished(), wanted)[0]
        if keep is not None:
            x[...] = 0  # each call reduces the result of the one before
        for _ in range(chosen.warmup_iters):
            finished()
        iterations = self.plan.iterations or self._enough(finished)
        seconds, last = self._timed(call, iterations)
        if checked and not in_place:
            wrong += compare_results(last, wanted)[0]
        every = sv.all_gather_object([seconds / iterations / chosen.agg_iters, wrong])
        wrong = sum(one[1] for one in every)
        nbytes = collective.total(case) * _itemsize(case.dtype)
        return rate(
            [one[0] for one in every],
            nbytes,
            self.factor,
            wrong if checked else None,
            iterations,
            chosen.average,
        )

    def _enough(self, finished: Callable[[], Any]) -> int:
        """Return how many calls take about `_SECONDS`, equal on all ranks; also warms up."""
        calls = _PROBES
        for seconds, least, most in ((_SECONDS / 5, _PROBES, _MOST), (_SECONDS, _FEWEST, _MOST)):
            sv.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                finished()
            one = (time.perf_counter() - begin) / calls
            calls = int(sv.broadcast_object(max(least, min(most, int(seconds / one)))))
        return max(_FEWEST, calls // int(self.chosen.agg_iters))

    def _timed(self, call: Callable[[], Any], iterations: int) -> tuple[float, Any]:
        """Return the seconds of all calls between two barriers, and the last result."""
        together = range(self.chosen.agg_iters)
        last: Any = None
        sv.barrier()
        begin = time.perf_counter()
        if self.chosen.asynchronous:
            for _ in range(iterations):
                for handle in [call() for _ in together]:
                    last = handle.wait()
        elif len(together) == 1:
            for _ in range(iterations):
                last = call()
        else:
            for _ in range(iterations):
                for _ in together:
                    last = call()
        seconds = time.perf_counter() - begin
        sv.barrier()
        return seconds, last

    def _resident(self, array: NDArray[Any] | None) -> Any:
        if array is None or not self.chosen.resident:
            return array
        copy = sv.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def _output(self, wanted: Any) -> Any:
        """Return an array for `out=` if the result is an array and the function has `out=`."""
        is_possible = isinstance(wanted, np.ndarray) and self.collective.takes("out")
        if not is_possible or self.chosen.agg_iters > 1:
            return None
        return self._resident(np.zeros_like(wanted))


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@contextlib.contextmanager
def _report(descriptor: int | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes lines, on rank 0, and one that ignores them on the others."""
    if sv.rank() != 0:
        yield lambda _: None
    elif descriptor is None:
        yield lambda text: print(text, flush=True)
    else:
        with os.fdopen(os.dup(descriptor), "w") as file:
            yield lambda text: print(text, file=file, flush=True)


def _preamble(plan: BenchPlan, transport: str) -> str:
    chosen = plan.chosen
    step = f"{chosen.stepfactor or 2:g}(factor)"
    if chosen.stepbytes is not None:
        step = f"{chosen.stepbytes}(bytes)"
    words = [plan.collective.name]
    words += ["async"] * chosen.asynchronous + ["resident arrays"] * chosen.resident
    words += ["reproducible"] * chosen.reproducible
    words += [f"algorithm {chosen.algorithm}"] if chosen.algorithm else []
    settings = {
        "minBytes": chosen.minbytes,
        "maxBytes": chosen.maxbytes,
        "step:": step,
        "warmup iters:": chosen.warmup_iters,
        "iters:": plan.iterations or f"{_FEWEST} or more",
        "agg iters:": chosen.agg_iters,
        "validation:": chosen.check,
        "time:": f"{SHOWN[chosen.average]}{' over ranks' if chosen.average else ''}",
    }
    head = f"# syncvar {sv.__version__}: {', '.join(words)}\n# {sv.world_size()} ranks; {transport}"
    return f"{head}\n# {' '.join(f'{name} {value}' for name, value in settings.items())}\n#"


def _keep(plan: BenchPlan, transport: str, rows: list[Row], models: dict[str, Any]) -> None:
    """Write the requested files; report those that cannot be written."""
    chosen = plan.chosen
    if chosen.json is not None:
        with _reports_loss(chosen.json, "--json"):
            _write_json(plan, transport, rows, models)
    if chosen.plot is not None:
        title = f"{plan.collective.name}, {sv.world_size()} ranks, {transport.partition(':')[0]}"
        with _reports_loss(chosen.plot, "--plot"):
            draw(chosen.plot, title, rows)


@contextlib.contextmanager
def _reports_loss(path: str, origin: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        report_lost_file(LostFile(path, origin, write_error_text(error)))


def _write_json(plan: BenchPlan, transport: str, rows: list[Row], models: dict[str, Any]) -> None:
    chosen = plan.chosen
    wrong, average = summary(rows)
    results = []
    for row in rows:
        record = asdict(row)
        for half in (record["out_of_place"], record["in_place"]):
            if half is not None:
                names = "time_rank0", "time_avg", "time_min", "time_max"
                half.update(zip(names, half.pop("times"), strict=True))
        results.append(record)
    internal = ("report_to", "command", "cudagraph")
    host, system, python = socket.gethostname(), platform.platform(), platform.python_version()
    record = {
        "version": 1,
        "collective": plan.collective.name,
        "ranks": sv.world_size(),
        "transport": transport,
        "bus_factor": plan.collective.bus,
        "config": {key: value for key, value in vars(chosen).items() if key not in internal},
        "machine": {"host": host, "system": system, "cores": os.cpu_count()},
        "versions": {"syncvar": sv.__version__, "python": python, "numpy": np.__version__},
        "results": results,
        "out_of_bounds": {"count": wrong, "okay": not wrong},
        "average_bus_bandwidth": {"bandwidth": average},
        "models": models,
    }
    with open(chosen.json, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    sys.exit(work(parse_arguments()))
