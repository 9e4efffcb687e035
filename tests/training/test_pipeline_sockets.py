from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import trio

from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import StageError, StageGoneError
from neuroshard.pipeline.microbatch_call import MicrobatchCall
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.training.text_generation import SwarmInferenceSession, TextGenerator
from neuroshard.types import Architecture, LayerRange, RunId
from tests.worlds.claims import identity_of
from tests.worlds.stages import (
    ARCHITECTURE,
    PARAMETERS,
    TEXT_SHAPE,
    TOKENIZER,
    Pieces,
    generator_of,
    gradients,
    key,
    model_of,
    request,
    text_service_of,
)

WIDE = replace(ARCHITECTURE, hidden_size=512, sequence_length=160)  # activations of more than 256 KiB
STAGES = tuple(StageAddress(RunId("1" * 64), LayerRange(a, b), 1) for a, b in pairwise((0, 1, 2, 3)))


def service_of(compute: ComputeThread, architecture: Architecture, layers: LayerRange) -> StageServer:
    model = StageModel(architecture, layers)
    initialise(model, 5)
    executor = StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"))
    service = StageServer(compute, executor, sequences_per_step=4, batch_size=2)
    service.open()
    return service


@pytest.mark.parametrize("architecture", [ARCHITECTURE, WIDE], ids=["small", "wide"])
def test_the_law_holds_through_real_sockets_and_a_node_that_ends_is_gone(
    compute: ComputeThread, architecture: Architecture
) -> None:
    rows = torch.randint(architecture.vocabulary_size, (4, architecture.sequence_length + 1))
    inputs, labels = rows[:, :-1], rows[:, 1:]
    services = [service_of(compute, architecture, stage.layers) for stage in STAGES]
    options = NetworkOptions(host="127.0.0.1")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            driver = await stack.enter_async_context(libp2p_network(identity_of(1), options))
            route, blocks = (
                list[RemoteStageClient](),
                [await stack.enter_async_context(AsyncExitStack()) for _ in STAGES],
            )
            for number, (service, stage) in enumerate(zip(services, STAGES, strict=True)):
                holder = await blocks[number].enter_async_context(libp2p_network(identity_of(2 + number), options))
                shapes = StageShapes.for_layers(architecture, stage.layers, 2)
                StageRequestHandler(service, stage, shapes).serve(holder.transport)
                peer = await driver.transport.connect(holder.transport.addresses()[0])
                route.append(
                    RemoteStageClient(driver.transport, peer, stage, shapes, StageClientOptions(timeout_seconds=20))
                )
            total = 0.0
            for number in range(2):
                name = key(number, driver=driver.transport.local_id)
                part = slice(2 * number, 2 * number + 2)
                total += (
                    await MicrobatchCall(FixedRouting(route), name, inputs[part], labels[part]).run()
                ).loss_sum.item()
            assert total == pytest.approx(expected.item(), rel=1e-5)
            assert route[1].timings[0].bytes_sent == 2 * architecture.sequence_length * architecture.hidden_size * 4
            await blocks[-1].aclose()
            gone = RemoteStageClient(driver.transport, peer, stage, shapes, StageClientOptions(timeout_seconds=2))
            with pytest.raises(StageGoneError):
                await gone.infer(torch.zeros(1, 4, architecture.hidden_size))

    whole = StageModel(architecture)
    initialise(whole, 5)
    expected = whole.loss_sum(whole(inputs), labels)
    expected.backward()
    trio.run(main)
    found = gradients(services)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-4)


class ReplacedRouting(FixedRouting):
    """Names another hop for a stage that failed."""

    def __init__(self, route: list[RemoteStageClient], others: dict[int, RemoteStageClient]) -> None:
        super().__init__(route)
        self._others = others

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        route = list(self._route)
        route[stage] = self._others.pop(stage)
        self._route = tuple(route)


def test_the_law_holds_through_real_sockets_when_a_hop_is_replaced_in_mid_backward(compute: ComputeThread) -> None:
    rows = torch.randint(ARCHITECTURE.vocabulary_size, (2, ARCHITECTURE.sequence_length + 1))
    inputs, labels = rows[:, :-1], rows[:, 1:]
    held = (STAGES[0], STAGES[2], STAGES[1], STAGES[1])  # the one that dies is the last one to be opened
    services = [service_of(compute, ARCHITECTURE, stage.layers) for stage in held]
    options = NetworkOptions(host="127.0.0.1")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            driver = await stack.enter_async_context(libp2p_network(identity_of(1), options))
            hops, blocks = list[RemoteStageClient](), [await stack.enter_async_context(AsyncExitStack()) for _ in held]
            for number, (service, stage) in enumerate(zip(services, held, strict=True)):
                holder = await blocks[number].enter_async_context(libp2p_network(identity_of(2 + number), options))
                shapes = StageShapes.for_layers(ARCHITECTURE, stage.layers, 2)
                StageRequestHandler(service, stage, shapes, root=lambda: "ab").serve(holder.transport)
                peer = await driver.transport.connect(holder.transport.addresses()[0])
                hops.append(
                    RemoteStageClient(driver.transport, peer, stage, shapes, StageClientOptions(timeout_seconds=20))
                )
            first, last, other, middle = hops
            measure = last.loss

            async def measured_last(*asked: Any) -> Any:
                answer = await measure(*asked)
                await blocks[-1].aclose()  # the middle stage's node ends before the gradient comes
                return answer

            last.loss = measured_last  # type: ignore[method-assign]
            routing = ReplacedRouting([first, middle, last], {1: other})
            run = MicrobatchCall(routing, key(1, driver=driver.transport.local_id), inputs, labels)
            result = await run.run()
            assert result.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
            (replacement,) = run.replacements
            assert (replacement.before, replacement.after, replacement.is_exact) == (middle, other, True)

    whole = StageModel(ARCHITECTURE)
    initialise(whole, 5)
    expected = whole.loss_sum(whole(inputs), labels)
    expected.backward()
    trio.run(main)
    found = gradients(services[:3])
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_text_comes_through_real_sockets_as_from_the_model_in_one_piece(compute: ComputeThread) -> None:
    whole = Pieces()
    asked = {"max_tokens": 2 * TEXT_SHAPE.sequence_length, "temperature": 0.8}
    trio.run(generator_of(compute, [model_of()]).generate, request(whole, **asked))
    options = NetworkOptions(host="127.0.0.1")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            asker = await stack.enter_async_context(libp2p_network(identity_of(1), options))
            route, services = list[RemoteStageClient](), list[StageServer]()
            for number, stage in enumerate(STAGES):
                service = text_service_of(compute, model_of(stage.layers.start, stage.layers.stop))
                shapes = StageShapes.for_layers(TEXT_SHAPE, stage.layers, 2)
                holder = await stack.enter_async_context(libp2p_network(identity_of(2 + number), options))
                StageRequestHandler(service, stage, shapes).serve(holder.transport)
                peer = await asker.transport.connect(holder.transport.addresses()[0])
                route.append(
                    RemoteStageClient(asker.transport, peer, stage, shapes, StageClientOptions(timeout_seconds=20))
                )
                services.append(service)
            sink = Pieces()
            generator = TextGenerator(TEXT_SHAPE, TOKENIZER, lambda: SwarmInferenceSession(FixedRouting(route), 1))
            await generator.generate(request(sink, **asked))
            assert sink.text == whole.text
            assert [service.texts.count for service in services] == [0, 0, 0]

    trio.run(main)
    assert len(whole.text) > TEXT_SHAPE.sequence_length
