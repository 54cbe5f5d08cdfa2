"""Each example of docs/how-to/train.md runs by the command written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "docs/how-to/train.md"
EXAMPLES = REPOSITORY / "syncvar" / "examples"
_IN_DEFAULT_RUN = ("resume", "embedding")  # the others run in other tests by the same command
_COMMAND = re.compile(r"`(syncvar-launch [^`]* -m syncvar\.examples\.(\w+)[^`]*)`")


def commands():
    """Return the command of each example, by its name."""
    listed = " ".join(PAGE.read_text().partition("## Examples")[2].split())
    found = _COMMAND.findall(listed)
    (common,) = [command for command, name in found if name == "NAME"]
    special = {name: command for command, name in found if name != "NAME"}
    names = re.findall(r"`(\w+)`", listed[listed.index("|---|") :])
    return {**{name: common.replace("NAME", name) for name in names}, **special}


def marks(name):
    if name.startswith(("torch_", "jax_")):
        return [pytest.mark.tensors]
    return [] if name in _IN_DEFAULT_RUN else [pytest.mark.slow]


def test_every_example_is_listed():
    programs = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert set(commands()) == programs


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in commands()])
def test_a_listed_example_runs_as_written(name, tmp_path):
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        ["sh", "-c", commands()[name]],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
