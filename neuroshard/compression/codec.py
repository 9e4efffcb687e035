"""The interface of the codecs with its checks, and the two floating-point codecs, fp32 and bf16."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.errors import NeuroShardError

EXCERPT = 64  # numbers: in every codec a part of a block with a common scale


class MalformedVectorError(NeuroShardError):
    """Encoded bytes that are not a vector of the expected length."""


class Codec(Protocol):
    """Turns an fp32 CPU vector (d,) into bytes and back. Both directions are bit-identical on every machine."""

    name: str  # with the settings; equal names mean exchangeable bytes
    # factor of what the codec has lost of a contribution, before that is added to the next one
    residual_decay: float = 1.0

    def encoded_size(self, length: int) -> int:
        """Maximum number of bytes of `length` numbers: what a receiver allows before it reads."""
        ...

    def encode(self, vector: Tensor) -> bytes | memoryview:
        """Bytes of the vector (d,), which must not change while they are used. Raises ValueError unless it is fp32.

        A lossy codec also raises it for numbers that are not finite.
        """
        ...

    def decode(self, data: bytes | memoryview, length: int) -> Tensor:
        """The vector (length,) fp32. Raises MalformedVectorError if the bytes are not such a vector."""
        return self.decode_range(data, 0, length, length)

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,), in `out` (stop - start,) if given.

        Together the ranges of a vector equal its `decode`; bytes outside of the range are not checked. Raises
        MalformedVectorError for invalid bytes, ValueError for a range outside of the vector.
        """
        ...

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raise MalformedVectorError where `decode` would, without decoding."""
        ...

    def excerpt(self, data: bytes | memoryview, start: int, length: int) -> bytes:
        """EXCERPT encoded numbers of a vector (length,) from a multiple of EXCERPT on, as a vector of their own.

        Sparse codecs have no excerpts.
        """
        return bytes(self.encode(self.decode_range(data, start, start + EXCERPT, length)))

    def decode_excerpts(self, data: bytes) -> Tensor:
        """Excerpts (n, EXCERPT) fp32 that follow one another. Raises MalformedVectorError for another number of bytes.

        Impossible scales or codes are not refused.
        """
        return self.decode(data, EXCERPT * (len(data) // self.encoded_size(EXCERPT))).view(-1, EXCERPT)

    def rounded_like(self, data: bytes, numbers: Tensor) -> Tensor:
        """Numbers (n, EXCERPT) after encoding with the scales of the excerpts in `data`, and decoding."""
        return self.round_trip(numbers.view(-1)).view_as(numbers)

    def round_trip(self, vector: Tensor) -> Tensor:
        """The vector that the other members decode; the vector itself if the codec is exact."""
        return self.decode(self.encode(vector), vector.shape[0])


def checked_vector(vector: Tensor) -> Tensor:
    """Return the vector if it is contiguous fp32 (d,) on the CPU; raise ValueError otherwise."""
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(f"a contiguous fp32 CPU vector is needed, got {vector.dtype} {tuple(vector.shape)}")
    return vector.detach()


def check_size(name: str, data: bytes | memoryview, expected: int, length: int) -> None:
    """Raise MalformedVectorError if the number of bytes is wrong for `length` numbers."""
    if len(data) != expected:
        raise MalformedVectorError(f"{len(data)} bytes are not an {name} vector of {length} numbers.")


def checked_out(start: int, stop: int, length: int, out: Tensor | None) -> Tensor:
    """Memory (stop - start,) for a range of a vector. Raises ValueError if the range or `out` does not fit."""
    if not 0 <= start <= stop <= length:
        raise ValueError(f"{start}..{stop} is not a range of {length} numbers")
    if out is None:
        return torch.empty(stop - start)
    if checked_vector(out).shape[0] != stop - start:
        raise ValueError(f"{stop - start} numbers do not fit a vector of {out.shape[0]}")
    return out


_FP32_BYTES = 4


class Fp32Codec(Codec):
    """Little-endian fp32. It is exact; numbers that are not finite travel like any other."""

    name = "fp32"

    def encoded_size(self, length: int) -> int:
        """4 bytes per number."""
        return _FP32_BYTES * length

    def encode(self, vector: Tensor) -> memoryview:
        """The memory of the vector: 4 bytes per number. Raises ValueError unless it is an fp32 CPU vector."""
        return checked_vector(vector).numpy().astype("<f4", copy=False).view(np.uint8).data.toreadonly()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        self.check(data, length)
        numbers = checked_out(start, stop, length, out)
        if stop > start:
            encoded = np.frombuffer(data, dtype="<f4", count=stop - start, offset=_FP32_BYTES * start)
            np.copyto(numbers.numpy(), encoded)
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raise MalformedVectorError for another number of bytes; any four bytes are a number."""
        check_size(self.name, data, self.encoded_size(length), length)

    def round_trip(self, vector: Tensor) -> Tensor:
        return vector


_BF16_BYTES = 2
_CHUNK = 1 << 18  # numbers per pass, so that they stay in the processor's cache
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_LARGEST = np.uint32(0x7F7F7FFF)  # the largest magnitude that does not round to infinity; it rounds to the largest bf16
_INFINITE_CODE = 0x7F80


class Bf16Codec(Codec):
    """Little-endian bf16, rounded to nearest, ties to even: |error| <= 2^-8 |x| unless x is subnormal.

    The rounding works on the bits, because the instructions of some processors flush subnormal numbers to zero. A
    number too large for bf16 becomes the largest one.
    """

    name = "bf16"

    def encoded_size(self, length: int) -> int:
        """2 bytes per number."""
        return _BF16_BYTES * length

    def encode(self, vector: Tensor) -> bytes:
        """2 bytes per number, in order.

        Raises ValueError for numbers that are not finite, or unless it is an fp32 CPU vector.
        """
        bits = checked_vector(vector).numpy().view(np.uint32)
        codes = np.empty(bits.shape[0], dtype="<u2")
        for start in range(0, bits.shape[0], _CHUNK):
            codes[start : start + _CHUNK] = _rounded(bits[start : start + _CHUNK])
        return codes.tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out)
        bits = numbers.numpy().view(np.uint32)
        for first in range(start, stop, _CHUNK):
            codes = _codes(data, first, min(first + _CHUNK, stop))
            part = bits[first - start : first - start + codes.shape[0]]
            np.copyto(part, codes)
            np.left_shift(part, 16, out=part)
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raise MalformedVectorError for another number of bytes, and for numbers that are not finite."""
        check_size(self.name, data, self.encoded_size(length), length)
        for first in range(0, length, _CHUNK):
            _codes(data, first, min(first + _CHUNK, length))


def _rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes of fp32 bits: half of the last place is added, minus one where the last place is even."""
    largest = (bits & _MAGNITUDE).max()
    if largest >= _INFINITE:
        raise ValueError("numbers that are not finite cannot be encoded as bf16")
    if largest > _LARGEST:
        bits = (bits & ~_MAGNITUDE) | np.minimum(bits & _MAGNITUDE, _LARGEST)
    codes = bits >> np.uint32(16)
    codes &= np.uint32(1)
    codes += np.uint32(0x7FFF)
    codes += bits
    codes >>= np.uint32(16)
    return codes


def _codes(data: bytes | memoryview, start: int, stop: int) -> NDArray[Any]:
    """Codes start..stop, all finite."""
    codes = np.frombuffer(data, dtype="<u2", count=stop - start, offset=_BF16_BYTES * start)
    if ((codes & 0x7FFF) >= _INFINITE_CODE).any():
        raise MalformedVectorError("A bf16 vector has numbers that are not finite.")
    return codes
