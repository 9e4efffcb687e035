"""A tokenizer, models that fit it, and requests for text from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from small_stage import ARCHITECTURE, PARAMETERS
from torch import Tensor

from neuroshard.data.tokenizer import Tokenizer, learn_merges
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.adamw import make_inner_optimizer
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.stage_server import ServiceLimits, StageServer
from neuroshard.status.board import Generate, GeneratedText
from neuroshard.training.text_generation import SLICE_SECONDS, LocalInferenceSession, TextGenerator, allowed_ids
from neuroshard.types import LayerRange, NodeId

TOKENIZER = Tokenizer(learn_merges(["the theory of the other thing is the thing of the theory"], 20))
SHAPE = replace(ARCHITECTURE, vocabulary_size=TOKENIZER.size + 30)  # a run's vocabulary may exceed the table


@dataclass
class Pieces:
    """Collects what a sink is given."""

    pieces: list[GeneratedText] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def __call__(self, piece: GeneratedText) -> None:
        self.pieces.append(piece)
        self.threads.add(threading.current_thread().name)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def model_of(start: int = 0, stop: int = SHAPE.layer_count, seed: int = 3) -> StageModel:
    model = StageModel(SHAPE, LayerRange(start, stop))
    initialise(model, seed)
    return model


def service_of(compute: ComputeThread, model: StageModel, limits: ServiceLimits | None = None) -> StageServer:
    executor = StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"))
    service = StageServer(compute, executor, sequences_per_step=4, batch_size=2, limits=limits)
    service.open()
    return service


def generator_of(
    compute: ComputeThread, models: Sequence[StageModel], slice_seconds: float = SLICE_SECONDS
) -> TextGenerator:
    """Of a node that holds all stages."""
    texts = [service_of(compute, model).texts for model in models]
    return TextGenerator(
        SHAPE, TOKENIZER, lambda: LocalInferenceSession(compute, texts, NodeId("node"), slice_seconds=slice_seconds)
    )


def request(sink: Callable[[GeneratedText], None], prompt: str = "the th", **changes: object) -> Generate:
    base = Generate(prompt, 12, 1.0, 1.0, (), 5, sink, threading.Event())
    return replace(base, **changes)  # type: ignore[arg-type]


def continuation(model: StageModel, ids: Sequence[int], count: int) -> list[int]:
    """Greedy continuation that reads the whole text for every token, or its end beyond the context."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(next_logits(model, ids).argmax()))
    return ids[-count:]


@torch.no_grad()
def next_logits(model: StageModel, ids: Sequence[int]) -> Tensor:
    """Of what may follow a text."""
    logits = model.logits(model(torch.tensor([list(ids)[-SHAPE.sequence_length :]])))[0, -1]
    return torch.where(allowed_ids(TOKENIZER.size, SHAPE.vocabulary_size), logits, -torch.inf)


def prompt_ids(prompt: str = "the th") -> list[int]:
    return TOKENIZER.encode(prompt, bos=True).tolist()
