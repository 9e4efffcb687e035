"""The value that travels: a kind, a small header and tensors, with the limits a receiver sets before it reads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

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
