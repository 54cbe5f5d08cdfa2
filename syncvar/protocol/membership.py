"""Membership of a job: the handshake of its ranks and the failure detector; pure state machines.

Each worker joins with its address and `about`, a map of short texts and numbers. When all have
joined, the coordinator compares them and sends everyone all addresses. If ranks differ in package,
protocol, byte order or certain settings, the job cannot start. If they differ in Python, NumPy or
script, the launcher warns once: usually one host was not updated.

`now` is seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import WireError
from syncvar.core.process_ids import RANKS, ProcessNames, process_name, rank_list
from syncvar.protocol.frame import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

# -- installations of the ranks --------------------------------------------------------------------

SETTING = "set."
"""Prefix of settings in `about` that must be equal on all ranks."""

SCRIPT = "script"
"""Prefix of entries of `about` with the script of a program: "script", "script1" and so on."""

_MUST_AGREE = {"syncvar": "syncvar", "protocol": "protocol", "byte_order": "byte order"}
_SHOULD_AGREE = {"python": "Python", "numpy": "NumPy"}

_ENTRIES_MAX = 64
_NAME_MAX = 64
_TEXT_MAX = 1024
_SHOWN_MAX = 60  # characters of a value
_VALUES_MAX = 6  # of one line
_LINES_MAX = 12


def check_about(about: Mapping[str, int | str]) -> None:
    """Raise WireError if a rank sends too many entries, or too long ones."""
    if len(about) > _ENTRIES_MAX:
        raise WireError(f"a rank sent {len(about)} entries about itself, more than {_ENTRIES_MAX}")
    for name, value in about.items():
        if len(name) > _NAME_MAX or (isinstance(value, str) and len(value) > _TEXT_MAX):
            raise WireError(f"the entry {name[:_NAME_MAX]!r} of a rank about itself is too long")


def compare_abouts(abouts: Mapping[int, Mapping[str, int | str]]) -> tuple[str, str]:
    """Return (error or "", warning or "") for the `about` of each rank; absent entries are skipped.

    Example:
        >>> about = {0: {"syncvar": "1"}, 1: {"syncvar": "2"}}
        >>> print(compare_abouts(about)[0])
        the ranks differ in what must be equal:
          syncvar: '1' (rank 0), '2' (rank 1)
        install the same syncvar everywhere, and give all ranks the same settings
    """
    names = {name for about in abouts.values() for name in about}
    settings = sorted(name for name in names if name.startswith(SETTING))
    must = {**_MUST_AGREE, **{name: _shown(name.removeprefix(SETTING))[1:-1] for name in settings}}
    lines = [
        f"  {label}: {values}"
        for name, label in must.items()
        if (values := _values(abouts, name, skips_empty=False))
    ]
    refusal = ""
    if lines:
        rest = [f"  ({len(lines) - _LINES_MAX} more)"] if len(lines) > _LINES_MAX else []
        first = "the ranks differ in what must be equal:"
        last = "install the same syncvar everywhere, and give all ranks the same settings"
        refusal = "\n".join((first, *lines[:_LINES_MAX], *rest, last))
    scripts = sorted(name for name in names if name.startswith(SCRIPT))
    parts = [
        f"{label} {values}"
        for name, label in {**_SHOULD_AGREE, **dict.fromkeys(scripts, SCRIPT)}.items()
        if (values := _values(abouts, name, skips_empty=True))
    ]
    return refusal, f"the ranks differ: {'; '.join(parts)}" if parts else ""


def _values(abouts: Mapping[int, Mapping[str, int | str]], name: str, *, skips_empty: bool) -> str:
    """Return an entry's values, each with its ranks; empty if all ranks have the same."""
    ranks: dict[int | str, list[int]] = {}
    for rank, about in sorted(abouts.items()):
        value = about.get(name)
        if value is not None and not (skips_empty and value == ""):
            ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return ""
    shown = [f"{_shown(value)} ({rank_list(having)})" for value, having in ranks.items()]
    more = len(shown) - _VALUES_MAX
    return ", ".join(shown[:_VALUES_MAX]) + (f", and {more} more" if more > 0 else "")


def _shown(value: int | str) -> str:
    """Return a value from a rank without control characters, for the terminal."""
    return ascii(value[:_SHOWN_MAX]) if isinstance(value, str) else str(value)


# -- handshake -------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A rank that has joined."""

    rank: int
    address: str
    host: str
    pid: int
    about: dict[str, Any]

    @property
    def host_index(self) -> int:
        """Index of the rank's host; -1 if the rank sent none that is valid."""
        index = self.about.get("host_index", 0)
        return index if isinstance(index, int) else -1

    @property
    def outside(self) -> str:
        """Address for ranks on other hosts; empty if it listens to none."""
        return str(self.about.get("outside", ""))

    def address_for(self, other: Member) -> str:
        """Return the address at which another rank reaches this one."""
        return self.address if other.host_index == self.host_index else self.outside


@dataclass(slots=True)
class Handshake:
    """Handshake of all ranks."""

    world_size: int  # ranks that must join
    generation: int  # version of the membership
    timeout_s: float  # longest time from the first join to the last, in seconds
    interval_s: float  # interval of the messages that name missing ranks, in seconds
    members: dict[int, Member] = field(default_factory=dict)
    began: float | None = None
    last_report: float = 0.0  # time of the last message that names missing ranks
    failed: str = ""
    # Ranks that ended before they joined, each with the way it ended.
    absent: dict[int, str] = field(default_factory=dict)
    names: ProcessNames = RANKS  # what sentences call the ranks

    @property
    def is_complete(self) -> bool:
        """Whether every rank has joined and their installations fit together."""
        return len(self.members) == self.world_size and not self.failed

    def compare(self) -> str:
        """Compare the installations once all ranks have joined; return a warning or "".

        The handshake fails if they cannot work together.
        """
        abouts = {rank: member.about for rank, member in self.members.items()}
        self.failed, warning = compare_abouts(abouts)
        others = {about.get("protocol", PROTOCOL_VERSION) for about in abouts.values()}
        others.discard(PROTOCOL_VERSION)
        if others and not self.failed:
            self.failed = (
                f"the ranks have protocol {others.pop()}, and this process has {PROTOCOL_VERSION}: "
                "install the same syncvar everywhere"
            )
        return "" if self.failed else warning

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def join(self, member: Member, now: float) -> str:
        """Add a rank; return the reason if it is refused, else an empty text."""
        if self.failed:
            return self.failed
        if not 0 <= member.rank < self.world_size:
            return f"rank {member.rank} is outside a world of {self.world_size}"
        present = self.members.get(member.rank)
        if present is not None:
            return f"rank {member.rank} is already taken by process {present.pid} on {present.host}"
        for other in self.members.values():
            if other.host_index != member.host_index:
                for one in (member, other):
                    if not one.outside:
                        return (
                            f"rank {one.rank} listens to no other host, and the job has several. "
                            "Set SYNCVAR_HOST_ADDRESS on its host"
                        )
        if self.began is None:
            self.began = self.last_report = now
        self.members[member.rank] = member
        return ""

    def tick(self, now: float) -> tuple[str, str]:
        """Return (sentence to show or "", reason of failure or "") at time `now`."""
        if self.began is None or self.is_complete or self.failed:
            return "", ""
        if self.absent:
            self.failed = self._missing_forever()
            return "", self.failed
        waited = now - self.began
        absent = rank_list(self.missing(), self.names)
        joined = f"{len(self.members)} of {self.world_size}"
        if waited >= self.timeout_s:
            self.failed = (
                f"{absent} did not join within {waited:.0f} s (joined: {joined}); "
                f"does every rank reach sv.init() or its first collective?"
            )
            return "", self.failed
        if now - self.last_report >= self.interval_s:
            self.last_report = now
            return f"still waiting for {absent} to join after {waited:.0f} s (joined: {joined})", ""
        return "", ""

    def ended(self, rank: int, ending: str) -> str:
        """Record that a rank ended before it joined; return why the handshake fails, or ""."""
        if rank in self.members or self.failed:
            return ""
        self.absent[rank] = ending
        if self.members:  # otherwise the first rank that joins learns it from `tick`
            self.failed = self._missing_forever()
        return self.failed

    def _missing_forever(self) -> str:
        rank, ending = next(iter(self.absent.items()))
        others = rank_list(self.members, self.names)
        name = process_name(rank, self.names)
        return f"{name} {ending} without joining, while {others} waited for it"


# -- network between the hosts ---------------------------------------------------------------------

NETWORK_WAIT_S = 2.0
"""Time after which the ranks go on without the numbers of a head that is late, in seconds."""

_PAIRS_MAX = 1000  # of one message


@dataclass(slots=True)
class NetworkSurvey:
    """Collects what one rank of each host, its head, has measured."""

    # What is known of hosts by their names, from this membership and from those before it.
    known: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)  # of the data between hosts, as text
    is_new: bool = False  # whether nobody has read the numbers of this membership
    _awaited: set[int] = field(default_factory=set)
    # (nanoseconds, bytes per millisecond) by pair of hosts
    _rates: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _due: float = 0.0

    def begin(self, members: Mapping[int, Member], now: float) -> tuple[bool, list[int]]:
        """Begin a membership; return whether the heads are to measure, and the known numbers."""
        heads: dict[int, Member] = {}
        for rank in sorted(members):
            heads.setdefault(members[rank].host_index, members[rank])
        self.hosts = [heads[host].host for host in sorted(heads)]
        self._rates, self._awaited = {}, set()
        self.paths = set()
        if len(heads) < 2 or not all(one.about.get("probes") for one in members.values()):
            return False, []
        if len(set(self.hosts)) == len(self.hosts):
            for first, name in enumerate(self.hosts):
                for second in range(first + 1, len(self.hosts)):
                    other = self.hosts[second]
                    rate = self.known.get((name, other)) or self.known.get((other, name))
                    if rate is not None:
                        self._rates[first, second] = rate
        count = len(self.hosts)
        if len(self._rates) == count * (count - 1) // 2 <= _PAIRS_MAX:
            return False, self.rates()
        self._rates, self._due = {}, now + NETWORK_WAIT_S
        self._awaited = {one.rank for one in heads.values()}
        return True, []

    @property
    def is_pending(self) -> bool:
        """Whether the ranks wait for the numbers."""
        return bool(self._awaited)

    def report(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Add the numbers of a head; return whether they were awaited and all are there."""
        if rank not in self._awaited:
            return False
        self._awaited.discard(rank)
        self.paths.add(message["path"][:_TEXT_MAX])
        flat, count = message["rates"], len(self.hosts)
        for first, second, *rate in zip(
            flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=False
        ):
            if 0 <= first < second < count and min(rate) > 0 and len(self._rates) < _PAIRS_MAX:
                found = self._rates[first, second] = rate[0], rate[1]
                self.known[self.hosts[first], self.hosts[second]] = found
        self.is_new = not self._awaited
        return self.is_new

    def is_late(self, now: float) -> bool:
        """Return whether the ranks have waited long enough; if so, for nobody any more."""
        if not self._awaited or now < self._due:
            return False
        self._awaited.clear()
        self.is_new = True
        return True

    def rates(self) -> list[int]:
        """Return (host, host, nanoseconds, bytes per millisecond) of the pairs, flattened."""
        found = sorted(self._rates.items())
        return [number for pair, rate in found for number in (*pair, *rate)]


# -- failure detector ------------------------------------------------------------------------------


class Suspicion(NamedTuple):
    """A rank's new state."""

    rank: int  # the rank
    is_lost: bool  # True if it has failed, False if it is suspected
    reason: str  # reason, as text


@dataclass(slots=True)
class Health:
    """The failure detector: signs of life of the ranks of one host or job."""

    suspect_after_s: float  # silence after which a rank is suspected, in seconds
    lost_after_s: float  # silence after which a rank has failed, in seconds
    _silent_since: dict[int, float] = field(default_factory=dict)
    _suspected: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)

    def observe(self, rank: int, sign: str, now: float) -> Suspicion | None:
        """Record one observation; return the rank's new state if it changed.

        `sign` is empty for a sign of life, else the trouble ("its process is stopped (state T)").
        """
        if not sign:
            self._silent_since.pop(rank, None)
            self._suspected.discard(rank)
            self._lost.discard(rank)  # perhaps a new process with this number
            return None
        silence = now - self._silent_since.setdefault(rank, now)
        text = f"silent for {silence:.1f} s: {sign}"
        if silence >= self.lost_after_s and rank not in self._lost:
            self._lost.add(rank)
            return Suspicion(rank, is_lost=True, reason=text)
        if silence >= self.suspect_after_s and rank not in self._suspected:
            self._suspected.add(rank)
            return Suspicion(rank, is_lost=False, reason=f"suspect: {text}")
        return None
