"""Checks of the `Transport` contract (see `syncvar.transports.base`) for any implementation.

`check_transport` runs all checks. A test suite may run those of `TRANSPORT_CHECKS` one by one.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from syncvar.protocol.frame import FrameType, Header
from syncvar.transports.base import Frame, PeerDisconnected, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

_PATIENCE_S = 20.0
_QUIET_S = 0.1  # long enough for any frame to arrive on one machine
_SOON_S = 2.0
_GENERATION = 7


class TransportFactory:
    """Factory of connected worlds of a transport.

    Args:
        connect: Function of a number of ranks and a generation. It returns a context manager that
            yields one open transport for each rank, and closes them.
        nbytes_max: Largest payload of a frame, in bytes.
        lose: Function that disconnects a rank abruptly; by default it closes with a linger of 0.
    """

    def __init__(
        self,
        connect: Callable[[int, int], AbstractContextManager[Sequence[Transport]]],
        nbytes_max: int = 1 << 20,
        lose: Callable[[Sequence[Transport], int], None] | None = None,
    ) -> None:
        self.connect, self.nbytes_max = connect, nbytes_max
        self.lose = lose or (lambda world, rank: world[rank].close(0.0))


def check_transport(factory: TransportFactory) -> None:
    """Check that a transport fulfils its contract.

    Args:
        factory: Factory of its worlds.

    Raises:
        AssertionError: It does not; the message names the check and the observation.

    Example:
        >>> import contextlib
        >>> from syncvar.transports.in_memory import MemoryNetwork, MemoryTransport
        >>> @contextlib.contextmanager
        ... def connect(world_size, generation):
        ...     network = MemoryNetwork(world_size)
        ...     yield [MemoryTransport(network, rank) for rank in range(world_size)]
        >>> check_transport(TransportFactory(connect))
    """
    for name, check in TRANSPORT_CHECKS.items():
        try:
            check(factory)
        except AssertionError as error:
            raise AssertionError(f"{name.replace('_', ' ')}: {error}") from error


TRANSPORT_CHECKS: dict[str, Callable[[TransportFactory], None]] = {}


def _check(function: Callable[[TransportFactory], None]) -> Callable[[TransportFactory], None]:
    TRANSPORT_CHECKS[function.__name__.lstrip("_")] = function
    return function


# -- what arrives ----------------------------------------------------------------------------------


@_check
def _links_keep_order_lose_nothing_and_double_nothing(factory: TransportFactory) -> None:
    sizes = [0, 1, 3, 1000, 5000, 200_000]
    count = 120
    with factory.connect(3, _GENERATION) as world:
        seen = _Arrivals(world)
        for number in range(count):
            for source in range(3):
                for target in range(3):
                    if source != target:
                        nbytes = min(sizes[(number + source) % len(sizes)], factory.nbytes_max)
                        _send(world, source, target, number, nbytes, borrow=number % 2 == 0)
            if number % 16 == 0:
                seen.take()
        seen.until(
            lambda: all(len(seen.frames[rank]) >= 2 * count for rank in range(3)),
            "every frame to arrive",
        )
        seen.quietly()
        for target in range(3):
            for source in range(3):
                if source != target:
                    got = [one for one in seen.frames[target] if one.header.source == source]
                    numbers = [one.header.call for one in got]
                    assert numbers == list(range(count)), f"rank {source} to {target}: {numbers}"
                    for one in got:
                        _check_payload(one)
        seen.check_no_disconnect()


@_check
def _payloads_of_every_size_arrive_whole(factory: TransportFactory) -> None:
    most = factory.nbytes_max
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        sizes = [0, 1, 2, 4095, 4096, 65_537, most - 1, most]
        number = 0
        for nbytes in sizes:
            for borrow in (False, True):
                _send(world, 0, 1, number, nbytes, borrow=borrow)
                number += 1
        seen.until(lambda: len(seen.frames[1]) == number, "all sizes to arrive")
        assert [len(one.payload) for one in seen.frames[1]] == [
            nbytes for nbytes in sizes for _ in range(2)
        ]
        for one in seen.frames[1]:
            _check_payload(one)


@_check
def _header_fields_arrive_as_they_were_sent(factory: TransportFactory) -> None:
    big, long = (1 << 32) - 1, (1 << 64) - 1
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        wanted = [
            Header(FrameType.DATA, 1, _GENERATION, long, long - 1, big, big - 1, long - 2, 3),
            Header(FrameType.DATA, 1, _GENERATION, 0, 0, 0, 0, 0, 0),
            Header(FrameType.CREDIT, 1, _GENERATION, 5, 0, 0, 0, 0, 1 << 39),
        ]
        for header in wanted:
            payload = memoryview(bytes(header.nbytes)) if header.kind == FrameType.DATA else None
            world[1].send(0, Header(*header).pack(), payload)
        seen.until(lambda: len(seen.frames[0]) == len(wanted), "the headers to arrive")
        assert [one.header for one in seen.frames[0]] == wanted, seen.frames[0]


@_check
def _many_peers_receive_from_each_other(factory: TransportFactory) -> None:
    size = 12
    with factory.connect(size, _GENERATION) as world:
        seen = _Arrivals(world)
        for source in range(size):
            for target in range(size):
                if source != target:
                    for number in range(3):
                        _send(world, source, target, number, 10 * source + target)
        seen.until(
            lambda: all(len(got) == 3 * (size - 1) for got in seen.frames), "frames of all peers"
        )
        for target in range(size):
            for source in range(size):
                numbers = [
                    one.header.call for one in seen.frames[target] if one.header.source == source
                ]
                assert numbers == ([] if source == target else [0, 1, 2]), (
                    f"rank {source} to {target}: {numbers}"
                )
        seen.check_no_disconnect()


# -- ownership of memory ---------------------------------------------------------------------------


@_check
def _borrowed_memory_may_be_reused_when_its_loan_is_done(factory: TransportFactory) -> None:
    _reuse_memory(factory, borrow=True)


@_check
def _memory_that_is_not_borrowed_may_be_reused_at_once(factory: TransportFactory) -> None:
    _reuse_memory(factory, borrow=False)


def _reuse_memory(factory: TransportFactory, *, borrow: bool) -> None:
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        memory = bytearray(factory.nbytes_max)
        for number in range(6):
            memory[:] = bytes([number + 1]) * len(memory)
            header = Header(FrameType.DATA, 0, _GENERATION, 1, number, nbytes=len(memory)).pack()
            loan = world[0].send(1, header, memoryview(memory), borrow=borrow)
            assert borrow or loan is None, "a payload that was copied has no loan"
            if loan is not None:
                seen.until(loan.is_done, "the loan to be done")
        memory[:] = bytes(len(memory))
        seen.until(lambda: len(seen.frames[1]) == 6, "the frames to arrive")
        for number, one in enumerate(seen.frames[1]):
            assert bytes(one.payload) == bytes([number + 1]) * len(memory), (
                f"frame {number} was overwritten"
            )


@_check
def _a_received_payload_stays_as_it_was(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        for number in range(20):
            _send(world, 0, 1, number, 30_000, borrow=True)
        seen.until(lambda: len(seen.frames[1]) == 20, "the frames to arrive")
        for number in range(20, 60):
            _send(world, 0, 1, number, 30_000, borrow=True)
        seen.until(lambda: len(seen.frames[1]) == 60, "more frames to arrive")
        world[0].close(1.0)
        for one in seen.frames[1]:
            _check_payload(one)


# -- waiting ---------------------------------------------------------------------------------------


@_check
def _wait_ends_at_an_arrival(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        _send(world, 0, 1, 0, 1)  # opens the link
        seen.until(lambda: len(seen.frames[1]) == 1, "the first frame")
        _send(world, 0, 1, 1, 1)
        began = time.monotonic()
        while len(seen.frames[1]) < 2 and time.monotonic() - began < _PATIENCE_S:
            world[1].wait(_PATIENCE_S)
            seen.take()
        _check_soon(began, "the frame was seen")


@_check
def _wait_ends_at_a_wake_from_another_thread(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        for delay_s in (0.0, 0.1):
            _wakes_soon(world[0], lambda: world[0].wait(_PATIENCE_S), delay_s)


@_check
def _wait_ends_at_its_timeout(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        for wait in (world[0].wait, world[0].wait_idle):
            wait(0.0)
            world[0].wake()  # ends one wait, not all that follow
            began = time.monotonic()
            returns = 0
            while time.monotonic() - began < 0.3:
                assert world[0].receive() is None
                wait(0.1)
                returns += 1
            assert time.monotonic() - began < 0.3 + _SOON_S
            assert returns < 100, (
                f"waiting for nothing returned {returns} times in 0.3 s: it does not wait"
            )


@_check
def _wait_idle_ends_at_a_wake_beside_a_driver(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        stop = threading.Event()

        def drive() -> None:
            while not stop.is_set():
                world[0].receive()
                world[0].wait(0.05)

        driver = threading.Thread(target=drive, name="driver", daemon=True)
        driver.start()
        try:
            for delay_s in (0.1, 0.1):
                began = time.monotonic()
                waker = threading.Timer(delay_s, world[0].wake)
                waker.start()
                world[0].wait_idle(_PATIENCE_S)
                waker.join()
                _check_soon(began, "wait_idle ended")
        finally:
            stop.set()
            driver.join()


@_check
def _wait_idle_ends_at_an_arrival(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        _send(world, 0, 1, 0, 1)
        seen.until(lambda: len(seen.frames[1]) == 1, "the first frame")
        began = time.monotonic()
        sender = threading.Timer(0.1, lambda: _send(world, 0, 1, 1, 1))
        sender.start()
        while len(seen.frames[1]) < 2 and time.monotonic() - began < _PATIENCE_S:
            world[1].wait_idle(_PATIENCE_S)
            seen.take([1])
        sender.join()
        _check_soon(began, "the frame was seen")


@_check
def _queued_frames_leave_while_the_sender_waits_idle(factory: TransportFactory) -> None:
    for has_driven in (False, True):
        with factory.connect(2, _GENERATION) as world:
            seen = _Arrivals(world)
            _send(world, 0, 1, 0, 10)  # opens the link; the frame may have to wait for that
            if has_driven:
                world[0].wait_idle(0.0)
                world[0].wait(0.5)
            stop = threading.Event()

            def idle(sender: Transport = world[0], stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    sender.wait_idle(_PATIENCE_S)
                    sender.receive()

            thread = threading.Thread(target=idle, name="sender", daemon=True)
            began = time.monotonic()
            thread.start()
            try:
                while not seen.frames[1] and time.monotonic() - began < _PATIENCE_S:
                    world[1].wait(0.05)
                    seen.take([1])
                _check_soon(began, "the frame came")
            finally:
                stop.set()
                world[0].wake()
                thread.join()


# -- ends ------------------------------------------------------------------------------------------


@_check
def _an_orderly_close_is_no_loss_and_loses_nothing(factory: TransportFactory) -> None:
    for answers in (False, True):
        with factory.connect(3, _GENERATION) as world:
            seen = _Arrivals(world)
            if answers:
                _send(world, 0, 1, 0, 10)
                seen.until(lambda: len(seen.frames[1]) == 1, "the frame of rank 0")  # noqa: B023
            for number in range(40):
                _send(world, 1, 0, number, min(60_000, factory.nbytes_max), borrow=number % 2 == 1)
            world[1].close(5.0)
            time.sleep(_QUIET_S)  # frames and close have arrived, and no rank has received them
            world[0].wait(0.0)
            seen.until(lambda: len(seen.frames[0]) == 40, "what was sent before the close", [0, 2])  # noqa: B023
            assert [one.header.call for one in seen.frames[0]] == list(range(40))
            seen.quietly([0, 2])
            seen.check_no_disconnect()
            for number in range(3):
                _send(world, 0, 1, number, 10)  # the peer is closed: dropped
            _send(world, 0, 2, 0, 10)
            seen.until(lambda: len(seen.frames[2]) == 1, "the frame to rank 2", [0, 2])  # noqa: B023


@_check
def _an_abrupt_disconnect_is_reported_once_and_after_all_frames(factory: TransportFactory) -> None:
    with factory.connect(3, _GENERATION) as world:
        seen = _Arrivals(world)
        for source, target in ((0, 1), (1, 0), (0, 2), (2, 0)):
            _send(world, source, target, 0, 10)
        seen.until(
            lambda: len(seen.frames[0]) == 2 and len(seen.frames[1]) == 1, "the links to open"
        )
        for number in range(1, 31):
            _send(world, 1, 0, number, 1000)
        time.sleep(_QUIET_S)  # they arrive, and no rank receives them
        seen.take([1])
        factory.lose(world, 1)
        time.sleep(_QUIET_S)  # the disconnect arrives too
        world[0].wait(0.0)
        seen.until(lambda: bool(seen.lost[0]), "the disconnect", [0, 2])
        numbers = [one.header.call for one in seen.frames[0] if one.header.source == 1]
        assert numbers == list(range(31)), f"before the disconnect arrived {numbers}"
        assert len(seen.order[0]) == 33, (
            f"the disconnect was reported before a frame: {seen.order[0]}"
        )
        for number in range(5):
            loan = world[0].send(
                1,
                Header(FrameType.DATA, 0, _GENERATION, 1, number, nbytes=9).pack(),
                memoryview(bytes(9)),
                borrow=True,
            )
            assert loan is None or loan.is_done(), "the transport borrowed memory for a closed link"
        _send(world, 0, 2, 1, 10)
        seen.until(lambda: len(seen.frames[2]) == 2, "another link to continue", [0, 2])
        seen.quietly([0, 2])
        assert [one.peer for one in seen.lost[0]] == [1], seen.lost[0]
        assert all(one.reason for one in seen.lost[0]), "a disconnect needs a reason"


@_check
def _loans_of_a_lost_link_end(factory: TransportFactory) -> None:
    with factory.connect(2, _GENERATION) as world:
        seen = _Arrivals(world)
        _send(world, 0, 1, 0, 10)
        _send(world, 1, 0, 0, 10)
        seen.until(
            lambda: len(seen.frames[0]) == 1 and len(seen.frames[1]) == 1, "the link to open"
        )
        memory = memoryview(bytearray(factory.nbytes_max))
        loans = []
        factory.lose(world, 1)
        for number in range(1, 5):
            header = Header(FrameType.DATA, 0, _GENERATION, 1, number, nbytes=len(memory)).pack()
            loans.append(world[0].send(1, header, memory, borrow=True))
        seen.until(lambda: bool(seen.lost[0]), "the disconnect", [0])
        seen.until(
            lambda: all(loan is None or loan.is_done() for loan in loans), "the loans to end", [0]
        )


@_check
def _close_may_be_repeated(factory: TransportFactory) -> None:
    for linger_s in (0.0, 0.5):
        with factory.connect(2, _GENERATION) as world:
            _send(world, 0, 1, 0, 10)
            for _ in range(3):
                world[0].close(linger_s)
            world[0].wake()


class _Arrivals:
    """Frames and disconnects that each rank has received; one thread drives all ranks."""

    def __init__(self, world: Sequence[Transport]) -> None:
        self.world = world
        self.frames: list[list[Frame]] = [[] for _ in world]
        self.lost: list[list[PeerDisconnected]] = [[] for _ in world]
        self.order: list[list[Frame | PeerDisconnected]] = [[] for _ in world]

    def take(self, ranks: Iterable[int] | None = None) -> None:
        for rank in range(len(self.world)) if ranks is None else ranks:
            while (arrival := self.world[rank].receive()) is not None:
                self.order[rank].append(arrival)
                if isinstance(arrival, PeerDisconnected):
                    self.lost[rank].append(arrival)
                else:
                    self.frames[rank].append(arrival)

    def until(
        self, condition: Callable[[], bool], event: str, ranks: Sequence[int] | None = None
    ) -> None:
        """Drive `ranks` until a condition holds."""
        ranks = range(len(self.world)) if ranks is None else ranks
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self.take(ranks)
            if condition():
                return
            assert time.monotonic() < deadline, f"waited {_PATIENCE_S:g} s for {event}"
            for rank in ranks:
                self.world[rank].wait(0.002)

    def quietly(self, ranks: Sequence[int] | None = None) -> None:
        """Drive for a moment in which nothing should happen."""
        deadline = time.monotonic() + _QUIET_S
        self.until(lambda: time.monotonic() >= deadline, "the clock", ranks)

    def check_no_disconnect(self) -> None:
        assert not any(self.lost), f"disconnects were reported: {self.lost}"


def _pattern(number: int, nbytes: int) -> bytes:
    return (bytes((number + step) % 251 for step in range(256)) * (nbytes // 256 + 1))[:nbytes]


def _send(
    world: Sequence[Transport],
    source: int,
    target: int,
    number: int,
    nbytes: int,
    *,
    borrow: bool = False,
) -> None:
    header = Header(FrameType.DATA, source, _GENERATION, 1, number, nbytes=nbytes).pack()
    world[source].send(target, header, memoryview(_pattern(number, nbytes)), borrow=borrow)


def _check_payload(frame: Frame) -> None:
    header, payload = frame
    assert bytes(payload) == _pattern(header.call, header.nbytes), (
        f"the payload of {header} differs"
    )


def _wakes_soon(transport: Transport, wait: Callable[[], object], delay_s: float) -> None:
    waker = threading.Timer(delay_s, transport.wake)
    began = time.monotonic()
    waker.start()
    wait()
    waker.join()
    _check_soon(began, "the wake took effect")


def _check_soon(began: float, event: str) -> None:
    lasted_s = time.monotonic() - began
    assert lasted_s < _SOON_S, f"{event} after {lasted_s:.1f} s"
