"""Each example that README lists runs by the command written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

README = REPOSITORY / "README.md"
EXAMPLES = REPOSITORY / "syncvar" / "examples"
_IN_DEFAULT_RUN = ("resume", "embedding")  # the others run in other tests by the same command
_COMMAND = re.compile(r"`(syncvar-launch [^`]* -m syncvar\.examples\.(\w+)[^`]*)`")


def commands():
    """Return the command of each example, by its name."""
    text = README.read_text()
    listed = text[text.index("Examples, each by") :].split("\n\n")[0]
    (common,) = [command for command, name in _COMMAND.findall(listed) if name == "NAME"]
    made = {name: command for command, name in _COMMAND.findall(listed) if name != "NAME"}
    names = re.findall(r"`(\w+)`", listed)
    return {**{name: common.replace("NAME", name) for name in names}, **made}


def marks(name):
    if name.startswith(("torch_", "jax_")):
        return [pytest.mark.tensors]
    return [] if name in _IN_DEFAULT_RUN else [pytest.mark.slow]


def test_every_example_is_listed():
    programs = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert set(commands()) == programs


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in commands()])
def test_an_example_of_readme_runs_as_written(name, tmp_path):
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
