"""Integer codecs, int8 and int4: numbers in blocks, each with its own scale (Dettmers et al. 2022, linear here)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from neuroshard.compression.codec import EXCERPT, Codec, MalformedVectorError, check_size, checked_out, checked_vector

SCALE_BYTES = 4  # little-endian fp32
Scales: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
_CHUNK = 64 * 4096  # numbers per pass, so that they stay in the processor's cache
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` numbers with codes from -largest_code to largest_code, for the codec `name`."""

    name: str
    size: int
    largest_code: int

    def scale_bytes(self, length: int) -> int:
        """Bytes of the scales of `length` numbers."""
        return SCALE_BYTES * ceil(length / self.size)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """start..stop in order, in pieces of whole blocks or of less than one."""
        while start < stop:
            in_block = start % self.size
            whole = 0 if in_block else min((stop - start) // self.size, _CHUNK // self.size)
            end = start + whole * self.size if whole else min(start - in_block + self.size, stop)
            yield start, end
            start = end

    def workspace(self, length: int) -> Tensor:
        """Memory for the largest piece of `length` numbers."""
        return torch.empty(min(length, _CHUNK))

    def scaled(self, numbers: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (n,) of a piece (n,), still as fp32 and in the workspace, and its blocks' scales (b,).

        Raises ValueError if a number is not finite.
        """
        count = numbers.shape[0]
        blocks = numbers.view(-1, min(self.size, count))
        codes = workspace[:count].view_as(blocks)
        largest = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_())  # NaN if the block contains one
        if not bool(largest.isfinite().all()):
            raise ValueError(f"numbers that are not finite cannot be encoded as {self.name}")
        scales = largest.div_(self.largest_code).clamp_(max=self._largest_scale)
        scales.masked_fill_(scales < _SMALLEST_SCALE, 0)
        torch.div(blocks, scales.masked_fill(scales == 0, 1)[:, None], out=codes)
        return codes.round_().view(-1), scales  # ties to even, so that |error| <= scale / 2

    def scales_of(self, data: bytes | memoryview, start: int, stop: int) -> Scales:
        """Scales of the blocks that contain numbers start..stop. Raises MalformedVectorError for impossible ones."""
        first, last = start // self.size, ceil(stop / self.size)
        count = last - first if stop > start else 0
        scales = np.frombuffer(data, dtype="<f4", count=count, offset=SCALE_BYTES * first).astype(np.float32)
        legal = (scales >= _SMALLEST_SCALE) & (scales <= self._largest_scale)  # both comparisons are false for NaN
        if not (legal | (scales.view(np.uint32) == 0)).all():
            raise MalformedVectorError(
                f"An {self.name} vector has a scale that is negative, subnormal, too large or NaN."
            )
        return scales

    def excerpts(self, data: bytes, size: int) -> tuple[Tensor, np.ndarray]:
        """Scales (n, 1) and bytes of the codes (n, size - 4) of excerpts of `size` bytes each."""
        if len(data) % size:
            raise MalformedVectorError(f"{len(data)} bytes are not excerpts of {self.name} vectors.")
        rows = np.frombuffer(data, np.uint8).reshape(-1, size)
        scales = np.ascontiguousarray(rows[:, :SCALE_BYTES]).view("<f4").astype(np.float32)
        codes = np.ascontiguousarray(rows[:, SCALE_BYTES:])
        return torch.from_numpy(scales), codes  # pyright: ignore[reportUnknownMemberType]

    def multiply(self, codes: np.ndarray, scales: Scales, begin: int, start: int) -> None:
        """Multiply codes (n,) fp32 of a piece that begins at `begin` by `scales`, those of the blocks from `start`, in
        place.

        The piece is one of `pieces`.
        """
        # PyTorch's: NumPy repeatedly copies a factor that is the same for a whole row
        numbers = torch.from_numpy(codes)  # pyright: ignore[reportUnknownMemberType]
        factors = torch.from_numpy(scales)  # pyright: ignore[reportUnknownMemberType]
        blocks = numbers.view(-1, min(self.size, len(codes)))
        of_piece = factors[begin // self.size - start // self.size :][: len(blocks), None]
        torch.mul(blocks, of_piece, out=blocks)

    @cached_property
    def _largest_scale(self) -> float:
        """The largest scale: just below the limit where scale times the largest code could overflow fp32."""
        limit = np.float32(torch.finfo(torch.float32).max / self.largest_code)
        return float(np.nextafter(limit, np.float32(0)))


BLOCK = 4096  # numbers that share a scale
_INT8_BLOCKS = Blocks("int8", BLOCK, largest_code=127)


class Int8Codec(Codec):
    """Scales of all blocks, then one signed byte per number: x is about code * scale, |error| <= scale / 2."""

    name = _INT8_BLOCKS.name

    def encoded_size(self, length: int) -> int:
        """One byte per number, and 4 per block."""
        return _INT8_BLOCKS.scale_bytes(length) + length

    def encode(self, vector: Tensor) -> bytes:
        """Scales and codes. Raises ValueError for numbers that are not finite, or unless it is an fp32 CPU vector."""
        numbers = checked_vector(vector)
        length = numbers.shape[0]
        encoded = np.empty(self.encoded_size(length), dtype=np.uint8)
        scales = encoded[: _INT8_BLOCKS.scale_bytes(length)].view("<f4")
        codes = torch.from_numpy(encoded[scales.nbytes :].view(np.int8))  # pyright: ignore[reportUnknownMemberType]
        workspace = _INT8_BLOCKS.workspace(length)
        for start, stop in _INT8_BLOCKS.pieces(0, length):
            of_numbers, of_blocks = _INT8_BLOCKS.scaled(numbers[start:stop], workspace)
            codes[start:stop].copy_(of_numbers)
            scales[start // BLOCK :][: len(of_blocks)] = of_blocks.numpy()
        return encoded.tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out)
        scales = _INT8_BLOCKS.scales_of(data, start, stop)
        for begin, end in _INT8_BLOCKS.pieces(start, stop):
            part = numbers[begin - start : end - start].numpy()
            np.copyto(part, self._codes_of(data, begin, end, length))
            _INT8_BLOCKS.multiply(part, scales, begin, start)
        return numbers

    def excerpt(self, data: bytes | memoryview, start: int, length: int) -> bytes:
        scale, codes = SCALE_BYTES * (start // BLOCK), _INT8_BLOCKS.scale_bytes(length) + start
        return bytes(data[scale : scale + SCALE_BYTES]) + bytes(data[codes : codes + EXCERPT])

    def decode_excerpts(self, data: bytes) -> Tensor:
        scales, codes = _INT8_BLOCKS.excerpts(data, self.encoded_size(EXCERPT))
        return torch.from_numpy(codes.view(np.int8)) * scales  # pyright: ignore[reportUnknownMemberType]

    def rounded_like(self, data: bytes, numbers: Tensor) -> Tensor:
        scales, _ = _INT8_BLOCKS.excerpts(data, self.encoded_size(EXCERPT))
        return torch.div(numbers, scales.masked_fill(scales == 0, 1)).round_().mul_(scales)

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raise MalformedVectorError for another number of bytes, and for impossible scales or codes."""
        check_size(self.name, data, self.encoded_size(length), length)
        if length:
            _INT8_BLOCKS.scales_of(data, 0, length)
            self._codes_of(data, 0, length, length)

    def _codes_of(
        self, data: bytes | memoryview, start: int, stop: int, length: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """Codes of numbers start..stop."""
        codes = np.frombuffer(data, np.int8, stop - start, _INT8_BLOCKS.scale_bytes(length) + start)
        if codes.min() < -_INT8_BLOCKS.largest_code:
            raise MalformedVectorError("An int8 vector contains the code -128, which is not used.")
        return codes


# Numbers that share a scale. Small, since the largest number of a block determines its resolution: of 256 normal
# numbers it is 2.8 standard deviations, of 4,096 it is 3.6; the scales take 3 % of the bytes.
INT4_BLOCK = 256
_INT4_BLOCKS = Blocks("int4", INT4_BLOCK, largest_code=7)


class Int4Codec(Codec):
    """Scales of all blocks, then two signed codes per byte, the earlier one in the low half: x is about code * scale.

    |error| <= scale / 2. The high half of the last byte of an odd number of codes is 0.
    """

    name = _INT4_BLOCKS.name

    def encoded_size(self, length: int) -> int:
        """Half a byte per number, and 4 bytes per block."""
        return _INT4_BLOCKS.scale_bytes(length) + ceil(length / 2)

    def encode(self, vector: Tensor) -> bytes:
        """Scales and codes. Raises ValueError for numbers that are not finite, or unless it is an fp32 CPU vector."""
        numbers = checked_vector(vector)
        length = numbers.shape[0]
        encoded = np.zeros(self.encoded_size(length), dtype=np.uint8)
        scales = encoded[: _INT4_BLOCKS.scale_bytes(length)].view("<f4")
        halves = encoded[scales.nbytes :]
        workspace = _INT4_BLOCKS.workspace(length)
        for start, stop in _INT4_BLOCKS.pieces(0, length):  # each starts at a block, so at a whole byte
            of_numbers, of_blocks = _INT4_BLOCKS.scaled(numbers[start:stop], workspace)
            codes = of_numbers.to(torch.int8).numpy().view(np.uint8) & 0x0F
            pairs = halves[start // 2 : ceil(stop / 2)]
            pairs[:] = codes[0::2]
            pairs[: len(codes) // 2] |= codes[1::2] << 4
            scales[start // INT4_BLOCK :][: len(of_blocks)] = of_blocks.numpy()
        return encoded.tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        check_size(self.name, data, self.encoded_size(length), length)
        numbers = checked_out(start, stop, length, out)
        scales = _INT4_BLOCKS.scales_of(data, start, stop)
        for begin, end in _INT4_BLOCKS.pieces(start, stop):
            part = numbers[begin - start : end - start].numpy()
            halves = self._halves_of(data, begin // 2, ceil(end / 2), length)
            skipped = begin % 2  # the piece starts in the middle of a byte
            low, high = _codes_in(halves)
            np.copyto(part[skipped::2], low[skipped:][: ceil((len(part) - skipped) / 2)])
            np.copyto(part[1 - skipped :: 2], high[: ceil((len(part) - 1 + skipped) / 2)])
            _INT4_BLOCKS.multiply(part, scales, begin, start)
        return numbers

    def excerpt(self, data: bytes | memoryview, start: int, length: int) -> bytes:
        scale, codes = SCALE_BYTES * (start // INT4_BLOCK), _INT4_BLOCKS.scale_bytes(length) + start // 2
        return bytes(data[scale : scale + SCALE_BYTES]) + bytes(data[codes : codes + EXCERPT // 2])

    def decode_excerpts(self, data: bytes) -> Tensor:
        scales, halves = _INT4_BLOCKS.excerpts(data, self.encoded_size(EXCERPT))
        codes = np.stack(_codes_in(halves), axis=-1).reshape(-1, EXCERPT)
        return torch.from_numpy(codes) * scales  # pyright: ignore[reportUnknownMemberType]

    def rounded_like(self, data: bytes, numbers: Tensor) -> Tensor:
        scales, _ = _INT4_BLOCKS.excerpts(data, self.encoded_size(EXCERPT))
        return torch.div(numbers, scales.masked_fill(scales == 0, 1)).round_().mul_(scales)

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raise MalformedVectorError for another number of bytes, and for impossible scales or codes."""
        check_size(self.name, data, self.encoded_size(length), length)
        _INT4_BLOCKS.scales_of(data, 0, length)
        for begin, end in _INT4_BLOCKS.pieces(0, length):
            self._halves_of(data, begin // 2, ceil(end / 2), length)

    def _halves_of(
        self, data: bytes | memoryview, start: int, stop: int, length: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Bytes start..stop of the codes."""
        halves = np.frombuffer(data, np.uint8, stop - start, _INT4_BLOCKS.scale_bytes(length) + start)
        if ((halves & 0x0F) == 0x08).any() or ((halves & 0xF0) == 0x80).any():
            raise MalformedVectorError("An int4 vector contains the code -8, which is not used.")
        if length % 2 and 2 * stop > length and halves[-1] & 0xF0:
            raise MalformedVectorError("An int4 vector has a code after its last number.")
        return halves


def _codes_in(halves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes in the low and in the high halves of bytes."""
    return (halves << 4).view(np.int8) >> 4, halves.view(np.int8) >> 4
