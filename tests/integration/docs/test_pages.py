"""The commands of each page run as they stand, and print what the page shows."""

import pytest

from tests.support.page_runner import NEEDS, difference, read_page, run_page
from tests.support.paths import REPOSITORY

PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md")])
RUN = {str(path.relative_to(REPOSITORY)): read_page(path.read_text()) for path in PAGES}
TENSORS = {"torch", "jax"}


def cases():
    """Return the pages with commands, and what these may need, with the mark that this asks for."""
    for name, page in RUN.items():
        if any(not one.needs for one in page.commands):
            yield pytest.param(page, (), id=name, marks=pytest.mark.slow)
        if page.needs & TENSORS:
            yield pytest.param(page, TENSORS, id=f"{name}-tensors", marks=pytest.mark.tensors)
        if "gloo" in page.needs:  # about one run in ten ends by "terminate called", without syncvar
            met = {*TENSORS, "gloo"}
            marks = (pytest.mark.slow, pytest.mark.peers)
            yield pytest.param(page, met, id=f"{name}-gloo", marks=marks)


@pytest.mark.parametrize(("page", "met"), list(cases()))
def test_the_commands_of_a_page_print_what_it_shows(page, met, tmp_path):
    found = run_page(page, tmp_path, met)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("name", list(RUN))
def test_the_needs_of_a_page_are_known(name):
    assert RUN[name].needs <= NEEDS.keys()


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        (["a", "b"], ["b", "a"], True),
        (["a"], ["a", "b"], False),
        (["a", "..."], ["a", "b"], True),
        (["a", "b"], ["a"], False),
        (["rank 1 after 3.2 s, pid 17"], ["rank 1 after 41 s, pid 9"], True),
        (["rank 1 after 3.2 s"], ["rank 2 after 3.2 s"], False),
        (["loss=0.25"], ["loss=0.26"], False),
        (["loss=... n=3"], ["loss=0.26 n=3"], True),
        ([], ["anything"], True),
        (
            ["  ranks 0-2: in syncvar, called at a.py:5; then PeerLost"],
            [
                "  ranks 0, 1: in user code, a.py:6; then PeerLost",
                "  rank 2: waiting in barrier; then PeerLost",
            ],
            True,
        ),
        (
            ["  ranks 0-2: in user code, a.py:5; then PeerLost"],
            ["  ranks 0, 1: in user code, a.py:5; then PeerLost"],
            False,
        ),
    ],
)
def test_outputs_are_compared_by_what_does_not_vary(shown, printed, is_same):
    assert (difference(shown, printed) == "") is is_same


def test_a_page_is_read_in_order():
    text = (
        "```python file=a.py\nprint(1)\n```\n\n<!-- run: true -->\n```console fails\n"
        "$ python \\\n  a.py\n1\n$ false\n```\n"
    )
    page = read_page(text)
    assert [one.line for one in page.commands][-2:] == ["python \\\n  a.py", "false"]
    assert [one.may_fail for one in page.commands] == [False, False, False, True]
    assert list(page.files.values()) == [("a.py", "print(1)\n")]


def test_a_page_runs_and_a_wrong_line_is_found(tmp_path):
    text = "```python file=a.py\nprint(1)\n```\n\n```console\n$ python a.py\n{}\n```\n"
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    assert run_page(read_page(text.format(1)), tmp_path / "right") == []
    (found,) = run_page(read_page(text.format(2)), tmp_path / "wrong")
    assert "it did not print: 2" in found
