"""Who keeps copies of stages with one holder, and that a copy only ever gets better."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from neuroshard.membership.claim_intake import Statement
from neuroshard.node.joining import candidates
from neuroshard.node.pipeline_status import pipeline_status
from neuroshard.node.stage_copies import RANKS, CopyTimes, StageCopies, rank_of
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.status.pipeline import StateCopyStatus
from neuroshard.status.snapshot import NodeState
from neuroshard.types import NodeId, WalletId
from tests.worlds.nodes import StageNode, StageWorld, copies_of, living, now, play, steps_of


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


def test_everybody_tells_how_old_the_second_copy_of_each_stage_is(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for node in nodes:
                node.copies.times = CopyTimes(ranks=0)
            await anyio.sleep(25)
            none_yet = [pipeline_status(node.swarm, node.state).stages for node in nodes]
            assert [[stage.copy for stage in stages] for stages in none_yet] == [[StateCopyStatus(None)] * 3] * 3
            for node in nodes:
                node.copies.times = CopyTimes()
            await anyio.sleep(70)  # a look after the renewal
            for node in nodes:
                for stage, holder in zip(pipeline_status(node.swarm, node.state).stages, nodes, strict=True):
                    assert holder.stage is not None
                    assert stage.copy is not None
                    assert stage.copy.age_seconds == pytest.approx(holder.stage.replica_status().copied_seconds, abs=12)

    play(tmp_path, scenario)


def test_stages_that_several_hold_or_nobody_need_no_word_of_copies(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 0, 1], moves=False) as nodes:
            await anyio.sleep(25)
            copies = [stage.copy for stage in pipeline_status(nodes[0].swarm, nodes[0].state).stages]
            assert copies == [None, StateCopyStatus(None), None]

    play(tmp_path, scenario)


def test_whoever_would_not_go_for_a_lost_stage_knows_as_well_that_nobody_has_its_state(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for node in nodes:
                node.copies.times = CopyTimes(ranks=0)
            await anyio.sleep(40)
            nodes[2].kill()
            await anyio.sleep(40)
            assert nodes[0].swarm.missing() == "Layer 3 is missing. No node that answers has their state."
            back = world.add_again(nodes[2])
            world.tasks.start_soon(lambda: back.live(2, moves=False))
            await anyio.sleep(20)
            back.kill()
            await anyio.sleep(8)  # lost again: what was true of the last time is forgotten
            assert "Nobody" not in nodes[0].swarm.missing()

    play(tmp_path, scenario)
