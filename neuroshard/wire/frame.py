"""The value that travels: a kind, a small header and tensors, with the limits a receiver sets before it reads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

from neuroshard.errors import NeuroShardError

MAX_HEADER_BYTES = 64 * 1024

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


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of one tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

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

    kind: str
    header: Mapping[str, WireValue] = field(default_factory=dict[str, WireValue])
    tensors: tuple[TensorPart, ...] = ()


@dataclass(frozen=True)
class FrameLimits:
    """What a receiver accepts of one kind; checked before anything is allocated."""

    max_header_bytes: int = MAX_HEADER_BYTES
    max_body_bytes: int = 0  # 0: no tensors
    expected: tuple[TensorSpec, ...] | None = None  # not None: exactly these names, types and shapes


def check_limits(frame: Frame, limits: FrameLimits) -> None:
    """Raises WireError when a frame that is in memory already holds tensors that `limits` does not allow."""
    specs = tuple(part.spec for part in frame.tensors)
    total = sum(spec.byte_count for spec in specs)
    if total > limits.max_body_bytes:
        raise WireError(
            f"A frame of kind {frame.kind!r} has {total} bytes of tensors; {limits.max_body_bytes} are allowed."
        )
    if limits.expected is not None and specs != limits.expected:
        raise WireError(f"A frame of kind {frame.kind!r} does not have the tensors that are expected.")
