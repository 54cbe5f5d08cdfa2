"""The pictures of the documentation are what their code draws.

After a change of docs/pictures/*.py: SYNCVAR_REGENERATE_GOLDEN=1 pytest tests/tidy/test_pictures.py,
look at the pictures in a browser, and commit them.
"""

import importlib
import os
import re
import sys
import xml.etree.ElementTree as ET

import house
import import_graph
import pytest

from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "docs" / "pictures"
sys.path.append(str(FOLDER))
DRAWN = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "svg")


def draw(name):
    """Return the picture of a file of docs/pictures."""
    module = importlib.import_module(name)
    if name == "rooms":
        return module.draw(import_graph.layers(), import_graph.edges(house.Sources()))
    return module.draw()


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_its_code_draws(name):
    path, drawn = FOLDER / f"{name}.svg", draw(name)
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        path.write_text(drawn)
    assert path.read_text() == drawn, (
        "run this test with SYNCVAR_REGENERATE_GOLDEN=1, and look at the picture"
    )


@pytest.mark.parametrize("name", DRAWN)
def test_the_texts_of_a_picture_stand_inside_it(name):
    root = ET.fromstring((FOLDER / f"{name}.svg").read_text())
    width, height = float(root.get("width")), float(root.get("height"))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, size = float(text.get("x")), float(text.get("font-size"))
        is_wide = text.get("class") == "mono" or text.get("font-weight")
        length = len(text.text) * size * (0.61 if is_wide else 0.52)
        left = x - {None: 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        assert left >= 0, text.text
        assert left + length <= width, text.text
        assert size <= float(text.get("y")) <= height, text.text


def test_every_picture_stands_on_a_page():
    pages = " ".join(
        path.read_text() for path in REPOSITORY.glob("**/*.md") if ".venv" not in str(path)
    )
    shown = set(re.findall(r"pictures/([\w-]+\.(?:svg|png))", pages))
    there = {path.name for path in FOLDER.iterdir() if path.suffix in {".svg", ".png"}}
    assert there == shown
