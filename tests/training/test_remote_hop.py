from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import anyio
import pytest
import torch
import trio
from torch import Tensor

from neuroshard.messages import Frame
from neuroshard.network import InMemoryNetwork, Link, ScoreReason
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    DisputedTensorError,
    MicrobatchKey,
    Retry,
    SpoiltMicrobatchError,
    StageBusyError,
    StageGoneError,
    UnknownMicrobatchError,
)
from neuroshard.pipeline.microbatch_call import MicrobatchCall, measured_losses
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import COARSE, Operation, StageAddress, WirePrecision
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import (
    ARCHITECTURE,
    INPUTS,
    LABELS,
    activations,
    assert_gradients_of_the_whole,
    chain_of,
    gradients,
    key,
    service_of,
    whole_model,
)

CUTS = (0, 1, 2, 3)
PARTS = (slice(0, 2), slice(2, 5), slice(5, 8))
STAGES = tuple(StageAddress(RunId("1" * 64), LayerRange(a, b), 1) for a, b in pairwise(CUTS))
MIDDLE = STAGES[1]
PATIENT = StageClientOptions(timeout_seconds=30.0)
IMPATIENT = StageClientOptions(timeout_seconds=0.2)


def shapes_of(stage: StageAddress) -> StageShapes:
    return StageShapes.for_layers(ARCHITECTURE, stage.layers, 4)


def peer(index: int) -> NodeId:
    return NodeId(f"peer {index}")


def serve(network: InMemoryNetwork, services: Sequence[StageServer], **options: object) -> None:
    """Every stage on a node of its own."""
    for index, (service, stage) in enumerate(zip(services, STAGES, strict=True)):
        endpoint = StageRequestHandler(service, stage, shapes_of(stage), **options)  # type: ignore[arg-type]
        endpoint.serve(network.join(peer(index)))


def route_of(
    network: InMemoryNetwork, driver: str = "driver", options: StageClientOptions = PATIENT
) -> list[RemoteStageClient]:
    transport = network.join(NodeId(driver))
    return [RemoteStageClient(transport, peer(i), stage, shapes_of(stage), options) for i, stage in enumerate(STAGES)]


async def run_until_done(route: Sequence[StageClient], name: MicrobatchKey, inputs: Tensor, labels: Tensor) -> float:
    """As a driver does: again and again, under the same key."""
    while True:
        try:
            return (await MicrobatchCall(FixedRouting(route), name, inputs, labels).run()).loss_sum.item()
        except (StageGoneError, StageBusyError):
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("precision", WirePrecision)
def test_the_law_holds_over_the_wire(compute: ComputeThread, precision: WirePrecision) -> None:
    services = chain_of(compute, CUTS)
    whole, expected = whole_model()

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(network, services)
            route = route_of(network, options=replace(PATIENT, precision=precision))
            total = 0.0
            for number, part in enumerate(PARTS):
                total += await run_until_done(route, key(number), INPUTS[part], LABELS[part])
                losses = await measured_losses(FixedRouting(route), INPUTS[part], LABELS[part])
                assert losses.summed.shape == INPUTS[part].shape[:1]
            assert total == pytest.approx(expected.item(), rel=1e-5 if precision is WirePrecision.FP32 else 1e-3)
            for hop in route:
                await hop.close(NodeId("driver"), 1)

    trio.run(main)
    assert all(service.session_count == 0 for service in services)
    if precision is WirePrecision.FP32:
        assert_gradients_of_the_whole(services)
    found = gradients(services)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        similarity = torch.cosine_similarity(found[name].flatten(), parameter.grad.flatten(), dim=0)
        assert similarity > (0.97 if precision in COARSE else 0.999)


def test_two_drivers_with_lossy_lines_are_accumulated_once(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)
    _, expected = whole_model()
    losses = list[float]()

    async def drive(network: InMemoryNetwork, driver: str, rows: range) -> None:
        route = route_of(network, driver, IMPATIENT)
        for row in rows:  # the drivers use the same numbers: each has its own sessions
            part, name = slice(row, row + 1), key(row - rows.start, driver=NodeId(driver))
            losses.append(await run_until_done(route, name, INPUTS[part], LABELS[part]))

    async def main() -> None:
        with InMemoryNetwork(Random(5), default_link=Link(loss=0.15)) as network:
            serve(network, services)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drive, network, "one", range(4))
                tasks.start_soon(drive, network, "other", range(4, 8))

    trio.run(main)
    assert sum(losses) == pytest.approx(expected.item(), rel=1e-5)
    assert_gradients_of_the_whole(services)
    assert all(service.intake.accumulated.sequences == 8 for service in services)
    assert sum(service.counts.repeated for service in services) > 0


@pytest.mark.parametrize("dies_in", ["forward", "backward"])
@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_an_equal_replica_takes_the_place_of_a_hop_that_died(
    compute: ComputeThread, dies_in: str, answered: bool
) -> None:
    """The predecessor's output and the successor's gradient are at hand, so that nobody else repeats anything."""
    services = chain_of(compute, CUTS)
    replica = service_of(compute, 1, 2)

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(network, services)
            StageRequestHandler(replica, MIDDLE, shapes_of(MIDDLE)).serve(network.join(NodeId("replica")))
            first, middle, last = route_of(network)

            async def dying(call: str, work: Callable[[], Awaitable[Tensor | None]]) -> Tensor | None:
                if call != dies_in:
                    return await work()
                if answered:
                    await work()
                network.kill(peer(1))
                return await work()

            sent = await first.forward(key(1), INPUTS[:4])
            try:
                output = await dying("forward", partial(middle.forward, key(1), sent))
                assert output is not None
                _, gradient = await last.loss(key(1), output, LABELS[:4])
                assert gradient is not None
                with pytest.raises(StageGoneError) as refusal:
                    await dying("backward", partial(middle.backward, key(1), gradient))
                assert refusal.value.retry is Retry.ELSEWHERE
            except StageGoneError:
                assert dies_in == "forward"
            other = RemoteStageClient(
                network.join(NodeId("again")), NodeId("replica"), MIDDLE, shapes_of(MIDDLE), PATIENT
            )
            name = key(1, driver=NodeId("again"))
            output = await other.forward(name, sent)
            _, gradient = await last.loss(key(1), output, LABELS[:4])
            assert gradient is not None
            await first.backward(key(1), await other.backward(name, gradient))  # type: ignore[arg-type]

    trio.run(main)
    assert services[2].counts.microbatches == 1
    whole, found = chain_of(compute, (0, 3)), [services[0], replica, services[2]]
    trio.run(whole[0].loss, key(1), INPUTS[:4], LABELS[:4])
    expected = gradients(whole)
    for name, gradient in gradients(found).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


def one_hop(network: InMemoryNetwork, options: StageClientOptions = PATIENT) -> RemoteStageClient:
    return RemoteStageClient(network.join(NodeId("driver")), peer(1), MIDDLE, shapes_of(MIDDLE), options)


def test_what_a_stage_refuses_arrives_with_its_class(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)
    root = ["aa"]

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(network, services, root=lambda: root[0])
            hop = one_hop(network)
            with pytest.raises(UnknownMicrobatchError):
                await hop.backward(key(1), activations())
            await hop.forward(key(1), activations())
            assert hop.state_root == "aa"
            await hop.backward(key(1), activations())
            root[0] = "bb"
            await hop.forward(key(2), activations())
            assert hop.state_root == "bb"
            await hop.close(NodeId("driver"), 1)
            with pytest.raises(ClosedSessionError):
                await hop.forward(key(3), activations())
            await services[1].suspend()
            with pytest.raises(StageBusyError):
                await hop.infer(activations())
            await services[1].resume()
            await services[1].leave()
            with pytest.raises(StageGoneError):
                await hop.forward(key(1, session=2), activations())
            with pytest.raises(StageGoneError):
                await hop.infer(activations())

    trio.run(main)


def test_a_loss_that_is_no_number_spoils_its_microbatch_only(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)
    norm = services[2].executor.model.norm
    assert norm is not None
    norm.weight.data.fill_(float("nan"))

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(network, services)
            last = route_of(network)[2]
            with pytest.raises(SpoiltMicrobatchError) as refusal:
                await last.loss(key(1), activations(), LABELS[:1])
            assert refusal.value.retry is Retry.NEVER

    trio.run(main)


def test_a_stranger_and_a_request_for_other_layers_are_sent_away(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)
    reports = list[tuple[NodeId, ScoreReason]]()

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(
                network,
                services,
                may_drive=lambda node: node == "member",
                report=lambda *report: reports.append(report),
            )
            stranger = one_hop(network)
            with pytest.raises(StageBusyError, match="members"):  # a member may not be heard of yet
                await stranger.forward(key(1), activations())
            member = network.join(NodeId("member"))
            for stage in (replace(MIDDLE, version=2), replace(MIDDLE, run_id=RunId("2" * 64)), STAGES[2]):
                hop = RemoteStageClient(member, peer(1), stage, shapes_of(MIDDLE), PATIENT)
                with pytest.raises(StageGoneError):
                    await hop.forward(key(1), activations())
            assert reports == []
            odd = Frame("stage/close", {"run": 1})
            assert (await member.request(peer(1), odd, timeout_seconds=5)).header["error"] == "tensor"
            assert reports == [(NodeId("member"), ScoreReason.UNEXPECTED_TENSOR)]
            assert services[1].session_count == 0
            hop = RemoteStageClient(member, peer(1), MIDDLE, shapes_of(MIDDLE), PATIENT)
            with pytest.raises(DisputedTensorError):
                await hop.forward(key(1), 1e20 * activations())  # spoils what others have in the same step
            assert reports == 2 * [(NodeId("member"), ScoreReason.UNEXPECTED_TENSOR)]

    trio.run(main)
    assert services[1].counts.given_up == 1


def test_a_silent_or_unreachable_peer_is_gone_after_a_while(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(network, services)
            hop = one_hop(network, IMPATIENT)
            await hop.forward(key(1), activations())
            network.partition([peer(1)], [NodeId("driver")])
            with pytest.raises(StageGoneError):
                await hop.forward(key(2), activations())
            network.partition()
            await hop.forward(key(2), activations())
            network.kill(peer(1))
            with pytest.raises(StageGoneError):
                await hop.forward(key(3), activations())

    trio.run(main)


def test_it_is_told_where_the_time_and_the_bytes_went(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)

    async def main() -> None:
        with InMemoryNetwork(default_link=Link(delay_seconds=0.02)) as network:
            serve(network, services)
            hop = one_hop(network, replace(PATIENT, precision=WirePrecision.BF16))
            await hop.forward(key(1), activations(2))
            await hop.backward(key(1), activations(2))
            forward, backward = hop.timings
            assert (forward.operation, backward.operation) == (Operation.FORWARD, Operation.BACKWARD)
            for timing in hop.timings:
                assert (timing.session, timing.microbatch) == (1, 1)
                assert timing.bytes_sent == timing.bytes_received == activations(2).numel() * 2
                assert timing.wire_seconds >= 0.03
                assert 0 < timing.compute_seconds <= timing.stage_seconds <= timing.seconds
                assert timing.wait_seconds >= 0

    trio.run(main)


@pytest.mark.parametrize("kept_graphs", [None, 0])
def test_a_stage_tells_what_it_computed_again(compute: ComputeThread, kept_graphs: int | None) -> None:
    services = chain_of(compute, CUTS, kept_graphs=kept_graphs)

    async def main() -> None:
        with InMemoryNetwork() as network:
            serve(network, services)
            hop = one_hop(network, PATIENT)
            await hop.forward(key(1), activations(2))
            await hop.backward(key(1), activations(2))
            await hop.infer(activations(2))
            forward, backward = hop.timings  # what is only inferred is no microbatch's
            assert forward.recompute_seconds == 0
            if kept_graphs == 0:
                assert backward.recompute_seconds == min(forward.compute_seconds, backward.compute_seconds) > 0
            else:
                assert backward.recompute_seconds == 0

    trio.run(main)
