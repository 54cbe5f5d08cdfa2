"""A persistent call: a call that has been described and compiled once, and is then only repeated.

`PersistentCall` has the description (`CallInfo`) and a program of this rank (`SharedProgram`). The
C extension runs a repetition, or Python does. Both run the program of a long call; in a short one C
makes the same copies and combinations without it. Unusual calls (the engine refuses calls, writes
are queued, `out` does not fit) take the slow path. If the others do not come while this rank spins,
the engine continues the call from where it is, and enforces the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from syncvar._native import native_call
from syncvar._native.constants import Need
from syncvar.core.reduce_ops import quiet_caller
from syncvar.runtime.arithmetic import gil_monitor
from syncvar.runtime.call_record import CallInfo, site_of
from syncvar.runtime.program_runner import settled
from syncvar.runtime.request import Request
from syncvar.runtime.work import Work, checked_timeout
from syncvar.shm.channel_table import check_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from syncvar.core.pytree import PyTree
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.progress import ProgressEngine
    from syncvar.shm.group_channel import GroupChannel


class BoundArrays(Protocol):
    """The arrays of one repetition."""

    @property
    def result(self) -> Any:
        """The caller's result, once the program has run."""

    @property
    def held(self) -> Any:
        """What other ranks may read until the call is over; None for nothing."""

    @property
    def inputs_differ(self) -> bool:
        """Whether the program has ended without a result: the inputs of the ranks differ."""

    def slow_path(self) -> Generator[Any, None, Any]:
        """Return the steps of a call whose inputs differ; they return the result."""


class SharedProgram(Protocol):
    """What this rank does in each repetition; its steps yield needs."""

    def bind(self, x: Any, out: Any) -> BoundArrays | None:
        """Return the arrays of a call; None, or an error, for the slow path."""

    def bind_copy(self, x: Any, out: Any) -> BoundArrays | None:
        """Return the same with a copy of the input, which the caller may change."""

    def bind_output(self, x: Any, out: Any, output: Any) -> BoundArrays:
        """Return the arrays of a call that the C extension has begun, and whose output it made."""

    def run(self, opening: tuple[int, int], arrays: Any) -> Iterator[int]:
        """Return the steps of a whole call; `opening` is (call number, check)."""

    def resume(self, check: int, arrays: Any, suspended: Any, native: Any) -> Iterator[int]:
        """Return the rest of a call that the C extension has published.

        `suspended` is its run of the program, if it has begun one. `native` gets the program of its
        placement.
        """


class PersistentCall:
    """A call that a group repeats.

    Args:
        communicator: The group, which has an open channel.
        info: Description of each repetition.
        program: What this rank does in it.
        is_timed: Whether long waits are reported to `gil_monitor`.
    """

    def __init__(
        self,
        communicator: Communicator,
        info: CallInfo,
        program: SharedProgram,
        *,
        is_timed: bool,
    ) -> None:
        assert communicator.channel is not None
        assert communicator.engine is not None
        self.communicator = communicator
        self.channel: GroupChannel = communicator.channel
        self.engine: ProgressEngine = communicator.engine
        self.info, self.program, self.is_timed = info, program, is_timed
        self._call_quietly = quiet_caller()  # overflow gives infinity, on all ranks

    def info_of(self, spec: CollectiveSpec | None) -> CallInfo:
        """Return the record's part of one repetition, which may have a description of its own."""
        if spec is None:
            return self.info
        return self.info._replace(spec=spec, fingerprint=spec.fingerprint)

    def __call__(
        self, x: Any, out: Any, spec: CollectiveSpec | None = None, timeout: float | None = None
    ) -> Any:
        """Make the call in Python; return None, having done nothing, for the slow path."""
        channel, engine, communicator = self.channel, self.engine, self.communicator
        busy = communicator.busy
        if channel.queue or not self._may_begin():
            return None
        try:
            arrays = self.program.bind(x, out)
        except Exception:
            # No memory. The call has no number yet: the slow path raises it, and informs the group.
            return None
        if arrays is None:
            return None
        with busy:
            if channel.queue:
                return None
            number = communicator.next_call
            communicator.next_call = number + 1
            began = monotonic_ns()
            info = self.info if spec is None else self.info_of(spec)
            try:
                request = self._run(info, number, began, arrays)
                if request is None:
                    engine.recorder.add((info, number, began, monotonic_ns(), get_ident()))
                    return arrays.result
            except BaseException as error:
                self.interrupt(number, began, error, spec)
                raise
            return self.continue_in_engine(request, began, timeout)

    def start(  # noqa: PLR0913, PLR0917  (also called by the C extension)
        self,
        x: Any,
        out: Any,
        timeout: float | None,
        site: Any,
        instruction: int | None = None,
    ) -> Work | None:
        """Start the call; return None, having done nothing, for the slow path.

        `site` is the text of the call site. With `instruction` it is a code object, and the text is
        made from both.
        """
        channel, engine, communicator = self.channel, self.engine, self.communicator
        if engine.async_calls:
            engine.continue_async_calls()  # they are before this call in the channel's queue
        if not self._may_begin():
            return None
        try:
            arrays = self.program.bind_copy(x, out)
        except Exception:
            return None  # as in `__call__`
        if arrays is None:
            return None
        with communicator.busy:
            number = communicator.next_call
            communicator.next_call = number + 1
            began = monotonic_ns()
            try:
                opening = number, check_of(self.info.fingerprint, number)
                steps = _settled_steps(channel, self.program.run(opening, arrays), arrays)
                request = self._request(self.info, number, began, steps, Need.AT_ONCE, arrays.held)
                request.site = _site_text(site, instruction)
            except BaseException as error:
                self.interrupt(number, began, error, None)
                raise
            engine.start(request, _allowed_s(timeout))
        if not request.is_over:
            engine.transport.wake()  # the progress thread continues it
        return Work(engine, request)

    def _may_begin(self) -> bool:
        """Return whether the engine admits calls, and no other thread is in a call of the group."""
        engine = self.engine
        return (
            engine.is_quiet
            and self.channel.is_settled
            and not self.communicator.busy.locked()
            and not (engine.driver and engine.driver == get_ident())
        )

    def _run(self, info: CallInfo, number: int, began: int, arrays: BoundArrays) -> Request | None:
        """Run the program while spinning; return the request of the rest, None for no rest."""
        steps = self.program.run((number, check_of(info.fingerprint, number)), arrays)
        # Runs the steps without NumPy's warnings, and spins between them.
        need = self._call_quietly(_run_while_spinning, self.channel, steps, number)
        if need is None:
            if not arrays.inputs_differ:
                return None
            need = self.channel.last
        return self._request(info, number, began, _rest(steps, arrays), need, arrays.held)

    def _request(  # noqa: PLR0913, PLR0917  (the parts of a request)
        self,
        info: CallInfo,
        number: int,
        began: int,
        steps: Any,
        need: int,
        held: Any = None,
        place: Any = None,
    ) -> Request:
        entry = self.engine.recorder.begin(info, number, began, place)
        request = Request(entry, steps, self.channel, wait=need)
        request.held = held
        return request

    def request_of_published(  # noqa: PLR0913, PLR0917  (called by the C extension)
        self,
        number: int,
        began: int,
        x: Any,
        out: Any,
        output: Any,
        spec: CollectiveSpec | None,
        suspended: Any,
        native: Any,
        place: Any = None,
    ) -> Request:
        """Return the rest of a call that `native` has published, and perhaps begun to run.

        `place` is the code and the instruction of a call that was started earlier.
        """
        info = self.info_of(spec)
        arrays = self.program.bind_output(x, out, output)
        check = check_of(info.fingerprint, number)
        steps = self.program.resume(check, arrays, suspended, native)
        rest, need = _rest(steps, arrays), self.channel.last
        return self._request(info, number, began, rest, need, arrays.held, place)

    def continue_in_engine(self, request: Request, began: int, timeout: float | None) -> Any:
        """Wait for the rest of a call in the engine, which enforces the deadline."""
        result = self.engine.take_over(request, _allowed_s(timeout))
        if self.is_timed:
            gil_monitor.note((monotonic_ns() - began) / 1e9, self.info.nbytes)
        return result

    def continue_async(  # noqa: PLR0913, PLR0917  (called by the C extension)
        self,
        number: int,
        began: int,
        x: Any,
        out: Any,
        output: Any,
        timeout: float | None,
        site: Any,
        instruction: int | None,
    ) -> Request:
        """Let the engine continue the started call that is first in the channel's queue."""
        place = site, instruction
        request = self.request_of_published(number, began, x, out, output, None, None, None, place)
        request.site = _site_text(site, instruction)
        self.channel.queue.popleft()
        self.engine.start(request, _allowed_s(timeout), began / 1e9)
        return request

    def interrupt(
        self, number: int, began: int, error: BaseException, spec: CollectiveSpec | None
    ) -> None:
        """Abort the job: an exception has left a call in which other ranks take part."""
        request = self._request(self.info_of(spec), number, began, iter(()), Need.DISAGREE)
        self.channel.queue.clear()
        self.engine.interrupted(request, error)


class DtypeGroup(NamedTuple):
    """Arrays of one dtype in a call through small slots."""

    arithmetic: tuple[Any, ...]  # arithmetic of their terms, as `Arithmetic.native` returns it
    dtype: np.dtype[Any]  # dtype of the arrays
    start: int  # start of their vector in a slot, in bytes
    elements: int  # elements of that vector


class NativeLeaf(NamedTuple):
    """One array of a pytree."""

    shape: tuple[int, ...]
    is_separate: bool  # long enough to be reduced by itself if it is in shared memory
    group: int  # its dtype group


@dataclass(frozen=True, slots=True)
class NativeCallSpec:
    """What the C extension needs to know about a persistent call.

    Args:
        call: The call, which continues what the extension has published.
        input_form, output_form: dtype and shape of the arrays.
        arithmetic: Arithmetic of the terms, as `Arithmetic.native` returns it; None for no terms.
        puts: Copies (from, to, nbytes, rank) of the input into this rank's slot.
        takes: Copies of slots, or of the input (rank -1), into the output.
        terms: Copies that are combined instead, in rank order.
        ring: Offset of the slots that take turns; 0 for none, -1 for the fixed slot.
        detail: Detail of the layout, see `TransferLayout`.
        moves_blocks: Whether it moves blocks. Then ranks publish the plain check beside the one
            with the detail, and the locations of long blocks.
        parts: The caller gets a list of so many parts of the output; 0 for the output itself.
        is_long: Whether the call runs a program on a long vector.
        is_everywhere: Whether all ranks get all of the combination.
        reads: Whether long blocks are read in the processes of their ranks.
        no_result: Output of a rank that gets none, returned to callers as None; None otherwise.
        pytree: Example arrays of a call with several arrays.
        leaves, groups: These arrays and their dtype groups.
    """

    call: PersistentCall
    input_form: tuple[np.dtype[Any], tuple[int, ...]]
    output_form: tuple[np.dtype[Any], tuple[int, ...]]
    arithmetic: tuple[Any, ...] | None = None
    puts: Sequence[tuple[int, int, int, int]] = ()
    takes: Sequence[tuple[int, int, int, int]] = ()
    terms: Sequence[tuple[int, int, int, int]] = ()
    ring: int = -1
    detail: int = 0
    moves_blocks: bool = False
    parts: int = 0
    is_long: bool = False
    is_everywhere: bool = True
    reads: bool = False
    no_result: NDArray[Any] | None = None
    pytree: PyTree | None = None
    leaves: Sequence[NativeLeaf] = ()
    groups: Sequence[DtypeGroup] = ()

    def values(self) -> dict[str, Any]:
        """Return what the extension copies; `native_call_new` has the same names."""
        dtype = self.output_form[0]
        return {
            "fingerprint": self.call.info.fingerprint,
            "detail": self.detail,
            "moves_blocks": self.moves_blocks,
            "input_form": self.input_form,
            "output_form": self.output_form,
            "puts": tuple(self.puts),
            "takes": tuple(self.takes),
            "terms": tuple(self.terms),
            "arithmetic": self.arithmetic or (dtype.itemsize, dtype, 0, None, None, b"", None),
            "ring": self.ring,
            "parts": self.parts,
            "is_everywhere": self.is_everywhere,
            "reads": self.reads,
            "is_long": self.is_long,
            "groups": tuple(self.groups),
            "leaves": tuple(self.leaves),
        }

    def objects(self) -> dict[str, Any]:
        """Return the objects that the extension reads and calls."""
        call = self.call
        return {
            "call": call,
            "channel": call.channel,
            "queue": call.channel.queue,
            "communicator": call.communicator,
            "busy": call.communicator.busy,
            "engine": call.engine,
            "add": call.engine.recorder.add_slot,
            "async_calls": call.engine.async_calls,
            "info": call.info,
            "work": Work,
            "gil_monitor": gil_monitor,
            "no_result": self.no_result,
            "structure": None if self.pytree is None else self.pytree.structure,
            "leaves_type": None if self.pytree is None else type(self.pytree),
        }

    def build(self) -> Any:
        """Return the call in C; None if Python has to run it."""
        return native_call(self) if self.call.channel.is_native else None


def may_persist(communicator: Communicator) -> bool:
    """Return whether the group has a cache of calls and an open channel with other ranks."""
    channel = communicator.channel
    return (
        communicator.keeps_persistent
        and channel is not None
        and communicator.engine is not None
        and channel.is_open
        and channel.size > 1
    )


def _allowed_s(timeout: float | None) -> float | None:
    """Return the seconds of a call; None for the job's default."""
    return None if timeout is None else checked_timeout(timeout)


def _site_text(site: Any, instruction: int | None) -> str:
    """Return the text of a call site, which is text or, with `instruction`, a code object."""
    return str(site) if instruction is None else site_of(site, instruction)


def _rest(steps: Iterator[int], arrays: BoundArrays) -> Generator[Any, None, Any]:
    """Run the remaining steps of a call, and return its result."""
    yield from steps
    if arrays.inputs_differ:
        return (yield from arrays.slow_path())
    return arrays.result


def _settled_steps(
    channel: GroupChannel, steps: Iterator[int], arrays: BoundArrays
) -> Generator[Any, None, Any]:
    """Return the steps of an asynchronous call; a call before it may have been abandoned."""
    yield from settled(channel)
    return (yield from _rest(steps, arrays))


def _run_while_spinning(channel: GroupChannel, steps: Iterator[int], number: int) -> int | None:
    """Run steps while spinning; return the need at which they stop, or None at the end."""
    wait = channel.hold if gil_monitor.is_alert and gil_monitor.holds() else channel.wait
    others, limit = channel.others, (number << 1) + 4
    for need in steps:
        if need == Need.DISAGREE or not wait(others, need, limit):
            return need
    return None
