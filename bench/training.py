"""Training with two workers: syncvar beside torch's DistributedDataParallel over gloo and TensorFlow, in turns.

python bench/training.py --setup                     once: the environments (see bench/README.md)
python bench/training.py --json FILE                 all networks and batches
python bench/training.py --tasks mlp/8 --rounds 3    one of them

Every library trains the same network from the same first weights on the same batches, with the same
optimizer and one thread for each worker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from comparison import bounds, machine
from comparison.libraries import Library, library, peer_python, script
from comparison.part import Setting
from comparison.processes import run
from comparison.rounds import Effort
from comparison.setup import TRAINING, make_environment, set_up
from comparison.training import SCRIPTS, TASKS, Task, training

RIVALS = ("torch", "tensorflow")
DATA_S = 120.0
SAVE = "import sys, numpy; from syncvar.examples.digits import load; numpy.savez(sys.argv[1], **load()._asdict())"


def main() -> int:
    """Do what the command line asks for."""
    chosen = _arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # what runs now is ended on the way out
    libraries = [
        Library("syncvar", chosen.python),
        *(library(name, "", chosen.peers) for name in RIVALS),
    ]
    if chosen.setup:
        return _set_up(libraries, chosen.peers)
    about = machine.describe()
    versions, present = {}, {}
    for one in libraries:
        found, problem = one.probe(script(SCRIPTS[one.name]))
        versions[one.label] = found or f"MISSING: {problem}"
        if found is not None:
            present[one.name] = one
    print("\n".join(machine.lines(about, versions)), flush=True)
    if "syncvar" not in present:
        return 1
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        data = os.path.join(folder, "digits.npz")
        problem = run([chosen.python, "-c", SAVE, data], timeout=DATA_S).failure
        if problem:
            print(f"no digits: {problem}")
            return 1
        setting = Setting(present, (chosen.workers,), Effort(0.0, chosen.rounds, chosen.timeout), 0)
        part = training(setting, chosen.tasks, data)
    print("", *part.lines, "", *bounds.lines(part.verdicts), sep="\n", flush=True)
    if chosen.json:
        judged = [
            {**one._asdict(), "bound": one.bound._asdict(), "verdict": one.word}
            for one in part.verdicts
        ]
        report: dict[str, Any] = {
            "machine": about,
            "versions": versions,
            "training": part.report,
            "bounds": judged,
        }
        Path(chosen.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(
        part.failed or (chosen.strict and any(one.word == "MISSED" for one in part.verdicts))
    )


def _set_up(libraries: list[Library], peers: Path) -> int:
    """Make the environments that are missing; 0 when all that is needed is there (TensorFlow is optional)."""
    own = libraries[0]
    if own.probe(script(SCRIPTS["syncvar"]))[0] is None and own.python == peer_python(
        peers, TRAINING
    ):
        make_environment(peers, TRAINING)
    versions, problem = own.probe(script(SCRIPTS["syncvar"]))
    print(f"{own.label}: {versions or f'missing: {problem}'}")
    return 0 if set_up(peers, RIVALS) and versions is not None else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--setup", action="store_true", help="make the environments and end")
    add("--peers", type=Path, default=Path(".peers"), help="folder of the environments [.peers]")
    add(
        "--python",
        help=f"interpreter that has syncvar, torch and scikit-learn [that of the environment {TRAINING!r}]",
    )
    names = ",".join(f"{one.net}/{one.rows}" for one in TASKS)
    add(
        "--tasks",
        type=_tasks,
        default=list(TASKS),
        help=f"network/images per worker and step, of {names} [all]",
    )
    add(
        "--steps",
        type=int,
        help=f"of each training, in whole epochs [{','.join(str(one.steps) for one in TASKS)}]",
    )
    add("--workers", type=int, default=2, help="[2]")
    add("--rounds", type=int, default=5, help="how often each library is started [5]")
    add("--timeout", type=float, default=600.0, help="longest time of one turn in seconds [600]")
    add("--json", metavar="FILE", help="write everything that was measured")
    add("--strict", action="store_true", help="end with 1 when a bound is missed")
    chosen = parser.parse_args()
    if (
        chosen.rounds < 1
        or chosen.workers < 1
        or chosen.timeout <= 0
        or (chosen.steps is not None and chosen.steps < 1)
    ):
        parser.error("--rounds, --workers, --timeout and --steps must be positive")
    if chosen.steps is not None:
        chosen.tasks = [one._replace(steps=chosen.steps) for one in chosen.tasks]
    given = chosen.python and os.path.abspath(shutil.which(chosen.python) or chosen.python)
    chosen.python = given or peer_python(chosen.peers, TRAINING)
    return chosen


def _tasks(text: str) -> list[Task]:
    known = {f"{one.net}/{one.rows}": one for one in TASKS}
    wanted = text.split(",")
    if not set(wanted) <= set(known):
        raise argparse.ArgumentTypeError(f"{text}: choose of {','.join(known)}")
    return [known[one] for one in wanted]


if __name__ == "__main__":
    sys.exit(main())
