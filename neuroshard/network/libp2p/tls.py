"""TLS 1.3 (libp2p specification "libp2p TLS Handshake"): OpenSSL encrypts, a certificate proves the key of the node.

Each side shows one self-signed certificate. An extension contains the public key of the node and its signature over
the key of the certificate. No authority takes part, so each side verifies the other's certificate itself, after the
handshake. Python's `ssl` cannot do that on the listening side: it requests a client's certificate only together with a
verification against authorities, and has no callback. libp2p's own transport changes the structure behind
`ssl.SSLContext` through `ctypes` and whichever libssl the system finds. Therefore pyOpenSSL drives OpenSSL here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.exceptions import HandshakeFailure
from multiaddr import Multiaddr
from OpenSSL import SSL
from OpenSSL.crypto import X509

from neuroshard.network.libp2p.sockets import MAX_READ_BYTES

TLS_PROTOCOL = TProtocol("/tls/1.0.0")
KEY_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
SIGNED_PREFIX = b"libp2p-tls-handshake:"
APPLICATION = b"libp2p"  # the application protocol (ALPN); the muxer is negotiated afterwards
MAX_SIGNED_KEY_BYTES = 4096
RECORD_BYTES = 16 * 1024  # the most that one record contains
FLUSH_BYTES = 512 * 1024
_ALWAYS = (datetime(1970, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC))  # for peers with a wrong clock
_SEQUENCE, _OCTET_STRING = 0x30, 0x04


class TlsError(HandshakeFailure):
    """The other side does not prove which node it is, or does not speak this TLS."""


def signed_key(public_key: bytes, signature: bytes) -> bytes:
    """The value of the extension in DER. `public_key` is encoded as libp2p does it."""
    return _der(_SEQUENCE, _der(_OCTET_STRING, public_key) + _der(_OCTET_STRING, signature))


def certified_key(certificate: x509.Certificate, at: datetime) -> PublicKey:
    """The key of the node that a certificate belongs to, if it is valid at that time. Raises TlsError."""
    if not certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc:
        raise TlsError("the certificate has expired or is not valid yet")
    try:
        certificate.verify_directly_issued_by(certificate)
        extensions = tuple(certificate.extensions)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError, x509.DuplicateExtension) as error:
        raise TlsError(f"the certificate is not signed with its own key, or is malformed ({error})") from None
    values = [one.value.public_bytes() for one in extensions if one.oid == KEY_EXTENSION]
    unknown = [one for one in extensions if one.critical and isinstance(one.value, x509.UnrecognizedExtension)]
    if len(values) != 1 or any(one.oid != KEY_EXTENSION for one in unknown):
        raise TlsError("the certificate has no key of a node, or a critical extension that this node does not know")
    encoded, signature = _read_signed_key(values[0])
    try:
        key = deserialize_public_key(encoded)
        is_signed = key.verify(SIGNED_PREFIX + _key_bytes(certificate), signature)
    except (DecodeError, BaseLibp2pError, UnsupportedAlgorithm, ValueError) as error:
        raise TlsError(f"the key of the node cannot be read ({error})") from None
    if not is_signed:
        raise TlsError("the certificate is not signed by the node that it names")
    return key


def _key_bytes(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + content


def _read_signed_key(value: bytes) -> tuple[bytes, bytes]:
    """Public key and signature. Raises TlsError for anything that `signed_key` would not write."""
    if len(value) > MAX_SIGNED_KEY_BYTES:
        raise TlsError("the key of the node is too long")
    sequence, _ = _read_der(_SEQUENCE, value)
    public_key, rest = _read_der(_OCTET_STRING, sequence)
    signature, _ = _read_der(_OCTET_STRING, rest)
    if signed_key(public_key, signature) != value:
        raise TlsError("the key of the node is not encoded in DER")
    return public_key, signature


def _read_der(tag: int, data: bytes) -> tuple[bytes, bytes]:
    """The content of the first value, and the bytes after it."""
    if len(data) < 2 or data[0] != tag:
        raise TlsError("the key of the node is not encoded in DER")
    size, start = data[1], 2
    if size >= 0x80:
        start += size & 0x7F
        size = int.from_bytes(data[2:start])
    return data[start : start + size], data[start + size :]


class TlsTransport(ISecureTransport):
    """The security upgrade of one node, with a certificate that is made for this object."""

    def __init__(self, keys: KeyPair, now: Callable[[], float]) -> None:
        """`now` returns seconds since the epoch; certificates of peers must be valid then."""
        self._keys = keys
        self._now = now
        self._context = _context(keys)

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Upgrade as the server. Raises TlsError or ConnectionClosedError."""
        return await self._secured(conn, None)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Upgrade as the client of this peer and no other. Raises TlsError or ConnectionClosedError."""
        return await self._secured(conn, peer_id)

    async def _secured(self, conn: IRawConnection, expected: ID | None) -> ISecureConn:
        engine = SSL.Connection(self._context, None)
        if expected is None:
            engine.set_accept_state()
        else:
            engine.set_connect_state()
        await _shake_hands(engine, conn)
        key = self._key_of_peer(engine, is_initiator=expected is not None)
        if expected is not None and ID.from_pubkey(key) != expected:
            raise TlsError("another node answers there")
        return TlsConnection(engine, conn, self._keys, key, is_initiator=expected is not None)

    def _key_of_peer(self, engine: SSL.Connection, *, is_initiator: bool) -> PublicKey:
        certificate = engine.get_peer_certificate(as_cryptography=True)
        if certificate is None or engine.get_alpn_proto_negotiated() != APPLICATION:
            raise TlsError("there is no certificate, or another protocol than libp2p")
        shown = engine.get_peer_cert_chain(as_cryptography=True) or []
        if len(shown) > is_initiator:  # OpenSSL leaves the first one out of the list of a client
            raise TlsError("there is more than one certificate")
        return certified_key(certificate, datetime.fromtimestamp(self._now(), UTC))


def _context(keys: KeyPair) -> SSL.Context:
    """Both sides use the same. The memory of idle connections is released, and no session can be resumed."""
    own_key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libp2p")])
    spki = own_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    value = signed_key(keys.public_key.serialize(), keys.private_key.sign(SIGNED_PREFIX + spki))
    builder = x509.CertificateBuilder(name, name, own_key.public_key(), x509.random_serial_number(), *_ALWAYS)
    builder = builder.add_extension(x509.UnrecognizedExtension(KEY_EXTENSION, value), critical=False)
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)
    context.use_certificate(builder.sign(own_key, hashes.SHA256()))
    context.use_privatekey(own_key)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _accept)
    context.set_alpn_protos([APPLICATION])
    context.set_alpn_select_callback(_choose_application)
    return context


def _accept(_connection: SSL.Connection, _certificate: X509, _error: int, _depth: int, _is_known: int) -> bool:
    return True  # no authority knows the certificate; `certified_key` verifies it


def _choose_application(_: SSL.Connection, offered: Sequence[bytes]) -> bytes:
    return APPLICATION if APPLICATION in offered else b""  # the latter ends the handshake


async def _shake_hands(engine: SSL.Connection, conn: IRawConnection) -> None:
    while True:
        try:
            engine.do_handshake()
        except SSL.WantReadError:
            await _flush(engine, conn)
            await _feed(engine, conn)
        except SSL.Error as error:
            with suppress(IOException):
                await _flush(engine, conn)  # the alert, so that the other side learns the reason
            raise TlsError(f"the TLS handshake failed ({_reason(error)})") from None
        else:
            await _flush(engine, conn)
            return


async def _flush(engine: SSL.Connection, conn: IRawConnection) -> None:
    """Send the records that OpenSSL has written to memory."""
    with suppress(SSL.WantReadError):  # there are none
        while True:
            data = engine.bio_read(FLUSH_BYTES)
            await conn.write(data)
            if len(data) < FLUSH_BYTES:
                return


async def _feed(engine: SSL.Connection, conn: IRawConnection) -> None:
    """Wait for bytes of the other side. Raises ConnectionClosedError at the end."""
    data = await conn.read()
    if not data:
        raise ConnectionClosedError("the other side closed the connection", transport="tls")
    engine.bio_write(data)


def _reason(error: SSL.Error) -> str:
    return str(error) or type(error).__name__


class TlsConnection(BaseSession):
    """One encrypted connection; one task may write while another reads."""

    def __init__(
        self, engine: SSL.Connection, conn: IRawConnection, keys: KeyPair, peer_key: PublicKey, *, is_initiator: bool
    ) -> None:
        super().__init__(
            local_peer=ID.from_pubkey(keys.public_key),
            local_private_key=keys.private_key,
            remote_peer=ID.from_pubkey(peer_key),
            remote_permanent_pubkey=peer_key,
            is_initiator=is_initiator,
        )
        self._engine = engine
        self._conn = conn
        self._left = b""  # received and not read

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes. None: the next available bytes. Raises ConnectionClosedError at the end."""
        if n is None:
            data, self._left = self._left or await self._receive(), b""
            return data
        if n > MAX_READ_BYTES:
            raise IOException(f"a read of {n} bytes is above the limit")
        while len(self._left) < n:
            self._left += await self._receive()
        data, self._left = self._left[:n], self._left[n:]
        return data

    async def read_into(self, memory: memoryview) -> int:
        """Put the next available bytes into `memory`, at least one. Raises ConnectionClosedError at the end."""
        if self._left:
            count = min(len(self._left), len(memory))
            memory[:count], self._left = self._left[:count], self._left[count:]
            return count
        while not (count := self._decrypted_into(memory)):
            await _feed(self._engine, self._conn)
        return count

    async def write(self, data: bytes) -> None:
        """Send all bytes. Raises ConnectionClosedError."""
        await self.write_all((data,))

    async def write_all(self, parts: Sequence[bytes | memoryview]) -> None:
        """Encrypt all parts, then send them together. Raises ConnectionClosedError."""
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[self._engine.send(view) :]
        except SSL.Error as error:
            raise ConnectionClosedError(_reason(error), transport="tls") from None
        await _flush(self._engine, self._conn)

    async def close(self) -> None:
        """Close the connection below. The muxer's goodbye, and not TLS, says that no data is missing."""
        await self._conn.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """IP address and port of the other side; None behind a relay."""
        return self._conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Addresses of the connection below."""
        return self._conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct, or through a relay."""
        return self._conn.get_connection_type()

    async def _receive(self) -> bytes:
        while not (records := self._decrypted()):
            await _feed(self._engine, self._conn)
        return records

    def _decrypted_into(self, memory: memoryview) -> int:
        """As `_decrypted`, without a copy in between."""
        count = 0
        try:
            while count < len(memory):
                count += self._engine.recv_into(memory[count:], min(RECORD_BYTES, len(memory) - count))
        except SSL.WantReadError:
            return count
        except SSL.Error as error:
            if not count:
                raise ConnectionClosedError(_reason(error), transport="tls") from None
        return count

    def _decrypted(self) -> bytes:
        """All complete records that are here. Raises ConnectionClosedError for a damaged one, and at the end."""
        records: list[bytes] = []
        try:
            while True:
                records.append(self._engine.recv(RECORD_BYTES))
        except SSL.WantReadError:
            return b"".join(records)
        except SSL.Error as error:
            if not records:
                raise ConnectionClosedError(_reason(error), transport="tls") from None
            return b"".join(records)  # the next call raises
