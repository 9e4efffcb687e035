"""Authenticated TLS connections of the pool: certificates, streams, and the handshake that proves both node keys.

The stream encrypts from and decrypts into the caller's memory. It handles many records in one wake-up, which costs
about half as much as trio.SSLStream.

Python reads the key of a certificate only from a file. The node key is in one private file only, so the listener
creates another key at each start, and the node key signs its certificate in the handshake:

    dialler  -> listener   magic, version, the dialler's nonce
    listener -> dialler    the listener's nonce, its signature over (certificate, dialler's nonce, listener)
    dialler  -> listener   its public key, its signature over (certificate, listener's nonce, dialler, listener),
                           its session
    listener -> dialler    the verdict, its session

A signature is valid for one certificate, one nonce and one purpose. Therefore nobody can replay it, and no third node
in the middle can forward it: that node has another certificate.

A session is a number that identifies a side's memory of the other side's transfers. It changes when that memory is
lost, also after a restart of the process.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from neuroshard.errors import StorageError
from neuroshard.identity import NodeKey, SignatureError, node_id_of, public_key_of, verify_signature
from neuroshard.identity.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, purpose_message
from neuroshard.network.pool.options import ConnectionLostError, GreetingError
from neuroshard.types import NodeId

_BROKEN = (OSError, ValueError)  # ssl.SSLError is the former; a closed socket raises either


class SecureStream:
    """One TLS connection; one task may send while one other receives. After any error it is only good for `close`."""

    def __init__(self, socket: ssl.SSLSocket) -> None:
        """`socket` must not block and must not have shaken hands yet."""
        self.socket = socket
        self.waits = 0  # how often it had to wait for the other side
        self._is_closed = False

    async def handshake(self) -> None:
        """The TLS handshake. Raises ConnectionLostError."""
        while True:
            try:
                self.socket.do_handshake()
            except ssl.SSLWantReadError:
                await self._wait(trio.lowlevel.wait_readable)
            except ssl.SSLWantWriteError:
                await self._wait(trio.lowlevel.wait_writable)
            except _BROKEN as error:
                raise _lost(error) from None
            else:
                return

    async def receive_some(self, memory: memoryview) -> int:
        """Wait for bytes and put at most a record into `memory`. Raises ConnectionLostError, also at the end."""
        return await self._receive(memory, 1)

    async def receive_exactly(self, memory: memoryview) -> None:
        """Fill `memory`. Raises ConnectionLostError."""
        await self._receive(memory, len(memory))

    async def receive_bytes(self, count: int) -> bytes:
        """Receive exactly `count` bytes. Raises ConnectionLostError."""
        data = bytearray(count)
        await self.receive_exactly(memoryview(data))
        return bytes(data)

    async def send_all(self, data: bytes | memoryview) -> None:
        """Hand all of `data` to the system. Raises ConnectionLostError."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except ssl.SSLWantWriteError:
                await self._wait(trio.lowlevel.wait_writable)
            except _BROKEN as error:
                raise _lost(error) from None

    def close(self) -> None:
        """Close the socket; a task that waits for it gets ConnectionLostError."""
        if not self._is_closed:
            self._is_closed = True
            trio.lowlevel.notify_closing(self.socket.fileno())
            self.socket.close()

    async def _receive(self, memory: memoryview, least: int) -> int:
        receive = self.socket.recv_into
        filled, size = 0, len(memory)
        while filled < least:
            try:
                count = receive(memory[filled:], size - filled)
            except ssl.SSLWantReadError:
                await self._wait(trio.lowlevel.wait_readable)
                continue
            except _BROKEN as error:
                raise _lost(error) from None
            if count == 0:
                raise ConnectionLostError("the other side closed the connection")
            filled += count
        return filled

    async def _wait(self, until_ready: Callable[[int], Awaitable[None]]) -> None:
        self.waits += 1
        try:
            await until_ready(self.socket.fileno())
        except (*_BROKEN, trio.ClosedResourceError) as error:
            raise _lost(error) from None


def _lost(error: Exception) -> ConnectionLostError:
    return ConnectionLostError(str(error) or type(error).__name__)


_ALWAYS = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC))  # clocks may be wrong; nobody looks


@dataclass(frozen=True)
class ListenerTls:
    """A listener's TLS context and the digest that vouches for its certificate."""

    context: ssl.SSLContext
    certificate_digest: bytes  # SHA-256, 32 bytes

    @classmethod
    def create(cls) -> ListenerTls:
        """With a new key. Raises StorageError when there is no folder for temporary files."""
        key = generate_private_key(SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "neuroshard")])
        builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_ALWAYS)
        certificate = builder.sign(key, hashes.SHA256())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nobody resumes a session
        pem = certificate.public_bytes(Encoding.PEM) + key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        _load(context, pem)
        return cls(context, certificate_digest(certificate.public_bytes(Encoding.DER)))


def dialler_context() -> ssl.SSLContext:
    """A context that accepts every certificate: who owns it is proved in the greeting, not by an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def certificate_digest(certificate: bytes) -> bytes:
    """Digest of a certificate in DER."""
    return sha256(certificate).digest()


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:  # for this user only, like the file in it
            file = Path(folder) / "listener.pem"
            file.touch(mode=0o600)
            file.write_bytes(pem)
            context.load_cert_chain(file)
    except OSError as error:
        raise StorageError(
            f"The listener for tensors cannot write a temporary file: {error.strerror or error}.",
            "Make the folder for temporary files writable.",
        ) from error


_OPENING = b"NSPL\x02"  # magic, version
_NONCE_BYTES = 32
_SESSION_BYTES = 8


class GreetingVerdict(IntEnum):
    """The listener's answer once it knows which node dialled."""

    WELCOME = 0
    FULL = 1  # no more connections now
    UNWELCOME = 2


@dataclass(frozen=True)
class Sessions:
    """The session numbers that both sides sent on a connection."""

    here: int
    there: int


@dataclass(frozen=True)
class Reception:
    """How the listener receives the dialler."""

    verdict: GreetingVerdict
    session: int = 0  # the listener's


async def greet_as_dialler(
    stream: SecureStream, key: NodeKey, expected: NodeId, certificate_digest: bytes, session: int = 0
) -> Reception:
    """Prove this node's key to `expected`, after it proved its own. Raises GreetingError or ConnectionLostError."""
    try:
        expected_key = public_key_of(expected)
    except ValueError as error:
        raise GreetingError(str(error)) from None
    nonce = token_bytes(_NONCE_BYTES)
    await stream.send_all(_OPENING + nonce)
    answer = await stream.receive_bytes(_NONCE_BYTES + SIGNATURE_BYTES)
    listener_nonce, signature = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    _verify(expected_key, _listener_message(certificate_digest, nonce, expected), signature)
    message = _dialler_message(certificate_digest, listener_nonce, key.node_id, expected)
    await stream.send_all(key.public_key + key.sign(message) + session.to_bytes(_SESSION_BYTES, "little"))
    reception = await stream.receive_bytes(1 + _SESSION_BYTES)
    try:
        return Reception(GreetingVerdict(reception[0]), int.from_bytes(reception[1:], "little"))
    except ValueError:
        raise GreetingError(f"a listener answered {reception[0]}, which has no meaning") from None


async def greet_as_listener(
    stream: SecureStream, key: NodeKey, certificate_digest: bytes, judge: Callable[[NodeId], Reception]
) -> tuple[NodeId, Sessions]:
    """The node that dialled, when `judge` welcomes it. Raises GreetingError or ConnectionLostError."""
    opening = await stream.receive_bytes(len(_OPENING) + _NONCE_BYTES)
    if not opening.startswith(_OPENING):
        raise GreetingError("a dialler speaks another protocol or version")
    nonce = token_bytes(_NONCE_BYTES)
    signature = key.sign(_listener_message(certificate_digest, opening[len(_OPENING) :], key.node_id))
    await stream.send_all(nonce + signature)
    answer = await stream.receive_bytes(PUBLIC_KEY_BYTES + SIGNATURE_BYTES + _SESSION_BYTES)
    public_key, signature = answer[:PUBLIC_KEY_BYTES], answer[PUBLIC_KEY_BYTES:-_SESSION_BYTES]
    dialler = node_id_of(public_key)
    _verify(public_key, _dialler_message(certificate_digest, nonce, dialler, key.node_id), signature)
    reception = judge(dialler)
    await stream.send_all(bytes((reception.verdict,)) + reception.session.to_bytes(_SESSION_BYTES, "little"))
    if reception.verdict is not GreetingVerdict.WELCOME:
        raise GreetingError(f"node {dialler} was refused: {reception.verdict.name.lower()}")
    return dialler, Sessions(reception.session, int.from_bytes(answer[-_SESSION_BYTES:], "little"))


def _verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    try:
        verify_signature(public_key, message, signature)
    except SignatureError:
        raise GreetingError("the other side does not have the node key it should have") from None


def _listener_message(certificate_digest: bytes, nonce: bytes, listener: NodeId) -> bytes:
    value = {"certificate": certificate_digest.hex(), "nonce": nonce.hex(), "listener": listener}
    return purpose_message("pool-listener", value)


def _dialler_message(certificate_digest: bytes, nonce: bytes, dialler: NodeId, listener: NodeId) -> bytes:
    value = {
        "certificate": certificate_digest.hex(),
        "nonce": nonce.hex(),
        "dialler": dialler,
        "listener": listener,
    }
    return purpose_message("pool-dialler", value)
