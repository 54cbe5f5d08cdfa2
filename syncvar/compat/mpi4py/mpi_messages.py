"""Messages of the mpi4py layer: MPI's matching of sends and receives over `sv.send` and `sv.recv`.

A communicator uses one tag of syncvar. Each message begins with a header that holds the tag of MPI.
So the messages of a sender keep their order whatever their tags are, as MPI demands. A receive of
any tag, a receive buffer that is too long, and a cancel need nothing from the core. A message above
`EAGER_BYTES` follows its header with a second tag, straight into the buffer of its receive. A
synchronous send waits for an acknowledgement, which the receiver sends at the match.

Messages move while the program is in a call of MPI, as in most MPI libraries.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py import mpi_objects
from syncvar.compat.mpi4py.mpi_errors import MpiException
from syncvar.compat.mpi4py.mpi_operations import Operation, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.compat.mpi4py.mpi_buffers import Region

    Bytes = NDArray[np.uint8]

EAGER_BYTES = 8192  # longest message that is sent together with its header
HEADER_TAG, DATA_TAG = 0, 1  # tags of syncvar
_HEADER = struct.Struct("<iiqq")  # flags, tag, bytes, number of the send
_HEADER_BYTES = _HEADER.size
_FOLLOWS, _SYNCHRONOUS, _ACKNOWLEDGES = 1, 2, 4  # flags
_READS_MAX = 1000  # messages of one look
_SPINS = 50  # looks before a wait sleeps
_SLEEP_MIN_S, _SLEEP_MAX_S = 2e-5, 1e-3

_send, _recv = sv.send, sv.recv


class ArrivedMessage:
    """A message that has come, with its data.

    Args:
        source: Rank of the sender in the communicator.
        tag: Tag of MPI.
        data: The bytes.
        acknowledge: Function to call when a receive takes the message, or None.
    """

    __slots__ = ("acknowledge", "data", "source", "tag")

    def __init__(
        self, source: int, tag: int, data: Bytes, acknowledge: Callable[[], None] | None
    ) -> None:
        self.source, self.tag, self.data = source, tag, data
        self.acknowledge = acknowledge

    def status(self) -> Status:
        """Return the status of the message."""
        return Status.of(self.source, self.tag, self.data.size)


class Interest:
    """Messages that somebody waits for.

    Args:
        source: Rank, or ANY_SOURCE.
        tag: Tag, or ANY_TAG.
    """

    __slots__ = ("source", "tag")

    def __init__(self, source: int, tag: int) -> None:
        self.source, self.tag = source, tag

    def fits(self, source: int, tag: int) -> bool:
        """Return whether a message is one of these."""
        return self.source in (source, const.ANY_SOURCE) and self.tag in (tag, const.ANY_TAG)


class SendOperation(Operation):
    """A send. It has ended when its buffer is free, and with `needs_match` not before its match."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Any = None  # of the core
        self.needs_match = False

    def is_over(self) -> bool:
        """Return whether the send has ended, without progress of others."""
        return not self.needs_match and (self.work is None or self.work.done())

    def test(self) -> bool:
        """Return whether the operation has ended, after a little progress."""
        if not self.is_over():
            MESSAGES.poll()
        return self.is_over()

    def wait(self) -> None:
        """Wait for the end."""
        work = self.work
        if self.needs_match or (work is not None and MESSAGES.is_receiving):
            MESSAGES.wait_first([self])
        if work is not None:
            work.wait()

    def matched(self) -> None:
        """Note that a receive has taken the message."""
        self.needs_match = False


class ReceiveOperation(Operation):
    """A receive.

    Args:
        port: Messages of the communicator.
        region: Buffer; None to receive an object.
        source: Rank, or ANY_SOURCE.
        tag: Tag, or ANY_TAG.
    """

    def __init__(self, port: MessagePort, region: Region | None, source: int, tag: int) -> None:
        super().__init__()
        self.port, self.region = port, region
        self.interest = Interest(source, tag)
        self.is_ended = False

    def is_over(self) -> bool:
        """Return whether the receive has ended."""
        return self.is_ended

    def test(self) -> bool:
        """Return whether the operation has ended, after a little progress."""
        if not self.is_ended:
            MESSAGES.poll()
        return self.is_ended

    def wait(self) -> None:
        """Wait for the end."""
        if not self.is_ended:
            MESSAGES.wait_first([self])

    def cancel(self) -> None:
        """Give up a receive that has found no message."""
        if not self.is_ended:
            self.port.withdraw(self)
            self.is_ended = self.is_cancelled = True

    def room(self, tag: int, source: int, nbytes: int) -> Bytes | None:
        """Return the memory into which the core may write a message, if this receive takes it."""
        region = self.region
        if region is None or not self.interest.fits(source, tag) or not region.layout.is_dense:
            return None
        if nbytes > region.nbytes or not region.memory.flags.writeable:
            return None
        return region.memory[region.origin : region.origin + nbytes]

    def take(self, message: ArrivedMessage, *, is_in_place: bool = False) -> None:
        """End with a message; `is_in_place` if its data are in the buffer already."""
        if message.acknowledge is not None:
            message.acknowledge()
        self.status = message.status()
        try:
            if self.region is None:
                self.value = self.object_of(message.data)
            elif not is_in_place:
                self.region.fill(message.data)
        except MpiException as error:
            self.error = error
            self.status.error = error.Get_error_code()
        self.is_ended = True

    @staticmethod
    def object_of(data: Bytes) -> Any:
        """Return the object of a message; None for an empty one."""
        return mpi_objects.pickle.loads(data.data) if data.size else None


class ProbeOperation(Operation):
    """A look for a message that nobody has received."""

    def __init__(self, port: MessagePort, source: int, tag: int) -> None:
        super().__init__()
        self.port = port
        self.interest = Interest(source, tag)

    def found(self) -> ArrivedMessage | None:
        """Return the first message that fits."""
        return self.port.first_arrived(self.interest)

    def is_over(self) -> bool:
        """Return whether a message has come."""
        return self.found() is not None


class CollectiveOperation(Operation):
    """A started collective.

    Args:
        work: Work of the core; None if nothing is left to do.
        finish: Function of its result, called once, or None.
    """

    def __init__(self, work: Any, finish: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._work, self._finish = work, finish
        self.status.source = self.status.tag = const.UNDEFINED

    def is_over(self) -> bool:
        """Return whether the collective has ended."""
        return self._work is None or self._work.done()

    def test(self) -> bool:
        """Return whether the operation has ended, after a little progress."""
        if not self.is_over():
            MESSAGES.poll()
            if not self.is_over():
                return False
        self._end()
        return True

    def wait(self) -> None:
        """Wait for the end."""
        if self._work is not None:
            if MESSAGES.is_receiving:
                MESSAGES.wait_first([self])
            self._end()

    def _end(self) -> None:
        work, finish = self._work, self._finish
        self._work = self._finish = None
        if work is not None:
            result = work.wait()
            try:
                self.value = result if finish is None else finish(result)
            except MpiException as error:
                self.error = error


class MessagePort:
    """The messages of one communicator at this rank.

    Args:
        group: Group of the core; None for the world.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._arrived: list[ArrivedMessage] = []
        self._receives: list[ReceiveOperation] = []  # in the order of their starts
        self._probes: list[ProbeOperation] = []
        self._unmatched: dict[int, tuple[int, SendOperation]] = {}  # number -> (dest, send)
        self._number = 0

    # -- sends

    def send_quick(self, data: Bytes, dest: int, tag: int) -> bool:
        """Send a short message to another rank; return whether that was possible.

        It is not while receives are open: the other rank may wait until they go on.
        """
        size = data.size
        if size > EAGER_BYTES or dest == self.rank or MESSAGES.is_receiving:
            return False
        message = np.empty(_HEADER_BYTES + size, np.uint8)
        _HEADER.pack_into(message.data, 0, 0, tag, size, 0)
        message[_HEADER_BYTES:] = data
        _send(message, dest, group=self.group)
        return True

    def send(
        self, data: Bytes, dest: int, tag: int, *, is_synchronous: bool = False, waits: bool = False
    ) -> SendOperation:
        """Send bytes; with `waits` perhaps return only when `data` may change."""
        operation = SendOperation()
        goes_on = not waits or MESSAGES.is_receiving
        if dest == self.rank:
            return self._send_to_self(data, tag, operation, is_synchronous=is_synchronous)
        flags = number = 0
        if is_synchronous:
            flags, self._number = _SYNCHRONOUS, self._number + 1
            number = self._number
            operation.needs_match = True
            self._unmatched[number] = dest, operation
            MESSAGES.attend(self)
        size = data.size
        if size <= EAGER_BYTES:
            message = np.empty(_HEADER_BYTES + size, np.uint8)
            _HEADER.pack_into(message.data, 0, flags, tag, size, number)
            message[_HEADER_BYTES:] = data
            work = _send(message, dest, group=self.group, async_op=goes_on)
            operation.work = None if work is None or work.done() else work
            return operation
        message = np.empty(_HEADER_BYTES, np.uint8)
        _HEADER.pack_into(message.data, 0, flags | _FOLLOWS, tag, size, number)
        _send(message, dest, group=self.group, async_op=goes_on)
        operation.work = _send(data, dest, tag=DATA_TAG, group=self.group, async_op=goes_on)
        return operation

    def _send_to_self(
        self, data: Bytes, tag: int, operation: SendOperation, *, is_synchronous: bool
    ) -> SendOperation:
        operation.needs_match = is_synchronous
        acknowledge = operation.matched if is_synchronous else None
        self._accept(ArrivedMessage(self.rank, tag, data.copy(), acknowledge))
        return operation

    # -- receives

    def receive_now(self, operation: ReceiveOperation) -> None:
        """Receive and wait."""
        interest = operation.interest
        source = interest.source
        if self._arrived and self._take_arrived(operation):
            return
        if MESSAGES.is_receiving or source in (const.ANY_SOURCE, self.rank):
            self._post(operation)
            MESSAGES.wait_first([operation])
            return
        while not operation.is_ended:
            self._read(source, operation)

    def receive_quick(
        self, region: Region, source: int, tag: int, status: Status | None
    ) -> ReceiveOperation | None:
        """Receive a short message into a buffer and wait, if nothing else is going on.

        Returns:
            None after that. Else the operation, which may have ended.
        """
        operation = ReceiveOperation(self, region, source, tag) if self._is_busy(source) else None
        if operation is None:
            data = _recv(source, group=self.group)
            flags, its_tag, size, _ = _HEADER.unpack_from(data.data)
            is_dense = region.layout.is_dense and size <= region.nbytes
            if is_dense and not flags and tag in (its_tag, const.ANY_TAG):
                origin = region.origin
                region.memory[origin : origin + size] = data[_HEADER_BYTES:]
                if status is not None:
                    status.assign(Status.of(source, its_tag, size))
                return None
            operation = ReceiveOperation(self, region, source, tag)
            self._handle(source, data, operation)
        if not operation.is_ended:
            self.receive_now(operation)
        return operation

    def _is_busy(self, source: int) -> bool:
        """Return whether a receive needs more than the next message of its source."""
        return bool(self._arrived) or MESSAGES.is_receiving or source in (-1, self.rank)

    def receive(self, operation: ReceiveOperation) -> None:
        """Receive, without a wait."""
        if not self._take_arrived(operation):
            self._post(operation)

    def _post(self, operation: ReceiveOperation) -> None:
        self._receives.append(operation)
        MESSAGES.attend(self)

    def withdraw(self, operation: ReceiveOperation) -> None:
        """Forget a receive that has not ended."""
        self._receives.remove(operation)
        MESSAGES.count(self)

    def _take_arrived(self, operation: ReceiveOperation) -> bool:
        message = self.first_arrived(operation.interest)
        if message is None:
            return False
        self._arrived.remove(message)
        operation.take(message)
        return True

    def first_arrived(self, interest: Interest) -> ArrivedMessage | None:
        """Return the first message that has come and that nobody has received."""
        for message in self._arrived:
            if interest.fits(message.source, message.tag):
                return message
        return None

    def remove(self, message: ArrivedMessage) -> None:
        """Take a message that has come, for a matched probe."""
        self._arrived.remove(message)

    def watch(self, probe: ProbeOperation) -> None:
        """Look for messages of a probe, too."""
        self._probes.append(probe)
        MESSAGES.attend(self)

    def unwatch(self, probe: ProbeOperation) -> None:
        """Forget a probe."""
        self._probes.remove(probe)
        MESSAGES.count(self)

    # -- progress

    @property
    def is_receiving(self) -> bool:
        """Whether a receive has not ended."""
        return bool(self._receives)

    def sources(self) -> set[int]:
        """Return the ranks from which somebody waits for a message; ANY_SOURCE for all."""
        found = {one.interest.source for one in self._receives}
        found.update(one.interest.source for one in self._probes)
        if const.ANY_SOURCE in found:
            return {const.ANY_SOURCE}
        found.update(dest for dest, _ in self._unmatched.values())
        return found - {self.rank}

    def poll(self) -> None:
        """Take messages that have come from the ranks of `sources`.

        One look takes so many at most. Else a rank that sends without end would hold this one up.
        """
        for source in self.sources() if self.size > 1 else ():
            wanted = None if source == const.ANY_SOURCE else source
            for _ in range(_READS_MAX):
                info = sv.probe(wanted, tag=HEADER_TAG, group=self.group, wait=False)
                if info is None:
                    break
                self._read(info.source, None)

    def wait(self, source: int) -> None:
        """Sleep until a message comes, from one rank or any."""
        wanted = None if source == const.ANY_SOURCE else source
        sv.probe(wanted, tag=HEADER_TAG, group=self.group)

    def _read(self, source: int, operation: ReceiveOperation | None) -> None:
        """Read the next message of a rank; `operation` takes it if it fits, before all others."""
        self._handle(source, _recv(source, group=self.group), operation)

    def _handle(self, source: int, data: Bytes, operation: ReceiveOperation | None) -> None:
        """Hand on a message that begins with a header."""
        flags, tag, size, number = _HEADER.unpack_from(data.data)
        if flags & _ACKNOWLEDGES:
            _, send = self._unmatched.pop(number)
            send.matched()
            MESSAGES.count(self)
            return
        if operation is None or not operation.interest.fits(source, tag):
            operation = self._receiver(source, tag)
        acknowledge = _Acknowledgement(self, source, number) if flags & _SYNCHRONOUS else None
        room = None
        if flags & _FOLLOWS:
            room = None if operation is None else operation.room(tag, source, size)
            data = _recv(source, tag=DATA_TAG, out=room, group=self.group)
        else:
            data = data[_HEADER_BYTES:]
        message = ArrivedMessage(source, tag, data, acknowledge)
        if operation is None:
            self._arrived.append(message)
        else:
            self._finish(operation, message, is_in_place=room is not None)

    def _accept(self, message: ArrivedMessage) -> None:
        """Hand a message of this rank to itself."""
        operation = self._receiver(message.source, message.tag)
        if operation is None:
            self._arrived.append(message)
        else:
            self._finish(operation, message, is_in_place=False)

    def _receiver(self, source: int, tag: int) -> ReceiveOperation | None:
        for operation in self._receives:
            if operation.interest.fits(source, tag):
                return operation
        return None

    def _finish(
        self, operation: ReceiveOperation, message: ArrivedMessage, *, is_in_place: bool
    ) -> None:
        if operation in self._receives:
            self.withdraw(operation)
        operation.take(message, is_in_place=is_in_place)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for a message."""
        return not (self._receives or self._probes or self._unmatched)


class _Acknowledgement:
    """Lets the sender of a synchronous message know that a receive has taken it."""

    __slots__ = ("_number", "_port", "_source")

    def __init__(self, port: MessagePort, source: int, number: int) -> None:
        self._port, self._source, self._number = port, source, number

    def __call__(self) -> None:
        message = np.empty(_HEADER_BYTES, np.uint8)
        _HEADER.pack_into(message.data, 0, _ACKNOWLEDGES, 0, 0, self._number)
        _send(message, self._source, group=self._port.group, async_op=True)


class MessageProgress:
    """The ports of all communicators for whose messages somebody waits."""

    def __init__(self) -> None:
        self._ports: list[MessagePort] = []
        self.is_receiving = False  # whether a receive has not ended

    def attend(self, port: MessagePort) -> None:
        """Look for messages of a port, too."""
        if port not in self._ports:
            self._ports.append(port)
        self.is_receiving = self.is_receiving or port.is_receiving

    def count(self, port: MessagePort) -> None:
        """Note that an operation of a port has ended."""
        if port.is_idle and port in self._ports:
            self._ports.remove(port)
        self.is_receiving = any(one.is_receiving for one in self._ports)

    def poll(self) -> None:
        """Take what has come."""
        for port in tuple(self._ports):
            port.poll()

    def wait_first(self, operations: Sequence[Any]) -> int:
        """Wait until one of several operations has ended; return its index."""
        spins, sleep_s = 0, _SLEEP_MIN_S
        timeout_s = current().config.collective_timeout_s
        until = time.monotonic() + timeout_s
        only_messages = not any(_works(one) for one in operations)
        while True:
            self.poll()
            for index, operation in enumerate(operations):
                if _is_over(operation):
                    return index
            spins += 1
            if only_messages and self._sleep():
                continue
            if time.monotonic() > until:
                text = f"none of {len(operations)} MPI requests ended within {timeout_s} s"
                raise sv.DeadlineExceeded(text, timeout_s=timeout_s)
            if spins > _SPINS:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _SLEEP_MAX_S)

    def _sleep(self) -> bool:
        """Sleep until a message comes, if there is one place to wait at."""
        places = [(port, source) for port in self._ports for source in port.sources()]
        places = [(port, source) for port, source in places if port.size > 1]
        if not places:
            raise MpiException(
                const.ERR_PENDING, "this rank waits for a message that only it can send"
            )
        if len(places) > 1:
            return False
        port, source = places[0]
        port.wait(source)
        return True

    def run(self, function: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        """Make a collective call of the core; receives that have begun go on meanwhile."""
        if not self.is_receiving:
            return function(*args, **options)
        operation = CollectiveOperation(function(*args, **options, async_op=True))
        operation.wait()
        return operation.value


def _works(operation: Any) -> bool:
    """Return whether an operation waits for something besides messages to this rank."""
    if isinstance(operation, SendOperation):
        return operation.work is not None
    return not isinstance(operation, ReceiveOperation | ProbeOperation)


def _is_over(operation: Any) -> bool:
    return bool(operation.is_over() if hasattr(operation, "is_over") else operation.test())


MESSAGES = MessageProgress()


def probe_once(port: MessagePort, source: int, tag: int) -> ArrivedMessage | None:
    """Return the first message that has come, or None."""
    probe = ProbeOperation(port, source, tag)
    found = probe.found()
    if found is None:
        port.watch(probe)
        try:
            MESSAGES.poll()
        finally:
            port.unwatch(probe)
        found = probe.found()
    return found


def probe_wait(port: MessagePort, source: int, tag: int) -> ArrivedMessage:
    """Wait for a message and return it."""
    probe = ProbeOperation(port, source, tag)
    if probe.found() is None:
        port.watch(probe)
        try:
            MESSAGES.wait_first([probe])
        finally:
            port.unwatch(probe)
    found = probe.found()
    assert found is not None
    return found
