"""Replicas that average the gradient of every step, through PowerSGD, in the rounds of the laboratory."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import torch
import trio
from torch import Tensor

from benchmarks.laboratory import BATCH, INNER, Meeting, Outcome, Scheme, Start, Texts, held_out_loss, replica_data
from neuroshard.consensus.gradient_averaging import GradientAveraging, first_state
from neuroshard.consensus.sync_strategies import Abandoned
from neuroshard.model.weights import TensorSchema, load_vector
from neuroshard.pipeline.executor import StageExecutor


class AveragingReplica:
    """One replica: its data, the gradient that waits to be averaged, and the state that all share."""

    def __init__(self, texts: Texts, start: Start, number: int, averaging: GradientAveraging) -> None:
        self.executor = start.executor()
        self._texts, self._number, self._averaging = texts, number, averaging
        self._data = replica_data(start.seed, number)
        self.state = first_state(averaging.plan, start.weights, _moments(self.executor), start.steps)
        self._waiting = list[Tensor]()  # gradients (d,) of the batches since the last step
        self._residual: Tensor | None = None

    async def train(self, batches: int, meetings: Mapping[int, Meeting]) -> None:
        """So many batches, with a step after each; `meetings` are the rounds of each length.

        The gradient of a batch whose step came to nothing is part of the next step's.
        """
        for _ in range(batches):
            self._waiting.append(self._gradient())
            while await self._phase(meetings) and self.state.outer_step % self._averaging.phases:
                pass

    async def _phase(self, meetings: Mapping[int, Meeting]) -> bool:
        """One round; whether it completed."""
        averaging, before, residual = self._averaging, self.state, self._residual
        gradient = torch.stack(self._waiting).mean(dim=0)
        contribution = averaging.contribution(before, gradient, residual)
        meeting = meetings[averaging.phase(before.outer_step).length]
        outcome = await meeting.exchange(self._number, contribution, before.outer_step)
        if isinstance(outcome, Abandoned):
            return False
        self.state = averaging.next_state(before, outcome.aggregate)
        if not averaging.phase(before.outer_step).makes_basis:
            self._residual = averaging.next_residual(before, gradient, residual, outcome.sent)
            self._waiting.clear()
            load_vector(self.executor.model, self.state.anchor)
        return True

    def _gradient(self) -> Tensor:
        """Mean of a token over the next batch (d,)."""
        rows = self._texts.batch(BATCH, self._data)
        labels = rows[:, 1:]
        self.executor.loss(rows[:, :-1], labels)
        parts = [p.grad.flatten() for p in self.executor.model.parameters() if p.grad is not None]
        gradient = torch.cat(parts) / labels.numel()
        self.executor.zero()
        return gradient


def averaged(texts: Texts, start: Start, scheme: Scheme) -> Outcome:
    """Replicas that make a step together after every batch."""
    schema = TensorSchema.of(start.executor().model)
    averaging = GradientAveraging.of(schema, scheme.outer, INNER, INNER.max_grad_norm)
    replicas = [AveragingReplica(texts, start, number, averaging) for number in range(scheme.replicas)]
    lengths = (averaging.phase(number).length for number in range(averaging.phases))
    meetings = {length: Meeting(scheme) for length in lengths}

    async def train() -> None:
        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(replica.train, scheme.steps, meetings)

    trio.run(train)
    if len({one.state.velocity.numpy().tobytes() + one.state.anchor.numpy().tobytes() for one in replicas}) != 1:
        raise AssertionError("the replicas did not agree")
    met = meetings.values()
    return Outcome(
        held_out_loss(replicas[0].executor.model, texts),
        sum(one.refused for one in met),
        sum(one.caught for one in met),
        sum(one.abandoned for one in met),
        bits=8 * sum(one.sent_bytes for one in met) / (schema.total_size * scheme.steps),
    )


def _moments(executor: StageExecutor) -> tuple[Tensor, Tensor]:
    """AdamW's (d,) each, in the order of the weights."""
    states = [executor.optimizer.state[parameter] for parameter in executor.model.parameters()]
    first, second = (torch.cat([state[name].flatten() for state in states]) for name in ("exp_avg", "exp_avg_sq"))
    return first, second
