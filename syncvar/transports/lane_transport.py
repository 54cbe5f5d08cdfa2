"""Data between hosts over lanes: a `Transport` above that of ZeroMQ.

Frames to ranks of this host use the ZeroMQ transport. A rank of another host has a lane beside its
ZeroMQ link. The link agrees on the lane and stays: its heartbeats find lost hosts also while
nobody drives the lane. Frames wait until both ranks have committed to the lane. If it cannot be
connected, they use the link. So all frames of a rank travel on one path, in order.

A lost link ends its lane, and a lost lane its link. The loss comes after all frames of the lane
that arrived before. An orderly end is a goodbye on both.
"""

from __future__ import annotations

import collections
import functools
import logging
import select
import time
from enum import Enum
from typing import TYPE_CHECKING

from syncvar.core.errors import WireError, error_message
from syncvar.protocol.frame import FrameType, Header
from syncvar.transports.base import Frame, PeerDisconnected, check_sender
from syncvar.transports.lane_handshake import (
    HandshakeStep,
    LaneConnector,
    LaneKey,
    LaneListener,
    PlainLanes,
    place_of,
)
from syncvar.transports.lanes import Lane, QueuedFrame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.base import Arrival, BorrowedFrame, Place, Placer
    from syncvar.transports.lane_handshake import LaneSecurity
    from syncvar.transports.lanes import LaneConnection
    from syncvar.transports.zeromq_transport import ZeromqTransport

_log = logging.getLogger("syncvar")
_ABLE = 1  # what a rank offers that will connect
_JUDGE_S = 0.2  # the link of a lost rank ends soon after its lane, and knows the reason
_FLUSH_LOOK_S = 0.01
_EXPIRE_EVERY_S = 0.05
_SPIN_MIN_S, _SPIN_MAX_S = 5e-6, 40e-6  # waking up takes longer than most answers
_LINKS_EVERY_S = 0.002  # looking at the links takes as long as receiving a frame


def links_reason(config: RuntimeConfig) -> str:
    """Return why data between hosts use ZeroMQ links with these settings; empty for lanes."""
    if config.transport == "zmq":
        return "SYNCVAR_TRANSPORT=zmq asks for them"
    if config.encryption != "required":
        return ""
    from syncvar.transports.lane_tls import missing_reason

    return missing_reason()


def path_between_hosts(config: RuntimeConfig) -> str:
    """Return which path data between hosts take with these settings, and why.

    Example:
        >>> from syncvar.core.settings import RuntimeConfig
        >>> path_between_hosts(RuntimeConfig(encryption="control-only"))
        'lanes in plain (encryption is control-only)'
    """
    if config.uses_mpi:
        return f"MPI (SYNCVAR_TRANSPORT={config.transport} asks for it)"
    kind = "encrypted" if config.encryption == "required" else "plain"
    reason = links_reason(config)
    if reason:
        return f"{kind} ZeroMQ links ({reason})"
    if kind == "encrypted":
        return "lanes with TLS 1.3 (encryption is required)"
    return f"lanes in plain (encryption is {config.encryption})"


class LanePath(Enum):
    """The path of the frames to a rank of another host."""

    PENDING = "pending"
    LANE = "lane"
    LINK = "link"
    ENDED = "ended"


class LanePeer:
    """A rank of another host: its path, and frames that wait for it."""

    __slots__ = ("has_bye", "has_offered", "is_withdrawn", "judge_at", "path", "rank", "waiting")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.path = LanePath.PENDING
        self.waiting: collections.deque[QueuedFrame] = collections.deque()
        self.has_offered = False  # this rank, to that one
        self.has_bye = False  # that rank has sent all
        self.is_withdrawn = False  # that rank has not committed to the lane, and will not
        self.judge_at = float("inf")  # when a lane that has ended is a loss


class LaneTransport:
    """ZeroMQ links, and lanes between hosts; `syncvar.transports.base` has the contract.

    It owns `links`. With `key`, the job's key for lanes, TLS encrypts what they carry.
    """

    def __init__(
        self, links: ZeromqTransport, rank: int, config: RuntimeConfig, key: bytes | None = None
    ) -> None:
        self.placer: Placer | None = None
        self._links = links
        self._rank = rank
        self._config = config
        self._generation = 0
        self._key = key
        self._remote: dict[int, str] = {}  # rank of another host -> its host
        self._peers: dict[int, LanePeer] = {}
        self._lanes: dict[int, Lane] = {}
        self._readable: list[Lane] = []  # lanes that may have frames
        self._connectors: dict[int, LaneConnector] = {}  # by rank
        self._by_descriptor: dict[int, Lane | LaneConnector] = {}
        self._ending: collections.deque[PeerDisconnected] = collections.deque()
        self._judging: set[int] = set()
        self._expired = 0.0
        self._spin_s = _SPIN_MAX_S
        self._links_due = 0.0  # when to look at the links again
        self._has_warned = False
        self._closed = False
        host, _ = place_of(links.outside)
        self._listener = LaneListener(host, config, links.refuse_stranger)
        self._epoll = select.epoll()
        links.add_lanes(self._epoll.fileno())
        self.address, self.outside = links.address, links.outside

    # -- the contract ------------------------------------------------------------------------------

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Set the addresses of the peers."""
        self._generation = generation
        self._remote = {
            peer: place_of(address)[0]
            for peer, address in addresses.items()
            if address.startswith("tcp://") and peer != self._rank
        }
        self._links.open(addresses, generation)

    def send(
        self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False
    ) -> BorrowedFrame | None:
        """Send a frame to a peer; the first frame opens the link and the lane."""
        lane = self._lanes.get(peer)
        if lane is not None:
            was_waiting = lane.has_unsent
            loan = lane.send(header, payload, borrow=borrow)
            if lane.has_unsent and not was_waiting:
                self._await_writable(lane)
            return loan
        if peer not in self._remote:
            return self._links.send(peer, header, payload, borrow=borrow)
        state = self._peers.get(peer) or self._begin(peer)
        if state.path is LanePath.LINK:
            return self._links.send(peer, header, payload, borrow=borrow)
        if state.path is LanePath.ENDED:
            return None
        frame = QueuedFrame(header, payload, borrow=borrow)
        state.waiting.append(frame)
        return frame.loan

    def send_by_link(self, peer: int, header: bytes, payload: memoryview | None) -> None:
        """Send a frame by the ZeroMQ link; no lane begins. Its order to other frames is open."""
        self._links.send(peer, header, payload)

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None."""
        has_looked = False
        while True:
            if self._readable:
                frame = self._from_lanes()
                if frame is not None:
                    return frame
            if self._ending:  # their lanes have given all that had arrived
                lost = self._ending.popleft()
                if self._end(lost.peer):
                    return lost
            elif not has_looked:
                has_looked = True
                self._look(0.0)
            else:
                now = time.monotonic()
                if now < self._links_due:
                    return None
                arrival = self._from_links()
                if arrival is not None:
                    return arrival
                if not self._ending:
                    self._links_due = now + _LINKS_EVERY_S
                    return None

    def _from_links(self) -> Arrival | None:
        """Return the next arrival of the links; take offers and losses."""
        while True:
            arrival = self._links.receive()
            if isinstance(arrival, PeerDisconnected):
                self._ending.append(arrival)
                if (lane := self._lanes.get(arrival.peer)) is not None:
                    self._readable.append(lane)
                return None
            if arrival is None or arrival.header.kind != FrameType.LANE:
                return arrival
            self._take_offer(arrival)

    def wait(self, timeout_s: float) -> bool:
        """Wait for an arrival, a control message or a wakeup."""
        if self._readable or self._ending or (timeout_s > 0 and self._lanes and self._spin()):
            return False
        self._links_due = 0.0
        return self._links.wait(min(timeout_s, self._due() - time.monotonic()))

    def wake(self) -> None:
        """Make `wait` and `wait_idle` return, from any thread."""
        self._links.wake()

    def wait_idle(self, timeout_s: float) -> None:
        """Wait without using the transport."""
        if not any(lane.has_staged for lane in list(self._readable)):
            self._links.wait_idle(timeout_s)
        self._links_due = 0.0

    def close(self, linger_s: float) -> None:
        """Say goodbye on every lane and link unless `linger_s` is 0, flush, and close all."""
        if self._closed:
            return
        self._closed = True
        if linger_s > 0:
            for state in self._peers.values():
                if state.path is LanePath.PENDING:
                    self._use_link(state)
            self._finish(linger_s)
        self._links.close(linger_s)  # before the sockets here, which others take for a loss
        for lane in self._lanes.values():
            lane.close()
        for connector in self._connectors.values():
            connector.connection.close()
        for state in self._peers.values():
            _drop(state)
        self._listener.close()
        self._epoll.close()

    @property
    def refused_peers(self) -> int:
        """Number of tcp clients that are no members of the job."""
        return self._links.refused_peers

    @property
    def refused_frames(self) -> int:
        """Number of frames of strangers."""
        return self._links.refused_frames

    # -- frames ------------------------------------------------------------------------------------

    def _from_lanes(self) -> Frame | None:
        """Return the next frame of the lanes that may have one."""
        while self._readable:
            lane = self._readable[-1]
            try:
                frame = lane.receive()
                if frame is not None:
                    check_sender(frame.header, lane.peer, self._generation)
            except WireError as error:
                self._readable.pop()
                self._close_lane(lane)
                self._links.lose(lane.peer, error_message(error))
                continue
            if frame is not None:
                if frame.header.kind == FrameType.BYE:
                    self._peers[lane.peer].has_bye = True
                    continue
                return frame
            self._readable.pop()
            if lane.end:
                self._ended(lane)
        return None

    def _place(self, header: Header) -> Place | None:
        """Return where the caller wants the payload of a long frame of this generation."""
        if self.placer is None or header.generation != self._generation:
            return None
        return self.placer(header)

    def _spin(self) -> bool:
        """Wait for a moment without sleeping; return whether something has come."""
        until = time.monotonic() + self._spin_s
        while not self._look(0.0):
            if time.monotonic() >= until:
                self._spin_s = max(_SPIN_MIN_S, self._spin_s / 2)
                return False
        self._spin_s = min(_SPIN_MAX_S, self._spin_s * 2)
        return True

    def _look(self, timeout_s: float) -> bool:
        """Find lanes that are ready, flush queues, and go on with handshakes.

        Return whether anything was ready.
        """
        ready = self._epoll.poll(timeout_s)
        for descriptor, events in ready:
            one = self._by_descriptor.get(descriptor)
            if isinstance(one, Lane):
                if events & select.EPOLLOUT:
                    one.flush()
                    if not one.has_unsent and not one.end:
                        self._epoll.modify(one.socket, select.EPOLLIN)
                if events & ~select.EPOLLOUT:
                    self._readable.append(one)
            elif isinstance(one, LaneConnector):
                self._connect_on(one)
            else:
                self._listen_on(descriptor)
        if self._connectors or self._listener.arrivals or self._judging:
            self._expire(time.monotonic())
        return bool(ready)

    def _listen_on(self, descriptor: int) -> None:
        """Accept connections, or look at one of those that are no lanes yet."""
        if descriptor == self._listener.descriptor:
            for new in self._listener.accept(time.monotonic(), self._security):
                self._epoll.register(new.connection, select.EPOLLIN)
            return
        arrival = self._listener.arrivals.get(descriptor)
        if arrival is not None and self._listener.step(arrival) is HandshakeStep.DONE:
            assert arrival.rank is not None
            self._adopt(self._peers[arrival.rank], arrival.connection)

    def _await_writable(self, lane: Lane) -> None:
        self._epoll.modify(lane.socket, select.EPOLLIN | select.EPOLLOUT)

    @functools.cached_property
    def _security(self) -> LaneSecurity:
        """The protection of the lanes; a process that needs none does not load OpenSSL for it."""
        if self._key is None:
            return PlainLanes()
        from syncvar.transports.lane_tls import LaneTls

        return LaneTls(self._key)

    # -- agreeing on a lane ------------------------------------------------------------------------

    def _begin(self, peer: int) -> LanePeer:
        """Offer a lane to a rank."""
        state = self._peers[peer] = LanePeer(peer)
        self._offer(state)
        return state

    def _offer(self, state: LanePeer) -> None:
        state.has_offered = True
        if self._rank < state.rank:
            self._send_offer(state.rank, _ABLE)
            return
        is_new = self._listener.descriptor < 0
        try:
            port = self._listener.open()
        except OSError as error:
            self._warn(state.rank, f"this rank cannot listen: {error.strerror}")
            self._use_link(state)
            return
        if is_new:
            self._epoll.register(self._listener.descriptor, select.EPOLLIN)
        key = self._listener.keys[state.rank] = LaneKey.random()
        self._send_offer(state.rank, port, key.pack())

    def _send_offer(self, peer: int, port: int, key: bytes = b"") -> None:
        number = {"call": port, "nbytes": len(key)}
        header = Header(FrameType.LANE, self._rank, self._generation, 0, **number).pack()
        self._links.send(peer, header, memoryview(key))

    def _take_offer(self, frame: Frame) -> None:
        peer, port = frame.header.source, frame.header.call
        if peer not in self._remote:
            return
        state = self._peers.get(peer) or LanePeer(peer)
        self._peers[peer] = state
        if not port:
            self._refused(state)
            return
        if state.path is not LanePath.PENDING:
            if state.path is LanePath.LINK:
                self._send_offer(peer, 0)
            return
        if not state.has_offered:
            self._offer(state)
        key = LaneKey.parse(bytes(frame.payload))
        if self._rank < peer and key is not None and peer not in self._connectors:
            self._connect(state, port, key)

    def _refused(self, state: LanePeer) -> None:
        if state.path is LanePath.LANE:
            state.is_withdrawn = True
        elif state.path is LanePath.PENDING:
            self._use_link(state)

    def _connect(self, state: LanePeer, port: int, key: LaneKey) -> None:
        connector = LaneConnector(state.rank, self._security)
        place = self._remote[state.rank], port
        connector.connect(self._rank, place, key, self._config)
        self._connectors[state.rank] = connector
        if not connector.problem:
            descriptor = connector.connection.fileno()
            self._by_descriptor[descriptor] = connector
            self._epoll.register(descriptor, select.EPOLLOUT)

    def _connect_on(self, connector: LaneConnector) -> None:
        was_connected = connector.is_connected
        outcome = connector.step()
        if outcome is HandshakeStep.DONE:
            del self._connectors[connector.peer]
            self._adopt(self._peers[connector.peer], connector.connection)
        elif connector.is_connected and not was_connected:
            self._epoll.modify(connector.connection, select.EPOLLIN)

    def _adopt(self, state: LanePeer, connection: LaneConnection) -> None:
        """Use a committed connection as the lane of a rank, beginning with what has waited."""
        lane = self._security.lane(state.rank, connection, self._config)
        self._by_descriptor[connection.fileno()] = lane
        if state.path is not LanePath.PENDING:  # this rank has given up waiting
            self._close_lane(lane)
            return
        state.path = LanePath.LANE
        self._lanes[state.rank] = lane
        lane.placer = self._place
        while state.waiting:
            lane.put(state.waiting.popleft())
        lane.flush()
        events = select.EPOLLIN | (select.EPOLLOUT if lane.has_unsent else 0)
        self._epoll.modify(connection, events)
        self._readable.append(lane)

    def _use_link(self, state: LanePeer) -> None:
        """Let the frames to a rank use its link, beginning with those that have waited."""
        state.path = LanePath.LINK
        connector = self._connectors.pop(state.rank, None)
        if connector is not None:
            self._by_descriptor.pop(connector.connection.fileno(), None)
            connector.connection.close()
        self._listener.keys.pop(state.rank, None)
        if state.has_offered:
            self._send_offer(state.rank, 0)
        while state.waiting:
            frame = state.waiting.popleft()
            is_lent = frame.loan is not None
            loan = self._links.send(state.rank, frame.header, frame.payload, borrow=is_lent)
            if frame.loan is not None:
                frame.loan.of_link, frame.loan.is_over = loan, loan is None

    # -- times -------------------------------------------------------------------------------------

    def _due(self) -> float:
        """Return when the next thing is due, in monotonic seconds."""
        if not (self._connectors or self._listener.arrivals or self._judging):
            return float("inf")
        times = [one.due for one in self._connectors.values()]
        times += [self._peers[peer].judge_at for peer in self._judging]
        if self._listener.arrivals:
            times.append(self._expired + _EXPIRE_EVERY_S)
        return min(times)

    def _expire(self, now: float) -> None:
        self._expired = now
        self._listener.expire(now)
        for peer, connector in list(self._connectors.items()):
            if connector.expire(now):
                self._warn(peer, connector.problem)
                self._use_link(self._peers[peer])
        for peer in list(self._judging):
            state = self._peers[peer]
            if now >= state.judge_at:
                self._judging.discard(peer)
                self._links.lose(peer, self._lanes[peer].end)

    def _warn(self, peer: int, problem: str) -> None:
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(
            level,
            "data between rank %d and rank %d use ZeroMQ, which is slower: no lane could be "
            "connected (%s). Let the hosts of the job reach each other at all tcp ports",
            self._rank,
            peer,
            problem,
        )

    # -- ends --------------------------------------------------------------------------------------

    def _ended(self, lane: Lane) -> None:
        """Handle a lane whose peer sends no more."""
        state = self._peers[lane.peer]
        if self._lanes.get(lane.peer) is not lane or lane.peer in self._judging:
            return
        self._forget(lane)
        if state.has_bye:
            state.path = LanePath.ENDED
        elif state.is_withdrawn and not lane.has_received:
            state.path = LanePath.LINK
        else:
            state.judge_at = time.monotonic() + _JUDGE_S
            self._judging.add(lane.peer)
            return
        del self._lanes[lane.peer]
        lane.close()

    def _forget(self, lane: Lane) -> None:
        """Look no more at a lane."""
        descriptor = lane.socket.fileno()
        if self._by_descriptor.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _close_lane(self, lane: Lane) -> None:
        self._forget(lane)
        lane.close()

    def _end(self, peer: int) -> bool:
        """End all that concerns a lost rank; return whether its loss is news."""
        state = self._peers.get(peer)
        if state is None:
            return True
        is_news = not state.has_bye and state.path is not LanePath.ENDED
        state.path = LanePath.ENDED
        self._judging.discard(peer)
        _drop(state)
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            self._close_lane(lane)
        connector = self._connectors.pop(peer, None)
        if connector is not None:
            self._by_descriptor.pop(connector.connection.fileno(), None)
            connector.connection.close()
        self._listener.keys.pop(peer, None)
        return is_news

    def _finish(self, linger_s: float) -> None:
        """Say goodbye on the lanes, and wait until the hosts of the others have all bytes.

        As long as bytes move it waits, as `ZeromqTransport.close` does.
        """
        patience_s = max(linger_s, self._config.link_silence_s)
        bye = Header(FrameType.BYE, self._rank, self._generation, 0).pack()
        for peer, lane in self._lanes.items():
            if not self._peers[peer].has_bye:
                lane.send(bye, None, borrow=False)
        moved, before = time.monotonic(), -1
        while time.monotonic() < moved + patience_s:
            while self.receive() is not None:  # a rank that is gone ends its lane
                pass
            for lane in self._lanes.values():
                lane.flush()
            alive = [lane for lane in self._lanes.values() if not lane.end]
            left = sum(lane.unacknowledged() + lane.has_unsent for lane in alive)
            if not left:
                return
            if left != before:
                moved, before = time.monotonic(), left
            self._links.wait(0.0)  # it sees lost links
            self._links_due = 0.0
            self._look(_FLUSH_LOOK_S)


def _drop(state: LanePeer) -> None:
    while state.waiting:
        state.waiting.popleft().end()
