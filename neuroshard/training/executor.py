"""Arithmetic of one stage: forward, backward and optimizer step on its layers. Runs on the compute thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import NewType, cast

import torch
from torch import Tensor

from neuroshard.errors import NeuroShardError
from neuroshard.model.transformer import StageModel
from neuroshard.training.precision import Precision, autocast

SessionId = NewType("SessionId", int)

MAX_SESSIONS = 8  # microbatches between their forward and backward pass; each holds its activations


class SessionError(NeuroShardError):
    """A microbatch this stage does not know, knows already, or has no room for; or a gradient it must refuse."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step led to."""

    loss: float | None  # mean nats a token of the accumulated microbatches; None on a stage without the loss
    grad_norm: float  # of the mean gradient, before clipping
    finite: bool  # False: nothing was changed, the gradients were dropped


@dataclass(frozen=True)
class _Session:
    inputs: Tensor  # a leaf that collects the activation gradient, or token ids in the first stage
    output: Tensor  # activations (b, t, d), or the summed loss in the last stage


class StageExecutor:
    """Model and optimizer of one layer range, with gradients accumulated over microbatches.

    Losses are sums over tokens, so gradients add up and are divided once, by the tokens of the step.
    """

    def __init__(
        self,
        model: StageModel,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        precision: Precision = Precision.FP32,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device  # where it computes; while suspended the tensors are on the CPU
        self.precision = precision
        self._max_sessions = max_sessions
        self._sessions: dict[SessionId, _Session] = {}
        self._loss_sums: list[Tensor] = []

    def forward(self, session: SessionId, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Token ids (b, t) or activations (b, t, d) -> activations, or the summed loss when labels (b, t) are given.

        What comes out is detached. Raises SessionError for a session in use or a full table.
        """
        if session in self._sessions:
            raise SessionError(f"Microbatch {session} is already open.")
        if len(self._sessions) >= self._max_sessions:
            raise SessionError(f"{self._max_sessions} microbatches are open already.", "Try again when one has ended.")
        inputs = inputs.to(self.device)
        if not self.model.is_first:
            inputs = inputs.detach().requires_grad_()
        with autocast(self.device, self.precision):
            output = self._outputs(inputs)
            if labels is not None:
                output = self.model.loss_sum(output, labels.to(self.device))
        self._sessions[session] = _Session(inputs, output)
        if labels is not None:
            self._loss_sums.append(output.detach())
        return output.detach()

    def backward(self, session: SessionId, gradient: Tensor | None = None) -> Tensor | None:
        """Accumulate parameter gradients and close the session; returns the gradient of its inputs (b, t, d).

        `gradient` is that of the session's output, None after the loss; the first stage returns None. Raises
        SessionError for an unknown session or a gradient of another shape or with non-finite values.
        """
        opened = self._sessions.get(session)
        if opened is None:
            raise SessionError(f"Microbatch {session} is not open.")
        if gradient is not None:
            gradient = gradient.to(self.device)
            if gradient.shape != opened.output.shape:
                raise SessionError(f"A gradient of shape {tuple(gradient.shape)} was sent for {opened.output.shape}.")
            if not bool(torch.isfinite(gradient).all()):
                raise SessionError("A gradient with non-finite values was refused.")
        del self._sessions[session]
        torch.autograd.backward(opened.output, gradient)
        return None if self.model.is_first else opened.inputs.grad

    def loss(self, session: SessionId, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of the last stage at once: the summed loss and the gradient of the inputs.

        Raises SessionError as `forward` does.
        """
        loss_sum = self.forward(session, inputs, labels)
        return loss_sum, self.backward(session)

    @torch.no_grad()
    def infer(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Forward without a session: activations (b, t, d), or with labels the summed loss (b,) of each sequence."""
        with autocast(self.device, self.precision):
            output = self._outputs(inputs.to(self.device))
            if labels is None:
                return output
            labels = labels.to(self.device)
            return torch.stack([self.model.loss_sum(output[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])

    def step(self, learning_rate: float, max_norm: float, token_count: int) -> StepResult:
        """One AdamW step on the accumulated gradients divided by token_count, their norm clipped to max_norm.

        A non-finite loss or gradient changes nothing. Either way the gradients are gone afterwards.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients or token_count < 1:
            raise ValueError("a step needs the gradients of at least one microbatch")
        summed_norm = torch.nn.utils.get_total_norm(gradients)
        measured = torch.stack([self._summed_loss(), summed_norm]).cpu() / token_count  # one wait for the accelerator
        loss = measured[0].item() if self._loss_sums else None
        norm = measured[1].item()
        finite = isfinite(norm) and (loss is None or isfinite(loss))
        if finite:
            self._apply(learning_rate, token_count * max(1.0, norm / max_norm))
        self.zero()
        return StepResult(loss, norm, finite)

    def zero(self) -> None:
        """Forget accumulated gradients and losses."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss_sums.clear()

    def drop_sessions(self) -> None:
        """Close all sessions without a backward pass and free their activations."""
        self._sessions.clear()

    def discard(self) -> None:
        """Drop everything between two steps: sessions, gradients, losses."""
        self.drop_sessions()
        self.zero()

    def suspend(self) -> None:
        """Free the accelerator: weights, accumulated gradients and moments move to the CPU, activations are dropped."""
        self.drop_sessions()
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def resume(self) -> None:
        """Take the accelerator again after `suspend`."""
        self._move(self.device)

    def _outputs(self, inputs: Tensor) -> Tensor:
        return cast("Callable[[Tensor], Tensor]", self.model)(inputs)

    def _summed_loss(self) -> Tensor:
        return torch.stack(self._loss_sums).sum() if self._loss_sums else torch.zeros((), device=self.device)

    def _apply(self, learning_rate: float, divisor: float) -> None:
        """Fused AdamW divides the gradients while it reads them, which saves a pass over all of them."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        scale = torch.tensor(divisor, dtype=torch.float32, device=self.device)
        self.optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.found_inf = torch.zeros_like(scale)  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
