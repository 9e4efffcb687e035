from __future__ import annotations

from pathlib import Path

import torch
from donors import FILE, MODEL, NAME, World, donor_node, identity_of, play
from small_stage import make_stage

from neuroshard.training.checkpoint.store import CheckpointStore
from neuroshard.training.compute import ComputeThread
from neuroshard.training.stage_state import stage_tensors
from neuroshard.training.transfer.install import install
from neuroshard.training.transfer.manifest import CHUNK_BYTES, chunk_count
from neuroshard.training.transfer.partial_file import PartialFile
from neuroshard.training.transfer.standings import standings_of
from neuroshard.types import NodeId

CHUNKS = chunk_count(FILE.layout.file_bytes)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def partial_in(folder: Path) -> PartialFile:
    return PartialFile(folder / "incoming.part", FILE.layout.file_bytes)


def test_the_state_of_a_stage_arrives_bit_for_bit_and_goes_on_as_ones_own(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        assert (await standings_of(world.receiver.asking, NAME, [A, B]))[A].line == (3, donor.outer.progress.state_root)
        manifest = await world.receiver.manifest(A, 30.0)
        received = await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        assert received.root == donor.outer.progress.state_root
        install(received, identity_of("here"), CheckpointStore(tmp_path / "here"))
        assert not world.reports

    play(scenario, donor)
    here = make_stage(compute, tmp_path / "here", MODEL, identity_of("here"))
    assert here.is_restored
    assert here.record.progress.steps == 40
    assert here.record.inherited.tokens == 4000
    assert (here.outer_progress.inner_steps, here.outer_progress.sequences) == (2, 8)
    assert here.record.progress.position is None
    there = stage_tensors(donor.stage.executor.model, donor.stage.executor.optimizer, donor.outer.state)
    for name, tensor in stage_tensors(here.executor.model, here.executor.optimizer, here.outer_state).items():
        assert torch.equal(tensor, there[name]), name
    assert CHUNKS > 4
    assert CHUNK_BYTES % 8 == 0
