"""Link syncvar's own words to the glossary: `python tests/tidy/glossary_links.py FILE...`.

The first use of an own word in the prose of a page becomes a link. The glossary lists its own words
in a comment, `<!-- own words: agent, attempt -->`. Code, tables, headings and links stay as they
are.
"""

import os
import re
import sys
from pathlib import Path

GLOSSARY = Path(__file__).parents[2] / "docs/reference/glossary.md"
_OWN = re.compile(r"<!-- own words: (.*?) -->", re.DOTALL)
# Parts of a page that are no prose: blocks, comments, tables, headings, inline code, links.
_SKIPPED = re.compile(
    r"^(?P<fence>`{3,}|:{3,}).*?^(?P=fence)[`:]*$|<!--.*?-->|^\|.*?$|^#.*?$|^\(.*?\)=$"
    r"|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|!?\[[^\]]*\]\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)


def own_words():
    """Return the own words of the glossary, longest first."""
    found = _OWN.search(GLOSSARY.read_text())
    words = [] if found is None else [" ".join(one.split()) for one in found[1].split(",")]
    return sorted(words, key=len, reverse=True)


def address(word, page):
    """Return the address of a word's entry, seen from a page."""
    return f"{os.path.relpath(GLOSSARY, page.parent)}#{word.lower().replace(' ', '-')}"


def pattern(word):
    """Return a pattern for a word and its plural."""
    body = r"\s+".join(map(re.escape, word.split()))
    return re.compile(rf"(?<![\w/-]){body}(?:e?s)?(?![\w/-])", re.IGNORECASE)


def _prose(text):
    """Yield (begin, end) for each piece of prose."""
    at = 0
    for found in _SKIPPED.finditer(text):
        yield at, found.start()
        at = found.end()
    yield at, len(text)


def first_use(word, text):
    """Return the match of a word's first use in the prose of a page, or None."""
    for begin, end in _prose(text):
        found = pattern(word).search(text, begin, end)
        if found:
            return found
    return None


def missing(page):
    """Return the own words that a page uses before it links them, or without a link."""
    text = page.read_text()
    found = []
    for word in own_words():
        use = first_use(word, text)
        link = text.find(f"]({address(word, page)})")
        if use and not -1 < link < use.start():
            found.append(word)
    return found


def add_links(page):
    """Link the first use of each own word."""
    for word in own_words():
        if word in missing(page):
            text = page.read_text()
            use = first_use(word, text)
            link = f"[{use[0]}]({address(word, page)})"
            page.write_text(text[: use.start()] + link + text[use.end() :])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        add_links(Path(name).resolve())
