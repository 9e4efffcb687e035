"""Small checkpoints whose values show their step. Their form is real; no model has these tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import Expectation
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.types import Architecture, DataPosition, LayerRange, NodeId, RunId, ShardId, WalletId

SHAPE = Architecture(8, 2, 2, 1, 16, 100, 32)
LAYERS = LayerRange(0, 2)
EXPECTED = Expectation(WalletId("w" * 16), RunId("r" * 64), SHAPE, LAYERS)


def tensors_at(step: int, size: int = 50) -> dict[str, Tensor]:
    """Values that tell their step; types of every width and shapes of 0 to 3 dimensions."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model/embedding.weight": torch.randn(size, 3, generator=generator),
        "model/layers.0.norm.weight": torch.full((1, 2, 3), float(step)),
        "inner/layers.0.norm.weight/step": torch.tensor(float(step)),
        "inner/layers.0.norm.weight/exp_avg": torch.randn(7, generator=generator).bfloat16(),
        "extra/count": torch.tensor([step, -step], dtype=torch.int64),
        "extra/empty": torch.zeros(0, 4),
        "outer/anchor": torch.randn(size, generator=generator),
    }


def meta_at(step: int, *, outer_step: int = 0, inner_step: int = 0, shape: Architecture = SHAPE) -> CheckpointMeta:
    return CheckpointMeta(
        wallet_id=EXPECTED.wallet_id,
        node_id=NodeId("node"),
        run_id=EXPECTED.run_id,
        architecture=shape,
        layers=LAYERS,
        step=step,
        time=1000.0 + step,
        loss=0.1 + step,
        outer_step=outer_step,
        inner_step=inner_step,
        data_position=DataPosition(1, ShardId(2), 3),
    )


def staged(step: int, size: int = 50) -> StagingBuffers:
    tensors = tensors_at(step, size)
    staging = StagingBuffers(TensorLayout.of(tensors))
    staging.copy_from(tensors)
    return staging


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype and torch.equal(value, second[name]) for name, value in first.items()
    )
