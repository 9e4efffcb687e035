"""PyTorch's compiler and symbolic mathematics take 100 MB and seconds to load: nothing that a node does needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = 'print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])'
LAYOUT = """
import sys
from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.types import Architecture, LayerRange

snapshot_layout(Architecture(64, 2, 2, 1, 128, 512, 32), LayerRange(0, 2))
"""
MICROBATCH = """
import sys
import torch
from neuroshard.model.transformer import StageModel
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.pipeline.executor import StageExecutor
from neuroshard.types import Architecture, LayerRange

architecture = Architecture(64, 3, 2, 1, 128, 512, 32)
first, middle, last = [
    StageExecutor(model, make_inner_optimizer(model, InnerOptimization()), torch.device("cpu"))
    for model in (StageModel(architecture, LayerRange(number, number + 1)) for number in range(3))
]
ids = torch.zeros(1, 32, dtype=torch.long)
opened = first.forward(ids)
further = middle.forward(opened.output.detach(), keeps_graph=False)
_, gradient = last.loss(further.output.detach(), ids)
first.backward(opened, middle.backward(further, gradient))
for stage in (first, middle, last):
    stage.step(1e-3, 1.0, 32)
last.infer(further.output, ids)
middle.read(opened.output[:, :1].detach(), middle.empty_cache())
"""


@pytest.mark.parametrize("program", [LAYOUT, MICROBATCH], ids=["the layout of a snapshot", "a microbatch and its step"])
def test_no_compiler_is_loaded(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program + LOADED], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
