"""Ranks in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError
from syncvar.core.process_ids import SERVER_0, is_server

if TYPE_CHECKING:
    from collections.abc import Iterable


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as people write them.

    Example:
        >>> rank_list([0, 1, 2, 5])
        'ranks 0-2, 5'
        >>> rank_list([3])
        'rank 3'
    """
    distinct = set(ranks)
    return ("rank " if len(distinct) == 1 else "ranks ") + rank_spans(distinct)


def process_list(numbers: Iterable[int]) -> str:
    """Return processes as people write them: ranks, then servers.

    Example:
        >>> process_list([SERVER_0 + 1, 3, 0, 1, SERVER_0])
        'ranks 0, 1, 3 and servers 0, 1'
    """
    distinct = set(numbers)
    servers = {number for number in distinct if is_server(number)}
    words = [rank_list(distinct - servers)] if distinct - servers else []
    if servers:
        words.append(
            f"server{'s' * (len(servers) > 1)} {rank_spans(number - SERVER_0 for number in servers)}"
        )
    return " and ".join(words)


def rank_spans(ranks: Iterable[int]) -> str:
    """Return ranks in a short way: three or more in a row become a span.

    Example:
        >>> rank_spans([3, 0, 1, 2, 7])
        '0-3, 7'
        >>> rank_spans([0, 1, 3])
        '0, 1, 3'
    """
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
    """Return the ranks that a text names, as `rank_spans` writes them.

    Args:
        text: Ranks and spans of ranks, separated by commas.
        most: No rank may be as high as this.

    Raises:
        ConfigError: The text names no ranks.

    Example:
        >>> sorted(ranks_of("0-2,7", 8))
        [0, 1, 2, 7]
    """
    ranks: set[int] = set()
    for span in text.split(","):
        ends = [end.strip() for end in span.split("-")]
        if len(ends) > 2 or not all(
            end.isascii() and end.isdigit() and len(end) < 100 for end in ends
        ):
            raise ConfigError(
                f"{span.strip()!r} is no rank, such as 3, and no span of ranks, such as 0-3"
            )
        first, last = int(ends[0]), int(ends[-1])
        if first > last:
            raise ConfigError(f"the span {span.strip()} begins above its end")
        if last >= most:
            raise ConfigError(
                f"there is no rank {last} among {most} ({'the only rank is 0' if most == 1 else f'ranks are 0 to {most - 1}'})"
            )
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
