"""Messages that a rank has sent and its peer has not received: what a rank reports of them when it leaves, and who compares.

Message number k of a pair and tag meets receive number k. So the sender's count and the receiver's count, which the
coordinator hears when each of them leaves, show how many messages nobody has received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ENTERED_MAX = 4000  # groups that a rank names when it leaves: those that it used last
STREAMS_MAX = (
    1000  # pairs and tags to which a leaving rank has sent messages: those that it used last
)


class SentCount(NamedTuple):
    """How many messages a rank has sent to another one with a tag.

    Args:
        identity: Of the calls of the pair and tag.
        dest: The receiver, in the world.
        tag: The tag.
        total: How many messages.
        site: Where the program sent the first of them; empty where nobody knows.
    """

    identity: int
    dest: int
    tag: int
    total: int
    site: str


def pack_counts(counts: Iterable[SentCount]) -> dict[str, list[int] | dict[int, str]]:
    """Return counts as the fields `sent` and `sites` of the message with which a rank leaves."""
    sent: list[int] = []
    sites: dict[int, str] = {}
    for one in counts:
        sent += one[:4]
        if one.site:
            sites[one.identity] = one.site
    return {"sent": sent, "sites": sites}


def unreceived_text(source: int, one: SentCount, missing: int) -> str:
    """Return the sentence that names messages which nobody has received.

    Example:
        >>> unreceived_text(0, SentCount(7, 1, 6, 1, "train.py:12 in <module>"), 1)  # doctest: +ELLIPSIS
        'rank 0 sent a message with tag 6 to rank 1 at train.py:12 in <module>, and rank 1 ended without receiving it: ...'
    """
    many = missing > 1
    receiver = "it" if source == one.dest else f"rank {one.dest}"
    dest = "itself" if source == one.dest else receiver
    site = ""
    if one.site:
        site = f" at {one.site}" if one.total == 1 else f" (the first of {one.total} at {one.site})"
    what = f"{missing} messages" if many else "a message"
    return (
        f"rank {source} sent {what} with tag {one.tag} to {dest}{site}, and {receiver} ended without receiving "
        f"{'them' if many else 'it'}: call sv.recv({source}, tag={one.tag}) on rank {one.dest}, or leave out the send"
    )


class UnreceivedMessages:
    """The counts of the ranks that have left one generation of a job."""

    def __init__(self) -> None:
        self._received: dict[int, Mapping[int, int]] = {}
        self._sent: dict[int, list[SentCount]] = {}

    def leave(
        self, rank: int, entered: Mapping[int, int], sent: list[int], sites: Mapping[int, str]
    ) -> list[str]:
        """Take the counts of a rank that leaves; return a sentence for each pair and tag with messages left over.

        Args:
            rank: Who leaves.
            entered: The last call that it entered in each group; a receive is a call of its pair and tag.
            sent: See `pack_counts`.
            sites: See `pack_counts`.
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
        """Yield how many messages the receiver has not received, if it has left and there are any."""
        received = self._received.get(one.dest)
        if received is None or (one.identity not in received and len(received) >= ENTERED_MAX):
            return
        missing = one.total - received.get(one.identity, -1) - 1
        if missing > 0:
            yield missing
