"""Held-out evaluation as the node that drives does it: pinned once, measured when due, told to the data feed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio

from neuroshard.data.feed import HeldOut
from neuroshard.training.control import Control, Requests
from neuroshard.training.examination import Examiner
from neuroshard.training.microbatch import StageError
from neuroshard.training.pace import DataWait, Pace
from neuroshard.training.parts import Driving
from neuroshard.training.progress import NotedLoss
from neuroshard.training.record import TrainingRecord

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # after a stage that could not be measured


class HeldOutWatch:
    """Keeps the evaluations of a record, which belongs to the loop that asks."""

    def __init__(
        self,
        driving: Driving,
        batch_size: int,
        *,
        control: Control,
        pace: Pace,
        waiting: DataWait,
        wall_clock: Callable[[], float],
    ) -> None:
        self._driving = driving
        self._batch_size = batch_size
        self._control = control
        self._pace = pace
        self._waiting = waiting
        self._wall_clock = wall_clock
        self._examiner: Examiner | None = None

    @property
    def held_out(self) -> HeldOut | None:
        """The pinned sequences, once they are here."""
        return None if self._examiner is None else self._examiner.held_out

    def tell_feed_again(self, record: TrainingRecord) -> None:
        """A feed that goes on where the record stops must know the losses of the shard it is in."""
        feed, progress = self._driving.feed, record.progress
        if progress.position != feed.position:
            record.progress = replace(progress, noted=())
        for noted in record.progress.noted:
            feed.note_evaluation(noted.train_loss, noted.held_out_loss, noted.step)

    def is_ready(self, record: TrainingRecord) -> bool:
        """Whether steps may be made: only after an evaluation that all others are compared with.

        Who goes on from the work of others makes its first one after a step: meanwhile the swarm has its help.
        """
        return self._examiner is not None and (not record.evaluations.is_empty or record.inherited.steps > 0)

    async def get_ready(self, record: TrainingRecord, requests: Requests) -> None:
        """Pin the sequences or measure the first loss, unless a request comes first."""
        if self._examiner is None:
            await self._pin(record, requests)
        elif await self.measure(record) is None:
            await requests.unless_waiting(lambda: anyio.sleep(RETRY_SECONDS))

    def is_due(self, record: TrainingRecord) -> bool:
        """Whether to measure now, after another step."""
        return self._examiner is not None and self._examiner.is_due(record, self._pace.step_seconds)

    async def measure(self, record: TrainingRecord) -> float | None:
        """The mean held-out loss; None when it is not finite, or given up for a request or for want of a stage."""
        examiner, control, now = self._examiner, self._control, self._wall_clock()
        if examiner is None or control.must_hold:
            return None
        try:
            evaluation = await control.until_changed(lambda: examiner.evaluate(record, now))
        except StageError as error:
            _LOG.warning("The held-out loss could not be measured: %s", error)
            evaluation = None
        self._pace.restart()  # the pace of the steps is told without evaluations
        if evaluation is None:
            return None
        if not evaluation.is_finite:
            policy = replace(record.progress.non_finite, last_step=record.progress.steps)
            record.progress = replace(record.progress, non_finite=policy)
            _LOG.warning("The held-out loss at step %d is not a number.", evaluation.step)
            if record.evaluations.is_empty:  # without a baseline no step is made: do not try for ever
                control.pause("Paused: the held-out loss is not a number. Resume to measure it again.")
            return None
        _LOG.info("Held-out loss at step %d: %.3f nats a token.", evaluation.step, evaluation.mean)
        return evaluation.mean

    def note(self, record: TrainingRecord, held_out_loss: float | None) -> None:
        """Tell the feed the losses of the last step, so that it can leave a memorised shard."""
        steps, loss = record.progress.steps, record.progress.loss
        if loss is None:
            return
        self._driving.feed.note_evaluation(loss, held_out_loss, steps)
        record.progress = record.progress.with_noted(NotedLoss(steps, loss, held_out_loss))

    async def _pin(self, record: TrainingRecord, requests: Requests) -> None:
        held_out = await self._waiting.timed(lambda: requests.unless_waiting(self._driving.feed.held_out))
        if held_out is not None:
            self._examiner = Examiner(self._driving.routing, held_out, self._batch_size)
            self._examiner.prepare(record)
