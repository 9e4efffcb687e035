from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.network import PeerRefusedError, ScoreReason
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.download import PartialFile
from neuroshard.state.receiver import StateReceiver
from neuroshard.state.replica_status import query_statuses
from neuroshard.state.transfer_messages import (
    ANY_AGE,
    DonorError,
    LyingDonorError,
    StageName,
    chunk_count,
    chunk_digest,
    chunk_limits,
    chunk_request,
)
from neuroshard.types import LayerRange, NodeId
from tests.worlds.checkpoints import FILE, HERE, NAME, NOW, DonorNode, World, donor_node, play

CHUNKS = chunk_count(FILE.layout.file_bytes)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def partial_in(folder: Path) -> PartialFile:
    return PartialFile(folder / "incoming.part", FILE.layout.file_bytes)


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def saved_file(folder: Path, step: int = 40) -> bytes:
    return (folder / f"step-{step}.safetensors").read_bytes()


def receivers(world: World) -> list[StateReceiver]:
    """Three nodes that take states over."""
    askings = [replace(world.receiver.asking, requester=world.network.join(NodeId(name))) for name in "xyz"]
    return [replace(world.receiver, asking=asking) for asking in askings]


def test_a_donor_makes_a_snapshot_when_somebody_needs_one(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    calls: list[float] = []

    def want() -> float:
        calls.append(anyio.current_time())
        if anyio.current_time() >= 2 and not list((tmp_path / "a").glob("step-*.json")):
            donor.save(7)  # its next step
        return 0.0

    donor.replica.want = want  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        assert (await world.receiver.manifest(A, 30.0)).meta.step == 7
        assert 2 <= anyio.current_time() < 4
        before = len(calls)
        await anyio.sleep(60)
        old = await world.receiver.manifest(A, 30.0)  # a newer one does not come: better this one than none
        assert old.age_seconds == pytest.approx(anyio.current_time() - 2, abs=2)
        assert len(calls) > before

    play(scenario, donor)


def test_nobody_waits_for_a_snapshot_that_the_write_budget_does_not_allow_soon(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(7)
    donor.replica.want = lambda: 100.0  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        await anyio.sleep(60)
        began = anyio.current_time()
        assert (await world.receiver.manifest(A, 30.0)).meta.step == 7
        assert anyio.current_time() - began < 1

    play(scenario, donor)


def test_a_donor_makes_a_snapshot_of_the_outer_step_it_stands_at(compute: ComputeThread, tmp_path: Path) -> None:
    """One of an earlier step is young, and yet its receiver would stand behind the line again."""
    donor = donor_node(compute, tmp_path, "a", weights=1, outer=3)
    donor.save(7)

    def want() -> float:
        donor.save(8)
        return 0.0

    donor.replica.want = want  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        donor.outer.replace_state(replace(donor.outer.state, outer_step=4))
        assert (await world.receiver.manifest(A, 30.0)).meta.outer_step == 3  # made just now: not one after another
        await anyio.sleep(6)
        assert (await world.receiver.manifest(A, ANY_AGE)).meta.outer_step == 3
        assert (await world.receiver.manifest(A, 30.0)).meta.outer_step == 4
        await anyio.sleep(6)
        assert (await world.receiver.manifest(A, 30.0)).age_seconds == pytest.approx(6, abs=1)  # no round since

    play(scenario, donor)


def test_a_donor_without_a_snapshot_says_so(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.replica.want = lambda: 0.0  # type: ignore[method-assign]

    async def scenario(world: World) -> None:
        with pytest.raises(DonorError, match="no snapshot of this stage yet"):
            await world.receiver.manifest(A, 30.0)
        assert not world.reports

    play(scenario, donor)


async def ask_for_a_chunk(receiver: StateReceiver) -> None:
    """And no more."""
    told = await receiver.manifest(A, 30.0)
    request = chunk_request(receiver.file.stage, told.snapshot, 0)
    await receiver.asking.ask(A, request, chunk_limits(0, told.file_bytes), 30.0)


def test_no_more_receivers_than_allowed_and_who_has_fetched_or_is_gone_makes_room_at_once(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        x, y, z = receivers(world)
        told = await x.manifest(A, 30.0)
        await y.manifest(A, 30.0)
        with pytest.raises(DonorError, match="Others fetch"):
            await z.manifest(A, 30.0)
        await x.fetch(A, {A: told}, partial_in(tmp_path / "x"))  # they are not disturbed
        await x.report_received([A])
        await z.manifest(A, 1000.0)
        with pytest.raises(DonorError, match="Others fetch"):
            await x.manifest(A, 30.0)
        donor.donor.keep_only({NodeId("x"), NodeId("y")})
        await x.manifest(A, 30.0)

    play(scenario, donor)


def test_a_receiver_in_the_middle_of_its_download_keeps_its_place_for_minutes(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        x, y, z = receivers(world)
        for one in (x, y):
            await ask_for_a_chunk(one)
        await anyio.sleep(170)
        with pytest.raises(DonorError, match="Others fetch"):
            await z.manifest(A, 1000.0)
        await anyio.sleep(20)
        await z.manifest(A, 1000.0)

    play(scenario, donor)


def test_a_donor_knows_who_takes_its_state_over_and_who_only_keeps_it(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        told = await world.receiver.manifest(A, 30.0)
        await world.receiver.fetch(A, {A: told}, partial_in(tmp_path / "x"))
        await world.receiver.report_received([A])
        await anyio.sleep(60)
        assert donor.donor.receivers == {HERE}
        await world.receiver.manifest(A, 1000.0)
        await world.receiver.report_copied(A, NOW)
        assert donor.donor.receivers == {HERE}  # a copy does not end the wait for the same node
        await anyio.sleep(130)
        assert not donor.donor.receivers  # it did not come
        await world.receiver.manifest(A, 1000.0)
        await world.receiver.report_copied(A, NOW)
        assert not donor.donor.receivers

    play(scenario, donor)


def test_a_copy_that_failed_makes_room_at_once(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        told = await world.receiver.manifest(A, 30.0)
        await world.receiver.fetch(A, {A: told}, partial_in(tmp_path / "x"))
        assert donor.donor.receivers == {HERE}
        await world.receiver.report_copied(A, None)
        assert not donor.donor.receivers
        assert (await query_statuses(world.receiver.asking, NAME, [A]))[A].copied_seconds is None

    play(scenario, donor)


def test_who_asks_and_fetches_nothing_makes_room_soon(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        x, y, z = receivers(world)
        await ask_for_a_chunk(x)
        await y.manifest(A, 30.0)
        await anyio.sleep(31)
        await z.manifest(A, 1000.0)  # in the place of y: x has begun to fetch and may go on
        with pytest.raises(DonorError, match="Others fetch"):
            await y.manifest(A, 1000.0)

    play(scenario, donor)


def test_snapshots_that_nobody_reads_are_let_go_and_read_ones_outlive_their_deletion(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(39)
    donor.save(40)

    async def scenario(world: World) -> None:
        first = await world.receiver.manifest(A, 30.0)
        for step in (41, 42, 43, 44):
            donor.save(step)  # step 40 is deleted: three are kept, and the first one of the outer step
        assert not (tmp_path / "a/step-40.safetensors").exists()
        await world.receiver.fetch(A, {A: first}, partial_in(tmp_path / "here"))
        await anyio.sleep(200)
        await world.receiver.manifest(A, 1000.0)
        with pytest.raises(PeerRefusedError, match="was deleted"):
            await world.transport.request(A, chunk_request(NAME, first.snapshot, 0), timeout_seconds=5)

    play(scenario, donor)


@pytest.mark.parametrize("index", [CHUNKS, 10**9, -1, "0", None, True])
def test_requests_for_chunks_that_do_not_exist_are_refused(compute: ComputeThread, tmp_path: Path, index: int) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        with pytest.raises(PeerRefusedError):
            await world.transport.request(A, chunk_request(NAME, manifest.snapshot, index), timeout_seconds=5)

    play(scenario, donor)


def test_a_full_disk_is_told_and_what_came_stays(compute: ComputeThread, tmp_path: Path) -> None:
    from neuroshard.errors import StorageError

    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    class FullFile(PartialFile):
        def write(self, index: int, data: bytes | memoryview) -> None:
            if index >= CHUNKS // 2:
                raise StorageError("The disk is full.")
            super().write(index, data)

    async def scenario(world: World) -> None:
        manifest = await world.receiver.manifest(A, 30.0)
        with pytest.raises(StorageError, match="full"):
            await world.receiver.fetch(A, {A: manifest}, FullFile(tmp_path / "part", FILE.layout.file_bytes))
        held = PartialFile(tmp_path / "part", FILE.layout.file_bytes).held(manifest.digests)
        assert len(held) == CHUNKS // 2
        assert not world.reports

    play(scenario, donor)


def test_a_stranger_gets_nothing_which_is_counted_and_a_newcomer_gets_it_once_it_is_known(
    compute: ComputeThread, tmp_path: Path
) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)
    donor.strangers.add(HERE)

    async def scenario(world: World) -> None:
        snapshot = (await donor.donor.own_manifest(NAME)).snapshot
        with pytest.raises(DonorError, match="serves only members of the run"):
            await world.receiver.manifest(A, 30.0)
        with pytest.raises(PeerRefusedError, match="serves only members of the run"):
            await world.transport.request(A, chunk_request(NAME, snapshot, 0), timeout_seconds=5)
        with pytest.raises(DonorError, match="serves only members of the run"):
            await world.receiver.report_copied(A, NOW)
        assert donor.reports == [(HERE, ScoreReason.STRANGER)] * 3
        assert (await query_statuses(world.receiver.asking, NAME, [A]))[A].copied_seconds is None
        donor.strangers.clear()
        told = await world.receiver.manifest(A, 30.0)
        received = await world.receiver.fetch(A, {A: told}, partial_in(tmp_path / "here"))
        assert content_of(received.path) == saved_file(tmp_path / "a")

    play(scenario, donor)


def test_a_holder_learns_of_its_second_copy(compute: ComputeThread, tmp_path: Path) -> None:
    donor = donor_node(compute, tmp_path, "a", weights=1)
    donor.save(40)

    async def scenario(world: World) -> None:
        asking = world.receiver.asking
        assert (await query_statuses(asking, NAME, [A]))[A].copied_seconds is None
        await world.receiver.report_copied(A, NOW - 20)
        await world.receiver.report_copied(A, NOW - 50)  # an older one
        await anyio.sleep(5)
        assert (await query_statuses(asking, NAME, [A]))[A].copied_seconds == pytest.approx(25)
        await world.receiver.report_copied(A, NOW + 1e9)  # from the future: as of now
        assert (await query_statuses(asking, NAME, [A]))[A].copied_seconds == 0

    play(scenario, donor)


def averaging(compute: ComputeThread, folder: Path, *, replicas: int) -> DonorNode:
    """A donor whose group averages gradients, with 8 of the 10 sequences that a step takes."""
    donor = donor_node(compute, folder, "a", weights=1, peers=[NodeId(str(number)) for number in range(1, replicas)])
    donor.save(40)
    parameters = OuterOptimization(strategy="averaging", aggregator="mean", averaged_sequences=10)
    run = replace(donor.outer.parameters, outer=parameters)
    donor.outer._versions = lambda _: run
    return donor


def test_a_state_that_the_next_step_changes_is_given_after_that_step(compute: ComputeThread, tmp_path: Path) -> None:
    donor = averaging(compute, tmp_path, replicas=2)

    async def scenario(world: World) -> None:
        with pytest.raises(DonorError, match="step soon; try again after that"):
            await world.receiver.manifest(A, 30.0)
        assert not donor.donor.receivers  # nobody waits for who has nothing yet
        donor.outer.progress = replace(donor.outer.progress, sequences=0)
        told = await world.receiver.manifest(A, 30.0)
        donor.outer.progress = replace(donor.outer.progress, sequences=5)
        again = await world.receiver.manifest(A, 30.0, told.snapshot)  # goes on with what it has begun
        assert again.snapshot == told.snapshot
        received = await world.receiver.fetch(A, {A: told}, partial_in(tmp_path / "here"))
        assert content_of(received.path) == saved_file(tmp_path / "a")
        assert (donor.reports, world.reports) == ([], [])

    play(scenario, donor)


def test_nobody_is_put_off_for_long_by_a_step_that_does_not_come(compute: ComputeThread, tmp_path: Path) -> None:
    """It may be waiting for the one who asks."""
    donor = averaging(compute, tmp_path, replicas=2)

    async def scenario(world: World) -> None:
        began, x = anyio.current_time(), receivers(world)[0]
        for receiver in (world.receiver, x):
            with pytest.raises(DonorError, match="step soon"):
                await receiver.manifest(A, 30.0)
            await anyio.sleep(20)
        with pytest.raises(DonorError, match="step soon"):
            await world.receiver.manifest(A, 30.0)
        await anyio.sleep_until(began + 60)
        await world.receiver.manifest(A, 30.0)
        with pytest.raises(DonorError, match="step soon"):  # each by itself
            await x.manifest(A, 30.0)

    play(scenario, donor)


def test_who_wants_several_stages_is_put_off_with_each_for_a_minute(compute: ComputeThread, tmp_path: Path) -> None:
    donor = averaging(compute, tmp_path, replicas=2)
    other = StageName(NAME.run_id, LayerRange(0, 1))
    donor.donor.offer(other, donor.replica)

    async def scenario(world: World) -> None:
        receiver, of_other = world.receiver, replace(world.receiver, file=replace(FILE, stage=other))
        with pytest.raises(DonorError, match="step soon"):
            await receiver.manifest(A, 30.0)
        await anyio.sleep_until(30)
        with pytest.raises(DonorError, match="step soon"):
            await of_other.manifest(A, 30.0)
        await anyio.sleep_until(61)
        await receiver.manifest(A, 30.0)
        with pytest.raises(DonorError, match="step soon"):  # its minute has half passed
            await of_other.manifest(A, 30.0)
        await anyio.sleep_until(91)
        with pytest.raises(LyingDonorError):  # given, with what lies here of the first one
            await of_other.manifest(A, 30.0)

    play(scenario, donor)


def test_a_lone_replica_puts_nobody_off(compute: ComputeThread, tmp_path: Path) -> None:
    donor = averaging(compute, tmp_path, replicas=1)

    async def scenario(world: World) -> None:
        assert (await world.receiver.manifest(A, 30.0)).meta.step == 40

    play(scenario, donor)


def test_a_chunk_has_the_digest_that_every_machine_computes() -> None:
    assert chunk_digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # BLAKE3
