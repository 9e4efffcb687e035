"""Saved models with weights that differ everywhere, and llama.cpp as an independent reader of what they became."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import torch
from torch import Tensor

from neuroshard.model.architecture import StagePlan
from neuroshard.model.transformer import StageModel
from neuroshard.state.checkpoint_catalogue import SavedStage, choose, saved_stages
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.types import Architecture, NodeId, RunId, WalletId

CONTEXT = 256  # the least that llama.cpp takes


def made_model(architecture: Architecture, seed: int = 5) -> StageModel:
    """Weights large enough that no two tokens are nearly as likely as each other."""
    model, generator = StageModel(architecture), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)
    return model


def save_in_stages(model: StageModel, folder: Path, stage_count: int) -> tuple[SavedStage, ...]:
    """As so many nodes would have saved it, each in a data folder of its own."""
    whole = dict(model.named_parameters())
    for number, layers in enumerate(StagePlan.even(model.architecture.layer_count, stage_count)):
        part = StageModel(model.architecture, layers)
        tensors = {f"model/{name}": whole[name].detach() for name, _ in part.named_parameters()}
        staging = StagingBuffers(TensorLayout.of(tensors))
        staging.copy_from(tensors)
        meta = CheckpointMeta(
            WalletId("ab" * 8), NodeId("node"), RunId("cd" * 32), model.architecture, layers, step=7, time=1e9
        )
        place = folder / f"node-{number}" / "checkpoints" / meta.wallet_id / meta.run_id / f"layers-{number}"
        CheckpointStore(place).write(meta, staging)
    return choose(saved_stages(folder.glob("node-*/checkpoints/*/*/*"))).require_whole()


def greedy(model: StageModel, prompt: Sequence[int], count: int, never: Sequence[int]) -> list[int]:
    """The likeliest token, `count` times."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits: Tensor = model.logits(model(torch.tensor([ids])))[0, -1]
            logits[list(never)] = -torch.inf
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@contextmanager
def llama_cpp(library: ModuleType, file: Path) -> Iterator[httpx.Client]:
    """llama.cpp's own server on loopback, in float32 wherever it may choose."""
    parameters: Any = library.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = CONTEXT, 1, 0
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = library.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = library.Server(parameters)
    try:
        with httpx.Client(base_url=server.listening_address, timeout=60, trust_env=False) as client:
            yield client
    finally:
        del server
