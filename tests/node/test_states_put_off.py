"""A node that needs a state while those who have it give it to nobody asks again, and blames nobody."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.node.joining import LOOK_SECONDS, PARTIAL_NAME
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.state.download import DONOR_PATIENCE_SECONDS, LONGEST_DOUBT_SECONDS, FailedDonors
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.types import NodeId
from tests.worlds.nodes import SAVE_STEPS, StageWorld, living, play


def test_who_is_put_off_says_why_and_has_the_state_once_it_is_given(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(30)
            holder, newcomer, steps_soon = nodes[0].stage, world.add(), True
            assert holder is not None
            holder.replica_status = lambda: ReplicaStatus(True, holder.steps, holder.outer_step, "")  # type: ignore[method-assign]
            holder.may_be_taken = lambda _waited_seconds: not steps_soon
            world.tasks.start_soon(lambda: newcomer.live(0, moves=False))
            await anyio.sleep(20)
            assert newcomer.stage is None
            assert any("step soon; try again after that" in told for told in newcomer.told)
            before, steps_soon = holder.steps, False
            await anyio.sleep(10)
            assert newcomer.began_steps[0] >= before - SAVE_STEPS
            assert not newcomer.blamed

    play(tmp_path, scenario)


def test_a_state_comes_also_when_it_cannot_be_noted_which_one(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(30)
            assert nodes[0].stage is not None
            newcomer = world.add()
            layers, wallet = newcomer.swarm.plan[0], newcomer.identity.wallet_id
            folder = stage_folder(newcomer.data_dir, wallet, newcomer.swarm.run_id, layers)
            (folder / PARTIAL_NAME / "in the way").mkdir(parents=True)
            world.tasks.start_soon(lambda: newcomer.live(0, moves=False))
            await anyio.sleep(20)
            assert newcomer.stage is not None
            assert newcomer.stage.steps > 0

    play(tmp_path, scenario)


def test_a_node_with_a_state_does_not_insist_on_a_donor_that_never_delivers(tmp_path: Path) -> None:
    """A lying friend reports the newest state and refuses every download."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 0, 1, 2], moves=False) as nodes:
            await anyio.sleep(30)
            liar, away = nodes[:2]
            assert liar.stage is not None
            assert away.stage is not None
            away.stage.save()
            away.kill()
            liar.stage.outer_step = 3
            liar.stage.may_be_taken = lambda _waited_seconds: False
            again = world.add_again(away)
            world.tasks.start_soon(lambda: again.live(moves=False))
            await anyio.sleep(5)  # it has heard of the others
            seconds = list[float]()
            for pause in (1.0, DONOR_PATIENCE_SECONDS, 1.0, DONOR_PATIENCE_SECONDS, DONOR_PATIENCE_SECONDS):
                began = anyio.current_time()
                await again.take(0)  # as when its chain is ahead
                seconds.append(anyio.current_time() - began)
                assert again.stage is not None
                assert again.stage.outer_step == 0
                await anyio.sleep(pause)
            assert seconds[0] == pytest.approx(DONOR_PATIENCE_SECONDS, abs=2 * LOOK_SECONDS)
            assert max(seconds[1:]) <= LOOK_SECONDS  # one try for each doubt that ends

            liar.stage.may_be_taken = lambda _waited_seconds: True
            await anyio.sleep(LONGEST_DOUBT_SECONDS)
            await again.take(0)
            assert again.stage.outer_step == 3
            assert not again.swarm.asking.failed.doubted(anyio.current_time())

    play(tmp_path, scenario, save_steps=1000)


AVERAGED = OuterOptimization(strategy="averaging", aggregator="mean", codec="fp32", averaged_sequences=100)


@pytest.mark.parametrize("holders", [1, 2])
def test_an_averaged_state_of_a_group_is_fetched_in_a_young_step_and_that_of_a_lone_node_at_once(
    tmp_path: Path, holders: int
) -> None:
    """The steps of a lone node wait for the newcomer: each would wait for the other."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 0, 1, 2] if holders == 2 else [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(30)
            counted = 90 // holders
            for node in nodes[:holders]:
                stage = node.stage
                assert stage is not None
                stage.replica_status = lambda stage=stage: ReplicaStatus(  # type: ignore[method-assign]
                    True, stage.steps, stage.outer_step, "", sequences=counted
                )
                stage.may_be_taken = lambda _waited_seconds: True
            newcomer = world.add()
            world.tasks.start_soon(lambda: newcomer.live(0, moves=False))
            await anyio.sleep(60)
            is_put_off = any("will be downloaded after the next step" in told for told in newcomer.told)
            assert (newcomer.stage is None, is_put_off) == (holders == 2, holders == 2)
            counted = 4
            await anyio.sleep(20)
            assert newcomer.stage is not None

    play(tmp_path, scenario, outer=AVERAGED)


def test_a_donor_that_fails_on_is_doubted_for_twice_the_time_and_believed_again_after_a_delivery() -> None:
    failed, donor, now = FailedDonors(), NodeId("donor"), 0.0
    while not failed.doubted(now):
        failed.note(donor, now)
        now += LOOK_SECONDS
    assert now == pytest.approx(DONOR_PATIENCE_SECONDS, abs=2 * LOOK_SECONDS)
    doubts = list[float]()
    for _ in range(8):
        began = now
        while failed.doubted(now):
            now += LOOK_SECONDS
        doubts.append(now - began)
        failed.note(donor, now)
    assert doubts == pytest.approx([180, 360, 720, 1440, 2880, 3600, 3600, 3600], abs=2 * LOOK_SECONDS)
    failed.forget(donor)
    assert not failed.doubted(now)
    failed.note(donor, now)
    failed.note(donor, now + 2 * LONGEST_DOUBT_SECONDS)  # two failures, hours apart
    assert not failed.doubted(now + 2 * LONGEST_DOUBT_SECONDS)
