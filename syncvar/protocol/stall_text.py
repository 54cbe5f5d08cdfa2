"""Sentences about ranks that wait: stalls, mismatches and deadlocks.

`deadlock_detector`, `stall_reports` and `coordinator` decide; this module words what they found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.process_ids import rank_list

if TYPE_CHECKING:
    from syncvar.protocol.control_messages import Message

MISMATCH = (
    "the ranks do not make the same call. Write the same calls in the same order on every rank, "
    "with the same shape and dtype, and none of them inside `if sv.rank() == 0:`"
)
DEADLOCK = "deadlock: each rank in the table waits for the next one"
NOT_REPORTED = "has not reported"
NO_THREAD_ANSWERS = "no Python thread answers"

_GROUPS_MAX = 4
_TEXT_MAX = 400


def call_text(call: str, ordinal: int, site: str) -> str:
    """Return a call with its number and its place in the program."""
    return f"{call} (call {ordinal}) at {site}"


def deadlock_row(call: str, next_rank: int) -> str:
    """Return a rank's line in the table of a deadlock."""
    return f"waits in {call} for rank {next_rank}"


def stall_sentence(
    waiting: list[int], waited_s: float, call: str, late: list[int], other_calls: dict[int, str]
) -> str:
    """Return which ranks wait in a call, for how long, and for which ranks.

    Args:
        waiting: Ranks that wait.
        waited_s: Time since the first of them began to wait, in seconds.
        call: Text of the call.
        late: Ranks that have not entered the call.
        other_calls: For each late rank that waits in another call: text of that call.
    """
    waits = f"{rank_list(waiting)} {_have(waiting)} been waiting {waited_s:.0f} s in {call}: "
    if late:
        waits += f"{rank_list(late)} {_have(late)} not entered it"
    else:
        waits += "all ranks have entered it, and data are missing"
    return waits + "".join(f"; rank {rank} waits in {other}" for rank, other in other_calls.items())


def _have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def last_activity(answer: Message) -> str:
    """Return a late rank's last call and its stack, from its answer to "are_you_there"."""
    text = "no call yet"
    if answer["last"]:
        age = f"{answer['age_s']:.0f} s"
        when = f"{age} ago" if answer["is_over"] else f"under way for {age}"
        text = f"last call {answer['last'][:_TEXT_MAX]}, {when}"
    return text + (f", now {answer['stack'][:_TEXT_MAX]}" if answer["stack"] else "")


def late_ranks_text(activity: dict[int, str]) -> str:
    """Return the activity of late ranks; ranks with equal texts share one."""
    groups: dict[str, list[int]] = {}
    for rank, text in activity.items():
        groups.setdefault(text, []).append(rank)
    texts = [f"; {rank_list(ranks)}: {text}" for text, ranks in groups.items()]
    return "".join(texts[:_GROUPS_MAX]) + ("; …" if len(texts) > _GROUPS_MAX else "")
