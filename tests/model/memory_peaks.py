"""A program that does the work of a node, or of a middle stage with open microbatches, and prints its peak bytes.

memory_peaks.py training DEPTH VOCABULARY SEQUENCE BATCH THREADS BF16 MUON
memory_peaks.py stage DEPTH VOCABULARY SEQUENCE BATCH OPEN KEPT
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import torch
import trio
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.host.computer import peak_megabytes
from neuroshard.model.architecture import architecture_for
from neuroshard.model.memory_need import REMEMBERED_MICROBATCHES
from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.model.weights import flatten, initialise, load_vector
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.optim.outer import OuterState, fresh_outer_state, nesterov_outer_step
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import MicrobatchKey
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.types import LayerRange, NodeId

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
    contribution = state.anchor - local
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
        for tensor in (parameter.detach(), *(moment for moment in moments.values() if moment.dim())):
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


def train(depth: int, vocabulary: int, sequence: int, batch: int, *, threads: int, bf16: bool, muon: bool) -> None:
    for name in LIBRARIES.split():
        importlib.import_module(name)
    torch.set_num_threads(threads)
    model = StageModel(architecture_for(depth, vocabulary, sequence))
    initialise(model, 0)
    optimizer = make_inner_optimizer(model, InnerOptimization(optimizer="muon" if muon else "adamw"))
    state = fresh_outer_state(flatten(model))
    moments = [moment for held in optimizer.state.values() for moment in held.values()]
    buffer = torch.zeros(len(state.anchor) + sum(moment.numel() for moment in moments if moment.dim()))
    for _ in range(2):
        train_step(model, optimizer, batch, bf16)
        train_step(model, optimizer, batch, bf16)
        stage(model, optimizer, buffer)
        evaluate_and_generate(model, batch)
        state = run_round(model, state)
    sys.stdout.write(f"{peak_megabytes() * 1_000_000}\n")


DRIVER = NodeId("driver")
MICROBATCHES_OF_SESSION = 8


async def drive(service: StageServer, batch: int, open_at_a_time: int, *, first: int) -> None:
    """Microbatches in waves, as far apart as a pipeline lets them be; their sessions are closed in the end."""
    architecture = service.executor.model.architecture
    shape = (batch, architecture.sequence_length, architecture.hidden_size)
    count = open_at_a_time + REMEMBERED_MICROBATCHES
    keys = [MicrobatchKey(DRIVER, *divmod(number, MICROBATCHES_OF_SESSION)) for number in range(first, first + count)]
    for start in range(0, count, open_at_a_time):
        wave = keys[start : start + open_at_a_time]
        for key in wave:
            await service.forward(key, torch.randn(shape))
        for key in wave:
            await service.backward(key, torch.randn(shape))
    for session in {key.session for key in keys}:
        service.close(DRIVER, session)


def drive_stage(
    depth: int, vocabulary: int, sequence: int, batch: int, *, open_at_a_time: int, kept_graphs: int
) -> None:
    for name in LIBRARIES.split():
        importlib.import_module(name)
    torch.set_num_threads(1)
    model = StageModel(architecture_for(depth, vocabulary, sequence), LayerRange(1, depth - 1))
    initialise(model, 0)
    executor = StageExecutor(model, make_inner_optimizer(model, InnerOptimization()), torch.device("cpu"))
    compute = ComputeThread(1)
    sequences = batch * (open_at_a_time + REMEMBERED_MICROBATCHES)
    service = StageServer(compute, executor, sequences_per_step=sequences, batch_size=batch, kept_graphs=kept_graphs)
    state = fresh_outer_state(flatten(model))
    buffer = torch.zeros(3 * len(state.anchor))
    for turn in range(2):  # what the first leaves behind is there in the second
        service.open()
        trio.run(partial(drive, service, batch, open_at_a_time, first=turn * 1000))
        service.intake.close("The test makes its step.")
        done = service.intake.take()
        compute.submit(partial(executor.step, 1e-3, 1.0, done.tokens)).result()
        stage(model, executor.optimizer, buffer)
        state = run_round(model, state)
    compute.close()
    sys.stdout.write(f"{peak_megabytes() * 1_000_000}\n")


if __name__ == "__main__":
    values = [int(text) for text in sys.argv[2:]]
    if sys.argv[1] == "training":
        *shape, threads_, bf16_, muon_ = values
        train(*shape, threads=threads_, bf16=bool(bf16_), muon=bool(muon_))
    else:
        *shape, open_, kept = values
        drive_stage(*shape, open_at_a_time=open_, kept_graphs=kept)
