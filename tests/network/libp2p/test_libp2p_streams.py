from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.exceptions import BaseLibp2pError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.network import ScoreReason
from neuroshard.network.libp2p.muxer import MAX_UNACCEPTED_STREAMS, BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.peer_limits import ConnectionLimits, StreamAdmission
from neuroshard.network.libp2p.streams import (
    DATA,
    INITIAL_WINDOW,
    MAX_WINDOW,
    RST,
    SYN,
    WINDOW_UPDATE,
    FrameHeader,
    FrameParser,
    Payload,
    YamuxError,
    YamuxStream,
    header_bytes,
)
from tests.worlds.network_nodes import SlowLine, connected, run


async def opened(a: BoundedMuxer, b: BoundedMuxer) -> tuple[YamuxStream, YamuxStream]:
    stream = await a.open_stream()
    await stream.write(b"!")
    other = await b.accept_stream()
    assert await other.read(1) == b"!"
    return stream, other


async def read_all(stream: YamuxStream) -> bytes:
    data = bytearray()
    try:
        while True:
            data += await stream.read()
    except MuxedStreamEOF:
        return bytes(data)


def virtual(scenario: Callable[[], Any]) -> None:
    run(scenario, clock=MockClock(autojump_threshold=0))


def test_bytes_arrive_whole_in_both_directions_on_many_streams() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):

            async def answer() -> None:
                while True:
                    tasks.start_soon(copy, await b.accept_stream())

            async def copy(stream: Any) -> None:
                await stream.write(await read_all(stream), is_last=True)

            async def ask(number: int) -> None:
                stream, body = await a.open_stream(), bytes((number,)) * 700_001
                await stream.write(body, is_last=True)
                assert await read_all(stream) == body
                done.append(number)

            done: list[int] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer)
                async with anyio.create_task_group() as asking:
                    for number in range(12):
                        asking.start_soon(ask, number)
                tasks.cancel_scope.cancel()
            assert sorted(done) == list(range(12))
            await wait_all_tasks_blocked()
            assert not a._streams
            assert not b._streams

    virtual(scenario)


def test_whoever_does_not_read_holds_up_only_its_own_stream() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            (slow, unread), (quick, read) = await opened(a, b), await opened(a, b)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(slow.write, bytes(10 * INITIAL_WINDOW))
                await trio.sleep(600)  # no time is too long for a reader that has other work
                assert unread.unread == INITIAL_WINDOW - 1
                await quick.write(bytes(100))
                assert await read.read() == bytes(100)
                assert len(await unread.read()) > 0
                await trio.sleep(1)
                assert unread.unread >= INITIAL_WINDOW // 2  # the window opened again
                tasks.cancel_scope.cancel()

    virtual(scenario)


def test_a_window_grows_with_its_reader_and_not_beyond_its_limit() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            stream, other = await opened(a, b)
            a.round_trips = b.round_trips = SlowLine(0.1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.write, bytes(64 * 1024 * 1024))
                received = 0
                while received < 60 * 1024 * 1024:
                    received += len(await other.read())
                    assert other.unread <= MAX_WINDOW
                assert other._window == MAX_WINDOW
                tasks.cancel_scope.cancel()

    virtual(scenario)


def test_a_cancelled_writer_leaves_the_connection_whole() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            for _ in range(20):
                stream, other = await opened(a, b)
                with trio.move_on_after(0.001):
                    await stream.write(bytes(4 * INITIAL_WINDOW))
                stream.abandon()
                await other.wait_reset()
                with pytest.raises(MuxedStreamReset):
                    await other.read()
            stream, other = await opened(a, b)
            await stream.write(b"still fine", is_last=True)
            assert await read_all(other) == b"still fine"

    virtual(scenario)


def test_a_stream_nobody_heard_of_ends_without_a_word() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            (await a.open_stream()).abandon()
            stream, other = await opened(a, b)
            await stream.write(b"x", is_last=True)
            assert await read_all(other) == b"x"
            with pytest.raises(trio.TooSlowError), trio.fail_after(5):
                await b.accept_stream()

    virtual(scenario)


def test_the_end_of_a_connection_wakes_everybody() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            stream, other = await opened(a, b)
            ended: list[str] = []

            async def fails(name: str, work: Callable[[], Any]) -> None:
                with pytest.raises(BaseLibp2pError):
                    await work()
                ended.append(name)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fails, "write", lambda: stream.write(bytes(3 * INITIAL_WINDOW)))
                tasks.start_soon(fails, "read", stream.read)
                tasks.start_soon(fails, "accept", b.accept_stream)
                await wait_all_tasks_blocked()
                await b.close()
            assert sorted(ended) == ["accept", "read", "write"]
            await a.wait_closed()
            with pytest.raises(MuxedConnUnavailable):
                await a.open_stream()
            assert "code 0" in a.end_reason
            assert other.is_closed

    virtual(scenario)


def test_a_peer_that_vanished_is_noticed_and_one_that_is_silent_but_alive_is_not() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            await trio.sleep(3600)
            assert not a.is_closed
            assert a.round_trips.least is not None
            began = trio.current_time()
            b.secured_conn.is_cut = True  # the cable is out: nothing comes back
            await a.wait_closed()
            assert trio.current_time() - began < 150

    virtual(scenario)


def test_half_a_stream_is_not_kept_for_ever() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            stream, other = await opened(a, b)
            stream.end_writing()
            await trio.sleep(200)
            assert not a._streams
            with pytest.raises(BaseLibp2pError):
                await other.write(b"too late")

    virtual(scenario)


@given(st.lists(st.tuples(st.integers(1, 9), st.binary(max_size=50)), max_size=10), st.data())
def test_frames_survive_any_cutting(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(header_bytes(0, 0, number, len(body)) + body for number, body in frames)
    parser, headers, bodies, position = FrameParser(), [], [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream)))
        for event in parser.feed(stream[position : position + size]):
            (headers if isinstance(event, FrameHeader) else bodies).append(event)
        position += size
    assert [(h.stream_id, h.length) for h in headers] == [(number, len(body)) for number, body in frames]
    assert b"".join(p.data for p in bodies if isinstance(p, Payload)) == b"".join(body for _, body in frames)


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_refused(data: bytes) -> None:
    with suppress(YamuxError):
        assert sum(len(event.data) for event in FrameParser().feed(data) if isinstance(event, Payload)) <= len(data)


def test_streams_are_admitted_by_peer_and_in_all() -> None:
    admission = StreamAdmission(ConnectionLimits(streams=5, streams_of_peer=3))
    assert [admission.enter("a") for _ in range(4)] == [True, True, True, False]
    assert [admission.enter("b") for _ in range(3)] == [True, True, False]
    admission.leave("a")
    assert admission.enter("b")
    assert (admission.open_streams("a"), admission.open_streams("b"), admission.refused) == (2, 3, 2)


def test_bytes_that_come_one_by_one_take_no_more_memory_than_others() -> None:
    """One byte in each frame, among frames that are dropped: neither objects nor whole reads are kept for it."""

    async def scenario() -> None:
        async with connected() as (a, b):
            stream, other = await opened(a, b)
            data = bytes(range(256)) * 16
            dropped = header_bytes(DATA, 0, 999, 1) + b"?"
            tracemalloc.start()
            for start in range(0, len(data), 64):
                frames = [header_bytes(DATA, 0, stream.stream_id, 1) + bytes((x,)) for x in data[start : start + 64]]
                await a.secured_conn.write(b"".join(frames) + dropped * 100)
                await wait_all_tasks_blocked()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert other.unread == len(data)
            assert held < 100_000
            assert await other.read() == data

    virtual(scenario)


def test_streams_that_are_reset_before_they_are_accepted_are_bounded_and_count_as_a_flood() -> None:
    reported: list[ScoreReason] = []
    options = MuxerOptions(StreamAdmission(), report=lambda _, reason: reported.append(reason))

    async def scenario() -> None:
        async with connected(options) as (a, b):
            for start in range(1, 4001, 400):
                pairs = [
                    header_bytes(WINDOW_UPDATE, SYN, number, 0) + header_bytes(WINDOW_UPDATE, RST, number, 0)
                    for number in range(start, start + 400, 2)
                ]
                await a.secured_conn.write(b"".join(pairs))
                await wait_all_tasks_blocked()
            assert set(reported) == {ScoreReason.FLOOD}
            with trio.move_on_after(1):
                for _ in range(MAX_UNACCEPTED_STREAMS + 1):
                    await b.accept_stream()
                raise AssertionError("more streams wait than may")
            stream, other = await opened(a, b)
            await stream.write(b"still here", is_last=True)
            assert await read_all(other) == b"still here"

    virtual(scenario)
