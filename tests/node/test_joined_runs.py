"""Runs kept in the data folder: the better version stays, a damaged file is not used, an owner's own are found."""

from __future__ import annotations

import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from neuroshard.errors import DataError, StorageError
from neuroshard.identity import SignedRunParameters
from neuroshard.runs.offer import MAX_OFFER_BYTES, RunOffer
from neuroshard.runs.stored_runs import JoinedRuns, LocalRuns, find_run, is_run_id, read_offer_file
from neuroshard.types import RunId
from tests.worlds.claims import FIRST, OWNER


def offer(version: int = 1, outer_lr: float = 0.7) -> RunOffer:
    later = replace(FIRST, version=version, outer=replace(FIRST.outer, learning_rate=outer_lr))
    return RunOffer(SignedRunParameters.sign(OWNER, FIRST), SignedRunParameters.sign(OWNER, later))


RUN = offer().run_id


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    assert JoinedRuns(tmp_path).load(RUN) is None
    assert JoinedRuns(tmp_path).keep(offer()).is_new
    assert (tmp_path / "runs" / "joined" / f"{RUN}.json").is_file()
    assert JoinedRuns(tmp_path).load(RUN) == offer()


def test_the_better_version_stays_on_disk(tmp_path: Path) -> None:
    runs = JoinedRuns(tmp_path)
    for kept, is_new in ((offer(2), True), (offer(1), False), (offer(3, 0.8), True), (offer(3, 0.6), False)):
        choice = runs.keep(kept)
        assert choice.is_new is is_new
        assert bool(choice.reason) is not is_new
    assert runs.load(RUN) == offer(3, 0.8)


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"x" * (MAX_OFFER_BYTES + 1), offer(2).to_json().replace(b"0.9", b"0.8")]
)
def test_a_damaged_file_is_told_not_used_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    runs = JoinedRuns(tmp_path)
    runs.keep(offer(2))
    file = tmp_path / "runs" / "joined" / f"{RUN}.json"
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert runs.load(RUN) is None
    assert str(file) in caplog.text
    assert runs.keep(offer(1)).is_new
    assert runs.load(RUN) == offer(1)


def test_the_file_of_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    runs = JoinedRuns(tmp_path)
    runs.keep(offer())
    folder = tmp_path / "runs" / "joined"
    (folder / f"{RUN}.json").rename(folder / f"{'0' * 64}.json")
    assert runs.load(RunId("0" * 64)) is None


@pytest.mark.parametrize("text", ["", "../../keys/node-key", "ab" * 31, "AB" * 32, "ab" * 32 + "\n", "g" * 64])
def test_what_is_no_run_id_is_no_file(tmp_path: Path, text: str) -> None:
    assert not is_run_id(text)
    assert JoinedRuns(tmp_path).load(RunId(text)) is None


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        JoinedRuns(tmp_path).keep(offer())


def test_a_signed_file_is_read_and_a_wrong_one_named(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with pytest.raises(StorageError, match="does not exist"):
        read_offer_file(file)
    file.write_bytes(offer(2).to_json())
    assert read_offer_file(file) == offer(2)
    file.write_text("[]")
    with pytest.raises(DataError, match=str(file)):
        read_offer_file(file)
    with pytest.raises(StorageError, match="cannot be read"):
        read_offer_file(tmp_path)


def test_a_run_of_ones_own_can_be_offered_and_found(tmp_path: Path) -> None:
    own = LocalRuns(tmp_path, OWNER).create(FIRST)
    assert (own.run_id, own.parameters, own.offer) == (RUN, FIRST, offer())
    assert find_run(tmp_path, RUN) == offer()
    assert find_run(tmp_path, RunId("0" * 64)) is None


def test_a_later_version_of_ones_own_run_holds_at_the_next_start(tmp_path: Path) -> None:
    LocalRuns(tmp_path, OWNER).create(FIRST)
    JoinedRuns(tmp_path).keep(offer(2, 0.5))
    again = LocalRuns(tmp_path, OWNER).of_data(FIRST.genesis)
    assert again is not None
    assert (again.run_id, again.parameters.version, again.parameters.outer.learning_rate) == (RUN, 2, 0.5)
    assert find_run(tmp_path, RUN) == offer(2, 0.5)


def test_an_oversized_stored_run_is_not_read_into_memory(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "wallet" / "own-0.json"
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        stream.truncate(50_000_000)
    tracemalloc.start()
    try:
        assert find_run(tmp_path, RunId("0" * 64)) is None
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
