"""The yardstick: a plain PyTorch training loop, same model, batch and fused optimizer, nothing else around it.

Run as a process of its own. Reads "SECONDS" lines from standard input; after each trains for that long and prints
one JSON line with steps and seconds.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.initial_weights import initialise
from neuroshard.model.transformer import StageModel
from neuroshard.types import Architecture


def train(architecture: Architecture, batch_size: int, threads: int, precision: str) -> None:
    """Serve training for as long as standard input is open."""
    torch.set_num_threads(threads)
    model = StageModel(architecture)
    initialise(model, seed=1)
    inner = InnerOptimization()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(inner.beta1, inner.beta2), weight_decay=inner.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(1)
    shape = (batch_size, architecture.sequence_length + 1)
    tokens = torch.randint(architecture.vocabulary_size, shape, generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss_sum(model(inputs), labels) / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.max_grad_norm)
        optimizer.step()
        loss.item()

    step()
    print(json.dumps({"matmul_flops": matmul_peak()}), flush=True)
    for line in sys.stdin:
        deadline = time.perf_counter() + float(line)
        start = time.perf_counter()
        steps = 0
        while (now := time.perf_counter()) < deadline:
            step()
            steps += 1
            now = time.perf_counter()
        print(json.dumps({"steps": steps, "seconds": now - start}), flush=True)


def matmul_peak(size: int = 2048, seconds: float = 2.0) -> float:
    """Best measured speed of a large fp32 matrix product on this process's threads, operations a second."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    train(Architecture(**given["architecture"]), given["batch_size"], given["threads"], given["precision"])
