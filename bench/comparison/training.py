"""Training two small networks with two workers: syncvar beside torch's DistributedDataParallel and TensorFlow."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from comparison.bounds import Verdict, judge
from comparison.libraries import script
from comparison.part import Part, Setting, failures
from comparison.rounds import interleave, turn
from comparison.table import grid, number, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SCRIPTS", "TASKS", "Task", "training"]

SCRIPTS = {name: f"training_{name}.py" for name in ("syncvar", "torch", "tensorflow")}
MEANINGS = {
    (
        "syncvar",
        "optimizer",
    ): "weights are variables; sv.optimizers.Momentum takes torch's gradients",
    (
        "syncvar",
        "all_reduce",
    ): "sv.all_reduce of one array of sv.empty that torch's gradients lie in; torch's SGD",
    ("syncvar", "list"): "sv.all_reduce of the list of torch's gradients; torch's SGD",
    ("torch", "ddp"): "DistributedDataParallel, torch's SGD",
    ("torch", "ddp views"): "the same with gradient_as_bucket_view and static_graph",
    ("torch", "alone"): "no communication: each worker for itself, for reference",
    ("tensorflow", "step"): "a tf.function call for each step, Keras SGD",
    ("tensorflow", "loop"): "one for an epoch, a loop over its steps inside",
}
REFERENCE = "alone"
RIVALS = {"tensorflow": "training tensorflow", "torch": "training torch"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}


class Task(NamedTuple):
    """A network, the images of each worker in a step, the steps of a turn, and whether its speed has a bound."""

    net: str
    rows: int
    steps: int
    has_bound: bool


TASKS = (
    Task("mlp", 8, 2000, True),
    Task("conv", 8, 1500, True),
    Task("conv2", 8, 600, False),
    Task("mlp", 128, 400, False),
    Task("conv", 128, 200, False),
    Task("conv2", 128, 100, False),
)
NETS = {
    "mlp": "64-64-10",
    "conv": "a convolution of 16 channels",
    "conv2": "convolutions of 16 and 32 channels",
}


def training(setting: Setting, tasks: Sequence[Task], data: str) -> Part:
    """Let each library train the networks in its turn, and compare steps per second and accuracies.

    Args:
        setting: The libraries, among them syncvar; the first number of workers counts.
        tasks: What is trained.
        data: The digits, an .npz.
    """
    workers = setting.workers[0]
    told = [word for one in tasks for word in ("--train", f"{one.net}/{one.rows}/{one.steps}")]
    turns = {
        name: partial(
            turn,
            one,
            workers,
            [*told, "--data", data],
            setting.effort.timeout,
            script(SCRIPTS[name]),
            ONE_THREAD,
        )
        for name, one in setting.present.items()
    }
    found = interleave(f"{workers} workers, training", turns, setting.effort.rounds)
    rows = _rows(found.results)
    lines, verdicts = [], []
    for task in tasks:
        of_task = [row for row in rows if (row["net"], row["rows"]) == (task.net, task.rows)]
        lines += ["", *_table(task, of_task, setting, workers)]
        verdicts += _verdicts(task, of_task)
    lines += failures(found.problems)
    report = {"workers": workers, "rows": rows, "turns": found.results, "problems": found.problems}
    return Part(report, lines[1:], verdicts, "syncvar" in found.problems)


def _rows(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each library, network, batch and kind."""
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for name, rounds in results.items():
        for found in rounds:
            for one in found["results"]:
                key = (name, one["net"], one["rows"], one["kind"])
                row = rows.setdefault(
                    key,
                    {
                        "library": name,
                        "net": one["net"],
                        "rows": one["rows"],
                        "kind": one["kind"],
                        "steps": one["steps"],
                        "rounds": [],
                        "accuracies": [],
                    },
                )
                row["rounds"].append(one["us"])
                row["accuracies"].append(one["accuracy"])
    for row in rows.values():
        row["us"] = spread(row["rounds"])
        row["steps_per_s"] = 1e6 / row["us"][1]
        row["accuracy"] = median(row["accuracies"])
    return list(rows.values())


def _best(rows: Sequence[dict[str, Any]], library: str) -> dict[str, Any] | None:
    """Return the fastest kind of a library that combines gradients."""
    chosen = (row for row in rows if row["library"] == library and row["kind"] != REFERENCE)
    return min(chosen, key=lambda row: row["us"][1], default=None)


def _table(task: Task, rows: Sequence[dict[str, Any]], setting: Setting, workers: int) -> list[str]:
    own = _best(rows, "syncvar")
    body = []
    for row in rows:
        low, middle, high = map(number, row["us"])
        ratio, by_round = "-", "-"
        if own is not None and row is not own:
            ratio = f"{row['us'][1] / own['us'][1]:.2f}"
            low_ratio, _, high_ratio = spread(
                one / mine for one, mine in zip(row["rounds"], own["rounds"], strict=False)
            )
            by_round = f"{low_ratio:.2f}-{high_ratio:.2f}"
        cells = [
            f"{row['steps_per_s']:.0f}",
            f"{middle} ({low}-{high})",
            ratio,
            by_round,
            f"{100 * row['accuracy']:.2f}",
        ]
        meaning = MEANINGS[row["library"], row["kind"]]
        body.append([*cells, setting.present[row["library"]].label, row["kind"], meaning])
    steps = rows[0]["steps"] if rows else task.steps
    title = f"{task.net} ({NETS[task.net]}), {task.rows} images per worker and step, {workers} workers, {steps} steps; us of a step (quartiles over rounds)"
    head = ["steps/s", "us", "ratio", "by round", "accuracy %", "library", "kind", "what"]
    return [
        title,
        *grid(head, body, left=3),
        "ratio: time of the row / time of syncvar's fastest kind",
    ]


def _verdicts(task: Task, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Return the fastest kinds beside the bounds, and for each library's how far the accuracies are apart."""
    own = _best(rows, "syncvar")
    place = f"{task.net}, {task.rows} images per worker"
    verdicts = []
    for name, bound in RIVALS.items():
        other = _best(rows, name)
        kinds = (
            f"syncvar {own['kind']} against {name} {other['kind']}"
            if own and other
            else f"syncvar against {name}"
        )
        if task.has_bound:
            ratio = other["us"][1] / own["us"][1] if own and other else None
            verdicts.append(judge(bound, ratio, f"steps per second, {place}, {kinds}"))
        apart = 100 * abs(own["accuracy"] - other["accuracy"]) if own and other else None
        verdicts.append(
            judge("training accuracy", apart, f"final test accuracies apart, {place}, {kinds}")
        )
    return verdicts
