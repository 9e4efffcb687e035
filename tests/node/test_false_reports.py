"""Nodes that report layers which they do not hold, or get ready without end: neither stops a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio

from neuroshard.membership.holder_health import PATIENCE_SECONDS
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.messages import Frame
from neuroshard.network import RequestRefusedError, ScoreReason
from neuroshard.status.snapshot import NodeState
from neuroshard.types import NodeId
from tests.worlds.nodes import StageNode, StageWorld, copies_of, living, play


def report_only(node: StageNode, stage: int, state: NodeState) -> None:
    """It has nothing of the stage."""
    node.wanted, node.state = StageRange(stage, stage + 1), state
    node.speak()


async def no_answer(_sender: NodeId, _frame: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    raise RequestRefusedError("Not now.")


async def pretender(world: StageWorld, stage: int, state: NodeState, *, answers: bool = True) -> StageNode:
    node = world.add()
    # A copy that it fetched before its first lie would be as good as the one of an honest node, which then keeps none.
    node.copies.times = replace(node.copies.times, ranks=0)
    if not answers:
        node.swarm.donor.give_status = no_answer  # type: ignore[method-assign]
    world.tasks.start_soon(lambda: node.live(None, moves=False))
    await anyio.sleep(0.5)
    report_only(node, stage, state)
    return node


def test_a_stage_that_a_node_only_says_it_holds_is_filled_by_another_one(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 0]) as nodes:
            liar = await pretender(world, 2, NodeState.TRAINING)
            await anyio.sleep(10)
            assert nodes[0].swarm.missing() == ""  # by the word of the liar
            await anyio.sleep(80)
            assert any(node is not liar for node in world.holders(2))
            assert nodes[0].blamed == [(liar.name, ScoreReason.FALSE_REPORT)]
            await anyio.sleep(100)  # in which it goes on reporting
            assert liar.name not in nodes[0].swarm.workers(2)
            assert nodes[0].swarm.coverage().replicas == (1, 1, 1)

    play(tmp_path, scenario)


def test_who_reports_and_answers_no_question_holds_no_stage_up(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 0]) as nodes:
            mute = await pretender(world, 2, NodeState.TRAINING, answers=False)
            await anyio.sleep(60)
            assert any(node in nodes for node in world.holders(2))
            counted = 0
            for _ in range(240):
                await anyio.sleep(1)
                counted += mute.name in nodes[0].swarm.workers(2)
            assert counted <= 10  # it is asked again after one, two and four minutes
            assert mute.name in nodes[0].swarm.membership.view.members  # it has reported all the time
            assert not nodes[0].blamed  # it may be this node's line

    play(tmp_path, scenario)


def test_who_answers_again_is_counted_again(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(15)
            for _ in range(3):
                world.network.partition([nodes[2].name], [node.name for node in nodes[:2]])
                world.cut_off = {nodes[2]}
                await anyio.sleep(40)
                assert nodes[2].name not in nodes[0].swarm.workers(2)
                world.network.partition()
                world.cut_off = set()
                await anyio.sleep(15)
                assert nodes[2].name in nodes[0].swarm.workers(2)

    play(tmp_path, scenario)


def test_a_false_replica_does_not_end_the_second_copy(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await pretender(world, 2, NodeState.TRAINING)
            await anyio.sleep(15)
            assert nodes[0].swarm.coverage().replicas[2] == 2
            assert nodes[0].swarm.sole_holder(2) == nodes[2].name
            await anyio.sleep(105)  # it may come first in the order of keepers
            assert copies_of(nodes, 2)

    play(tmp_path, scenario)


def test_many_false_replicas_do_not_end_it_either(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            for _ in range(5):
                await pretender(world, 2, NodeState.TRAINING)
            await anyio.sleep(120)  # false replicas may come first in the order of keepers
            assert nodes[0].swarm.sole_holder(2) == nodes[1].swarm.sole_holder(2) == nodes[2].name
            assert copies_of(nodes, 2)

    play(tmp_path, scenario)


def test_a_node_that_was_asked_on_its_way_to_other_stages_is_believed(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0], moves=False) as nodes:
            await anyio.sleep(30)
            for stage in (1, 2, 1):
                await nodes[3].take(stage)
                report_only(nodes[3], 0, NodeState.TRAINING)  # an old report, which is heard late
                await anyio.sleep(8)
                nodes[3].wanted = StageRange(stage, stage + 1)
                nodes[3].speak()
                await anyio.sleep(8)
            assert nodes[3].name in nodes[0].swarm.workers(1)
            assert not nodes[0].blamed

    play(tmp_path, scenario)


def test_a_node_that_gets_ready_without_end_is_passed_over(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 0]) as nodes:
            slow = await pretender(world, 2, NodeState.STARTING)
            await anyio.sleep(PATIENCE_SECONDS / 2)
            assert not any(node in nodes for node in world.holders(2))
            await anyio.sleep(PATIENCE_SECONDS / 2 + 60)
            assert any(node in nodes for node in world.holders(2))
            assert slow.name in nodes[0].swarm.membership.view.members

    play(tmp_path, scenario)


def test_a_node_that_gets_further_over_a_slow_line_is_waited_for(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 0]) as nodes:
            slow = await pretender(world, 2, NodeState.STARTING)
            for percent in (1, 2, 3):
                await anyio.sleep(PATIENCE_SECONDS * 0.9)
                slow.swarm.note_ready(percent)
            assert not any(node in nodes for node in world.holders(2))

    play(tmp_path, scenario)
