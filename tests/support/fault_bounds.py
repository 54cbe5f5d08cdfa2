"""Measure how long faults take to be told, and compare the medians with the bounds of the fault matrix.

    python -m tests.support.fault_bounds --bounds              # ten times, about four minutes
    python -m tests.support.fault_bounds --bounds --times 3    # three times

The program runs one case or two of each bounded fault of one host, several times. It prints a table of fault, median
and bound. The exit code is 1 where a median is above twice its bound, or a test failed. Run it on a quiet machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from tests.support.paths import REPOSITORY, TESTS

TIMES = 10
LIMIT_S = 600.0  # of one run of all cases, which takes about 25 s
ALLOWED = 2.0  # times the bound
CASES = (
    "faults/test_faults_lost_rank.py::test_a_lost_rank[F01-raise-X]",
    "faults/test_faults_lost_rank.py::test_a_lost_rank[F02-leave-X]",
    "faults/test_faults_lost_rank.py::test_a_lost_rank[F03-SIGKILL-X]",
    "faults/test_faults_lost_rank.py::test_a_lost_rank[F03-SIGKILL-X-zmq]",
    "faults/test_faults_lost_rank.py::test_a_lost_rank[F06-SIGSTOP-X]",
    "faults/test_faults_slow_ranks.py::test_f08_a_rank_that_wakes_when_it_has_been_given_up_is_fenced[auto]",
    "faults/test_faults_launcher.py::test_f12_launcher_killed[X-fork]",
    "faults/test_faults_launcher.py::test_f13_launcher_told_to_end[TERM-X]",
    "faults/test_faults_launcher.py::test_f14_second_interrupt_kills_at_once[X]",
    "faults/test_faults_start.py::test_f15_the_terminal_or_the_reader_is_gone[EPIPE-C]",
    "faults/test_faults_mismatch.py::test_f30_other_arguments[auto]",
    "faults/test_faults_mismatch.py::test_f31_an_extra_call_at_the_end[auto]",
    "faults/test_faults_not_finite.py::test_f32_what_is_not_finite[raise-nan-auto]",
    "faults/test_faults_start.py::test_f34_ranks_that_differ_in_what_all_must_have_alike",
    "faults/test_faults_start.py::test_f39_a_runtime_directory_that_cannot_be_used[unwritable]",
    "faults/test_faults_user_code.py::test_f42_fork[X-auto]",
    "faults/test_faults_user_code.py::test_f44_ends[collective-at-exit]",
    "faults/test_faults_start.py::test_f60_a_rank_is_killed_while_the_ranks_meet_again[2]",
    "shm/test_shm_launch.py::test_a_lost_rank_is_told_in_the_shm[STOP]",
    "shm/test_shm_launch.py::test_a_lost_rank_is_told_in_the_shm[SEGV]",
)


def measured(times, cases=CASES):
    """Run the cases so many times; return the seconds and the bound of each name, and what failed."""
    found, failures = {}, []
    for number in range(1, times + 1):
        began = time.monotonic()
        with tempfile.NamedTemporaryFile("r", suffix=".tsv") as file:
            line = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--tb=short",
                "-m",
                "",
                "-p",
                "no:cacheprovider",
            ]
            ended = subprocess.run(
                [*line, *(str(TESTS / "integration" / one) for one in cases)],
                cwd=REPOSITORY,
                timeout=LIMIT_S,
                env={**os.environ, "SYNCVAR_TEST_BOUNDS": file.name},
                capture_output=True,
                text=True,
                check=False,
            )
            for name, seconds, bound_s in (one.rstrip("\n").split("\t") for one in file):
                found.setdefault((name, float(bound_s)), []).append(float(seconds))
        if ended.returncode:
            failures.append(ended.stdout[-20_000:])
        print(f"run {number} of {times} took {time.monotonic() - began:.0f} s", flush=True)
    return found, failures


def table(found):
    """Return the lines of the table, and the names whose median is above what is allowed."""
    lines, above = [f"{'fault':<60} {'median s':>9} {'bound s':>8}"], []
    for (name, bound_s), seconds in sorted(found.items()):
        median_s = statistics.median(seconds)
        word = ""
        if median_s > ALLOWED * bound_s:
            above.append(name)
            word = f"  above {ALLOWED:g} times the bound"
        elif median_s > bound_s:
            word = "  above the bound"
        lines.append(f"{name:<60} {median_s:>9.3f} {bound_s:>8g}{word}")
    return lines, above


def main():
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--bounds",
        action="store_true",
        required=True,
        help="measure the bounds of the fault matrix",
    )
    parser.add_argument("--times", type=int, default=TIMES)
    chosen = parser.parse_args()
    found, failures = measured(chosen.times)
    lines, above = table(found)
    print("\n".join(lines))
    for one in failures:
        print(f"--- a run failed\n{one}")
    print(
        f"{len(found)} bounds, {len(above)} medians above {ALLOWED:g} times the bound, {len(failures)} runs failed"
    )
    return int(bool(above or failures or not found))


if __name__ == "__main__":
    sys.exit(main())
