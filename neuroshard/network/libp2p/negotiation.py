"""Agreeing on a stream's protocol (multistream-select 1.0.0) without waiting for a round trip."""

from __future__ import annotations

from collections.abc import Container

from libp2p.io.exceptions import IOException

from neuroshard.network.libp2p.streams import YamuxStream

MAX_LINE_BYTES = 127  # so that a line's length takes one byte
MAX_PROPOSALS = 8  # from one side on one stream
_MULTISTREAM = "/multistream/1.0.0"
_NOT_AVAILABLE = "na"


class NegotiationError(IOException):
    """The other side does not speak the protocol, or not multistream-select."""


def proposal(protocol: str) -> bytes:
    """What asks for a protocol; write on at once, but `confirm` before anything is read."""
    return _line(_MULTISTREAM) + _line(protocol)


async def confirm(stream: YamuxStream, protocol: str) -> None:
    """Read what the other side says to a proposal. Raises NegotiationError."""
    for expected in (_MULTISTREAM, protocol):
        told = await _read_line(stream)
        if told != expected:
            raise NegotiationError(f"the peer answers {told!r} to {expected!r}")


async def accept(stream: YamuxStream, supported: Container[str]) -> str:
    """The protocol that the other side proposes and this one supports. Raises NegotiationError."""
    if await _read_line(stream) != _MULTISTREAM:
        raise NegotiationError("the peer does not speak multistream-select")
    answer = _line(_MULTISTREAM)
    for _ in range(MAX_PROPOSALS):
        if not stream.unread:  # a peer that proposes at once gets one answer to all of it
            await stream.write(answer)
            answer = b""
        proposed = await _read_line(stream)
        if proposed in supported:
            await stream.write(answer + _line(proposed))
            return proposed
        answer += _line(_NOT_AVAILABLE)
    raise NegotiationError("the peer proposes only unknown protocols")


def _line(text: str) -> bytes:
    data = text.encode() + b"\n"
    if len(data) > MAX_LINE_BYTES:
        raise ValueError(f"the protocol id {text!r} is too long")
    return bytes((len(data),)) + data


async def _read_line(stream: YamuxStream) -> str:
    size = (await stream.read(1))[0]
    if not 1 <= size <= MAX_LINE_BYTES:
        raise NegotiationError(f"a line of {size} bytes or more")
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    if not data.endswith(b"\n") or not data.isascii():
        raise NegotiationError("a line that is no protocol id")
    return data[:-1].decode("ascii")
