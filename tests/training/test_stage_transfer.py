from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch

from neuroshard.network import Link
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.download import PartialFile
from neuroshard.state.replica_status import query_statuses
from neuroshard.state.stage_tensors import stage_tensors
from neuroshard.state.transfer_messages import CHUNK_BYTES, DonorError, chunk_count
from neuroshard.training.state_transfer import install
from neuroshard.types import NodeId
from tests.worlds.checkpoints import FILE, HERE, MODEL, NAME, World, donor_node, identity_of, play
from tests.worlds.stages import make_stage

CHUNKS = chunk_count(FILE.layout.file_bytes)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def partial_in(folder: Path) -> PartialFile:
    return PartialFile(folder / "incoming.part", FILE.layout.file_bytes)


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def saved_file(folder: Path, step: int = 40) -> bytes:
    return (folder / f"step-{step}.safetensors").read_bytes()


def test_the_state_of_a_stage_arrives_bit_for_bit_and_goes_on_as_ones_own(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        told = await query_statuses(world.receiver.asking, NAME, [A, B])
        assert told[A].line == (3, donor.outer.progress.state_root)
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
    assert here.outer_state.line.sequences + here.outer_progress.since_round == donor.outer.scheduled_sequences == 1208
    assert here.record.progress.position is None
    there = stage_tensors(donor.stage.executor.model, donor.stage.executor.optimizer, donor.outer.state)
    for name, tensor in stage_tensors(here.executor.model, here.executor.optimizer, here.outer_state).items():
        assert torch.equal(tensor, there[name]), name
    assert CHUNKS > 4
    assert CHUNK_BYTES % 8 == 0  # so that a chunk begins and ends with a number


def test_an_installed_state_replaces_the_own_ones_of_another_line(compute: ComputeThread, tmp_path: Path) -> None:
    donor, own = (
        donor_node(compute, tmp_path, "a", weights=1),
        donor_node(compute, tmp_path, "here", weights=2, outer=1),
    )
    donor.save(40)
    for step in (30, 50, 60):
        own.save(step)

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        received = await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        install(received, identity_of("here"), CheckpointStore(tmp_path / "here"))

    play(scenario, donor)
    own.donor.close()
    here = make_stage(compute, tmp_path / "here", MODEL, identity_of("here"))
    assert here.record.progress.steps == 40
    assert saved_file(tmp_path / "here") == saved_file(tmp_path / "a")
    assert (tmp_path / "here/other-line/step-60.safetensors").exists()  # nothing that was trained is thrown away
    assert [item.step for item in CheckpointStore(tmp_path / "here").generations()] == [40, 30]


def test_chunks_that_are_the_same_come_from_several_donors(compute: ComputeThread, tmp_path: Path) -> None:
    first, other = donor_node(compute, tmp_path, "a", weights=1), donor_node(compute, tmp_path, "b", weights=2)
    stranger = donor_node(compute, tmp_path, "c", weights=3, outer_seed=9)
    for node in (first, other, stranger):
        node.save(40)

    async def scenario(world: World) -> bytes:
        for name in (A, B, C):
            world.network.set_link(name, HERE, Link(delay_seconds=1.0))
        manifests = {name: await world.receiver.manifest(name, 30.0) for name in (A, B, C)}
        received = await world.receiver.fetch(A, manifests, partial_in(tmp_path / "here"))
        assert not world.reports
        return content_of(received.path)

    assert play(scenario, first, other, stranger) == saved_file(tmp_path / "a")
    assert other.chunks_given  # of anchor and velocity
    assert not stranger.chunks_given
    assert sorted(first.chunks_given + other.chunks_given) == list(range(CHUNKS))


@pytest.mark.parametrize("given", [0, 1, CHUNKS // 2, CHUNKS - 1])
def test_when_a_donor_dies_another_one_takes_its_place(compute: ComputeThread, tmp_path: Path, given: int) -> None:
    first, other = donor_node(compute, tmp_path, "a", weights=1), donor_node(compute, tmp_path, "b", weights=2)
    first.save(40)
    other.save(41)
    first.dies_after = given

    async def scenario(world: World) -> bytes:
        manifest = await world.receiver.manifest(A, 30.0)
        with pytest.raises(DonorError, match="did not come as a whole"):
            await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        manifest = await world.receiver.manifest(B, 30.0)
        received = await world.receiver.fetch(B, {B: manifest}, partial_in(tmp_path / "here"))
        assert given < CHUNKS - 1 or len(other.chunks_given) < CHUNKS  # what is common is not fetched again
        assert not world.reports  # to die is no lie
        return content_of(received.path)

    assert play(scenario, first, other) == saved_file(tmp_path / "b", 41)


def test_a_restart_fetches_only_what_is_missing(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        world.network.set_link(A, HERE, Link(delay_seconds=1.0))
        manifest = await world.receiver.manifest(A, 30.0)
        with anyio.move_on_after(1.5):  # killed when the first three chunks are there
            await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        donor.save(55)  # the donor goes on meanwhile
        again = await world.receiver.manifest(A, 0.0, preferred=manifest.snapshot)
        assert again.snapshot == manifest.snapshot
        await world.receiver.fetch(A, {A: again}, partial_in(tmp_path / "here"))

    play(scenario, donor)
    late = 3  # answers that came after the kill
    assert len(donor.chunks_given) <= CHUNKS + late
    assert content_of(tmp_path / "here/incoming.part") == saved_file(tmp_path / "a")


def test_a_file_of_another_length_is_not_gone_on_with(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/incoming.part").write_bytes(b"x" * 1000)

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))

    play(scenario, donor)
    assert content_of(tmp_path / "here/incoming.part") == saved_file(tmp_path / "a")


def test_unchanged_parts_of_an_older_state_are_not_sent_again(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)
    (tmp_path / "older").mkdir()
    older = tmp_path / "older/step-40.safetensors"
    older.write_bytes(saved_file(tmp_path / "a"))
    for parameter in donor.stage.executor.model.parameters():  # an inner step: anchor and velocity stay
        parameter.data.add_(1.0)
    donor.save(41)

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"), [older])

    play(scenario, donor)
    assert content_of(tmp_path / "here/incoming.part") == saved_file(tmp_path / "a", 41)
    assert 0 < len(donor.chunks_given) < CHUNKS
