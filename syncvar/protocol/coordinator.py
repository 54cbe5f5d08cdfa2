"""What the launcher knows of a job, and what it tells the ranks: roll call, aborts, reports and verdicts.

One pure machine serves the launcher (which adds a ZeroMQ socket and a clock) and the in-memory world of the tests.
Every input returns the actions that follow from it, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import WireError
from syncvar.protocol.control_messages import Message, pack_message
from syncvar.protocol.deadlock_detector import (
    DeadlockReport,
    WaitReport,
    find_deadlock,
    find_mismatch,
)
from syncvar.protocol.membership import Member, RollCall
from syncvar.protocol.stall_reports import Stalls
from syncvar.protocol.unreceived_messages import UnreceivedMessages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncvar.core.settings import RuntimeConfig


class SendMessage(NamedTuple):
    """Send a control message to a rank."""

    rank: int
    data: bytes


class ShowMessage(NamedTuple):
    """Show a sentence to the user.

    Args:
        text: The sentence.
        is_stall: Somebody waits for others for long.
        absent: The ranks that others wait for, where they have not joined.
    """

    text: str
    is_stall: bool = False
    absent: tuple[int, ...] = ()


class AbortJob(NamedTuple):
    """The job cannot come together; `absent` are the ranks that have not joined."""

    error: str
    reason: str
    absent: tuple[int, ...] = ()


class Unresponsive(NamedTuple):
    """No thread of a rank has answered for so many seconds: say so, with what can be seen of its process."""

    rank: int
    seconds: float


Action = SendMessage | ShowMessage | AbortJob | Unresponsive


class Coordinator:
    """The state of one generation.

    Args:
        world_size: Ranks of the job.
        job_id: Its random identity.
        config: Deadlines and intervals.
        generation: Version of the membership.
    """

    def __init__(
        self, world_size: int, job_id: str, config: RuntimeConfig, generation: int = 0
    ) -> None:
        self.world_size = world_size
        self.job_id = job_id
        self.config = config
        self.roll = self._new_roll(generation)
        self.next_roll = self._new_roll(generation + 1)
        self.left: dict[int, dict[int, int]] = {}
        self.gone: dict[int, str] = {}
        self.lost: set[int] = (
            set()
        )  # by another rank, which has said so; nobody else may know it yet
        self.broken_by: tuple[int, str] | None = None
        self._reports: dict[tuple[int, int, int], WaitReport] = {}
        self.stalls = Stalls(config.stall_warning_s)
        self._unreceived = UnreceivedMessages()
        self.has_warned = False

    # -- messages of ranks -------------------------------------------------------------------------

    def join(self, message: Message, now: float) -> tuple[str, list[Action]]:
        """Take a rank in.

        Returns:
            (reason of refusal or "", actions). A refused peer is no member: the caller answers it directly.
        """
        if message["job"] != self.job_id:
            return "this is another job", []
        roll = self.roll if message["generation"] == self.roll.generation else self.next_roll
        if message["generation"] != roll.generation:
            return (
                f"generation {message['generation']} cannot be joined, {self.roll.generation} is in force",
                [],
            )
        member = Member(
            message["rank"], message["address"], message["host"], message["pid"], message["about"]
        )
        refused = roll.join(member, now)
        if refused:
            return refused, []
        if roll.missing():  # whoever comes after a rank was lost need not wait for it
            return "", [
                SendMessage(member.rank, self._lost_data(rank, reason))
                for rank, reason in self.gone.items()
            ]
        warning = roll.compare()
        if roll.failed:
            refusal = pack_message(
                "refused", error="HandshakeError", reason=roll.failed, missing=[]
            )
            return "", [SendMessage(rank, refusal) for rank in sorted(roll.members)]
        if roll is self.next_roll:  # every rank has left the old generation and joined anew
            self.roll, self.next_roll = roll, self._new_roll(roll.generation + 1)
            self.left.clear()
            self._unreceived = UnreceivedMessages()
            self.lost.clear()
            self.broken_by = None
            self._reports.clear()
            self.stalls = Stalls(self.config.stall_warning_s)
        actions: list[Action] = [ShowMessage(warning)] if warning and not self.has_warned else []
        self.has_warned = True  # at the first meeting: who meets again is the same
        data: dict[int, bytes] = {}  # by host: whom it reaches where depends on it
        for rank in range(self.world_size):
            told = self.roll.members[rank]
            if told.host_index not in data:
                data[told.host_index] = self._roll_data(told)
            actions.append(SendMessage(rank, data[told.host_index]))
        for rank, reason in self.gone.items():
            actions += self._abort(rank, reason)
        return "", actions

    def message(self, rank: int, message: Message, now: float) -> list[Action]:
        """Handle a message of a rank that has joined."""
        kind = message["kind"]
        if kind == "report":
            return self._report(rank, message, now)
        if kind == "here":
            self.stalls.here(rank, message, now)
            return []
        if kind == "resumed":
            self._reports.pop((rank, message["group"], message["call"]), None)
            return []
        if kind == "poison":
            return self._poison(rank, message)
        if kind == "left_run":
            data = pack_message(
                "verdict",
                group=message["group"],
                call=message["call"] + 1,
                last_call=message["epoch_end"],
                text=f"rank {rank} {message['reason']}",
                table={rank: message["reason"]},
                waits=False,
            )
            return self._tell(message["members"], data, but=rank)
        if kind == "failed":  # where no launcher sees how it ends
            return self.ended(rank, message["reason"], now)
        if kind == "broke":
            self._drop_reports(rank)
            if self.broken_by is None:
                self.broken_by = (rank, message["reason"])
            if message["kind_of_break"] == "lost":  # it is not the reporter that was lost
                lost = [peer for peer in message["missing"] if peer in self.roll.members]
                self.lost |= set(lost)
                others = [other for other in self.roll.members if other not in lost]
                return [
                    one
                    for peer in lost
                    for one in self._tell(
                        others, self._lost_data(peer, message["reason"]), but=rank
                    )
                ]
            return self._tell_others(rank, self._abort_data(rank, message))
        if kind == "leaving":
            self._drop_reports(rank)
            self.left[rank] = message["entered"]
            texts = self._unreceived.leave(
                rank, message["entered"], message["sent"], message["sites"]
            )
            data = pack_message(
                "left", rank=rank, entered=message["entered"], skipped=message["skipped"]
            )
            return [*map(ShowMessage, texts), *self._tell_others(rank, data)]
        raise WireError(f"a worker may not send {kind!r}")

    def ended(self, rank: int, reason: str, now: float) -> list[Action]:
        """Note that a rank's process has ended badly, for instance with "signal 9"."""
        del now
        if rank in self.gone:
            return []
        self._drop_reports(rank)
        self.gone[rank] = reason
        data = self._lost_data(rank, reason)
        joining = [
            SendMessage(other, data) for other in sorted(self.next_roll.members) if other != rank
        ]
        return self._tell_others(rank, data) + joining

    def given_up(self, rank: int, reason: str, now: float) -> list[Action]:
        """Note that a rank gives no sign of life, and fence it: should it wake, it learns that it takes no part any more."""
        fence = (
            [SendMessage(rank, self._lost_data(rank, reason))]
            if rank in self.roll.members and rank not in self.gone
            else []
        )
        return self.ended(rank, reason, now) + fence

    def finished(self, rank: int, now: float) -> list[Action]:
        """Note that a rank's process ended in order."""
        del now
        actions: list[Action] = []
        for roll in (self.roll, self.next_roll):
            failure = roll.ended(rank, "finished")
            if failure:
                actions += self._rendezvous_failed(roll, failure)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Look at the clock: roll call, verdicts, stalls."""
        actions: list[Action] = []
        for roll in (self.roll, self.next_roll):
            sentence, failure = roll.tick(now)
            if sentence:
                actions.append(ShowMessage(sentence, absent=tuple(roll.missing())))
            if failure:
                actions += self._rendezvous_failed(roll, failure)
        if self._reports:
            actions += self._judge(now)
        told = self.stalls.tick(list(self._reports.values()), now, self._may_answer)
        actions += [ShowMessage(sentence, is_stall=True) for sentence in told.sentences]
        actions += self._tell(told.ask, pack_message("are_you_there"))
        actions += [Unresponsive(rank, seconds) for rank, seconds in told.silent]
        return actions

    # -- what others may ask -----------------------------------------------------------------------

    def position(self, rank: int) -> str:
        """Return what a rank is known to do, in words, for the failure block."""
        for (reporter, _, _), report in self._reports.items():
            if reporter == rank:
                return f"waiting in {report.describe()}"
        if rank in self.left:
            return "finished"
        if rank not in self.roll.members:
            return "not joined yet"
        return "not waiting in any call" + (
            f"; {silence}" if (silence := self.stalls.silence(rank)) else ""
        )

    def host(self, rank: int) -> str:
        """Return the host of a rank that has joined, else an empty text."""
        member = self.roll.members.get(rank)
        return member.host if member else ""

    # -- inside ------------------------------------------------------------------------------------

    def _report(self, rank: int, message: Message, now: float) -> list[Action]:
        report = WaitReport(
            rank=rank,
            group=message["group"],
            members=tuple(message["members"]),
            call=message["call"],
            ordinal=message["ordinal"],
            fingerprint=message["fingerprint"],
            what=message["what"][:400],
            site=message["site"][:400],
            awaiting=tuple(message["awaiting"]),
            since=now - message["waited_s"],
            received=now,
            mismatch=message["mismatch"],
            may_move=message["may_move"],
            entered=message["entered"],
        )
        self._reports[rank, report.group, report.call] = report
        return self._judge(now)

    def _judge(self, now: float) -> list[Action]:
        reports = list(self._reports.values())
        verdicts = find_mismatch(reports, now) or find_deadlock(reports)
        waiting = set(self._reports)
        told = [(verdict, tell) for verdict in verdicts for tell in self._announce(verdict)]
        # What lets a rank go on comes last: it must not enter another refused call before it knows of that one too.
        told.sort(
            key=lambda one: (
                isinstance(one[1], SendMessage)
                and (one[1].rank, one[0].group, one[0].call) in waiting
            )
        )
        return [tell for _, tell in told]

    def _announce(self, verdict: DeadlockReport) -> list[Action]:
        for key in [key for key in self._reports if key[1:] == (verdict.group, verdict.call)]:
            del self._reports[key]
        data = pack_message(
            "verdict",
            group=verdict.group,
            call=verdict.call,
            last_call=verdict.call,
            text=verdict.text,
            table=verdict.table,
            waits=True,  # ranks that went on without this call have to be refused their next one
        )
        return self._tell(verdict.members, data)

    def _may_answer(self, rank: int) -> bool:
        return rank in self.roll.members and rank not in self.left and rank not in self.gone

    def _poison(self, rank: int, message: Message) -> list[Action]:
        group, call = message["group"], message["call"]
        table = {rank: f"{message['what']}: {message['reason']}"}
        for (other, other_group, other_call), report in self._reports.items():
            if (other_group, other_call) == (group, call):
                table[other] = report.describe()
        data = pack_message(
            "verdict",
            group=group,
            call=call,
            last_call=call,
            text=f"rank {rank} refused its own call",
            table=table,
            waits=False,
        )
        return self._tell(message["members"], data, but=rank)

    def _roll_data(self, told: Member) -> bytes:
        members = self.roll.members.items()
        return pack_message(
            "roll",
            generation=self.roll.generation,
            addresses={rank: one.address_for(told) for rank, one in members},
            hosts={rank: one.host for rank, one in members},
            places={rank: one.host_index for rank, one in members},
            without_shm={rank: one.about["shm"] for rank, one in members if one.about.get("shm")},
        )

    def _new_roll(self, generation: int) -> RollCall:
        return RollCall(
            self.world_size,
            generation,
            self.config.rendezvous_timeout_s,
            self.config.missing_report_s,
        )

    def _rendezvous_failed(self, roll: RollCall, reason: str) -> list[Action]:
        data = pack_message(
            "refused", error="RendezvousError", reason=reason, missing=roll.missing()
        )
        return [
            AbortJob("RendezvousError", reason, tuple(roll.missing())),
            *(SendMessage(rank, data) for rank in sorted(roll.members)),
        ]

    def _abort(self, rank: int, reason: str) -> list[Action]:
        return self._tell_others(rank, self._lost_data(rank, reason))

    def _lost_data(self, rank: int, reason: str) -> bytes:
        fields = {"kind_of_break": "lost", "reason": reason, "group": -1, "call": -1, "missing": []}
        return self._abort_data(rank, fields)

    def _abort_data(self, rank: int, fields: Message) -> bytes:
        names = ("kind_of_break", "reason", "group", "call", "missing")
        return pack_message(
            "abort", rank=rank, host=self.host(rank), **{name: fields[name] for name in names}
        )

    def _tell_others(self, rank: int, data: bytes) -> list[Action]:
        return self._tell(self.roll.members, data, but=rank)

    def _tell(self, ranks: Iterable[int], data: bytes, but: int = -1) -> list[Action]:
        return [
            SendMessage(rank, data)
            for rank in sorted(ranks)
            if rank != but
            and rank in self.roll.members
            and rank not in self.gone
            and rank not in self.left
        ]

    def _drop_reports(self, rank: int) -> None:
        for key in [key for key in self._reports if key[0] == rank]:
            del self._reports[key]
