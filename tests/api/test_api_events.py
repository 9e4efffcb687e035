"""Event streams: one serialisation for all, bounded queues, missed lines, limits, and an end at shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import anyio
import httpx
import pytest

from neuroshard.api.context import ApiLimits
from neuroshard.api.events import MOST_WAITING_LINES, Broadcaster, Subscriber
from neuroshard.api.rendering import RenderedViews
from neuroshard.api.server import ApiServer, bind
from neuroshard.errors import NotReadyError
from tests.worlds.api import Api, FakeNode, events_of, make_api

FAST = ApiLimits(events_per_second=100)


def test_a_slow_client_keeps_a_bounded_number_of_lines() -> None:
    async def read_late() -> list[bytes]:
        subscriber = Subscriber(heartbeat_seconds=10)
        for number in range(10 * MOST_WAITING_LINES):
            subscriber.offer_line(b"event: log\ndata: %d\n\n" % number)
            subscriber.offer_status(b"event: status\ndata: %d\n\n" % number)
        chunks = subscriber.chunks()
        await anext(chunks)
        waiting = await anext(chunks)
        await chunks.aclose()
        return waiting.split(b"\n\n")[:-1]

    *lines, status = anyio.run(read_late)
    assert lines == [
        b"event: log\ndata: %d" % number for number in range(9 * MOST_WAITING_LINES, 10 * MOST_WAITING_LINES)
    ]
    assert status == b"event: status\ndata: %d" % (10 * MOST_WAITING_LINES - 1)


def test_a_quiet_stream_has_a_heartbeat() -> None:
    async def listen() -> bytes:
        subscriber = Subscriber(heartbeat_seconds=0.01)
        chunks = subscriber.chunks()
        await anext(chunks)
        beat = await anext(chunks)
        subscriber.close()
        assert [chunk async for chunk in chunks] == []
        return beat

    assert anyio.run(listen).startswith(b":")


def test_the_number_of_streams_is_limited(node: FakeNode) -> None:
    async def fill() -> None:
        api = make_api(node, limits=ApiLimits(event_streams=3))
        broadcaster = Broadcaster(api.context, RenderedViews(node.board))
        open_streams = [broadcaster.subscribe(None) for _ in range(3)]
        with pytest.raises(NotReadyError, match="3 event streams"):
            broadcaster.subscribe(None)
        broadcaster.unsubscribe(open_streams[0])
        broadcaster.subscribe(None)
        broadcaster.close()
        assert broadcaster.stream_count == 0
        with pytest.raises(NotReadyError):
            broadcaster.subscribe(None)

    anyio.run(fill)


def test_streams_over_the_limit_get_503(serve: Callable[..., Api]) -> None:
    api = serve(ApiLimits(event_streams=1))
    with (
        httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client,
        client.stream("GET", "/api/events") as first,
    ):
        assert first.status_code == 200
        assert client.get("/api/events").status_code == 503


def test_a_stream_tells_what_happens(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(FAST)
    with (
        httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client,
        client.stream("GET", "/api/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response)
        name, data = next(events)
        assert (name, data["training"]["steps"]) == ("status", 20)
        node.train(2)
        name, data = next(events)
        assert (name, data["training"]["steps"]) == ("status", 22)
        api.context.log_ring.append(1.0, "INFO", "test", "hello")
        assert next(events)[1] == {"sequence": 1, "time": 1.0, "level": "INFO", "logger": "test", "message": "hello"}


@pytest.mark.parametrize("by_header", [False, True])
def test_missed_log_lines_come_again(serve: Callable[..., Api], by_header: bool) -> None:
    api = serve(FAST)
    for number in range(1, 6):
        api.context.log_ring.append(1.0, "INFO", "test", f"line {number}")
    headers = {"Last-Event-ID": "3"} if by_header else {}
    path = "/api/events" if by_header else "/api/events?after=3"
    with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client:
        with client.stream("GET", path, headers=headers) as response:
            events = events_of(response)
            seen = [next(events) for _ in range(3)]
        assert [name for name, _ in seen] == ["log", "log", "status"]
        assert [data["message"] for name, data in seen if name == "log"] == ["line 4", "line 5"]


def test_twenty_dashboards_cost_one_serialisation(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(FAST)
    views: RenderedViews = api.app.state.views
    with ExitStack() as stack:
        streams = []
        for _ in range(20):
            client = stack.enter_context(httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60))
            streams.append(events_of(stack.enter_context(client.stream("GET", "/api/events"))))
            assert next(streams[-1])[0] == "status"
        assert views.rendered == 1
        for round_number in range(1, 6):
            node.train()
            for stream in streams:
                assert next(stream)[0] == "status"
            asker = stack.enter_context(httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60))
            for _ in range(4):
                assert asker.get("/api/status").json()["training"]["steps"] == 20 + round_number
            assert views.rendered == 1 + round_number


def test_a_dashboard_that_opens_takes_no_status_from_the_others(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(ApiLimits(events_per_second=5))
    with (
        httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as first,
        first.stream("GET", "/api/events") as one,
    ):
        events = events_of(one)
        next(events)
        node.train()
        with (
            httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as second,
            second.stream("GET", "/api/events") as other,
        ):
            assert next(events_of(other))[1]["training"]["steps"] == 21
            assert next(events)[1]["training"]["steps"] == 21


def test_a_status_without_a_change_is_not_sent_again(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(FAST)
    with (
        httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client,
        client.stream("GET", "/api/events") as response,
    ):
        events = events_of(response)
        next(events)
        for _ in range(5):
            node.board.publish(replace(node.board.current()))
            time.sleep(0.02)
        api.context.log_ring.append(1.0, "INFO", "test", "the only event")
        assert next(events)[0] == "log"


def test_a_closed_stream_is_forgotten(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(FAST)
    broadcaster: Broadcaster = api.app.state.broadcaster
    with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client:
        with client.stream("GET", "/api/events") as response:
            events = events_of(response)  # kept: a generator that is thrown away closes the response
            assert next(events)[0] == "status"
            assert broadcaster.stream_count == 1
        deadline = time.monotonic() + 5
        while broadcaster.stream_count and time.monotonic() < deadline:
            client.get("/health")
    assert broadcaster.stream_count == 0


def test_a_stop_ends_open_streams_within_two_seconds(node: FakeNode) -> None:
    listener = bind("127.0.0.1", 0)
    api = make_api(node, port=listener.getsockname()[1])
    server = ApiServer(api.app, listener)
    server.start()
    with ExitStack() as stack:
        streams = []
        for _ in range(5):
            client = stack.enter_context(httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60))
            streams.append(events_of(stack.enter_context(client.stream("GET", "/api/events"))))
            next(streams[-1])
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 20
        assert not server.is_alive()
        assert [list(stream) for stream in streams] == [[]] * 5
