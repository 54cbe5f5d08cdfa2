"""A save and a restore that take long: rank 0 shows their bytes, where a person looks."""

import sys

import pytest

from tests.support.terminal_screen import run_in_terminal

SCRIPT = """
import sys, time
import numpy as np
import syncvar as sv
from syncvar.checkpoint.checkpoint_reader import CheckpointReader
from syncvar.core.progress_line import ProgressLine

def show(line, text, show=ProgressLine.show):
    show(line, text)
    time.sleep(0.2)  # until the launcher has drawn it

ProgressLine.is_due = lambda line: line._write is not None  # as if a second had passed
ProgressLine.show = show
with sv.MirroredStrategy().scope():
    w = sv.Variable(np.zeros(4 << 20, np.uint8))
sv.Checkpoint(w=w).save("a")
sv.Checkpoint(w=w).restore("a")
print(f"done {sv.rank()}")
"""


def command(*options):
    return [sys.executable, "-m", "syncvar_launcher", *options, "--workers", "2", "script.py"]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["auto", "off"])
def test_rank_0_shows_bytes_on_a_terminal(tmp_path, chosen):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--color", "never"]
    code, screen = run_in_terminal(
        command(*options), cwd=tmp_path, environ={"SYNCVAR_PROGRESS": chosen}
    )
    assert code == 0, screen.lines()
    shown = {line.partition(" of ")[0] for lines in screen.seen for line in lines}
    progress = {line for line in shown if "syncvar: " in line}
    assert not any("[1]" in line for line in progress)
    assert any("[0] syncvar: saving" in line for line in progress) == (chosen == "auto"), shown
    assert any("[0] syncvar: restoring" in line for line in progress) == (chosen == "auto"), shown
    final = [line for line in screen.lines() if line.startswith("[")]
    assert sorted(final) == ["[0] done 0", "[1] done 1"]


def test_a_pipe_gets_nothing(launch):
    job = launch(SCRIPT, workers=2)
    assert job.wait() == 0, str(job)
    assert sorted((job.out + job.err).split()) == ["0", "1", "[0]", "[1]", "done", "done"]
