"""Sparse codecs: top-k for contributions (as in SparseLoCo, Sarfi et al. 2025), and the sum of top-k contributions.

Both store places within blocks of 4,096 numbers in 12 bits each.
"""

from __future__ import annotations

from math import ceil
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.compression.codec import Codec, MalformedVectorError, check_size, checked_out, checked_vector
from neuroshard.compression.integers import Blocks

PLACES = 4096  # 2 ** 12
Bytes: TypeAlias = NDArray[np.uint8]


def packed_size(count: int) -> int:
    """Size in bytes of this number of places: two take three bytes, an odd last one takes two."""
    return (3 * count + 1) // 2


def pack_places(places: NDArray[np.integer]) -> Bytes:
    """Places (n,) below 4,096 as bytes; the earlier one of a pair comes first, low bits first."""
    even = np.zeros(len(places) + len(places) % 2, dtype=np.uint16)
    even[: len(places)] = places
    first, second = even[0::2], even[1::2]
    triples = np.empty((len(first), 3), dtype=np.uint8)
    triples[:, 0] = first & 0xFF
    triples[:, 1] = (first >> 8) | (second & 0x0F) << 4
    triples[:, 2] = second >> 4
    return triples.reshape(-1)[: packed_size(len(places))]


def unpack_places(data: Bytes, count: int) -> NDArray[np.uint16]:
    """The inverse of `pack_places`. The unused half of the last byte is not checked."""
    triples = np.zeros((3 * ((count + 1) // 2),), dtype=np.uint16)
    triples[: len(data)] = data
    first, second, third = triples[0::3], triples[1::3], triples[2::3]
    places = np.empty((len(first), 2), dtype=np.uint16)
    places[:, 0] = first | (second & 0x0F) << 8
    places[:, 1] = second >> 4 | third << 4
    return places.reshape(-1)[:count]


_BLOCKS = Blocks("sparse", PLACES, largest_code=127)
_COUNT_BYTES = 2
Places: TypeAlias = NDArray[np.int64]


class SparseCodec(Codec):
    """Scales of all blocks of 4,096 numbers, counts of all blocks (little-endian uint16), places, codes.

    The places are the 12-bit places of the numbers whose int8 code is not 0, ascending in each block; x is about
    code * scale, |error| <= scale / 2. The size depends on the numbers.
    """

    name = _BLOCKS.name

    def encoded_size(self, length: int) -> int:
        """The maximum: 2.5 bytes per number and 6 per block, if no number is zero."""
        return self._head_bytes(length) + packed_size(length) + length

    def encode(self, vector: Tensor) -> bytes:
        """Scales, counts, places, codes.

        Raises ValueError for numbers that are not finite, or unless it is an fp32 CPU vector.
        """
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
        """Numbers start..stop of the vector. The whole vector is checked, because no number has a fixed place.

        Raises MalformedVectorError, ValueError.
        """
        places, values = self._read(data, length)
        numbers = checked_out(start, stop, length, out).zero_()
        first, last = np.searchsorted(places, (start, stop))
        numbers.numpy()[places[first:last] - start] = values[first:last]
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
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
            raise MalformedVectorError("A sparse vector has bits after its last place.")
        if not ((codes >= -_BLOCKS.largest_code) & (codes != 0)).all():
            raise MalformedVectorError("A sparse vector has an unused code or a code for zero.")
        of_block = np.repeat(np.arange(blocks), counts)
        places = unpack_places(packed, count) + PLACES * of_block
        if count and not ((places[1:] > places[:-1]).all() and places[-1] < length):
            raise MalformedVectorError("A sparse vector has places that repeat, are not in order or are after its end.")
        return places, codes.astype(np.float32) * scales[of_block]


KEPT = 64  # per block
_LEVEL_BYTES = 8  # two fp32 magnitudes per block
_CODE_BYTES = KEPT // 4  # 2 bits per number: the sign and which of the magnitudes
_BLOCK_BYTES = _LEVEL_BYTES + packed_size(KEPT) + _CODE_BYTES
_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
Floats: TypeAlias = NDArray[np.float32]


class TopKCodec(Codec):
    """A block has two magnitudes (little-endian fp32), 64 ascending places of 12 bits and 64 codes of 2 bits.

    Kept numbers with a magnitude above the mean travel as the mean of those magnitudes, the others as the mean of
    the rest. So the loss is shorter than the vector by exactly the decoded part: |x - decoded|^2 = |x|^2 -
    |decoded|^2 except for rounding. Magnitudes below the smallest normal number travel as 0. A last block with fewer
    numbers is filled up with zeros; the places after its end are used only if it has fewer than 64 numbers.
    """

    name = "topk"
    # it loses most of a contribution, and numbers that wait for long come from outdated weights
    residual_decay = 0.95

    def encoded_size(self, length: int) -> int:
        """120 bytes per block of 4,096 numbers: 0.23 bits per number."""
        return _BLOCK_BYTES * ceil(length / PLACES)

    def encode(self, vector: Tensor) -> bytes:
        """Blocks. Raises ValueError for numbers that are not finite, or unless it is an fp32 CPU vector."""
        numbers = checked_vector(vector)
        if not bool(numbers.isfinite().all()):
            raise ValueError("numbers that are not finite cannot be encoded as topk")
        encoded = np.empty((ceil(len(numbers) / PLACES), _BLOCK_BYTES), dtype=np.uint8)
        for index, block in enumerate(encoded):
            block[:] = _encoded_block(numbers[index * PLACES :][:PLACES].numpy())
        return encoded.tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out).zero_()
        if stop > start:
            first = start // PLACES
            places, values = _read_blocks(data, first, ceil(stop / PLACES), length)
            wanted = (places >= start) & (places < stop)
            numbers.numpy()[places[wanted] - start] = values[wanted]
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        check_size(self.name, data, self.encoded_size(length), length)
        _read_blocks(data, 0, ceil(length / PLACES), length)


def _encoded_block(numbers: Floats) -> NDArray[np.uint8]:
    """A block's bytes. The partition breaks ties between places arbitrarily: only this node encodes these numbers."""
    block = np.zeros(PLACES, dtype=np.float32)
    block[: len(numbers)] = numbers
    magnitudes = np.abs(block)
    if len(numbers) > KEPT:
        places = np.sort(np.argpartition(magnitudes[: len(numbers)], -KEPT)[-KEPT:])
    else:
        places = np.arange(KEPT)
    kept, largest = magnitudes[places].astype(np.float64), block[places]
    is_large = kept > kept.mean()
    levels = np.array([_mean(kept[~is_large]), _mean(kept[is_large])], dtype="<f4")
    codes = (largest < 0).astype(np.uint8) << 1 | is_large
    codes[places >= max(len(numbers), 1)] = 0
    quarters = codes.reshape(-1, 4) << np.array([0, 2, 4, 6], dtype=np.uint8)
    packed = np.bitwise_or.reduce(quarters, axis=1).astype(np.uint8)
    return np.concatenate([levels.view(np.uint8), pack_places(places), packed])


def _mean(magnitudes: NDArray[np.float64]) -> np.float32:
    """The mean in fp32; 0 for no numbers and for a mean that is not a normal number."""
    mean = np.float32(min(magnitudes.mean(), _HUGE)) if len(magnitudes) else np.float32(0)
    return mean if mean >= _TINY else np.float32(0)


def _read_blocks(data: bytes | memoryview, first: int, last: int, length: int) -> tuple[NDArray[np.int64], Floats]:
    """Places in the whole vector and values, both (blocks, 64). Raises MalformedVectorError."""
    count = last - first
    blocks = np.frombuffer(data, np.uint8, count * _BLOCK_BYTES, first * _BLOCK_BYTES).reshape(count, _BLOCK_BYTES)
    levels = np.ascontiguousarray(blocks[:, :_LEVEL_BYTES]).view("<f4").astype(np.float32)
    legal = (levels.view(np.uint32) == 0) | ((levels >= _TINY) & (levels <= _HUGE))
    if not legal.all():
        raise MalformedVectorError("A topk vector has a magnitude that is negative, subnormal, infinite or NaN.")
    middle = _LEVEL_BYTES + packed_size(KEPT)
    places = unpack_places(blocks[:, _LEVEL_BYTES:middle].reshape(-1), count * KEPT).reshape(count, KEPT)
    if count and not (places[:, 1:] > places[:, :-1]).all():
        raise MalformedVectorError("A topk vector has places that repeat or are not in order.")
    quarters = blocks[:, middle:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)
    codes = (quarters & 3).astype(np.uint8).reshape(count, KEPT)
    values = np.take_along_axis(levels, (codes & 1).astype(np.int64), axis=1)
    values = np.where(codes & 2, np.float32(0) - values, values)  # 0 - 0 is 0, not -0
    everywhere = places.astype(np.int64) + PLACES * np.arange(first, last)[:, None]
    _check_end(everywhere, codes, length)
    return everywhere, values


def _check_end(places: NDArray[np.int64], codes: NDArray[np.uint8], length: int) -> None:
    """Only a block with fewer than 64 numbers may have places after its end: the next ones in order, with code 0."""
    behind = places >= length
    if not behind.any():
        return
    in_block = length % PLACES
    if in_block >= KEPT or behind[-1].sum() != KEPT - in_block or places[-1, -1] % PLACES != KEPT - 1:
        raise MalformedVectorError("A topk vector has a place after its end.")
    if codes[behind].any():
        raise MalformedVectorError("A topk vector has a value after its end.")
