"""Readers of option values: each checks one value and returns it with its type.

The command line and the environment pass text (`is_text`), which a reader parses. A TOML file
passes typed values, and a reader accepts only the right type.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from typing import TYPE_CHECKING, Any, Protocol

from syncvar.core.errors import ConfigError
from syncvar.core.settings import nearest
from syncvar_launcher.options import forwarded_signals
from syncvar_launcher.options.join_options import parse_address
from syncvar_launcher.options.usable_cores import core_count
from syncvar_launcher.options.worker_environment import check_assignment

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT_MODES = ("all", "first", "failed", "none")
COUNT_MAX = 1 << 16
"""Upper limit of ranks, fake hosts and cores: beyond any host, and small enough for lists."""

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class OptionReader(Protocol):
    """A function that reads the value of one kind of option."""

    def __call__(self, value: Any, *, is_text: bool) -> Any:
        """Return the value, or raise ConfigError with a text that begins with "must be"."""
        ...


def read_choice(value: Any, choices: Sequence[str]) -> Any:
    """Return one of several words."""
    if value not in choices:
        raise ConfigError(
            f"must be one of {', '.join(choices)}, not {value!r}{nearest(str(value), choices)}"
        )
    return value


def read_switch(value: Any, *, is_text: bool) -> Any:
    """Return a boolean."""
    word = _WORDS.get(value.lower()) if is_text else value
    if not isinstance(word, bool):
        raise ConfigError(f"must be true or false, not {value!r}")
    return word


def read_stats(value: Any, *, is_text: bool) -> Any:
    """Return a boolean, or the path of a file."""
    word = _WORDS.get(value.lower()) if is_text else value
    if isinstance(word, bool):
        return word
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"must be yes, no or a path, not {value!r}")
    return value


def read_output(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (the protocol has it)
    """Return a mode of `--output`, or ranks as text."""
    if not isinstance(value, str) or not (value in OUTPUT_MODES or value[:1].isdigit()):
        modes = ", ".join(OUTPUT_MODES)
        hint = nearest(str(value), OUTPUT_MODES)
        raise ConfigError(f"must be one of {modes}, or ranks such as 0,3-5, not {value!r}{hint}")
    shown_ranks(value, COUNT_MAX)
    return value


def read_path(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (likewise)
    """Return a path as text."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"must be a path, not {value!r}")
    return value


def read_signals(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (likewise)
    """Return a list of signals as text."""
    if not isinstance(value, str):
        names = forwarded_signals.DEFAULT
        raise ConfigError(f"must be names of signals, such as {names!r}, or 'none', not {value!r}")
    forwarded_signals.parse_signals(value)
    return value


def read_text(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (likewise)
    """Return a text that is not blank."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigError(f"must be a text, not {value!r}")
    return value


def read_address(value: Any, *, is_text: bool) -> Any:
    """Return the text of an address, perhaps with a port."""
    parse_address(read_text(value, is_text=is_text))
    return value


def read_variables(value: Any, *, is_text: bool) -> Any:
    """Return a list of assignments; a text holds several, as in a shell."""
    if is_text:
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"cannot be read as NAME=value words: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f'must be a list such as ["NAME=value", "NAME"], not {value!r}')
    for item in value:
        check_assignment(item)
    return value


def read_seconds(value: Any, *, is_text: bool) -> Any:
    """Return seconds, at least 0."""
    number = _number_of(value, is_text=is_text)
    if not number >= 0:
        raise ConfigError(f"must be seconds of at least 0, not {value!r}")
    return number


def read_limit(value: Any, *, is_text: bool) -> Any:
    """Return seconds, above 0."""
    number = _number_of(value, is_text=is_text)
    if not number > 0:
        raise ConfigError(f"must be seconds above 0, not {value!r}")
    return number


def _number_of(value: Any, *, is_text: bool) -> float:
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    return math.nan


def read_workers(value: Any, *, is_text: bool) -> Any:
    """Return the number of ranks; "auto" is one for each usable core."""
    if value == "auto":
        return core_count()
    return _read_whole(value, is_text=is_text, low=1, high=COUNT_MAX, also="auto or ")


def read_port(value: Any, *, is_text: bool) -> Any:
    """Return a port of TCP."""
    return _read_whole(value, is_text=is_text, low=1, high=65535)


def read_number(value: Any, *, is_text: bool) -> Any:
    """Return a whole number, at least 0."""
    return _read_whole(value, is_text=is_text, low=0)


def read_count(value: Any, *, is_text: bool) -> Any:
    """Return a whole number, at least 1."""
    return _read_whole(value, is_text=is_text, low=1, high=COUNT_MAX)


def _read_whole(
    value: Any, *, is_text: bool, low: int, high: int | None = None, also: str = ""
) -> int:
    is_number = is_text and value.isascii() and value.isdigit() and len(value) < 100
    number = int(value) if is_number else value
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise ConfigError(f"must be {also}a whole number of at least {low}, not {value!r}")
    if high is not None and number > high:
        raise ConfigError(f"must be {also}a whole number of at most {high}, not {value!r}")
    return number


def shown_ranks(which: str, workers: int) -> frozenset[int] | None:
    """Return the ranks whose lines the launcher shows while a job runs, or None for all.

    Args:
        which: A mode of `--output`, or ranks such as "0,3-5". "failed" and "none" show no rank.
        workers: The number of ranks.

    Example:
        >>> sorted(shown_ranks("0,3-5", 8))
        [0, 3, 4, 5]
    """
    if which == "all":
        return None
    if which == "first":
        return frozenset({0})
    return frozenset() if which in OUTPUT_MODES else ranks_of(which, workers)


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
