"""A node in an organiser's queue downloads a state, and holds up neither members nor the steps of the donor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from neuroshard.identity.admissions import AdmissionRegister, DownloadRight
from neuroshard.membership.download_rights import BUDGET_SECONDS, STATES_OF_READER, Readers
from neuroshard.network.limits import UploadPacer
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.download import PartialFile, ReceivingOptions
from neuroshard.state.receiver import StateReceiver
from neuroshard.state.snapshot_server import READER_SNAPSHOT_SECONDS
from neuroshard.state.transfer_messages import DonorError
from neuroshard.types import NodeId, WalletId
from tests.worlds.checkpoints import FILE, HERE, NAME, NOW, World, donor_node, play

A, MEMBER = NodeId("a"), NodeId("member")


class OneReader(Readers):
    """The node of the test waits for a place; all others are members."""

    def __init__(self) -> None:
        register = AdmissionRegister(NAME.run_id, lambda: ())
        super().__init__(register, lambda _: "", lambda *_: "", lambda: NOW, UploadPacer())

    def right_of(self, peer: NodeId) -> DownloadRight | None:
        if peer != HERE:
            return None
        return DownloadRight(NAME.run_id, HERE, WalletId("ab" * 16), "head-0", NAME.layers, int(NOW), int(NOW) + 300)


def reader(world: World) -> StateReceiver:
    return replace(world.receiver, options=ReceivingOptions(chunks_at_once=1))


def file_in(folder: Path) -> PartialFile:
    return PartialFile(folder / "incoming.part", FILE.layout.file_bytes)


def test_no_step_of_the_donor_waits_for_a_reader(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1, readers=OneReader())
    donor.save(40)

    async def scenario(world: World) -> None:
        manifest = await reader(world).manifest(A, 30.0)
        assert not donor.donor.receivers
        received = await reader(world).fetch(A, {A: manifest}, file_in(tmp_path))
        await reader(world).report_received([A])
        assert received.path.read_bytes() == (tmp_path / "a" / "step-40.safetensors").read_bytes()
        assert not donor.donor.receivers

    play(scenario, donor)


def test_a_reader_waits_while_a_member_downloads(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1, readers=OneReader())
    donor.save(40)

    async def scenario(world: World) -> None:
        asking = replace(world.receiver.asking, requester=world.network.join(MEMBER))
        member = replace(world.receiver, asking=asking)
        manifest = await reader(world).manifest(A, 30.0)
        await member.manifest(A, 30.0)
        with pytest.raises(DonorError, match="Members of the run fetch"):
            await reader(world).fetch(A, {A: manifest}, file_in(tmp_path))
        await member.report_copied(A, None)
        await reader(world).fetch(A, {A: manifest}, file_in(tmp_path))

    play(scenario, donor)


def test_a_reader_gets_a_state_a_few_times_in_half_an_hour(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1, readers=OneReader())
    donor.save(40)

    async def scenario(world: World) -> None:
        manifest = await reader(world).manifest(A, 30.0)
        for number in range(STATES_OF_READER):
            await reader(world).fetch(A, {A: manifest}, file_in(tmp_path / str(number)))
        with pytest.raises(DonorError, match="as much as a waiting node may"):
            await reader(world).fetch(A, {A: manifest}, file_in(tmp_path / "again"))
        await anyio.sleep(BUDGET_SECONDS)
        manifest = await reader(world).manifest(A, 1e9)
        await reader(world).fetch(A, {A: manifest}, file_in(tmp_path / "later"))

    for number in ("0", "1", "again", "later"):
        (tmp_path / number).mkdir()
    play(scenario, donor)


def test_readers_make_the_donor_save_few_states(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1, readers=OneReader())
    donor.save(40)
    wanted = list[float]()

    def want() -> float:
        if not wanted or anyio.current_time() > wanted[-1] + 30:
            wanted.append(anyio.current_time())
        return 0.0

    donor.replica.want = want  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        await anyio.sleep(60)
        for _ in range(3):
            await reader(world).manifest(A, 0.0)
        assert len(wanted) == 1
        await anyio.sleep(READER_SNAPSHOT_SECONDS)
        await reader(world).manifest(A, 0.0)
        assert len(wanted) == 2

    play(scenario, donor)
