"""Every Python block of the documents runs as it stands: on two workers, or, where it starts workers itself, as a script.

Blocks of the kind `python script` are scripts for plain Python; what they print has to be what their last comment says.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import Job
from tests.support.paths import REPOSITORY

BLOCK = re.compile(r"^```python(| script)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
BLOCKS = [
    (f"{page.relative_to(REPOSITORY)} {number}".replace("/", "_"), kind.strip(), text)
    for page in PAGES
    for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()), 1)
]

DRIVER = """
    import pathlib
    import probe

    for path in sorted(pathlib.Path("blocks").iterdir()):
        exec(compile(path.read_text(), path.name, "exec"), {"__name__": "__main__"})
        probe.note("ran", block=path.name)
"""


def test_the_pages_have_blocks():
    assert len(BLOCKS) > 5


@pytest.mark.parametrize(
    "workers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_blocks_run_on_workers(tmp_path, workers):
    (tmp_path / "blocks").mkdir()
    names = [name for name, kind, _ in BLOCKS if not kind]
    for name, kind, text in BLOCKS:
        if not kind:
            (tmp_path / "blocks" / name).write_text(text)
    job = Job(tmp_path, DRIVER, workers=workers, options=["--servers", "1"])
    assert job.wait(120) == 0, job
    for rank in range(workers):
        assert [one["block"] for one in job.events("ran", rank)] == sorted(names)


@pytest.mark.parametrize("name", [name for name, kind, _ in BLOCKS if kind == "script"])
def test_a_script_runs(tmp_path, name):
    text = next(text for other, _, text in BLOCKS if other == name)
    script = Path(tmp_path, "script.py")
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == re.findall(r"# (\[.*?\])", text)[-1]
