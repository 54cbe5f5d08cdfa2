"""What a rank leaves behind: calls that it never makes, and messages that nobody has received.

Message number k of a (sender, receiver, tag) meets receive number k. Each leaving rank reports its
counts to the coordinator, and the difference is the number of unreceived messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# A leaving rank reports at most so many groups, and streams of sent messages: the latest ones.
ENTERED_MAX = 4000
STREAMS_MAX = 1000


class SkippedBlocks(dict[int, list[tuple[int, int]]]):
    """By group, the blocks (last call made, last number) whose remaining calls a rank skipped.

    Args:
        flat: (group, last call made, last number) of each block, flattened.
    """

    def __init__(self, flat: list[int]) -> None:
        super().__init__()
        for group, last, epoch_end in zip(flat[0::3], flat[1::3], flat[2::3], strict=False):
            self.setdefault(group, []).append((last, epoch_end))


def is_left_out(entered: Mapping[int, int], skipped: SkippedBlocks, group: int, call: int) -> bool:
    """Return whether a rank with these last calls and skipped blocks left before it made a call."""
    return call > entered.get(group, -1) or any(
        last < call <= epoch_end for last, epoch_end in skipped.get(group, ())
    )


class SentCount(NamedTuple):
    """Number of messages from a rank to another with one tag."""

    identity: int  # identity of the stream (sender, receiver, tag)
    dest: int  # world rank of the receiver
    tag: int  # the tag
    total: int  # number of messages
    site: str  # place of the first send in the program; empty if unknown


def pack_counts(counts: Iterable[SentCount]) -> dict[str, list[int] | dict[int, str]]:
    """Return counts as the fields `sent` and `sites` of the message "leave"."""
    sent: list[int] = []
    sites: dict[int, str] = {}
    for one in counts:
        sent += one[:4]
        if one.site:
            sites[one.identity] = one.site
    return {"sent": sent, "sites": sites}


def unreceived_text(source: int, one: SentCount, missing: int) -> str:
    """Return the sentence about messages that no rank has received."""
    many = missing > 1
    receiver = "it" if source == one.dest else f"rank {one.dest}"
    dest = "itself" if source == one.dest else receiver
    site = ""
    if one.site:
        site = f" at {one.site}" if one.total == 1 else f" (the first of {one.total} at {one.site})"
    count = f"{missing} messages" if many else "a message"
    return (
        f"rank {source} sent {count} with tag {one.tag} to {dest}{site}, and {receiver} ended "
        f"without receiving {'them' if many else 'it'}: call sv.recv({source}, tag={one.tag}) on "
        f"rank {one.dest}, or leave out the send"
    )


class UnreceivedMessages:
    """Counts of the ranks that have left one version of the membership."""

    def __init__(self) -> None:
        self._received: dict[int, Mapping[int, int]] = {}
        self._sent: dict[int, list[SentCount]] = {}

    def leave(
        self, rank: int, entered: Mapping[int, int], sent: list[int], sites: Mapping[int, str]
    ) -> list[str]:
        """Record the counts of a leaving rank; return a sentence for each stream with leftovers.

        `entered` has its last call in each group, and a receive is a call of its stream.
        """
        columns = zip(sent[0::4], sent[1::4], sent[2::4], sent[3::4], strict=False)
        own = [SentCount(*column, sites.get(column[0], "")) for column in columns]
        self._received[rank] = entered
        self._sent[rank] = own
        return [
            unreceived_text(source, one, missing)
            for source, counts in sorted(self._sent.items())
            for one in counts
            if rank in (source, one.dest)
            for missing in self._missing(one)
        ]

    def _missing(self, one: SentCount) -> Iterator[int]:
        """Yield the number of unreceived messages, if the receiver has left and there are any."""
        received = self._received.get(one.dest)
        if received is None or (one.identity not in received and len(received) >= ENTERED_MAX):
            return
        missing = one.total - received.get(one.identity, -1) - 1
        if missing > 0:
            yield missing
