"""Text from stages on other nodes: the tokens of the model in one piece, whoever is lost, whatever changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event

import anyio
import pytest
import torch
import trio
from torch import Tensor
from trio.testing import wait_all_tasks_blocked

from neuroshard.data.tokenizer import EOS
from neuroshard.errors import NotReadyError
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.network import InMemoryNetwork, Transport
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import ChoiceInTurn, SwarmRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress, WirePrecision
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.stage_texts import Text
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.status.board import GeneratedText
from neuroshard.training.text_generation import SwarmInferenceSession, TextGenerator
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import (
    TEXT_SHAPE,
    TOKENIZER,
    Pieces,
    continuation,
    generator_of,
    model_of,
    prompt_ids,
    request,
    text_service_of,
)

CUTS = (0, 1, 2, 3)
STAGES = tuple(StageAddress(RunId("1" * 64), LayerRange(a, b), 1) for a, b in pairwise(CUTS))
ASKER = NodeId("asker")
LONG = 2 * TEXT_SHAPE.sequence_length + 5


@dataclass
class Swarm:
    """Replicas of three stages on nodes of their own, as one who holds none of them, or some, sees them."""

    compute: ComputeThread
    network: InMemoryNetwork
    services: dict[NodeId, StageServer] = field(default_factory=dict)
    transports: dict[NodeId, Transport] = field(default_factory=dict)
    own: dict[int, StageServer] = field(default_factory=dict)
    readings: list[SwarmInferenceSession] = field(default_factory=list)
    begin: Callable[[], SwarmInferenceSession] = field(init=False)

    def add(self, stage: int, name: str, seed: int = 3) -> StageServer:
        node = NodeId(f"{stage}{name}")
        layers = STAGES[stage].layers
        service = self.services[node] = text_service_of(self.compute, model_of(layers.start, layers.stop, seed))
        transport = self.transports[node] = self.network.join(node)
        StageRequestHandler(service, STAGES[stage], shapes_of(stage)).serve(transport)
        return service

    async def remove(self, name: str) -> None:
        del self.services[NodeId(name)]
        await self.transports.pop(NodeId(name)).close()

    def workers(self, stage: int) -> Sequence[NodeId]:
        others = [node for node in self.services if node.startswith(str(stage))]
        return sorted([ASKER, *others] if stage in self.own else others)

    def generator(self, *, precision: WirePrecision = WirePrecision.FP32, patience: float = 20.0) -> TextGenerator:
        transport = self.network.join(ASKER)
        options = StageClientOptions(precision, timeout_seconds=30.0)

        def connect(stage: int, node: NodeId) -> StageClient:
            if node == ASKER:
                return LocalStageClient(self.own[stage], ASKER)
            return RemoteStageClient(transport, node, STAGES[stage], shapes_of(stage), options)

        routing = SwarmRouting(len(STAGES), self.workers, connect, ChoiceInTurn(ASKER))

        def begin() -> SwarmInferenceSession:
            self.readings.append(SwarmInferenceSession(routing, 1 + len(self.readings), self.missing, patience))
            return self.readings[-1]

        self.begin = begin
        return TextGenerator(TEXT_SHAPE, TOKENIZER, begin)

    def missing(self) -> str:
        empty = [stage for stage in range(len(STAGES)) if not self.workers(stage)]
        return f"Layer {empty[0]} is missing." if empty else ""

    @property
    def texts(self) -> int:
        return sum(service.texts.count for service in [*self.services.values(), *self.own.values()])


def shapes_of(stage: int) -> StageShapes:
    return StageShapes.for_layers(TEXT_SHAPE, STAGES[stage].layers, 2)


def swarm_of(compute: ComputeThread, network: InMemoryNetwork) -> Swarm:
    swarm = Swarm(compute, network)
    for stage in range(len(STAGES)):
        swarm.add(stage, "a")
    return swarm


def text_of_one_piece(compute: ComputeThread, **changes: object) -> str:
    sink = Pieces()
    trio.run(generator_of(compute, [model_of()]).generate, request(sink, **changes))
    return sink.text


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_a_prompt_is_scored_by_stages_of_other_nodes(compute: ComputeThread, is_disturbed: bool) -> None:
    """The same scores as of the whole model here, also if a stage forgets the text in the middle of the prompt."""
    alone, spread = Pieces(), Pieces()
    wanted = {"max_tokens": 3, "echo": True, "logprobs": 2, "seed": 4}
    trio.run(generator_of(compute, [model_of()]).generate, request(alone, **wanted))

    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm = swarm_of(compute, network)
            forget = swarm.services[NodeId("1a")].texts
            advance, reads = forget.advance, list[int]()

            def forgetful(text: Text, position: int, inputs: Tensor, **options: bool) -> Tensor:
                reads.append(position)
                if is_disturbed and len(reads) == 3:
                    text.cache = None
                return advance(text, position, inputs, **options)

            forget.advance = forgetful  # type: ignore[method-assign]
            await swarm.generator().generate(request(spread, **wanted))
            assert swarm.readings[0].read_again == is_disturbed

    trio.run(main)
    assert spread.text == alone.text
    found, expected = ([score for piece in sink.pieces for score in piece.scores] for sink in (spread, alone))
    assert [score.content for score in found] == [score.content for score in expected]
    assert [score.logprob for score in found] == pytest.approx([score.logprob for score in expected], abs=1e-4)


@pytest.mark.parametrize("own", [(), (0,), (1, 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_swarm_gives_the_text_of_the_model_in_one_piece(
    compute: ComputeThread, temperature: float, own: tuple[int, ...]
) -> None:
    expected = text_of_one_piece(compute, max_tokens=LONG, temperature=temperature)
    sink = Pieces()

    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm = swarm_of(compute, network)
            for stage in own:
                swarm.own[stage] = text_service_of(compute, model_of(stage, stage + 1))
            generator = swarm.generator(precision=WirePrecision.INT8)  # which a text does not take part in
            summary = await generator.generate(request(sink, max_tokens=LONG, temperature=temperature))
            assert summary.completion_tokens == LONG or summary.finish_reason == "stop"
            assert swarm.texts == 0
            assert [reading.read_again for reading in swarm.readings] == [0]

    trio.run(main)
    assert len(expected) > TEXT_SHAPE.sequence_length
    assert sink.text == expected


def test_a_stage_that_is_lost_is_read_with_elsewhere_from_the_beginning(compute: ComputeThread) -> None:
    tokens = TEXT_SHAPE.sequence_length - len(prompt_ids())
    expected = text_of_one_piece(compute, max_tokens=tokens, temperature=0.0)

    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm = swarm_of(compute, network)
            swarm.add(1, "b")
            lost = list[str]()

            async def lose(after: int) -> None:
                while len(sink.pieces) < after:
                    await anyio.sleep(0)
                lost.extend(node for node, service in swarm.services.items() if service.texts.count and node[0] == "1")
                await swarm.remove(lost[0])

            sink = Pieces()
            async with trio.open_nursery() as tasks:
                tasks.start_soon(lose, 3)
                await swarm.generator().generate(request(sink, max_tokens=tokens, temperature=0.0))
            assert sink.text == expected
            assert swarm.readings[0].read_again == 1
            assert len(lost) == 1
            assert swarm.texts == 0

    trio.run(main)


@pytest.mark.parametrize("at_token", [0, 3])
def test_a_stage_that_nobody_holds_any_more_is_told_after_a_while(compute: ComputeThread, at_token: int) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm, sink = swarm_of(compute, network), Pieces()

            async def lose() -> None:
                while len(sink.pieces) < at_token:
                    await anyio.lowlevel.checkpoint()
                await swarm.remove("2a")

            if at_token == 0:
                await lose()
            async with trio.open_nursery() as tasks:
                if at_token > 0:
                    tasks.start_soon(lose)
                with pytest.raises(NotReadyError, match=r"cannot be continued now\. Layer 2 is missing"):
                    await swarm.generator(patience=0.5).generate(request(sink, max_tokens=14, temperature=0.0))
            assert len(sink.pieces) >= at_token
            assert all(piece.finish_reason is None for piece in sink.pieces)
            assert swarm.texts == 0

    trio.run(main)


def test_a_completion_that_nobody_wants_any_more_ends_while_it_waits(compute: ComputeThread) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm, sink = swarm_of(compute, network), Pieces()
            await swarm.remove("1a")
            asked = request(sink, max_tokens=14)
            with anyio.fail_after(20):
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(swarm.generator(patience=1000).generate, asked)
                    await wait_all_tasks_blocked()
                    asked.cancelled.set()
            assert [piece.finish_reason for piece in sink.pieces] == ["stop"]

    trio.run(main)


def changing(models: Sequence[StageModel], after: int, change: Callable[[StageModel], None]) -> Pieces:
    """A sink in whose call number `after` the weights of some stages change."""

    class Changing(Pieces):
        def __call__(self, piece: GeneratedText) -> None:
            super().__call__(piece)
            if len(self.pieces) == after:
                for model in models:
                    change(model)

    return Changing()


def expected_of_change(tokens: int, after: int, change: Callable[[StageModel], None]) -> list[int]:
    """The first tokens of the model as it was, the rest as it is after the change; it reads all for each."""
    model = model_of()
    first = continuation(model, prompt_ids(), after)
    change(model)
    return [*first, *continuation(model, [*prompt_ids(), *first], tokens - after)]


@pytest.mark.parametrize("is_swarm", [False, True])
@pytest.mark.parametrize("stages", [(0, 1, 2), (1,)])
def test_after_a_change_of_weights_every_token_is_what_the_new_ones_say(
    compute: ComputeThread, is_swarm: bool, stages: tuple[int, ...]
) -> None:
    tokens, after = 9, 4

    def change(model: StageModel) -> None:
        fresh = StageModel(TEXT_SHAPE)
        initialise(fresh, 4)
        named = dict(fresh.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(f"layers.{stage}." in name for stage in stages):
                    parameter.copy_(named[name])

    expected = expected_of_change(tokens, after, change)
    unchanged = continuation(model_of(), prompt_ids(), tokens)
    assert expected != unchanged
    assert EOS not in expected

    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm = swarm_of(compute, network)
            models = [service.executor.model for service in swarm.services.values()]
            sink = changing(models, after, change)
            generator = swarm.generator() if is_swarm else generator_of(compute, models)
            await generator.generate(request(sink, max_tokens=tokens, temperature=0.0))
            assert sink.pieces[after - 1].completion_tokens == after  # each of the first made a piece
            assert sink.text == TOKENIZER.decode(expected)
            if is_swarm:
                assert swarm.readings[0].read_again == 1

    trio.run(main)


def test_activations_that_are_no_numbers_are_told_and_the_swarm_forgets_the_text(compute: ComputeThread) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm = swarm_of(compute, network)
            with torch.no_grad():
                next(swarm.services[NodeId("1a")].executor.model.parameters()).fill_(torch.nan)
            with pytest.raises(NotReadyError, match="not finite numbers"):
                await swarm.generator().generate(request(Pieces()))
            assert swarm.texts == 0

    trio.run(main)


def test_a_paused_stage_reads_the_texts_of_its_own_node_only(compute: ComputeThread) -> None:
    expected = text_of_one_piece(compute)

    async def main() -> None:
        with InMemoryNetwork() as network:
            swarm, sink = swarm_of(compute, network), Pieces()
            await swarm.services[NodeId("0a")].suspend()
            with pytest.raises(NotReadyError, match="is paused"):
                await swarm.generator(patience=0.1).generate(request(sink))
            assert sink.text == ""
            swarm.own[0] = swarm.services[NodeId("0a")]
            await TextGenerator(TEXT_SHAPE, TOKENIZER, swarm.begin).generate(request(sink))
            assert sink.text == expected

    trio.run(main)


def test_training_goes_on_while_many_ask(compute: ComputeThread) -> None:
    """However many texts are read, one job of theirs at most comes before a microbatch that waits."""
    order, begin = list[str](), Event()
    stages = [text_service_of(compute, model_of(0, 1)), text_service_of(compute, model_of(1, 3))]
    for service in stages:
        service.executor.model.register_forward_pre_hook(lambda _model, _inputs: order.append("text"))
    inputs = (torch.tensor([prompt_ids()]), torch.zeros(1, 4, TEXT_SHAPE.hidden_size))

    def first_microbatch() -> None:
        begin.wait()
        order.append("microbatch")  # a text may have come before it

    async def ask(number: int) -> None:
        for _ in range(5):
            await stages[number % 2].texts.read(NodeId(f"asker {number}"), 1, 0, inputs[number % 2])

    async def main() -> None:
        compute.submit(first_microbatch)
        for _ in range(8):
            compute.submit(lambda: order.append("microbatch"))
        async with trio.open_nursery() as tasks:
            for number in range(6):
                tasks.start_soon(ask, number)
            await wait_all_tasks_blocked()
            begin.set()

    trio.run(main)
    assert order.count("text") == 30
    while_training = order[: len(order) - order[::-1].index("microbatch")]
    assert ("text", "text") not in pairwise(while_training)
