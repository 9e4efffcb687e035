"""Measures in which precision a stage trains faster on this computer, and remembers it with the computer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.config.state_file import StateFile
from neuroshard.errors import StorageError
from neuroshard.model.transformer import StageModel
from neuroshard.pipeline.executor import Precision, autocast, synchronise

_LOG = logging.getLogger(__name__)

WORTHWHILE_GAIN = 1.15  # bf16 rounds more coarsely: a few per cent of speed are not worth it
DOUBTFUL_FACTOR = 1.1  # measured gains within this factor of WORTHWHILE_GAIN may be on its other side
STEADY_SPREAD = 1.3  # with two busy programs on two cores it was 1.5 to 2.1, and the gain 1.1 to 1.6 instead of 1.45
MOST_ROUNDS = 4  # times the least number, while the gain is doubtful or the passes are not steady


@dataclass(frozen=True)
class PrecisionProbe:
    """Measured seconds of one forward and backward pass in each precision, and the precision that they justify."""

    fp32_seconds: float
    bf16_seconds: float
    spread: float = 1.0  # of a precision's passes, median / fastest; the larger of both

    @property
    def gain(self) -> float:
        """Factor by which bf16 is faster than fp32."""
        return self.fp32_seconds / self.bf16_seconds

    @property
    def is_doubtful(self) -> bool:
        """Whether another measurement could choose the other precision, as other programs slow some passes down."""
        return WORTHWHILE_GAIN / DOUBTFUL_FACTOR <= self.gain <= WORTHWHILE_GAIN * DOUBTFUL_FACTOR

    @property
    def is_steady(self) -> bool:
        """Whether other programs left the passes alone, so that the result describes the computer."""
        return self.spread <= STEADY_SPREAD

    @property
    def chosen(self) -> Precision:
        """Precision to train with: bf16 only if it is faster by at least WORTHWHILE_GAIN."""
        return Precision.BF16 if self.gain >= WORTHWHILE_GAIN else Precision.FP32


def probe_precision(
    model: StageModel,
    device: torch.device,
    *,
    sequences: int = 2,
    rounds: int = 5,
    max_seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> PrecisionProbe:
    """Time forward and backward passes in both precisions, in turns. Runs on the compute thread.

    After one untimed pass in each precision, `rounds` timed passes in each follow, and more while the result is
    doubtful or the passes are not steady, but none after `max_seconds` except the first. The precision that comes first
    changes from round to round, and the medians count: a program that disturbs one pass, or slows down all of them by
    and by, changes no result. If the passes stay unsteady, the fastest of each precision counts: while other programs
    were busy, the medians once said that bf16 is nine times as fast. No gradients remain.
    """
    inputs, ids = _sample(model, sequences, device)
    started = clock()
    for precision in Precision:  # the first pass takes memory and chooses kernels
        _time_pass(model, inputs, ids, precision, clock)
    order, seconds = list(Precision), {precision: list[float]() for precision in Precision}
    while True:
        for precision in order:
            seconds[precision].append(_time_pass(model, inputs, ids, precision, clock))
        order.reverse()
        medians = {precision: median(passes) for precision, passes in seconds.items()}
        spread = max(medians[precision] / min(passes) for precision, passes in seconds.items())
        probe = PrecisionProbe(medians[Precision.FP32], medians[Precision.BF16], spread)
        turns = len(seconds[Precision.FP32])
        is_clear = turns >= rounds and not probe.is_doubtful and probe.is_steady
        if is_clear or turns >= MOST_ROUNDS * rounds or clock() - started > max_seconds:
            if probe.is_steady:
                return probe
            return PrecisionProbe(min(seconds[Precision.FP32]), min(seconds[Precision.BF16]), spread)


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


FILE_NAME = "precision.json"
MOST_REMEMBERED = 16  # measurements; the oldest is dropped
_Name = Annotated[str, Meta(max_length=200)]
_Seconds = Annotated[float, Meta(gt=0, lt=1e6)]


class ProbedMachine(Struct, frozen=True):
    """Everything outside the model that decides which precision is faster."""

    device: _Name  # name of the processor or of the accelerator
    torch: _Name  # version
    threads: Annotated[int, Meta(ge=1)]


class MeasuredPrecision(Struct, frozen=True):
    """The result of a probe, with the machine and the work that were measured."""

    machine: ProbedMachine
    work: _Name
    fp32_seconds: _Seconds
    bf16_seconds: _Seconds

    @property
    def probe(self) -> PrecisionProbe:
        """The result by itself."""
        return PrecisionProbe(self.fp32_seconds, self.bf16_seconds)


class MeasuredPrecisions(Struct, frozen=True):
    """Results of earlier starts, the oldest first."""

    measured: Annotated[tuple[MeasuredPrecision, ...], Meta(max_length=MOST_REMEMBERED)] = ()


def precision_file(data_dir: Path) -> StateFile[MeasuredPrecisions]:
    """The file with the results of earlier starts. A node without it measures again."""
    consequence = "the precision is measured again"
    return StateFile(data_dir / FILE_NAME, MeasuredPrecisions, "ignore", consequence, data_dir=data_dir)


class RememberedProbes:
    """Probes of this machine, which a data folder keeps from start to start.

    A result near WORTHWHILE_GAIN would otherwise choose another precision at some starts. A result from a busy computer
    counts for its start only.
    """

    def __init__(self, data_dir: Path, device_name: str, threads: int) -> None:
        self._file = precision_file(data_dir)
        self._machine = ProbedMachine(device_name[:200], str(torch.__version__), threads)

    def probe(self, model: StageModel, device: torch.device, sequences: int) -> PrecisionProbe:
        """Return the stored result for this machine and work, or measure and store it. Runs on the compute thread.

        A file that cannot be read or written is logged: the result then counts for this start only.
        """
        work = _work(model, sequences)
        stored = self._read()
        for measured in stored:
            if (measured.machine, measured.work) == (self._machine, work):
                return measured.probe
        probe = probe_precision(model, device, sequences=sequences)
        if not probe.is_steady:
            return probe
        new = MeasuredPrecision(self._machine, work, probe.fp32_seconds, probe.bf16_seconds)
        try:
            self._file.write(MeasuredPrecisions((*stored, new)[-MOST_REMEMBERED:]))
        except StorageError as error:
            _LOG.warning("%s The next start measures the precision again.", error)
        return probe

    def _read(self) -> tuple[MeasuredPrecision, ...]:
        try:
            stored = self._file.read()
        except StorageError as error:
            _LOG.warning("%s The precision is measured again.", error)
            stored = None
        return () if stored is None else stored.measured


def _work(model: StageModel, sequences: int) -> str:
    """Sizes that decide the speed of a pass."""
    a, layers = model.architecture, model.layer_range
    ends = ("embedding" if model.is_first else "", "head" if model.is_last else "")
    parts = " and ".join(filter(None, (f"{len(layers)} layers of {a.hidden_size} x {a.feed_forward_size}", *ends)))
    return f"{parts}, {a.vocabulary_size} ids, {sequences} x {a.sequence_length} tokens"
