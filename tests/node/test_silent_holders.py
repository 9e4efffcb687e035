"""A computer that sleeps or hangs does not hold up those who wait for its answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import anyio
import pytest

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import PeerUnreachableError
from neuroshard.state.replica_status import REPLICA_STATUS, STATUS_ANSWER, StatusRequest
from neuroshard.types import NodeId
from tests.worlds.nodes import StageNode, StageWorld, living, play

TIME_LIMIT = 600.0


async def for_long(_sender: NodeId, frame: Frame) -> Frame:
    await anyio.sleep(TIME_LIMIT)
    return frame


async def asked(asker: StageNode, other: StageNode, stage: int) -> None:
    request = Frame(REPLICA_STATUS, StatusRequest(asker.swarm.name_of(stage)))
    await asker.swarm.request(other.name, request, reply=STATUS_ANSWER, timeout_seconds=TIME_LIMIT)


@pytest.mark.parametrize("stages", [[0, 1, 2, 2], [0, 1, 2, 2, 2, 2, 2]])
def test_a_request_to_a_silent_holder_ends_long_before_its_time_limit(tmp_path: Path, stages: Sequence[int]) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, stages, moves=False) as nodes:
            await anyio.sleep(60)
            asker, silent = nodes[0], nodes[-1]
            world.network.suspend(silent.name)
            world.cut_off.add(silent)
            began = anyio.current_time()
            with pytest.raises(PeerUnreachableError, match="no longer answers"):
                await asked(asker, silent, 2)
            assert anyio.current_time() - began < 40
            assert silent.name not in asker.swarm.workers(2)
            assert not asker.swarm.awaits(silent.name)
            assert not asker.blamed
            world.network.wake(silent.name)
            world.cut_off.clear()
            await anyio.sleep(30)
            assert silent.name in asker.swarm.workers(2)

    play(tmp_path, scenario)


def test_a_holder_that_answers_others_may_take_its_time(tmp_path: Path) -> None:
    """As while it computes, or while a large tensor travels."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 2, 2], moves=False) as nodes:
            await anyio.sleep(60)
            asker, slow = nodes[0], nodes[-1]
            world.cut_off.add(slow)  # its reports do not arrive for a while
            world.network.network_of(slow.name).transport.serve("compute", for_long, FrameLimits())
            with anyio.move_on_after(120) as waiting:
                await asker.swarm.request(slow.name, Frame("compute", {}), timeout_seconds=TIME_LIMIT)
            assert waiting.cancelled_caught
            assert slow.name not in asker.swarm.lost

    play(tmp_path, scenario)


def test_a_request_whose_answer_arrives_is_not_ended(tmp_path: Path) -> None:
    """A line that is full of a state delays reports and other answers."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 2], moves=False) as nodes:
            await anyio.sleep(60)
            asker, slow, arrived = nodes[0], nodes[-1], count()
            asker.swarm.received_bytes = lambda _node: next(arrived)  # type: ignore[method-assign]
            world.network.suspend(slow.name)
            world.cut_off.add(slow)
            with anyio.move_on_after(120) as waiting:
                await asked(asker, slow, 2)
            assert waiting.cancelled_caught
            assert slow.name not in asker.swarm.workers(2)  # it gets no new work
            world.network.wake(slow.name)

    play(tmp_path, scenario)
