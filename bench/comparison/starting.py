"""What it costs to begin: a job that only meets in a barrier, one over hosts that makes one all-reduce, and the import."""

from __future__ import annotations

import resource
from functools import partial
from typing import TYPE_CHECKING, Any

from comparison.bounds import judge
from comparison.libraries import MPI, script
from comparison.namespaces import NoHosts, gigabit
from comparison.part import Part, Setting, failures
from comparison.processes import run
from comparison.rounds import interleave
from comparison.table import grid, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from comparison.libraries import Library
    from comparison.rounds import Turn
    from comparison.table import Spread

__all__ = ["importing", "launch", "launch_over_hosts"]

WORKERS = 4
FRESH = "syncvar, --start-method spawn"
SCRIPTS = {
    "syncvar": "start_syncvar.py",
    **dict.fromkeys(MPI, "start_mpi.py"),
    "torch": "start_torch.py",
}
HOSTS, EACH = 2, 2
SCRIPTS_OVER_HOSTS = {"syncvar": "start_hosts_syncvar.py", "openmpi": "start_hosts_mpi.py"}
IMPORTS = {
    "numpy": "import numpy",
    "syncvar": "import numpy, syncvar; syncvar.all_reduce",
}
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""A start is timed as users have it, not with a translation of every module, which that variable would bring to each process."""
STARTS_LEAST = 5
"""Turns of each job at least: the first one after other work finds the caches of files cold, and takes up to twice as long."""
IMPORT_TURNS = 4
"""Turns of each import for each round: they are short."""


def launch(setting: Setting) -> Part:
    """Time whole jobs of 4 workers that start, meet in a barrier and end, in turns."""
    turns = {
        name: partial(
            _seconds, _command(library), setting.effort.timeout, library.environment(WORKERS)
        )
        for name, library in setting.present.items()
        if name in SCRIPTS
    }
    turns[FRESH] = partial(
        _seconds, _command(setting.syncvar, "--start-method", "spawn"), setting.effort.timeout, {}
    )
    what = f"launch: {WORKERS} workers start, import NumPy, meet in a barrier and end"
    part, times = _started(setting, "launch", what, turns)
    mpirun = min((times[name][1] for name in MPI if name in times), default=None)
    torchrun = times["torch"][1] if "torch" in times else None
    part.verdicts += [
        judge(
            name,
            times[own][1] / other if own in times and other else None,
            f"launch of {WORKERS} workers{how}, against {label}",
        )
        for own, how, name, other, label in (
            ("syncvar", "", "launch mpirun", mpirun, "the faster mpirun"),
            (FRESH, ", --start-method spawn", "launch spawn", mpirun, "the faster mpirun"),
            ("syncvar", "", "launch torchrun", torchrun, "torchrun"),
        )
    ]
    return part


def launch_over_hosts(setting: Setting) -> Part:
    """Time whole jobs of 2 hosts x 2 workers that import NumPy, meet in an all-reduce and end, in turns, all by the same ssh."""
    what = f"launch: {HOSTS} hosts x {EACH} workers start by ssh, import NumPy, make an all-reduce and end"
    turns, times = {}, {}
    try:
        with gigabit(HOSTS) as several:
            for name, options in (
                ("syncvar", []),
                (FRESH, ["--start-method", "spawn"]),
                ("openmpi", []),
            ):
                if library := setting.present.get(name.partition(",")[0]):
                    command = [
                        *several.start(library, EACH),
                        *options,
                        script(SCRIPTS_OVER_HOSTS[library.name]),
                    ]
                    turns[name] = partial(
                        _seconds, command, setting.effort.timeout, several.environment(library)
                    )
            part, times = _started(setting, "launch over hosts", what, turns)
    except NoHosts as problem:
        part = Part({"problems": {"hosts": str(problem)}}, [f"{what}: not measured: {problem}"])
    mpirun = times["openmpi"][1] if "openmpi" in times else None
    part.verdicts += [
        judge(
            "launch hosts",
            times[own][1] / mpirun if own in times and mpirun else None,
            f"launch over {HOSTS} hosts x {EACH} workers{how}, against Open MPI",
        )
        for own, how in (("syncvar", ""), (FRESH, ", --start-method spawn"))
    ]
    return part


def _started(
    setting: Setting, what: str, title: str, turns: Mapping[str, Turn]
) -> tuple[Part, dict[str, Spread]]:
    """Take the turns and return their part, without verdicts, and the wall times by name."""
    labels = {name: library.label for name, library in setting.present.items()} | {FRESH: FRESH}
    found = interleave(what, turns, max(STARTS_LEAST, setting.effort.rounds))
    times = {
        name: spread(one["seconds"] for one in results)
        for name, results in found.results.items()
        if results
    }
    processor = {
        name: spread(one["processor"] for one in results)[1]
        for name, results in found.results.items()
        if results
    }
    lines = [f"{title}; wall time of the command in s, and processor time"]
    body = [
        [labels[name], *(f"{value:.2f}" for value in (*times[name], processor[name]))]
        for name in times
    ]
    lines += grid(["library", "quartile", "median", "quartile", "processor"], body) + failures(
        found.problems
    )
    failed = not {"syncvar", FRESH}.isdisjoint(found.problems)
    return Part(
        {"seconds": times, "processor": processor, "problems": found.problems}, lines, failed=failed
    ), times


def importing(setting: Setting) -> Part:
    """Time `import numpy` beside `import numpy, syncvar` and the first look at a name, in turns."""
    python = setting.syncvar.python
    turns = {
        name: partial(_seconds, [python, "-c", code], setting.effort.timeout, {})
        for name, code in IMPORTS.items()
    }
    found = interleave("import", turns, IMPORT_TURNS * setting.effort.rounds)
    times = {
        name: spread(one["seconds"] for one in results)
        for name, results in found.results.items()
        if results
    }
    processor = {
        name: spread(one["processor"] for one in results)[1]
        for name, results in found.results.items()
        if results
    }
    lines = [
        (
            "import: wall time and processor time of python -c, medians of "
            f"{IMPORT_TURNS * setting.effort.rounds} turns"
        )
    ]
    lines += [
        f"  {1e3 * times[name][1]:6.1f} ms {1e3 * processor[name]:6.1f} ms  {IMPORTS[name]}"
        for name in times
    ]
    lines += failures(found.problems)
    beyond = 1e3 * (times["syncvar"][1] - times["numpy"][1]) if len(times) == len(IMPORTS) else None
    verdicts = [judge("import", beyond, "import of syncvar beyond NumPy's")]
    return Part(
        {"seconds": times, "processor": processor, "problems": found.problems},
        lines,
        verdicts,
        bool(found.problems),
    )


def _command(library: Library, *options: str) -> list[str]:
    return [*library.start(WORKERS), *options, script(SCRIPTS[library.name])]


def _seconds(
    command: Sequence[str], timeout: float, env: dict[str, str]
) -> tuple[dict[str, Any] | None, str]:
    before = _processor()
    done = run(command, timeout=timeout, env={**COMPILED, **env})
    times = {"seconds": done.seconds, "processor": _processor() - before}
    return (times, "") if done.failure is None else (None, done.failure)


def _processor() -> float:
    """Return the processor time of all children that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
