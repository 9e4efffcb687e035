"""One TLS connection of Python's ssl over blocking sockets: what the pool and libp2p are compared with.

Bodies are preceded by their length and answered with one byte; they are received into memory that is there already.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

PORTION_BYTES = 1024 * 1024
TIMED_BYTES = 128 * 1024
MOST_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<Q")


def _listener_context() -> ssl.SSLContext:
    """TLS 1.3 with a certificate of its own."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "neuroshard")])
    begin = datetime(2000, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin.replace(year=2999))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM) + key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _dialler_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def serve(host: str, congestion_control: str | None) -> int:
    """Answer in the background until the process ends; returns the port."""
    listener = socket.create_server((host, 0))
    _choose(listener, congestion_control)
    context = _listener_context()

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, context), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


class RawTls:
    """The sending side of one connection."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        self._stream = stream
        self._data = memoryview(os.urandom(MOST_BYTES))

    @property
    def congestion_control(self) -> str:
        """The algorithm in use."""
        if sys.platform != "linux":
            return "unknown"
        return self._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()

    def send(self, byte_count: int) -> int:
        """So many bytes; returns when the other side has them."""
        self._send_body(byte_count)
        _received(self._stream, 1)
        return byte_count

    def send_for(self, seconds: float) -> int:
        """As many bytes as go in this time, without waiting in between."""
        until, bodies = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            self._send_body(TIMED_BYTES)
            bodies += 1
        _received(self._stream, bodies)
        return bodies * TIMED_BYTES

    def _send_body(self, byte_count: int) -> None:
        self._stream.sendall(_LENGTH.pack(byte_count))
        for start in range(0, byte_count, PORTION_BYTES):
            self._stream.sendall(self._data[start : min(start + PORTION_BYTES, byte_count)])


@contextmanager
def dialled(host: str, port: int, congestion_control: str | None) -> Iterator[RawTls]:
    """A connection to a process that serves."""
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _choose(connection, congestion_control)
    with _dialler_context().wrap_socket(connection) as stream:
        yield RawTls(stream)


def _choose(connection: socket.socket, congestion_control: str | None) -> None:
    if sys.platform == "linux" and congestion_control is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


def _answer(connection: socket.socket, context: ssl.SSLContext) -> None:
    memory = memoryview(bytearray(MOST_BYTES))
    with context.wrap_socket(connection, server_side=True) as stream:
        while header := _received(stream, _LENGTH.size):
            (length,) = _LENGTH.unpack(header)
            received = 0
            while received < length:
                received += stream.recv_into(memory[received:length])
            stream.sendall(b"!")


def _received(stream: ssl.SSLSocket, count: int) -> bytes:
    """So many bytes; none when the connection was closed."""
    data = b""
    while len(data) < count:
        portion = stream.recv(count - len(data))
        if not portion:
            return b""
        data += portion
    return data
