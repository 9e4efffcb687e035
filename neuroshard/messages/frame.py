"""A frame: its parts, its limits, its errors, and the head that precedes the body.

magic `NSHF` | version u8 | flags u8 | kind length u8 | reserved u8 | header length u32 | body length u64
| kind | msgpack header | BLAKE3 of each 1 MiB chunk of the body | BLAKE3 of everything before | body

Numbers are little-endian. The header is {"h": the message, "t": [[name, type, shape] of each tensor]} in msgpack. The
body is the tensors in order.

A message is a msgspec struct whose annotations are its bounds. The limits of a kind name the struct, so a frame that a
handler receives holds a message within its bounds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from struct import Struct as Layout
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from blake3 import blake3
from msgspec import Meta

from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import NeuroShardError

MAX_HEADER_BYTES = 64 * 1024
MAX_KIND_CHARACTERS = 64
MAX_NAME_CHARACTERS = 256
MAX_DIMENSIONS = 8
MAX_TENSOR_BYTES = 2**63 - 1  # the most that a tensor library can address; keeps every sum inside the length field

DType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64"]
ITEM_BYTES: Mapping[DType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
WireValue: TypeAlias = "bool | int | float | str | Sequence[WireValue] | Mapping[str, WireValue] | None"
Message: TypeAlias = "msgspec.Struct | Mapping[str, WireValue]"  # a mapping if the kind has no declaration
M = TypeVar("M", bound=msgspec.Struct)


class WireError(NeuroShardError):
    """Bytes that are not an acceptable frame."""


class MalformedFrameError(WireError):
    """Bytes that are not a frame, or a value that cannot become one."""


class FrameTooLargeError(WireError):
    """A header or body above the limit; it was not read."""


class UnexpectedTensorError(WireError):
    """Tensors with other names, types or shapes than the receiver expects."""


class DamagedChunkError(WireError):
    """A chunk of the body that does not match its digest."""

    def __init__(self, index: int) -> None:
        super().__init__(f"Chunk {index} of a frame does not match its digest.")
        self.index = index


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of one tensor. Raises MalformedFrameError for values that no tensor can have."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME_CHARACTERS:
            raise MalformedFrameError(f"A tensor's name has more than {MAX_NAME_CHARACTERS} characters.")
        if self.dtype not in ITEM_BYTES:
            raise MalformedFrameError(f"A tensor has the type {str(self.dtype)[:32]!r}, which is not allowed.")
        if len(self.shape) > MAX_DIMENSIONS:
            raise MalformedFrameError(f"A tensor has {len(self.shape)} dimensions; at most {MAX_DIMENSIONS} can be.")
        if min(self.shape, default=0) < 0:
            raise MalformedFrameError("A tensor has a negative dimension.")
        # an empty tensor counts its other dimensions too: their strides must be representable
        if prod(max(size, 1) for size in self.shape) * ITEM_BYTES[self.dtype] > MAX_TENSOR_BYTES:
            raise MalformedFrameError("A tensor's shape is larger than any memory.")

    @property
    def byte_count(self) -> int:
        """Size of the raw little-endian values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorPart:
    """A tensor as its spec and raw little-endian bytes, spec.byte_count of them."""

    spec: TensorSpec
    data: bytes | memoryview = field(repr=False)  # all bytes of a received tensor
    more: tuple[bytes | memoryview, ...] = field(default=(), repr=False)  # what follows `data` where a sender has it


@dataclass(frozen=True)
class Frame:
    """One message and its tensors, as a handler sees them."""

    kind: str  # printable ASCII, at most MAX_KIND_CHARACTERS
    message: Message = field(default_factory=dict[str, WireValue])
    tensors: tuple[TensorPart, ...] = ()

    def read(self, declared: type[M]) -> M:
        """Return the message, if it is of this type. Raises MalformedFrameError for another type."""
        if not isinstance(self.message, declared):
            raise MalformedFrameError(f"A frame of kind {self.kind!r} holds no {declared.__name__}.")
        return self.message

    @property
    def header(self) -> Mapping[str, WireValue]:
        """The message of a kind without a declaration. Raises MalformedFrameError if it has a declaration."""
        if isinstance(self.message, msgspec.Struct):
            raise MalformedFrameError(f"A frame of kind {self.kind!r} holds a {type(self.message).__name__}.")
        return self.message


@dataclass(frozen=True)
class FrameLimits:
    """The limits that a receiver sets for one kind; checked before anything is allocated."""

    max_header_bytes: int = MAX_HEADER_BYTES
    max_body_bytes: int = 0  # 0: no tensors
    expected: tuple[TensorSpec, ...] | None = None  # not None: exactly these names, types and shapes
    message: type[msgspec.Struct] | None = None  # None: a mapping of plain values

    @classmethod
    def exactly(cls, *specs: TensorSpec) -> FrameLimits:
        """Return limits that allow these tensors and no others."""
        return cls(max_body_bytes=sum(spec.byte_count for spec in specs), expected=specs)


def check_sizes(kind: str, header_bytes: int, body_bytes: int, limits: FrameLimits) -> None:
    """Raise FrameTooLargeError for a header or a body of more bytes than allowed."""
    most = min(limits.max_header_bytes, MAX_HEADER_BYTES)
    if header_bytes > most:
        raise FrameTooLargeError(f"A frame of kind {kind!r} has a header of {header_bytes} bytes; {most} are allowed.")
    most = limits.max_body_bytes
    if body_bytes > most:
        raise FrameTooLargeError(f"A frame of kind {kind!r} has {body_bytes} bytes of tensors; {most} are allowed.")


def check_specs(kind: str, specs: tuple[TensorSpec, ...], limits: FrameLimits) -> None:
    """Raise UnexpectedTensorError if the limits name other tensors, or allow none."""
    if limits.expected is not None and specs != limits.expected:
        raise UnexpectedTensorError(f"A frame of kind {kind!r} does not have the tensors that are expected.")
    if limits.max_body_bytes == 0 and limits.expected is None and specs:
        raise UnexpectedTensorError(f"A frame of kind {kind!r} has tensors where none are expected.")


MAX_TENSORS = 4096
MAX_DEPTH = 8  # nested containers in a message without a declaration
MAX_ITEMS = 4096  # in one list or mapping of such a message
_MAX_NUMBER = 1e300


def _plain_type(depth: int) -> Any:
    """The msgspec type of values that need no declaration: at most `depth` containers inside each other.

    The depth is in the type because msgspec reads untyped values as deep as a sender nests them.
    """
    number: Any = Annotated[float, Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
    if depth == 0:
        return number | bool | int | str | None
    inner = _plain_type(depth - 1)
    items: Any = Annotated[list[inner], Meta(max_length=MAX_ITEMS)]
    mapping: Any = Annotated[dict[str, inner], Meta(max_length=MAX_ITEMS)]
    return number | bool | int | str | items | mapping | None


PLAIN_MAPPING: Any = Annotated[dict[str, _plain_type(MAX_DEPTH - 1)], Meta(max_length=MAX_ITEMS)]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of every frame. The limits of the kind decide how the message is read."""

    message: msgspec.Raw = msgspec.field(name="h")
    tensors: Annotated[
        list[tuple[str, str, Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)]]],
        Meta(max_length=MAX_TENSORS),
    ] = msgspec.field(name="t")


def _as_plain(value: object) -> object:
    """Convert a mapping that msgspec does not know into a dict. Raises TypeError for other types."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[object, object]", value))
    raise TypeError(f"a message cannot hold a value of type {type(value).__name__}")


_HEADERS = msgpack_decoder(_Header)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_plain)


def pack(message: Message) -> bytes:
    """Return the msgpack bytes of a message. Raises MalformedFrameError for a value that no receiver would accept."""
    declared = type(message) if isinstance(message, msgspec.Struct) else None
    try:
        data = _ENCODER.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedFrameError(f"A message cannot be encoded: {error}.") from None
    unpack(data, declared)
    return data


def unpack(data: bytes | msgspec.Raw, declared: type[msgspec.Struct] | None = None) -> Message:
    """Read the bytes that `pack` wrote. Raises MalformedFrameError that names the field, for example `$.view`."""
    try:
        return msgpack_decoder(PLAIN_MAPPING if declared is None else declared).decode(data)
    except (ValueError, RecursionError) as error:  # ValidationError and DecodeError, text that is not UTF-8
        raise MalformedFrameError(f"A message cannot be read: {str(error)[:200]}.") from None


MAGIC = b"NSHF"
VERSION = 1
CHUNK_BYTES = 1024 * 1024
DIGEST_BYTES = 32
_PREFIX = Layout("<4sBBBBIQ")
PREFIX_BYTES = _PREFIX.size
_KIND = re.compile(rf"[!-~]{{1,{MAX_KIND_CHARACTERS}}}")


@dataclass(frozen=True)
class FrameHead:
    """A frame without its body. All limits were checked, and all lengths agree."""

    kind: str
    message: Message
    specs: tuple[TensorSpec, ...]
    chunk_digests: tuple[bytes, ...] = field(repr=False)  # BLAKE3, 32 bytes each
    body_bytes: int
    digest: bytes = field(repr=False)  # binds all of the above; equal digests mean equal frames

    def chunk_bytes(self, index: int) -> int:
        """Return the size of a chunk: CHUNK_BYTES, or less for the last one. Raises IndexError."""
        if not 0 <= index < len(self.chunk_digests):
            raise IndexError(f"a frame of {len(self.chunk_digests)} chunks has no chunk {index}")
        return min(CHUNK_BYTES, self.body_bytes - index * CHUNK_BYTES)


@dataclass(frozen=True)
class Prefix:
    """The lengths in the fixed first bytes of a frame."""

    kind_bytes: int
    header_bytes: int
    body_bytes: int

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the body."""
        return -(-self.body_bytes // CHUNK_BYTES)

    @property
    def rest_bytes(self) -> int:
        """Size of the head after the kind: header, chunk digests and digest."""
        return self.header_bytes + DIGEST_BYTES * (self.chunk_count + 1)


def encode_head(frame: Frame, chunk_digests: Sequence[bytes], body_bytes: int) -> bytes:
    """Return the head of a frame. Raises MalformedFrameError or FrameTooLargeError if no receiver would read it."""
    if not _KIND.fullmatch(frame.kind):
        raise MalformedFrameError(f"{frame.kind[:MAX_KIND_CHARACTERS]!r} cannot be the kind of a frame.")
    header = encode_header(frame)
    check_sizes(frame.kind, len(header), 0, FrameLimits())
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(frame.kind), 0, len(header), body_bytes)
    bound = b"".join((prefix, frame.kind.encode("ascii"), header, *chunk_digests))
    return bound + blake3(bound).digest()


def encode_header(frame: Frame) -> bytes:
    """Return the msgpack header of a frame. Raises MalformedFrameError."""
    specs = [part.spec for part in frame.tensors]
    _check_names(specs)
    entries = [(spec.name, spec.dtype, spec.shape) for spec in specs]
    try:
        return _ENCODER.encode(_Header(msgspec.Raw(pack(frame.message)), entries))
    except (ValueError, OverflowError) as error:  # text that is not Unicode
        raise MalformedFrameError(f"A header cannot be encoded: {error}.") from None


def parse_prefix(data: bytes) -> Prefix:
    """Read PREFIX_BYTES bytes. The lengths are unchecked claims of the sender. Raises MalformedFrameError."""
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
    """Read the kind, which is printable ASCII. Raises MalformedFrameError."""
    kind = data.decode("ascii", errors="replace")
    if not _KIND.fullmatch(kind):
        raise MalformedFrameError("A frame has a kind that is not printable ASCII.")
    return kind


def parse_rest(before: bytes, rest: bytes, prefix: Prefix, kind: str, limits: FrameLimits) -> FrameHead:
    """Return the head, from the bytes `before` (prefix and kind) and the `rest` of it.

    Raises MalformedFrameError if the digest, the header or the lengths disagree, UnexpectedTensorError for other
    tensors.
    """
    digest = rest[-DIGEST_BYTES:]
    if blake3(before).update(rest[:-DIGEST_BYTES]).digest() != digest:
        raise MalformedFrameError(f"The head of a frame of kind {kind!r} does not match its digest.")
    message, specs = _parse_header(rest[: prefix.header_bytes], limits)
    total = sum(spec.byte_count for spec in specs)
    if total != prefix.body_bytes:
        raise MalformedFrameError(f"A frame has tensors of {total} bytes in a body of {prefix.body_bytes}.")
    check_specs(kind, specs, limits)
    starts = range(prefix.header_bytes, len(rest) - DIGEST_BYTES, DIGEST_BYTES)
    chunk_digests = tuple(rest[start : start + DIGEST_BYTES] for start in starts)
    return FrameHead(kind, message, specs, chunk_digests, prefix.body_bytes, digest)


def _parse_header(data: bytes, limits: FrameLimits) -> tuple[Message, tuple[TensorSpec, ...]]:
    try:
        header = _HEADERS.decode(data)
    except (ValueError, RecursionError) as error:  # a message may be nested as deep as its bytes allow
        raise MalformedFrameError(f"The header of a frame cannot be read: {str(error)[:200]}.") from None
    specs = tuple(TensorSpec(name, cast("DType", dtype), shape) for name, dtype, shape in header.tensors)
    _check_names(specs)
    return unpack(header.message, limits.message), specs


def _check_names(specs: Sequence[TensorSpec]) -> None:
    if len({spec.name for spec in specs}) != len(specs):
        raise MalformedFrameError("A frame names a tensor twice.")
