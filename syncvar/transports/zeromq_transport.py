"""Frames over ZeroMQ: unix sockets on one host, tcp between hosts.

Each rank binds one ROUTER for all arrivals, and opens one DEALER (`SendLink`) to each peer that it
sends to. A link is fail-stop: it never reconnects, because ZeroMQ then loses messages silently. A
DISCONNECTED event without a goodbye is a loss. A link between hosts is encrypted and authenticated
at both ends; with weaker `encryption` each payload has a checksum. The sender's routing identity
names job, generation, rank and incarnation, so other jobs, old processes and second processes are
no members.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.backend import zmq_poll

from syncvar.core.errors import TransportError, WireError, error_message
from syncvar.protocol.frame import HEADER_NBYTES, FrameType, Header, parse_header
from syncvar.transports.base import (
    Arrival,
    BorrowedFrame,
    Frame,
    PeerDisconnected,
    Wakeup,
    check_length,
    check_sender,
)
from syncvar.transports.zeromq_links import Connections, Delivery, SendLink
from syncvar.transports.zeromq_sockets import (
    bind_in_folder,
    job_nonce,
    limit_frames,
    milliseconds,
    set_family,
    set_heartbeats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.base import Placer
    from syncvar.transports.curve import LinkKeys
    from syncvar.transports.zeromq_links import ZeromqControl

_IDENTITY = struct.Struct("<c8sII8s")  # b"s", job, generation, rank, incarnation
_CHECKSUM = struct.Struct("<I")  # of a payload, behind the header, on unencrypted links
_POLLIN = int(zmq.POLLIN)  # combining pyzmq flags takes a microsecond
_BRIEF_MS = 2
_FLUSH_LOOK_S = 0.01
_BYE_LINGER_MS = 200
_WATCH_EVERY_S = 0.02
_OTHER_HALF_S = 0.2  # the second connection of a pair closes soon after the first
_MORE_S = 1.0  # but while it delivers frames, the next may take this long: 1 MiB over 10 Mbit/s


class HostLinks(NamedTuple):
    """Links to other hosts: the address to bind, and keys unless `encryption` is off."""

    address: str
    keys: LinkKeys | None = None


class ZeromqTransport:
    """Frames over ZeroMQ; `syncvar.transports.base` has the contract.

    `endpoint` is "ipc://<directory>" or "tcp://<address>" (any free port). It waits for `control`
    as well. Without `links` there are no other hosts.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        rank: int,
        endpoint: str,
        job_id: str,
        config: RuntimeConfig,
        control: ZeromqControl | None = None,
        links: HostLinks | None = None,
    ) -> None:
        self.placer: Placer | None = None
        self._context = context
        self._rank = rank
        self._config = config
        self._nonce = job_nonce(job_id)
        self._incarnation = os.urandom(8)
        self._generation = 0
        self._addresses: Mapping[int, str] = {}
        self._links: dict[int, SendLink] = {}
        self._sources: dict[bytes, int] = {}
        self._checksummed: frozenset[int] = frozenset()  # peers with unencrypted links
        self._lost: set[int] = set()
        self._departed: set[int] = set()  # peers that sent BYE on one of the pair's connections
        self._complete: set[int] = set()  # peers that sent BYE behind their frames
        self._ended: set[int] = set()  # peers whose sending connection has ended
        # Disconnected peer -> time to judge it, once the ROUTER is empty.
        self._closing: dict[int, float] = {}
        self._ends: dict[int, str] = {}  # disconnected peer -> reason
        self._pending_losses: collections.deque[PeerDisconnected] = collections.deque()
        self._watched = 0.0
        self._unsent: dict[int, int] = {}  # peer with queued frames -> descriptor of its link
        self._is_open = False
        self._closed = False
        self.refused_frames = 0
        self._own_kinds = {FrameType.BYE, FrameType.LANE}  # frames that are not for the caller
        self._keys = None if links is None else links.keys
        self._wakeup = Wakeup()
        self._arrivals = self._wakeup.arrivals
        self._connections = Connections(context, config)
        self._router = self._connections.socket
        try:
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.address = self._bind(endpoint)
            self.outside = "" if links is None else self._bind_outside(links.address)
        except BaseException:
            self.close(0)
            raise
        self._waiting_for: list[tuple[Any, int]] = [(self._wakeup.driver, zmq.POLLIN)]
        self._control = control
        self._control_items: tuple[Any, ...] = ()
        if control is not None:
            watched = [one for one in (control.socket, control.monitor) if one is not None]
            self._control_items = (*watched, *map(self._wait_for, watched))

    # -- the contract ------------------------------------------------------------------------------

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Set the addresses of the peers."""
        self._addresses = addresses
        self._generation = generation
        if self.outside and self._config.encryption != "required":
            self._checksummed = frozenset(
                peer for peer, address in addresses.items() if address.startswith("tcp://")
            )
        # Not before: frames of a peer that opened earlier would end each wait at once.
        if not self._is_open:
            self._is_open = True
            self._wait_for(self._router)

    def send(
        self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False
    ) -> BorrowedFrame | None:
        """Send a frame to a peer; the first frame opens the link."""
        if peer in self._lost or peer in self._departed:
            return None
        link = self._links.get(peer) or self._open_link(peer)
        if peer in self._checksummed:
            header = self._with_checksum(header, payload)
        if not link.outbox:
            try:
                return link.send(header, payload, borrow=borrow)
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                raise TransportError(f"sending to rank {peer} failed: {error}") from error
        loan = link.put_off(header, payload, borrow=borrow)
        if peer not in self._unsent:
            self._hold_back(peer, link)
        return loan

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None."""
        router = self._router
        # Checking is cheaper than the exception of an empty socket.
        while router.getsockopt(zmq.EVENTS) & _POLLIN:
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise TransportError(f"receiving failed: {error}") from error
            source = self._sources.get(identity)
            arrival = self._receive_frame(identity, source)
            if arrival is not None:
                return arrival
        if self._closing:
            self._judge_closing()
        if self._unsent:
            self._flush()
        if self._pending_losses:
            return self._pending_losses.popleft()
        return None

    def wait(self, timeout_s: float) -> bool:
        """Wait for an arrival, a control message or a wakeup.

        The caller has received all earlier arrivals, so the sockets' descriptors signal everything
        later. Polling these takes one system call. ZeroMQ's own poll, which also watches monitors
        and blocked senders, takes many and serves longer waits.
        """
        if self._control is not None and self._control.may_have_more():
            return True
        now = time.monotonic()
        if now - self._watched >= _WATCH_EVERY_S:  # drivers with short waits must see losses, too
            self._watch_links(now)
        if self._closing:
            timeout_s = min(timeout_s, min(self._closing.values()) - now)
        if self._pending_losses:
            timeout_s = 0.0
        milliseconds = max(1, int(min(timeout_s, 3600.0) * 1000)) if timeout_s > 0 else 0
        if not self._unsent:
            ready = self._arrivals.poll(min(milliseconds, _BRIEF_MS))
            if ready or milliseconds <= _BRIEF_MS:
                return self._is_control(ready)
            milliseconds -= _BRIEF_MS
        items = [*self._waiting_for, (self._connections.monitor, zmq.POLLIN)]
        items += [(link.monitor, zmq.POLLIN) for link in self._links.values()]
        items += [(self._links[peer].socket, zmq.POLLOUT) for peer in self._unsent]
        ready = zmq_poll(items, milliseconds)
        if self._unsent:
            self._flush()  # now, because the poll has cleared the descriptors' signals
        self._watch_links(time.monotonic())
        return self._is_control(ready)

    def wake(self) -> None:
        """Make `wait` and `wait_idle` return, from any thread."""
        self._wakeup.wake()

    def wait_idle(self, timeout_s: float) -> None:
        """Wait on the sockets' descriptors only: the sockets belong to the driver."""
        self._wakeup.wait_idle(timeout_s)

    def close(self, linger_s: float) -> None:
        """Send BYE on every link unless `linger_s` is 0, flush, and close all sockets."""
        if self._closed:
            return
        self._closed = True
        if linger_s > 0:
            self._send_bye(linger_s)
            self._await_sent(linger_s)
        linger_ms = int(linger_s * 1000)
        for link in self._links.values():
            link.close(linger_ms)
        self._links.clear()
        self._connections.close(min(linger_ms, _BYE_LINGER_MS))  # its ROUTER sends only BYE
        self._wakeup.close()

    def add_lanes(self, descriptor: int) -> None:
        """Let arrivals at a descriptor end waits, and `receive` return offers of lanes."""
        self._own_kinds.discard(FrameType.LANE)
        self._waiting_for.append((descriptor, zmq.POLLIN))
        self._wakeup.watch(descriptor)

    def lose(self, peer: int, reason: str) -> None:
        """End the link to a peer, and report its loss, if that has not happened yet."""
        self._lose(peer, reason)

    def refuse_stranger(self, place: str) -> None:
        """Count a tcp client at an address that is no member of the job."""
        if self._connections.gate is not None:
            self._connections.gate.refuse(place)

    @property
    def refused_peers(self) -> int:
        """Number of tcp clients that are no members of the job."""
        return 0 if self._connections.gate is None else self._connections.gate.refused_peers

    # -- inside ------------------------------------------------------------------------------------

    def _is_control(self, ready: list[tuple[Any, int]]) -> bool:
        seen = False
        for item, _ in ready:
            if item == self._wakeup.driver:
                self._wakeup.take()
                seen = True
            elif item in self._control_items:
                seen = True
        return seen

    @staticmethod
    def _with_checksum(header: bytes, payload: memoryview | None = None) -> bytes:
        return header + _CHECKSUM.pack(zlib.crc32(payload) if payload is not None else 0)

    def _wait_for(self, socket: Any) -> int:
        """Let arrivals at a socket end waits; return its descriptor."""
        descriptor: int = socket.getsockopt(zmq.FD)
        self._waiting_for.append((socket, zmq.POLLIN))
        self._wakeup.watch(descriptor)
        return descriptor

    def _configure(self, socket: Any, address: str) -> None:
        config = self._config
        socket.set_hwm(0)  # flow control limits the bytes
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        limit_frames(socket, config.segment_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.link_opening_s))
        # Heartbeats detect partitions and failed hosts. Within a host the system closes the
        # connections of a process that ends, and the agent sees a stopped one.
        if address.startswith("tcp://"):
            set_family(socket, address)
            set_heartbeats(socket, config)

    def _bind(self, endpoint: str) -> str:
        self._configure(self._router, endpoint)
        # The DEALERs send heartbeats, the ROUTER only answers. Its own timer could fire on a
        # connection that is just ending, and then libzmq 4.3.5 aborts the process ("Assertion
        # failed: !_io_error").
        self._router.setsockopt(zmq.HEARTBEAT_IVL, 0)
        scheme, _, place = endpoint.partition("://")
        try:
            if scheme == "ipc":
                name = f"r{self._rank}-{self._incarnation[:4].hex()}"
                return bind_in_folder(self._router, place, name)
            port = self._router.bind_to_random_port(f"tcp://{place}")
        except zmq.ZMQError as error:
            raise TransportError(f"cannot listen on {endpoint}: {error}") from error
        return f"tcp://{place}:{port}"

    def _bind_outside(self, endpoint: str) -> str:
        from syncvar.transports.curve import gate_for_hosts

        name = f"rank {self._rank}"
        gate = gate_for_hosts(
            self._context, self._router, self._keys, self._config, self._rank, name
        )
        self._connections.gate = gate
        address = self._bind(endpoint)
        gate.guard(address)
        return address

    def _open_link(self, peer: int) -> SendLink:
        address = self._addresses.get(peer)
        if address is None:
            raise TransportError(f"no address of rank {peer} is known")
        socket = self._context.socket(zmq.DEALER)
        self._configure(socket, address)
        if self._keys is not None and address.startswith("tcp://"):
            self._keys.connect_host(socket, self._config, self._rank, peer)
        if FrameType.LANE not in self._own_kinds:
            # Nothing else travels on the link, so the other end would always await a heartbeat, and
            # close the link after a job was stopped. The other rank has heartbeats of its own.
            socket.setsockopt(zmq.HEARTBEAT_TTL, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        member = (self._nonce, self._generation, self._rank, self._incarnation)
        socket.setsockopt(zmq.ROUTING_ID, _IDENTITY.pack(b"s", *member))
        try:
            self._links[peer] = SendLink(self._context, socket, address)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot connect to rank {peer} at {address}: {error}") from error
        return self._links[peer]

    def _hold_back(self, peer: int, link: SendLink) -> None:
        """Let `wait_idle` end when a link takes frames: their sender may be busy for long."""
        descriptor = self._unsent[peer] = link.socket.getsockopt(zmq.FD)
        self._wakeup.watch_idle(descriptor)

    def _hold_no_more(self, peer: int) -> None:
        descriptor = self._unsent.pop(peer, None)
        if descriptor is not None:
            self._wakeup.idle.unregister(descriptor)

    def _flush(self) -> None:
        for peer in list(self._unsent):
            link = self._links[peer]
            link.flush()
            if not link.outbox:
                self._hold_no_more(peer)

    def _receive_frame(self, identity: bytes, source: int | None) -> Frame | None:
        if not self._router.getsockopt(zmq.RCVMORE):
            self.refused_frames += 1
            return None
        source, data = (
            self._first_part(identity)
            if source is None
            else (source, self._router.recv(zmq.NOBLOCK))
        )
        payload: bytes | memoryview = b""
        checksum = None
        if source in self._checksummed:
            checksum = data[HEADER_NBYTES : HEADER_NBYTES + _CHECKSUM.size]
            data = data[:HEADER_NBYTES] + data[HEADER_NBYTES + _CHECKSUM.size :]
        if len(data) > HEADER_NBYTES:
            data, payload = data[:HEADER_NBYTES], memoryview(data)[HEADER_NBYTES:]
        if self._router.getsockopt(zmq.RCVMORE):
            payload = self._router.recv(zmq.NOBLOCK, copy=False).buffer
            while self._router.getsockopt(zmq.RCVMORE):
                self._router.recv(zmq.NOBLOCK)
                source = None
        if source is None or source in self._lost:
            self.refused_frames += 1
            return None
        try:
            header = self._checked(source, data, payload, checksum)
        except WireError as error:
            self.refused_frames += 1
            self._lose(source, error_message(error))
            return None
        if header.kind in self._own_kinds:
            self._take_own(header)
            return None
        if self._closing.get(source):  # BYE comes behind the remaining frames, which may be long
            self._closing[source] = time.monotonic() + _MORE_S
        return Frame(header, payload)

    def _take_own(self, header: Header) -> None:
        """Take a goodbye, or answer to the offer of a lane that data use this link."""
        if header.kind == FrameType.BYE:
            self._departed.add(header.source)
            self._complete.add(header.source)
        elif header.call:
            refusal = Header(FrameType.LANE, self._rank, self._generation, 0)
            self.send(header.source, refusal.pack())

    def _first_part(self, identity: bytes) -> tuple[int | None, bytes]:
        """Return the sender of a new identity, None for a stranger, and its frame's first part."""
        first = self._router.recv(zmq.NOBLOCK, copy=False)
        source = self._meet(identity, first)
        if source is None:
            self._connections.refused(first)
        return source, bytes(first.buffer)

    def _checked(
        self, source: int, data: bytes, payload: bytes | memoryview, checksum: bytes | None
    ) -> Header:
        header = parse_header(data, self._config.segment_bytes)
        check_sender(header, source, self._generation)
        check_length(header, source, len(payload))
        if checksum is not None and checksum != _CHECKSUM.pack(zlib.crc32(payload)):
            raise WireError(f"the checksum of a payload of rank {source} is wrong")
        return header

    def _meet(self, identity: bytes, first: Any) -> int | None:
        """Check the identity of a new peer, and record the descriptor of its connection."""
        if len(identity) != _IDENTITY.size:
            return None
        kind, nonce, generation, rank, _ = _IDENTITY.unpack(identity)
        is_member = (kind, nonce, generation) == (b"s", self._nonce, self._generation)
        if not is_member or rank not in self._addresses:
            return None
        if rank in self._sources.values():  # a link opens once, so this is another process
            return None
        # Earlier disconnections concern earlier users of this descriptor number: handle them first.
        self._watch_router()
        self._sources[identity] = rank
        self._connections.joined(identity, first)
        return int(rank)

    def _watch_router(self) -> None:
        for identity, reason in self._connections.ended().items():
            peer = self._sources[identity]
            self._ended.add(peer)
            self._closing[peer] = 0.0
            self._ends.setdefault(peer, reason)

    def _watch_links(self, now: float) -> None:
        self._watched = now
        self._watch_router()
        for peer, link in list(self._links.items()):
            if reason := link.end(self._config):
                self._ends.setdefault(peer, reason)
                if link.has_received_bye():
                    self._departed.add(peer)
                self._closing.setdefault(peer, now + _OTHER_HALF_S)
            elif not link.is_connected and now - link.opened > self._config.link_opening_s:
                self._lose(peer, f"no connection within {self._config.link_opening_s:g} s")

    def _judge_closing(self) -> None:
        # The ROUTER was empty after the disconnection, so `receive` has handled all arrivals.
        now = time.monotonic()
        for peer in [peer for peer, due in self._closing.items() if due <= now]:
            del self._closing[peer]
            self._disconnected(peer)

    def _disconnected(self, peer: int) -> None:
        # BYE on the other connection may overtake frames, which then are lost.
        if peer not in self._departed or peer in self._ended - self._complete:
            self._lose(peer, self._ends[peer])
            return
        self._end_link(peer)

    def _lose(self, peer: int, reason: str) -> None:
        if peer in self._lost:
            return
        self._lost.add(peer)
        self._pending_losses.append(PeerDisconnected(peer, reason))
        self._end_link(peer)

    def _end_link(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._hold_no_more(peer)
            link.close(0)

    def _patience_s(self, linger_s: float) -> float:
        """Return how long `close` waits for links that do not move."""
        is_remote = any(link.is_remote for link in self._links.values())
        return max(linger_s, self._config.link_silence_s) if is_remote else linger_s

    def _await_sent(self, linger_s: float) -> None:
        """Wait until the receivers' hosts have all frames, as long as bytes move.

        A link between hosts may stand still for `lost_after_s`: then its peer counts as failed in
        any call, too.
        """
        patience_s = self._patience_s(linger_s)
        awaited = {peer: Delivery(link) for peer, link in self._links.items() if link.is_remote}
        moved = time.monotonic()
        while awaited and (now := time.monotonic()) < moved + patience_s:
            self._watch_links(now)
            self._judge_closing()
            alive = self._links.keys() - self._closing.keys() - self._departed
            for peer in awaited.keys() - alive:
                del awaited[peer]
            looks = [one.look() for one in awaited.values()]
            if any(looks):
                moved = now
            awaited = {peer: one for peer, one in awaited.items() if not one.is_complete}
            if awaited:
                time.sleep(_FLUSH_LOOK_S)

    def _send_bye(self, linger_s: float) -> None:
        header = Header(FrameType.BYE, self._rank, self._generation, 0).pack()
        while self.receive() is not None:  # so that BYE goes to all peers that sent frames
            pass
        deadline = time.monotonic() + self._patience_s(linger_s)
        while self._unsent and time.monotonic() < deadline:
            self._flush()
            if self._unsent:
                zmq_poll([(self._links[peer].socket, zmq.POLLOUT) for peer in self._unsent], 50)
                self._watch_links(time.monotonic())
                self._judge_closing()
        for peer, link in self._links.items():
            if peer not in self._departed:
                with contextlib.suppress(zmq.ZMQError):
                    data = self._with_checksum(header) if peer in self._checksummed else header
                    link.socket.send(data, zmq.NOBLOCK)
        for identity, peer in self._sources.items():
            if peer in self._departed or peer in self._lost:
                continue  # a closed peer would only delay the end of this rank
            try:
                self._router.send_multipart([identity, header], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                    raise TransportError(f"saying goodbye failed: {error}") from error
