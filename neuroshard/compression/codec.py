"""What a contribution looks like on the wire: the codec interface and the codec that changes nothing."""

from __future__ import annotations

from typing import Literal, Protocol, assert_never

import numpy as np
import torch
from torch import Tensor

from neuroshard.errors import NeuroShardError


class MalformedVectorError(NeuroShardError):
    """Encoded bytes that are not a vector of the expected length."""


class Codec(Protocol):
    """Turns an fp32 CPU vector (d,) into bytes and back; decode(encode(x)) is the same on every machine."""

    @property
    def name(self) -> str:
        """Name and settings; equal names mean exchangeable bytes."""
        ...

    def encoded_size(self, length: int) -> int:
        """Most bytes that `length` numbers take: what a receiver allows before it reads."""
        ...

    def encode(self, vector: Tensor) -> bytes:
        """Bytes of the vector (d,). Raises ValueError when it is no fp32 CPU vector."""
        ...

    def decode(self, data: bytes | memoryview, length: int) -> Tensor:
        """The vector (length,) fp32. Raises MalformedVectorError when the bytes are no such vector."""
        ...

    def round_trip(self, vector: Tensor) -> Tensor:
        """decode(encode(vector)): what the others get; the vector itself when nothing is lost."""
        ...


class Fp32Codec:
    """Little-endian fp32, nothing lost."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        return "fp32"

    def encoded_size(self, length: int) -> int:
        """4 bytes a number."""
        return 4 * length

    def encode(self, vector: Tensor) -> bytes:
        """4 bytes a number, in order. Raises ValueError when it is no fp32 CPU vector."""
        return checked_vector(vector).numpy().astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes | memoryview, length: int) -> Tensor:
        """The vector (length,) in memory of its own. Raises MalformedVectorError for another number of bytes."""
        if len(data) != self.encoded_size(length):
            raise MalformedVectorError(f"{len(data)} bytes are not an fp32 vector of {length} numbers.")
        return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))  # pyright: ignore[reportUnknownMemberType]

    def round_trip(self, vector: Tensor) -> Tensor:
        """The vector itself."""
        return vector


def make_codec(name: Literal["fp32"]) -> Codec:
    """The codec a run's parameters name."""
    match name:
        case "fp32":
            return Fp32Codec()
        case _:
            assert_never(name)


def checked_vector(vector: Tensor) -> Tensor:
    """The vector, when it is contiguous fp32 (d,) on the CPU; raises ValueError otherwise."""
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(f"a contiguous fp32 CPU vector is needed, got {vector.dtype} {tuple(vector.shape)}")
    return vector.detach()
