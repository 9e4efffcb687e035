"""Readers of the first bytes of a peer: frames."""

from __future__ import annotations

from struct import Struct
from typing import Any

from blake3 import blake3

from neuroshard.messages import (
    CHUNK_BYTES,
    PREFIX_BYTES,
    Frame,
    FrameDecoder,
    FrameLimits,
    TensorSpec,
    WireError,
    encode,
)
from neuroshard.messages.frame import pack, unpack
from tests.fuzz.target import Target, golden

LIMITS = FrameLimits(max_header_bytes=16 * 1024, max_body_bytes=4 * CHUNK_BYTES)
EXPECTED = FrameLimits.exactly(TensorSpec("x", "uint8", (2,)))
_PREFIX = Struct("<4sBBBBIQ")


def check_frame(data: bytes) -> None:
    """The first byte sizes the portions; the rest is a stream. All ways of feeding it must agree."""
    if not data:
        return
    stream = data[1:]
    whole = outcome(stream, max(1, len(stream)))
    assert outcome(stream, 1 + data[0]) == whole
    assert received(stream, 1 + data[0]) == whole
    if isinstance(whole, Frame):
        encoded = encode(whole)
        again = encoded.head + b"".join(encoded.body)
        assert outcome(again, len(again)) == whole


def check_sealed_frame(data: bytes) -> None:
    """As `check_frame`, after lengths and digests were made right: what a peer can do that knows the format."""
    check_frame(data[:1] + sealed(data[1:]))


def check_header(data: bytes) -> None:
    """A message that is read can be written and read again; any other bytes are refused."""
    try:
        value = unpack(data)
    except WireError:
        return
    assert repr(unpack(pack(value))) == repr(value)


def limits_of(kind: str) -> FrameLimits:
    """Limits of the fuzzed kinds; one is unknown."""
    if kind == "k":
        return EXPECTED
    if kind.startswith("u"):
        raise KeyError(kind)
    return LIMITS


def outcome(stream: bytes, portion: int) -> Frame | str:
    """The frame at the start of a stream that is fed in portions, or the reason why there is none."""
    decoder = FrameDecoder(limits_of)
    try:
        position = 0
        while position < len(stream) and not decoder.is_complete:
            used = decoder.feed(stream[position : position + portion])
            assert used > 0
            position += used
        return decoder.frame()
    except (WireError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def received(stream: bytes, portion: int) -> Frame | str:
    """As `outcome`, the way a socket would write into the decoder."""
    decoder = FrameDecoder(limits_of)
    try:
        position = 0
        while position < len(stream) and not decoder.is_complete:
            view = decoder.receive_buffer()
            piece = stream[position : position + min(portion, len(view))]
            view[: len(piece)] = piece
            decoder.commit(len(piece))
            position += len(piece)
        return decoder.frame()
    except (WireError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def sealed(data: bytes) -> bytes:
    """A frame whose lengths and digests agree: kind length u8, body length u8, kind, header, body."""
    if len(data) < 2:
        return data
    kind, body = data[2 : 2 + data[0]], data[max(2 + data[0], len(data) - data[1]) :]
    return seal(kind, data[2 + data[0] : len(data) - len(body)], body)


def seal(kind: bytes, header: bytes, body: bytes = b"") -> bytes:
    """A frame of these parts, whatever is in them; its body is at most one chunk."""
    bound = _PREFIX.pack(b"NSHF", 1, 0, len(kind), 0, len(header), len(body)) + kind + header
    bound += blake3(body).digest() if body else b""
    return bound + blake3(bound).digest() + body


def unsealed(stream: bytes) -> bytes:
    """What `sealed` makes this frame of, when its lengths agree and its body is short."""
    _, _, _, kind_bytes, _, header_bytes, body_bytes = _PREFIX.unpack_from(stream)
    head = PREFIX_BYTES + kind_bytes + header_bytes
    body = stream[head + (64 if body_bytes else 32) :]
    return bytes([kind_bytes, len(body) % 256]) + stream[PREFIX_BYTES:head] + body


def frame_seeds() -> tuple[bytes, ...]:
    """Golden frames and golden lies, each with a portion size before it."""
    vectors = golden("wire.json")
    good = [bytes.fromhex(v["head"]) + tensor_bytes(v) for v in vectors["frames"] if "chunks" not in v]
    bad = [bytes.fromhex(v["data"]) for v in vectors["refused"]]
    return tuple(bytes([7 * i % 256]) + stream for i, stream in enumerate([*good, *bad]))


def sealed_frame_seeds() -> tuple[bytes, ...]:
    """The golden frames and lies that have a whole head, in the form that is sealed."""
    return tuple(seed[:1] + unsealed(seed[1:]) for seed in frame_seeds() if len(seed) > PREFIX_BYTES + 32)


def header_seeds() -> tuple[bytes, ...]:
    """The headers of golden frames and lies."""
    found: list[bytes] = []
    for seed in frame_seeds():
        if len(seed) > PREFIX_BYTES:
            _, _, _, kind_bytes, _, header_bytes, _ = _PREFIX.unpack_from(seed, 1)
            start = 1 + PREFIX_BYTES + kind_bytes
            found.append(seed[start : start + header_bytes])
    return tuple(found)


def tensor_bytes(vector: dict[str, Any]) -> bytes:
    """The body of a golden frame."""
    return b"".join(bytes.fromhex(tensor["data"]) for tensor in vector["tensors"])


_MEMORY_BYTES = LIMITS.max_body_bytes + 2_000_000


TARGETS = (
    Target("frame", check_frame, frame_seeds, _MEMORY_BYTES),
    Target("sealed-frame", check_sealed_frame, sealed_frame_seeds, _MEMORY_BYTES),
    Target("header", check_header, header_seeds),
)
