"""What a peer says about itself when it is met (libp2p's identify): a little is read, and less is kept."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from google.protobuf.message import DecodeError
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.exceptions import IOException
from multiaddr import Multiaddr

from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL
from neuroshard.network.libp2p.streams import YamuxStream

IDENTIFY_PROTOCOL = "/ipfs/id/1.0.0"
IDENTIFY_SECONDS = 15.0
MAX_IDENTIFY_BYTES = 16 * 1024
_MAX_LENGTH_BYTES = 3  # of a varint up to 2^21
_CHOSEN_BY = frozenset({HOP_PROTOCOL})  # protocols by which peers are chosen; what else they speak shows when asked


class IdentifyError(IOException):
    """The peer's words about itself are too long, or cannot be read."""


@dataclass(frozen=True)
class Identified:
    """What is kept of them."""

    protocols: tuple[str, ...]  # of those by which peers are chosen
    observed: Multiaddr | None  # where the peer sees this node


async def asked(muxer: BoundedMuxer) -> Identified:
    """Ask a peer about itself. Raises BaseLibp2pError or TimeoutError."""
    stream = await muxer.open_stream()
    try:
        with anyio.fail_after(IDENTIFY_SECONDS):
            await stream.write(proposal(IDENTIFY_PROTOCOL))
            await confirm(stream, IDENTIFY_PROTOCOL)
            return identified(await _message(stream))
    finally:
        stream.abandon()


def identified(data: bytes) -> Identified:
    """What is kept of a message. Raises IdentifyError."""
    message = Identify()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise IdentifyError(str(error)) from None
    return Identified(tuple(_CHOSEN_BY.intersection(message.protocols)), _address(message.observed_addr))


async def _message(stream: YamuxStream) -> bytes:
    size = await _length(stream)
    if size > MAX_IDENTIFY_BYTES:
        raise IdentifyError(f"{size} bytes about itself")
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    return data


async def _length(stream: YamuxStream) -> int:
    size = 0
    for position in range(_MAX_LENGTH_BYTES):
        byte = (await stream.read(1))[0]
        size |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return size
    raise IdentifyError("a length that is too long")


def _address(data: bytes) -> Multiaddr | None:
    try:
        address = Multiaddr(data) if data else None
        str(address)  # the bytes are read only now
    except ValueError:
        return None
    return address
