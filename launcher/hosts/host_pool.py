"""Which hosts an elastic job may use next; pure.

A discovery script names the hosts that there are now. A host that fails is excluded for a time that
grows with each failure, and is used again afterwards if it is still there.

`now` is seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncvar_launcher.options.hostfile import Host

_FACTOR = 2.0
_LONGEST_S = 600.0
_FORGET_AFTER = 10  # times the last exclusion: a host that works so long begins anew


class Exclusion(NamedTuple):
    """A host that has failed."""

    until: float  # when it may be used again, in seconds of the clock
    pause_s: float  # how long it is excluded


class HostPool:
    """The hosts that exist, and those that are excluded.

    Args:
        pause_s: How long a host is excluded after its first failure; each further one doubles it,
            up to ten minutes. After ten times the last exclusion without a failure, the next one
            counts as the first.

    Example:
        >>> from syncvar_launcher.options.hostfile import Host
        >>> pool = HostPool(10.0)
        >>> pool.update([Host("a", 2), Host("b", 2)])
        >>> pool.fail("a", now=0.0)
        10.0
        >>> [host.name for host in pool.available(now=5.0, used=())]
        ['b']
        >>> [host.name for host in pool.available(now=10.0, used=("b",))]
        ['a']
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._hosts: tuple[Host, ...] = ()
        self._excluded: dict[str, Exclusion] = {}

    def update(self, hosts: Sequence[Host]) -> None:
        """Note the hosts that there are now."""
        self._hosts = tuple(hosts)

    def fail(self, name: str, now: float) -> float:
        """Exclude a host that has failed; return for how many seconds."""
        before, pause_s = self._excluded.get(name), self._pause_s
        if before is not None and now < before.until + _FORGET_AFTER * before.pause_s:
            pause_s = min(_LONGEST_S, _FACTOR * before.pause_s)
        self._excluded[name] = Exclusion(now + pause_s, pause_s)
        return pause_s

    def available(self, now: float, used: Collection[str]) -> list[Host]:
        """Return the hosts that may be used now, beside those that are used already."""
        return [
            host
            for host in self._hosts
            if host.name not in used and not self._is_excluded(host.name, now)
        ]

    def removed(self, used: Iterable[str]) -> list[str]:
        """Return the used hosts that are no longer there."""
        names = {host.name for host in self._hosts}
        return [name for name in used if name not in names]

    def _is_excluded(self, name: str, now: float) -> bool:
        found = self._excluded.get(name)
        return found is not None and now < found.until
