"""The optimizer takes the steps of PyTorch's own, bit for bit, and loads no compiler."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import nn
from neuroshard.optim.inner_optimizer import EagerAdamW

torch.manual_seed(0)
x = torch.randn(9, 50)
ours, theirs = nn.Linear(50, 50), nn.Linear(50, 50)
theirs.load_state_dict(ours.state_dict())
for kind, model in ((EagerAdamW, ours), (torch.optim.AdamW, theirs)):
    optimizer = kind([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=1e-2, fused=True)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=True)
        model(x).square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    print("torch._dynamo" in sys.modules)
print(torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias))
"""


def test_it_steps_as_pytorchs_own_without_its_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "True"]
