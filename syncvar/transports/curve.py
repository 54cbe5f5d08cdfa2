"""Who may connect over tcp: keys and tickets derived from the job's secret, and the gate that knows them.

CURVE encrypts and authenticates a link, but by itself only the listener's side of it: whoever knows the listener's
public key is let in. The gate is ZeroMQ's way to decide about clients (ZAP, RFC 27): it lets the job's own key in, and
nobody else. One pair of keys serves all members and one all listeners, because all members trust each other.

Links that are not to be encrypted (`encryption = control-only`) begin with a ticket instead, one for each pair of ranks,
which the gate compares (PLAIN, RFC 24): who does not see the network cannot know it. With `encryption = off` nothing is
asked for, and the gate only counts, and ends those that say nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils import z85

from syncvar.core.errors import ConfigError, HandshakeError
from syncvar.protocol.auth_keys import derive
from syncvar.transports.unauthenticated_peers import (
    UNPROVED_NBYTES,
    UNPROVED_PLAIN_NBYTES,
    UnauthenticatedPeers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.core.settings import RuntimeConfig

__all__ = ["Gate", "LinkKeys", "gate_for_hosts", "link_keys"]

_log = logging.getLogger("syncvar")
_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"syncvar"
_VERSION = b"1.0"
_TEST_MS = 5000
_SAY_EVERY_S = 60.0
_DIGITS_MAX = 9  # of a rank


class LinkKeys(NamedTuple):
    """The keys of a job's tcp links, in ZeroMQ's text form.

    Args:
        member: (public, secret) of whoever connects.
        listener: (public, secret) of whoever listens.
        tickets: What the tickets of links that are not encrypted are derived from.
    """

    member: tuple[bytes, bytes]
    listener: tuple[bytes, bytes]
    tickets: bytes

    def listen(self, socket: Any) -> None:
        """Make the tcp addresses that a socket binds from now on accept members only."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.listener[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.listener[1])

    def connect(self, socket: Any) -> None:
        """Make a socket that will connect over tcp prove that it is a member, to a listener that is one too."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.listener[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.member[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.member[1])

    def listen_for_tickets(self, socket: Any) -> None:
        """Make the tcp addresses that a socket binds from now on accept those who have a ticket; nothing is encrypted."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def connect_by_ticket(self, socket: Any, source: int, target: int) -> None:
        """Make a socket that will connect over tcp show the ticket of a pair of ranks."""
        socket.setsockopt(zmq.PLAIN_USERNAME, b"%d" % source)
        socket.setsockopt(zmq.PLAIN_PASSWORD, self.ticket(source, target))

    def connect_host(self, socket: Any, config: RuntimeConfig, source: int, target: int) -> None:
        """Make a socket that will connect one process to one of another host prove itself as `encryption` asks for."""
        if config.encryption == "required":
            self.connect(socket)
        else:
            self.connect_by_ticket(socket, source, target)

    def ticket(self, source: int, target: int) -> bytes:
        """Return what rank `source` shows to rank `target`."""
        return derive(self.tickets, b"%d to %d" % (source, target)).hex().encode()


def link_keys(secret: bytes, job_id: str = "") -> LinkKeys:
    """Return the keys that a job's secret stands for; the same in every process of the job.

    Args:
        secret: The job's.
        job_id: Its identity: a secret may serve several jobs, a ticket serves one.

    Raises:
        HandshakeError: This build of ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise HandshakeError(
            "links between hosts are encrypted with CURVE, which this build of ZeroMQ does not have: install the wheel "
            "of pyzmq (pip install --force-reinstall pyzmq)"
        )
    pairs = []
    for role in (b"syncvar link member", b"syncvar link listener"):
        private = z85.encode(derive(secret, role))
        pairs.append((zmq.curve_public(private), private))
    return LinkKeys(pairs[0], pairs[1], derive(secret, b"syncvar link tickets " + job_id.encode()))


def gate_for_hosts(
    context: zmq.Context[Any],
    socket: Any,
    keys: LinkKeys | None,
    config: RuntimeConfig,
    number: int,
    who: str,
) -> Gate:
    """Make the tcp addresses that a socket binds from now on accept the processes of other hosts; return the gate.

    Args:
        context: ZeroMQ context of this process.
        socket: It may be bound to other addresses already, which stay as they were.
        keys: Of the job; None only where nothing is encrypted.
        config: How links between hosts are protected.
        number: This process, whose tickets are accepted.
        who: The same in words, for messages.

    Raises:
        ConfigError: There are no keys, and links are to be protected.
    """
    if keys is None and config.encryption != "off":
        raise ConfigError(f"{who} may not listen for other hosts without the job's secret")
    gate = Gate(context, keys, rank=number if config.encryption == "control-only" else None)
    if keys is not None:
        (keys.listen if config.encryption == "required" else keys.listen_for_tickets)(socket)
    return gate


class Gate:
    """Decides who may connect to the listeners of a ZeroMQ context: members. One thread, ended by `close`.

    It also counts those who are refused, and sees to it that those who connect and say nothing do not use up this process's
    descriptors.

    Args:
        context: Whose listeners.
        keys: Of the job; None where nothing is asked for.
        clock: Seconds, to say the same not too often.
        rank: Whose tickets are accepted; None for keys.

    Raises:
        HandshakeError: It does not answer as it should, so that nothing may listen.
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
        self._asked = self._ended = (
            0  # of those: refused here, and ended without having come so far
        )
        self._keys = keys
        self._rank = rank
        self._unproved_nbytes = (
            UNPROVED_NBYTES if keys is not None and rank is None else UNPROVED_PLAIN_NBYTES
        )
        self._clock = clock
        self._said, self._said_peers = float("-inf"), 0
        self._counting = threading.Lock()
        place = f"inproc://end-{id(self)}"
        self._socket: Any = context.socket(zmq.REP)
        self._end: Any = context.socket(zmq.PAIR)
        self._told: Any = context.socket(zmq.PAIR)
        try:
            if keys is not None:
                self._socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            for one in (self._socket, self._end, self._told):
                one.close(0)
            raise HandshakeError(
                f"no gate can be set up for links between hosts: {error}"
            ) from error
        self._end.bind(place)
        self._told.connect(place)
        self._thread = threading.Thread(target=self._serve, name="syncvar-gate", daemon=True)
        self._thread.start()
        try:
            if keys is not None:
                self._test(context, keys)
        except BaseException:
            self.close()
            raise

    def guard(self, endpoint: str) -> None:
        """Keep the number of strangers small at an address that is listened on: "tcp://<address>:<port>"."""
        self._end.send(endpoint.rpartition(":")[2].encode())

    def refuse(self, place: str) -> None:
        """Count a stranger of whom something is known; from any thread."""
        self._count(1, f"a stranger at {place!r}")

    def unproved(self, count: int) -> None:
        """Note how many connections have ended without proving to be a member's, as far as that is certain; from any thread.

        Args:
            count: All that have ended, less those that had been proved, by the events of the socket, and those that are there and
                have been heard of. Events do not tell which connection was proved: one that is there and silent hides one that
                has failed, so no member is ever taken for a stranger.
        """
        new = count - self._ended - self._asked
        if new > 0:
            self._ended += new
            self._count(new, "a stranger, whose connection did not prove to be a member's,")

    def _count(self, new: int, who: str) -> None:
        """Count strangers, and say so once in a while."""
        with self._counting:
            self.refused_peers += new
            now = self._clock()
            if now - self._said < _SAY_EVERY_S:
                return
            self._said, self._said_peers = now, self.refused_peers
            count = self.refused_peers
        _log.warning("%s was refused (%d so far)", who, count)

    def close(self) -> None:
        """End the thread; say how many strangers there were, where that has not been said. Idempotent."""
        if not self._end.closed:
            self._end.send(b"")
            self._thread.join()
            self._end.close(0)
            if self.refused_peers > self._said_peers:
                self._said_peers = self.refused_peers
                _log.warning("%d connections of strangers were refused in all", self.refused_peers)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._told, zmq.POLLIN)
        guarded: list[UnauthenticatedPeers] = []
        look_at = float("inf")
        try:
            while True:
                now = time.monotonic()
                ready = dict(
                    poller.poll(
                        None if look_at == float("inf") else int(max(0.0, look_at - now) * 1000) + 1
                    )
                )
                if self._socket in ready:
                    with contextlib.suppress(zmq.ZMQError):
                        self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
                if self._told in ready:
                    port = self._told.recv()
                    if not port:
                        return
                    guarded.append(UnauthenticatedPeers(int(port), self._unproved_nbytes))
                    if guarded[-1].listener is not None:
                        poller.register(guarded[-1].listener, zmq.POLLIN)
                now = time.monotonic()
                if guarded and (
                    now >= look_at
                    or any(isinstance(item, int) for item in ready)
                    or self._told in ready
                ):
                    look_at = now + min(one.look(now) for one in guarded)
        finally:
            for one in guarded:
                one.close()
            self._socket.close(0)
            self._told.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        if (
            len(request) > 6
            and request[0] == _VERSION
            and request[2] == _DOMAIN
            and self._is_member(request[5], request[6:])
        ):
            return [_VERSION, number, b"200", b"OK", b"member", b""]
        self._asked += 1
        self.refuse(request[3].decode("ascii", "replace")[:64] if len(request) > 3 else "nowhere")
        return [_VERSION, number, b"400", b"no member of this job", b"", b""]

    def _is_member(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if self._keys is None:
            return False
        if self._rank is None:
            return (
                mechanism == b"CURVE"
                and len(credentials) == 1
                and hmac.compare_digest(credentials[0], z85.decode(self._keys.member[0]))
            )
        if (
            mechanism != b"PLAIN"
            or len(credentials) != 2
            or not credentials[0].isdigit()
            or len(credentials[0]) > _DIGITS_MAX
        ):
            return False
        return hmac.compare_digest(
            credentials[1], self._keys.ticket(int(credentials[0]), self._rank)
        )

    def _test(self, context: zmq.Context[Any], keys: LinkKeys) -> None:
        mine = (
            [b"CURVE", z85.decode(keys.member[0])]
            if self._rank is None
            else [b"PLAIN", b"0", keys.ticket(0, self._rank)]
        )
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
