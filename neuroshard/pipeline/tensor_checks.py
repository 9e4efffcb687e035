"""Checks of tensors: shapes, types and value ranges that a stage accepts."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.pipeline.microbatch import RefusedTensorError, SpoiltMicrobatchError
from neuroshard.types import MAX_LOSS, Architecture, LayerRange

LARGEST_VALUE = 2.0**20  # of an activation or its gradient when it is computed
LARGEST_RECEIVED = 2 * LARGEST_VALUE  # int8 and bf16 may round up a little
# Relative norm, between outputs of equal weights: bf16 arithmetic with int8 on the wire, or with int4. Where outputs
# differ by 1 %, one code of int4 in fifty differs, each by more than a third of a standard deviation.
LARGEST_ROUNDING, LARGEST_ROUNDING_INT4 = 0.02, 0.1


def is_within(tensor: Tensor, largest: float) -> bool:
    """Whether all values are finite and at most `largest` in magnitude."""
    low, high = torch.aminmax(tensor)  # NaN if any value is NaN
    return -largest <= low.item() and high.item() <= largest


def are_alike(output: Tensor, other: Tensor, largest: float = LARGEST_ROUNDING) -> bool:
    """Whether two outputs of equal shape come from the same weights, up to rounding by `largest`."""
    expected = other.float()
    apart, size = (tensor.square().sum().item() for tensor in (output.float() - expected, expected))
    return apart <= largest**2 * size


def is_loss(loss_sum: float, tokens: int) -> bool:
    """Whether the value can be a cross-entropy in nats, summed over this number of tokens."""
    return isfinite(loss_sum) and 0 <= loss_sum <= MAX_LOSS * tokens


def checked_loss(loss_sum: Tensor, labels: Tensor) -> float:
    """Return the value of a loss in nats, summed over the labels. Raises SpoiltMicrobatchError if it cannot be one."""
    loss = loss_sum.item()
    if not is_loss(loss, labels.numel()):
        raise SpoiltMicrobatchError("The loss of this microbatch is not a number.")
    return loss


@dataclass(frozen=True)
class StageShapes:
    """Bounds for b sequences of t tokens, with activations of d values. All checks raise RefusedTensorError.

    In a run with a subspace, activations are its coefficients, and `hidden_size` is their number k.
    """

    batch_size: int
    sequence_length: int
    hidden_size: int
    vocabulary_size: int
    is_first: bool
    is_last: bool
    needs_ids: bool = False  # the inputs are coefficients and come with the ids of their tokens
    sends_ids: bool = False  # the next stage needs the ids with this stage's output

    @classmethod
    def of(cls, model: StageModel, batch_size: int) -> StageShapes:
        """Bounds for a model that gets at most `batch_size` sequences at once."""
        return cls.for_layers(model.architecture, model.layer_range, batch_size)

    @classmethod
    def for_layers(cls, architecture: Architecture, layers: LayerRange, batch_size: int) -> StageShapes:
        """Bounds for the stage with these layers, whose model need not be on this node."""
        has_subspace = architecture.subspace_rank > 0
        return cls(
            batch_size,
            architecture.sequence_length,
            architecture.wire_size,
            architecture.vocabulary_size,
            is_first=layers.start == 0,
            is_last=layers.stop == architecture.layer_count,
            needs_ids=has_subspace and layers.start > 0,
            sends_ids=has_subspace and layers.stop < architecture.layer_count,
        )

    def kept_bytes(self, tokens: int) -> int:
        """Bytes kept for the answers to a microbatch of this number of tokens: activations and gradient fp32, ids."""
        answers = (not self.is_first) + (not self.is_last)
        return tokens * (answers * self.hidden_size * 4 + self.sends_ids * 8)

    def check_inputs(self, inputs: Tensor, ids: Tensor | None = None) -> None:
        """Check token ids (b, t) int64 for the first stage, or activations (b, t, d) fp32 for other stages.

        Coefficients need `ids` (b, t) int64 of their tokens; other inputs must have none.
        """
        if self.is_first:
            self._check(inputs, 2, torch.int64, "token ids")
        else:
            self.check_activations(inputs)
        if (ids is None) == self.needs_ids:
            raise RefusedTensorError("Coefficients need the ids of their tokens, and other inputs come without ids.")
        if ids is not None:
            self._check(ids, 2, torch.int64, "token ids")
            if ids.shape != inputs.shape[:2]:
                raise RefusedTensorError(f"Ids of shape {tuple(ids.shape)} for {tuple(inputs.shape[:2])} tokens.")

    def check_activations(self, activations: Tensor) -> None:
        """Check shape and type of activations or their gradient (b, t, d) fp32."""
        self._check(activations, 3, torch.float32, "activations")
        if activations.shape[2] != self.hidden_size:
            raise RefusedTensorError(f"Activations of {activations.shape[2]} values per token, not {self.hidden_size}.")

    def check_text(self, inputs: Tensor, ids: Tensor | None = None) -> None:
        """Check the inputs of one text, which is a single sequence."""
        self.check_inputs(inputs, ids)
        if inputs.shape[0] != 1:
            raise RefusedTensorError(f"A text is one sequence, not {inputs.shape[0]}.")

    def check_forward(self, inputs: Tensor, ids: Tensor | None = None) -> None:
        """Check the inputs of a forward pass. The last stage refuses one without labels."""
        if self.is_last:
            raise RefusedTensorError("The last stage needs labels.")
        self.check_inputs(inputs, ids)

    def check_loss(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> None:
        """Check inputs and labels (b, t) int64 of the last stage."""
        if not self.is_last:
            raise RefusedTensorError("Only the last stage takes labels.")
        self.check_inputs(inputs, ids)
        self._check(labels, 2, torch.int64, "labels")
        if labels.shape != inputs.shape[:2]:
            raise RefusedTensorError(f"Labels of shape {tuple(labels.shape)} for {tuple(inputs.shape[:2])} tokens.")

    def check_values(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> None:
        """Check the range of activations and ids. Reads every value, so it runs on the compute thread."""
        if self.is_first:
            self._check_ids(inputs)
        else:
            self.check_bounded(inputs)
        for given in (labels, ids):
            if given is not None:
                self._check_ids(given)

    @staticmethod
    def check_bounded(activations: Tensor) -> None:
        """Check that activations or their gradient are finite and at most LARGEST_RECEIVED in magnitude."""
        if not is_within(activations, LARGEST_RECEIVED):
            raise RefusedTensorError("Values that are too large or not numbers were refused.")

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
