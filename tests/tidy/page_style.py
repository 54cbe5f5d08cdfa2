"""Measure the prose of pages: `python tests/tidy/page_style.py [--list] FILE...`.

Prints the mean length of a page's sentences, in words, and how many are too long. `--list` also
prints the long sentences and the banned phrases. Code, tables and headings are not prose.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

LONGEST, MEAN = 30, 18
BANNED = re.compile(
    r"\b(?:is told|are told|was told|were told|be told|tells? of|told of|is said there|"
    r"and their like|where it lies|where they lie|goes before|in turns|but for|as ever|of these|"
    r"is given up|what contradicts|for ever)\b",
    re.IGNORECASE,
)
_HIDDEN = re.compile(
    r"^(`{3,}|:{3,}).*?^\1[`:]*$|<!--.*?-->|^\|.*?$|^#.*?$|^\(.*?\)=$", re.MULTILINE | re.DOTALL
)
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+", re.MULTILINE)


class Style(NamedTuple):
    """The figures of a page."""

    mean: float  # words a sentence
    long: list[str]  # sentences over the limit
    banned: list[str]  # lines with banned phrases


def prose(text):
    """Return the prose of a page, without code, tables, headings and the addresses of links."""
    text = _HIDDEN.sub("", text)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", text, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text):
    """Return the sentences of a page, without the marks of Markdown."""
    parts = re.split(r"\n\s*\n", _ITEM.sub("\n\n", prose(text)))
    found = []
    for part in parts:
        line = re.sub(r"[*_]{2}|^>\s*", "", " ".join(part.split()))
        found += [one for one in re.split(r"(?<=[.!?])\s+", line) if length(one) > 1]
    return found


def length(sentence):
    """Return the number of words of a sentence."""
    return len(re.findall(r"[A-Za-z0-9][\w'’./-]*", sentence))


def style(text):
    """Return the figures of a page."""
    found = sentences(text)
    mean = sum(map(length, found)) / max(1, len(found))
    visible = re.sub(r"^(`{3,}).*?^\1$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    banned = [line.strip() for line in visible.splitlines() if BANNED.search(line)]
    return Style(mean, [one for one in found if length(one) > LONGEST], banned)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    for file in arguments.files:
        figures = style(Path(file).read_text())
        sys.stdout.write(
            f"{figures.mean:5.1f} words, {len(figures.long):3} long, "
            f"{len(figures.banned):3} banned  {file}\n"
        )
        if arguments.list:
            for line in (*figures.long, *figures.banned):
                sys.stdout.write(f"      {line}\n")
