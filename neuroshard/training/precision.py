"""Arithmetic of the inner steps: fp32, or bf16 autocast where a short probe on this computer shows a gain."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel

WORTHWHILE_GAIN = 1.15  # bf16 rounds more coarsely: a few per cent of speed are not worth it


class Precision(StrEnum):
    """Weights, gradients and moments are fp32 in both; it names what matrix products compute in."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class PrecisionProbe:
    """Seconds of one forward and backward pass in either precision, and what follows from them."""

    fp32_seconds: float
    bf16_seconds: float

    @property
    def gain(self) -> float:
        """How many times faster bf16 is."""
        return self.fp32_seconds / self.bf16_seconds

    @property
    def chosen(self) -> Precision:
        """The precision to train with."""
        return Precision.BF16 if self.gain >= WORTHWHILE_GAIN else Precision.FP32


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Context in which a forward pass runs."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision is Precision.BF16)


def probe_precision(
    model: StageModel,
    device: torch.device,
    *,
    sequences: int = 2,
    rounds: int = 3,
    max_seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> PrecisionProbe:
    """Time forward and backward in both precisions, in turns; runs on the compute thread, leaves no gradients behind.

    After one untimed pass each there are `rounds` timed ones, fewer when `max_seconds` have passed; the fastest counts.
    """
    inputs, labels = _sample(model, sequences, device)
    started = clock()
    fastest = {precision: _time_pass(model, inputs, labels, precision, clock) for precision in Precision}  # warm-up
    for turn in range(rounds):
        if clock() - started > max_seconds:
            break
        for precision in Precision:
            seconds = _time_pass(model, inputs, labels, precision, clock)
            fastest[precision] = seconds if turn == 0 else min(fastest[precision], seconds)
    return PrecisionProbe(fastest[Precision.FP32], fastest[Precision.BF16])


def _sample(model: StageModel, sequences: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    architecture = model.architecture
    shape = (sequences, architecture.sequence_length)
    ids = (torch.arange(shape[0] * shape[1], device=device) * 7919 % architecture.vocabulary_size).view(shape)
    inputs = ids if model.is_first else torch.ones((*shape, architecture.hidden_size), device=device)
    return inputs, ids if model.is_last else None


def _time_pass(
    model: StageModel, inputs: Tensor, labels: Tensor | None, precision: Precision, clock: Callable[[], float]
) -> float:
    _synchronise(inputs.device)
    started = clock()
    with autocast(inputs.device, precision):
        output = model(inputs)
        loss: Tensor = output.sum() if labels is None else model.loss_sum(output, labels)
    torch.autograd.backward(loss)
    _synchronise(inputs.device)
    seconds = clock() - started
    model.zero_grad(set_to_none=True)
    return seconds


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
