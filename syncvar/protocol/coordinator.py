"""The launcher's state of a job: joins, failures and waits of ranks in, control messages out.

It is pure: every input returns the actions that follow, in order. The launcher adds a ZeroMQ
socket and a clock (`bootstrap.rendezvous_server`), the in-memory world of tests adds neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import WireError
from syncvar.core.process_ids import RANKS, ProcessNames
from syncvar.protocol.control_messages import Message, pack_message
from syncvar.protocol.deadlock_detector import (
    DeadlockReport,
    Stalls,
    WaitReport,
    WaitReports,
    find_deadlock,
    find_mismatch,
)
from syncvar.protocol.membership import Handshake, Member, NetworkSurvey
from syncvar.protocol.observer import straggler_text
from syncvar.protocol.unreceived_messages import UnreceivedMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncvar.core.settings import RuntimeConfig
    from syncvar.protocol.observer import Observer


class SendMessage(NamedTuple):
    """Control message for a rank."""

    rank: int
    data: bytes


class ShowMessage(NamedTuple):
    """Text for the user."""

    text: str
    kind: str = "notice"  # "stall" for a stalled call, "straggler" for a rank that others wait for
    absent: tuple[int, ...] = ()  # ranks that have not joined and that others wait for


class AbortJob(NamedTuple):
    """Failed start of the job; `absent` are the ranks that have not joined."""

    error: str
    reason: str
    absent: tuple[int, ...] = ()


class Unresponsive(NamedTuple):
    """Rank of which no thread has answered for `seconds`; show it with the state of its process."""

    rank: int
    seconds: float


Action = SendMessage | ShowMessage | AbortJob | Unresponsive


class Coordinator:
    """State of one version of the membership of the job with this random identity.

    `observer` asks the ranks for their calls; without one nobody does. `names` is what sentences
    for the user call the ranks.
    """

    def __init__(
        self,
        world_size: int,
        job_id: str,
        config: RuntimeConfig,
        generation: int = 0,
        observer: Observer | None = None,
        names: ProcessNames = RANKS,
    ) -> None:
        self.world_size, self._names = world_size, names
        self.job_id = job_id
        self.config = config
        self.handshake = self._new_handshake(generation)
        self.next_handshake = self._new_handshake(generation + 1)
        self.left: dict[int, dict[int, int]] = {}
        self.failed_ranks: dict[int, str] = {}
        # Ranks whose failure another rank has reported, perhaps before the launcher notices it.
        self.lost: set[int] = set()
        self.broken_by: tuple[int, str] | None = None
        self._reports = WaitReports()
        self.stalls = Stalls(config.stall_warning_s, names)
        self.observer = observer
        self.network = NetworkSurvey()
        self._unreceived = UnreceivedMessages()
        self.has_warned = False
        self._handlers: dict[str, Callable[[int, Message, float], list[Action]]] = {
            "wait_report": self._wait_report,
            "wait_end": self._wait_end,
            "host_rates": self._host_rates,
            "status": self._status,
            "observation": self._observation,
            "reject_call": self._reject_call,
            "abort_step": self._abort_step,
            "process_failure": self._process_failure,  # only if no launcher observes the process
            "group_failure": self._group_failure,
            "leave": self._leave,
        }

    # -- messages of ranks -------------------------------------------------------------------------

    def join(self, message: Message, now: float) -> tuple[str, list[Action]]:
        """Add a rank to the handshake; return (reason of refusal or "", actions).

        The caller answers a refused peer directly.
        """
        current = self.handshake.generation
        wanted = message["generation"]
        if message["job"] != self.job_id:
            return "this is another job", []
        handshake = self.handshake if wanted == current else self.next_handshake
        if wanted != handshake.generation:
            return f"generation {wanted} cannot be joined, {current} is in force", []
        names = ("rank", "address", "host", "pid", "about")
        member = Member(*(message[name] for name in names))
        refused = handshake.join(member, now)
        if refused:
            return refused, []
        if handshake.missing():  # a rank that joins after another has failed need not wait for it
            return "", [
                SendMessage(member.rank, self._lost_data(rank, reason))
                for rank, reason in self.failed_ranks.items()
            ]
        warning = handshake.compare()
        if handshake.failed:
            reason = handshake.failed
            refusal = pack_message("refused", error="HandshakeError", reason=reason, missing=[])
            return "", [SendMessage(rank, refusal) for rank in sorted(handshake.members)]
        if handshake is self.next_handshake:  # every rank has joined the next membership
            self.handshake = handshake
            self.next_handshake = self._new_handshake(handshake.generation + 1)
            self.left.clear()
            self._unreceived = UnreceivedMessages()
            self.lost.clear()
            self.broken_by = None
            self._reports = WaitReports()
            self.stalls = Stalls(self.config.stall_warning_s)
        actions: list[Action] = [ShowMessage(warning)] if warning and not self.has_warned else []
        self.has_warned = True  # later handshakes of the same ranks would only repeat the warning
        # The addresses of the others depend only on the host of the rank that receives them.
        by_host: dict[int, bytes] = {}
        survey = self.network.begin(self.handshake.members, now)
        for rank in range(self.world_size):
            member = self.handshake.members[rank]
            if member.host_index not in by_host:
                by_host[member.host_index] = self._members_data(member, *survey)
            actions.append(SendMessage(rank, by_host[member.host_index]))
        for rank, reason in self.failed_ranks.items():
            actions += self._send_to_others(rank, self._lost_data(rank, reason))
        return "", actions

    def message(self, rank: int, message: Message, now: float) -> list[Action]:
        """Handle a message of a rank that has joined."""
        handler = self._handlers.get(message["kind"])
        if handler is None:
            raise WireError(f"a worker may not send {message['kind']!r}")
        return handler(rank, message, now)

    def ended(
        self,
        rank: int,
        reason: str,
        now: float,
        status: int | None = None,
        kind: str = "lost",
    ) -> list[Action]:
        """Record that a rank's process has failed, for instance with "signal 9" and status -9.

        `kind` is that of `PeerLost`.
        """
        del now
        if rank in self.failed_ranks:
            return []
        self._reports.drop(rank)
        self.failed_ranks[rank] = reason
        data = self._lost_data(rank, reason, status, kind)
        others = sorted(self.next_handshake.members)
        joining = [SendMessage(other, data) for other in others if other != rank]
        return self._send_to_others(rank, data) + joining

    def fence_rank(self, rank: int, reason: str, now: float) -> list[Action]:
        """Record that a rank is unresponsive; if it wakes up, it takes part in no later call."""
        fence: list[Action] = []
        if rank in self.handshake.members and rank not in self.failed_ranks:
            fence = [SendMessage(rank, self._lost_data(rank, reason))]
        return self.ended(rank, reason, now) + fence

    def finished(self, rank: int, now: float) -> list[Action]:
        """Record that a rank's process ended normally."""
        del now
        actions: list[Action] = []
        for handshake in (self.handshake, self.next_handshake):
            failure = handshake.ended(rank, "finished")
            if failure:
                actions += self._rendezvous_failed(handshake, failure)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Return what is due now: handshake timeouts, deadlocks, stall warnings."""
        actions: list[Action] = []
        for handshake in (self.handshake, self.next_handshake):
            sentence, failure = handshake.tick(now)
            if sentence:
                actions.append(ShowMessage(sentence, absent=tuple(handshake.missing())))
            if failure:
                actions += self._rendezvous_failed(handshake, failure)
        actions += self._judge(now)
        if self.network.is_late(now):
            actions += self._network_data()
        reports = [] if self._is_broken else self._reports.live()
        due = self.stalls.tick(reports, now, self._may_answer)
        actions += [ShowMessage(sentence, "stall") for sentence in due.sentences]
        actions += self._send(due.ask, pack_message("ping"))
        actions += [Unresponsive(rank, seconds) for rank, seconds in due.silent]
        if self.observer is not None:
            actions += self._observe(self.observer, now)
        return actions

    def _observe(self, observer: Observer, now: float) -> list[Action]:
        """Return the questions of the observer, and a sentence about a rank that has got late."""
        # While ranks join, an answer would come from the middle of the handshake.
        is_ready = self.handshake.is_complete and not self.network.is_pending
        joined = self.handshake.members if is_ready else ()
        able = [rank for rank in joined if self._may_answer(rank)]
        actions: list[Action] = [
            SendMessage(rank, pack_message("observe", **fields))
            for rank, fields in observer.due(able, now).items()
        ]
        straggler = observer.take_straggler(now)
        if straggler is not None:
            text = straggler_text(straggler, self.host(straggler.rank), self._names)
            actions.append(ShowMessage(text, "straggler"))
        return actions

    # -- state of a rank ---------------------------------------------------------------------------

    def position(self, rank: int) -> str:
        """Return the last known state of a rank, for the failure report."""
        wait = self.wait_of(rank)
        if wait is not None:
            return f"waiting in {wait.describe()}"
        if rank in self.left:
            return "finished"
        if rank not in self.handshake.members:
            return "not joined yet"
        silence = self.stalls.silence(rank)
        return "not waiting in any call" + (f"; {silence}" if silence else "")

    def wait_of(self, rank: int) -> WaitReport | None:
        """Return the report of a rank that waits in a call; None if it has sent none."""
        return next((one for one in self._reports.live() if one.rank == rank), None)

    def host(self, rank: int) -> str:
        """Return the host name of a rank that has joined, else an empty text."""
        member = self.handshake.members.get(rank)
        return member.host if member else ""

    # -- one handler for each kind of message ------------------------------------------------------

    def _wait_report(self, rank: int, message: Message, now: float) -> list[Action]:
        flat = message["alternatives"]
        report = WaitReport(
            rank=rank,
            group=message["group"],
            members=tuple(message["members"]),
            call=message["call"],
            ordinal=message["ordinal"],
            fingerprint=message["fingerprint"],
            description=message["description"][:400],
            site=message["site"][:400],
            awaiting=tuple(message["awaiting"]),
            since=now - message["waited_s"],
            received=now,
            mismatch=message["mismatch"],
            has_active_threads=message["has_active_threads"],
            entered=message["entered"],
            alternatives=tuple(zip(flat[0::3], flat[1::3], flat[2::3], strict=False)),
            is_awaited=message["is_awaited"],
        )
        self._reports.add(report)
        return self._judge(now)

    def _wait_end(self, rank: int, message: Message, _now: float) -> list[Action]:
        self._reports.end(rank, message["group"], message["call"])
        return []

    def _host_rates(self, rank: int, message: Message, _now: float) -> list[Action]:
        return self._network_data() if self.network.report(rank, message) else []

    def _network_data(self) -> list[Action]:
        data = pack_message("host_network", rates=self.network.rates())
        return self._send(self.handshake.members, data)

    def _status(self, rank: int, message: Message, now: float) -> list[Action]:
        self.stalls.record_answer(rank, message, now)
        return []

    def _observation(self, rank: int, message: Message, now: float) -> list[Action]:
        if self.observer is not None:
            self.observer.record(rank, message, now)
        return []

    def _reject_call(self, rank: int, message: Message, _now: float) -> list[Action]:
        group, call = message["group"], message["call"]
        table = {rank: f"{message['description']}: {message['reason']}"}
        for report in self._reports.live():
            if (report.group, report.call) == (group, call):
                table[report.rank] = report.describe()
        self._reports.decide(group, call, call)
        data = pack_message(
            "decision",
            group=group,
            call=call,
            last_call=call,
            text=f"rank {rank} refused its own call",
            table=table,
            has_waiting_ranks=False,
            is_deadlock=False,
        )
        return self._send(message["members"], data, but=rank)

    def _abort_step(self, rank: int, message: Message, _now: float) -> list[Action]:
        group, first, last = message["group"], message["call"] + 1, message["last_call"]
        self._reports.decide(group, first, last)
        data = pack_message(
            "decision",
            group=group,
            call=first,
            last_call=last,
            text=f"rank {rank} {message['reason']}",
            table={rank: message["reason"]},
            has_waiting_ranks=False,
            is_deadlock=False,
        )
        return self._send(message["members"], data, but=rank)

    def _process_failure(self, rank: int, message: Message, now: float) -> list[Action]:
        return self.ended(rank, message["reason"], now, kind=message["failure_kind"])

    def _group_failure(self, rank: int, message: Message, _now: float) -> list[Action]:
        self._reports.drop(rank)
        reason = message["reason"]
        if self.broken_by is None:
            self.broken_by = (rank, reason)
        if message["failure_kind"] != "lost":
            return self._send_to_others(rank, self._abort_data(rank, message))
        # The reporter is alive; it has lost the connection to the peers in `missing`.
        failed = [peer for peer in message["missing"] if peer in self.handshake.members]
        self.lost |= set(failed)
        others = [other for other in self.handshake.members if other not in failed]
        actions: list[Action] = []
        for peer in failed:
            actions += self._send(others, self._lost_data(peer, reason), but=rank)
        return actions

    def _leave(self, rank: int, message: Message, _now: float) -> list[Action]:
        self._reports.leave(rank, message["entered"], message["skipped"])
        self.left[rank] = message["entered"]
        texts = self._unreceived.leave(rank, message["entered"], message["sent"], message["sites"])
        counts = {name: message[name] for name in ("entered", "skipped")}
        data = pack_message("leave_notice", rank=rank, **counts)
        return [*map(ShowMessage, texts), *self._send_to_others(rank, data)]

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _is_broken(self) -> bool:
        """Whether all calls of this membership end with an error: reports are out of date."""
        return bool(self.failed_ranks or self.lost or self.broken_by)

    def _judge(self, now: float) -> list[Action]:
        reports = [] if self._is_broken else self._reports.live()
        if not reports:
            return []
        findings = find_mismatch(reports, now) or find_deadlock(reports)
        waiting = {(report.rank, report.group, report.call) for report in reports}
        actions = [(finding, action) for finding in findings for action in self._announce(finding)]
        # A rank that waits in a refused call continues when it gets its message. Send that one
        # last: the rank must first know of the other refused calls.
        actions.sort(
            key=lambda one: (
                isinstance(one[1], SendMessage)
                and (one[1].rank, one[0].group, one[0].call) in waiting
            )
        )
        return [action for _, action in actions]

    def _announce(self, finding: DeadlockReport) -> list[Action]:
        self._reports.decide(finding.group, finding.call, finding.call)
        data = pack_message(
            "decision",
            group=finding.group,
            call=finding.call,
            last_call=finding.call,
            text=finding.text,
            table=finding.table,
            # Ranks that are already past this call get the error in their next one.
            has_waiting_ranks=True,
            is_deadlock=finding.is_deadlock,
        )
        return self._send(finding.members, data)

    def _may_answer(self, rank: int) -> bool:
        is_over = rank in self.left or rank in self.failed_ranks
        return rank in self.handshake.members and not is_over

    def _members_data(self, receiver: Member, probes: bool, rates: list[int]) -> bytes:  # noqa: FBT001
        members = self.handshake.members.items()
        return pack_message(
            "members",
            generation=self.handshake.generation,
            addresses={rank: one.address_for(receiver) for rank, one in members},
            hosts={rank: one.host for rank, one in members},
            host_indices={rank: one.host_index for rank, one in members},
            without_shm={rank: one.about["shm"] for rank, one in members if one.about.get("shm")},
            probes=probes,
            rates=rates,
        )

    def _new_handshake(self, generation: int) -> Handshake:
        limits = self.config.rendezvous_timeout_s, self.config.missing_report_s
        return Handshake(self.world_size, generation, *limits, names=self._names)

    def _rendezvous_failed(self, handshake: Handshake, reason: str) -> list[Action]:
        missing = handshake.missing()
        data = pack_message("refused", error="RendezvousError", reason=reason, missing=missing)
        return [
            AbortJob("RendezvousError", reason, tuple(missing)),
            *(SendMessage(rank, data) for rank in sorted(handshake.members)),
        ]

    def _lost_data(
        self, rank: int, reason: str, status: int | None = None, kind: str = "lost"
    ) -> bytes:
        fields = {"failure_kind": kind, "reason": reason, "group": -1, "call": -1, "missing": []}
        return self._abort_data(rank, fields, status)

    def _abort_data(self, rank: int, fields: Message, status: int | None = None) -> bytes:
        names = ("failure_kind", "reason", "group", "call", "missing")
        host, values = self.host(rank), {name: fields[name] for name in names}
        known = [] if status is None else [status]
        return pack_message("abort", rank=rank, host=host, status=known, **values)

    def _send_to_others(self, rank: int, data: bytes) -> list[Action]:
        return self._send(self.handshake.members, data, but=rank)

    def _send(self, ranks: Iterable[int], data: bytes, but: int = -1) -> list[Action]:
        receivers = [rank for rank in sorted(ranks) if rank != but and self._may_answer(rank)]
        return [SendMessage(rank, data) for rank in receivers]
