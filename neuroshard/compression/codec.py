"""What a contribution looks like on the wire: the interface of the codecs, and what they all check."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from neuroshard.errors import NeuroShardError


class MalformedVectorError(NeuroShardError):
    """Encoded bytes that are not a vector of the expected length."""


class Codec(Protocol):
    """Turns an fp32 CPU vector (d,) into bytes and back; both ways are the same, to the bit, on every machine."""

    @property
    def name(self) -> str:
        """Name and settings; equal names mean exchangeable bytes."""
        ...

    def encoded_size(self, length: int) -> int:
        """Bytes that `length` numbers take: what a receiver allows before it reads."""
        ...

    def encode(self, vector: Tensor) -> bytes:
        """Bytes of the vector (d,). Raises ValueError for anything but an fp32 CPU vector.

        A codec that loses something also raises it for numbers that are not finite.
        """
        ...

    def decode(self, data: bytes | memoryview, length: int) -> Tensor:
        """The vector (length,) fp32. Raises MalformedVectorError when the bytes are no such vector."""
        return self.decode_range(data, 0, length, length)

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,), in `out` (stop - start,) when it is given.

        Together the ranges of a vector are its `decode`, and what they leave unread they leave unchecked. Raises
        MalformedVectorError when these bytes are no such vector, ValueError for a range outside of it.
        """
        ...

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError where `decode` would, without decoding."""
        ...

    def round_trip(self, vector: Tensor) -> Tensor:
        """What the others get; the vector itself when nothing is lost."""
        return self.decode(self.encode(vector), vector.shape[0])


def checked_vector(vector: Tensor) -> Tensor:
    """The vector, when it is contiguous fp32 (d,) on the CPU; raises ValueError otherwise."""
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(f"a contiguous fp32 CPU vector is needed, got {vector.dtype} {tuple(vector.shape)}")
    return vector.detach()


def check_size(name: str, data: bytes | memoryview, expected: int, length: int) -> None:
    """Raises MalformedVectorError for another number of bytes than `length` numbers take."""
    if len(data) != expected:
        raise MalformedVectorError(f"{len(data)} bytes are not an {name} vector of {length} numbers.")


def checked_out(start: int, stop: int, length: int, out: Tensor | None) -> Tensor:
    """Room (stop - start,) for a range of a vector. Raises ValueError for a range or an `out` that does not fit."""
    if not 0 <= start <= stop <= length:
        raise ValueError(f"{start}..{stop} is no range of {length} numbers")
    if out is None:
        return torch.empty(stop - start)
    if checked_vector(out).shape[0] != stop - start:
        raise ValueError(f"{stop - start} numbers do not fit a vector of {out.shape[0]}")
    return out
