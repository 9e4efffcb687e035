"""Messages between circuit relays and clients (libp2p specification "Circuit Relay v2"), and the relayed bytes."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.utils.varint import encode_varint_prefixed

from neuroshard.network.libp2p.sockets import MAX_READ_BYTES
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.tcp_options import TcpInfo
from neuroshard.types import NodeId

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES = 4096
MESSAGE_SECONDS = 15.0
_Message = TypeVar("_Message", bound=Message)


class RelayError(IOException):
    """A relay or its client sent an unusable message."""


class RelayDeniedError(RelayError):
    """The relay serves only some nodes, and not this one now: the relay of a run serves the run's members."""


def encode_message(message: Message) -> bytes:
    """The bytes of a message with its length."""
    return encode_varint_prefixed(message.SerializeToString())


async def read_message(stream: YamuxStream, message: _Message) -> _Message:
    """Read the next message of a stream into `message`. Raises RelayError."""
    size = await _read_size(stream)
    if size > MAX_MESSAGE_BYTES:
        raise RelayError(f"a message of {size} bytes")
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RelayError(f"not a message of a relay: {error}") from None
    if not message.HasField("type"):  # every message has one; a missing one would read as the first type
        raise RelayError("a message without its type")
    return message


def node_of(peer_id: bytes) -> NodeId:
    """The node in a message. Raises RelayError."""
    if not 1 <= len(peer_id) <= 64:
        raise RelayError("no node")
    return NodeId(str(ID(peer_id)))


def encoded_node_id(node: NodeId) -> bytes:
    """A node's id as it is encoded in messages."""
    return ID.from_base58(node).to_bytes()


async def _read_size(stream: YamuxStream) -> int:
    size = 0
    for shift in (0, 7):
        byte = (await stream.read(1))[0]
        size |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return size
    raise RelayError("a message that is too long")


class RelayedBytes(ReadWriteCloser):
    """A stream through a relay, read and written like a socket; it is encrypted from end to end."""

    def __init__(self, stream: YamuxStream) -> None:
        self._stream = stream
        self.portion_bytes = MAX_READ_BYTES  # of a read that takes what is there
        self.ip = ""  # only the relay sees the address

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes, or fewer at the end.

        None: the next available bytes. Raises IOException above MAX_READ_BYTES.
        """
        if n is not None and n > MAX_READ_BYTES:
            raise IOException(f"a read of {n} bytes is above the limit")
        data = b""
        try:
            while n is None or len(data) < n:
                data += await self._stream.read(self.portion_bytes if n is None else n - len(data))
                if n is None:
                    break
        except MuxedStreamEOF:
            return data
        return data

    async def write(self, data: bytes) -> None:
        """Send all bytes."""
        if self._stream.is_closed:
            raise ConnectionClosedError("the circuit is closed")
        await self._stream.write(data)

    async def close(self) -> None:
        """End the circuit."""
        await self._stream.reset()

    def cut(self) -> None:
        """End the circuit without waiting."""
        self._stream.abandon()

    def tcp_info(self) -> TcpInfo | None:
        """Returns None: only the first of the two lines could be measured."""
        return None

    def get_remote_address(self) -> tuple[str, int] | None:
        """Returns None: only the relay sees the address."""
        return None
