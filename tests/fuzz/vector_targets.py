"""Readers of encoded contributions."""

from __future__ import annotations

import torch

from neuroshard.compression import BLOCK, MalformedVectorError, make_codec
from tests.fuzz.target import Target, golden

NAMES = ("int8", "bf16", "fp32", "int4")
CODECS = tuple(map(make_codec, NAMES))
LENGTHS = (0, 1, 2, 7, 100, BLOCK, BLOCK + 1)


def check_encoded_vector(data: bytes) -> None:
    """The first two bytes choose codec and length. What is decoded is finite, and the same as a whole and in ranges."""
    if len(data) < 2:
        return
    codec, length, encoded = CODECS[data[0] % len(CODECS)], LENGTHS[data[1] % len(LENGTHS)], data[2:]
    try:
        vector = codec.decode(encoded, length)
    except MalformedVectorError:
        try:
            codec.check(encoded, length)
        except MalformedVectorError:
            return
        raise AssertionError("decode refuses what check lets through") from None
    codec.check(encoded, length)
    assert codec.name == "fp32" or vector.isfinite().all()
    half = length // 2
    ranges = [codec.decode_range(encoded, 0, half, length), codec.decode_range(encoded, half, length, length)]
    assert torch.cat(ranges).numpy().tobytes() == vector.numpy().tobytes()


def _seeds() -> tuple[bytes, ...]:
    vectors = [
        bytes([NAMES.index(item["codec"]), LENGTHS.index(len(item["values"]))]) + bytes.fromhex(item["bytes"])
        for item in golden("compression.json")["encoded"]
        if len(item["values"]) in LENGTHS
    ]
    made = [
        bytes([number, place]) + codec.encode(torch.linspace(-1, 1, length))
        for number, codec in enumerate(CODECS)
        for place, length in enumerate(LENGTHS)
    ]
    return (*vectors, *made)


TARGETS = (Target("encoded-vector", check_encoded_vector, _seeds),)
