"""Bars of tqdm in several ranks, on a terminal and in a pipe, between lines of a log."""

import re
import sys

import pytest

from tests.support.terminal_screen import run_in_terminal

BARS = """
import time
import syncvar as sv
from tqdm import tqdm
rank = sv.rank()
for step in tqdm(range(12), desc=f"work {rank}", mininterval=0.01):
    sv.barrier()
    time.sleep(0.02)
    if step % 4 == 3:
        print(f"line {step} of {rank}", flush=True)
"""

NESTED = """
import time
import syncvar as sv
from tqdm import tqdm
rank = sv.rank()
for epoch in tqdm(range(3), desc=f"epochs {rank}", mininterval=0.01):
    for batch in tqdm(range(8), desc="batches", leave=False, mininterval=0.01):
        sv.barrier()
        time.sleep(0.02)
    tqdm.write(f"epoch {epoch} of {rank}")
"""


def command(workers, *options):
    return [
        *(sys.executable, "-m", "syncvar_launcher", *options, "--workers", str(workers)),
        "script.py",
    ]


def ranks_of(lines):
    return [int(match[1]) for line in lines if (match := re.match(r"\[(\d)\] ", line))]


def is_bar(line):
    return "it/s]" in line or "?it/s" in line or "s/it]" in line


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_bars_stand_below_the_lines_of_a_terminal(tmp_path, workers):
    (tmp_path / "script.py").write_text(BARS)
    code, screen = run_in_terminal(command(workers, "--color", "never"), cwd=tmp_path)
    assert code == 0, screen.lines()
    most = 0
    for lines in screen.seen:
        bars = [line for line in lines if is_bar(line)]
        live = [line for line in bars if "100%" not in line]
        most = max(most, len(live))
        ranks = ranks_of(live)
        assert ranks == sorted(set(ranks)), lines  # one line each, in the order of the ranks
        above = list(lines)
        while above and is_bar(above[-1]):
            above.pop()
        assert not any(is_bar(line) and "100%" not in line for line in above), lines
        assert not any(is_bar(line) and "line" in line for line in lines), lines
    assert most == workers
    final = screen.lines()
    assert sorted(line for line in final if "line" in line) == sorted(
        f"[{rank}] line {step} of {rank}" for rank in range(workers) for step in (3, 7, 11)
    )
    assert sorted(line.partition("%")[0] for line in final if is_bar(line)) == [
        f"[{rank}] work {rank}: 100" for rank in range(workers)
    ]


def test_nested_bars_leave_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(NESTED)
    code, screen = run_in_terminal(command(2, "--color", "never"), cwd=tmp_path)
    assert code == 0, screen.lines()
    assert max(sum("batches" in line for line in lines) for lines in screen.seen) == 2
    final = [line for line in screen.lines() if re.match(r"\[\d\]", line)]
    assert sorted(line.partition("%")[0] for line in final) == sorted(
        f"[{rank}] {text}"
        for rank in range(2)
        for text in (*(f"epoch {epoch} of {rank}" for epoch in range(3)), f"epochs {rank}: 100")
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", [BARS, NESTED])
@pytest.mark.parametrize("environ", [None, {"TERM": "dumb"}])
def test_a_pipe_and_a_dumb_terminal_get_the_last_state(tmp_path, launch, script, environ):
    if environ is None:
        job = launch(script, workers=2)
        assert job.wait() == 0, str(job)
        text = job.out + job.err
        assert "\r" not in text
        assert "\x1b" not in text
        lines = text.splitlines()
    else:
        (tmp_path / "script.py").write_text(script)
        code, screen = run_in_terminal(command(2), cwd=tmp_path, environ=environ)
        assert code == 0
        lines = screen.lines()
    bars = [line for line in lines if is_bar(line)]
    assert sorted(ranks_of(bars)) == [0, 1], lines
    assert all("100%" in line for line in bars), lines
