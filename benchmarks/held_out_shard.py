"""The loss of a node's saved model on all of a held-out shard, so that nodes of different runs can be compared.

A run's id selects its held-out shard and the few windows of it that its nodes measure. Shards differ by more than the
ways of training do, so the nodes' own figures compare runs only if all their parameters are equal.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.node_process import TOKEN, NodeProcess
from neuroshard.config.run_parameters import RunParameters
from neuroshard.data.shard_assignment import held_out_shards
from neuroshard.data.windows import window_count
from neuroshard.identity import Wallet, parse_token
from neuroshard.identity.run_parameters import run_id
from neuroshard.model.transformer import StageModel
from neuroshard.state.checkpoint_catalogue import DamagedStageError, SavedStage, saved_stages
from neuroshard.state.checkpoint_store import find_stage_folders
from neuroshard.state.export import SharedWeights
from neuroshard.types import ShardId

SAVE_SECONDS = 120.0


def held_out_of(run: RunParameters) -> ShardId:
    """The first held-out shard of a run of the benchmark's wallet."""
    owner = Wallet.from_secret(parse_token(TOKEN)).public_key
    return next(held_out_shards(run_id(owner, run), run.genesis.total_shards))


def with_held_out(run: RunParameters, shard: ShardId) -> RunParameters:
    """The same run under a name with which this shard is held out."""
    named = (replace(run, name=f"benchmark {number}") for number in count())
    return next(one for one in named if held_out_of(one) == shard)


def shard_windows(genesis: Path, run: RunParameters) -> Tensor:
    """All windows (n, sequence length + 1) of a run's held-out shard in a folder of format 2 with 16-bit ids."""
    length = run.architecture.sequence_length
    tokens = np.fromfile(genesis / f"shard_{held_out_of(run)}.bin", dtype="<u2").astype(np.int64)
    windows = window_count(len(tokens), length)
    return torch.from_numpy(tokens[: windows * (length + 1)].reshape(windows, length + 1))


def saved_loss(node: NodeProcess, step: int, rows: Tensor) -> float:
    """Save a node that has passed this step, and return the loss of what it would export.

    The loss is in nats per token of the windows `rows` (n, t + 1). Raises TimeoutError.
    """
    node.post("/api/checkpoints")
    deadline = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < deadline:
        stages = saved_stages(find_stage_folders(node.data_dir))
        try:
            if stages and stages[0].manifest.meta.step >= step:
                return exported_loss(stages[0], rows)
        except DamagedStageError:  # the node has deleted it meanwhile, and has a newer one
            continue
        time.sleep(0.2)
    raise TimeoutError(f"the node saved no state of step {step} or later within {SAVE_SECONDS:.0f} s")


def exported_loss(stage: SavedStage, rows: Tensor) -> float:
    """Nats per token of a whole model as other programs get it, on these windows (n, t + 1)."""
    model = StageModel(stage.architecture)
    model.load_state_dict(dict(SharedWeights(stage)))
    with torch.no_grad():
        losses = [model.loss_sum(model(part[:, :-1]), part[:, 1:]).item() for part in rows.split(8)]
    return sum(losses) / rows[:, 1:].numel()
