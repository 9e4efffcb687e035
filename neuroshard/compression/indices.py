"""Places within a block of 4,096 numbers, 12 bits each."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

PLACES = 4096  # 2 ** 12
Bytes: TypeAlias = NDArray[np.uint8]


def packed_size(count: int) -> int:
    """Bytes of so many places: two take three bytes, an odd last one takes two."""
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
    """The inverse. What the half of a byte behind an odd last place holds is not looked at."""
    triples = np.zeros((3 * ((count + 1) // 2),), dtype=np.uint16)
    triples[: len(data)] = data
    first, second, third = triples[0::3], triples[1::3], triples[2::3]
    places = np.empty((len(first), 2), dtype=np.uint16)
    places[:, 0] = first | (second & 0x0F) << 8
    places[:, 1] = second >> 4 | third << 4
    return places.reshape(-1)[:count]
