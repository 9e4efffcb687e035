"""What a trainer keeps: its record, and a position that is on disk before the data behind it are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
import torch
import trio
from trio.testing import MockClock

from neuroshard.data.held_out_losses import Evaluation
from neuroshard.errors import StorageError
from neuroshard.status.snapshot import LossPoint
from neuroshard.training.drive_store import (
    POSITION_FILE,
    RECORD_FILE,
    RETRY_SECONDS,
    SESSIONS_OF_A_START,
    DriveStore,
    WriteAheadFeed,
)
from neuroshard.training.record import NotedLoss, Progress, SkippedSteps, TrainingRecord
from neuroshard.types import DataPosition, NodeId, RunId, ShardId, WalletId
from tests.worlds.stages import SHARD_WINDOWS, MemoryFeed

WALLET, ME, OTHER, RUN = WalletId("0" * 16), NodeId("me"), NodeId("other"), RunId("1" * 64)
PLACE = DataPosition(3, ShardId(9), 17)


def store_in(folder: Path, node: NodeId = ME) -> DriveStore:
    return DriveStore(folder, WALLET, node, RUN)


def written_record() -> TrainingRecord:
    record = TrainingRecord(
        Progress(7, 700, 70, 2.5, 2.75, 5.0, None, PLACE, (NotedLoss(6, 2.5, None),), SkippedSteps(1, 0, 3)),
        evaluation_seconds=1.5,
        pinned_digest="ab",
    )
    record.history.add(LossPoint(7, 1000.0, 2.5, 1e-3, 700))
    record.evaluations.add(Evaluation(0, 900.0, (5.0, 6.0)))
    record.evaluations.add(Evaluation(7, 1000.0, (4.0, 5.5)))
    return record


def test_a_record_survives(tmp_path: Path) -> None:
    record = written_record()
    store = store_in(tmp_path)
    store.save(store.stored_form(record))
    found = store_in(tmp_path).load()
    assert found.progress == record.progress
    assert found.history.snapshot() == record.history.snapshot()
    assert found.evaluations.evaluations == record.evaluations.evaluations
    assert (found.evaluation_seconds, found.pinned_digest, found.node_id) == (1.5, "ab", ME)


def test_an_evaluation_of_a_diverged_model_does_not_damage_the_record(tmp_path: Path) -> None:
    record = written_record()
    record.evaluations.add(Evaluation(8, 1100.0, (float("nan"), 5.0)))
    store = store_in(tmp_path)
    store.save(store.stored_form(record))
    found = store_in(tmp_path).load()
    assert [evaluation.step for evaluation in found.evaluations.evaluations] == [0, 7]


def test_the_position_that_was_written_last_counts(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.load().progress.position is None
    store.note_position(PLACE)
    assert store.load().progress.position == PLACE
    store.save(store.stored_form(written_record()))
    later = replace(PLACE, window=40)
    store.note_position(later)
    found = store_in(tmp_path).load()
    assert (found.progress.position, found.progress.steps) == (later, 7)


def test_another_key_is_told_whose_position_it_finds(tmp_path: Path) -> None:
    store_in(tmp_path).note_position(PLACE)
    assert store_in(tmp_path, OTHER).load().node_id == ME


def test_runs_do_not_mix(tmp_path: Path) -> None:
    store_in(tmp_path).note_position(PLACE)
    assert DriveStore(tmp_path, WALLET, ME, RunId("2" * 64)).load().progress.position is None


@pytest.mark.parametrize("name", [POSITION_FILE, RECORD_FILE])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"node_id": 1, "position": null}', b"[" * 10_000])
def test_a_damaged_file_is_named_and_not_written_over(tmp_path: Path, name: str, content: bytes) -> None:
    store = store_in(tmp_path)
    store.folder.mkdir(parents=True)
    (store.folder / name).write_bytes(content)
    with pytest.raises(StorageError, match=f"{name} is damaged"):
        store.load()
    assert (store.folder / name).read_bytes() == content


def played(scenario: Callable[[], object]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_a_position_is_safe_before_its_data_are_given_out(tmp_path: Path) -> None:
    store, feed = store_in(tmp_path), MemoryFeed()

    async def main() -> None:
        journaled = WriteAheadFeed(feed, store.note_position)
        for _ in range(SHARD_WINDOWS // 2 + 1):
            batch = await journaled.next_batch(2)
            noted = store.load().progress.position
            assert noted is not None
            assert batch.position == journaled.position
            assert (noted.order, noted.window) >= (batch.position.order, batch.position.window)

    trio.run(main)


def test_eight_batches_are_noted_at_once_and_come_as_the_feed_has_them() -> None:
    noted = list[DataPosition]()

    async def main() -> None:
        journaled, plain = WriteAheadFeed(MemoryFeed(), noted.append), MemoryFeed()
        given = [await journaled.next_batch(sequences) for sequences in (2, 2, 1, 3, 2, 2, 2, 2)]
        assert len(noted) == 1
        given += [await journaled.next_batch(2)]
        assert len(noted) == 2
        for batch in given:
            rows = [await plain.next_batch(1) for _ in batch.input_ids]
            assert torch.equal(batch.input_ids, torch.cat([row.input_ids for row in rows]))
            assert torch.equal(batch.labels, torch.cat([row.labels for row in rows]))
            assert batch.position == rows[-1].position
            assert batch.token_count == batch.labels.numel()

    trio.run(main)


def test_without_room_on_the_disk_nothing_is_given_out_and_nothing_is_lost() -> None:
    feed, noted = MemoryFeed(), list[DataPosition]()

    def note(position: DataPosition) -> None:
        if len(noted) < 2:
            noted.append(position)
            raise StorageError("The position cannot be written (No space left on device).")

    async def main() -> None:
        journaled = WriteAheadFeed(feed, note)
        with anyio.move_on_after(RETRY_SECONDS / 2) as patience:
            await journaled.next_batch(2)
        assert patience.cancelled_caught
        assert "No space left" in journaled.status().explanation
        batch = await journaled.next_batch(2)
        assert trio.current_time() >= RETRY_SECONDS
        assert batch.position == DataPosition(0, ShardId(0), 2)
        assert journaled.status().explanation == feed.status().explanation
        assert noted == [feed.position] * 2

    played(main)


def test_whatever_kills_a_trainer_no_window_is_given_out_twice(tmp_path: Path) -> None:
    given: list[tuple[int, int]] = []

    async def live(until: int) -> None:
        position = store_in(tmp_path).load().progress.position
        journaled = WriteAheadFeed(MemoryFeed(position), store_in(tmp_path).note_position)
        for _ in range(until):
            batch = await journaled.next_batch(4)
            given.append((batch.position.order, batch.position.window))

    for batches in (3, 0, 30, 1):
        trio.run(partial(live, batches))
    assert len(given) == len(set(given)) == 34
    assert given == sorted(given)


def test_a_stage_goes_on_behind_what_was_sent_or_behind_its_checkpoint_whichever_is_later(tmp_path: Path) -> None:
    def start(position: DataPosition | None, node: NodeId | None = ME) -> tuple[DataPosition | None, NodeId | None]:
        record = TrainingRecord(node_id=node)
        record.progress = replace(record.progress, position=position)
        return store_in(tmp_path).start_after(record)

    before, after = replace(PLACE, window=3), replace(PLACE, order=4, window=0)
    assert start(None, None) == (None, None)
    assert start(before) == (before, ME)
    store_in(tmp_path).note_position(PLACE)
    assert start(None, None) == (PLACE, ME)
    assert start(before) == (PLACE, ME)
    assert start(after) == (after, ME)
    assert start(after, OTHER) == (PLACE, ME)  # a stage that came from another node: the data are this one's


def test_data_that_stay_here_need_no_note() -> None:
    noted = list[DataPosition]()
    alone = True

    async def main() -> None:
        nonlocal alone
        journaled = WriteAheadFeed(MemoryFeed(), noted.append, lambda: not alone)
        await journaled.next_batch(2)
        assert noted == []
        alone = False
        assert (await journaled.next_batch(2)).position == DataPosition(0, ShardId(0), 4)
        assert len(noted) == 1

    trio.run(main)


@pytest.mark.parametrize("clock", [(1000.0, 1001.0, 1002.0), (1000.0, 1000.0, 10.0)])
def test_no_session_number_comes_again(tmp_path: Path, clock: tuple[float, ...]) -> None:
    firsts = [store_in(tmp_path).first_session(now) for now in clock]
    assert firsts[0] == 1_000_000  # milliseconds
    assert all(later - former >= SESSIONS_OF_A_START for former, later in pairwise(firsts))
    assert store_in(tmp_path).first_session(1e12) == 10**15


def test_sessions_go_on_by_the_clock_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neuroshard.config.state_file.write_atomically", write)
    assert store_in(tmp_path).first_session(1000.0) == 1_000_000
    assert "No space left" in caplog.text
