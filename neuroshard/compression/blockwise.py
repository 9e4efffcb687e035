"""What the integer codecs share: numbers in blocks, each with a scale of its own (Dettmers et al. 2022, linear here).

A block's scale = largest |x| / largest code; a scale that would be subnormal is sent as 0, the block as zeros. Each
product, quotient and rounding is one IEEE operation on one number and no decoded number is subnormal: no kernel and no
mode changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from neuroshard.compression.codec import MalformedVectorError

SCALE_BYTES = 4  # little-endian fp32
Scales: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
_CHUNK = 64 * 4096  # numbers handled at once, so that the passes over them stay in the processor's cache
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` numbers with codes from -largest_code to largest_code, for a codec of that name."""

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
        """Room for the largest piece of `length` numbers."""
        return torch.empty(min(length, _CHUNK))

    def scaled(self, numbers: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (n,) of a piece (n,), still as fp32 and in the workspace, and its blocks' scales (b,).

        Raises ValueError when a number is not finite.
        """
        count = numbers.shape[0]
        blocks = numbers.view(-1, min(self.size, count))
        codes = workspace[:count].view_as(blocks)
        largest = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_())  # NaN where there is one
        if not bool(largest.isfinite().all()):
            raise ValueError(f"numbers that are not finite cannot be encoded as {self.name}")
        scales = largest.div_(self.largest_code).clamp_(max=self._largest_scale)
        scales.masked_fill_(scales < _SMALLEST_SCALE, 0)
        torch.div(blocks, scales.masked_fill(scales == 0, 1)[:, None], out=codes)
        return codes.round_().view(-1), scales  # ties to even, so that |error| <= scale / 2

    def scales_of(self, data: bytes | memoryview, start: int, stop: int) -> Scales:
        """Scales of the blocks that hold numbers start..stop. Raises MalformedVectorError for those never encoded."""
        first, last = start // self.size, ceil(stop / self.size)
        count = last - first if stop > start else 0
        scales = np.frombuffer(data, dtype="<f4", count=count, offset=SCALE_BYTES * first).astype(np.float32)
        legal = (scales >= _SMALLEST_SCALE) & (scales <= self._largest_scale)  # neither holds for NaN
        if not (legal | (scales.view(np.uint32) == 0)).all():
            raise MalformedVectorError(
                f"An {self.name} vector has a scale that is negative, subnormal, too large or NaN."
            )
        return scales

    def multiply(self, codes: np.ndarray, scales: Scales, begin: int, start: int) -> None:
        """In place: codes of a piece that begins at `begin` (n,) fp32 times `scales`, those of the blocks from `start`.

        The piece is one of `pieces`.
        """
        # PyTorch's: NumPy copies a factor that is the same for a whole row many times over
        blocks, factors = (torch.from_numpy(one) for one in (codes, scales))  # pyright: ignore[reportUnknownMemberType]
        blocks = blocks.view(-1, min(self.size, len(codes)))
        of_piece = factors[begin // self.size - start // self.size :][: len(blocks), None]
        torch.mul(blocks, of_piece, out=blocks)

    @property
    def _largest_scale(self) -> float:
        """A step below what the largest fp32 number needs: finite times the largest code, however rounded."""
        limit = np.float32(torch.finfo(torch.float32).max / self.largest_code)
        return float(np.nextafter(limit, np.float32(0)))
