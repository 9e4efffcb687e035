"""Which saved stages make one model: by time, without gaps, whatever lies in the folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import CheckpointError
from neuroshard.state.checkpoint_catalogue import SavedStage, choose, saved_stages, spread_warnings
from neuroshard.state.checkpoint_manifest import CheckpointManifest, TensorFile
from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders, search_stage_folders, stage_folder
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import LayerRange
from tests.worlds.checkpoints import EXPECTED, SHAPE, meta_at, staged

LAYERS = 6
DEEP = replace(SHAPE, layer_count=LAYERS)
THIRDS = (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6))


def saved(layers: LayerRange, time: float, step: int = 10, name: str = "") -> SavedStage:
    """A state that lies nowhere."""
    meta = replace(meta_at(step), layers=layers, time=time, architecture=DEEP)
    generation = CheckpointGeneration(step, 0, time, None, 100, f"/{name}/step-{step}.json")
    return SavedStage(generation, CheckpointManifest(meta, TensorFile(f"step-{step}.safetensors", 100, "00")))


def write(data_dir: Path, layers: LayerRange, *steps: int) -> Path:
    """States of one stage on disk; a state's time is 1,000 seconds and its step."""
    folder = stage_folder(data_dir, EXPECTED.wallet_id, EXPECTED.run_id, layers)
    for step in steps:
        CheckpointStore(folder).write(replace(meta_at(step), layers=layers, architecture=DEEP), staged(step))
    return folder


def steps_of(stages: Sequence[SavedStage]) -> list[int]:
    return [stage.generation.step for stage in stages]


def test_folders_of_several_nodes_are_one_catalogue(tmp_path: Path) -> None:
    write(tmp_path / "a", THIRDS[0], 10, 20, 30)
    write(tmp_path / "b", THIRDS[1], 11, 21)
    write(tmp_path / "b" / "node-2", THIRDS[2], 12, 22, 32)
    assert len(find_stage_folders(tmp_path / "a")) == 1
    folders = search_stage_folders(tmp_path)
    assert len(folders) == 3
    assert search_stage_folders(tmp_path / "a" / "checkpoints") == folders[:1]
    found = saved_stages(folders)
    assert steps_of(found) == [32, 30, 22, 21, 20, 12, 11, 10]
    assert steps_of(choose(found).require_whole()) == [30, 21, 32]
    assert steps_of(choose(found, at=1025).require_whole()) == [20, 21, 22]
    assert steps_of(choose(found, at=1020).require_whole()) == [20, 11, 12]
    with pytest.raises(CheckpointError, match=r"Layers 3-6 are missing"):
        choose(found, at=1010).require_whole()
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        choose(found, at=1009)


def test_the_missing_layers_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"Layers 1-2 and 5-6 are missing"):
        choose([saved(THIRDS[1], 5.0)]).require_whole()
    with pytest.raises(CheckpointError, match=r"Layer 4 is missing"):
        choose([saved(LayerRange(0, 3), 5.0), saved(LayerRange(4, 6), 5.0)]).require_whole()


def test_of_replicas_the_newest_state_is_taken() -> None:
    stages = [saved(THIRDS[0], 5.0), *(saved(layers, 6.0) for layers in THIRDS[1:])]
    replica = saved(THIRDS[0], 7.0, name="replica")
    assert choose([*stages, replica]).require_whole()[0] is replica
    assert choose([*stages, replica], at=6.5).require_whole()[0] is stages[0]


def test_stages_that_overlap_are_taken_so_that_the_oldest_is_the_newest() -> None:
    whole, front, back = saved(LayerRange(0, 6), 50.0), saved(LayerRange(0, 3), 90.0), saved(LayerRange(3, 6), 40.0)
    stray = saved(LayerRange(2, 5), 99.0)
    assert choose([whole, front, back, stray]).require_whole() == (whole,)
    fresh = saved(LayerRange(3, 6), 60.0)
    assert choose([whole, front, back, stray, fresh]).require_whole() == (front, fresh)
    with pytest.raises(CheckpointError, match="do not meet"):
        choose([saved(LayerRange(0, 4), 1.0), saved(LayerRange(3, 6), 1.0)])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 50)), min_size=1, max_size=12),
    st.integers(0, 50),
)
def test_what_is_chosen_is_old_enough_and_covers_every_layer_once(
    given_ranges: list[tuple[int, int, int]], at: int
) -> None:
    stages = [saved(LayerRange(start, min(LAYERS, start + size)), time) for start, size, time in given_ranges]
    try:
        choice = choose(stages, at)
    except CheckpointError:
        return
    assert all(stage.generation.time <= at for stage in choice.stages)
    covered = [layer for stage in choice.stages for layer in range(stage.layers.start, stage.layers.stop)]
    missing = [layer for layers in choice.missing for layer in range(layers.start, layers.stop)]
    assert sorted({*covered, *missing}) == list(range(LAYERS))
    if not missing:
        assert covered == list(range(LAYERS))


def test_stages_far_apart_in_time_or_steps_are_told() -> None:
    near = [saved(layers, 1000.0 + layers.start, 2000 + layers.start) for layers in THIRDS]
    assert spread_warnings(near) == ()
    (late,) = spread_warnings([*near[:2], saved(THIRDS[2], 1000.0 + 3 * 3600, 2000)])
    assert "3.0 hours apart" in late
    (behind,) = spread_warnings([*near[:2], saved(THIRDS[2], 1000.0, 1800)])
    assert "from 1,800 to 2,002" in behind


def test_a_state_without_its_tensors_is_known_as_such(tmp_path: Path) -> None:
    folder = write(tmp_path, THIRDS[0], 10, 20, 30)
    (folder / "step-20.safetensors").unlink()
    with (folder / "step-30.safetensors").open("ab") as file:
        file.write(b"x")
    assert [stage.has_tensors for stage in saved_stages([folder])] == [False, False, True]
