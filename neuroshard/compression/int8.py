"""Int8 in blocks that share a scale: a quarter of fp32's bytes (Dettmers et al. 2022, linear and symmetric here)."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np
import torch
from torch import Tensor

from neuroshard.compression.codec import MalformedVectorError, check_size, checked_out, checked_vector

BLOCK = 4096  # numbers that share a scale
_CHUNK_BLOCKS = 64  # handled at once, so that the passes over them stay in the processor's cache
_SCALE_BYTES = 4
_LARGEST_CODE = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# a step below what the largest fp32 number needs, so that 127 times the scale is finite however it is rounded
_LARGEST_SCALE = float(np.nextafter(np.float32(torch.finfo(torch.float32).max / _LARGEST_CODE), np.float32(0)))


class Int8Codec:
    """Scales of all blocks (little-endian fp32), then a signed byte a number: x is about code * scale.

    scale = largest |x| of the block / 127 and code = x / scale rounded to the nearest, ties to even, so that
    |error| <= scale / 2. A block whose scale would be subnormal is sent as zeros. Each product, quotient and rounding
    is one IEEE operation on one number and no decoded number is subnormal: no kernel and no mode changes a bit.
    """

    @property
    def name(self) -> str:
        """Name of the codec."""
        return "int8"

    def encoded_size(self, length: int) -> int:
        """A byte a number, and 4 a block."""
        return _SCALE_BYTES * ceil(length / BLOCK) + length

    def encode(self, vector: Tensor) -> bytes:
        """Scales and codes. Raises ValueError for numbers that are not finite, or when it is no fp32 CPU vector."""
        numbers = checked_vector(vector)
        length = numbers.shape[0]
        encoded = np.empty(self.encoded_size(length), dtype=np.uint8)
        scales = encoded[: _SCALE_BYTES * ceil(length / BLOCK)].view("<f4")
        codes = torch.from_numpy(encoded[scales.nbytes :].view(np.int8))  # pyright: ignore[reportUnknownMemberType]
        workspace = torch.empty(min(length, _CHUNK_BLOCKS * BLOCK))
        for start, stop in _pieces(0, length):
            blocks = numbers[start:stop].view(-1, min(BLOCK, stop - start))
            scaled = workspace[: stop - start].view_as(blocks)
            of_blocks = _scales(blocks, scaled)
            torch.div(blocks, of_blocks.masked_fill(of_blocks == 0, 1)[:, None], out=scaled)
            codes[start:stop].view_as(blocks).copy_(scaled.round_())
            scales[start // BLOCK :][: len(of_blocks)] = of_blocks.numpy()
        return encoded.tobytes()

    def decode(self, data: bytes | memoryview, length: int) -> Tensor:
        """The vector (length,) fp32. Raises MalformedVectorError for another size, scales or codes never encoded."""
        return self.decode_range(data, 0, length, length)

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,). Raises MalformedVectorError, ValueError; see Codec."""
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out)
        first = start // BLOCK
        scales = self._scales_of(data, first, ceil(stop / BLOCK)) if stop > start else np.empty(0, np.float32)
        for begin, end in _pieces(start, stop):
            part = numbers[begin - start : end - start].numpy()
            np.copyto(part, self._codes_of(data, begin, end, length))
            blocks = part.reshape(-1, min(BLOCK, end - begin))
            np.multiply(blocks, scales[begin // BLOCK - first :][: len(blocks), None], out=blocks)
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError for another number of bytes, and for scales or codes that are never encoded."""
        check_size(self.name, data, self.encoded_size(length), length)
        if length:
            self._scales_of(data, 0, ceil(length / BLOCK))
            self._codes_of(data, 0, length, length)

    def round_trip(self, vector: Tensor) -> Tensor:
        """The vector as the others get it."""
        return self.decode(self.encode(vector), vector.shape[0])

    def _scales_of(
        self, data: bytes | memoryview, start: int, stop: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Scales of blocks start..stop."""
        scales = np.frombuffer(data, dtype="<f4", count=stop - start, offset=_SCALE_BYTES * start).astype(np.float32)
        legal = (scales >= _SMALLEST_SCALE) & (scales <= _LARGEST_SCALE)  # neither holds for NaN
        if not (legal | (scales.view(np.uint32) == 0)).all():
            raise MalformedVectorError("An int8 vector has a scale that is negative, subnormal, too large or NaN.")
        return scales

    def _codes_of(
        self, data: bytes | memoryview, start: int, stop: int, length: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """Codes of numbers start..stop."""
        codes = np.frombuffer(data, np.int8, stop - start, _SCALE_BYTES * ceil(length / BLOCK) + start)
        if codes.min() < -_LARGEST_CODE:
            raise MalformedVectorError("An int8 vector has the code -128, which stands for nothing.")
        return codes


def _scales(blocks: Tensor, workspace: Tensor) -> Tensor:
    """Scales (b,) of blocks (b, n); the workspace (b, n) is overwritten. Raises ValueError when one is not finite."""
    largest = torch.abs(blocks, out=workspace).amax(dim=1)  # NaN where there is one
    if not bool(largest.isfinite().all()):
        raise ValueError("numbers that are not finite cannot be encoded as int8")
    scales = largest.div_(_LARGEST_CODE).clamp_(max=_LARGEST_SCALE)
    return scales.masked_fill_(scales < _SMALLEST_SCALE, 0)


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """start..stop in order, in pieces of whole blocks or of less than one."""
    while start < stop:
        in_block = start % BLOCK
        whole = 0 if in_block else min((stop - start) // BLOCK, _CHUNK_BLOCKS)
        end = start + whole * BLOCK if whole else min(start - in_block + BLOCK, stop)
        yield start, end
        start = end
