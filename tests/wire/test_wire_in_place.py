"""Frames that are read where their bytes lie."""

from __future__ import annotations

import pytest
from wire_samples import large_limits, pattern

from neuroshard.wire import (
    CHUNK_BYTES,
    DamagedChunkError,
    Frame,
    FrameLimits,
    FrameTooLargeError,
    MalformedFrameError,
    TensorPart,
    TensorSpec,
    decode_where_it_lies,
    encode,
)

SIZES = (CHUNK_BYTES - 7, 0, 5, CHUNK_BYTES + 3)
FRAME = Frame(
    "bulk",
    {"step": 1},
    tuple(TensorPart(TensorSpec(f"x{i}", "uint8", (size,)), pattern(size)) for i, size in enumerate(SIZES)),
)


def pieces() -> list[memoryview]:
    """The head, and the memory of every tensor that has any."""
    sent = encode(FRAME)
    return [memoryview(bytearray(sent.head)), *(memoryview(bytearray(view)) for view in sent.body)]


def test_a_frame_is_read_without_copying_it() -> None:
    lying = pieces()
    frame = decode_where_it_lies(lying, large_limits)
    assert frame == FRAME
    lying[1][0] ^= 1
    assert frame != FRAME


def test_what_is_cut_elsewhere_is_left_to_others() -> None:
    head, first, *rest = pieces()
    assert decode_where_it_lies([head, first[:9], first[9:], *rest], large_limits) is None
    assert decode_where_it_lies([head, first], large_limits) is None
    assert decode_where_it_lies([head, first, *rest, first], large_limits) is None
    assert decode_where_it_lies([head[:-1], head[-1:], first, *rest], large_limits) is None
    assert decode_where_it_lies([head[:3], head[3:], first, *rest], large_limits) is None


def test_every_damage_is_seen() -> None:
    for place, error in ((0, MalformedFrameError), (1, DamagedChunkError), (2, DamagedChunkError)):
        lying = pieces()
        lying[place][-1] ^= 1
        with pytest.raises(error):
            decode_where_it_lies(lying, large_limits)


def test_the_limits_hold() -> None:
    with pytest.raises(FrameTooLargeError):
        decode_where_it_lies(pieces(), lambda _kind: FrameLimits(max_body_bytes=CHUNK_BYTES))
    with pytest.raises(MalformedFrameError):
        decode_where_it_lies([memoryview(bytes(100))], large_limits)
