"""A node that was asked to tells of a newer version, once a day at most, and installs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.config.settings import Settings
from neuroshard.errors import DataUnavailableError
from neuroshard.node.application import LOOK_SECONDS, watch_for_updates
from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.snapshot import NodeStatus
from neuroshard.update import checking
from neuroshard.update.checking import daily_notice, memory_file
from tests.worlds.file_servers import HostileServer
from tests.worlds.publishers import TIMESTAMP, ReleasePlace, new_key
from tests.worlds.releases import archive_of

NOW = time.time()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleasePlace]:
    """Version 9.9.9 is published."""
    with HostileServer() as server:
        place = ReleasePlace(server)
        monkeypatch.setattr(checking, "release_root", lambda: place.publisher.anchor)
        place.publish("9.9.9", archive_of({"neuroshard": b"x"}))
        yield place


def settings(place: ReleasePlace, folder: Path) -> Settings:
    return Settings(data_dir=folder, update_check=True, update_url=place.url)


def test_a_newer_version_becomes_a_warning_that_stays(place: ReleasePlace, tmp_path: Path) -> None:
    board = StatusBoard(NodeStatus(version="0.1.0", started_at=NOW, time=NOW))

    async def until_told() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_for_updates, settings(place, tmp_path), Publisher(board), lambda: NOW)
            with anyio.fail_after(20):
                while not board.current().warnings:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    anyio.run(until_told)
    assert board.current().warnings == ("Version 9.9.9 is available: install it in the same way as this version.",)


def test_a_damaged_memory_of_updates_is_a_warning_and_stays_one(place: ReleasePlace, tmp_path: Path) -> None:
    memory_file(tmp_path).path.write_bytes(b"{")
    board = StatusBoard(NodeStatus(version="0.1.0", started_at=NOW, time=NOW))

    async def main() -> None:
        with trio.move_on_after(3.5 * LOOK_SECONDS):
            await watch_for_updates(settings(place, tmp_path), Publisher(board), lambda: NOW)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    (warning,) = board.current().warnings
    assert "update.json is damaged" in warning
    assert "Install the newest version by hand" in warning


def test_the_publisher_is_asked_once_a_day_and_the_answer_is_kept(place: ReleasePlace, tmp_path: Path) -> None:
    def notice(now: float) -> str | None:
        return anyio.run(daily_notice, settings(place, tmp_path), "0.1.0", now)

    first = notice(NOW)
    assert first is not None
    assert notice(NOW + LOOK_SECONDS) == first
    assert len(place.server.asked_for(TIMESTAMP)) == 1
    assert notice(NOW + 90_000) == first
    assert len(place.server.asked_for(TIMESTAMP)) == 2


def test_nothing_is_told_after_the_update(place: ReleasePlace, tmp_path: Path) -> None:
    anyio.run(daily_notice, settings(place, tmp_path), "0.1.0", NOW)
    assert anyio.run(daily_notice, settings(place, tmp_path), "9.9.9", NOW + 60) is None


def test_a_forged_release_is_told_as_what_it_is(place: ReleasePlace, tmp_path: Path) -> None:
    place.publish("9.9.9", b"x", signer=new_key())
    told = anyio.run(daily_notice, settings(place, tmp_path), "0.1.0", NOW)
    assert told is not None
    assert "not signed by enough of the publisher's keys" in told


def test_a_mirror_that_is_silent_for_a_month_is_reported(place: ReleasePlace, tmp_path: Path) -> None:
    anyio.run(daily_notice, settings(place, tmp_path), "0.1.0", NOW)
    place.server.files.clear()
    with pytest.raises(DataUnavailableError):
        anyio.run(daily_notice, settings(place, tmp_path), "0.1.0", NOW + 25 * 86_400)
    told = anyio.run(daily_notice, settings(place, tmp_path), "0.1.0", NOW + 31 * 86_400)
    assert told is not None
    assert "No release could be verified since" in told


def test_by_default_nobody_is_asked() -> None:
    assert Settings().update_check is False
