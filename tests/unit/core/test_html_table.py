import copy
import pickle
import re

import cloudpickle
import numpy as np
import pytest

from syncvar.core.html_table import RankResults, array_rows, html_table, is_kernel, preview
from syncvar.protocol.object_codec import pack_object, unpack_object


class Hostile:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        if self.text is None:
            raise ValueError("no text")
        return self.text


TEXT = "<script>alert('x')</script>&\"<img src=x onerror=y>"


def test_everything_is_escaped_and_nothing_is_loaded():
    page = html_table(TEXT, [(TEXT, Hostile(TEXT)), ("a", preview(Hostile(TEXT)))])
    page += html_table(TEXT, [(TEXT, TEXT)], (TEXT, TEXT), code=(1,))
    page += RankResults([TEXT, Hostile(TEXT)])._repr_html_()
    tags = set(re.findall(r"<(\w+)", page))
    assert tags <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert "&lt;script&gt;" in page
    assert not re.search(r"https?:|url\(|<[^>]*\son\w+=", page)


def test_colours_are_those_of_the_page():
    page = html_table("t", [(1, 2)], ("a", "b"))
    colours = re.findall(r"(?:^|[;\"])(?:color|background)\s*:\s*([^;\"]+)", page)
    assert set(colours) == {"inherit", "none"}


def test_long_tables_and_values_are_cut():
    page = html_table("t", [(number, "x") for number in range(100)], ("a", "b"))
    assert page.count("<tr>") == 1 + 64 + 1
    assert "... and 36 more" in page
    assert len(preview("x" * 100_000)) < 400
    assert len(preview(np.zeros(1_000_000))) < 100
    assert preview(Hostile(None)) == "<Hostile: repr raised ValueError>"
    assert array_rows(np.float32(2.5)) == [
        ("shape", "()"),
        ("dtype", "float32"),
        ("value", "np.float32(2.5)" if np.__version__ >= "2" else "2.5"),
    ]


def test_results_are_a_list():
    results = RankResults([1, [2]])
    assert results == [1, [2]]
    assert repr(results) == "[1, [2]]"
    for one in (
        copy.copy(results),
        copy.deepcopy(results),
        pickle.loads(pickle.dumps(results)),
        cloudpickle.loads(cloudpickle.dumps(results)),
        unpack_object(pack_object(results)),
        unpack_object(pack_object({"a": (results,)}))["a"][0],
    ):
        assert type(one) is list
        assert one == [1, [2]]


@pytest.mark.parametrize("shell", [None, object()])
def test_a_shell_without_a_kernel_is_no_notebook(monkeypatch, shell):
    import sys
    import types

    assert not is_kernel()
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert not is_kernel()
