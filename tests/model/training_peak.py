"""Run as a script: trains as a node does, a round and a checkpoint included, and prints its peak resident bytes."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.host.computer import peak_megabytes
from neuroshard.model.architecture import architecture_for
from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.model.weights import flatten, initialise, load_vector
from neuroshard.optim.adamw import make_inner_optimizer
from neuroshard.optim.outer import OuterState, fresh_outer_state, nesterov_outer_step, pseudo_gradient

# what a running node has imported
LIBRARIES = (
    "fastapi uvicorn httpx trio anyio tiktoken regex prometheus_client rich typer "
    "cryptography.hazmat.primitives.asymmetric.ed25519"
)


def train_step(model: StageModel, optimizer: torch.optim.AdamW, batch: int, bf16: bool) -> None:
    architecture = model.architecture
    tokens = torch.randint(0, architecture.vocabulary_size, (batch, architecture.sequence_length + 1))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model.loss_sum(model(tokens[:, :-1]), tokens[:, 1:])
    (loss / tokens.numel()).backward()
    torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run_round(model: StageModel, state: OuterState) -> OuterState:
    """Local weights, contribution, received and aggregated vector, new state: all alive at once."""
    local = flatten(model)
    contribution = pseudo_gradient(state.anchor, local)
    received = torch.frombuffer(bytearray(contribution.numpy().data), dtype=torch.float32)
    aggregate = received.clone()
    after = nesterov_outer_step(state, aggregate, 0.7, 0.5)
    load_vector(model, after.anchor)
    return after


def stage(model: StageModel, optimizer: torch.optim.AdamW, buffer: Tensor) -> None:
    """Weights and moments into the buffer, then to a file in pieces."""
    position = 0
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
            buffer[position : position + tensor.numel()] = tensor.flatten()
            position += tensor.numel()
    with Path(os.devnull).open("wb") as sink:
        for start in range(0, len(buffer), 1 << 20):
            sink.write(buffer[start : start + (1 << 20)].numpy().data)


def evaluate_and_generate(model: StageModel, batch: int) -> None:
    architecture = model.architecture
    tokens = torch.randint(0, architecture.vocabulary_size, (batch, architecture.sequence_length))
    cache = KeyValueCache(architecture, model.layer_range)
    with torch.no_grad():
        model.loss_sum(model(tokens), tokens)
        model.logits(model(tokens[:1, :-1], cache)[:, -1:])


def main(depth: int, vocabulary: int, sequence: int, batch: int, *, threads: int, bf16: bool) -> None:
    for name in LIBRARIES.split():
        importlib.import_module(name)
    torch.set_num_threads(threads)
    model = StageModel(architecture_for(depth, vocabulary, sequence))
    initialise(model, 0)
    optimizer = make_inner_optimizer(model, InnerOptimization())
    state = fresh_outer_state(flatten(model))
    buffer = torch.zeros(3 * len(state.anchor))
    for _ in range(2):
        train_step(model, optimizer, batch, bf16)
        train_step(model, optimizer, batch, bf16)
        stage(model, optimizer, buffer)
        evaluate_and_generate(model, batch)
        state = run_round(model, state)
    sys.stdout.write(f"{peak_megabytes() * 1_000_000}\n")


if __name__ == "__main__":
    depth_, vocabulary_, sequence_, batch_, threads_, bf16_ = (int(text) for text in sys.argv[1:])
    main(depth_, vocabulary_, sequence_, batch_, threads=threads_, bf16=bool(bf16_))
