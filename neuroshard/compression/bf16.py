"""The upper half of fp32: its range, and 8 bits of precision."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.compression.codec import Codec, MalformedVectorError, check_size, checked_out, checked_vector

_NUMBER_BYTES = 2
_CHUNK = 1 << 18  # numbers handled at once, so that the passes over them stay in the processor's cache
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_LARGEST = np.uint32(0x7F7F7FFF)  # of the magnitudes that do not round to infinity; it rounds to the largest bf16
_INFINITE_CODE = 0x7F80


class Bf16Codec(Codec):
    """Little-endian bf16, rounded to the nearest, ties to even: |error| <= 2^-8 |x| where x is not subnormal.

    It is done on the bits, because some processors' own instructions make zeros of subnormal numbers. A number too
    large for bf16 becomes the largest one.
    """

    @property
    def name(self) -> str:
        """Name of the codec."""
        return "bf16"

    def encoded_size(self, length: int) -> int:
        """2 bytes a number."""
        return _NUMBER_BYTES * length

    def encode(self, vector: Tensor) -> bytes:
        """2 bytes a number, in order. Raises ValueError for numbers that are not finite, or no fp32 CPU vector."""
        bits = checked_vector(vector).numpy().view(np.uint32)
        codes = np.empty(bits.shape[0], dtype="<u2")
        for start in range(0, bits.shape[0], _CHUNK):
            codes[start : start + _CHUNK] = _rounded(bits[start : start + _CHUNK])
        return codes.tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,). Raises MalformedVectorError, ValueError; see Codec."""
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
        """Raises MalformedVectorError for another number of bytes, and for numbers that are not finite."""
        check_size(self.name, data, self.encoded_size(length), length)
        for first in range(0, length, _CHUNK):
            _codes(data, first, min(first + _CHUNK, length))


def _rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes of fp32 bits: half of the last place is added, less one where the last place is even."""
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
    codes = np.frombuffer(data, dtype="<u2", count=stop - start, offset=_NUMBER_BYTES * start)
    if ((codes & 0x7FFF) >= _INFINITE_CODE).any():
        raise MalformedVectorError("A bf16 vector has numbers that are not finite.")
    return codes
