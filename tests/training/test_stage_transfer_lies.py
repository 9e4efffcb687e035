from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch

from neuroshard.messages import Frame, TensorPart, TensorSpec
from neuroshard.network import Link, ScoreReason
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.download import PartialFile
from neuroshard.state.stage_tensors import OUTER_TENSORS
from neuroshard.state.transfer_messages import (
    CHUNK_BYTES,
    DonorError,
    LyingDonorError,
    ManifestAnswer,
    SnapshotManifest,
    chunk_count,
    chunk_frame,
    manifest_frame,
)
from neuroshard.types import LayerRange, NodeId
from tests.worlds.checkpoints import ARCHITECTURE, FILE, HERE, NAME, World, donor_node, play

CHUNKS = chunk_count(FILE.layout.file_bytes)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def partial_in(folder: Path) -> PartialFile:
    return PartialFile(folder / "incoming.part", FILE.layout.file_bytes)


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def saved_file(folder: Path, step: int = 40) -> bytes:
    return (folder / f"step-{step}.safetensors").read_bytes()


def bits_flipped(frame: Frame) -> Frame:
    data = bytearray(frame.tensors[0].data)
    data[len(data) // 2] ^= 1
    return chunk_frame(bytes(data))


def test_a_donor_with_a_wrong_chunk_is_dropped_and_the_others_go_on(compute: ComputeThread, tmp_path: Path) -> None:
    first, liar = donor_node(compute, tmp_path, "a", weights=1), donor_node(compute, tmp_path, "b", weights=2)
    first.save(40)
    liar.save(40)
    honest = liar.give_chunk

    async def lie(sender: NodeId, frame: Frame) -> Frame:
        return bits_flipped(await honest(sender, frame))

    liar.give_chunk = lie  # type: ignore[method-assign]

    async def scenario(world: World) -> bytes:
        world.network.set_link(A, HERE, Link(delay_seconds=1.0))
        manifests = {name: await world.receiver.manifest(name, 30.0) for name in (A, B)}
        received = await world.receiver.fetch(A, manifests, partial_in(tmp_path / "here"))
        assert set(world.reports) == {(B, ScoreReason.DIGEST_MISMATCH)}
        return content_of(received.path)

    assert play(scenario, first, liar) == saved_file(tmp_path / "a")
    assert len(liar.chunks_given) <= 3


def with_wrong_length(frame: Frame) -> Frame:
    return chunk_frame(bytes(frame.tensors[0].data) + b"more")


def with_another_type(frame: Frame) -> Frame:
    part = frame.tensors[0]
    return replace(frame, tensors=(TensorPart(TensorSpec("chunk", "int8", part.spec.shape), part.data),))


def without_anything(frame: Frame) -> Frame:
    return replace(frame, tensors=())


@pytest.mark.parametrize("spoil", [with_wrong_length, with_another_type, without_anything])
def test_a_chunk_of_another_shape_is_refused(
    compute: ComputeThread, tmp_path: Path, spoil: Callable[[Frame], Frame]
) -> None:
    liar = donor_node(compute, tmp_path, "a", weights=1)
    liar.save(40)
    honest = liar.give_chunk

    async def lie(sender: NodeId, frame: Frame) -> Frame:
        return spoil(await honest(sender, frame))

    liar.give_chunk = lie  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        with pytest.raises(DonorError, match="did not come as a whole"):
            await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        assert (A, ScoreReason.UNEXPECTED_TENSOR) in world.reports

    play(scenario, liar)


def spoilt_file(data: bytes, at: int, value: float) -> bytes:
    number = torch.tensor([value]).numpy().tobytes()
    return data[:at] + number + data[at + 4 :]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_with_values_that_are_no_numbers_is_not_used(
    compute: ComputeThread, tmp_path: Path, value: float
) -> None:
    liar = donor_node(compute, tmp_path, "a", weights=1)
    liar.save(40)
    file = tmp_path / "a/step-40.safetensors"
    file.write_bytes(spoilt_file(file.read_bytes(), FILE.layout.file_bytes - 400, value))

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        with pytest.raises(LyingDonorError, match="not numbers"):
            await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        assert world.reports == [(A, ScoreReason.UNEXPECTED_TENSOR)]

    play(scenario, liar)


def test_a_state_that_its_own_checkpoint_does_not_name_is_not_used(compute: ComputeThread, tmp_path: Path) -> None:
    liar = donor_node(compute, tmp_path, "a", weights=1)
    liar.save(40)
    file = tmp_path / "a/step-40.safetensors"  # damaged on the disk after it was written
    file.write_bytes(spoilt_file(file.read_bytes(), FILE.layout.file_bytes - 400, 0.5))

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        with pytest.raises(LyingDonorError, match="not the one that its checkpoint names"):
            await world.receiver.fetch(A, {A: manifest}, partial_in(tmp_path / "here"))
        assert world.reports == [(A, ScoreReason.DIGEST_MISMATCH)]
        assert not (tmp_path / "here/incoming.part").exists()

    play(scenario, liar)


def of_other_layers(told: SnapshotManifest) -> SnapshotManifest:
    return changed(told, layers=LayerRange(0, 2))


def of_another_model(told: SnapshotManifest) -> SnapshotManifest:
    return changed(told, architecture=replace(ARCHITECTURE, hidden_size=128))


def of_another_run(told: SnapshotManifest) -> SnapshotManifest:
    return changed(told, run_id="2" * 64)


def of_no_step(told: SnapshotManifest) -> SnapshotManifest:
    return changed(told, step=0)


def with_negative_tokens(told: SnapshotManifest) -> SnapshotManifest:
    return changed(told, tokens=-1)


def with_a_path_for_a_name(told: SnapshotManifest) -> SnapshotManifest:
    return rewritten(told, file="../../step-40.safetensors")


def with_another_length(told: SnapshotManifest) -> SnapshotManifest:
    return rewritten(told, bytes=told.file_bytes + 1)


def with_too_few_digests(told: SnapshotManifest) -> SnapshotManifest:
    return replace(told, digests=told.digests[:-1])


def with_a_damaged_document(told: SnapshotManifest) -> SnapshotManifest:
    return replace(told, document=told.document.replace(b'"step": 40', b'"step": 41'))


def changed(told: SnapshotManifest, **fields: object) -> SnapshotManifest:
    from neuroshard.state.checkpoint_manifest import CheckpointManifest, encode_manifest

    manifest = CheckpointManifest(replace(told.meta, **fields), told.checkpoint.tensors)  # type: ignore[arg-type]
    return SnapshotManifest(encode_manifest(manifest), told.digests, 0.0)


def rewritten(told: SnapshotManifest, **fields: object) -> SnapshotManifest:
    from neuroshard.state.checkpoint_manifest import CheckpointManifest, encode_manifest

    tensors = replace(told.checkpoint.tensors, **fields)  # type: ignore[arg-type]
    return SnapshotManifest(encode_manifest(CheckpointManifest(told.meta, tensors)), told.digests, 0.0)


@pytest.mark.parametrize(
    "lie",
    [
        of_other_layers,
        of_another_model,
        of_another_run,
        of_no_step,
        with_negative_tokens,
        with_a_path_for_a_name,
        with_another_length,
        with_too_few_digests,
        with_a_damaged_document,
    ],
)
def test_a_manifest_that_is_not_of_this_stage_is_refused(
    compute: ComputeThread, tmp_path: Path, lie: Callable[[SnapshotManifest], SnapshotManifest]
) -> None:
    liar = donor_node(compute, tmp_path, "a", weights=1)
    liar.save(40)

    async def scenario(world: World) -> None:
        honest = await liar.donor.own_manifest(NAME)

        async def answer(_sender: NodeId, _frame: Frame) -> Frame:
            await anyio.lowlevel.checkpoint()
            return manifest_frame(lie(honest))

        world.network.join(B).serve("stage/manifest", answer)
        with pytest.raises(LyingDonorError):
            await world.receiver.manifest(B, 30.0)
        assert world.reports == [(B, ScoreReason.UNEXPECTED_TENSOR)]

    play(scenario, liar)


def test_more_bytes_than_a_manifest_can_have_are_not_read(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)

    async def scenario(world: World) -> None:
        async def flood(_sender: NodeId, _frame: Frame) -> Frame:
            await anyio.lowlevel.checkpoint()
            part = TensorPart(TensorSpec("document", "uint8", (5_000_000,)), bytes(5_000_000))
            return Frame("stage/manifest", ManifestAnswer(0.0), (part,))

        world.network.join(B).serve("stage/manifest", flood)
        with pytest.raises(LyingDonorError, match="bytes of tensors"):
            await world.receiver.manifest(B, 30.0)

    play(scenario, donor)


def test_of_an_outer_state_only_its_own_chunks_come_and_a_wrong_one_is_refused(
    compute: ComputeThread, tmp_path: Path
) -> None:
    first, liar = donor_node(compute, tmp_path, "a", weights=1), donor_node(compute, tmp_path, "b", weights=2)
    first.save(40)
    liar.save(40)
    honest = liar.give_chunk

    async def lie(sender: NodeId, frame: Frame) -> Frame:
        return bits_flipped(await honest(sender, frame))

    liar.give_chunk = lie  # type: ignore[method-assign]
    outer = FILE.layout.chunks_of(OUTER_TENSORS, CHUNK_BYTES)

    async def scenario(world: World) -> None:
        manifests = {name: await world.receiver.manifest(name, 30.0) for name in (A, B)}
        received = await world.receiver.fetch_outer(A, manifests, partial_in(tmp_path / "here"))
        assert received.root == first.outer.progress.state_root
        assert (B, ScoreReason.DIGEST_MISMATCH) in world.reports

    play(scenario, first, liar)
    assert 0 < len(outer) < CHUNKS
    assert set(first.chunks_given) <= outer
    assert set(liar.chunks_given) < outer
