"""What persistent calls stand on: one guard, one number, one entry of the recorder, one way to hand over to the engine.

A small all-reduce of two ranks takes about a microsecond, so the path of a call has no object to make, no name to look up
and no lock to wait for. What is unusual (a known refusal, queued calls, an odd `out`) is left to the general way, and so is
a wait that takes long: the engine goes on from where the persistent call stands, and looks at the deadline.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native import slot_call
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.flight_recorder.call_record import CallInfo
from syncvar.runtime.flight_recorder.call_sites import site_of
from syncvar.runtime.gil_contention import crowd
from syncvar.runtime.programs.program_runner import DISAGREE
from syncvar.runtime.programs.shm_reduce import is_alone
from syncvar.runtime.request import Request
from syncvar.runtime.timeouts import checked_timeout
from syncvar.runtime.work import Work
from syncvar.shm.channel_table import MASK, SPREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.core.pytree import PyTree
    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.progress import ProgressEngine
    from syncvar.shm.group_channel import Channel

    Said = tuple[str, int]  # a call in words, and its fingerprint
    Attempt = Callable[[int, int, Any], tuple[Any, Any, int, Any]]

__all__ = ["DtypeGroup", "PersistentCallBuilder", "as_far_as_others_come", "preparation_of"]


def preparation_of(
    communicator: Communicator, what: str, digest: int, nbytes: int, way: str
) -> PersistentCallBuilder | None:
    """Return what a persistent call stands on; None where there is no channel to others, or no call is prepared."""
    channel, engine = communicator.channel, communicator.engine
    if (
        not communicator.prepares
        or channel is None
        or engine is None
        or not channel.is_open
        or channel.size == 1
    ):
        return None
    told = CallInfo(what, communicator.identity, communicator.members, digest, nbytes, way)
    return PersistentCallBuilder(communicator, channel, engine, told)


class DtypeGroup(NamedTuple):
    """Arrays of one kind among those that a call through small slots takes.

    Args:
        how: What becomes of their terms, as `Arithmetic.native` has it.
        dtype: Of the arrays.
        start: Where in a slot their vector begins.
        places: Of the arrays among all.
    """

    how: tuple[Any, ...]
    dtype: np.dtype[Any]
    start: int
    places: Sequence[int]


class PersistentCallBuilder(NamedTuple):
    """What a persistent call stands on, and how the engine takes over from it."""

    communicator: Communicator
    channel: Channel
    engine: ProgressEngine
    told: CallInfo

    def saying(self, said: Said | None) -> PersistentCallBuilder:
        """Return the same for a call with words and a fingerprint of its own."""
        return (
            self
            if said is None
            else self._replace(told=self.told._replace(what=said[0], fingerprint=said[1]))
        )

    def _operation(self, number: int, begin: int, steps: Any, need: int) -> Request:
        return Request(
            self.engine.recorder.begin(self.told, number, begin), steps, self.channel, wait=need
        )

    def go_on(
        self,
        number: int,
        begin: int,
        steps: Any,
        need: int,
        held: Any = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Let the engine wait: it hears the launcher, advances other calls, and knows deadlines."""
        operation = self._operation(number, begin, steps, need)
        operation.held = held
        return self.engine.take_over(
            operation, None if timeout is None else checked_timeout(timeout)
        )

    def plainly(
        self, arrays_of: Callable[[Any, Any], Any], attempt: Attempt, *, notes: bool = False
    ) -> PreparedCall:
        """Return what makes such calls in Python: it guards, numbers, records and hands over, whatever the call does.

        Args:
            arrays_of: Of (x, out): what a call works on, or None where the general way has to be taken; it tells nobody anything.
            attempt: Of (number, check, what it works on): publishes the call, and goes on as long as the others come soon. It returns
                (result, None, 0, None); or (_, steps, need, held) where the engine has to go on: what is left of the call, whose return
                value is its result, what the others have to reach first, and what they may read as long as the call is under way.
            notes: How long a call took tells whether other threads hold the interpreter's lock.
        """
        communicator, channel, engine, told = self
        queue, busy, digest, add, clock = (
            channel.queue,
            communicator.busy,
            told.fingerprint,
            engine.recorder.add,
            monotonic_ns,
        )

        def call(
            x: NDArray[Any], out: Any, said: Said | None = None, timeout: float | None = None
        ) -> Any:
            if (
                queue
                or busy.locked()
                or not (engine.is_quiet and channel.is_settled)
                or (engine.driver and engine.driver == get_ident())
            ):
                return None
            try:
                arrays = arrays_of(x, out)
            except Exception:  # no memory: the call has no number yet, and the general way raises it again and tells the others
                return None
            if arrays is None:
                return None
            with busy:
                if queue:
                    return None
                number = communicator.next_call
                communicator.next_call = number + 1
                begin = clock()
                try:
                    made, steps, need, held = attempt(
                        number,
                        ((digest if said is None else said[1]) + number * SPREAD) & MASK,
                        arrays,
                    )
                    if steps is None:
                        add(
                            (
                                told if said is None else self.saying(said).told,
                                number,
                                begin,
                                clock(),
                                get_ident(),
                            )
                        )
                        return made
                except BaseException as error:
                    self.saying(said).interrupt(number, begin, error)
                    raise
                made = self.saying(said).go_on(number, begin, steps, need, held, timeout=timeout)
                if notes:
                    crowd.note((clock() - begin) / 1e9, told.nbytes)
                return made

        return call

    def natively(
        self,
        plain: PreparedCall,
        later: Any,
        *,
        divisor: NDArray[Any] | None = None,
        fold: Any = None,
        apply: Any = None,
        detail: int = 0,
        tells: bool = False,
        nothing: NDArray[Any] | None = None,
        steps: Callable[[int, Any], Any] | None = None,
        leaves: PyTree | None = None,
        kinds: Sequence[DtypeGroup] = (),
        **copies: Any,
    ) -> PreparedCall | None:
        """Return what runs a call through small slots in C, or None where Python has to.

        Args:
            plain: Runs it in Python; takes every call that is unusual, before anything has been changed.
            later: Of (number, begin, x, out, where the result goes, said, run, the C runner): goes on with a call that has been published, and
                whose run, if it is not None, has begun; returns (True, result), or (False, steps) where the engine has to go on.
            divisor: What a mean is divided by, as an array of no dimensions.
            fold: The ufunc by which terms are combined; None where nothing is.
            apply: The result becomes apply(out, combination).
            detail: What may differ between ranks, see `Layout` of `moves`.
            tells: The call's own check is published beside the one with the detail.
            nothing: The result where this rank gets nothing: callers of such calls are given None in its place. None for any other call.
            steps: Of (number, where the result goes): what is left of a call that has been published; None where calls cannot be begun and
                waited for later.
            leaves: Of calls that take several arrays as one flat vector: such arrays. Within a call they are tuples of arrays.
            kinds: Of these: then the vector is bytes, or of the long arrays of the first kind. Else all are of one kind.
            copies: The forms of what is brought and made; and where there are any, `puts`, `takes` and `terms`, (from, to, nbytes, rank) of
                what goes where, `ring`, the `crowd` of a long vector, and `everyone`, False where not everybody ends with all of it; `half`
                where arrays of halves are float32 in the slots.
        """
        if not self.channel.is_native:
            return None
        layout: dict[str, Any] = {
            "crowd": None,
            "puts": (),
            "takes": (),
            "terms": (),
            "ring": -1,
            "parts": 0,
            "half": 0,
            "reads": False,
            "everyone": True,
            **copies,
        }

        def hand_over(
            number: int, begin: int, steps: Any, said: Said | None, timeout: float | None
        ) -> Any:
            made = self.saying(said).go_on(number, begin, steps, self.channel.last, timeout=timeout)
            if layout["crowd"] is not None:
                crowd.note((monotonic_ns() - begin) / 1e9, self.told.nbytes)
            return made

        def interrupt(number: int, begin: int, error: BaseException, said: Said | None) -> None:
            self.saying(said).interrupt(number, begin, error)

        def adopt(
            number: int,
            begin: int,
            made: Any,
            timeout: float | None,
            site: Any,
            instruction: int | None,
        ) -> Request:
            """Let the engine go on with a call that is first in the channel's queue, and stays it."""
            assert steps is not None
            operation = self._operation(number, begin, steps(number, made), self.channel.last)
            operation.site = site if instruction is None else site_of(site, instruction)
            self.channel.queue.popleft()
            self.engine.start(
                operation, None if timeout is None else checked_timeout(timeout), begin / 1e9
            )
            return operation

        in_slots = np.dtype(np.float32) if layout["half"] else layout["made"][0]
        division = (None, b"") if divisor is None else (np.divide, divisor.tobytes())
        how = (in_slots.itemsize, in_slots, layout["half"], fold, *division, apply)
        arrays = () if leaves is None else leaves.arrays
        kinds = (
            kinds or [DtypeGroup(how, layout["made"][0], 0, range(len(arrays)))]
            if leaves is not None
            else ()
        )
        kind_of = {place: number for number, kind in enumerate(kinds) for place in kind.places}
        made: PreparedCall | None = slot_call(
            self.told.fingerprint,
            detail,
            tells,
            layout["brought"],
            layout["made"],
            layout["puts"],
            layout["takes"],
            layout["terms"],
            how,
            layout["ring"],
            layout["parts"],
            layout["everyone"],
            layout["reads"],
            tuple(
                [
                    (
                        kind.how,
                        kind.dtype,
                        kind.start,
                        sum([arrays[place].size for place in kind.places]),
                    )
                    for kind in kinds
                ]
            ),
            tuple(
                [
                    (
                        array.shape,
                        len(kinds[kind_of[place]].places) > 1 and is_alone(array),
                        kind_of[place],
                    )
                    for place, array in enumerate(arrays)
                ]
            ),
            structure=None if leaves is None else leaves.structure,
            leaves_type=None if leaves is None else type(leaves),
            channel=self.channel,
            queue=self.channel.queue,
            engine=self.engine,
            communicator=self.communicator,
            busy=self.communicator.busy,
            add=self.engine.recorder.add,
            told=self.told,
            plain=plain,
            later=later,
            hand_over=hand_over,
            interrupt=interrupt,
            saying=lambda said: self.saying(said).told,
            begun=self.engine.begun,
            work=Work,
            adopt=None if steps is None else adopt,
            crowd=layout["crowd"],
            nothing=nothing,
        )
        return made

    def interrupt(self, number: int, begin: int, error: BaseException) -> None:
        """Break the generation: an exception has left a call that others take part in."""
        operation = self._operation(number, begin, iter(()), 0)
        self.channel.queue.clear()
        self.engine.interrupted(operation, error)


def as_far_as_others_come(channel: Channel, steps: Iterable[int], number: int) -> int | None:
    """Go on with a call as long as the others come soon; returns what they have to reach then, or None at its end."""
    wait, others, limit = (
        channel.hold if crowd.holds() else channel.wait,
        channel.others,
        (number << 1) + 4,
    )
    with quiet():  # what overflows is infinite, on all ranks
        for need in steps:
            if need == DISAGREE or not wait(others, need, limit):
                return need
    return None
