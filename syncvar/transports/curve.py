"""Authentication of tcp links: keys and tickets from the job's secret, and the gate.

CURVE encrypts a link, but a listener accepts every client that knows its public key. So the gate,
ZeroMQ's authenticator (ZAP, RFC 27), accepts the job's own client key only. All members share one
client key pair and one listener key pair.

With `encryption = control-only`, links begin with a ticket for each pair of ranks, which the gate
compares (PLAIN, RFC 24). With `encryption = off` the gate accepts all, and only counts and closes
silent connections.

ZeroMQ accepts every connection and gives it the handshake's time limit, so a thousand silent
connections could use up this process's descriptors. `UnauthenticatedPeers` closes connections that
had time to authenticate, the oldest first, until few are left. It never closes members and refuses
no new connection, which may be a member's. It also closes a client that sends more than a handshake
needs.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import resource
import socket
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils import z85

from syncvar.core.errors import ConfigError, HandshakeError
from syncvar.protocol.auth_keys import derive
from syncvar.protocol.frame import UNPROVED_NBYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.core.settings import RuntimeConfig

WAITING_MAX = 16  # connections that may stay without authentication after PROVE_S
PROVE_S = 1.0
LOOK_EVERY_S = 1.0  # without unauthenticated connections
_BUSY_S = 0.1
_DESCRIPTORS_SHARE = 4  # unauthenticated connections may use one in so many of all descriptors

# A listener sends an unauthenticated client 64 bytes of greeting, then 170 of WELCOME (RFC 26) or
# at most 20 of refusal. READY, which only members receive, exceeds this limit.
UNPROVED_NBYTES = 256
# Without encryption: 64 bytes of greeting, at most 20 of refusal. With READY at least 107.
UNPROVED_PLAIN_NBYTES = 96
_COUNTERS = struct.Struct("=120xQQ")  # tcp_info: bytes acked and received, since Linux 4.1

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"syncvar"
_VERSION = b"1.0"
_TEST_MS = 5000
_LOG_EVERY_S = 60.0
_DIGITS_MAX = 9  # of a rank

_log = logging.getLogger("syncvar")

# -- unauthenticated connections -------------------------------------------------------------------


class UnauthenticatedPeers:
    """The unauthenticated connections at one tcp port of this process.

    Before a client authenticates, the listener sends it at most `unproved_nbytes` bytes.
    """

    def __init__(self, port: int, unproved_nbytes: int = UNPROVED_NBYTES) -> None:
        self._port = port
        self._unproved_nbytes = unproved_nbytes
        self._since: dict[int, float] = {}
        self.closed = 0
        self.listener: socket.socket | None = None
        for one in self._sockets():
            if self.listener is None and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self.listener = one
            else:
                one.close()

    def close(self) -> None:
        """Close the copy of the listener. Idempotent."""
        if self.listener is not None:
            self.listener.close()

    def look(self, now: float) -> float:
        """Close surplus connections; return after how many seconds to look again."""
        unproved: dict[int, socket.socket] = {}
        talkative = set()
        for one in self._sockets():
            inode = os.fstat(one.fileno()).st_ino
            received = None if inode in unproved else self._heard_of_stranger(one)
            if received is None:
                one.close()
                continue
            unproved[inode] = one
            if received > UNPROVED_NBYTES_MAX:
                talkative.add(inode)
        self._since = {inode: self._since.get(inode, now) for inode in unproved}
        oldest_first = sorted(self._since, key=lambda inode: self._since[inode])
        late = [inode for inode in oldest_first if now - self._since[inode] >= PROVE_S]
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_SHARE
        ending = talkative | {
            *late[: max(0, len(late) - WAITING_MAX)],
            *oldest_first[: max(0, len(oldest_first) - room)],
        }
        for inode, one in unproved.items():
            if inode in ending:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # ZeroMQ then closes its own descriptor
            one.close()
        self.closed += len(ending)
        return _BUSY_S if unproved else LOOK_EVERY_S

    def _heard_of_stranger(self, one: socket.socket) -> int | None:
        """Return the bytes that an unauthenticated client has sent; None for a member."""
        with contextlib.suppress(OSError, struct.error):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
            sent, received = _COUNTERS.unpack(info)
            return int(received) if sent <= self._unproved_nbytes else None
        return None

    def _sockets(self) -> list[socket.socket]:
        """Return copies of this process's tcp sockets at the port; they outlive ZeroMQ's own."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                copy = os.dup(int(name))
                try:
                    if self._is_here(copy):
                        found.append(socket.socket(fileno=copy))
                        copy = -1
                finally:
                    if copy >= 0:
                        os.close(copy)
        return found

    def _is_here(self, descriptor: int) -> bool:
        one = socket.socket(fileno=descriptor)
        try:
            is_inet = one.family in (socket.AF_INET, socket.AF_INET6)
            is_tcp = is_inet and one.type == socket.SOCK_STREAM
            return is_tcp and bool(one.getsockname()[1] == self._port)
        finally:
            one.detach()


# -- keys and tickets ------------------------------------------------------------------------------


class LinkKeys(NamedTuple):
    """The keys of a job's tcp links, each as (public, secret), and those of tickets and lanes."""

    member: tuple[bytes, bytes]
    listener: tuple[bytes, bytes]
    tickets: bytes
    lanes: bytes

    def listen(self, socket: Any) -> None:
        """Make the tcp addresses that a socket binds later accept members only."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.listener[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.listener[1])

    def connect(self, socket: Any) -> None:
        """Make a socket authenticate itself and the listener when it connects over tcp."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.listener[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.member[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.member[1])

    def listen_for_tickets(self, socket: Any) -> None:
        """Make the tcp addresses that a socket binds later accept tickets, without encryption."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def connect_by_ticket(self, socket: Any, source: int, target: int) -> None:
        """Make a socket show the ticket of a pair of ranks when it connects over tcp."""
        socket.setsockopt(zmq.PLAIN_USERNAME, b"%d" % source)
        socket.setsockopt(zmq.PLAIN_PASSWORD, self.ticket(source, target))

    def connect_host(self, socket: Any, config: RuntimeConfig, source: int, target: int) -> None:
        """Prepare a socket for a connection to another host, as `encryption` demands."""
        if config.encryption == "required":
            self.connect(socket)
        else:
            self.connect_by_ticket(socket, source, target)

    def ticket(self, source: int, target: int) -> bytes:
        """Return the ticket of rank `source` for rank `target`."""
        return derive(self.tickets, b"%d to %d" % (source, target)).hex().encode()


def link_keys(secret: bytes, job_id: str = "") -> LinkKeys:
    """Return the link keys of a job; equal in every process of the job.

    The job's identity makes tickets unique to this job, because a secret may serve several jobs.
    Raises HandshakeError if this build of ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise HandshakeError(
            "links between hosts are encrypted with CURVE, which this build of ZeroMQ does not "
            "have: install the wheel of pyzmq (pip install --force-reinstall pyzmq)"
        )
    pairs = []
    for role in (b"syncvar link member", b"syncvar link listener"):
        private = z85.encode(derive(secret, role))
        pairs.append((zmq.curve_public(private), private))
    job = job_id.encode()
    tickets = derive(secret, b"syncvar link tickets " + job)
    return LinkKeys(pairs[0], pairs[1], tickets, derive(secret, b"syncvar lanes " + job))


# -- the gate --------------------------------------------------------------------------------------


class Gate:
    """Decides in a thread which clients may connect to the listeners of a ZeroMQ context.

    It also counts refused clients, and limits the descriptors that silent clients use. Without
    `keys` it accepts all; with `rank` it accepts tickets for that rank instead of keys. Raises
    HandshakeError if it does not work, so nothing may listen.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: LinkKeys | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        rank: int | None = None,
    ) -> None:
        self.refused_peers = 0
        # Of those: refused by this gate, and ended before the gate was asked.
        self._refused = self._ended = 0
        self._keys = keys
        self._rank = rank
        is_encrypted = keys is not None and rank is None
        self._unproved_nbytes = UNPROVED_NBYTES if is_encrypted else UNPROVED_PLAIN_NBYTES
        self._clock = clock
        self._logged_at, self._logged_peers = float("-inf"), 0
        self._counting = threading.Lock()
        address = f"inproc://end-{id(self)}"
        self._socket: Any = context.socket(zmq.REP)
        self._end: Any = context.socket(zmq.PAIR)
        self._commands: Any = context.socket(zmq.PAIR)
        try:
            if keys is not None:
                self._socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            for one in (self._socket, self._end, self._commands):
                one.close(0)
            raise HandshakeError(
                f"no gate can be set up for links between hosts: {error}"
            ) from error
        self._end.bind(address)
        self._commands.connect(address)
        self._thread = threading.Thread(target=self._serve, name="syncvar-gate", daemon=True)
        self._thread.start()
        try:
            if keys is not None:
                self._test(context, keys)
        except BaseException:
            self.close()
            raise

    def guard(self, endpoint: str) -> None:
        """Limit the unauthenticated connections at a listening address "tcp://<address>:<port>"."""
        self._end.send(endpoint.rpartition(":")[2].encode())

    def refuse(self, place: str) -> None:
        """Count an unauthenticated client with a known address; from any thread."""
        self._count(1, f"a stranger at {place!r}")

    def unproved(self, count: int) -> None:
        """Count connections that have certainly ended without authentication; from any thread.

        `count` is all ended connections, minus the authenticated ones by the socket's events, plus
        known open ones. Events do not say which connection authenticated. So an open silent
        connection hides a failed one, and a member never counts as a stranger.
        """
        new = count - self._ended - self._refused
        if new > 0:
            self._ended += new
            self._count(new, "a stranger, whose connection did not prove to be a member's,")

    def _count(self, new: int, client: str) -> None:
        """Count strangers, and log it at most once a minute."""
        with self._counting:
            self.refused_peers += new
            now = self._clock()
            if now - self._logged_at < _LOG_EVERY_S:
                return
            self._logged_at, self._logged_peers = now, self.refused_peers
            count = self.refused_peers
        _log.warning("%s was refused (%d so far)", client, count)

    def close(self) -> None:
        """End the thread, and log refused connections that were not logged yet. Idempotent."""
        if not self._end.closed:
            self._end.send(b"")
            self._thread.join()
            self._end.close(0)
            if self.refused_peers > self._logged_peers:
                self._logged_peers = self.refused_peers
                _log.warning("%d connections of strangers were refused in all", self.refused_peers)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._commands, zmq.POLLIN)
        guarded: list[UnauthenticatedPeers] = []
        look_at = float("inf")
        try:
            while True:
                wait_s = max(0.0, look_at - time.monotonic())
                ready = dict(poller.poll(int(wait_s * 1000) + 1 if guarded else None))
                if self._socket in ready:
                    with contextlib.suppress(zmq.ZMQError):
                        self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
                if self._commands in ready:
                    port = self._commands.recv()
                    if not port:
                        return
                    guarded.append(UnauthenticatedPeers(int(port), self._unproved_nbytes))
                    if guarded[-1].listener is not None:
                        poller.register(guarded[-1].listener, zmq.POLLIN)
                now = time.monotonic()
                has_client = any(isinstance(item, int) for item in ready)
                if guarded and (now >= look_at or has_client or self._commands in ready):
                    look_at = now + min(one.look(now) for one in guarded)
        finally:
            for one in guarded:
                one.close()
            self._socket.close(0)
            self._commands.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        if (
            len(request) > 6
            and request[0] == _VERSION
            and request[2] == _DOMAIN
            and self._is_member(request[5], request[6:])
        ):
            return [_VERSION, number, b"200", b"OK", b"member", b""]
        self._refused += 1
        self.refuse(request[3].decode("ascii", "replace")[:64] if len(request) > 3 else "nowhere")
        return [_VERSION, number, b"400", b"no member of this job", b"", b""]

    def _is_member(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if self._keys is None:
            return False
        if self._rank is None:
            if mechanism != b"CURVE" or len(credentials) != 1:
                return False
            return hmac.compare_digest(credentials[0], z85.decode(self._keys.member[0]))
        if mechanism != b"PLAIN" or len(credentials) != 2:
            return False
        number, ticket = credentials
        if not number.isdigit() or len(number) > _DIGITS_MAX:
            return False
        return hmac.compare_digest(ticket, self._keys.ticket(int(number), self._rank))

    def _test(self, context: zmq.Context[Any], keys: LinkKeys) -> None:
        mine = [b"CURVE", z85.decode(keys.member[0])]
        if self._rank is not None:
            mine = [b"PLAIN", b"0", keys.ticket(0, self._rank)]
        with context.socket(zmq.REQ) as asks:
            asks.setsockopt(zmq.LINGER, 0)
            asks.setsockopt(zmq.RCVTIMEO, _TEST_MS)
            asks.connect(_ENDPOINT)
            asks.send_multipart([_VERSION, b"test", _DOMAIN, b"self", b"", *mine])
            try:
                answer = asks.recv_multipart()
            except zmq.Again:
                answer = []
        if answer[:3] != [_VERSION, b"test", b"200"]:
            raise HandshakeError(
                "the gate for links between hosts does not answer: nothing may listen"
            )


def gate_for_hosts(
    context: zmq.Context[Any],
    socket: Any,
    keys: LinkKeys | None,
    config: RuntimeConfig,
    number: int,
    name: str,
) -> Gate:
    """Make a socket's later tcp addresses accept processes of other hosts; return the gate.

    `number` is that of this process, for its tickets. Raises ConfigError if encryption needs keys
    and there are none.
    """
    if keys is None and config.encryption != "off":
        raise ConfigError(f"{name} may not listen for other hosts without the job's secret")
    gate = Gate(context, keys, rank=number if config.encryption == "control-only" else None)
    if keys is not None:
        (keys.listen if config.encryption == "required" else keys.listen_for_tickets)(socket)
    return gate
