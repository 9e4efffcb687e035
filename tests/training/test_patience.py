"""What a driver waits for and for how long: slow lines, busy stages, the only holder of a stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import ScoreReason
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import (
    MicrobatchKey,
    SpoiltMicrobatchError,
    StageBusyError,
    StageGoneError,
    UnknownMicrobatchError,
)
from neuroshard.pipeline.microbatch_call import PATIENCE_SECONDS, MicrobatchCall
from neuroshard.pipeline.routing import FixedRouting, StickyReplicaChoice, SwarmRouting, replica_choice
from neuroshard.pipeline.sessions import MicrobatchWork, SessionLimits, SessionTable
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress, StageAnswer, answer_frame, read_request
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, HIDDEN, INPUTS, LABELS, activations, chain_of, key

STAGE = StageAddress(RunId("1" * 64), LayerRange(1, 2), 1)
SHAPES = StageShapes.for_layers(ARCHITECTURE, STAGE.layers, 4)
DRIVER, PEER, OTHER = NodeId("driver"), NodeId("peer"), NodeId("other")
SECONDS = 60.0


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    """Under a virtual clock that never waits."""
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


class SlowLine:
    """A peer at the end of a line that takes its time, and on which bytes move until it stands still."""

    def __init__(self, seconds: float, stands_still_at: float = float("inf"), bytes_a_second: float = 500_000) -> None:
        self._seconds = seconds
        self._stands_still_at = stands_still_at
        self._rate = bytes_a_second

    def moved(self, _peer: NodeId) -> int:
        return int(self._rate * min(anyio.current_time(), self._stands_still_at))

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        with anyio.fail_after(timeout_seconds):
            await anyio.sleep(self._seconds)
        return answer_frame(read_request(frame, STAGE, HIDDEN), StageAnswer(output=activations(2)))


@pytest.mark.parametrize(
    ("seconds", "bytes_a_second", "stands_still_at", "fails_at"),
    [(134.0, 500_000, 1e9, None), (1e6, 500_000, 70, 130), (1e6, 500_000, 1, 61), (1e6, 100, 1e9, 60)],
)
def test_a_line_that_moves_is_not_dead(
    seconds: float, bytes_a_second: float, stands_still_at: float, fails_at: float | None
) -> None:
    """The whole takes longer than a dead line is waited for; keeping a connection up is no movement."""
    reports = list[tuple[NodeId, ScoreReason]]()

    async def main() -> None:
        line, began = SlowLine(seconds, stands_still_at, bytes_a_second), anyio.current_time()
        options = StageClientOptions(timeout_seconds=SECONDS, slowest_bytes_per_second=100.0)
        hop = RemoteStageClient(
            line, PEER, STAGE, SHAPES, options, report=lambda *report: reports.append(report), moved=line.moved
        )
        if fails_at is None:
            assert torch.equal(await hop.forward(key(1), activations(2)), activations(2))
            return
        with pytest.raises(StageGoneError):
            await hop.forward(key(1), activations(2))
        assert anyio.current_time() - began == pytest.approx(fails_at, abs=2)

    play(main)
    assert [reason for _, reason in reports] == [ScoreReason.GOOD_ANSWER if fails_at is None else ScoreReason.TIMEOUT]


def test_sessions_of_a_driver_that_is_there_are_not_idle() -> None:
    limits = SessionLimits()
    table = SessionTable(limits)
    for session in (1, 2):
        table.admit(MicrobatchWork(key(1, session), 1, 16, 0), 0.0)
    for now in range(0, 600, 60):
        table.find(key(1, session=2), float(now))
        assert table.expire(float(now)) == []
    assert table.find(key(1, session=1), 600.0) is not None
    forgotten = 600.0 + limits.forgotten_seconds + 1
    table.find(key(1, session=2), forgotten)
    assert [work.key.session for work in table.expire(forgotten)] == [1]
    assert [work.key.session for work in table.expire(forgotten + limits.idle_seconds + 1)] == [2]


class Waiting(LocalStageClient):
    """Busy for a while; then it does its work, and the last stage ends the microbatch."""

    def __init__(self, hop: LocalStageClient, node: NodeId, until: float) -> None:
        super().__init__(hop.service, node)
        self._until = until

    async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        await anyio.lowlevel.checkpoint()
        if anyio.current_time() < self._until:
            raise StageBusyError("The replicas of this stage synchronise.")
        return torch.zeros(*inputs.shape[:2], ARCHITECTURE.hidden_size)

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        await anyio.lowlevel.checkpoint()
        raise SpoiltMicrobatchError("This is the end.")


def two_stages(first: Sequence[StageClient], last: StageClient) -> SwarmRouting:
    hops = {hop.node_id: hop for hop in first}
    return SwarmRouting(
        2,
        lambda stage: sorted(hops) if stage == 0 else [last.node_id],
        lambda stage, node: hops[node] if stage == 0 else last,
        replica_choice("lanes", DRIVER, lambda _: b"\x01" * 32),
    )


def test_a_stage_in_a_round_is_waited_for_and_named_and_nobody_is_banned(compute: ComputeThread) -> None:
    services = chain_of(compute, (0, 1, 3))
    until = PATIENCE_SECONDS + 20
    hops = [Waiting(LocalStageClient(services[0]), node, until) for node in (PEER, OTHER)]
    routing = two_stages(hops, Waiting(LocalStageClient(services[1]), DRIVER, 0.0))
    told = list[str | None]()

    async def drive() -> None:
        run = MicrobatchCall(routing, key(1), INPUTS[:1], LABELS[:1])
        with anyio.fail_after(until + 1), pytest.raises(SpoiltMicrobatchError):  # and not when a ban is over
            await run.run()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            await anyio.sleep(5)
            told.append(routing.obstacle)
            await anyio.sleep(25.5)
            told.append(routing.obstacle)

    play(main)
    assert told == [None, "Stage 1 makes microbatches wait: The replicas of this stage synchronise."]
    assert routing.failures == 0


def test_the_only_holder_that_fails_for_a_while_is_one_failure_and_no_takeover(compute: ComputeThread) -> None:
    services = chain_of(compute, (0, 1, 3))

    class Flaky(LocalStageClient):
        """Its answers are lost for ten seconds; over a new connection it is the same node."""

        async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
            if anyio.current_time() < 10:
                await anyio.lowlevel.checkpoint()
                raise StageGoneError("No answer.")
            return await super().backward(key, gradient)

    last = LocalStageClient(services[1], DRIVER)
    routing = SwarmRouting(
        2,
        lambda stage: [PEER] if stage == 0 else [DRIVER],
        lambda stage, _: Flaky(services[0], PEER) if stage == 0 else last,
        StickyReplicaChoice(DRIVER, lambda _: b"\x01" * 32),
    )
    run = MicrobatchCall(routing, key(1), INPUTS[:1], LABELS[:1])
    play(lambda: ended(run))
    assert (run.failures, run.replacements, routing.failures) == (0, [], 1)


async def ended(run: MicrobatchCall) -> None:
    await run.run()


def test_work_done_again_by_the_same_node_after_a_step_is_counted(compute: ComputeThread) -> None:
    services = chain_of(compute, (0, 1, 3))

    class Stepping(LocalStageClient):
        """Gives its microbatch up and makes a step before the gradient comes."""

        has_stepped = False

        async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
            if not self.has_stepped:
                self.has_stepped = True
                await self.service.discard("A step.")
                with torch.no_grad():
                    next(self.service.executor.model.parameters()).add_(0.01)
                self.service.open()
                raise UnknownMicrobatchError("It is not open.")
            return await super().backward(key, gradient)

    route = [Stepping(services[0], PEER), LocalStageClient(services[1], DRIVER)]
    run = MicrobatchCall(FixedRouting(route), key(1), INPUTS[:1], LABELS[:1])
    play(lambda: ended(run))
    (again,) = run.replacements
    assert (again.before.node_id, again.after.node_id, again.is_exact) == (PEER, PEER, False)
    assert run.failures == 0
