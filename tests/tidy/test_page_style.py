"""Each page is plain English: short sentences, no banned phrase, own words linked to the glossary."""

import glossary_links
import page_style
import pytest

from tests.support.paths import REPOSITORY

PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "bench/README.md"]
)
NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_plain_english(name):
    figures = page_style.style((REPOSITORY / name).read_text())
    assert figures.mean <= page_style.MEAN
    assert not figures.long
    assert not figures.banned


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/")])
def test_own_words_are_linked_at_first_use(name):
    page = REPOSITORY / name
    if page != glossary_links.GLOSSARY:
        assert not glossary_links.missing(page), (
            f"run `python tests/tidy/glossary_links.py {name}`, and read the difference"
        )


def test_the_entries_of_own_words_exist():
    text = glossary_links.GLOSSARY.read_text()
    words = glossary_links.own_words()
    assert words
    assert not [word for word in words if f"\n### {word}\n" not in text]


def test_the_measures_of_a_page():
    text = (
        "# A heading\n\nOne two three. "
        + "word " * 31
        + "end.\n\n| a | table |\n\n`code of it` is told.\n"
    )
    figures = page_style.style(text)
    assert [len(one.split()) for one in figures.long] == [32]
    assert figures.banned == ["is told."]
    assert not page_style.style("```console\n$ is told\n```\n").banned
