"""Replaces secrets, home folders, users, hosts and addresses in the texts of `syncvar report`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import re
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SECRET_NAME = "KEY|TOKEN|SECRET|PASS|AUTH|COOKIE|CREDENTIAL|PRIVATE"  # noqa: S105
_NAMED_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_HARMLESS = re.compile(  # values that say nothing, also under the name of a secret
    r"[\d.]*|true|false|yes|no|on|off|none|null|auto|\*+|<.*>", re.IGNORECASE
)
# A name that looks like a secret's, then = or :, then a value, perhaps in quotes.
_ASSIGNMENT = re.compile(
    rf"(?P<name>[\w.-]*(?:{_SECRET_NAME})[\w.-]*)(?P<sign>\\?[\"']?\s*[=:]\s*\\?[\"']?)"
    r"(?P<value>(?:(?:Bearer|Basic|Token)\s+)?[^\s\"'\\,;&<>()\[\]{}]+)",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?P<name>--?[\w-]*(?:{_SECRET_NAME})[\w-]*)(?P<sign>\s+)(?P<value>[^\s-][^\s\"'\\]*)",
    re.IGNORECASE,
)
_PATTERNS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)",  # user and password of an address
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])",
        r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{20,}",
        r"(?<![A-Za-z0-9])github_pat_\w{20,}",
        r"(?<![A-Za-z0-9])(?:hf_|glpat-|npm_|pypi-|sk-|xox[abeoprs]-)[A-Za-z0-9_-]{16,}",
        r"(?<![A-Za-z0-9])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",  # a JSON web token
        r"(?<=Bearer )[\w.~+/-]{8,}=*",
        r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{64,}(?![0-9A-Fa-f])",  # SYNCVAR_KEY has 64 digits
    )
)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9+_=-][A-Za-z0-9+/_=-]{19,}")
_HOMES = re.compile(r"/(?:home|Users)/(?!me\b)[^\s/:\"'\\,;)]+")
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w.]*\w)"
)
_SECRET = "<secret>"  # noqa: S105
_SHORTEST = 6  # a shorter value would replace parts of words
_NAME_SHORTEST = 3
_ORDINARY_USERS = ("root", "user", "nobody")
_KEY_FILES = ("SYNCVAR_KEY_FILE", "SYNCVAR_LAUNCH_KEY_FILE")


class Redactor:
    """Replaces what must not be in a public report, and counts it.

    Args:
        environs: Environments whose secrets are known, for instance of the launcher.
        hosts: Names to replace; None keeps names of hosts and addresses.

    Example:
        >>> redactor = Redactor([{"HOME": "/home/ann", "API_TOKEN": "abcdefgh"}], ["node7"])
        >>> redactor.text("node7: /home/ann/a.py sent abcdefgh")
        'host1: ~/a.py sent <secret API_TOKEN>'
    """

    def __init__(
        self, environs: Iterable[Mapping[str, str]], hosts: Iterable[str] | None = ()
    ) -> None:
        self.counts: Counter[str] = Counter()  # by what was replaced
        environs = [*environs]
        self._values: dict[str, str] = {}  # text -> what replaces it
        for environ in environs:
            self._add_secrets(environ)
        self._homes = _home_folders(environs)
        self._users = re.compile(_any_word(_user_names(environs)) or r"(?!)")
        self._addresses: dict[str, str] = {}
        self._keeps_hosts = hosts is None
        names = dict.fromkeys(name for name in hosts or () if _is_telling(name))
        self._host_titles = {name: f"host{index}" for index, name in enumerate(names, 1)}
        self._hosts = re.compile(_any_word(self._host_titles) or r"(?!)")

    def text(self, text: str) -> str:
        """Return a text without all that."""
        for value, title in self._values.items():
            if value in text:
                self.counts["secrets"] += text.count(value)
                text = text.replace(value, title)
        for pattern in _PATTERNS:
            text, count = pattern.subn(_SECRET, text)
            self.counts["secrets"] += count
        text = _ASSIGNMENT.sub(self._assigned, text)
        text = _OPTION.sub(self._assigned, text)
        for home in self._homes:
            text, count = re.subn(rf"{re.escape(home)}(?![\w.-])", "~", text)
            self.counts["home folders"] += count
        text, count = _HOMES.subn("~", text)
        self.counts["home folders"] += count
        text, count = self._users.subn("<user>", text)
        self.counts["user names"] += count
        if not self._keeps_hosts:
            text = self._hosts.sub(self._host, text)
            text = _ADDRESS.sub(self._address, text)
        return text

    def data(self, value: Any) -> Any:
        """Return plain data in which all texts are replaced, also the keys of maps."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.data(one) for one in value]
        if isinstance(value, dict):
            return {
                self.data(key): self._named(key, one) if isinstance(one, str) else self.data(one)
                for key, one in value.items()
            }
        return value

    def environment(self, environ: Mapping[str, str]) -> str:
        """Return variables as lines."""
        rows = {name: self._named(name, text, is_variable=True) for name, text in environ.items()}
        return "".join(f"{name}={text}\n" for name, text in sorted(rows.items()))

    def summary(self) -> str:
        """Return what was replaced, in words."""
        counts = self.counts | ({"hosts": len(self._host_titles)} if self._host_titles else {})
        found = [f"{title} ({count})" for title, count in sorted(counts.items()) if count]
        return ", ".join(found) or "nothing"

    def _named(self, name: Any, text: str, *, is_variable: bool = False) -> str:
        is_secret = isinstance(name, str) and _NAMED_SECRET.search(name)
        is_random = is_variable and _RANDOM.fullmatch(text)
        if (is_secret or is_random) and not _HARMLESS.fullmatch(text):
            self.counts["secrets"] += 1
            return f"<secret {name}>"
        return self.text(text)

    def _add_secrets(self, environ: Mapping[str, str]) -> None:
        found = dict(environ)
        for name in _KEY_FILES:
            path = environ.get(name) or os.path.join(environ.get("HOME", "/"), ".syncvar-key")
            with (
                contextlib.suppress(OSError),
                open(path, encoding="utf-8", errors="replace") as file,
            ):
                found[f"{name}: KEY"] = file.read(1024).strip()
        for name, value in found.items():
            is_secret = _NAMED_SECRET.search(name) or _RANDOM.fullmatch(value)
            is_path = value.startswith("/")
            is_plain = _HARMLESS.fullmatch(value) or is_path
            if is_secret and not is_plain and len(value) >= _SHORTEST:
                self._values[value] = f"<secret {name.partition(':')[0]}>"

    def _assigned(self, match: re.Match[str]) -> str:
        if _HARMLESS.fullmatch(match["value"]) or match["value"].startswith(("/", "~")):
            return match[0]
        self.counts["secrets"] += 1
        return f"{match['name']}{match['sign']}{_SECRET}"

    def _host(self, match: re.Match[str]) -> str:
        self.counts["names of hosts"] += 1
        return self._host_titles[match[0]]

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        self.counts["addresses"] += 1
        return self._addresses.setdefault(match[0], f"<address {len(self._addresses) + 1}>")


def own_host_names() -> list[str]:
    """Return the names of this machine."""
    name = socket.gethostname()
    return [name, name.partition(".")[0]]


def _is_telling(name: str) -> bool:
    """Return whether a name can identify a host, and is no part of ordinary words."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return False  # an address is replaced as one
    return len(name) >= _NAME_SHORTEST and not name.startswith("localhost")


def _any_word(names: Iterable[str]) -> str:
    words = sorted((re.escape(name) for name in names), key=len, reverse=True)
    return rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])" if words else ""


def _home_folders(environs: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the home folders of this user, longest first."""
    found = {environ.get("HOME", "") for environ in environs}
    with contextlib.suppress(KeyError):
        found.add(pwd.getpwuid(os.getuid()).pw_dir)
    found |= {os.path.realpath(home) for home in found if home}
    found = {home.rstrip("/") for home in found if home.count("/") >= 1}
    return sorted((home for home in found if len(home) > 1), key=len, reverse=True)


def _user_names(environs: Iterable[Mapping[str, str]]) -> list[str]:
    found = {environ.get(name, "") for environ in environs for name in ("USER", "LOGNAME")}
    with contextlib.suppress(KeyError):
        found.add(pwd.getpwuid(os.getuid()).pw_name)
    return [name for name in found if len(name) >= _NAME_SHORTEST and name not in _ORDINARY_USERS]
