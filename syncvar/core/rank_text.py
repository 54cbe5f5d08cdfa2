"""Text for lists of ranks and processes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError
from syncvar.core.process_ids import SERVER_0, is_server

if TYPE_CHECKING:
    from collections.abc import Iterable


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0-2, 5"."""
    distinct = set(ranks)
    return ("rank " if len(distinct) == 1 else "ranks ") + rank_spans(distinct)


def process_list(numbers: Iterable[int]) -> str:
    """Return processes as text, such as "ranks 0, 1, 3 and servers 0, 1"."""
    distinct = set(numbers)
    servers = {number for number in distinct if is_server(number)}
    texts = [rank_list(distinct - servers)] if distinct - servers else []
    if servers:
        spans = rank_spans(number - SERVER_0 for number in servers)
        texts.append(f"server{'s' * (len(servers) > 1)} {spans}")
    return " and ".join(texts)


def rank_spans(ranks: Iterable[int]) -> str:
    """Return ranks as text such as "0-3, 7"; three or more in a row become a span."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(
        str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans
    )


def ranks_of(text: str, most: int) -> frozenset[int]:
    """Return the ranks below `most` that a text such as "0-2,7" names, or raise ConfigError."""
    ranks: set[int] = set()
    for span in text.split(","):
        ends = [end.strip() for end in span.split("-")]
        is_valid = all(end.isascii() and end.isdigit() and len(end) < 100 for end in ends)
        if len(ends) > 2 or not is_valid:
            raise ConfigError(
                f"{span.strip()!r} is no rank, such as 3, and no span of ranks, such as 0-3"
            )
        first, last = int(ends[0]), int(ends[-1])
        if first > last:
            raise ConfigError(f"the span {span.strip()} ends before it begins")
        if last >= most:
            ranks_text = "the only rank is 0" if most == 1 else f"ranks are 0 to {most - 1}"
            raise ConfigError(f"there is no rank {last} among {most} ({ranks_text})")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
