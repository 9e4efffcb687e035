"""Checks of tensors: shapes, types and value ranges that a stage accepts, and the policy for non-finite steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.pipeline.microbatch import RefusedTensorError
from neuroshard.types import Architecture, LayerRange

LARGEST_VALUE = 2.0**20  # of an activation or its gradient where it is made
LARGEST_RECEIVED = 2 * LARGEST_VALUE  # int8 and bf16 round a little upwards, on every way
LARGEST_LOSS = 10_000.0  # nats a token
LARGEST_ROUNDING = 0.02  # between outputs of the same weights, of their norm: bf16 arithmetic and int8 on the wire


def is_within(tensor: Tensor, largest: float) -> bool:
    """Whether all values are numbers and none is larger, in either direction."""
    low, high = torch.aminmax(tensor)  # NaN when one value is
    return -largest <= low.item() and high.item() <= largest


def are_alike(output: Tensor, other: Tensor) -> bool:
    """Whether two outputs of equal shape are those of the same weights, as far as rounding lets one tell."""
    expected = other.float()
    apart, size = (tensor.square().sum().item() for tensor in (output.float() - expected, expected))
    return apart <= LARGEST_ROUNDING**2 * size


def is_loss(loss_sum: float, tokens: int) -> bool:
    """Whether it can be the cross-entropy of so many tokens, summed."""
    return isfinite(loss_sum) and 0 <= loss_sum <= LARGEST_LOSS * tokens


@dataclass(frozen=True)
class StageShapes:
    """Bounds for b sequences of t tokens, with activations of d values. All checks raise RefusedTensorError."""

    batch_size: int
    sequence_length: int
    hidden_size: int
    vocabulary_size: int
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, model: StageModel, batch_size: int) -> StageShapes:
        """Those of a stage that gets at most `batch_size` sequences at once."""
        return cls.for_layers(model.architecture, model.layer_range, batch_size)

    @classmethod
    def for_layers(cls, architecture: Architecture, layers: LayerRange, batch_size: int) -> StageShapes:
        """Those of a stage elsewhere."""
        return cls(
            batch_size,
            architecture.sequence_length,
            architecture.hidden_size,
            architecture.vocabulary_size,
            is_first=layers.start == 0,
            is_last=layers.stop == architecture.layer_count,
        )

    def kept_bytes(self, tokens: int) -> int:
        """What the answers to a microbatch of so many tokens take: activations and their gradient, fp32."""
        answers = (not self.is_first) + (not self.is_last)
        return answers * tokens * self.hidden_size * 4

    def check_inputs(self, inputs: Tensor) -> None:
        """Token ids (b, t) int64 for the first stage, else activations (b, t, d) fp32."""
        if self.is_first:
            self._check(inputs, 2, torch.int64, "token ids")
        else:
            self.check_activations(inputs)

    def check_activations(self, activations: Tensor) -> None:
        """Activations or their gradient (b, t, d) fp32."""
        self._check(activations, 3, torch.float32, "activations")
        if activations.shape[2] != self.hidden_size:
            raise RefusedTensorError(f"Activations of {activations.shape[2]} values a token, not {self.hidden_size}.")

    def check_text(self, inputs: Tensor) -> None:
        """The inputs of one text."""
        self.check_inputs(inputs)
        if inputs.shape[0] != 1:
            raise RefusedTensorError(f"A text is one sequence, not {inputs.shape[0]}.")

    def check_forward(self, inputs: Tensor) -> None:
        """The inputs of a forward pass, which the last stage does not have on its own."""
        if self.is_last:
            raise RefusedTensorError("The last stage needs labels.")
        self.check_inputs(inputs)

    def check_loss(self, inputs: Tensor, labels: Tensor) -> None:
        """Inputs with labels (b, t) int64 for the last stage."""
        if not self.is_last:
            raise RefusedTensorError("Only the last stage takes labels.")
        self.check_inputs(inputs)
        self._check(labels, 2, torch.int64, "labels")
        if labels.shape != inputs.shape[:2]:
            raise RefusedTensorError(f"Labels of shape {tuple(labels.shape)} for {tuple(inputs.shape[:2])} tokens.")

    def check_values(self, inputs: Tensor, labels: Tensor | None = None) -> None:
        """Bounded activations, ids of the vocabulary; reads every value, so it runs on the compute thread."""
        if self.is_first:
            self._check_ids(inputs)
        else:
            self.check_bounded(inputs)
        if labels is not None:
            self._check_ids(labels)

    @staticmethod
    def check_bounded(activations: Tensor) -> None:
        """Values of activations or their gradient that cannot spoil what is computed of them."""
        if not is_within(activations, LARGEST_RECEIVED):
            raise RefusedTensorError("Values that are too large, or no numbers, were refused.")

    def _check(self, tensor: Tensor, dimensions: int, dtype: torch.dtype, what: str) -> None:
        if tensor.dtype is not dtype:
            raise RefusedTensorError(f"The {what} are {tensor.dtype}, not {dtype}.")
        if tensor.dim() != dimensions:
            raise RefusedTensorError(f"The {what} have {tensor.dim()} dimensions, not {dimensions}.")
        sequences, tokens = tensor.shape[0], tensor.shape[1]
        if not (1 <= sequences <= self.batch_size and 1 <= tokens <= self.sequence_length):
            raise RefusedTensorError(
                f"The {what} are for {sequences} sequences of {tokens} tokens; "
                f"at most {self.batch_size} of {self.sequence_length} are accepted."
            )

    def _check_ids(self, ids: Tensor) -> None:
        smallest, largest = torch.aminmax(ids)
        if int(smallest) < 0 or int(largest) >= self.vocabulary_size:
            raise RefusedTensorError("Token ids outside of the vocabulary were refused.")


STEPS_BEFORE_RESTORE = 3


@dataclass(frozen=True)
class NonFinitePolicy:
    """Counts skipped steps; several in a row mean that the weights are spoilt, not the data."""

    skipped: int = 0  # since the start of the run
    in_a_row: int = 0
    last_step: int | None = None  # the step that was tried when the last one was skipped

    def after_step(self, step: int, finite: bool) -> NonFinitePolicy:
        """The policy after a step was applied (finite) or skipped."""
        if finite:
            return replace(self, in_a_row=0)
        return NonFinitePolicy(self.skipped + 1, self.in_a_row + 1, step)

    @property
    def must_restore(self) -> bool:
        """Whether to go back to the last good checkpoint and pause."""
        return self.in_a_row >= STEPS_BEFORE_RESTORE

    def restored(self) -> NonFinitePolicy:
        """After the last good checkpoint is in place."""
        return replace(self, in_a_row=0)
