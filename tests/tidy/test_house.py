"""The house rules: no figure of `house.py` grows beyond its baseline, and the measures find what they look for."""

import ast
import json
from pathlib import Path

import house
import pytest


def test_no_figure_is_above_its_baseline_and_its_goal():
    baseline = json.loads(house.BASELINE.read_text())
    measured = house.figures()
    assert measured.keys() == house.GOALS.keys()
    grown = {
        name: f"{figure}, baseline {baseline[name]}"
        for name, figure in measured.items()
        if figure > max(baseline[name], house.GOALS[name])
    }
    assert not grown, "python tests/tidy/house.py --list MEASURE prints what a measure counts"


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Return a function that measures files with given texts."""

    def measure(texts):
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(house, "REPOSITORY", tmp_path)
        return house.Sources()

    return measure


def test_names_are_found(planted):
    found = planted(
        {
            "syncvar/one.py": "class Thing: pass\nclass _ThingKind: pass\ndef why_not(goal, x): what_of = 1\n",
            "launcher/one.py": "class Thing:\n    def __init__(self): self.roster = 1\n",
            "launcher/base.py": "",
            "syncvar/base.py": "",
        }
    )
    assert house.class_names_defined_twice(found) == ["Thing: launcher/one.py:1, syncvar/one.py:1"]
    banned = [line.partition(":")[0] for line in house.banned_words_in_identifiers(found)]
    assert banned == ["goal", "roster", "what_of", "why_not"]
    assert house.file_names_twice(found) == ["one.py: launcher/one.py, syncvar/one.py"]


def test_sizes_are_found(planted):
    found = planted(
        {
            "syncvar/a.py": f"x = '{'y' * 100}'\n",
            "syncvar/b.py": "def f(a, b, c, d, /, e, f, *, g, h): pass\n",
            "syncvar/c.py": "def f(self, a, b, c, d, e, f, g): return a._b  # noqa: SLF001\ny = '# fmt: skip'  # fmt: skip\n",
        }
    )
    assert house.long_lines(found) == ["syncvar/a.py:1"]
    assert house.long_signatures(found) == ["syncvar/b.py:1 f: 8"]
    assert house.LISTS["noqa: SLF001"](found) == ["syncvar/c.py:1"]
    assert house.LISTS["fmt: skip"](found) == ["syncvar/c.py:2"]


def test_circles_are_found_also_in_functions_and_for_type_checkers(planted):
    found = planted(
        {
            "syncvar/__init__.py": "",
            "syncvar/a.py": "from syncvar import b\n",
            "syncvar/b.py": "def f():\n    from syncvar.c import x\n",
            "syncvar/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import syncvar.a\n",
            "syncvar/d.py": "from syncvar import a\n",
        }
    )
    assert house.circles(house.imports(found)) == ["syncvar.a syncvar.b syncvar.c"]


def test_long_sentences_are_found_and_examples_are_not_read(planted):
    long = "word " * 31
    found = planted({"syncvar/a.py": f'"""Short one.\n\n{long}end.\n\n>>> {long}\n"""\n'})
    (line,) = house.long_sentences(found)
    assert line.startswith("syncvar/a.py (32): word ")
    assert house.mean_sentence(found) == 17.0


def test_the_measures_read_this_repository():
    assert Path(house.REPOSITORY / "syncvar" / "__init__.py") in house.sources()
    assert isinstance(next(iter(house.Sources().trees.values())), ast.Module)
