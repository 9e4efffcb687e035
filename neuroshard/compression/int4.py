"""Int4 in blocks that share a scale: an eighth of fp32's bytes."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from neuroshard.compression.blockwise import Blocks
from neuroshard.compression.codec import Codec, MalformedVectorError, check_size, checked_out, checked_vector

# Numbers that share a scale. Small, since the largest of a block decides how finely the others can be told: of 256
# normal numbers it is 2.8 standard deviations, of 4,096 it is 3.6; the scales take 3 % of the bytes.
INT4_BLOCK = 256
_BLOCKS = Blocks("int4", INT4_BLOCK, largest_code=7)


class Int4Codec(Codec):
    """Scales of all blocks, then two signed codes a byte, the earlier one in the low half: x is about code * scale.

    |error| <= scale / 2. The high half of the last byte of an odd number of codes is 0.
    """

    @property
    def name(self) -> str:
        """Name of the codec."""
        return _BLOCKS.name

    def encoded_size(self, length: int) -> int:
        """Half a byte a number, and 4 bytes a block."""
        return _BLOCKS.scale_bytes(length) + ceil(length / 2)

    def encode(self, vector: Tensor) -> bytes:
        """Scales and codes. Raises ValueError for numbers that are not finite, or when it is no fp32 CPU vector."""
        numbers = checked_vector(vector)
        length = numbers.shape[0]
        encoded = np.zeros(self.encoded_size(length), dtype=np.uint8)
        scales = encoded[: _BLOCKS.scale_bytes(length)].view("<f4")
        halves = encoded[scales.nbytes :]
        workspace = _BLOCKS.workspace(length)
        for start, stop in _BLOCKS.pieces(0, length):  # each starts at a block, so at a whole byte
            of_numbers, of_blocks = _BLOCKS.scaled(numbers[start:stop], workspace)
            codes = of_numbers.to(torch.int8).numpy().view(np.uint8) & 0x0F
            pairs = halves[start // 2 : ceil(stop / 2)]
            pairs[:] = codes[0::2]
            pairs[: len(codes) // 2] |= codes[1::2] << 4
            scales[start // INT4_BLOCK :][: len(of_blocks)] = of_blocks.numpy()
        return encoded.tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,). Raises MalformedVectorError, ValueError; see Codec."""
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out)
        scales = _BLOCKS.scales_of(data, start, stop)
        for begin, end in _BLOCKS.pieces(start, stop):
            part = numbers[begin - start : end - start].numpy()
            halves = self._halves_of(data, begin // 2, ceil(end / 2), length)
            skipped = begin % 2  # the piece starts in the middle of a byte
            np.copyto(part[skipped::2], _low(halves[skipped:])[: ceil((len(part) - skipped) / 2)])
            np.copyto(part[1 - skipped :: 2], _high(halves)[: ceil((len(part) - 1 + skipped) / 2)])
            _BLOCKS.multiply(part, scales, begin, start)
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError for another number of bytes, and for scales or codes that are never encoded."""
        check_size(self.name, data, self.encoded_size(length), length)
        _BLOCKS.scales_of(data, 0, length)
        for begin, end in _BLOCKS.pieces(0, length):
            self._halves_of(data, begin // 2, ceil(end / 2), length)

    def _halves_of(
        self, data: bytes | memoryview, start: int, stop: int, length: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Bytes start..stop of the codes."""
        halves = np.frombuffer(data, np.uint8, stop - start, _BLOCKS.scale_bytes(length) + start)
        if ((halves & 0x0F) == 0x08).any() or ((halves & 0xF0) == 0x80).any():
            raise MalformedVectorError("An int4 vector has the code -8, which stands for nothing.")
        if length % 2 and 2 * stop > length and halves[-1] & 0xF0:
            raise MalformedVectorError("An int4 vector has a code behind its last number.")
        return halves


def _low(halves: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Codes of the low halves."""
    return (halves << 4).view(np.int8) >> 4


def _high(halves: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Codes of the high halves."""
    return halves.view(np.int8) >> 4
