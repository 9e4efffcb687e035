"""Peers that lie about lengths, digests and shapes. Nothing is allocated by a claimed size before the lie is told."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from time import process_time

import msgspec
import pytest
from psutil import Process

from neuroshard.messages import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    DamagedChunkError,
    Frame,
    FrameDecoder,
    FrameLimits,
    FrameTooLargeError,
    MalformedFrameError,
    TensorPart,
    TensorSpec,
    UnexpectedTensorError,
    WireError,
    as_received,
    decode,
    encode,
)
from tests.worlds.claims import bytes_frame, forged_head, large_limits

MIB = 1024 * 1024
GIB = 1024 * MIB


def peak_bytes(call: Callable[[], object], expected: type[WireError], says: str) -> int:
    """Most memory in use while `call` fails as expected."""
    tracemalloc.start()
    try:
        with pytest.raises(expected, match=says):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "limits", "error", "says", "most"),
    [
        pytest.param(
            forged_head(header_bytes=GIB), FrameLimits(), FrameTooLargeError, "header", 100_000, id="header of 1 GiB"
        ),
        pytest.param(
            forged_head(header_bytes=MAX_HEADER_BYTES + 1),
            FrameLimits(max_header_bytes=GIB),
            FrameTooLargeError,
            "header",
            100_000,
            id="no kind may have more than 64 KiB of header",
        ),
        pytest.param(
            forged_head([["x", "uint8", [64 * MIB + 1]]], body_bytes=64 * MIB + 1),
            FrameLimits(max_body_bytes=64 * MIB),
            FrameTooLargeError,
            "of tensors",
            100_000,
            id="body of one byte too many",
        ),
        pytest.param(
            forged_head([["x", "uint8", [2**63 - 1]]], body_bytes=2**63 - 1),
            FrameLimits(max_body_bytes=64 * MIB),
            FrameTooLargeError,
            "of tensors",
            100_000,
            id="body of 8 EiB",
        ),
        pytest.param(
            forged_head([["x", "uint8", [63 * MIB]]], body_bytes=64 * MIB),
            FrameLimits(max_body_bytes=64 * MIB),
            MalformedFrameError,
            "in a body of",
            100_000,
            id="allowed body, but the shape says otherwise",
        ),
        pytest.param(
            forged_head([["x", "uint8", [64 * MIB]]], body_bytes=64 * MIB),
            FrameLimits.exactly(TensorSpec("x", "int8", (64 * MIB,))),
            UnexpectedTensorError,
            "expected",
            100_000,
            id="allowed body, but of another type",
        ),
    ],
)
def test_a_lie_is_told_before_its_memory_is_allocated(
    data: bytes, limits: FrameLimits, error: type[WireError], says: str, most: int
) -> None:
    assert peak_bytes(lambda: decode(data + bytes(1000), lambda _kind: limits), error, says) < most


def test_the_body_is_allocated_by_the_first_call_after_the_head() -> None:
    """Between the two the receiver can reserve the memory, or turn the frame down."""
    head = encode(bytes_frame(32 * MIB)).head
    decoder = FrameDecoder(large_limits)
    tracemalloc.start()
    try:
        assert decoder.feed(head) == len(head)
        assert decoder.head is not None
        before = tracemalloc.get_traced_memory()[0]
        decoder.receive_buffer()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert before < 200_000
    assert 32 * MIB <= after < 33 * MIB


def test_a_peer_that_announces_much_and_sends_nothing_holds_no_real_memory() -> None:
    size = 512 * MIB
    head = forged_head([["x", "uint8", [size]]], body_bytes=size)
    decoder = FrameDecoder(lambda _kind: FrameLimits(max_body_bytes=size))
    before = Process().memory_info().rss
    decoder.feed(head)
    decoder.feed(b"a")
    assert Process().memory_info().rss - before < 16 * MIB


@pytest.mark.parametrize(
    "expected",
    [
        (TensorSpec("y", "float32", (2, 3)),),
        (TensorSpec("x", "int32", (2, 3)),),
        (TensorSpec("x", "float32", (3, 2)),),
        (TensorSpec("x", "float32", (2, 3)), TensorSpec("y", "uint8", (0,))),
        (),
    ],
    ids=["name", "type", "shape", "missing", "none"],
)
def test_other_tensors_than_expected_are_refused(expected: tuple[TensorSpec, ...]) -> None:
    frame = Frame("k", {}, (TensorPart(TensorSpec("x", "float32", (2, 3)), bytes(24)),))
    encoded = encode(frame)
    limits = FrameLimits(max_body_bytes=100, expected=expected)
    with pytest.raises(UnexpectedTensorError):
        decode(encoded.head + bytes(24), lambda _kind: limits)
    with pytest.raises(UnexpectedTensorError):
        as_received(frame, limits)


def test_every_flipped_bit_is_noticed() -> None:
    """The head digest covers all before it, the chunk digests the body: no bit can change and pass."""
    frame = Frame(
        "a/kind",
        {"step": 7, "note": "as it was"},
        (
            TensorPart(TensorSpec("x", "int16", (2, 2)), bytes(range(8))),
            TensorPart(TensorSpec("y", "uint8", (3,)), b"abc"),
        ),
    )
    encoded = encode(frame)
    sent = bytearray(encoded.head + b"".join(encoded.body))
    for bit in range(len(sent) * 8):
        sent[bit // 8] ^= 1 << bit % 8
        expected = DamagedChunkError if bit // 8 >= len(encoded.head) else (MalformedFrameError, FrameTooLargeError)
        with pytest.raises(expected):
            decode(sent, large_limits)
        sent[bit // 8] ^= 1 << bit % 8
    assert decode(sent, large_limits) == frame


def test_a_damaged_chunk_is_named_as_soon_as_it_is_whole() -> None:
    encoded = encode(bytes_frame(3 * CHUNK_BYTES))
    body = bytearray(b"".join(encoded.body))
    body[CHUNK_BYTES + 5] ^= 1
    decoder = FrameDecoder(large_limits)
    decoder.feed(encoded.head)
    assert decoder.feed(body[: 2 * CHUNK_BYTES - 1]) == 2 * CHUNK_BYTES - 1
    with pytest.raises(DamagedChunkError, match="Chunk 1 ") as caught:
        decoder.feed(body[2 * CHUNK_BYTES - 1 :])
    assert caught.value.index == 1
    assert not decoder.is_complete
    assert decoder.take_body().missing() == (1, 2)


def test_what_the_limits_raise_for_an_unknown_kind_is_raised() -> None:
    class UnknownKindError(Exception):
        pass

    def limits_of(kind: str) -> FrameLimits:
        raise UnknownKindError(kind)

    decoder = FrameDecoder(limits_of)
    data = encode(bytes_frame(10, "what/is/this")).head
    with pytest.raises(UnknownKindError, match="what/is/this"):
        decoder.feed(data[: PREFIX_BYTES + len("what/is/this")])
    with pytest.raises(MalformedFrameError, match="refused already"):
        decoder.feed(data)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(""),
        Frame("k" * 65),
        Frame("white space"),
        Frame("ünicode"),
        Frame("k", {}, (TensorPart(TensorSpec("x", "float32", (2,)), bytes(7)),)),
        Frame("k", {}, (TensorPart(TensorSpec("x", "uint8", (2,)), memoryview(bytes(4))[::2]),)),
        Frame("k", {}, (TensorPart(TensorSpec("x", "uint8", (1,)), b"a"),) * 2),
    ],
    ids=["no kind", "long kind", "space", "not ASCII", "too short", "in pieces", "named twice"],
)
def test_what_nobody_would_read_is_not_sent(frame: Frame) -> None:
    with pytest.raises(MalformedFrameError):
        encode(frame)


def test_a_header_that_is_too_long_is_not_sent() -> None:
    room = MAX_HEADER_BYTES - len(msgspec.msgpack.encode({"h": {"a": "x" * 256}, "t": []})) + 256
    longest = Frame("k", {"a": "x" * room})
    assert decode(encode(longest).head, lambda _kind: FrameLimits()) == longest
    with pytest.raises(FrameTooLargeError):
        encode(Frame("k", {"a": "x" * (room + 1)}))


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        ("float32", (-1,), "negative"),
        ("float32", (-1, -4), "negative"),
        ("float32", (1,) * 9, "9 dimensions"),
        ("uint8", (2**63,), "larger"),
        ("int64", (2**60,), "larger"),
        ("uint8", (2**32,) * 8, "larger"),
        ("uint8", (0, 2**63), "larger"),
        ("object", (1,), "not allowed"),
        ("float64", (1,), "not allowed"),
    ],
)
def test_absurd_tensors_cannot_be_described(dtype: object, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(MalformedFrameError, match=says):
        TensorSpec("x", dtype, shape)  # type: ignore[arg-type]


def test_the_largest_shapes_are_counted_right() -> None:
    assert TensorSpec("x", "uint8", (2**63 - 1,)).byte_count == 2**63 - 1
    assert TensorSpec("x", "float32", (2,) * 8).byte_count == 1024
    assert TensorSpec("x", "float32", ()).byte_count == 4
    assert TensorSpec("x", "float32", (0, 2**60)).byte_count == 0


def test_one_byte_at_a_time_takes_time_in_proportion() -> None:
    """Sixteen times the bytes may take sixteen times as long, never 256 times; heads and bodies alike."""

    def seconds(data: bytes) -> float:
        def once() -> float:
            decoder, start = FrameDecoder(large_limits), process_time()
            for i in range(len(data)):
                decoder.feed(data[i : i + 1])
            assert decoder.is_complete
            return process_time() - start

        return min(once() for _ in range(3))

    def head_of(size: int) -> bytes:
        return encode(Frame("k", {"a": "x" * size})).head

    def body_of(size: int) -> bytes:
        encoded = encode(bytes_frame(size))
        return encoded.head + b"".join(encoded.body)

    assert seconds(head_of(60_000)) < 4 * 16 * seconds(head_of(3_750))
    assert seconds(body_of(320_000)) < 4 * 16 * seconds(body_of(20_000))
