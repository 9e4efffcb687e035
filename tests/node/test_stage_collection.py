"""A node without a stage collects certified states, whatever single donors send, and continues where it stopped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import msgspec
import pytest
import torch
from msgspec import structs

from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import Foundation, SignedFoundation, StageStart
from neuroshard.consensus.group_rounds import GroupRounds
from neuroshard.consensus.round_messages import NO_DIGEST, Phase, Quorum, Vote, signed_by
from neuroshard.consensus.stage_chain import CertifiedState, certified_states
from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.errors import UsageError
from neuroshard.messages import Frame, FrameLimits
from neuroshard.node.stage_collection import (
    CollectedStage,
    CollectedStates,
    StageCollector,
    StageMissing,
    begin_collection,
    record_of,
)
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.state.checkpoint_catalogue import saved_stages
from neuroshard.state.checkpoint_store import search_stage_folders
from neuroshard.state.disk_space import StorageLimits, used_bytes
from neuroshard.state.download import ReplicaClient
from neuroshard.state.kept_states import KeptState, StageArchive, kept_states
from neuroshard.state.stage_tensors import ANCHOR, OUTER_TENSORS
from neuroshard.state.tensor_file import map_tensor_file
from neuroshard.state.transfer_messages import CHUNK, CHUNK_BYTES, ChunkRequest
from neuroshard.training.archivist import Archivist
from neuroshard.training.record import StageIdentity
from neuroshard.types import NodeId
from tests.worlds.clock import at_once
from tests.worlds.nodes import EPOCH, OWNER, SHAPE, HeldStage, StageNode, StageWorld, living, now, play, root_on_disk

LARGE = replace(SHAPE, vocabulary_size=8192)  # several chunks
PATIENCE = 60.0


class Certifier:
    """The only seat of the first stage, with its chain."""

    def __init__(self, world: StageWorld, holder: StageNode) -> None:
        self.world, self.holder = world, holder
        start = StageStart(0, Committee.founded([Seat(holder.identity.wallet_id, holder.name, 0)], is_open=False))
        self.statement = SignedFoundation.sign(OWNER, Foundation(world.offer.run_id, 0, (start,)))
        self.show(holder)
        founding = holder.swarm.versions.founding_of(0)
        assert founding is not None
        self.chain = Chain.founded(founding)
        stub = SimpleNamespace(stage=holder.swarm.name_of(0), chain=self)  # its `chain` is the chain
        holder.swarm.rounds.add(cast("GroupRounds", stub))

    def show(self, node: StageNode) -> None:
        """Let a node know the foundation."""
        versions = node.swarm.versions
        versions.learn_foundations(versions.foundations.with_statements([self.statement]))

    @property
    def stage(self) -> HeldStage:
        assert self.holder.stage is not None
        return self.holder.stage

    def certify(self, root: str) -> Quorum:
        """The next value, to a state with this root."""
        chain = self.chain
        number, before = chain.standing.outer_step, chain.standing.root or NO_DIGEST
        step = Step(self.world.offer.run_id, 0, number, before, "terms", chain.standing, chain.ledger, chain.owner)
        value = step.completed(structs.replace(step.first_value(), outer_step=number + 1, next_root=root))
        vote = signed_by(self.holder.identity, Vote(step.id, 0, Phase.COMMIT, value.digest), self.holder.now())
        certificate = Quorum(value, 0, Phase.COMMIT, (vote,))
        self.chain = chain.extended(certificate)
        return certificate

    def save(self, outer_step: int) -> str:
        """Save a checkpoint of an outer step, and return its root."""
        self.stage.outer_step = outer_step
        self.stage.steps += 1
        self.stage.save()
        return root_on_disk(self.stage)


async def joined(world: StageWorld, certifier: Certifier) -> StageNode:
    """A node without a stage that knows the run."""
    node = world.add()
    certifier.show(node)
    world.tasks.start_soon(node.live)
    await anyio.sleep(30)
    return node


async def collected(
    world: StageWorld, certifier: Certifier, out: Path, wanted: CollectedStates | None = None
) -> CollectedStage | StageMissing:
    """Collect the first stage with a node that joins for it."""
    node = next((each for each in world.nodes if not each.held), None) or await joined(world, certifier)
    identity = StageIdentity(node.identity.wallet_id, node.name, world.offer.run_id, world.shape, node.swarm.plan[0], 1)
    wanted = wanted or CollectedStates(world.offer.run_id)
    collector = StageCollector(node.swarm, 0, identity, out, wanted=wanted, report=node.told.append)
    return await collector.collect(PATIENCE)


def played(
    folder: Path,
    scenario: Callable[[StageWorld, Certifier, Path], Awaitable[None]],
    stages: tuple[int, ...] = (0, 1, 2),
) -> None:
    """Run a scenario among nodes with these stages; the first of them certifies the first stage."""

    async def main(world: StageWorld) -> None:
        async with living(world, stages, moves=False) as nodes:
            await anyio.sleep(30)
            await scenario(world, Certifier(world, nodes[0]), folder / "out")

    play(folder, main, shape=LARGE, save_steps=10**6)  # checkpoints of the test only


def anchor_in(out: Path) -> float:
    """The number of which the collected anchor consists."""
    (stage,) = saved_stages(search_stage_folders(out))
    tensors = map_tensor_file(stage.tensor_file, stage.manifest.tensors.sha256)
    assert not any(name.startswith("inner/") for name in tensors)
    weights = torch.cat([tensor.reshape(-1) for name, tensor in tensors.items() if name.startswith("model/")])
    assert torch.equal(weights, tensors[ANCHOR])
    return float(tensors[ANCHOR].unique().item())


def test_the_newest_certified_state_that_a_holder_keeps_is_collected(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        roots = [certifier.save(step) for step in (1, 2, 3)]
        for root in roots[:2]:
            certifier.certify(root)  # the third has no certificate yet
        found = await collected(world, certifier, out)
        assert isinstance(found, CollectedStage)
        assert (found.outer_step, found.root, found.height) == (2, roots[1], 2)
        assert anchor_in(out) == 2.0

    played(tmp_path, scenario)


def test_by_time_and_by_outer_step_an_older_state_is_collected(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        times = list[float]()
        for step in (1, 2, 3):
            certificate = certifier.certify(certifier.save(step))
            if step == 1:
                archive_state(certifier, certificate)
            times.append(now())
            await anyio.sleep(5)
        by_time = await collected(world, certifier, out / "time", CollectedStates(world.offer.run_id, at=times[1] + 2))
        by_step = await collected(world, certifier, out / "step", CollectedStates(world.offer.run_id, outer_step=1))
        assert isinstance(by_time, CollectedStage)
        assert isinstance(by_step, CollectedStage)
        assert (by_time.outer_step, by_step.outer_step) == (2, 1)
        assert (anchor_in(out / "time"), anchor_in(out / "step")) == (2.0, 1.0)

    played(tmp_path, scenario)


def test_before_the_run_nothing_is_collected_and_its_begin_is_named(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        certifier.certify(certifier.save(1))
        found = await collected(world, certifier, out, CollectedStates(world.offer.run_id, at=EPOCH - 1))
        assert isinstance(found, StageMissing)
        assert "The oldest state that a node keeps is outer step 1" in found.reason
        assert "The run's first step is of" in found.reason
        waiting = [words for words in world.nodes[-1].told if "waiting. The oldest state" in words]
        assert len(waiting) == 1

    played(tmp_path, scenario)


def test_an_archived_state_from_before_the_last_values_comes_with_its_certificate(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        archive_state(certifier, certifier.certify(certifier.save(1)))
        for step in range(2, 140):
            certifier.certify(f"{step:064x}")
        certifier.certify(certifier.save(140))
        assert certifier.chain.recent[0].value.height > 1
        found = await collected(world, certifier, out, CollectedStates(world.offer.run_id, outer_step=100))
        assert isinstance(found, CollectedStage)
        assert (found.outer_step, anchor_in(out)) == (1, 1.0)

    played(tmp_path, scenario)


def archive_state(certifier: Certifier, certificate: Quorum) -> None:
    """Archive the newest checkpoint with this certificate."""
    archive = StageArchive.of(certifier.stage.store)
    (kept, *_) = kept_states(certifier.stage.store)
    state = CertifiedState(certificate)
    encoded = msgspec.msgpack.encode(certificate)
    archive.keep(certifier.stage.store, KeptState(kept.generation, kept.root, encoded, state.certified_at))
    certifier.holder.swarm.donor.archive(certifier.holder.swarm.name_of(0), archive)


@pytest.mark.parametrize("lie", ["another root", "another voter", "no certificate"])
def test_a_tampered_certificate_proves_nothing(lie: str, tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        honest = certifier.certify("1" * 64)
        root, value = certifier.save(1), honest.value
        if lie == "another voter":
            value = structs.replace(value, next_root=root)
            vote = signed_by(world.nodes[1].identity, Vote(value.step_id, 0, Phase.COMMIT, value.digest), now())
            archive_state(certifier, Quorum(value, 0, Phase.COMMIT, (vote,)))
        else:
            archive_state(certifier, honest)
            (file,) = certifier.stage.store.folder.glob("archive/*/certificate.msgpack")
            data = file.read_bytes()
            file.write_bytes(data.replace(b"1" * 64, root.encode()) if lie == "another root" else data[:-100])
        found = await collected(world, certifier, out)
        assert isinstance(found, StageMissing)
        assert not search_stage_folders(out) or not saved_stages(search_stage_folders(out))
        if lie != "no certificate":  # a node does not offer what it cannot read itself
            assert f"Node {certifier.holder.name} is not used" in found.reason

    played(tmp_path, scenario)


def test_a_donor_of_other_bytes_is_dropped_and_another_one_takes_its_place(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        root = certifier.save(1)
        certifier.certify(root)
        liar = next(node for node in world.nodes if node.held == (0,) and node is not certifier.holder)
        assert liar.stage is not None
        liar.stage.outer_step = 7
        liar.stage.save()
        generation = liar.stage.newest()
        assert generation is not None
        claimed = [KeptState(replace(generation, outer_step=1), root)]
        liar.stage.states = lambda: claimed  # type: ignore[method-assign]
        found = await collected(world, certifier, out)
        assert isinstance(found, CollectedStage)
        assert (found.root, anchor_in(out)) == (root, 1.0)

    played(tmp_path, scenario, (0, 0, 1, 2))


class CountedRequests:
    """Counts the chunks that arrive at a node; after `most` of them its line is dead."""

    def __init__(self, swarm: StageSwarm, most: int) -> None:
        self._swarm = swarm
        self.most = most
        self.chunks = list[int]()

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        answer = await self._swarm.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)
        if frame.kind == CHUNK:
            if len(self.chunks) == self.most:
                await anyio.sleep_forever()
            self.chunks.append(frame.read(ChunkRequest).index)
        return answer


def test_an_interrupted_download_continues_with_the_chunks_that_are_missing(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        certifier.certify(certifier.save(1))
        node = await joined(world, certifier)
        counted = CountedRequests(node.swarm, most=3)
        node.swarm.asking = ReplicaClient(counted, offload=at_once)
        with anyio.move_on_after(30):  # the process is killed
            await collected(world, certifier, out)
        assert len(counted.chunks) == 3
        counted.most = 100
        found = await collected(world, certifier, out)
        assert isinstance(found, CollectedStage)
        assert anchor_in(out) == 1.0
        layout = snapshot_layout(LARGE, node.swarm.plan[0])
        outer = layout.chunks_of(OUTER_TENSORS, CHUNK_BYTES)
        assert 3 < len(outer) < len(range(0, layout.file_bytes, CHUNK_BYTES))
        assert sorted(set(counted.chunks)) == sorted(outer)  # and nothing of the moments
        first, *others = sorted(outer)  # the first one begins with moments, which change at every step
        assert all(counted.chunks.count(index) == 1 for index in others)
        assert counted.chunks.count(first) <= 2

    played(tmp_path, scenario)


def test_a_folder_is_for_one_moment_and_a_damaged_state_is_fetched_again(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        certifier.certify(certifier.save(1))
        wanted = CollectedStates(world.offer.run_id)
        found = await collected(world, certifier, out, wanted)
        assert isinstance(found, CollectedStage)
        record_of(out).write(wanted.with_stage(found))
        assert begin_collection(out, wanted).stages == (found,)
        with pytest.raises(UsageError, match="is for other states"):
            begin_collection(out, CollectedStates(world.offer.run_id, at=EPOCH))
        (stage,) = saved_stages(search_stage_folders(out))
        data = bytearray(stage.tensor_file.read_bytes())
        data[-1] ^= 1
        stage.tensor_file.write_bytes(data)
        assert begin_collection(out, wanted).stages == ()
        with suppress(FileNotFoundError):
            (out / "assembly.json").unlink()
        with pytest.raises(UsageError, match="is not empty"):
            begin_collection(out, wanted)

    played(tmp_path, scenario)


def test_a_value_with_entries_only_does_not_make_a_state_younger(tmp_path: Path) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, _out: Path) -> None:
        first = certifier.certify("1" * 64)
        await anyio.sleep(5)
        chain = certifier.chain
        step = Step(world.offer.run_id, 0, 1, "1" * 64, "terms", chain.standing, chain.ledger, chain.owner)
        value = step.completed(structs.replace(step.first_value(), outer_step=1))
        vote = signed_by(certifier.holder.identity, Vote(step.id, 0, Phase.COMMIT, value.digest), now())
        chain = chain.extended(Quorum(value, 0, Phase.COMMIT, (vote,)))
        (state,) = certified_states(chain).values()
        assert state.certificate == first

    played(tmp_path, scenario)


def test_an_archive_keeps_a_state_of_each_interval_and_stops_at_the_owners_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: StageWorld, certifier: Certifier, out: Path) -> None:
        store = certifier.stage.store
        archivist = Archivist(store, certifier.stage.identity.layers, every=3, offload=at_once)
        archive = StageArchive.of(store)
        for step in range(1, 8):
            root = certifier.save(step)
            archivist.look(certifier.chain)
            assert archive.newest() < step  # without a certificate
            certifier.certify(root)
            archivist.look(certifier.chain)
        assert [state.generation.outer_step for state in archive.states()] == [6, 3]
        certifier.holder.swarm.donor.archive(certifier.holder.swarm.name_of(0), archive)
        found = await collected(world, certifier, out, CollectedStates(world.offer.run_id, outer_step=3))
        assert isinstance(found, CollectedStage)
        assert (found.outer_step, anchor_in(out)) == (3, 3.0)
        for step in (8, 9):
            certifier.certify(certifier.save(step))
        store.change_limits(StorageLimits(all_bytes=used_bytes(store.folder), counted=(store.folder,)))
        for _ in range(2):
            archivist.look(certifier.chain)
        assert archive.newest() == 6
        assert caplog.text.count("Nothing is archived now") == 1

    played(tmp_path, scenario)
