"""Builder of persistent calls: admission, numbering, flight record, and continuation in the engine.

A small all-reduce of two ranks takes about a microsecond. So the path of a call makes no object,
looks up no name and takes no lock that could block. Unusual calls (the engine refuses calls, writes
are queued, `out` does not fit) take the slow path. If the others do not come while this rank spins,
the engine continues the call from where it is, and enforces the deadline.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native import slot_call
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.arithmetic import gil_monitor
from syncvar.runtime.call_record import CallInfo, site_of
from syncvar.runtime.program_runner import DISAGREE
from syncvar.runtime.request import Request
from syncvar.runtime.shm_reduce import is_separate
from syncvar.runtime.work import Work, checked_timeout
from syncvar.shm.channel_table import MASK, SPREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.core.pytree import PyTree
    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.progress import ProgressEngine
    from syncvar.shm.group_channel import GroupChannel

    CallLabel = tuple[str, int]  # text and fingerprint of a call
    Attempt = Callable[[int, int, Any], tuple[Any, Any, int, Any]]


def builder_for(
    communicator: Communicator, label: str, digest: int, nbytes: int, way: str
) -> PersistentCallBuilder | None:
    """Return the builder of a persistent call; None without a channel or cache."""
    channel, engine = communicator.channel, communicator.engine
    if (
        not communicator.prepares
        or channel is None
        or engine is None
        or not channel.is_open
        or channel.size == 1
    ):
        return None
    call_info = CallInfo(label, communicator.identity, communicator.members, digest, nbytes, way)
    return PersistentCallBuilder(communicator, channel, engine, call_info)


class DtypeGroup(NamedTuple):
    """Arrays of one dtype in a call through small slots."""

    arithmetic: tuple[Any, ...]  # arithmetic of their terms, as `Arithmetic.native` returns it
    dtype: np.dtype[Any]  # dtype of the arrays
    start: int  # start of their vector in a slot, in bytes
    places: Sequence[int]  # indices of the arrays among all


class PersistentCallBuilder(NamedTuple):
    """Builds persistent calls, in Python and in C, and lets the engine continue them."""

    communicator: Communicator
    channel: GroupChannel
    engine: ProgressEngine
    info: CallInfo

    def with_label(self, label: CallLabel | None) -> PersistentCallBuilder:
        """Return a builder with the text and fingerprint of one call."""
        if label is None:
            return self
        return self._replace(info=self.info._replace(label=label[0], fingerprint=label[1]))

    def _operation(self, number: int, begin: int, steps: Any, need: int) -> Request:
        entry = self.engine.recorder.begin(self.info, number, begin)
        return Request(entry, steps, self.channel, wait=need)

    def continue_in_engine(
        self,
        number: int,
        begin: int,
        steps: Any,
        need: int,
        held: Any = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Let the engine continue a call: it polls the launcher and enforces deadlines."""
        operation = self._operation(number, begin, steps, need)
        operation.held = held
        allowed = None if timeout is None else checked_timeout(timeout)
        return self.engine.take_over(operation, allowed)

    def build_python(
        self, arrays_of: Callable[[Any, Any], Any], attempt: Attempt, *, notes: bool = False
    ) -> PreparedCall:
        """Build a persistent call in Python.

        Args:
            arrays_of: Function of (x, out) that returns the arrays of a call; None: slow path.
            attempt: Function of (number, check, arrays) that publishes the call, and continues
                while spinning. It returns (result, None, 0, None), or for the engine (_, remaining
                steps, publication to wait for, objects to keep alive).
            notes: Report the duration of waits, from which `gil_monitor` detects contention.
        """
        communicator, channel, engine, call_info = self
        queue, busy, digest = channel.queue, communicator.busy, call_info.fingerprint
        add, clock = engine.recorder.add, monotonic_ns

        def call(
            x: NDArray[Any], out: Any, label: CallLabel | None = None, timeout: float | None = None
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
            except Exception:
                # No memory. The call has no number yet: the slow path raises it, informs the group.
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
                    check = ((digest if label is None else label[1]) + number * SPREAD) & MASK
                    output, steps, need, held = attempt(number, check, arrays)
                    if steps is None:
                        info = call_info if label is None else self.with_label(label).info
                        add((info, number, begin, clock(), get_ident()))
                        return output
                except BaseException as error:
                    self.with_label(label).interrupt(number, begin, error)
                    raise
                output = self.with_label(label).continue_in_engine(
                    number, begin, steps, need, held, timeout=timeout
                )
                if notes:
                    gil_monitor.note((clock() - begin) / 1e9, call_info.nbytes)
                return output

        return call

    def build_native(  # noqa: PLR0913  (one spec object will replace them)
        self,
        plain: PreparedCall,
        later: Any,
        *,
        divisor: NDArray[Any] | None = None,
        fold: Any = None,
        apply: Any = None,
        detail: int = 0,
        publishes_check: bool = False,
        nothing: NDArray[Any] | None = None,
        steps: Callable[[int, Any], Any] | None = None,
        leaves: PyTree | None = None,
        kinds: Sequence[DtypeGroup] = (),
        **copies: Any,
    ) -> PreparedCall | None:
        """Build a persistent call in C, or return None if Python has to run it.

        Args:
            plain: The Python version; takes every unusual call before anything has changed.
            later: Function of (number, begin, x, out, output, label, run, C call). It continues a
                published call, and its run if not None. It returns (True, result), or (False,
                steps) for the engine.
            divisor: Divisor of a mean, as an array of no dimensions.
            fold: Ufunc that combines terms; None if nothing is combined.
            apply: The result becomes apply(out, combination).
            detail: Detail of the layout, see `TransferLayout`.
            publishes_check: Publish the plain check beside the one with the detail.
            nothing: Result of a rank that gets none, returned to callers as None. None otherwise.
            steps: Function of (number, output) that returns the remaining steps of a published
                call; None if calls cannot be asynchronous.
            leaves: Example arrays of a call with several arrays, which are tuples within a call.
            kinds: Their dtypes; the vector then is bytes, or the long arrays of the first kind.
            copies: `input_form` and `output_form`; copies `puts`, `takes` and `terms`: (from, to,
                nbytes, rank); `ring`; `parts`; `reads`; `gil_monitor` of a long vector;
                `everyone`, False if not all ranks get all of it; `half`, the half type that is
                float32 in slots.
        """
        if not self.channel.is_native:
            return None
        layout: dict[str, Any] = {"puts": (), "takes": (), "terms": (), "ring": -1, "parts": 0}
        layout |= {"gil_monitor": None, "half": 0, "reads": False, "everyone": True, **copies}

        def hand_over(
            number: int, begin: int, steps: Any, label: CallLabel | None, timeout: float | None
        ) -> Any:
            output = self.with_label(label).continue_in_engine(
                number, begin, steps, self.channel.last, timeout=timeout
            )
            if layout["gil_monitor"] is not None:
                gil_monitor.note((monotonic_ns() - begin) / 1e9, self.info.nbytes)
            return output

        def adopt(
            number: int,
            begin: int,
            output: Any,
            timeout: float | None,
            site: Any,
            instruction: int | None,
        ) -> Request:
            """Let the engine continue the call that is first in the channel's queue."""
            assert steps is not None
            operation = self._operation(number, begin, steps(number, output), self.channel.last)
            operation.site = site if instruction is None else site_of(site, instruction)
            self.channel.queue.popleft()
            allowed = None if timeout is None else checked_timeout(timeout)
            self.engine.start(operation, allowed, begin / 1e9)
            return operation

        in_slots = np.dtype(np.float32) if layout["half"] else layout["output_form"][0]
        division = (None, b"") if divisor is None else (np.divide, divisor.tobytes())
        arithmetic = (in_slots.itemsize, in_slots, layout["half"], fold, *division, apply)
        arrays = () if leaves is None else leaves.arrays
        if leaves is None:
            kinds = ()
        elif not kinds:
            kinds = [DtypeGroup(arithmetic, layout["output_form"][0], 0, range(len(arrays)))]
        group_of = {place: number for number, kind in enumerate(kinds) for place in kind.places}
        sizes = [sum([arrays[place].size for place in kind.places]) for kind in kinds]
        groups = [(*kind[:3], size) for kind, size in zip(kinds, sizes, strict=True)]
        shares = [len(kind.places) > 1 for kind in kinds]  # with other arrays of its dtype
        places = [
            (array.shape, shares[group_of[place]] and is_separate(array), group_of[place])
            for place, array in enumerate(arrays)
        ]
        native: PreparedCall | None = slot_call(
            self.info.fingerprint,
            detail,
            publishes_check,
            layout["input_form"],
            layout["output_form"],
            layout["puts"],
            layout["takes"],
            layout["terms"],
            arithmetic,
            layout["ring"],
            layout["parts"],
            layout["everyone"],
            layout["reads"],
            tuple(groups),
            tuple(places),
            structure=None if leaves is None else leaves.structure,
            leaves_type=None if leaves is None else type(leaves),
            channel=self.channel,
            queue=self.channel.queue,
            engine=self.engine,
            communicator=self.communicator,
            busy=self.communicator.busy,
            add=self.engine.recorder.add,
            info=self.info,
            plain=plain,
            later=later,
            hand_over=hand_over,
            interrupt=lambda number, begin, error, label: self.with_label(label).interrupt(
                number, begin, error
            ),
            with_label=lambda label: self.with_label(label).info,
            begun=self.engine.async_calls,
            work=Work,
            adopt=None if steps is None else adopt,
            gil_monitor=layout["gil_monitor"],
            nothing=nothing,
        )
        return native

    def interrupt(self, number: int, begin: int, error: BaseException) -> None:
        """Abort the job: an exception has left a call in which other ranks take part."""
        operation = self._operation(number, begin, iter(()), 0)
        self.channel.queue.clear()
        self.engine.interrupted(operation, error)


def run_while_spinning(channel: GroupChannel, steps: Iterable[int], number: int) -> int | None:
    """Run steps while spinning; return the publication to wait for, or None at the end."""
    wait = channel.hold if gil_monitor.holds() else channel.wait
    others, limit = channel.others, (number << 1) + 4
    with quiet():  # overflow gives infinity, on all ranks
        for need in steps:
            if need == DISAGREE or not wait(others, need, limit):
                return need
    return None
