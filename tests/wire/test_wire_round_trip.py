"""What goes in comes out, however the bytes are cut on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.messages import (
    CHUNK_BYTES,
    Frame,
    FrameDecoder,
    FrameLimits,
    MalformedFrameError,
    TensorPart,
    TensorSpec,
    WireError,
    WireValue,
    as_received,
    decode,
    encode,
)
from neuroshard.messages.frame import ITEM_BYTES
from tests.worlds.claims import bytes_frame, large_limits, pattern

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8)
headers = st.dictionaries(st.text(max_size=8), scalars | st.lists(scalars, max_size=4), max_size=6)
kinds = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)


@st.composite
def parts(draw: st.DrawFn, name: str) -> TensorPart:
    spec = TensorSpec(
        name, draw(st.sampled_from(sorted(ITEM_BYTES))), tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    )
    return TensorPart(spec, draw(st.randoms(use_true_random=False)).randbytes(spec.byte_count))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    names = draw(st.lists(st.text(max_size=6), max_size=4, unique=True))
    tensors = tuple(draw(parts(name)) for name in names)
    return Frame(draw(kinds), cast("dict[str, WireValue]", draw(headers)), tensors)


def wire_bytes(frame: Frame) -> bytes:
    encoded = encode(frame)
    return encoded.head + b"".join(encoded.body)


@given(frames(), st.data())
def test_a_frame_survives_any_split_of_its_bytes(frame: Frame, data: st.DataObject) -> None:
    sent = wire_bytes(frame)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    decoder = FrameDecoder(large_limits)
    for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        piece = sent[start:stop]
        while piece:
            used = decoder.feed(piece)
            assert used > 0
            piece = piece[used:]
    assert decoder.is_complete
    assert decoder.frame() == frame


@given(frames(), st.data())
def test_a_frame_survives_being_received_into_the_decoder(frame: Frame, data: st.DataObject) -> None:
    sent, position = wire_bytes(frame), 0
    decoder = FrameDecoder(large_limits)
    while not decoder.is_complete:
        view = decoder.receive_buffer()
        count = data.draw(st.integers(1, len(view)))
        view[:count] = sent[position : position + count]
        decoder.commit(count)
        position += count
    assert position == len(sent)
    assert decoder.frame() == frame


@given(frames(), st.data())
def test_a_frame_that_ends_early_is_told_as_such(frame: Frame, data: st.DataObject) -> None:
    sent = wire_bytes(frame)
    with pytest.raises(MalformedFrameError, match="ends after"):
        decode(sent[: data.draw(st.integers(0, len(sent) - 1))], large_limits)


@given(frames())
def test_limits_in_memory_agree_with_limits_on_the_wire(frame: Frame) -> None:
    specs = tuple(part.spec for part in frame.tensors)
    for limits in (FrameLimits(), FrameLimits(max_body_bytes=40), FrameLimits(10), FrameLimits.exactly(*specs)):
        assert failure_of(lambda limits=limits: as_received(frame, limits)) == failure_of(
            lambda limits=limits: decode(wire_bytes(frame), lambda _kind: limits)
        )


def failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except WireError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_bodies_around_the_borders_of_chunks(size: int) -> None:
    frame = bytes_frame(size)
    encoded = encode(frame)
    assert [sum(map(len, chunk)) for chunk in encoded.chunks] == [
        min(CHUNK_BYTES, size - start) for start in range(0, size, CHUNK_BYTES)
    ]
    assert b"".join(b"".join(chunk) for chunk in encoded.chunks) == b"".join(encoded.body)
    assert decode(wire_bytes(frame), large_limits) == frame


def test_the_body_is_not_copied_by_the_encoder() -> None:
    data = bytearray(pattern(100))
    encoded = encode(Frame("k", {}, (TensorPart(TensorSpec("x", "uint8", (100,)), memoryview(data)),)))
    data[7] ^= 0xFF
    assert b"".join(encoded.body) == data
    assert all(view.readonly for view in encoded.body)


@given(frames(), st.data())
def test_a_tensor_in_several_places_arrives_in_one(frame: Frame, data: st.DataObject) -> None:
    scattered = list[TensorPart]()
    for part in frame.tensors:
        whole = bytes(part.data)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
        first, *more = (whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True))
        scattered.append(TensorPart(part.spec, first, tuple(more)))
    sent = Frame(frame.kind, frame.message, tuple(scattered))
    assert wire_bytes(sent) == wire_bytes(frame)
    assert decode(wire_bytes(sent), large_limits) == as_received(sent, large_limits("")) == frame


def test_frames_follow_each_other_on_one_stream() -> None:
    sent = b"".join(wire_bytes(bytes_frame(size, f"kind/{size}")) for size in (0, 10, CHUNK_BYTES + 1))
    received: list[Frame] = []
    while sent:
        decoder = FrameDecoder(large_limits)
        while not decoder.is_complete:
            sent = sent[decoder.feed(sent) :]
        assert decoder.feed(sent) == 0
        received.append(decoder.frame())
    assert received == [bytes_frame(size, f"kind/{size}") for size in (0, 10, CHUNK_BYTES + 1)]


def test_the_head_is_known_before_the_body_is_taken() -> None:
    encoded = encode(bytes_frame(CHUNK_BYTES + 1))
    sent = encoded.head + b"".join(encoded.body)
    decoder = FrameDecoder(large_limits)
    assert decoder.feed(encoded.head[:-1]) == len(encoded.head) - 1
    assert decoder.head is None
    assert decoder.feed(sent[len(encoded.head) - 1 :]) == 1
    assert decoder.head is not None
    assert (decoder.head.kind, decoder.head.message, decoder.head.body_bytes) == ("bulk", {"step": 1}, CHUNK_BYTES + 1)
    assert [spec.name for spec in decoder.head.specs] == ["x"]
    assert (decoder.head.chunk_bytes(0), decoder.head.chunk_bytes(1)) == (CHUNK_BYTES, 1)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            decoder.head.chunk_bytes(index)


def test_a_complete_decoder_has_no_place_for_more() -> None:
    decoder = FrameDecoder(large_limits)
    sent = wire_bytes(bytes_frame(0))
    assert decoder.feed(sent + b"next") == len(sent)
    assert decoder.feed(b"next") == 0
    with pytest.raises(ValueError, match="complete"):
        decoder.receive_buffer()


def test_more_bytes_than_the_buffer_holds_cannot_be_committed() -> None:
    decoder = FrameDecoder(large_limits)
    for count in (-1, len(decoder.receive_buffer()) + 1):
        with pytest.raises(ValueError, match="do not fit"):
            decoder.commit(count)
