"""What this process tells its launcher, and what it hears from it: the channel is the driver's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.wire import pack_message

if TYPE_CHECKING:
    from syncvar.engine.turns import Turns
    from syncvar.transports import Control
    from syncvar.wire import Message

__all__ = ["LauncherLink"]

_REASON_MAX = 2000  # characters


class LauncherLink:
    """The channel to the launcher.

    Args:
        control: The channel.
        turns: Knows who drives, for words of other threads.
    """

    def __init__(self, control: Control, turns: Turns) -> None:
        self._control = control
        self._turns = turns

    def receive(self) -> Message | None:
        """Return the next message, as the driver; None when there is none."""
        return self._control.receive()

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message, as the driver."""
        self._control.send(pack_message(kind, **fields))

    def tell_beside(self, kind: str, **fields: Any) -> None:
        """Send a message from any thread: the channel belongs to whoever holds the lock."""
        data = pack_message(kind, **fields)
        self._turns.leave_errand(lambda: self._control.send(data))

    def poison(self, group: int, members: tuple[int, ...], call: int, what: str, reason: str) -> None:
        """Tell the group that this rank's call had a bad argument: the others raise MismatchError at once."""
        self.tell_beside("poison", group=group, members=list(members), call=call, what=what, reason=reason[:_REASON_MAX])

    def left_run(self, group: int, members: tuple[int, ...], call: int, epoch_end: int, reason: str) -> None:
        """Tell the group that this rank makes none of its calls after `call`, up to `epoch_end`."""
        self.tell_beside(
            "left_run", group=group, members=list(members), call=call, epoch_end=epoch_end, reason=reason[:_REASON_MAX]
        )
