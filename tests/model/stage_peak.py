"""Run as a script: a middle stage works as a node's does with several microbatches open, and prints its peak bytes."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import torch
import trio
from training_peak import LIBRARIES, run_round, stage

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.host.computer import peak_megabytes
from neuroshard.model.architecture import architecture_for
from neuroshard.model.memory_need import REMEMBERED_MICROBATCHES
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import flatten, initialise
from neuroshard.optim.adamw import make_inner_optimizer
from neuroshard.optim.outer import fresh_outer_state
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import MicrobatchKey
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.types import LayerRange, NodeId

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


def main(depth: int, vocabulary: int, sequence: int, batch: int, *, open_at_a_time: int, kept_graphs: int) -> None:
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
        done = service.take("The test makes its step.")
        compute.submit(partial(executor.step, 1e-3, 1.0, done.tokens)).result()
        stage(model, executor.optimizer, buffer)
        state = run_round(model, state)
    compute.close()
    sys.stdout.write(f"{peak_megabytes() * 1_000_000}\n")


if __name__ == "__main__":
    *shape, open_, kept = (int(text) for text in sys.argv[1:])
    main(*shape, open_at_a_time=open_, kept_graphs=kept)
