"""Int8 in blocks that share a scale: a quarter of fp32's bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from neuroshard.compression.blockwise import Blocks
from neuroshard.compression.codec import Codec, MalformedVectorError, check_size, checked_out, checked_vector

BLOCK = 4096  # numbers that share a scale
_BLOCKS = Blocks("int8", BLOCK, largest_code=127)


class Int8Codec(Codec):
    """Scales of all blocks, then a signed byte a number: x is about code * scale, |error| <= scale / 2."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        return _BLOCKS.name

    def encoded_size(self, length: int) -> int:
        """A byte a number, and 4 a block."""
        return _BLOCKS.scale_bytes(length) + length

    def encode(self, vector: Tensor) -> bytes:
        """Scales and codes. Raises ValueError for numbers that are not finite, or when it is no fp32 CPU vector."""
        numbers = checked_vector(vector)
        length = numbers.shape[0]
        encoded = np.empty(self.encoded_size(length), dtype=np.uint8)
        scales = encoded[: _BLOCKS.scale_bytes(length)].view("<f4")
        codes = torch.from_numpy(encoded[scales.nbytes :].view(np.int8))  # pyright: ignore[reportUnknownMemberType]
        workspace = _BLOCKS.workspace(length)
        for start, stop in _BLOCKS.pieces(0, length):
            of_numbers, of_blocks = _BLOCKS.scaled(numbers[start:stop], workspace)
            codes[start:stop].copy_(of_numbers)
            scales[start // BLOCK :][: len(of_blocks)] = of_blocks.numpy()
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
            np.copyto(part, self._codes_of(data, begin, end, length))
            _BLOCKS.multiply(part, scales, begin, start)
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError for another number of bytes, and for scales or codes that are never encoded."""
        check_size(self.name, data, self.encoded_size(length), length)
        if length:
            _BLOCKS.scales_of(data, 0, length)
            self._codes_of(data, 0, length, length)

    def _codes_of(
        self, data: bytes | memoryview, start: int, stop: int, length: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """Codes of numbers start..stop."""
        codes = np.frombuffer(data, np.int8, stop - start, _BLOCKS.scale_bytes(length) + start)
        if codes.min() < -_BLOCKS.largest_code:
            raise MalformedVectorError("An int8 vector has the code -128, which stands for nothing.")
        return codes
