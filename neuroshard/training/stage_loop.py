"""The life of one stage that a node holds: collect, step, pause, save, end. All stages of a node obey one control."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from neuroshard.status.snapshot import NodeState
from neuroshard.training.checkpoint.writer import WriteReport
from neuroshard.training.control import Control, Requests, first_of
from neuroshard.training.microbatch import AcceleratorFullError
from neuroshard.training.pace import Pace
from neuroshard.training.record import TrainingRecord
from neuroshard.training.service_limits import Hold
from neuroshard.training.stage_trainer import StageTrainer

_LOG = logging.getLogger(__name__)

SECONDS_TO_LIE_DOWN = 10.0  # of a pause: a shorter one is not worth writing to the disk
SECONDS_TO_ROOM = 60.0  # after so long an accelerator that was full is tried again
FULL = "Paused for a minute: the accelerator has no memory left. Another program may have it."


class StageLoop:
    """Does one thing at a time; while none is asked for, the intake is open and microbatches come.

    A stage closes only after the stages before it on this node have: what these have begun can so end in this one.
    """

    def __init__(
        self,
        stage: StageTrainer,
        control: Control,
        *,
        before: StageLoop | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is the stage before this one on this node; `changed` is told every change of `state`."""
        self.stage = stage
        self.state = NodeState.STARTING  # or TRAINING, or PAUSED once the accelerator is free
        self.last_report: WriteReport | None = None
        self.requests = Requests(control)
        self._control = control
        self._service = stage.parts.service
        self._before = before
        self._changed = changed
        self._held_since: float | None = None  # when this loop saw that it must hold

    @property
    def record(self) -> TrainingRecord:
        """What the stage knows beside tensors."""
        return self.stage.record

    @property
    def steps(self) -> int:
        """Applied inner steps so far."""
        return self.stage.steps

    @property
    def pace(self) -> Pace:
        """How fast they come."""
        return self.stage.pace

    @property
    def is_kept(self) -> bool:
        """Whether there are checkpoints of it."""
        return self.stage.parts.saver is not None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in work that the next stage of this node would have to do as well."""
        intake = self._service.intake
        return (self._before is None or self._before.is_quiet) and not intake.is_admitting and intake.is_idle

    async def run(self, last_step: int | None = None) -> None:
        """Until the control says stop, or the stage has made `last_step`."""
        stage, control, intake = self.stage, self._control, self._service.intake
        while True:
            self._note_hold()
            if self._service.lacks_memory:
                await self._make_room()
            elif intake.is_full:
                await stage.step()
            elif self._service.is_spoilt:
                await stage.recover()
            elif control.must_hold and self._before is not None and not self._before.is_quiet:
                await self._let_through(self._before)
            elif control.must_hold and intake.is_admitting:
                hold = Hold.END if control.is_stopping else Hold.PAUSE
                await self._service.drain(control.must_hold, hold, began=self._held_since)
            elif control.is_stopping or (last_step is not None and self.steps >= last_step):
                return
            elif control.is_paused:
                await self._pause()
            elif self.requests.save_wanted:
                await self._save()
            elif stage.watch is not None and not stage.watch.is_ready(self.record):
                await self._get_ready()
            elif stage.is_called or stage.is_overdue:
                await self._synchronise()
            else:
                await self._collect()

    async def settle(self) -> None:
        """Drop the step in work and save what the steps before it reached."""
        await self._service.leave()
        await self._save()
        if self.stage.parts.saver is not None:
            await self.stage.parts.saver.close()

    async def until_quiet(self) -> None:
        """Wait until `is_quiet`, which is so for good while the control says hold."""
        if self._before is not None:
            await self._before.until_quiet()
        intake = self._service.intake
        await intake.until(lambda: not intake.is_admitting and intake.is_idle)

    async def _collect(self) -> None:
        """Let microbatches in until they are enough for a step, or a request comes; what is done stays."""
        self._begin()
        self._service.intake.open()
        filled = self._service.filled
        await first_of(lambda: self.requests.unless_waiting(filled), self.stage.called, self.stage.overdue)

    async def _synchronise(self) -> None:
        """A round with other replicas, between two microbatches; whoever asks to hold ends it."""
        await self._service.drain("The replicas of this stage synchronise.")
        if not self._service.lacks_memory:  # what is accumulated may go into the round
            await first_of(self.stage.take_part, self._held)

    def _note_hold(self) -> None:
        """All stages of the node have the same time to end what is open, whichever of them ends first."""
        if self._control.must_hold is None:
            self._held_since = None
            return
        self.stage.withdraw()
        if self._held_since is None:
            self._held_since = anyio.current_time()

    async def _held(self) -> None:
        while self._control.must_hold is None:
            await self._control.changed()

    async def _let_through(self, before: StageLoop) -> None:
        """Let in what the stage before has begun, though no more will begin there."""
        self._service.intake.open()
        await first_of(self._service.filled, before.until_quiet, self._control.changed)

    async def _get_ready(self) -> None:
        watch = self.stage.watch
        if watch is None:
            return
        await watch.get_ready(self.record, self.requests)
        if watch.held_out is not None:
            self._begin()

    async def _pause(self) -> None:
        """Hold until asked to go on, or to stop, for which no accelerator is needed; save when asked meanwhile."""
        await self._service.suspend()
        self._set_state(NodeState.PAUSED)
        while self._is_held or not (self._control.is_stopping or await self._has_resumed()):
            if self.requests.save_wanted:
                await self._save()
            else:
                await first_of(self._rest, self._asked)
        if self._control.is_stopping:
            return
        if self.stage.parts.saver is not None:
            await self.stage.parts.saver.get_up()
        self.pace.restart()
        self._set_state(NodeState.TRAINING)

    async def _has_resumed(self) -> bool:
        try:
            await self._service.resume()
        except AcceleratorFullError as error:
            _LOG.warning("Training does not go on: %s", error)
            self._wait_for_room()
            self._set_state(NodeState.PAUSED)  # whoever waits for the end of the pause looks again
            return False
        return True

    async def _make_room(self) -> None:
        """The step in work is given up: what has failed for want of memory may have left a part of its gradients."""
        await self._service.discard("The accelerator has no memory left.")
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Pause for a while, unless a pause is wanted anyhow."""
        if self._control.must_hold is None:
            self._control.pause(FULL, SECONDS_TO_ROOM)

    @property
    def _is_held(self) -> bool:
        return self._control.is_paused and not self._control.is_stopping

    async def _rest(self) -> None:
        """Need no more memory than a stage that waits."""
        saver = self.stage.parts.saver
        if saver is not None:
            await saver.rest()
            await anyio.sleep(max(SECONDS_TO_LIE_DOWN, saver.seconds_to_lie_down()))
            await saver.lie_down(lambda: self._is_held and not self.requests.save_wanted)
        await anyio.sleep_forever()

    async def _asked(self) -> None:
        """Wait until the pause is over or a checkpoint is wanted."""
        while self._is_held and not self.requests.save_wanted:
            await self._control.changed()

    async def _save(self) -> None:
        number = self._control.saves  # what is asked for from now on is another request
        self.last_report = await self.stage.save() or self.last_report
        self.requests.save_taken(number)

    def _begin(self) -> None:
        if self.state is NodeState.STARTING:
            self._set_state(NodeState.TRAINING)

    def _set_state(self, state: NodeState) -> None:
        self.state = state
        self._changed()
