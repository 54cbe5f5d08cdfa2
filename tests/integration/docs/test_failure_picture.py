"""The picture of a failed job shows what the launcher prints today.

After a wanted change: run the first program of docs/explanation/failure-model.md with three workers,
write what it prints to docs/pictures/failure-block.txt, and make the picture anew.
"""

import re
import subprocess
import sys

from tests.support.page_runner import normalize, read_page
from tests.support.paths import REPOSITORY


def test_the_block_of_the_picture_is_that_of_its_program(tmp_path):
    page = read_page((REPOSITORY / "docs/explanation/failure-model.md").read_text())
    name, program = next(iter(page.files.values()))
    (tmp_path / name).write_text(program)
    job = subprocess.run(
        [sys.executable, "-m", "syncvar_launcher", "--workers", "3", name],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.returncode == 1
    shown = (REPOSITORY / "docs/pictures/failure-block.txt").read_text()
    assert without_places(job.stderr) == without_places(shown)


def without_places(text):
    """Return the lines without what differs between two runs and two machines."""
    text = re.sub(r" on \S+ exited", " on HOST exited", text)
    text = re.sub(r": in (syncvar, called at|user code,) ", ": in PLACE, called at ", text)
    text = re.sub(r"  ranks 0, 2(:.*)", r"  rank 0\1\n  rank 2\1", text)
    return [normalize(line) for line in text.splitlines()]
