"""The bytes before a body: a fixed prefix that tells every length, kind, header, chunk digests, one digest over it all.

magic `NSHF` | version u8 | flags u8 | kind length u8 | reserved u8 | header length u32 | body length u64
| kind | msgpack header | BLAKE3 of each 1 MiB chunk of the body | BLAKE3 of everything before | body

Numbers are little-endian. The header is {"h": what the sender says, "t": [[name, type, shape] of each tensor]}, and
the body is the tensors one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import cast

from blake3 import blake3

from neuroshard.wire.frame import (
    MAX_KIND_CHARACTERS,
    DType,
    Frame,
    FrameLimits,
    MalformedFrameError,
    TensorSpec,
    WireValue,
    check_body_size,
    check_header_size,
    check_specs,
)
from neuroshard.wire.strict_msgpack import pack, unpack

MAGIC = b"NSHF"
VERSION = 1
CHUNK_BYTES = 1024 * 1024
DIGEST_BYTES = 32
_PREFIX = Struct("<4sBBBBIQ")
PREFIX_BYTES = _PREFIX.size
_KIND = re.compile(rf"[!-~]{{1,{MAX_KIND_CHARACTERS}}}")


@dataclass(frozen=True)
class FrameHead:
    """Everything of a frame but its body; all limits were checked and all lengths agree."""

    kind: str
    header: Mapping[str, WireValue]
    specs: tuple[TensorSpec, ...]
    chunk_digests: tuple[bytes, ...] = field(repr=False)  # BLAKE3, 32 bytes each
    body_bytes: int
    digest: bytes = field(repr=False)  # binds all of the above; equal digests mean equal frames

    def chunk_bytes(self, index: int) -> int:
        """Size of a chunk: CHUNK_BYTES, less for the last one. Raises IndexError."""
        if not 0 <= index < len(self.chunk_digests):
            raise IndexError(f"a frame of {len(self.chunk_digests)} chunks has no chunk {index}")
        return min(CHUNK_BYTES, self.body_bytes - index * CHUNK_BYTES)


@dataclass(frozen=True)
class Prefix:
    """The lengths that the fixed first bytes tell."""

    kind_bytes: int
    header_bytes: int
    body_bytes: int

    @property
    def chunk_count(self) -> int:
        """Chunks of the body."""
        return -(-self.body_bytes // CHUNK_BYTES)

    @property
    def rest_bytes(self) -> int:
        """Bytes of the head after the kind: header, chunk digests, digest."""
        return self.header_bytes + DIGEST_BYTES * (self.chunk_count + 1)


def encode_head(frame: Frame, chunk_digests: Sequence[bytes], body_bytes: int) -> bytes:
    """The head of a frame. Raises MalformedFrameError or FrameTooLargeError for one that nobody would read."""
    if not _KIND.fullmatch(frame.kind):
        raise MalformedFrameError(f"{frame.kind[:MAX_KIND_CHARACTERS]!r} cannot be the kind of a frame.")
    header = encode_header(frame)
    check_header_size(frame.kind, len(header), FrameLimits())
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(frame.kind), 0, len(header), body_bytes)
    bound = b"".join((prefix, frame.kind.encode("ascii"), header, *chunk_digests))
    return bound + blake3(bound).digest()


def encode_header(frame: Frame) -> bytes:
    """The msgpack header of a frame. Raises MalformedFrameError."""
    specs = [part.spec for part in frame.tensors]
    _check_names(specs)
    return pack({"h": frame.header, "t": [[spec.name, spec.dtype, spec.shape] for spec in specs]})


def parse_prefix(data: bytes) -> Prefix:
    """Read PREFIX_BYTES bytes; the lengths are only claims yet. Raises MalformedFrameError."""
    magic, version, flags, kind_bytes, reserved, header_bytes, body_bytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise MalformedFrameError("These bytes are not a frame.")
    if version != VERSION:
        raise MalformedFrameError(f"A frame has the format version {version}; this node reads {VERSION}.")
    if flags or reserved:
        raise MalformedFrameError("A frame sets bits that have no meaning yet.")
    if not 1 <= kind_bytes <= MAX_KIND_CHARACTERS:
        raise MalformedFrameError(f"A frame has a kind of {kind_bytes} characters.")
    return Prefix(kind_bytes, header_bytes, body_bytes)


def parse_kind(data: bytes) -> str:
    """Read the kind. Raises MalformedFrameError."""
    kind = data.decode("ascii", errors="replace")
    if not _KIND.fullmatch(kind):
        raise MalformedFrameError("A frame has a kind that is not printable ASCII.")
    return kind


def check_prefix(prefix: Prefix, kind: str, limits: FrameLimits) -> None:
    """Raises FrameTooLargeError when the rest of the head or the body would be larger than the limits of the kind."""
    check_header_size(kind, prefix.header_bytes, limits)
    check_body_size(kind, prefix.body_bytes, limits)


def parse_rest(before: bytes, rest: bytes, prefix: Prefix, kind: str, limits: FrameLimits) -> FrameHead:
    """The head, from the bytes `before` (prefix and kind) and the `rest` of it.

    Raises MalformedFrameError when the digest, the header or the lengths disagree, UnexpectedTensorError.
    """
    digest = rest[-DIGEST_BYTES:]
    if blake3(before).update(rest[:-DIGEST_BYTES]).digest() != digest:
        raise MalformedFrameError(f"The head of a frame of kind {kind!r} does not match its digest.")
    header, specs = _parse_header(rest[: prefix.header_bytes])
    total = sum(spec.byte_count for spec in specs)
    if total != prefix.body_bytes:
        raise MalformedFrameError(f"A frame has tensors of {total} bytes in a body of {prefix.body_bytes}.")
    check_specs(kind, specs, limits)
    starts = range(prefix.header_bytes, len(rest) - DIGEST_BYTES, DIGEST_BYTES)
    chunk_digests = tuple(rest[start : start + DIGEST_BYTES] for start in starts)
    return FrameHead(kind, header, specs, chunk_digests, prefix.body_bytes, digest)


def _parse_header(data: bytes) -> tuple[Mapping[str, WireValue], tuple[TensorSpec, ...]]:
    match unpack(data):
        case {"h": {} as header, "t": list() as entries, **others} if not others:
            specs = tuple(_parse_spec(entry) for entry in entries)
            _check_names(specs)
            return cast("Mapping[str, WireValue]", header), specs
        case _:
            raise MalformedFrameError("A frame's header does not have the fields that it must have.")


def _parse_spec(entry: WireValue) -> TensorSpec:
    match entry:
        case [str() as name, str() as dtype, list() as shape]:
            sizes = tuple(size for size in shape if isinstance(size, int) and not isinstance(size, bool))
            if len(sizes) == len(shape):
                return TensorSpec(name, cast("DType", dtype), sizes)
        case _:
            pass
    raise MalformedFrameError("A tensor in a frame's header does not have name, type and shape.")


def _check_names(specs: Sequence[TensorSpec]) -> None:
    if len({spec.name for spec in specs}) != len(specs):
        raise MalformedFrameError("A frame names a tensor twice.")
