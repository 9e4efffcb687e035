"""What is left of top-k contributions when they are added up: the numbers that are not zero, in a byte each."""

from __future__ import annotations

from math import ceil
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.compression.blockwise import Blocks
from neuroshard.compression.codec import Codec, MalformedVectorError, checked_out, checked_vector
from neuroshard.compression.indices import PLACES, pack_places, packed_size, unpack_places

_BLOCKS = Blocks("sparse", PLACES, largest_code=127)
_COUNT_BYTES = 2
Places: TypeAlias = NDArray[np.int64]


class SparseCodec(Codec):
    """Scales of all blocks of 4,096 numbers, counts of all blocks (little-endian uint16), places, codes.

    The places are those of 12 bits of the numbers whose int8 code is not 0, ascending in each block; x is about
    code * scale, |error| <= scale / 2. Its size depends on the numbers.
    """

    @property
    def name(self) -> str:
        """Name of the codec."""
        return _BLOCKS.name

    def encoded_size(self, length: int) -> int:
        """The most that so many numbers take: 2.5 bytes a number and 6 a block, when none is zero."""
        return self._head_bytes(length) + packed_size(length) + length

    def encode(self, vector: Tensor) -> bytes:
        """Scales, counts, places, codes. Raises ValueError for numbers that are not finite, or no fp32 CPU vector."""
        numbers = checked_vector(vector)
        length = numbers.shape[0]
        codes, workspace = np.empty(length, dtype=np.int8), _BLOCKS.workspace(length)
        scales = np.empty(ceil(length / PLACES), dtype="<f4")
        for start, stop in _BLOCKS.pieces(0, length):
            of_numbers, of_blocks = _BLOCKS.scaled(numbers[start:stop], workspace)
            codes[start:stop] = of_numbers.numpy()
            scales[start // PLACES :][: len(of_blocks)] = of_blocks.numpy()
        places = np.flatnonzero(codes)
        counts = np.bincount(places // PLACES, minlength=len(scales)).astype("<u2")
        return b"".join(
            (scales.tobytes(), counts.tobytes(), pack_places(places % PLACES).tobytes(), codes[places].tobytes())
        )

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,). All is checked, since nothing is at a place of its own.

        Raises MalformedVectorError, ValueError; see Codec.
        """
        places, values = self._read(data, length)
        numbers = checked_out(start, stop, length, out).zero_()
        first, last = np.searchsorted(places, (start, stop))
        numbers.numpy()[places[first:last] - start] = values[first:last]
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError where `decode` would."""
        self._read(data, length)

    def _head_bytes(self, length: int) -> int:
        return _BLOCKS.scale_bytes(length) + _COUNT_BYTES * ceil(length / PLACES)

    def _read(self, data: bytes | memoryview, length: int) -> tuple[Places, NDArray[np.float32]]:
        """Places (n,) in the whole vector, ascending, and values (n,). Raises MalformedVectorError."""
        blocks, head = ceil(length / PLACES), self._head_bytes(length)
        if not head <= len(data) <= self.encoded_size(length):
            raise MalformedVectorError(f"{len(data)} bytes are not a sparse vector of {length} numbers.")
        counts = np.frombuffer(data, "<u2", blocks, _BLOCKS.scale_bytes(length)).astype(np.int64)
        count = int(counts.sum())
        if len(data) != head + packed_size(count) + count:
            raise MalformedVectorError(f"{len(data)} bytes are not a sparse vector with {count} numbers.")
        scales = _BLOCKS.scales_of(data, 0, length)
        packed = np.frombuffer(data, np.uint8, packed_size(count), head)
        codes = np.frombuffer(data, np.int8, count, head + len(packed))
        if count % 2 and packed[-1] & 0xF0:
            raise MalformedVectorError("A sparse vector has bits behind its last place.")
        if not ((codes >= -_BLOCKS.largest_code) & (codes != 0)).all():
            raise MalformedVectorError("A sparse vector has a code that stands for nothing, or for zero.")
        of_block = np.repeat(np.arange(blocks), counts)
        places = unpack_places(packed, count) + PLACES * of_block
        if count and not ((places[1:] > places[:-1]).all() and places[-1] < length):
            raise MalformedVectorError("A sparse vector has places that repeat, are not in order or behind its end.")
        return places, codes.astype(np.float32) * scales[of_block]
