"""The yardstick: a plain PyTorch training loop, same model, batch and fused optimizer, nothing else around it.

Run as a process of its own. Reads "SECONDS" lines from standard input; after each trains for that long and prints
one JSON line with steps, seconds and CPU-seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.sizes import size
from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.types import Architecture


@dataclass(frozen=True)
class Settings:
    """How it trains."""

    architecture: Architecture
    batch_size: int
    threads: int
    precision: str  # fp32 or bf16
    device: str
    compiled: bool

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products compute in."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def training_step(settings: Settings) -> Callable[[], None]:
    """One step of a new model on one fixed batch."""
    architecture = settings.architecture
    model = StageModel(architecture)
    initialise(model, seed=1)
    model.to(settings.device)
    if settings.compiled:
        for layer in model.layers.values():
            layer.compile()
    inner = InnerOptimization()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(inner.beta1, inner.beta2), weight_decay=inner.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(1)
    shape = (settings.batch_size, architecture.sequence_length + 1)
    tokens = torch.randint(architecture.vocabulary_size, shape, generator=generator).to(settings.device)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(settings.device, dtype=torch.bfloat16, enabled=settings.precision == "bf16"):
            loss = model.loss_sum(model(inputs), labels) / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.max_grad_norm)
        optimizer.step()
        loss.item()

    return step


def serve(settings: Settings) -> None:
    """Train as standard input asks, for as long as it is open."""
    torch.set_num_threads(settings.threads)
    step = training_step(settings)
    step()
    print(json.dumps({"matmul_flops": matmul_peak(settings)}), flush=True)
    for line in sys.stdin:
        deadline = time.perf_counter() + float(line)
        start, cpu_at_start = time.perf_counter(), time.process_time()
        steps = 0
        while (now := time.perf_counter()) < deadline:
            step()
            steps += 1
            now = time.perf_counter()
        cpu_seconds = time.process_time() - cpu_at_start
        print(json.dumps({"steps": steps, "seconds": now - start, "cpu_seconds": cpu_seconds}), flush=True)


def matmul_peak(settings: Settings, seconds: float = size(2.0, 0.1)) -> float:
    """Best measured speed of a large matrix product on this process's threads, operations a second.

    fp32 on a CPU, whatever the precision of the training.
    """
    on_cpu = settings.device == "cpu"
    size = 2048 if on_cpu else 8192
    dtype = torch.float32 if on_cpu else settings.dtype
    left, right = (torch.randn(size, size, device=settings.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        if not on_cpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    architecture = Architecture(**given.pop("architecture"))
    serve(Settings(architecture=architecture, **given))
