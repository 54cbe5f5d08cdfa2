"""One line of `syncvar doctor`, and the text of all lines."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 100
_HERE = "this machine"


class DoctorCheck(NamedTuple):
    """What the doctor found out about one thing.

    Example:
        >>> print(DoctorCheck("open files", True, "1024 allowed", "each link needs some").text())
        [ok] open files: 1024 allowed
    """

    name: str  # what it is about, in the user's words
    is_ok: bool
    value: str  # what was found
    reason: str  # why it matters
    remedy: str = ""  # what to do; empty if nothing is wrong
    host: str = ""  # the host, or a pair of hosts; empty for this machine
    # For programs: nanoseconds and bytes per millisecond of a link.
    numbers: tuple[int, ...] = ()

    @classmethod
    def of_value(cls, name: str, value: str, reason: str, remedy: str) -> DoctorCheck:
        """Return a check that failed if there is a remedy."""
        return cls(name, not remedy, value, reason, remedy)

    def text(self, hosts: Sequence[str] = (), *, verbose: bool = False) -> str:
        """Return the line of some hosts, and for a failure why it matters and what to do."""
        where = f" ({', '.join(one or _HERE for one in hosts)})" if any(hosts) else ""
        lines = [f"[{'ok' if self.is_ok else 'no'}] {self.name}{where}: {self.value}"]
        if verbose or not self.is_ok:
            lines += _indented("why: ", self.reason)
        if self.remedy:
            lines += _indented("do:  ", self.remedy)
        return "\n".join(lines)


def _indented(title: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"     {title}",
        subsequent_indent=" " * (5 + len(title)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def report_text(checks: Sequence[DoctorCheck], *, verbose: bool = False) -> str:
    """Return a line for each check, equal ones of several hosts once, and the number of failures.

    Example:
        >>> same = [DoctorCheck("cores", True, "2 of 2", "", host=host) for host in "ab"]
        >>> print(report_text(same), end="")
        [ok] cores (a, b): 2 of 2
        all 2 checks are ok
    """
    hosts: dict[DoctorCheck, list[str]] = {}
    for check in checks:
        hosts.setdefault(check._replace(host=""), []).append(check.host)
    order = {name: index for index, name in enumerate(dict.fromkeys(one.name for one in hosts))}
    lines = [
        check.text(some, verbose=verbose)
        for check, some in sorted(hosts.items(), key=lambda one: order[one[0].name])
    ]
    failed = [check for check in checks if not check.is_ok]
    if failed:
        names = (f"{one.name} ({one.host})" if one.host else one.name for one in failed)
        lines.append(f"{len(failed)} of {len(checks)} checks failed: {', '.join(names)}")
    else:
        lines.append(f"all {len(checks)} checks are ok")
    return "\n".join(lines) + "\n"
