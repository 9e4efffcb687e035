"""A frame: its parts, its limits, its errors, and the head that precedes the body.

magic `NSHF` | version u8 | flags u8 | kind length u8 | reserved u8 | header length u32 | body length u64
| kind | msgpack header | BLAKE3 of each 1 MiB chunk of the body | BLAKE3 of everything before | body

Numbers are little-endian. The header is {"h": fields of the message, "t": [[name, type, shape] of each tensor]}. The
body is the tensors in order.

The header is msgpack with bounded depth, a bounded number of values, unique text keys, finite floats and no
extensions. The msgpack package reads the scalars. The structure is read here, because the package allocates containers
from the length that a peer claims, before it has seen one of their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from struct import Struct
from typing import Literal, Protocol, TypeAlias, cast

import msgpack
from blake3 import blake3

from neuroshard.errors import NeuroShardError

MAX_HEADER_BYTES = 64 * 1024
MAX_KIND_CHARACTERS = 64
MAX_NAME_CHARACTERS = 256
MAX_DIMENSIONS = 8
MAX_TENSOR_BYTES = 2**63 - 1  # what a tensor library can address, and what keeps every sum inside the length field

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
WireValue: TypeAlias = "bool | int | float | str | bytes | Sequence[WireValue] | Mapping[str, WireValue] | None"


class WireError(NeuroShardError):
    """Bytes that are no acceptable frame."""


class MalformedFrameError(WireError):
    """Bytes that are no frame, or a value that cannot become one."""


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
    """Name, type and shape of one tensor. Raises MalformedFrameError for one that no tensor can have."""

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
        if any(size < 0 for size in self.shape):
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
    """A tensor as raw little-endian bytes."""

    spec: TensorSpec
    data: bytes | memoryview = field(repr=False)  # spec.byte_count bytes


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: str  # printable ASCII, at most MAX_KIND_CHARACTERS
    header: Mapping[str, WireValue] = field(default_factory=dict[str, WireValue])
    tensors: tuple[TensorPart, ...] = ()


@dataclass(frozen=True)
class FrameLimits:
    """What a receiver accepts of one kind; checked before anything is allocated."""

    max_header_bytes: int = MAX_HEADER_BYTES
    max_body_bytes: int = 0  # 0: no tensors
    expected: tuple[TensorSpec, ...] | None = None  # not None: exactly these names, types and shapes

    @classmethod
    def exactly(cls, *specs: TensorSpec) -> FrameLimits:
        """Limits for these tensors and no others."""
        return cls(max_body_bytes=sum(spec.byte_count for spec in specs), expected=specs)


def check_header_size(kind: str, size: int, limits: FrameLimits) -> None:
    """Raises FrameTooLargeError for a header of more bytes than allowed."""
    most = min(limits.max_header_bytes, MAX_HEADER_BYTES)
    if size > most:
        raise FrameTooLargeError(f"A frame of kind {kind!r} has a header of {size} bytes; {most} are allowed.")


def check_body_size(kind: str, size: int, limits: FrameLimits) -> None:
    """Raises FrameTooLargeError for a body of more bytes than allowed."""
    most = limits.max_body_bytes
    if size > most:
        raise FrameTooLargeError(f"A frame of kind {kind!r} has {size} bytes of tensors; {most} are allowed.")


def check_specs(kind: str, specs: tuple[TensorSpec, ...], limits: FrameLimits) -> None:
    """Raises UnexpectedTensorError when the limits name tensors and these are others."""
    if limits.expected is not None and specs != limits.expected:
        raise UnexpectedTensorError(f"A frame of kind {kind!r} does not have the tensors that are expected.")
    if limits.max_body_bytes == 0 and limits.expected is None and specs:
        raise UnexpectedTensorError(f"A frame of kind {kind!r} has tensors where none are expected.")


MAX_DEPTH = 16  # containers inside containers
MAX_VALUES = 16_384  # every container, key and scalar counts
# extension types, and the one marker without a meaning
_EXTENSIONS = frozenset({0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8})
_Plain: TypeAlias = "bool | int | float | str | bytes | list[_Plain] | dict[str, _Plain] | None"


class _Unpacker(Protocol):
    """The part of msgpack.Unpacker that is used here; the package has no type stubs."""

    def feed(self, next_bytes: bytes) -> None: ...
    def tell(self) -> int: ...
    def unpack(self) -> object: ...
    def read_array_header(self) -> int: ...
    def read_map_header(self) -> int: ...


_new_unpacker = cast("Callable[..., _Unpacker]", msgpack.Unpacker)  # pyright: ignore[reportUnknownMemberType]


def pack(value: WireValue) -> bytes:
    """The msgpack bytes of a value. Raises MalformedFrameError for one that `unpack` would not read."""
    try:
        return cast("bytes", msgpack.packb(_Checker().plain(value, 0), use_bin_type=True))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, OverflowError) as error:  # numbers beyond 64 bits, text that is not Unicode
        raise MalformedFrameError(f"A header cannot be encoded: {error}.") from None


def unpack(data: bytes) -> WireValue:
    """Read what `pack` wrote; arrays become lists. Raises MalformedFrameError, also for bytes after the value."""
    reader = _Reader(data)
    try:
        value = reader.value(0)
    except msgpack.OutOfData:
        raise MalformedFrameError("A header ends too early.") from None
    except ValueError as error:  # text that is not UTF-8
        raise MalformedFrameError(f"A header cannot be read: {str(error)[:200]}.") from None
    if reader.position != len(data):
        raise MalformedFrameError("A header has bytes after its value.")
    return value


class _Checker:
    """Counts the values on their way to plain lists and dictionaries, with the rules that the reader has."""

    def __init__(self) -> None:
        self._count = 0

    def plain(self, value: object, depth: int) -> _Plain:
        self._count = _counted(self._count, 1)
        match value:
            case None | bool() | int() | str() | bytes():
                return value
            case float():
                return _finite(value)
            case Mapping():
                return self._plain_map(cast("Mapping[object, object]", value), _deeper(depth))
            case Sequence() if not isinstance(value, bytearray | memoryview):
                inner = _deeper(depth)
                return [self.plain(item, inner) for item in cast("Sequence[object]", value)]
            case _:
                raise MalformedFrameError(f"A header cannot hold a value of type {type(value).__name__}.")

    def _plain_map(self, value: Mapping[object, object], depth: int) -> dict[str, _Plain]:
        self._count = _counted(self._count, len(value))
        return {_text_key(key): self.plain(item, depth) for key, item in value.items()}


class _Reader:
    """One pass over the bytes; a container is never larger than the bytes that are left could fill."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._count = 0
        self._unpacker = _new_unpacker(max_buffer_size=max(1, len(data)))
        self._unpacker.feed(data)

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self._unpacker.tell()

    def value(self, depth: int) -> WireValue:
        """The next value. Raises ValueError (MalformedFrameError for a broken rule) or msgpack.OutOfData."""
        self._count = _counted(self._count, 1)
        position = self.position
        if position >= len(self._data):
            raise MalformedFrameError("A header ends too early.")
        marker = self._data[position]
        if 0x80 <= marker <= 0x8F or marker in {0xDE, 0xDF}:
            return self._map(_deeper(depth))
        if 0x90 <= marker <= 0x9F or marker in {0xDC, 0xDD}:
            inner = _deeper(depth)
            return [self.value(inner) for _ in range(self._claimed(self._unpacker.read_array_header(), 1))]
        if marker in _EXTENSIONS:
            raise MalformedFrameError("A header holds a value of an unknown type.")
        scalar = self._unpacker.unpack()
        return _finite(scalar) if isinstance(scalar, float) else cast("WireValue", scalar)

    def _map(self, depth: int) -> dict[str, WireValue]:
        result: dict[str, WireValue] = {}
        for _ in range(self._claimed(self._unpacker.read_map_header(), 2)):
            key = _text_key(self.value(depth))
            if key in result:
                raise MalformedFrameError(f"A header names {key[:64]!r} twice.")
            result[key] = self.value(depth)
        return result

    def _claimed(self, length: int, bytes_each: int) -> int:
        if length * bytes_each > len(self._data) - self.position:
            raise MalformedFrameError("A header claims more values than it has bytes.")
        return length


def _counted(count: int, more: int) -> int:
    if count + more > MAX_VALUES:
        raise MalformedFrameError(f"A header holds more than {MAX_VALUES} values.")
    return count + more


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise MalformedFrameError(f"A header is nested deeper than {MAX_DEPTH} levels.")
    return depth + 1


def _finite(value: float) -> float:
    if not isfinite(value):
        raise MalformedFrameError("A header holds a number that is not finite.")
    return value


def _text_key(key: object) -> str:
    if not isinstance(key, str):
        raise MalformedFrameError("A header has a key that is not text.")
    return key


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
