"""The launcher's view of a running job: it asks the ranks for their last calls. Pure.

A round asks all ranks that can answer. Rounds happen at a regular interval, and when a command such
as `syncvar status` needs a new one. The answers give the offsets of the clocks of other hosts, and
the shares of time that ranks wait for each other. They show which rank is late most of the time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.process_ids import RANKS, ProcessNames, process_name
from syncvar.protocol.clock_offsets import SAME_CLOCK, ClockFilter, ClockOffset
from syncvar.protocol.wait_shares import (
    CallTimes,
    CallWait,
    RankWindow,
    Straggler,
    call_waits,
    find_straggler,
    late_costs,
    sample_stride,
    sum_shares,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncvar.protocol.control_messages import Message

_ANSWER_S = 1.0  # a rank that has not answered by then does without
_AGE_MIN_S = 0.2  # an answer that is younger serves a new question too
_LOOK_BACK_S = 30.0  # the time that stragglers are about
_ROUNDS_MIN = 3  # rounds without which nobody is called late
_NOISE = 0.05  # sum of shares of waiting in a round that mean nothing
_EARLY_S, _EARLY_ROUNDS = 0.2, 5
_SHOWN_S = 5.0  # the time that shares and rates are about


class CallKind(NamedTuple):
    """Calls of one kind on one rank since the previous round."""

    call: str  # the collective, with its op
    variable: str  # name of the variable; empty for other calls
    path: str  # data path and algorithm
    calls: int
    nbytes: int
    nanoseconds: int


class RankObservation(NamedTuple):
    """What a rank has answered in a round."""

    last_call: str = ""
    is_in_call: bool = False
    age_s: float = 0.0
    calls: int = 0  # since it has joined
    steps: int = 0
    counted: int = 0  # calls that `kinds` are about; it has made more if its ring was full
    kinds: tuple[CallKind, ...] = ()
    sent: Mapping[int, int] = {}  # bytes sent over links since it has joined, by peer
    received_at: float = 0.0  # in seconds of the launcher's clock


class RankRates(NamedTuple):
    """What a rank has done between two rounds."""

    calls_per_s: float = 0.0
    bytes_per_s: float = 0.0
    steps_per_s: float = 0.0
    call_share: float = 0.0


class _Round(NamedTuple):
    at: float
    seconds: float  # since the round before; the first one has the time of its calls
    shares: dict[int, dict[int, float]]
    longest: dict[int, tuple[tuple[int, int], float]]
    rates: dict[int, RankRates]
    kinds: dict[tuple[str, str, str], tuple[float, float, float]]
    links: dict[tuple[int, int], tuple[float]]


class Observer:
    """Asks ranks, and keeps what they answer.

    Args:
        interval_s: Time between two rounds without a question, in seconds; 0 for none.
        boot: Identity of this machine's boot: ranks with the same one have our clock.
        clock_ns: Returns the time in nanoseconds of the clock that ranks use.

    Attributes:
        latest: The last answer of each rank.
        offsets: The clock of each rank.
        rounds: How many rounds have ended.
        straggler: The rank that is late now, or None.
    """

    def __init__(self, interval_s: float, boot: str, clock_ns: Callable[[], int]) -> None:
        self.latest: dict[int, RankObservation] = {}
        self.offsets: dict[int, ClockOffset] = {}
        self.rounds = 0
        self.straggler: Straggler | None = None
        self._interval_s = interval_s
        self._boot = boot
        self._clock_ns = clock_ns
        self._clocks: dict[int, ClockFilter] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._open: dict[int, int] = {}  # ranks that have not answered -> time of the question
        self._windows: dict[int, RankWindow] = {}
        self._before: dict[int, RankObservation] = {}
        self._began = float("-inf")
        self._is_wanted = False
        self._history: deque[_Round] = deque(maxlen=256)
        self._named: set[int] = set()
        self._judged = 0  # rounds that `straggler` is about

    # -- rounds ------------------------------------------------------------------------------------

    def want(self, now: float) -> int:
        """Ask for a round; return the number of ended rounds with which it has ended."""
        if self._open:
            return self.rounds + 1
        if self._history and now - self._history[-1].at < _AGE_MIN_S:
            return self.rounds
        self._is_wanted = True
        return self.rounds + 1

    def due(self, ranks: Iterable[int], now: float) -> dict[int, dict[str, int]]:
        """Return the fields of the questions to send now, by rank; end a round that is over.

        `ranks` are those that can answer.
        """
        able = set(ranks)
        if self._open and (now - self._began > _ANSWER_S or not able.intersection(self._open)):
            self._end(now)
        is_due = self._interval_s > 0 and now - self._began >= self._pause_s
        if self._open or not (self._is_wanted or is_due):
            return {}
        self._is_wanted = False
        self._began = now
        sent_ns = self._clock_ns()
        self._open = dict.fromkeys(sorted(able), sent_ns)
        self._windows = {}
        self._before = dict(self.latest)
        if not able:
            self._end(now)
        return {rank: self._question(rank) for rank in self._open}

    @property
    def _pause_s(self) -> float:
        """Time between two rounds: the first ones, which compare clocks, come at once."""
        return _EARLY_S if self._clocks and self.rounds < _EARLY_ROUNDS else self._interval_s

    def _question(self, rank: int) -> dict[str, int]:
        offset = self.offsets.get(rank, ClockOffset())
        return {
            "number": self.rounds,
            "offset_ns": offset.offset_ns,
            "error_ns": offset.error_ns,
        }

    def record(self, rank: int, message: Message, now: float) -> None:
        """Take the answer of a rank."""
        returned_ns = self._clock_ns()
        if rank not in self._open or message["number"] != self.rounds:
            return  # too late: its round has ended
        sent_ns = self._open.pop(rank)
        offset = self._offset(rank, message, sent_ns, returned_ns)
        self.latest[rank] = _observation(message, now)
        for group, members in message["groups"].items():
            self._members[group] = tuple(members)
        self._windows[rank] = _window(message, offset.offset_ns)
        if not self._open:
            self._end(now)

    def _offset(self, rank: int, message: Message, sent_ns: int, returned_ns: int) -> ClockOffset:
        if message["boot"] == self._boot != "":
            self.offsets[rank] = SAME_CLOCK
            return SAME_CLOCK
        clock = self._clocks.setdefault(rank, ClockFilter())
        clock.add(
            sent_ns=sent_ns,
            received_ns=message["received_ns"],
            answered_ns=message["answered_ns"],
            returned_ns=returned_ns,
        )
        self.offsets[rank] = clock.estimate(returned_ns)
        return self.offsets[rank]

    def _end(self, now: float) -> None:
        self._open = {}
        self.rounds += 1
        windows = self._windows
        seconds = max((one.nanoseconds / 1e9 for one in windows.values()), default=0.0)
        if self._history:
            seconds = now - self._history[-1].at
        rates = {rank: self._rates(rank, windows[rank]) for rank in windows}
        waits = list(call_waits(windows, self._members))
        self._history.append(
            _Round(
                now,
                seconds,
                sum_shares(windows, waits),
                _longest(waits),
                rates,
                self._kinds(windows, rates),
                self._links(windows),
            )
        )
        self._members = {}

    def _rates(self, rank: int, window: RankWindow) -> RankRates:
        mine, before = self.latest[rank], self._before.get(rank)
        span_s = window.nanoseconds / 1e9
        in_calls = sum(kind.nanoseconds for kind in mine.kinds)
        share = min(1.0, in_calls / window.nanoseconds)
        # Between two rounds the numbers of calls are exact. The first round has only its window.
        seconds = span_s if before is None else max(1e-6, mine.received_at - before.received_at)
        calls = mine.counted if before is None else max(0, mine.calls - before.calls)
        steps = 0 if before is None else max(0, mine.steps - before.steps)
        nbytes = sum(kind.nbytes for kind in mine.kinds) * calls / max(1, mine.counted)
        return RankRates(calls / seconds, nbytes / seconds, steps / seconds, share)

    def _kinds(
        self, windows: Mapping[int, RankWindow], rates: Mapping[int, RankRates]
    ) -> dict[tuple[str, str, str], tuple[float, float, float]]:
        """Return calls and bytes in a second of all ranks, and the mean share, by kind."""
        found: dict[tuple[str, str, str], tuple[float, float, float]] = {}
        for rank, window in windows.items():
            mine = self.latest[rank]
            factor = rates[rank].calls_per_s / max(1, mine.counted)
            for kind in mine.kinds:
                calls, nbytes, share = found.get(kind[:3], (0.0, 0.0, 0.0))
                found[kind[:3]] = (
                    calls + kind.calls * factor,
                    nbytes + kind.nbytes * factor,
                    share + kind.nanoseconds / window.nanoseconds / len(windows),
                )
        return found

    def _links(self, ranks: Iterable[int]) -> dict[tuple[int, int], tuple[float]]:
        """Return the bytes in a second that ranks have sent over links, by both ends."""
        found: dict[tuple[int, int], tuple[float]] = {}
        for rank in ranks:
            mine, before = self.latest[rank], self._before.get(rank)
            if before is None:
                continue
            seconds = max(1e-6, mine.received_at - before.received_at)
            for peer, nbytes in mine.sent.items():
                found[rank, peer] = (max(0, nbytes - before.sent.get(peer, 0)) / seconds,)
        return found

    # -- what follows from them --------------------------------------------------------------------

    def take_straggler(self, now: float) -> Straggler | None:
        """Return a rank that has become late; each rank is returned once."""
        if self._judged == self.rounds:
            return None
        self._judged = self.rounds
        self.straggler = None
        rounds = self._since(now - _LOOK_BACK_S)
        if len(rounds) < _ROUNDS_MIN:
            return None
        lasted_s = sum(one.seconds for one in rounds) or 1.0
        calls: dict[tuple[int, tuple[int, int]], float] = {}  # one call may last several rounds
        for one in rounds:
            for late, (call, share) in one.longest.items():
                calls[late, call] = calls.get((late, call), 0.0) + share * one.seconds / lasted_s
        longest: dict[int, float] = {}
        for (late, _), share in calls.items():
            longest[late] = max(share, longest.get(late, 0.0))
        found = find_straggler(_mean_shares(rounds), round(lasted_s, 1), longest)
        if found is not None and sum(_are_others_late(found.rank, one) for one in rounds) > 1:
            found = None  # ranks take turns
        self.straggler = found
        if found is None or found.rank in self._named or not self._interval_s:
            return None
        if now - rounds[0].at < min(_LOOK_BACK_S, 4 * self._interval_s):
            return None
        self._named.add(found.rank)
        return found

    def _since(self, moment: float) -> list[_Round]:
        return [one for one in self._history if one.at >= moment and one.shares]

    def _shown(self) -> list[_Round]:
        """Return the rounds that shares and rates are about: the last one, and younger ones."""
        return self._since(self._history[-1].at - _SHOWN_S) if self._history else []

    @property
    def window_s(self) -> float:
        """The length of the time that shares and rates are about, in seconds."""
        return sum(one.seconds for one in self._shown())

    def shares(self) -> dict[int, dict[int, float]]:
        """Return for each rank the share of time that it waits for others, by late rank."""
        return _mean_shares(self._shown())

    def rates(self, rank: int) -> RankRates:
        """Return what a rank does in a second."""
        found = [(one.seconds, {0: one.rates[rank]}) for one in self._shown() if rank in one.rates]
        return RankRates._make(_means(found).get(0, RankRates()))

    def kinds(self) -> dict[tuple[str, str, str], tuple[float, float, float]]:
        """Return (calls, bytes) in a second of all ranks and the mean share of time, by kind.

        A kind is (call, variable, path).
        """
        means = _means([(one.seconds, one.kinds) for one in self._shown()])
        return {kind: (calls, nbytes, share) for kind, (calls, nbytes, share) in means.items()}

    def links(self) -> dict[tuple[int, int], float]:
        """Return the bytes in a second that went over each link, by (sender, receiver)."""
        rounds = [(one.seconds, one.links) for one in self._shown() if one.links]
        return {ends: rate for ends, (rate,) in _means(rounds).items()}


def straggler_text(straggler: Straggler, host: str = "", names: ProcessNames = RANKS) -> str:
    """Return the sentence about a rank that the others wait for.

    Example:
        >>> straggler_text(Straggler(2, 0.93, 0.41, 30.2))
        'rank 2 is late: each other rank waited for it 41 % of the last 30 s (93 % of all waiting)'
    """
    name = process_name(straggler.rank, names) + (f" on {host}" if host else "")
    return (
        f"{name} is late: each other {names.word} waited for it "
        f"{straggler.cost_share:.0%} of the last {straggler.since_s:.0f} s "
        f"({straggler.late_share:.0%} of all waiting)"
    ).replace("%", " %")


def _are_others_late(rank: int, one: _Round) -> bool:
    """Return whether the ranks waited for others than this one for most of their waiting."""
    costs = late_costs(one.shares)
    mine = costs.get(rank, 0.0)
    return sum(costs.values()) - mine > max(mine, _NOISE)


def _longest(waits: Iterable[CallWait]) -> dict[int, tuple[tuple[int, int], float]]:
    """Return, for each late rank, the call with most waiting for it, as the sum of shares."""
    costs: dict[int, dict[tuple[int, int], float]] = {}
    for call, _, late, share in waits:
        mine = costs.setdefault(late, {})
        mine[call] = mine.get(call, 0.0) + share
    return {late: max(mine.items(), key=lambda one: one[1]) for late, mine in costs.items()}


def _means(
    rounds: Sequence[tuple[float, Mapping[Any, tuple[float, ...]]]],
) -> dict[Any, tuple[float, ...]]:
    """Return the means of numbers of several rounds, each with the weight of its length."""
    total = sum(seconds for seconds, _ in rounds) or 1.0
    found: dict[Any, tuple[float, ...]] = {}
    for seconds, numbers in rounds:
        for key, mine in numbers.items():
            sums = found.get(key, (0.0,) * len(mine))
            found[key] = tuple(
                old + new * seconds / total for old, new in zip(sums, mine, strict=True)
            )
    return found


def _mean_shares(rounds: Iterable[_Round]) -> dict[int, dict[int, float]]:
    """Return the shares of several rounds, each with the weight of its length."""
    total: dict[int, float] = {}
    found: dict[int, dict[int, float]] = {}
    for one in rounds:
        for rank, waits in one.shares.items():
            total[rank] = total.get(rank, 0.0) + one.seconds
            mine = found.setdefault(rank, {})
            for late, share in waits.items():
                mine[late] = mine.get(late, 0.0) + share * one.seconds
    return {
        rank: {late: share / (total[rank] or 1.0) for late, share in waits.items()}
        for rank, waits in found.items()
    }


def _observation(message: Message, now: float) -> RankObservation:
    texts, numbers = message["kind_texts"], message["kind_numbers"]
    kinds = tuple(
        CallKind(*texts[3 * index : 3 * index + 3], *numbers[3 * index : 3 * index + 3])
        for index in range(min(len(texts), len(numbers)) // 3)
    )
    names = ("last_call", "is_in_call", "age_s", "steps", "counted", "sent")
    fields: dict[str, Any] = {name: message[name] for name in names}
    return RankObservation(calls=message["made"], kinds=kinds, received_at=now, **fields)


def _window(message: Message, offset_ns: int) -> RankWindow:
    flat = message["calls"]
    calls = [
        CallTimes(
            group,
            call,
            began + offset_ns,
            ended + offset_ns if ended else 0,
            waited + offset_ns if waited else 0,
        )
        for group, call, began, ended, waited in zip(
            *(flat[place::5] for place in range(5)), strict=False
        )
    ]
    end = message["received_ns"] + offset_ns
    return RankWindow(end - message["window_ns"], end, calls, sample_stride(message["counted"]))
