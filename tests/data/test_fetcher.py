"""The data client against a hostile server: it ends with the right bytes or says in words why it waits."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.fetcher import Fetcher
from neuroshard.data.http_source import HttpSource
from neuroshard.data.source import FolderSource, open_source
from neuroshard.data.transfer import (
    FileDamagedError,
    FileMissingError,
    FileRequest,
    MemorySink,
    RetryPolicy,
    retry_delay,
)
from neuroshard.errors import DataError, DataUnavailableError, DiskFullError, UsageError
from tests.worlds import file_servers as hostile
from tests.worlds.data_sets import FAST, make_fetcher
from tests.worlds.file_servers import Behaviour, HostileServer

T = TypeVar("T")
FILE = Random(0).randbytes(300_000)
OTHER = Random(1).randbytes(300_000)
RIGHT = FileRequest("f", len(FILE), len(FILE) + 1000, hashlib.sha256(FILE).hexdigest(), give_up_after=5)


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        with anyio.fail_after(20):
            return await work()

    return anyio.run(bounded, backend="trio")


def fetch(server: HostileServer, request: FileRequest = RIGHT, fetcher: Fetcher | None = None) -> bytes:
    used = fetcher or make_fetcher(server.url)

    async def work() -> bytes:
        try:
            return await used.fetch_bytes(request, bytes)
        finally:
            await used.source.aclose()

    return run(work)


def test_an_honest_server_is_asked_once() -> None:
    with HostileServer({"f": FILE}) as server:
        assert fetch(server) == FILE
        assert server.requests == [("f", None)]


def test_connection_dropped_at_every_64_kib_resumes_by_range() -> None:
    with HostileServer({"f": FILE}) as server:
        server.default = hostile.drops_after(65_536)
        assert fetch(server) == FILE
        assert server.asked_for("f") == [None, *(f"bytes={65_536 * i}-" for i in range(1, 5))]


@pytest.mark.parametrize(
    "trouble",
    [
        [hostile.answers(500)] * 3,
        [hostile.answers(503, Retry_After=0)],
        [hostile.answers(429)],
        [hostile.answers(404)] * 2,  # it heals
        [hostile.answers(403)],
        [hostile.answers(302, Location="http://example.invalid/f")],
        [hostile.answers(302, Location="/f")] * 2,  # followed
        [hostile.answers(301, Location="file:///etc/passwd")],
        [hostile.claims_length(len(FILE) * 2)],
        [hostile.claims_length(10)],
        [hostile.claims_length(len(FILE) + 7)],  # allowed by the limits, but the rest never comes
        [hostile.never_ends],
        [hostile.compresses],
        [hostile.chunks_and_drops],
        [hostile.sends_wrong_part],
        [hostile.drops_after(100_000), hostile.ignores_range],
        [hostile.drops_after(100_000), hostile.sends_wrong_part],
        [hostile.drops_after(100_000), hostile.answers(416)],
        [hostile.drops_after(100_000), hostile.serves(OTHER)],  # another ETag in the middle
        [hostile.drops_with_validator("ETag", '"\u00e9"')],  # cannot be sent back
        [hostile.drops_with_validator("Last-Modified", "\u00e9" * 5000)],
        [hostile.answers(302, Location="http://xn--a/")],  # no domain can have this name
        [hostile.answers(302, Location="//xn--zzzzzzzzzzzzz9999999999/")],
        [hostile.drops_after(0)] * 3,
        [hostile.serves(OTHER)],  # wrong digest
        [hostile.serves(FILE[:-1])],
        [hostile.serves(b"")],
        [hostile.serves(FILE + b"x")],
    ],
)
def test_every_trouble_that_ends_is_survived(trouble: list[Behaviour]) -> None:
    with HostileServer({"f": FILE}) as server:
        server.behaviours["f"] = list(trouble)
        assert fetch(server) == FILE


def test_a_transfer_without_length_resumes_too() -> None:
    with HostileServer({"f": FILE}) as server:
        server.behaviours["f"] = [hostile.chunks_and_drops]
        assert fetch(server) == FILE
        assert server.asked_for("f") == [None, "bytes=50000-"]


def test_a_stalled_server_is_left_and_the_rest_comes_by_range() -> None:
    with HostileServer({"f": FILE}) as server:
        server.behaviours["f"] = [server.stalls_after(200_000)]
        assert fetch(server) == FILE
        first, second = server.asked_for("f")
        assert first is None
        assert second is not None
        assert int(second.removeprefix("bytes=").rstrip("-")) > 100_000


def test_a_server_that_restarts_and_breaks_at_the_same_byte_is_not_hammered() -> None:
    """Reaching the same place again is no progress: the waiting time grows."""
    with HostileServer({"f": FILE}) as server:
        server.default = hostile.claims_length(len(FILE))
        server.files["f"] = FILE[:100_000]  # breaks off, and has no validator to resume with
        fetcher = make_fetcher(server.url, RetryPolicy(0.05, 60.0, 5.0, 1024))

        async def work() -> None:
            with anyio.move_on_after(1.5):
                await fetcher.fetch_bytes(RIGHT, bytes)
            await fetcher.source.aclose()

        run(work)
        assert 3 <= len(server.requests) <= 8


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        (hostile.answers(404), FileMissingError, "has no f"),
        (hostile.serves(OTHER), FileDamagedError, "digest"),
        (hostile.serves(FILE * 2), FileDamagedError, "would have 600000 bytes"),
        (hostile.never_ends, FileDamagedError, "longer"),
        (hostile.compresses, FileDamagedError, "compressed"),
    ],
)
def test_what_stays_wrong_is_refused_in_words(behaviour: Behaviour, kind: type[DataError], words: str) -> None:
    with HostileServer({"f": FILE}) as server:
        server.default = behaviour
        fetcher = make_fetcher(server.url)
        with pytest.raises(kind, match=words):
            fetch(server, fetcher=fetcher)
        assert len(server.requests) == 5
        assert fetcher.refused_files == (0 if kind is FileMissingError else 5)
        assert fetcher.active() == ()


def test_waiting_is_visible_and_ends_by_itself_when_the_source_returns() -> None:
    with HostileServer({"f": FILE}) as server:
        server.default = hostile.answers(500)
        clock = [1000.0]
        fetcher = Fetcher(open_source(server.url), rng=Random(1), policy=FAST, wall_clock=lambda: clock[0])

        async def work() -> bytes:
            result: list[bytes] = []

            async def get() -> None:
                result.append(await fetcher.fetch_bytes(RIGHT, bytes))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(get)
                while not [status for status in fetcher.active() if status.attempt >= 7 and status.retry_at]:
                    await anyio.sleep(0.001)
                status = fetcher.active()[0]
                assert status.name == "f"
                assert status.error == "127.0.0.1 answers HTTP 500 for f."
                assert status.retry_at is not None
                assert 1000 < status.retry_at <= 1000 + FAST.longest_seconds
                clock[0] = -1e9  # the clock of the computer jumps by decades
                server.default = hostile.honest
            await fetcher.source.aclose()
            return result[0]

        assert run(work) == FILE


def test_nobody_listening_is_said_in_words() -> None:
    with HostileServer() as server:
        url = server.url
    fetcher = make_fetcher(url)

    async def work() -> str:
        seen: list[str] = []

        async def watch() -> None:
            while not seen:
                seen.extend(status.error for status in fetcher.active() if status.error)
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await fetcher.fetch_bytes(RIGHT, bytes)
        await fetcher.source.aclose()
        return seen[0]

    assert "127.0.0.1 cannot be reached" in run(work)


def test_a_large_file_goes_through_threads_and_comes_whole() -> None:
    """Blocks of it are under way in other threads whenever it breaks off or is another one."""
    large, other = Random(2).randbytes(5_000_000), Random(3).randbytes(5_000_000)
    request = FileRequest("f", len(large), len(large), hashlib.sha256(large).hexdigest(), give_up_after=5)
    with HostileServer({"f": large}) as server:
        server.behaviours["f"] = [
            hostile.drops_after(3_000_000),
            server.stalls_after(1_500_000),
            hostile.serves(other),
            hostile.serves(large + b"x"),
            hostile.drops_after(2_500_001),
        ]
        fetcher, sink = make_fetcher(server.url), MemorySink()

        async def work() -> bytes:
            data = await fetcher.fetch_into(request, sink, lambda: bytes(sink.data))
            await fetcher.source.aclose()
            return data

        assert run(work) == large
        first, second, *_ = server.asked_for("f")
        assert first is None
        assert second is not None
        assert int(second.removeprefix("bytes=").rstrip("-")) > 1_000_000  # what came before it broke was kept


def test_a_sink_without_space_ends_the_transfer_and_its_threads() -> None:
    class FullSink(MemorySink):
        def write(self, data: bytes) -> None:
            if len(self.data) > 2_000_000:
                raise DiskFullError("There is no space left.")
            super().write(data)

    large = bytes(5_000_000)
    request = FileRequest("f", len(large), len(large), give_up_after=5)
    with HostileServer({"f": large}) as server:
        fetcher = make_fetcher(server.url)

        async def work() -> None:
            try:
                await fetcher.fetch_into(request, FullSink(), lambda: None)
            finally:
                await fetcher.source.aclose()

        with pytest.raises(DiskFullError, match="no space left"):
            run(work)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shard")]


def test_folder_source(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "f").write_bytes(FILE)
    request = FileRequest("pages/f", len(FILE), len(FILE), RIGHT.digest, give_up_after=2)
    missing = FileRequest("gone", 1, 10, give_up_after=2)
    folder = FileRequest("pages", 1, 10, give_up_after=2)

    async def work() -> None:
        for location in (str(tmp_path), tmp_path.as_uri()):
            fetcher = make_fetcher(location)
            assert await fetcher.fetch_bytes(request, bytes) == FILE
            for absent in (missing, folder):
                with pytest.raises(FileMissingError):
                    await fetcher.fetch_bytes(absent, bytes)
        source = FolderSource(tmp_path)
        async with source.open("pages/f") as opened:
            validator = opened.validator
        async with source.open("pages/f", 1000, validator) as opened:
            assert opened.offset == 1000
            assert b"".join([chunk async for chunk in opened.chunks]) == FILE[1000:]
        async with source.open("pages/f", 1000, "another") as opened:
            assert opened.offset == 0

    run(work)


def test_locations_that_cannot_be_a_source(tmp_path: Path) -> None:
    for location in ("ftp://example.org", "http://", "https://user:secret@example.org", "file://elsewhere/x"):
        with pytest.raises(UsageError) as caught:
            open_source(location)
        assert "secret" not in str(caught.value)
    with pytest.raises(DataError, match="no Genesis folder"):
        open_source(str(tmp_path / "gone"))


def test_environment_proxies_never_see_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with HostileServer({"f": FILE}) as server:
        assert fetch(server) == FILE
        named = server.url.replace("127.0.0.1", "localhost")
        assert fetch(server, fetcher=make_fetcher(named)) == FILE


def test_a_proxy_that_cannot_be_used_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://x")
    with pytest.raises(UsageError, match="proxy"):
        HttpSource("https://example.org")


@given(failures=st.integers(0, 10_000), seed=st.integers(0, 99), asked=st.floats(0, 1e9))
def test_delays_stay_within_the_policy(failures: int, seed: int, asked: float) -> None:
    policy = RetryPolicy()
    delay = retry_delay(policy, failures, Random(seed), asked)
    assert policy.first_seconds / 16 <= delay <= policy.longest_seconds
    assert delay >= min(asked, policy.longest_seconds)


def test_delays_grow_and_are_spread() -> None:
    policy = RetryPolicy()
    averages = [sum(retry_delay(policy, n, Random(seed)) for seed in range(50)) / 50 for n in range(1, 9)]
    assert averages == sorted(averages)
    assert len({retry_delay(policy, 5, Random(seed)) for seed in range(50)}) == 50


def test_unavailable_is_not_damaged() -> None:
    assert issubclass(FileMissingError, DataUnavailableError)
    assert not issubclass(FileDamagedError, DataUnavailableError)
