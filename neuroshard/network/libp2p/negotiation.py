"""Negotiation of a stream's protocol (multistream-select 1.0.0) without waiting for a round trip."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from libp2p.io.exceptions import IOException

from neuroshard.network.libp2p.streams import YamuxStream

MAX_LINE_BYTES = 127  # so that the length of a line takes one byte
MAX_PROPOSALS = 8  # from one side on one stream
_MULTISTREAM = "/multistream/1.0.0"
_NOT_AVAILABLE = "na"


class NegotiationError(IOException):
    """The other side supports neither the protocol nor multistream-select."""


def proposal(protocol: str) -> bytes:
    """The bytes that propose a protocol. Data may follow at once; call `confirm` before reading."""
    return _line(_MULTISTREAM) + _line(protocol)


class Readable(Protocol):
    """A stream or a connection."""

    async def read(self, n: int | None = None) -> bytes:
        """Between 1 and n bytes."""
        ...


async def confirm(stream: Readable, protocol: str) -> None:
    """Read the other side's answer to a proposal. Raises NegotiationError."""
    for expected in (_MULTISTREAM, protocol):
        line = await _read_line(stream)
        if line != expected:
            raise NegotiationError(f"the peer answers {line!r} to {expected!r}")


async def accept_protocol(stream: YamuxStream, supported: Container[str]) -> str:
    """Read proposals until one is supported, and return it. Raises NegotiationError."""
    if await _read_line(stream) != _MULTISTREAM:
        raise NegotiationError("the peer does not speak multistream-select")
    answer = _line(_MULTISTREAM)
    for _ in range(MAX_PROPOSALS):
        if not stream.unread:  # a peer that proposes at once gets one answer to everything
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


async def _read_line(stream: Readable) -> str:
    size = (await stream.read(1))[0]
    if not 1 <= size <= MAX_LINE_BYTES:
        raise NegotiationError(f"a line of {size} bytes or more")
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    if not data.endswith(b"\n") or not data.isascii():
        raise NegotiationError("a line that is not a protocol id")
    return data[:-1].decode("ascii")
