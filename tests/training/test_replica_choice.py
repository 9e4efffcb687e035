from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import anyio
import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from neuroshard.data.held_out_losses import Measured
from neuroshard.errors import NotReadyError
from neuroshard.pipeline.microbatch import (
    DisputedTensorError,
    MicrobatchKey,
    SpoiltMicrobatchError,
    StageError,
    StageGoneError,
    UnwantedTensorError,
)
from neuroshard.pipeline.microbatch_call import MicrobatchCall, measured_losses
from neuroshard.pipeline.routing import (
    BAN_SECONDS,
    BalancedChoice,
    FixedRouting,
    ReplicaChoice,
    StickyReplicaChoice,
    SwarmRouting,
    replica_choice,
)
from neuroshard.pipeline.stage_client import RequestTiming, StageClient
from neuroshard.training.text_generation import Completion, SwarmInferenceSession
from neuroshard.types import NodeId
from tests.worlds.stages import DRIVER, INPUTS, LABELS, TEXT_SHAPE, TOKENIZER, Pieces, key, request

REPLICAS = tuple(NodeId(f"replica {n}") for n in range(6))
A, B, C = REPLICAS[:3]


class Replica:
    """A stage that only takes its time, for one request after the other, or fails."""

    def __init__(self, node_id: NodeId, seconds: float, error: StageError | None = None) -> None:
        self.node_id = node_id
        self.state_root = ""
        self.timings: Sequence[RequestTiming] = ()
        self.error = error
        self.requests = 0
        self._seconds = seconds
        self._turn = anyio.Lock()

    async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        """Takes as long as a backward pass."""
        return await self._work(torch.zeros(1))

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Takes as long as a backward pass."""
        return await self._work(torch.zeros(())), torch.zeros(1)

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """Takes as long as a forward pass."""
        return await self._work(torch.zeros(1))

    async def infer(self, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        """Takes as long as a forward pass."""
        return await self._work(torch.zeros(1))

    async def read(self, session: int, position: int, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        """Takes as long as a forward pass."""
        return await self._work(torch.zeros(1))

    async def forget(self, session: int) -> None:
        """Nothing is kept."""

    async def measure(self, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None) -> Measured:
        """Takes as long as a forward pass."""
        return Measured(await self._work(torch.zeros(1)))

    async def close(self, driver: NodeId, session: int) -> None:
        """Nothing is kept."""

    async def _work(self, answer: Tensor) -> Tensor:
        async with self._turn:
            self.requests += 1
            await anyio.sleep(self._seconds)
            if self.error is not None:
                raise self.error
            return answer


class Noting(FixedRouting):
    """A fixed route that notes how every pick ended."""

    def __init__(self, route: Sequence[StageClient]) -> None:
        super().__init__(route)
        self.noted: list[tuple[str, int, float]] = []

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        """Note it."""
        self.noted.append(("finished", stage, seconds))

    def left(self, stage: int, hop: StageClient) -> None:
        """Note it."""
        self.noted.append(("left", stage, 0.0))

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        """Note it."""
        self.noted.append(("failed", stage, 0.0))


def root_of(stage: int) -> bytes:
    return bytes([stage]) * 32


def test_a_lane_stays_until_its_replica_fails_or_the_root_changes() -> None:
    roots = {0: b"\x01" * 32, 1: b"\x01" * 32}
    choice = StickyReplicaChoice(DRIVER, lambda stage: roots[stage])
    first = choice.pick(0, REPLICAS)
    assert {choice.pick(0, REPLICAS[::order]) for order in (1, -1)} == {first}
    choice.took(0, first, 1.0)
    choice.lost(0, first)
    second = choice.pick(0, REPLICAS)
    assert second != first
    assert choice.pick(0, REPLICAS) == second
    other_stage = choice.pick(1, REPLICAS)
    lanes = set[NodeId]()
    for number in range(40):
        roots[0] = bytes([number]) * 32
        lanes.add(choice.pick(0, REPLICAS))
        assert choice.pick(1, REPLICAS) == other_stage
    assert lanes == set(REPLICAS)


def test_a_driver_that_holds_a_stage_is_its_own_lane() -> None:
    choice = StickyReplicaChoice(DRIVER, root_of)
    assert choice.pick(1, [*REPLICAS, DRIVER]) == DRIVER


def test_the_parameters_name_the_choice() -> None:
    assert isinstance(replica_choice("lanes", DRIVER, root_of), StickyReplicaChoice)
    assert isinstance(replica_choice("balanced", DRIVER, root_of), BalancedChoice)


def test_every_pick_ends_once_with_the_time_of_all_its_answers() -> None:
    async def main() -> list[tuple[str, int, float]]:
        routing = Noting([Replica(node, seconds) for node, seconds in ((A, 1.0), (B, 2.0), (C, 4.0))])
        await MicrobatchCall(routing, key(1), INPUTS[:1], LABELS[:1]).run()
        return routing.noted

    noted = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert noted == [("finished", 2, 4.0), ("finished", 1, 4.0), ("finished", 0, 2.0)]


def test_a_microbatch_that_is_given_up_or_cancelled_leaves_all_its_replicas() -> None:
    async def main() -> None:
        replicas = [Replica(A, 1.0), Replica(B, 1.0), Replica(C, 1.0, SpoiltMicrobatchError("Not a number."))]
        routing = Noting(replicas)
        with pytest.raises(SpoiltMicrobatchError):
            await MicrobatchCall(routing, key(1), INPUTS[:1], LABELS[:1]).run()
        assert routing.noted == [("left", stage, 0.0) for stage in range(3)]
        routing = Noting(replicas)
        with anyio.move_on_after(1.5):
            await MicrobatchCall(routing, key(2), INPUTS[:1], LABELS[:1]).run()
        assert routing.noted == [("left", 0, 0.0), ("left", 1, 0.0)]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_an_evaluation_leaves_its_replicas_and_tells_who_failed() -> None:
    async def main() -> None:
        replicas = [Replica(A, 1.0), Replica(B, 1.0)]
        routing = Noting(replicas)
        await measured_losses(routing, INPUTS[:1], LABELS[:1])
        assert routing.noted == [("left", 0, 0.0), ("left", 1, 0.0)]
        replicas[1].error = StageGoneError("Gone.")
        with pytest.raises(StageGoneError):
            await measured_losses(routing, INPUTS[:1], LABELS[:1])
        assert routing.noted[2:] == [("left", 0, 0.0), ("failed", 1, 0.0)]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def disputing(nodes: Sequence[NodeId]) -> list[Replica]:
    return [Replica(node, 0.1, DisputedTensorError("I do not like it.")) for node in nodes]


def routing_of(choice: ReplicaChoice, replicas: Sequence[Replica], last: Replica) -> SwarmRouting:
    """A first stage with these replicas, and a last one."""
    known = {one.node_id: one for one in replicas}
    return SwarmRouting(
        2,
        lambda stage: [last.node_id] if stage else list(known),
        lambda stage, node: last if stage else known[node],
        choice,
    )


Work: TypeAlias = Callable[[SwarmRouting, int], Awaitable[None]]


async def train(routing: SwarmRouting, number: int) -> None:
    await MicrobatchCall(routing, key(number), INPUTS[:1], LABELS[:1]).run()


async def measure(routing: SwarmRouting, _number: int) -> None:
    await measured_losses(routing, INPUTS[:1], LABELS[:1])


class WatchedChoice(BalancedChoice):
    """Remembers among whom it was last asked to choose in the first stage."""

    free: Sequence[NodeId] = ()

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """See ReplicaChoice."""
        self.free = self.free if stage else replicas
        return super().pick(stage, replicas)


@pytest.mark.parametrize("work", [train, measure])
def test_a_tensor_that_two_replicas_refuse_is_given_up_and_none_of_them_is_left_alone(work: Work) -> None:
    replicas, choice = disputing(REPLICAS), WatchedChoice(DRIVER)
    routing = routing_of(choice, replicas, Replica(A, 0.1))

    async def main() -> None:
        for number in range(1, 5):
            with pytest.raises(UnwantedTensorError, match="refused twice"):
                await work(routing, number)
            assert sum(one.requests for one in replicas) == 2 * number
        await routing.hop(0)
        assert choice.free == list(REPLICAS)

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("work", [train, measure])
def test_a_replica_that_alone_refuses_an_honest_tensor_is_left_alone(work: Work) -> None:
    liar, *honest = *disputing([A]), *[Replica(node, 0.1) for node in REPLICAS[1:]]
    routing = routing_of(BalancedChoice(DRIVER), [liar, *honest], Replica(A, 0.1))

    async def main() -> None:
        for number in range(20):
            await work(routing, number)
        assert trio.current_time() < BAN_SECONDS
        assert liar.requests == 1

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_text_that_two_replicas_refuse_is_told_and_none_of_them_is_left_alone() -> None:
    replicas, choice = disputing(REPLICAS), WatchedChoice(DRIVER)
    routing = routing_of(choice, replicas, Replica(A, 0.1))

    async def main() -> None:
        completion = Completion(TEXT_SHAPE, TOKENIZER, request(Pieces()))
        with pytest.raises(NotReadyError, match="refused twice"):
            await SwarmInferenceSession(routing, 1).advance(completion)
        assert sum(one.requests for one in replicas) == 2
        await routing.hop(0)
        assert choice.free == list(REPLICAS)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_the_only_replica_refuses_twice_is_given_up() -> None:
    (lonely,) = disputing([A])
    routing = routing_of(BalancedChoice(DRIVER), [lonely], Replica(B, 0.1))

    async def main() -> None:
        with pytest.raises(UnwantedTensorError):
            await train(routing, 1)
        assert lonely.requests == 2
        assert trio.current_time() < 2

    trio.run(main, clock=MockClock(autojump_threshold=0))


def driven(choice: ReplicaChoice, stages: Sequence[Sequence[Replica]], microbatches: int, in_flight: int = 8) -> float:
    """Seconds until so many microbatches were through, several at a time."""
    known = {(stage, one.node_id): one for stage, replicas in enumerate(stages) for one in replicas}
    workers = [[one.node_id for one in replicas] for replicas in stages]
    routing = SwarmRouting(len(stages), workers.__getitem__, lambda stage, node: known[stage, node], choice)
    numbers = iter(range(microbatches))

    async def line() -> None:
        for number in numbers:
            await MicrobatchCall(routing, key(number), INPUTS[:1], LABELS[:1]).run()

    async def main() -> float:
        began = trio.current_time()
        async with trio.open_nursery() as lines:
            for _ in range(in_flight):
                lines.start_soon(line)
        return trio.current_time() - began

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_balanced_a_replica_that_is_twice_as_slow_gets_half_and_costs_no_more() -> None:
    fast, slow = Replica(A, 1.0), Replica(B, 2.0)
    seconds = driven(BalancedChoice(DRIVER), [[Replica(C, 0.1)], [fast, slow], [Replica(C, 0.1)]], 300)
    assert fast.requests == pytest.approx(2 * slow.requests, rel=0.1)
    assert seconds <= 1.15 * (600 / 1.5)  # together they do 1.5 requests a second, two for each microbatch


def test_in_a_lane_one_replica_does_everything() -> None:
    replicas = [Replica(node, 1.0) for node in REPLICAS]
    driven(StickyReplicaChoice(DRIVER, root_of), [replicas, [Replica(A, 0.1)]], 30)
    assert sorted(one.requests for one in replicas) == [0, 0, 0, 0, 0, 60]


@pytest.mark.parametrize("make", [BalancedChoice, lambda driver: StickyReplicaChoice(driver, root_of)])
def test_a_replica_that_fails_is_left_alone_for_half_a_minute(make: type[BalancedChoice]) -> None:
    gone = [Replica(node, 0.1, StageGoneError("Gone.")) for node in REPLICAS[1:]]
    good = Replica(A, 1.0)
    seconds = driven(make(DRIVER), [[good, *gone], [Replica(A, 0.01)]], 80, in_flight=4)
    tries = Counter({one.node_id: one.requests for one in gone})
    assert seconds > 2 * BAN_SECONDS
    assert good.requests == 160
    assert max(tries.values()) <= 4 * (1 + seconds // BAN_SECONDS)  # four lines may find out at the same time


def test_the_only_replica_is_asked_again_after_a_second() -> None:
    lonely = Replica(A, 0.5, StageGoneError("Gone."))

    async def recovery() -> None:
        await anyio.sleep(4.0)
        lonely.error = None

    known = {0: lonely, 1: Replica(B, 0.1)}
    routing = SwarmRouting(
        2, lambda stage: [known[stage].node_id], lambda stage, _: known[stage], BalancedChoice(DRIVER)
    )

    async def main() -> float:
        async with trio.open_nursery() as tasks:
            tasks.start_soon(recovery)
            await MicrobatchCall(routing, key(1), INPUTS[:1], LABELS[:1]).run()
        return trio.current_time()

    clock = MockClock(autojump_threshold=0)
    assert 4.0 < trio.run(main, clock=clock) < 8.0
    assert routing.failures == 1  # asked again in vain is no other failure
