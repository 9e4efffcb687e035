"""The numbers of a pipeline against ones computed by hand, and what a driver remembers to make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from neuroshard.network import InMemoryNetwork, Link
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import MicrobatchKey, StageGoneError
from neuroshard.pipeline.microbatch_call import (
    FOLD_SECONDS,
    MOST_HOPS,
    REMEMBERED_TRACES,
    WINDOW_SECONDS,
    FlowRecord,
    MicrobatchCall,
    Replacement,
    flow_of,
    hop_times,
    trace_of,
)
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, RequestTiming, StageClient
from neuroshard.pipeline.stage_protocol import Operation, StageAddress, recompute_seconds
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.status.pipeline import Bottleneck, HopTimes, MicrobatchTrace, StageLoad, Takeover
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, MemoryFeed, chain_of, key
from tests.worlds.trainers import SPLIT, make_split_trainer

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def passage(number: int, *hops: HopTimes, seconds: float = 10.0, tokens: int = 100) -> MicrobatchTrace:
    return MicrobatchTrace(1, number, ended_at=1000.0 + number, seconds=seconds, tokens=tokens, hops=hops)


# stage 0 at a, here; stage 1 first at b, then at the slower c
FIRST = passage(1, HopTimes(A, 1.0, 0.5, 0.0), HopTimes(B, 2.0, 1.0, 0.25, 0.5, 600, 400))
SECOND = passage(2, HopTimes(A, 1.0, 1.5, 0.0), HopTimes(C, 3.0, 4.0, 0.75, 0.5, 600, 400), seconds=12.0, tokens=300)


def test_the_numbers_of_two_microbatches() -> None:
    flow = flow_of([FIRST, SECOND], window_seconds=20.0)
    assert (flow.microbatches, flow.tokens, flow.tokens_per_second) == (2, 400, 20.0)
    assert flow.loads == (StageLoad(0, 1.0, 1.0, 0.0, nodes=1), StageLoad(1, 2.5, 2.5, 0.5, nodes=2))
    assert flow.bubble_share == pytest.approx(1 - 7 / (3 * 20))  # three computers, 1 + 2 + 1 + 3 seconds at work
    assert flow.recompute_share == pytest.approx(1 / 7)
    assert flow.wire_bytes_per_token == pytest.approx(2000 / 400)
    assert flow.bottleneck == Bottleneck(1, C, 5.0, pytest.approx(5 / 7))  # (2 + 1 + 3 + 4) / 2 of that and 2 more
    assert FIRST.other_seconds == pytest.approx(10 - 4.75)
    assert passage(3, HopTimes(A, 6.0, 3.0, 2.0)).other_seconds == 0.0  # clocks that differ a little make no less


def test_stages_of_one_node_are_one_computer() -> None:
    lone = passage(1, HopTimes(A, 3.0, 0.0, 0.0), HopTimes(A, 6.0, 0.0, 0.0))
    assert flow_of([lone], 12.0).bubble_share == pytest.approx(0.25)


def test_one_stage_has_no_bottleneck_and_nothing_no_numbers() -> None:
    assert flow_of([passage(1, HopTimes(A, 1.0, 0.0, 0.0))], 2.0).bottleneck is None
    nothing = flow_of([], 60.0)
    assert (nothing.bubble_share, nothing.recompute_share, nothing.wire_bytes_per_token) == (None, None, None)
    assert (nothing.loads, nothing.bottleneck, nothing.tokens_per_second) == ((), None, 0.0)


def test_more_work_than_the_window_is_no_bubble() -> None:
    """What ended in a window may have begun before it."""
    assert flow_of([FIRST], 0.5).bubble_share == 0.0


def test_the_requests_of_a_microbatch_add_up() -> None:
    times = hop_times(
        A,
        [
            RequestTiming(Operation.FORWARD, 1, 1, 1.0, 0.75, 0.5, 0.0, 100, 800),
            RequestTiming(Operation.BACKWARD, 1, 1, 3.0, 2.5, 1.5, 0.5, 800, 800),
            RequestTiming(Operation.FORWARD, 1, 2, 9.0, 9.0, 9.0, 0.0, 100, 800),  # of another microbatch
        ],
        MicrobatchKey(NodeId("driver"), 1, 1),
    )
    assert times == HopTimes(A, 2.0, 1.25, 0.75, 0.5, 900, 1600)
    assert (times.stage_seconds, times.seconds) == (3.25, 4.0)


def test_only_a_backward_pass_recomputes_and_no_more_than_it_took() -> None:
    assert recompute_seconds(Operation.FORWARD, 0.0, 2.0) == 0.0
    assert recompute_seconds(Operation.BACKWARD, 2.0, 6.0) == 2.0
    assert recompute_seconds(Operation.BACKWARD, 2.0, 1.5) == 1.5


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


class Record:
    """A record of microbatches through two stages, none of which really computes."""

    def __init__(self, compute: ComputeThread) -> None:
        self.clock = Clock()
        self.record = FlowRecord(2, monotonic=self.clock, wall_clock=lambda: 1e9 + self.clock.now)
        self.hops = [
            LocalStageClient(service, node) for service, node in zip(chain_of(compute, (0, 1, 3)), (A, B), strict=True)
        ]
        self.count = 0

    def begin(self) -> MicrobatchCall:
        self.count += 1
        run = MicrobatchCall(FixedRouting(self.hops), key(self.count), INPUTS, LABELS)
        self.record.began(run)
        return run

    def finish(self, run: MicrobatchCall, seconds: float) -> None:
        """At work half of the time in the first stage, a quarter in the second."""
        self.clock.now += seconds
        run.hops[:] = self.hops
        name = (run.key.session, run.key.microbatch)
        for hop, share in zip(self.hops, (0.5, 0.25), strict=True):
            hop.timings.append(RequestTiming(Operation.FORWARD, *name, seconds / 2, seconds / 2, seconds * share))
        self.record.ended(run, is_accumulated=True)


def test_a_driver_remembers_a_minute_and_the_last_32(compute: ComputeThread) -> None:
    kept = Record(compute)
    for _ in range(40):
        kept.finish(kept.begin(), 2.0)
    flow = kept.record.flow()
    assert flow.window_seconds == WINDOW_SECONDS
    assert flow.microbatches in (30, 31)
    assert flow.bubble_share == pytest.approx(1 - flow.microbatches * 1.5 / (2 * 60))
    assert len(flow.recent) == REMEMBERED_TRACES
    assert [one.microbatch for one in flow.recent] == list(range(9, 41))
    newest = flow.recent[-1]
    assert (newest.seconds, newest.ended_at, newest.tokens) == (2.0, 1e9 + 580, LABELS.numel())
    assert [(hop.node_id, hop.compute_seconds, hop.wait_seconds) for hop in newest.hops] == [
        (A, 1.0, 0.0),
        (B, 0.5, 0.5),
    ]
    kept.clock.now += 61
    later = kept.record.flow()
    assert (later.microbatches, later.bubble_share, later.tokens_per_second) == (0, None, 0.0)
    assert len(later.recent) == REMEMBERED_TRACES


def test_the_window_begins_with_the_first_microbatch(compute: ComputeThread) -> None:
    kept = Record(compute)
    assert kept.record.flow().window_seconds == 0.0
    kept.finish(kept.begin(), 4.0)
    flow = kept.record.flow()
    assert (flow.window_seconds, flow.microbatches) == (4.0, 1)
    assert flow.bubble_share == pytest.approx(1 - 3 / 8)


def test_the_numbers_are_made_anew_once_a_second_at_most(compute: ComputeThread) -> None:
    kept = Record(compute)
    kept.finish(kept.begin(), 4.0)
    assert kept.record.flow().microbatches == 1
    kept.finish(kept.begin(), FOLD_SECONDS / 2)
    flow = kept.record.flow()
    assert (flow.microbatches, len(flow.recent)) == (1, 2)
    kept.clock.now += FOLD_SECONDS / 2
    assert kept.record.flow().microbatches == 2


def test_very_many_microbatches_make_the_window_shorter_and_are_not_kept(compute: ComputeThread) -> None:
    kept = Record(compute)
    for _ in range(3000):
        kept.finish(kept.begin(), 0.01)
    flow = kept.record.flow()
    assert flow.microbatches == 1024
    assert flow.window_seconds == pytest.approx(10.24)
    assert flow.bubble_share == pytest.approx(1 - 0.75 / 2, abs=1e-6)


def test_failures_count_while_a_microbatch_is_still_under_way(compute: ComputeThread) -> None:
    kept = Record(compute)
    run = kept.begin()
    run.failures = 2
    run.waits_for = 1
    run.replacements += [Replacement(1, *kept.hops, True), Replacement(1, *kept.hops, False)]
    for _ in range(2):
        flow = kept.record.flow()
        assert (flow.failures, flow.exact_takeovers, flow.approximate_takeovers) == (2, 1, 1)
        assert flow.unanswered == (1,)
    kept.record.gave_up()
    kept.record.ended(run, is_accumulated=False)
    flow = kept.record.flow()
    assert (flow.failures, flow.exact_takeovers, flow.approximate_takeovers, flow.given_up) == (2, 1, 1, 1)
    assert flow.recent == flow.unanswered == ()


def test_a_passage_names_who_did_a_stage_in_the_end(compute: ComputeThread) -> None:
    services = chain_of(compute, (0, 1, 3))

    class LostHop(LocalStageClient):
        """Does its forward pass and is never seen again."""

        async def backward(self, *_: object) -> None:
            raise StageGoneError("It is gone.")

    lost, first, last = LostHop(services[0], A), LocalStageClient(services[0], B), LocalStageClient(services[1], C)

    class Routing(FixedRouting):
        """Knows another node for the first stage."""

        def failed(self, stage: int, *_: object) -> None:
            assert stage == 0
            self._route = (first, last)

    async def main() -> MicrobatchTrace:
        run = MicrobatchCall(Routing((lost, last)), key(1), INPUTS[:2], LABELS[:2])
        await run.run()
        return trace_of(run, ended_at=5.0, seconds=60.0)

    found = trio.run(main)
    assert [hop.node_id for hop in found.hops] == [B, C]
    assert found.takeovers == (Takeover(0, A, B, is_exact=False),)
    assert (found.failures, found.tokens) == (1, 2 * ARCHITECTURE.sequence_length)
    assert all(hop.compute_seconds > 0 and hop.wire_seconds == 0 for hop in found.hops)
    assert found.other_seconds > 50


def test_the_bytes_of_remote_stages_are_those_of_their_tensors(compute: ComputeThread) -> None:
    services = chain_of(compute, (0, 1, 2, 3))
    addresses = [StageAddress(RunId("1" * 64), LayerRange(index, index + 1), 1) for index in range(3)]
    shapes = [StageShapes.for_layers(ARCHITECTURE, address.layers, 4) for address in addresses]

    async def main() -> MicrobatchTrace:
        with InMemoryNetwork(default_link=Link(delay_seconds=0.01)) as network:
            transport = network.join(NodeId("driver"))
            hops: list[StageClient] = [LocalStageClient(services[0], NodeId("driver"))]
            for node, service, address, shape in zip((B, C), services[1:], addresses[1:], shapes[1:], strict=True):
                StageRequestHandler(service, address, shape).serve(network.join(node))
                hops.append(RemoteStageClient(transport, node, address, shape))
            run = MicrobatchCall(FixedRouting(hops), key(1), INPUTS[:2], LABELS[:2])
            await run.run()
            return trace_of(run, ended_at=0.0, seconds=10.0)

    here, middle, last = trio.run(main).hops
    tokens = 2 * ARCHITECTURE.sequence_length
    activations = tokens * ARCHITECTURE.hidden_size * 4
    assert (here.bytes_sent, here.bytes_received, here.wire_seconds) == (0, 0, 0.0)
    assert (middle.bytes_sent, middle.bytes_received) == (2 * activations, 2 * activations)
    assert (last.bytes_sent, last.bytes_received) == (
        activations + 4 * tokens,
        activations,
    )  # labels, loss in the header
    assert middle.wire_seconds >= 0.035  # there and back, twice
    assert last.wire_seconds >= 0.015


def test_the_numbers_of_a_full_window_take_a_few_passes_over_it() -> None:
    """They are computed once per second. Both durations are the best of ten, so other work hardly counts."""
    hops = (HopTimes(A, 1.0, 0.5, 0.0), HopTimes(B, 2.0, 1.0, 0.25, 0.5, 600, 400))
    full = [passage(number, *hops) for number in range(MOST_HOPS // len(hops))]
    one_pass = fastest(lambda: sum(hop.seconds for one in full for hop in one.hops))
    assert fastest(lambda: flow_of(full, 60.0)) < 15 * one_pass


def fastest(work: Callable[[], object]) -> float:
    """Seconds of processor time of this thread for the fastest of ten calls."""
    durations: list[float] = []
    for _ in range(10):
        began = time.thread_time()
        work()
        durations.append(time.thread_time() - began)
    return min(durations)


def test_a_trainer_tells_how_its_microbatches_went(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_split_trainer(compute, tmp_path, feed=MemoryFeed(), in_flight=2)
    trio.run(trainer.run, 3)
    flow = trainer.snapshot().flow
    assert flow is not None
    assert flow.microbatches == len(flow.recent) == 3 * SPLIT.sequences_per_step // SPLIT.batch_size
    assert flow.tokens == 3 * SPLIT.sequences_per_step * ARCHITECTURE.sequence_length
    assert flow.bubble_share is not None
    assert 0 < flow.bubble_share < 1
    assert (flow.recompute_share, flow.wire_bytes_per_token) == (0.0, 0.0)
    assert [load.stage for load in flow.loads] == [0, 1, 2]
    assert flow.bottleneck is not None
    for one in flow.recent:
        assert sum(hop.seconds for hop in one.hops) <= one.seconds + 0.05
