"""A restart goes on with the stages a node held last, whatever else lies beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.identities import identity_of
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import plan_of
from neuroshard.node.own_stages import FILE_NAME, kept_stages, note_stages
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.state.checkpoint_store import stage_folder
from tests.worlds.nodes import OFFER, SINGLE

RUN = LocalRun.of(OFFER)
IDENTITY = identity_of(1)
ALL = StageRange(0, 3)


def save(folder: Path, index: int, seconds: float) -> Path:
    """A checkpoint of a stage, as old as the time says."""
    path = stage_folder(folder, IDENTITY.wallet_id, RUN.run_id, plan_of(RUN.parameters)[index]) / "step-7.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    os.utime(path, (seconds, seconds))
    return path.parent.parent / FILE_NAME


def test_nothing_is_kept_where_nothing_was_saved(tmp_path: Path) -> None:
    assert kept_stages(tmp_path, IDENTITY, RUN) is None
    assert note_stages(tmp_path, IDENTITY, RUN, SINGLE[1]) == ()
    assert kept_stages(tmp_path, IDENTITY, RUN) is None


def test_the_noted_stages_count_although_the_one_it_left_was_saved_in_the_same_second(tmp_path: Path) -> None:
    save(tmp_path, 0, 1000.0)
    save(tmp_path, 1, 1000.5)
    note_stages(tmp_path, IDENTITY, RUN, SINGLE[1])
    assert kept_stages(tmp_path, IDENTITY, RUN) == SINGLE[1]
    save(tmp_path, 0, 2000.0)  # saved once more while it left
    assert kept_stages(tmp_path, IDENTITY, RUN) == SINGLE[1]


def test_several_stages_are_kept_together_also_when_one_has_no_checkpoint_yet(tmp_path: Path) -> None:
    save(tmp_path, 0, 1000.0)
    save(tmp_path, 2, 9000.0)
    note_stages(tmp_path, IDENTITY, RUN, ALL)
    assert kept_stages(tmp_path, IDENTITY, RUN) == ALL


@pytest.mark.parametrize(
    "note", [None, b"", b"[]", b'{"start": 0, "stop": 1}', b"[2, 4]", b"[1, 1]", b"[0, 1, 2]", b" " * 5000, b"\xff"]
)
def test_without_a_note_that_names_stages_the_newest_checkpoint_counts(tmp_path: Path, note: bytes | None) -> None:
    save(tmp_path, 0, 1000.0)
    path = save(tmp_path, 2, 1000.5)
    save(tmp_path, 1, 999.0)
    if note is not None:
        path.write_bytes(note)
    assert kept_stages(tmp_path, IDENTITY, RUN) == SINGLE[2]
    note_stages(tmp_path, IDENTITY, RUN, SINGLE[0])
    assert kept_stages(tmp_path, IDENTITY, RUN) == SINGLE[0]


def test_a_note_of_stages_that_were_never_saved_does_not_hide_what_was(tmp_path: Path) -> None:
    save(tmp_path, 0, 1000.0)
    note_stages(tmp_path, IDENTITY, RUN, SINGLE[2])
    assert kept_stages(tmp_path, IDENTITY, RUN) == SINGLE[0]


def test_a_note_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1000.0)
    path.mkdir()
    (warning,) = note_stages(tmp_path, IDENTITY, RUN, SINGLE[0])
    assert str(path) in warning
    assert kept_stages(tmp_path, IDENTITY, RUN) == SINGLE[0]
