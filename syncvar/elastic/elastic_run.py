"""`sv.elastic.run`: call a function again from the last commit whenever the members change."""

from __future__ import annotations

import functools
import logging
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from syncvar.bootstrap.enrollment import Dismissed, enrollment
from syncvar.bootstrap.process import is_broken
from syncvar.core.errors import (
    ConfigError,
    DeadlineExceeded,
    GroupBroken,
    MismatchError,
    PeerLost,
    RendezvousError,
    error_line,
)
from syncvar.core.exit_status import NOTICE_ECHO_S
from syncvar.core.fork_cleanup import handle_signal, release_signal
from syncvar.elastic.elastic_state import State, held_by
from syncvar.elastic.held_objects import MembershipChange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from syncvar.bootstrap.enrollment import Enrollment
    from syncvar.core.errors import SyncvarError

_LOSSES = (PeerLost, GroupBroken, RendezvousError)
_ANSWER_S = 0.5  # for news from the launcher that the whole job ends
_log = logging.getLogger("syncvar")


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a state go on when workers of an elastic job come and go.

    Before the call each worker is a world of one. The call joins the others, moves the objects of
    the state to this world, and gives all members the same values. When a member is lost, or the
    job changes its members at a commit, the workers that live join the next generation in the same
    process. The state goes back to the last commit, and `function` is called again from its
    beginning. So the function reads from the state how far it is.

    In a job that is not elastic, the function is called once.

    Args:
        function: Function whose first argument is a `sv.elastic.State`. It makes its calls with the
            ranks of the present generation, and calls `state.commit()` after each step or after
            some steps.

    Returns:
        The decorated function. It returns what `function` returns, after all members have made one
        more commit.

    Raises:
        ConfigError: The first argument is no `sv.elastic.State`.
        SystemExit: With code 0 in a worker that the job does not need: a spare worker at the end,
            or one that has asked to leave (SIGTERM).

    Cost: After a loss, one handshake and what `function` does again since the last commit. A
        newcomer takes the state from one member, by broadcast.

    Example:
        >>> import numpy as np
        >>> import syncvar as sv
        >>> state = sv.elastic.State(w=sv.Variable(np.zeros(2), aggregation="MEAN"), step=0)
        >>> @sv.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         state.w.assign_add(np.ones(2))
        ...         state.step += 1
        ...         state.commit()
        >>> train(state)
        >>> state.w.numpy().tolist(), state.step
        ([3.0, 3.0], 3)

    Source: the decorator and the state have the form of Horovod's elastic API.
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise ConfigError(
                f"the first argument of {function.__qualname__} is {state!r:.60}, not a "
                "sv.elastic.State: write state = sv.elastic.State(w=w, step=0)"
            )
        channel = enrollment()
        if channel is None:
            held_by(state).synchronize()
            return function(state, *args, **kwargs)
        return _ElasticRun(function, state, channel).run(args, kwargs)

    return elastic


class _ElasticRun:
    """One call of an elastic function, over all generations."""

    def __init__(self, function: Callable[..., Any], state: State, channel: Enrollment) -> None:
        self._function, self._state, self._channel = function, state, channel
        self._held = held_by(state)
        self._held.membership = channel
        self._newest_at_deadline = -1  # the newest commit when a deadline passed last
        self._is_leaving = False
        self._signalled_at = 0.0  # when SIGTERM came first
        self._is_member = False
        self._has_returned = False
        self._result: Any = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function until it has returned on all members of a generation."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            handle_signal(signal.SIGTERM, self._leave_soon)
        try:
            while not self._has_ended(args, kwargs):
                pass
        finally:
            if is_main:
                release_signal(signal.SIGTERM, self._leave_soon)
        return self._result

    def _has_ended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Live through one generation; return whether the function has returned on all members."""
        try:
            context = self._channel.join_next(self._held.holds()[0])
            self._is_member = True
            if self._is_leaving:  # perhaps there are enough others now
                self._channel.ask_to_leave()
            _log.info(
                "generation %d: rank %d of %d", context.generation, context.rank, context.world_size
            )
            self._held.moves_to_current_world()
            self._held.synchronize()
            self._has_returned = False
            self._result = self._function(self._state, *args, **kwargs)
            self._has_returned = True
            self._state.commit()  # the last one: all members have returned
        except MembershipChange:
            return False  # also to leave: perhaps a newcomer must take the state from here first
        except Dismissed:
            if self._is_leaving:  # a later SIGTERM asks for what is being done
                handle_signal(signal.SIGTERM, signal.SIG_IGN)
            if not self._has_returned or self._is_leaving:
                sys.exit(0)
            return True  # another member has completed the last commit, so this one counts too
        except Exception as error:
            loss = self._loss_behind(error)
            if loss is None:
                raise
            _log.info("leaving generation %d: %s", self._channel.generation, error_line(loss))
            return False
        finally:
            self._is_member = False
        self._channel.announce_end()
        return True

    def _loss_behind(self, error: Exception) -> SyncvarError | None:
        """Return the loss of a member that an exception comes from; None for other exceptions.

        When a rank leaves its call with an exception of its own, the others raise MismatchError.
        That rank ends, and the launcher says so a little later. A rank that hangs does not enroll,
        so the launcher ends it, and the others go on.
        """
        chain = list(_chain(error))
        loss: SyncvarError | None = next((one for one in chain if isinstance(one, _LOSSES)), None)
        late = next((one for one in chain if isinstance(one, DeadlineExceeded)), None)
        mismatch = next((one for one in chain if isinstance(one, MismatchError)), None)
        if loss is None and late is not None:
            _, newest = self._held.holds()
            if newest != self._newest_at_deadline:  # else the program cannot go on
                loss, self._newest_at_deadline = late, newest
        if loss is None and mismatch is not None and is_broken(self._channel.abort_grace_s):
            loss = mismatch
        return loss

    def _leave_soon(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM: leave at the next commit, or at once if the whole job ends."""
        now, was_leaving = time.monotonic(), self._is_leaving
        if was_leaving and now - self._signalled_at < NOTICE_ECHO_S:
            return
        self._is_leaving, self._signalled_at = True, now  # first: the wait below may be interrupted
        if was_leaving or not self._is_member or self._channel.is_dismissed(_ANSWER_S):
            _end_now()
        self._channel.ask_to_leave()


def _end_now() -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it comes from: libraries wrap what a call raises."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
