"""Cross-entropy at 32,000 ids: row chunks with the gradient in the forward pass against the plain form."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median

from benchmarks.record import Report, Row
from benchmarks.sizes import size

ROWS, WIDTH, VOCABULARY = size((2048, 256, 32_000), (64, 16, 1000))
REPEATS, TURNS = size((7, 3), (1, 1))


def measure() -> Report:
    """Each form in a process of its own, so that its peak memory is its own; interleaved."""
    plain: list[dict[str, float]] = []
    chunked: list[dict[str, float]] = []
    for _ in range(TURNS):
        plain.append(_in_process("plain"))
        chunked.append(_in_process("chunked"))
    time_ratio = median(c["seconds"] / p["seconds"] for c, p in zip(chunked, plain, strict=True))
    peak_ratio = median(c["peak_mb"] / p["peak_mb"] for c, p in zip(chunked, plain, strict=True))
    return Report(
        "loss_kernel",
        "Cross-entropy at 32,000 ids (2,048 tokens, d 256)",
        (
            Row("step time, chunks / plain", f"{time_ratio:.2f}", "<= 0.6", time_ratio <= 0.6),
            Row("peak resident memory, chunks / plain", f"{peak_ratio:.2f}", "<= 0.7", peak_ratio <= 0.7),
            Row("plain", f"{plain[0]['seconds'] * 1e3:.0f} ms, {plain[0]['peak_mb']:.0f} MB", "report", None),
            Row("chunks", f"{chunked[0]['seconds'] * 1e3:.0f} ms, {chunked[0]['peak_mb']:.0f} MB", "report", None),
        ),
        ("The step is head, loss and both gradients; peak memory is the whole process, imports included.",),
    )


def _in_process(form: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loss_kernel", form]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(output))


def _time_form(form: str) -> dict[str, float]:
    import resource

    import torch
    from torch.nn import functional

    from neuroshard.model.transformer import cross_entropy_sum

    torch.manual_seed(1)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = (0.02 * torch.randn(VOCABULARY, WIDTH)).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,))

    def step() -> None:
        hidden.grad = weight.grad = None
        if form == "plain":
            loss = functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
        else:
            loss = cross_entropy_sum(hidden, weight, labels)
        loss.backward()

    step()
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return {"seconds": median(seconds), "peak_mb": peak_mb}


if __name__ == "__main__":
    print(json.dumps(_time_form(sys.argv[1])))
