"""Measures in which precision a stage trains faster on this computer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.pipeline.executor import Precision, autocast, synchronise

WORTHWHILE_GAIN = 1.15  # bf16 rounds more coarsely: a few per cent of speed are not worth it
DOUBTFUL_FACTOR = 1.1  # measured gains within this factor of WORTHWHILE_GAIN may be on its other side
MOST_ROUNDS = 4  # times the least number, while the gain is doubtful


@dataclass(frozen=True)
class PrecisionProbe:
    """Measured seconds of one forward and backward pass in each precision, and the precision that they justify."""

    fp32_seconds: float
    bf16_seconds: float

    @property
    def gain(self) -> float:
        """Factor by which bf16 is faster than fp32."""
        return self.fp32_seconds / self.bf16_seconds

    @property
    def is_doubtful(self) -> bool:
        """Whether another measurement could choose the other precision, as other programs slow some passes down."""
        return WORTHWHILE_GAIN / DOUBTFUL_FACTOR <= self.gain <= WORTHWHILE_GAIN * DOUBTFUL_FACTOR

    @property
    def chosen(self) -> Precision:
        """Precision to train with: bf16 only if it is faster by at least WORTHWHILE_GAIN."""
        return Precision.BF16 if self.gain >= WORTHWHILE_GAIN else Precision.FP32


def probe_precision(
    model: StageModel,
    device: torch.device,
    *,
    sequences: int = 2,
    rounds: int = 3,
    max_seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> PrecisionProbe:
    """Time forward and backward passes in both precisions, alternately. Runs on the compute thread.

    After one untimed pass in each precision, `rounds` timed passes follow, and more while the result is doubtful, until
    `max_seconds` have passed. The fastest pass counts. No gradients remain.
    """
    inputs, ids = _sample(model, sequences, device)
    started = clock()
    fastest = {precision: _time_pass(model, inputs, ids, precision, clock) for precision in Precision}  # warm-up
    probe = PrecisionProbe(fastest[Precision.FP32], fastest[Precision.BF16])
    for turn in range(MOST_ROUNDS * rounds):
        if (turn >= rounds and not probe.is_doubtful) or clock() - started > max_seconds:
            break
        for precision in Precision:
            seconds = _time_pass(model, inputs, ids, precision, clock)
            fastest[precision] = seconds if turn == 0 else min(fastest[precision], seconds)
        probe = PrecisionProbe(fastest[Precision.FP32], fastest[Precision.BF16])
    return probe


def _sample(model: StageModel, sequences: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs of a stage and the ids of their tokens."""
    architecture = model.architecture
    shape = (sequences, architecture.sequence_length)
    ids = (torch.arange(shape[0] * shape[1], device=device) * 7919 % architecture.vocabulary_size).view(shape)
    inputs = ids if model.is_first else torch.ones((*shape, architecture.wire_size), device=device)
    return inputs, ids


def _time_pass(
    model: StageModel, inputs: Tensor, ids: Tensor, precision: Precision, clock: Callable[[], float]
) -> float:
    synchronise(inputs.device)
    started = clock()
    with autocast(inputs.device, precision):
        output = model(inputs, ids=ids)
        loss: Tensor = model.loss_sum(output, ids) if model.is_last else output.sum()
    torch.autograd.backward(loss)
    synchronise(inputs.device)
    seconds = clock() - started
    model.zero_grad(set_to_none=True)
    return seconds
