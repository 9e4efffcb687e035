"""Copies of stages with one holder, and what happens when that holder is lost."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import anyio
import pytest
from stage_world import StageNode, StageWorld, now, play

from neuroshard.network import Link
from neuroshard.node.copy_duty import CopyTimes, copy_is_due
from neuroshard.node.copy_order import RANKS, rank_of
from neuroshard.node.joining import candidates
from neuroshard.node.stage_copies import StageCopies
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.status.snapshot import NodeState
from neuroshard.swarm.claim_reading import Statement
from neuroshard.training.transfer.kept_copy import KeptCopy
from neuroshard.types import NodeId, WalletId


@asynccontextmanager
async def living(
    world: StageWorld, stages: Sequence[int | None], *, moves: bool = True
) -> AsyncGenerator[list[StageNode]]:
    """Nodes that begin with these stages, while the world trains."""
    nodes = [world.add() for _ in stages]
    async with anyio.create_task_group() as tasks:
        world.tasks = tasks
        tasks.start_soon(world.train)
        for node, stage in zip(nodes, stages, strict=True):
            tasks.start_soon(lambda node=node, stage=stage: node.live(stage, moves=moves))
        yield nodes
        tasks.cancel_scope.cancel()


async def until_held(world: StageWorld, stage: int) -> float:
    """Seconds until somebody trains the stage."""
    began = anyio.current_time()
    while not world.holders(stage):
        await anyio.sleep(0.5)
    return anyio.current_time() - began


def copies_of(nodes: Sequence[StageNode], stage: int) -> list[KeptCopy]:
    return [node.copies.kept(stage) for node in nodes if node.copies.kept(stage).meta is not None]


def steps_of(node: StageNode) -> int:
    assert node.stage is not None
    return node.stage.steps


def test_a_lost_stage_is_taken_over_from_its_copy(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0]) as (first, _second, third, spare):
            await anyio.sleep(100)
            assert steps_of(third) > 80
            age = third.stage.standing().copied_seconds  # type: ignore[union-attr]
            assert age is not None
            assert age < 45
            steps = steps_of(third)
            third.kill()
            assert await until_held(world, 2) < 30
            (taker,) = world.holders(2)
            assert taker in (first, spare)
            assert steps - 45 <= taker.began_steps[-1] <= steps
            await anyio.sleep(60)
            assert steps_of(taker) > taker.began_steps[-1] + 40

    play(tmp_path, scenario)


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
            age = holder.stage.standing().copied_seconds  # type: ignore[union-attr]
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
            assert one.stage.standing().line == other.stage.standing().line  # type: ignore[union-attr]

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
            assert watcher.swarm.missing() == "Layer 3 is missing. Nobody who answers has their state."
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
            assert "were trained, but nobody who answers has them" in newcomer.told[-1]
            back = world.add_again(nodes[2])
            world.tasks.start_soon(lambda: back.live(2, moves=False))
            await anyio.sleep(40)
            assert newcomer.stage is not None
            assert newcomer.began_steps[-1] > 40

    play(tmp_path, scenario)


def test_a_newcomer_begins_where_the_others_are(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False):
            await anyio.sleep(100)
            newcomer = world.add()
            world.tasks.start_soon(lambda: newcomer.live(1, moves=False))
            await anyio.sleep(25)
            assert newcomer.began_steps[0] > 60

    play(tmp_path, scenario)


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
            age = nodes[2].stage.standing().copied_seconds  # type: ignore[union-attr]
            assert age is not None
            assert 10 < age < 120  # older than over a good line, and told

    play(tmp_path, scenario)


def test_no_copy_is_kept_beyond_what_the_owner_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for node in nodes:
                node.allow_megabytes(1)
            await anyio.sleep(60)
            assert not [copy for stage in range(3) for copy in copies_of(nodes, stage)]

    play(tmp_path, scenario)
    told = [record.message for record in caplog.records if "No copy of layers" in record.message]
    assert told
    assert len(told) <= 6  # once for each stage at each node, not every few seconds


def hear_of_trainers(node: StageNode, count: int) -> None:
    """Nodes that drive and hold no layers, of as many wallets."""
    for number in range(count):
        name = NodeId(f"trainer {number}")
        report = replace(node.own_report(), layers=None, roles=(), state=NodeState.TRAINING)
        node.membership.hear_report(Statement(name, WalletId(f"{number:016x}"), now(), now() + 1e6, report), now())


def test_trainers_keep_no_copies_and_are_in_nobodys_way(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(0.5)
            for node in nodes:
                hear_of_trainers(node, 60)
            await anyio.sleep(20)
            assert all(len(copies_of(nodes, stage)) == 1 for stage in range(3))
            (keeper,) = [node for node in nodes if node.copies.kept(2).meta is not None]
            newcomer = next(node for node in nodes if node not in (keeper, nodes[2]))
            assert keeper.name in candidates(newcomer.swarm, newcomer.swarm.plan[2])

    play(tmp_path, scenario)


@pytest.mark.parametrize("others", [1, 3, 30])
def test_whoever_keeps_a_copy_is_asked_for_it_by_those_who_never_heard_of_its_holder(
    tmp_path: Path, others: int
) -> None:
    async def scenario(world: StageWorld) -> None:
        await anyio.lowlevel.checkpoint()
        asker = world.add()
        layers = asker.swarm.plan[0]
        report = replace(asker.own_report(), layers=asker.swarm.plan[1], state=NodeState.TRAINING)
        owners = [WalletId("a" * 16)] * 40 + [WalletId("b" * 16)] * others  # one owner has most computers
        members = {NodeId(f"node {number}"): owner for number, owner in enumerate(owners)}
        for name, wallet in members.items():
            asker.membership.hear_report(Statement(name, wallet, now(), now() + 1e6, report), now())
        asked = candidates(asker.swarm, layers)
        holder = NodeId("node 0")
        ranks = {name: rank_in(asker.swarm, 0, holder, name) for name in members if name != holder}
        assert {name for name, rank in ranks.items() if rank < RANKS} <= set(asked)

    play(tmp_path, scenario)


def rank_in(swarm: StageSwarm, stage: int, holder: NodeId, name: NodeId) -> int:
    """As that node finds it, which does not count the asker: it holds nothing."""
    node_id, wallet_id = swarm.node_id, swarm.wallet_id
    swarm.node_id, swarm.wallet_id = name, swarm.membership.view.members[name].wallet_id
    try:
        return rank_of(swarm, stage, holder)
    finally:
        swarm.node_id, swarm.wallet_id = node_id, wallet_id


def test_a_copy_is_not_overwritten_by_less_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(60)
            holder = nodes[2].stage
            assert holder is not None
            (keeper,) = [node for node in nodes if node.copies.kept(2).meta is not None]
            kept = keeper.copies.kept(2).meta.step  # type: ignore[union-attr]
            shutil.rmtree(holder.store.folder)
            holder.steps = 3  # it went back, and nobody told it of the copy
            holder.save()
            await anyio.sleep(35)
            assert keeper.copies.kept(2).meta.step == kept  # type: ignore[union-attr]
            assert "has more steps than node" in caplog.text
            await anyio.sleep(60)
            assert keeper.copies.kept(2).meta.step > kept  # type: ignore[union-attr]

    play(tmp_path, scenario)


def test_a_copy_that_does_not_come_holds_no_other_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull = StageCopies.__dict__["_pull"]

    async def slow_for_one(copies: StageCopies, duty: Any, holder: NodeId) -> None:
        if duty.stage.layers.start == 0:
            await anyio.sleep_forever()
        await pull(copies, duty, holder)

    monkeypatch.setattr(StageCopies, "_pull", slow_for_one)

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(100)
            assert copies_of(nodes, 0) == []
            assert len(copies_of(nodes, 1)) == len(copies_of(nodes, 2)) == 1

    play(tmp_path, scenario)


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_copies_are_renewed_whatever_the_clocks_say(tmp_path: Path, ahead: float) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            nodes[2].clock_is_ahead = ahead
            await anyio.sleep(120)
            (copy,) = copies_of(nodes, 2)
            age = copy.age_seconds
            assert age is not None
            assert 0 < age < 45
            assert steps_of(nodes[2]) - copy.meta.step < 45  # type: ignore[union-attr]

    play(tmp_path, scenario)


def test_when_a_copy_is_due() -> None:
    times = CopyTimes()
    assert copy_is_due(times, 0, None, single_seconds=0, waited=None)
    assert not copy_is_due(times, 0, None, single_seconds=5, waited=4)
    assert copy_is_due(times, 0, None, single_seconds=5, waited=5)
    assert not copy_is_due(times, 0, 29, single_seconds=500, waited=None)
    assert copy_is_due(times, 0, 30, single_seconds=500, waited=30)
    assert not copy_is_due(times, 0, 30, single_seconds=500, waited=29)
    assert not copy_is_due(times, 1, None, single_seconds=19, waited=None)
    assert copy_is_due(times, 1, None, single_seconds=20, waited=None)
    assert not copy_is_due(times, 1, None, single_seconds=60, waited=29)
    assert not copy_is_due(times, 4, None, single_seconds=1e6, waited=None)
