"""Reads the hosts of a job, with their slots, from the text of a host file or of `-H`.

One tolerant reader accepts the spellings of other launchers:

    node1 slots=4 max_slots=8        # Open MPI, DeepSpeed
    node2:4                          # MPICH
    ann@node3:2 port=2222            // the user and port for ssh
    [fd00::7] slots=2                /* an IPv6 address stands in brackets */
    gpu[01-04,07] slots=2            five hosts with one line
    ^gpu03                           removes a host

Comments begin with `#`, `//` or `/*`; blank lines, Windows' line ends and a byte order mark do not
matter. Without a count, a host in a file has as many slots as usable cores, and a host in `-H` has
one. If a host appears again, the reader adds its counts, one for each line without a count, and
reports that. Other text is an error that shows file, line and column, and what to write: the reader
never leaves out a host silently.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from syncvar.core.errors import ConfigError
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TOKEN = re.compile(r'(?:"[^"]*"|[^\s"])+')
_COUNTS = ("slots", "count", "cpu")
_LIMITS = tuple(
    limit for joint in "_-" for one in _COUNTS for limit in (f"{one}{joint}max", f"max{joint}{one}")
)
_USERS = ("user", "username", "user_name", "user-name")
_TEXTS = ("addr", "python", "cwd")
_OPTIONS = (*_COUNTS, *_LIMITS, *_USERS, "port", *_TEXTS)
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_USER = re.compile(r"[a-z_][a-z0-9_-]*")
_SCOPE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,14})")
_RANGES = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NAME_MAX = 253
_RANGES_MAX = 8
_MOST = 1 << 16
"""The most hosts and slots: no mistake of a range may fill the memory."""


class HostfileError(ConfigError):
    """A host file, or `-H`, with an error; line and column count from 1, an option has line 0."""

    def __init__(self, source: str, line: int, column: int, text: str, reason: str) -> None:
        self.source = source
        self.line = line
        self.column = column
        self.text = text
        self.reason = reason
        where = f"{source}:{line}:{column}" if line else source
        shown = "".join(one if one.isprintable() else " " for one in text)
        super().__init__(f"{where}: {reason}\n  {shown}\n  {' ' * (column - 1)}^")


class Host(NamedTuple):
    """One host as the user named it."""

    name: str  # name or address for ssh, without brackets
    slots: int | None = None  # Number of workers that it takes; None for one per usable core.
    max_slots: int | None = None  # Limit when all slots of all hosts are taken; None for `slots`.
    user: str | None = None  # User for ssh; None for ssh's own choice.
    port: int | None = None  # Port of ssh; None for ssh's own choice.
    addr: str | None = None  # Address for the job's links; None to find one.
    python: str | None = None  # Interpreter; None for the launcher's own path.
    cwd: str | None = None  # Folder in which its workers start; None for the launcher's own.
    origin: str = ""  # source for messages: "hosts:3" or "-H"

    def login(self) -> str:
        """Return the host with its user, for the command line of ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name


class Hosts(NamedTuple):
    """The result of reading."""

    hosts: tuple[Host, ...]  # each host once, in the order of first appearance
    notices: tuple[str, ...]  # sentences for the user about merged entries


class _TextPosition(NamedTuple):
    """The position of a piece of text."""

    source: str
    line: int
    column: int
    text: str

    def moved(self, columns: int) -> _TextPosition:
        return self._replace(column=self.column + columns)

    def fail(self, reason: str) -> NoReturn:
        raise HostfileError(self.source, self.line, self.column, self.text, reason)

    def origin(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


def parse_hostfile(content: bytes, source: str) -> Hosts:
    r"""Return the hosts of a host file with the given bytes; `source` is its name for messages.

    Example:
        >>> parse_hostfile(b"a slots=2\nb:3", "hosts").hosts[1].slots
        3
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        reason = f"byte {error.start} is not UTF-8 text: is this a host file?"
        raise HostfileError(source, number, 1, "", reason) from None
    named: list[tuple[Host, _TextPosition]] = []
    removed: list[tuple[str, _TextPosition]] = []
    for line_number, (line, shown) in enumerate(_without_comments(text), 1):
        tokens = [
            (found[0], _TextPosition(source, line_number, found.start() + 1, shown))
            for found in _TOKEN.finditer(line)
        ]
        if tokens:
            _parse_line(tokens, named, removed)
    return _merge_entries(named, removed, source)


def parse_hosts(value: str, option: str = "-H") -> Hosts:
    """Return the hosts of a list with commas, such as "a:2,b:2" or "ann@n[1-3]:4".

    Example:
        >>> [(one.name, one.slots) for one in parse_hosts("n[1-2]:4").hosts]
        [('n1', 4), ('n2', 4)]
    """
    named: list[tuple[Host, _TextPosition]] = []
    removed: list[tuple[str, _TextPosition]] = []
    for word, column in _between_commas(value):
        place = _TextPosition(option, 0, column + 1, value)
        if not word.strip():
            place.fail("a host is missing between the commas; write for instance a:2,b:2")
        if word != word.strip() or _TOKEN.fullmatch(word) is None:
            place.fail("hosts are separated by commas alone; write for instance a:2,b:2")
        _parse_line([(word, place)], named, removed)
    return _merge_entries(named, removed, option)


def select_named(
    hosts: Sequence[Host], include: str | None, exclude: str | None
) -> tuple[Host, ...]:
    """Return the hosts that `--include` names and `--exclude` does not, in their order.

    Both take names with commas and bracket ranges; None selects all, or excludes none.

    Example:
        >>> [one.name for one in select_named(parse_hosts("n[1-4]").hosts, None, "n[2-3]")]
        ['n1', 'n4']
    """
    known = {one.name for one in hosts}
    names = known if include is None else _parse_known_names(include, "--include", known)
    names = names - (set() if exclude is None else _parse_known_names(exclude, "--exclude", known))
    left = tuple(one for one in hosts if one.name in names)
    if not left:
        raise ConfigError(
            f"--include and --exclude leave no host of {', '.join(one.name for one in hosts)}"
        )
    return left


def expand_ranges(name: str) -> Iterator[str]:
    """Yield the names that a name with bracket ranges stands for, with leading zeros.

    Example:
        >>> list(expand_ranges("n[08-10]"))
        ['n08', 'n09', 'n10']
    """
    found = _RANGES.search(name)
    if name.count("[") > _RANGES_MAX:
        raise ValueError(f"a name has at most {_RANGES_MAX} ranges")
    if found is None:
        if "[" in name or "]" in name:
            raise ValueError("a bracket is open or closed alone; a range is written n[01-04]")
        yield name
        return
    for number in _expand_numbers(found[1]):
        for rest in expand_ranges(name[found.end() :]):
            yield name[: found.start()] + number + rest


# -- reading ---------------------------------------------------------------------------------------


def _without_comments(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line with blanks for its comments, so that columns stay, and the original line."""
    inside = False
    for raw in text.split("\n"):
        shown = raw.rstrip("\r")
        text_parts: list[str] = []
        position = 0
        quoted = False
        while position < len(shown):
            two = shown[position : position + 2]
            begins = not text_parts or text_parts[-1].isspace()
            if inside:
                inside = two != "*/"
                step = 1 if inside else 2
                text_parts.append(" " * step)
            elif not quoted and (shown[position] == "#" or (two == "//" and begins)):
                break
            elif not quoted and two == "/*" and begins:
                inside, step = True, 2
                text_parts.append("  ")
            else:
                quoted ^= shown[position] == '"'
                step = 1
                text_parts.append(shown[position])
            position += step
        yield "".join(text_parts), shown


def _between_commas(value: str) -> Iterator[tuple[str, int]]:
    """Yield the words between commas outside of brackets, with their positions."""
    start, depth = 0, 0
    for index, letter in enumerate(value):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            yield value[start:index], start
            start = index + 1
    yield value[start:], start


def _parse_line(
    tokens: list[tuple[str, _TextPosition]],
    named: list[tuple[Host, _TextPosition]],
    removed: list[tuple[str, _TextPosition]],
) -> None:
    first, place = tokens[0]
    if first.startswith("^"):
        for word, where in tokens[1:]:
            where.fail(f"{word!r} follows a host that is removed; write ^host alone on its line")
        removed += [(name, place) for name in _parse_names(first[1:], place.moved(1))]
        return
    if first.startswith("+"):
        place.fail(
            "a relative host (+n1, +e) counts within an allocation of a scheduler; write its name"
        )
    if first == "rank" and len(tokens) > 1 and "=" in tokens[1][0]:
        place.fail(
            "this is a rank file; write a line for each host, with slots=N, in the order of the "
            "ranks"
        )
    if "=" in first and not first.startswith("["):
        place.fail(
            f"a line begins with a host, and {first!r} is none; write for instance node1 slots=4"
        )
    names, user, count = _parse_host(first, place)
    fields: dict[str, str | int | None] = {"user": user, "slots": count}
    for word, where in tokens[1:]:
        key, value = _parse_option(word, where)
        if fields.get(key) is not None:
            where.fail(f"{key} of this host is given twice; leave one out")
        fields[key] = value
    slots, most = fields.get("slots"), fields.get("max_slots")
    if isinstance(slots, int) and isinstance(most, int) and most < slots:
        place.fail(f"slots={slots} is above max_slots={most}; make it at most {most}")
    named += [(Host(name, origin=place.origin(), **fields), place) for name in names]  # type: ignore[arg-type]
    if len(named) > _MOST:
        place.fail(f"these are more than {_MOST} hosts")


def _parse_host(word: str, place: _TextPosition) -> tuple[list[str], str | None, int | None]:
    """Return the names, the user and the count of `[user@]name[:count]`."""
    user, at, rest = word.rpartition("@")
    if at:
        if not _USER.fullmatch(user):
            place.fail(
                f"{user!r} is no name of a user; write user@host, with small letters, digits, - "
                "and _"
            )
        place = place.moved(len(user) + 1)
    if rest.startswith("[") and ":" in rest.partition("]")[0]:
        literal, closed, tail = rest[1:].partition("]")
        if not closed:
            place.fail(
                "the bracket of an IPv6 address is not closed; write for instance [fd00::7]:4"
            )
        names = [_parse_ipv6(literal, place)]
        offset = len(literal) + 2
    else:
        if rest.count(":") > 1:
            place.fail(f"an IPv6 address stands in brackets: [{rest}] slots=N")
        name, colon, tail = rest.partition(":")
        names, offset, tail = _parse_names(name, place), len(name), colon + tail
    if tail and not tail.startswith(":"):
        place.moved(offset).fail(f"{tail!r} follows the address; write :N or slots=N behind it")
    count = None
    if tail:
        count = _parse_number(tail[1:], "the number of slots", place.moved(offset + 1), 1, _MOST)
    return names, user or None, count


def _parse_names(name: str, place: _TextPosition) -> list[str]:
    """Return the names that one with ranges stands for, checked."""
    try:
        found = [one for _, one in zip(range(_MOST + 1), expand_ranges(name), strict=False)]
    except ValueError as error:
        place.moved(max(name.find("["), 0)).fail(str(error))
    if len(found) > _MOST:
        place.fail(f"this range stands for more than {_MOST} hosts")
    # "node1.example.org." is that name in full.
    found = [one.removesuffix(".") if len(one) > 1 else one for one in found]
    for one in found:
        if not _NAME.fullmatch(one) or len(one) > _NAME_MAX:
            ends = one[:1] if re.match(r"[._-]", one) else one[-1:]
            foreign = re.sub(r"[A-Za-z0-9._-]", "", one)[:1] or ends
            place.fail(
                f"{one!r} with {foreign!r} (U+{ord(foreign or ' '):04X}) is not allowed here: a "
                "host's name has letters, digits, ., - and _, and begins and ends with a letter "
                "or digit"
            )
    return found


def _parse_ipv6(literal: str, place: _TextPosition) -> str:
    scope = literal.partition("%")[2]
    # `ipaddress` takes any text there, and ssh puts it into a user's ProxyCommand.
    if scope and not _SCOPE.fullmatch(scope):
        place.moved(literal.index("%") + 2).fail(
            f"{scope!r} is no name of an interface, which has letters, digits, ., - and _"
        )
    try:
        return str(ipaddress.IPv6Address(literal))
    except ValueError:
        place.moved(1).fail(f"{literal!r} is no IPv6 address")


def _parse_option(word: str, place: _TextPosition) -> tuple[str, str | int]:
    key, equals, value = word.partition("=")
    if not equals:
        hint = f"; write slots={word}" if word.isdigit() else ", which has the form key=value"
        place.fail(f"{word!r} is no option of a host{hint}")
    if key not in _OPTIONS:
        there = "; there are slots, max_slots, user, port, addr, python, cwd"
        place.fail(f"{key!r} is no option of a host{nearest(key, _OPTIONS) or there}")
    at = place.moved(len(key) + 1)
    value = value.replace('"', "")
    if key in _COUNTS:
        return "slots", _parse_number(value, "the number of slots", at, 1, _MOST)
    if key in _LIMITS:
        return "max_slots", _parse_number(value, "the most slots", at, 1, _MOST)
    if key == "port":
        return key, _parse_number(value, "the port", at, 1, 65535)
    if key in _USERS:
        if not _USER.fullmatch(value):
            at.fail(f"{value!r} is no name of a user; it has small letters, digits, - and _")
        return "user", value
    if not value or value.startswith("-") or not value.isprintable():
        at.fail(
            f"{key} needs a value that does not begin with -; a value with blanks stands in "
            "double quotes"
        )
    return key, _parse_link_address(value, at) if key == "addr" else value


def _parse_link_address(value: str, place: _TextPosition) -> str:
    literal = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    try:
        address = None if "%" in literal else ipaddress.ip_address(literal)
    except ValueError:
        address = None
    if address is None:
        place.fail(
            f"{value!r} is no address for links between hosts; name one of this host's, such as "
            "addr=10.0.0.7 or addr=fd00::7"
        )
    return str(address)


def _parse_number(text: str, name: str, place: _TextPosition, low: int, high: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
        place.fail(f"{name} is a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _expand_numbers(inside: str) -> Iterator[str]:
    """Yield the numbers of "01-04,07", with their leading zeros."""
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(
                f"[{inside}] is no list of numbers and ranges; write for instance n[01-04,07]"
            )
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"the range {part} runs backwards; write {last}-{first}")
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}d}"


# -- putting together ------------------------------------------------------------------------------


def _merge_entries(
    named: list[tuple[Host, _TextPosition]], removed: list[tuple[str, _TextPosition]], source: str
) -> Hosts:
    """Return each host once, with added counts and without removed ones."""
    hosts: dict[str, Host] = {}
    notices = []
    for host, place in named:
        before = hosts.get(host.name)
        if before is None:
            hosts[host.name] = host
            continue
        for key in ("user", "port", "addr", "python", "cwd"):
            old, new = getattr(before, key), getattr(host, key)
            if old is not None and new is not None and old != new:
                place.fail(
                    f"{host.name} is named with {key}={old} in {before.origin} and with "
                    f"{key}={new} here; leave one out"
                )
        both = {key: (getattr(before, key), getattr(host, key)) for key in Host._fields}
        merged = {key: new if old is None else old for key, (old, new) in both.items()}
        # In node files of schedulers each line is a slot.
        merged["slots"] = (before.slots or 1) + (host.slots or 1)
        if before.max_slots is not None and host.max_slots is not None:
            merged["max_slots"] = before.max_slots + host.max_slots
        hosts[host.name] = Host(**merged)
        notices.append(
            f"{host.name} is named again in {host.origin}: it has {merged['slots']} slots in all"
        )
    for name, place in removed:
        if name not in hosts:
            place.fail(f"{name} is removed and is not among the hosts{nearest(name, hosts)}")
    names = {name for name, _ in removed}
    left = tuple(one for one in hosts.values() if one.name not in names)
    if not left:
        raise HostfileError(
            source, 0, 1, "", "there is no host here; write a line for each, such as node1 slots=4"
        )
    return Hosts(left, tuple(notices))


def _parse_known_names(value: str, option: str, known: Iterable[str]) -> set[str]:
    known = set(known)
    names: set[str] = set()
    for word, column in _between_commas(value):
        names.update(_parse_names(word, _TextPosition(option, 0, column + 1, value)))
    for name in sorted(names - known):
        hint = nearest(name, known) or f"; these are {', '.join(sorted(known))}"
        raise ConfigError(f"{option} names {name}, which is not among the hosts{hint}")
    return names
