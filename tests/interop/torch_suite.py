"""Run torch's own distributed_test.py, from the installed wheel, over several backends.

    python tests/interop/torch_suite.py --ranks 2,3,4 --backends gloo,syncvar [--tests PATTERN]

It prints a table of the tests that pass, fail, hang or are skipped, and the tests that gloo passes and syncvar does
not. Nothing of torch's file is copied. The tests take each backend for gloo: `take_for_gloo` translates the name. So
the conditions of the file choose the same tests for all backends. The ranks live as long as no test fails.
"""

import argparse
import contextlib
import gc
import io
import os
import re
import sys
import tempfile
import traceback
import warnings
from multiprocessing import connection, get_context
from pathlib import Path

DEADLINE_S = 120.0
START_S = 600.0  # to import torch and its tests
MODULE = "torch.testing._internal.distributed.distributed_test"
SUITE = "TestDistBackend"


def load(size):
    """Import the file, and return it with the class of its tests."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(size)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        module = __import__(MODULE, fromlist=[SUITE])
    base = getattr(module, SUITE)
    return module, type("Suite", (base, module.DistributedTest._DistTestBase), {})


def names_of(suite):
    """Return the names of the tests; without a GPU those that need none."""
    import torch

    names = sorted(name for name in dir(suite) if name.startswith("test_"))
    return names if torch.cuda.is_available() else [one for one in names if "cuda" not in one]


def take_for_gloo(backend):
    """Let torch make groups of `backend` where it is asked for gloo, and take them for gloo."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    init, new, name_of = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(name="gloo", *args, **options):
        name = options.pop("backend", name)
        return init(backend if name == "gloo" else name, *args, **options)

    def new_group(*args, **options):
        if options.get("backend") == "gloo":
            options["backend"] = backend
        return new(*args, **options)

    def get_backend(group=None):
        name = name_of(group)
        return "gloo" if name == backend else name

    for module in (dist, distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group
    # The tests see the true name: they expect events of torch's own backends in its profiler.
    distributed_c10d.get_backend = get_backend


def serve(rank, size, backend, pipe):
    """Run tests as one rank, until the pipe ends."""
    import unittest
    from datetime import timedelta

    module, suite = load(size)
    import torch
    import torch.distributed as dist

    if backend == "syncvar":
        import syncvar.torch  # noqa: F401

        take_for_gloo(backend)
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    pipe.send(("ready", ""))
    while True:
        try:
            name, folder = pipe.recv()
        except EOFError:
            return
        os.environ["TEMP_DIR"] = folder
        module.Barrier.barrier_id = 0
        module.INIT_METHOD = f"file://{folder}/init_again"
        outcome, text = "pass", ""
        captured = io.StringIO()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(captured):
                warnings.simplefilter("ignore")
                test = suite(name)
                test.rank, test.file_name = rank, os.path.join(folder, "init")
                seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{test.file_name}",
                    world_size=size,
                    rank=rank,
                    timeout=timedelta(seconds=seconds),
                )
                torch.manual_seed(0)
                test._barrier(timeout=DEADLINE_S)
                getattr(test, name)()
                test._barrier(timeout=DEADLINE_S)
        except (SystemExit, unittest.SkipTest) as error:
            code = getattr(error, "code", None)
            skips = {one.exit_code for one in module.TEST_SKIPS.values()}
            if isinstance(error, unittest.SkipTest) or code in skips:
                outcome, text = "skip", str(error)
            elif code not in (None, 0):
                outcome, text = "fail", f"exit {code}"
        except BaseException:
            outcome, text = "fail", traceback.format_exc()[-3000:]
        if outcome != "fail":  # the parent ends ranks that fail
            with contextlib.suppress(Exception):
                if dist.is_initialized():
                    dist.destroy_process_group()
            gc.collect()
        pipe.send((outcome, text))


class Ranks:
    """The processes that run tests; they are started again after one that fails or hangs."""

    def __init__(self, size, backend):
        self.size, self.backend = size, backend
        self.processes, self.pipes = [], []

    def start(self):
        context = get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.size, self.backend, there))
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def run(self, name, deadline_s):
        """Return the outcome of one test, and a text."""
        if not self.processes:
            self.start()
            if {kind for kind, _ in self.outcomes(START_S)} != {"ready"}:
                self.stop()
                return "hang", "the ranks did not start"
        with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
            for part in ("barrier", "test_dir", "init_dir"):
                os.mkdir(os.path.join(folder, part))
            for pipe in self.pipes:
                pipe.send((name, folder))
            outcomes = self.outcomes(deadline_s)
            kinds = {kind for kind, _ in outcomes}
            if kinds in ({"pass"}, {"skip"}):
                return outcomes[0]
            self.stop()
        for kind in ("fail", "hang"):
            for rank, (found, text) in enumerate(outcomes):
                if found == kind:
                    return kind, f"rank {rank}: {text}"
        return "fail", f"the ranks differ: {sorted(kinds)}"

    def outcomes(self, deadline_s):
        outcomes = [("hang", "no answer in time")] * self.size
        open_pipes = dict(zip(self.pipes, range(self.size), strict=True))
        left = deadline_s
        while open_pipes:
            ready = connection.wait(open_pipes, timeout=left)
            if not ready:
                break
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = ("fail", "the process ended")
                if outcomes[rank][0] == "fail":
                    left = min(left, 10.0)  # the others may wait for this rank
        return outcomes

    def stop(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def run_suite(size, backend, pattern="", deadline_s=DEADLINE_S, log=None):
    """Return the outcome of each test as name -> (kind, text)."""
    _, suite = load(size)
    names = [name for name in names_of(suite) if re.search(pattern, name)]
    ranks, outcomes = Ranks(size, backend), {}
    try:
        for name in names:
            outcomes[name] = ranks.run(name, deadline_s)
            if log is not None:
                kind, text = outcomes[name]
                log.write(f"{backend} {size} {kind} {name}\n")
                if kind in ("fail", "hang"):
                    log.write("    " + text.replace("\n", "\n    ") + "\n")
                log.flush()
    finally:
        ranks.stop()
    return outcomes


def table(results):
    """Return the lines of the table of results {(backend, size): outcomes}."""
    yield "| backend | ranks | pass | fail | hang | skip |"
    yield "|---|---|---|---|---|---|"
    for (backend, size), outcomes in sorted(
        results.items(), key=lambda one: (one[0][1], one[0][0])
    ):
        kinds = [kind for kind, _ in outcomes.values()]
        counts = " | ".join(str(kinds.count(kind)) for kind in ("pass", "fail", "hang", "skip"))
        yield f"| {backend} | {size} | {counts} |"


def behind(results, size):
    """Return the tests that gloo passes and syncvar does not."""
    gloo, ours = results["gloo", size], results["syncvar", size]
    return [name for name in gloo if gloo[name][0] == "pass" and ours[name][0] != "pass"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--backends", default="gloo,syncvar")
    parser.add_argument("--tests", default="")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    results = {}
    log = options.log.open("w") if options.log else sys.stderr
    for size in map(int, options.ranks.split(",")):
        for backend in options.backends.split(","):
            results[backend, size] = run_suite(size, backend, options.tests, options.deadline, log)
    print(*table(results), sep="\n")
    missing = 0
    for size in sorted({size for _, size in results}):
        if ("gloo", size) in results and ("syncvar", size) in results:
            late = behind(results, size)
            missing += len(late)
            print(f"{size} ranks, gloo passes and syncvar does not: {', '.join(late) or 'none'}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
