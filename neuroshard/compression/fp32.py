"""The codec that changes nothing."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from neuroshard.compression.codec import Codec, check_size, checked_out, checked_vector

_NUMBER_BYTES = 4


class Fp32Codec(Codec):
    """Little-endian fp32, nothing lost; numbers that are not finite travel like any other."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        return "fp32"

    def encoded_size(self, length: int) -> int:
        """4 bytes a number."""
        return _NUMBER_BYTES * length

    def encode(self, vector: Tensor) -> bytes:
        """4 bytes a number, in order. Raises ValueError when it is no fp32 CPU vector."""
        return checked_vector(vector).numpy().astype("<f4", copy=False).tobytes()

    def decode_range(
        self, data: bytes | memoryview, start: int, stop: int, length: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers start..stop of the vector (length,). Raises MalformedVectorError, ValueError; see Codec."""
        self.check(data, length)
        numbers = checked_out(start, stop, length, out)
        if stop > start:
            encoded = np.frombuffer(data, dtype="<f4", count=stop - start, offset=_NUMBER_BYTES * start)
            np.copyto(numbers.numpy(), encoded)
        return numbers

    def check(self, data: bytes | memoryview, length: int) -> None:
        """Raises MalformedVectorError for another number of bytes; every four bytes are a number."""
        check_size(self.name, data, self.encoded_size(length), length)

    def round_trip(self, vector: Tensor) -> Tensor:
        """The vector itself."""
        return vector
