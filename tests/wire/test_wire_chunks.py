"""Bodies that come in any order, in part, twice or damaged."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.messages import (
    CHUNK_BYTES,
    ChunkAssembly,
    DamagedChunkError,
    EncodedFrame,
    FrameDecoder,
    FrameHead,
    MalformedFrameError,
    encode,
)
from tests.worlds.claims import bytes_frame, large_limits

SIZE = 3 * CHUNK_BYTES + 100
FRAME = bytes_frame(SIZE)
SENT: EncodedFrame = encode(FRAME)
CHUNKS = [b"".join(chunk) for chunk in SENT.chunks]


def head_of(sent: EncodedFrame) -> FrameHead:
    decoder = FrameDecoder(large_limits)
    decoder.feed(sent.head)
    assert decoder.head is not None
    return decoder.head


HEAD = head_of(SENT)


@settings(max_examples=20)
@given(st.permutations(range(len(CHUNKS))), st.data())
def test_chunks_come_in_any_order_and_either_way(order: list[int], data: st.DataObject) -> None:
    assembly = ChunkAssembly(HEAD)
    for i in order:
        assert not assembly.is_complete
        if data.draw(st.booleans()):
            assert assembly.accept(i, CHUNKS[i])
        else:
            with assembly.receiving(i) as view:
                view[:] = CHUNKS[i]
    assert assembly.is_complete
    assert assembly.missing() == ()
    assert assembly.frame() == FRAME


def test_a_frame_is_not_given_while_chunks_are_missing() -> None:
    assembly = ChunkAssembly(HEAD)
    assembly.accept(2, CHUNKS[2])
    assert assembly.missing() == (0, 1, 3)
    with pytest.raises(MalformedFrameError, match="misses 3 of 4"):
        assembly.frame()


def test_a_damaged_chunk_stays_missing_and_may_come_again() -> None:
    assembly = ChunkAssembly(HEAD)
    damaged = b"\xff" + CHUNKS[1][1:]
    with pytest.raises(DamagedChunkError, match="Chunk 1 "):
        assembly.accept(1, damaged)
    with pytest.raises(DamagedChunkError, match="Chunk 1 "), assembly.receiving(1) as view:
        view[:] = damaged
    with pytest.raises(DamagedChunkError, match="Chunk 0 "):
        assembly.accept(0, CHUNKS[1])
    assert assembly.missing() == (0, 1, 2, 3)
    assert assembly.accept(1, CHUNKS[1])
    assert assembly.missing() == (0, 2, 3)


def test_a_chunk_of_another_length_is_refused() -> None:
    assembly = ChunkAssembly(HEAD)
    for index, data in ((0, CHUNKS[0][:-1]), (0, CHUNKS[0] + b"a"), (3, CHUNKS[3] + b"a"), (3, b"")):
        with pytest.raises(MalformedFrameError, match="it needs"):
            assembly.accept(index, data)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            assembly.accept(index, CHUNKS[0])
        with pytest.raises(IndexError), assembly.receiving(index):
            pass


def test_a_chunk_that_is_here_is_not_touched_again() -> None:
    assembly = ChunkAssembly(HEAD)
    for index, data in enumerate(CHUNKS):
        assembly.accept(index, data)
    assert not assembly.accept(0, bytes(CHUNK_BYTES))
    with pytest.raises(ValueError, match="is here"), assembly.receiving(0):
        pass
    assert assembly.frame() == FRAME


def test_only_one_sender_writes_a_chunk_at_a_time() -> None:
    assembly = ChunkAssembly(HEAD)
    with assembly.receiving(0) as view:
        assert not assembly.accept(0, CHUNKS[0])
        with pytest.raises(ValueError, match="being received"), assembly.receiving(0):
            pass
        assert assembly.accept(1, CHUNKS[1])
        view[:] = CHUNKS[0]
    with pytest.raises(ValueError, match="released"):
        view[0] = 1  # what was verified cannot be written through the old view
    assert assembly.missing() == (2, 3)


def test_a_chunk_whose_sender_went_away_may_come_from_another() -> None:
    assembly = ChunkAssembly(HEAD)

    def cut_off() -> None:
        with assembly.receiving(0) as view:
            view[:10] = CHUNKS[0][:10]
            raise ConnectionError

    with pytest.raises(ConnectionError):
        cut_off()
    assert assembly.missing() == (0, 1, 2, 3)
    assert assembly.accept(0, CHUNKS[0])


@pytest.mark.parametrize("taken", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17, SIZE])
def test_a_transfer_that_broke_goes_on_with_the_chunks_that_are_missing(taken: int) -> None:
    decoder = FrameDecoder(large_limits)
    decoder.feed(SENT.head)
    decoder.feed(b"".join(SENT.body)[:taken])
    body = decoder.take_body()
    first_missing = 4 if taken == SIZE else taken // CHUNK_BYTES
    assert body.missing() == tuple(range(first_missing, 4))
    for index in body.missing():
        body.accept(index, CHUNKS[index])
    assert body.frame() == FRAME


def test_a_decoder_that_gave_its_body_away_reads_nothing_more() -> None:
    decoder = FrameDecoder(large_limits)
    with pytest.raises(ValueError, match="not known yet"):
        decoder.take_body()
    decoder.feed(SENT.head)
    body = decoder.take_body()
    with pytest.raises(MalformedFrameError):
        decoder.feed(CHUNKS[0])
    assert body.missing() == (0, 1, 2, 3)


def test_frames_with_equal_digests_are_equal() -> None:
    """A transfer is resumed under its digest: any change of kind, header or body changes it."""
    same, others = encode(bytes_frame(SIZE)), [bytes_frame(SIZE - 1), bytes_frame(SIZE, "other")]
    assert head_of(same).digest == HEAD.digest
    assert all(head_of(encode(other)).digest != HEAD.digest for other in others)


def test_the_parts_outlive_the_assembly() -> None:
    assembly = ChunkAssembly(HEAD)
    for index, data in enumerate(CHUNKS):
        assembly.accept(index, data)
    frame = assembly.frame()
    del assembly
    gc.collect()
    assert bytes(frame.tensors[0].data) == FRAME.tensors[0].data
