"""Top-k: of 4,096 numbers the 64 largest travel, with 2 bits each (as SparseLoCo does, Sarfi et al. 2025)."""

from __future__ import annotations

from math import ceil
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.compression.codec import Codec, MalformedVectorError, check_size, checked_out, checked_vector
from neuroshard.compression.indices import PLACES, pack_places, packed_size, unpack_places

KEPT = 64  # of a block
_LEVEL_BYTES = 8  # two fp32 magnitudes a block
_CODE_BYTES = KEPT // 4  # 2 bits a number: the sign and which of the magnitudes
_BLOCK_BYTES = _LEVEL_BYTES + packed_size(KEPT) + _CODE_BYTES
_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
Floats: TypeAlias = NDArray[np.float32]


class TopKCodec(Codec):
    """A block is two magnitudes (little-endian fp32), 64 ascending places of 12 bits and 64 codes of 2 bits.

    Of the kept numbers the magnitudes above their mean travel as the mean of these, the others as the mean of those, so
    that what is lost is shorter than the vector by exactly what travels: |x - decoded|^2 = |x|^2 - |decoded|^2 but for
    rounding. Magnitudes below the smallest normal number travel as 0. A last block of fewer numbers is filled up with
    zeros; the places behind its end are used only when it has fewer than 64 numbers.
    """

    @property
    def name(self) -> str:
        """Name of the codec."""
        return "topk"

    def encoded_size(self, length: int) -> int:
        """120 bytes a block of 4,096 numbers: 0.23 bits a number."""
        return _BLOCK_BYTES * ceil(length / PLACES)

    def encode(self, vector: Tensor) -> bytes:
        """Blocks. Raises ValueError for numbers that are not finite, or when it is no fp32 CPU vector."""
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
        """Numbers start..stop of the vector (length,). Raises MalformedVectorError, ValueError; see Codec."""
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out).zero_()
        if stop > start:
            first = start // PLACES
            places, values = _read_blocks(data, first, ceil(stop / PLACES), length)
            wanted = (places >= start) & (places < stop)
            numbers.numpy()[places[wanted] - start] = values[wanted]
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError where `decode` would."""
        check_size(self.name, data, self.encoded_size(length), length)
        _read_blocks(data, 0, ceil(length / PLACES), length)


def _encoded_block(numbers: Floats) -> NDArray[np.uint8]:
    """A block's bytes. Ties between places are broken by the partition: only this node encodes these numbers."""
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
    """In fp32; 0 for none and for what is no normal number."""
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
    """Only a block of fewer than 64 numbers names places behind its end: those that follow it, with the code 0."""
    behind = places >= length
    if not behind.any():
        return
    in_block = length % PLACES
    if in_block >= KEPT or behind[-1].sum() != KEPT - in_block or places[-1, -1] % PLACES != KEPT - 1:
        raise MalformedVectorError("A topk vector has a place behind its end.")
    if codes[behind].any():
        raise MalformedVectorError("A topk vector has a value behind its end.")
