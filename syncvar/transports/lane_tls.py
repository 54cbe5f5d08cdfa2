"""TLS 1.3 with mutual authentication for lanes, from the secret of the job.

All processes of a job derive one Ed25519 key, and the same self-signed certificate. Each end of a
lane shows this certificate, trusts no other, and accepts TLS 1.3 only. So only processes with the
secret connect. The package `cryptography` makes the certificate; Python's `ssl` does the rest.
"""

from __future__ import annotations

import importlib.util
import os
import ssl
from typing import TYPE_CHECKING

from syncvar.transports.lanes import Lane

if TYPE_CHECKING:
    import socket

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.lanes import LaneConnection

_SENT_NBYTES = _RECEIVED_NBYTES = 64 << 10  # what a system call moves at most
_RECORD_NBYTES = 16 << 10  # longest record of TLS
_FIRST_YEAR, _LAST_YEAR = 2000, 9999  # the secret limits the validity, not the clock


def missing_reason() -> str:
    """Return why this process has no TLS for lanes; empty if it has."""
    if not ssl.HAS_TLSv1_3:
        return "Python's ssl has no TLS 1.3"
    if importlib.util.find_spec("cryptography") is None:
        return "encrypted lanes need the package cryptography (pip install 'syncvar[lanes]')"
    return ""


class LaneTls:
    """The TLS contexts of a process, made from the 32 bytes of the job's key for lanes."""

    def __init__(self, key: bytes) -> None:
        certificate, private = _identity(key)
        self._certificate = certificate
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, private)
        self._server.num_tickets = 0  # no session is resumed
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, private)

    def wrap(self, connection: socket.socket, *, is_server: bool) -> TlsConnection:
        """Return a connected socket with TLS, whose handshake has not begun."""
        return TlsConnection(connection, self._server if is_server else self._client, is_server)

    def go_on(self, connection: LaneConnection) -> None:
        """Go on with a handshake, and check the other end's certificate once it is complete.

        Raises BlockingIOError if it needs more bytes, and OSError if it has failed.
        """
        assert isinstance(connection, TlsConnection)
        if connection.certificate_after_handshake() != self._certificate:
            raise OSError(0, "it is no process of this job")

    def lane(self, peer: int, connection: LaneConnection, config: RuntimeConfig) -> Lane:
        """Return the lane of a connection that both ranks have committed to."""
        assert isinstance(connection, TlsConnection)
        return TlsLane(peer, connection, config)


class TlsConnection:
    """A non-blocking socket with TLS.

    It encrypts and decrypts in memory, so that a system call moves many records of 16 KiB.
    """

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        is_server: bool,  # noqa: FBT001
    ) -> None:
        self.raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._unsent = memoryview(b"")  # encrypted bytes that the system has not taken
        self._received = memoryview(bytearray(_RECEIVED_NBYTES))

    @property
    def version(self) -> str | None:
        """Version of TLS."""
        return self._tls.version()

    @property
    def has_unsent(self) -> bool:
        """Whether encrypted bytes wait that the system has not taken."""
        return len(self._unsent) > 0

    @property
    def has_received(self) -> bool:
        """Whether received bytes wait that the system no longer signals."""
        return self._tls.pending() > 0 or self._incoming.pending > 0

    def certificate_after_handshake(self) -> bytes | None:
        """Go on with the handshake; return the other end's certificate once it is complete."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                self._take_more()
                continue
            except ssl.SSLError:
                self.flush()  # the alert that says why
                raise
            self.flush()
            return self._tls.getpeercert(binary_form=True)

    def send(self, data: bytes | memoryview) -> int:
        """Encrypt and send bytes; return how many. Raises BlockingIOError for none."""
        count = self.send_parts([memoryview(data)])
        if not count:
            raise BlockingIOError
        return count

    def send_parts(self, parts: list[memoryview]) -> int:
        """Encrypt and send bytes until the system does not take more; return how many."""
        if self.has_unsent and not self.flush():
            return 0
        count = 0
        # The first record of many goes at once: the receiver wakes up meanwhile.
        limit = 1 if sum(map(len, parts)) > _RECORD_NBYTES else _SENT_NBYTES
        for part in parts:
            done = 0
            while done < len(part):
                done += self._tls.write(part[done:])  # a record
                if self._outgoing.pending >= limit:
                    if not self.flush():
                        return count + done
                    limit = _SENT_NBYTES
            count += done
        self.flush()
        return count

    def flush(self) -> bool:
        """Send encrypted bytes; return whether the system has taken all."""
        if not self._unsent and self._outgoing.pending:
            self._unsent = memoryview(self._outgoing.read())
        while self._unsent:
            try:
                self._unsent = self._unsent[self.raw.send(self._unsent) :]
            except BlockingIOError:
                return False
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())
        return True

    def recv(self, nbytes: int) -> bytes:
        """Receive up to so many bytes; raise BlockingIOError if there are none now."""
        memory = bytearray(nbytes)
        return bytes(memory[: self.recv_into(memoryview(memory))])

    def recv_into(self, memory: memoryview) -> int:
        """Receive bytes into memory; return 0 at the end, or raise BlockingIOError."""
        if not self.has_received:  # the exception of ssl takes longer than this
            self._take_more()
        count, nbytes = 0, len(memory)
        while True:
            try:
                count += self._tls.read(nbytes - count, memory[count:])  # type: ignore[operator]
            except ssl.SSLWantReadError:
                if count:
                    return count
                self._take_more()
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return count
            if count == nbytes or not self.has_received:
                return count

    def _take_more(self) -> None:
        """Receive encrypted bytes; raise BlockingIOError if there are none now."""
        nbytes = self.raw.recv_into(self._received)
        if nbytes:
            self._incoming.write(self._received[:nbytes])
        else:
            self._incoming.write_eof()

    def drop(self) -> None:
        """Forget what has not been sent."""
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.raw.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.raw.close()


def _context(protocol: int, certificate: bytes, private: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # the certificate is of the job, not of a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate)
    descriptor = os.memfd_create("syncvar-lane")  # ssl reads keys from files only
    try:
        os.write(descriptor, private)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def _identity(key: bytes) -> tuple[bytes, bytes]:
    """Return the job's certificate in DER, and private key and certificate in PEM."""
    import datetime as dt

    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(key)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "syncvar job")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(dt.datetime(_FIRST_YEAR, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(_LAST_YEAR, 12, 31, tzinfo=dt.UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, None)
    )
    pem = serialization.Encoding.PEM
    secret_part = private.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return der, secret_part + certificate.public_bytes(pem)


class TlsLane(Lane):
    """A lane whose bytes TLS encrypts and authenticates; it needs no checksums."""

    __slots__ = ("tls",)

    has_checksums = False

    def __init__(self, peer: int, connection: TlsConnection, config: RuntimeConfig) -> None:
        super().__init__(peer, connection.raw, config)
        self.tls = connection

    @property
    def has_unsent(self) -> bool:
        """Whether frames, or encrypted bytes of some, wait for the system to take them."""
        return super().has_unsent or self.tls.has_unsent

    @property
    def has_staged(self) -> bool:
        """Whether received bytes wait that the system no longer signals."""
        return super().has_staged or self.tls.has_received

    def flush(self) -> None:
        """Send queued frames, as much as the system takes."""
        try:
            if not self.tls.flush():
                return
        except OSError:  # its end decides, as in `Lane`
            self._drop()
            return
        super().flush()

    def _give(self, parts: list[memoryview]) -> int:
        """Return how many bytes TLS has taken."""
        return self.tls.send_parts(parts)

    def _take(self, memory: memoryview) -> int:
        return self.tls.recv_into(memory)

    def _drop(self) -> None:
        super()._drop()
        self.tls.drop()
