"""Copies of stages with one holder, and what happens when that holder is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import anyio
import pytest

from neuroshard.config.run_parameters import InnerOptimization, InnerOptimizerName
from neuroshard.errors import StorageError
from neuroshard.network import Link
from neuroshard.node.stage_copies import CopyTimes, copy_is_due
from neuroshard.state.backup_copy import BackupCopy
from tests.worlds.nodes import StageWorld, copies_of, living, play, steps_of, until_held


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_lost_stage_is_taken_over_from_its_copy(tmp_path: Path, optimizer: InnerOptimizerName) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0]) as (first, _second, third, spare):
            await anyio.sleep(100)
            assert steps_of(third) > 80
            for _ in range(40):
                await anyio.sleep(1)
                age = third.stage.replica_status().copied_seconds  # type: ignore[union-attr]
                assert age is not None
                assert age <= 30
            steps = steps_of(third)
            third.kill()
            assert await until_held(world, 2) < 30
            (taker,) = world.holders(2)
            assert taker in (first, spare)
            assert steps - 31 <= taker.began_steps[-1] <= steps
            await anyio.sleep(60)
            assert steps_of(taker) > taker.began_steps[-1] + 40

    play(tmp_path, scenario, inner=InnerOptimization(optimizer=optimizer))


def test_the_first_copy_is_made_with_the_first_steps(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2]) as nodes:
            await anyio.sleep(8)
            assert all(len(copies_of(nodes, stage)) == 1 for stage in range(3))

    play(tmp_path, scenario)


def test_stages_that_several_nodes_hold_need_no_copy(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 0, 1, 1, 2, 2]) as nodes:
            await anyio.sleep(100)
            assert not [copy for stage in range(3) for copy in copies_of(nodes, stage)]

    play(tmp_path, scenario)


def test_when_the_keeper_is_lost_the_next_one_keeps_a_copy(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1], moves=False) as nodes:
            await anyio.sleep(60)
            (keeper,) = [node for node in nodes if node.copies.kept(2).meta is not None]
            keeper.kill()
            await anyio.sleep(130)
            holder = nodes[2]
            age = holder.stage.replica_status().copied_seconds  # type: ignore[union-attr]
            assert age is not None
            assert age < 60
            assert len(copies_of([node for node in nodes if node is not keeper], 2)) == 1

    play(tmp_path, scenario)


def test_two_that_take_over_at_once_go_on_from_the_same_state(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1], moves=False) as (_a, _b, third, one, other):
            await anyio.sleep(100)
            third.kill()
            await anyio.sleep(10)
            world.tasks.start_soon(one.take, 2)
            world.tasks.start_soon(other.take, 2)
            await anyio.sleep(15)
            assert {*world.holders(2)} == {one, other}
            assert one.began_steps[-1] > 60
            assert abs(one.began_steps[-1] - other.began_steps[-1]) < 30  # who is later may have it from the first
            assert one.stage.replica_status().line == other.stage.replica_status().line  # type: ignore[union-attr]

    play(tmp_path, scenario)


def test_of_several_copies_the_one_with_most_work_counts(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1], moves=False) as nodes:
            await anyio.sleep(60)
            (keeper,) = [node for node in nodes if node.copies.kept(2).meta is not None]
            old = keeper.copies.kept(2).meta.step  # type: ignore[union-attr]
            keeper.kill()
            await anyio.sleep(130)
            nodes[2].kill()
            tasks = world.tasks
            keeper_again = world.add_again(keeper)
            tasks.start_soon(lambda: keeper_again.live(None, moves=False))
            await anyio.sleep(15)
            assert keeper_again.copies.kept(2).meta.step == old  # type: ignore[union-attr]
            taker = next(node for node in world.alive() if node not in (keeper_again, nodes[2]))
            tasks.start_soon(taker.take, 2)
            await anyio.sleep(20)
            assert taker.began_steps[-1] > old + 60

    play(tmp_path, scenario)


def test_a_stage_without_holder_and_copy_is_named_and_nobody_begins_it_anew(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0]) as nodes:
            for node in nodes:
                node.copies.times = CopyTimes(ranks=0)  # nobody keeps any
            await anyio.sleep(60)
            third, watcher = nodes[2], nodes[0]
            steps = steps_of(third)
            third.kill()
            await anyio.sleep(300)
            assert not world.holders(2)
            assert watcher.swarm.missing() == "Layer 3 is missing. No node that answers has their state."
            assert [node.stage.index for node in world.alive() if node.stage] == [0, 1, 0]  # nobody has left for it
            back = world.add_again(third)
            world.tasks.start_soon(lambda: back.live(2))
            await anyio.sleep(20)
            assert steps - 10 <= back.began_steps[-1] <= steps  # from its own disk
            assert watcher.swarm.missing() == ""

    play(tmp_path, scenario)


def test_a_newcomer_that_is_told_to_hold_a_lost_stage_waits_and_says_so(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for node in nodes:
                node.copies.times = CopyTimes(ranks=0)
            await anyio.sleep(60)
            nodes[2].kill()
            await anyio.sleep(70)
            newcomer = world.add()
            world.tasks.start_soon(lambda: newcomer.live(None, moves=False))
            await anyio.sleep(15)
            world.tasks.start_soon(newcomer.take, 2)
            await anyio.sleep(100)
            assert newcomer.stage is None
            assert "were trained, but no node that answers has them" in newcomer.told[-1]
            back = world.add_again(nodes[2])
            world.tasks.start_soon(lambda: back.live(2, moves=False))
            await anyio.sleep(80)
            assert newcomer.stage is not None
            assert newcomer.began_steps[-1] > 40

    play(tmp_path, scenario)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_newcomer_begins_where_the_others_are(tmp_path: Path, optimizer: InnerOptimizerName) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False):
            await anyio.sleep(100)
            newcomer = world.add()
            world.tasks.start_soon(lambda: newcomer.live(1, moves=False))
            await anyio.sleep(25)
            assert newcomer.began_steps[0] > 60

    play(tmp_path, scenario, inner=InnerOptimization(optimizer=optimizer))


def test_a_new_run_begins_at_once(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 1]) as nodes:
            await anyio.sleep(5)
            assert [node.began_steps for node in nodes] == [[0]] * 4

    play(tmp_path, scenario)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_nodes_start_again_from_disk_in_any_order(tmp_path: Path, order: Sequence[int]) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(60)
            steps = [steps_of(node) for node in nodes]
            for node in nodes:
                node.kill()
            again = {}
            for number in order:
                again[number] = world.add_again(nodes[number])
                world.tasks.start_soon(lambda number=number: again[number].live(number, moves=False))
                await anyio.sleep(20)
            for number, before in enumerate(steps):
                assert before - 12 <= again[number].began_steps[0] <= before
            await anyio.sleep(20)
            assert [node for node in again.values() if steps_of(node) <= node.began_steps[0]] == []

    play(tmp_path, scenario)


def test_a_holder_that_cannot_be_reached_counts_as_gone_until_it_reports_again(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as (first, second, third):
            await anyio.sleep(40)
            assert first.swarm.missing() == ""
            world.network.partition([third.name], [first.name, second.name])
            world.cut_off = {third}
            await anyio.sleep(40)
            assert first.swarm.missing() == "Layer 3 is missing."  # long before a minute of silence
            world.network.partition()
            world.cut_off = set()
            await anyio.sleep(15)
            assert first.swarm.missing() == ""

    play(tmp_path, scenario)


def test_a_copy_over_a_slow_line_leaves_half_of_it_to_others(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for node in nodes:
                for other in nodes:
                    if node is not other:
                        world.network.set_link(node.name, other.name, Link(delay_seconds=2.0))
            await anyio.sleep(200)
            age = nodes[2].stage.replica_status().copied_seconds  # type: ignore[union-attr]
            assert age is not None
            assert 10 < age < 120  # older than over a good line, and told

    play(tmp_path, scenario)


def test_no_copy_is_kept_beyond_what_the_owner_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for node in nodes:
                node.allow_megabytes(1)
            await anyio.sleep(60)
            assert not copies_of(nodes, 0) + copies_of(nodes, 2)  # 1.4 MB each; the middle stage has 0.7 MB

    play(tmp_path, scenario)
    told = [record.message for record in caplog.records if "No copy of layers" in record.message]
    assert told
    assert len(told) <= 6  # once for each stage at each node, not every few seconds


def test_a_copy_that_cannot_be_stored_keeps_no_place_at_its_donor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last write fails, and the donor would wait for three minutes."""
    tried = list[str]()

    def fail(copy: BackupCopy, *_: object) -> None:
        tried.append(copy.folder.name)
        raise StorageError("The disk is full.")

    monkeypatch.setattr(BackupCopy, "keep", fail)

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            with anyio.fail_after(120):
                while not tried:
                    await anyio.sleep(1)
            with anyio.fail_after(60):
                while any(node.swarm.donor.receivers for node in nodes):
                    await anyio.sleep(1)

    play(tmp_path, scenario)


def test_when_a_copy_is_due() -> None:
    times = CopyTimes()
    assert copy_is_due(times, 0, None, single_seconds=0, waited=None)
    assert not copy_is_due(times, 0, None, single_seconds=5, waited=4)
    assert copy_is_due(times, 0, None, single_seconds=5, waited=5)
    assert not copy_is_due(times, 0, 21, single_seconds=500, waited=None)
    assert copy_is_due(times, 0, 22, single_seconds=500, waited=5)  # the new one is here before the old one is 30 s old
    assert not copy_is_due(times, 0, 22, single_seconds=500, waited=4)
    assert not copy_is_due(times, 1, None, single_seconds=19, waited=None)
    assert copy_is_due(times, 1, None, single_seconds=20, waited=None)
    assert not copy_is_due(times, 1, None, single_seconds=60, waited=29)
    assert not copy_is_due(times, 4, None, single_seconds=1e6, waited=None)
