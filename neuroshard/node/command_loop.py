"""Carries out the user's commands on the event loop and answers each with what it led to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import trio

from neuroshard.config.settings import Settings
from neuroshard.errors import NeuroShardError, NotReadyError, StorageError
from neuroshard.host.live_settings import Configuration
from neuroshard.host.owner_limits import keep_pause
from neuroshard.node.process import StopRequest
from neuroshard.pipeline.control import PAUSED_BY_USER, RequestedPause
from neuroshard.status.board import (
    AnswerKnock,
    Command,
    CommandAnswer,
    CommandChannel,
    CommandResult,
    Generate,
    Invite,
    JoinRun,
    ListMachines,
    ListMembers,
    NameDeputy,
    OrderMachines,
    Pause,
    Restart,
    Resume,
    RevokeInvitation,
    SaveCheckpoint,
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.owner_policy import TrainingAction, TrainingDecision
from neuroshard.status.snapshot import NodeState
from neuroshard.waiting import Signal

if TYPE_CHECKING:
    from neuroshard.node.own_machines import OwnMachines
    from neuroshard.node.run_desk import RunDesk
    from neuroshard.node.stage_training import RunningNode
    from neuroshard.training.trainer import Trainer

_LOG = logging.getLogger(__name__)

STOPPING = "The node is stopping."


def _unchanged(_settings: Settings) -> None:
    """Apply nothing: this loop has no parts outside the trainer."""


class CommandLoop:
    """Takes commands from the channel and answers them; several may be in progress at the same time."""

    def __init__(
        self,
        channel: CommandChannel,
        board: StatusBoard,
        configuration: Configuration,
        stop: StopRequest,
        requested_pause: RequestedPause,
        *,
        apply_settings: Callable[[Settings], object] = _unchanged,
        runs: RunDesk | None = None,
        machines: OwnMachines | None = None,
    ) -> None:
        """`apply_settings` applies changed settings outside the trainer.

        `runs` answers the commands about runs and their members, and `machines` those about the wallet's machines.

        `requested_pause` also applies to the next trainer.

        A pause that the user requests is stored for the next start.
        """
        self._channel = channel
        self._board = board
        self._configuration = configuration
        self._stop = stop
        self._requested_pause = requested_pause
        self._apply_settings = apply_settings
        self._runs = runs
        self._machines = machines
        self._decision = TrainingDecision()
        self._node: RunningNode | None = None
        self._is_between = False  # after one set of stages was detached and before the next is attached
        self._keeping = anyio.Lock()
        self._arrived = Signal()  # of a command in the channel
        self._rules_changed = Signal()

    @property
    def gpu_uuid(self) -> str | None:
        """UUID of the NVIDIA accelerator that trains; None without one, or while nothing trains."""
        return None if self._node is None else self._node.ground.device.gpu_uuid

    async def until_commanded(self) -> None:
        """Wait for a command that may change the decision of the owner's rules."""
        await self._rules_changed.wait()

    def attach(self, node: RunningNode) -> None:
        """Send commands to this node's trainer from now on."""
        self._node, self._is_between = node, False
        node.apply_settings(self._configuration.settings)
        self._throttle()

    def obey(self, decision: TrainingDecision) -> None:
        """Apply a decision of the owner's rules to the present trainer and to every later one."""
        before = self._requested_pause.holds, self._requested_pause.reason
        self._decision = decision
        self._requested_pause.expire()
        self._requested_pause.follow_rule(
            decision.reason if decision.action is TrainingAction.PAUSE else "", decision.until
        )
        self._throttle()
        if self._node is not None and before != (self._requested_pause.holds, self._requested_pause.reason):
            self._node.trainer.recheck_pause()

    def detach(self) -> None:
        """Drop the trainer. Until the next `attach`, a pause is only recorded; commands for a trainer are refused."""
        self._node, self._is_between = None, True

    async def run(self) -> None:
        """Serve commands until cancelled; commands that still wait then fail with NotReadyError."""
        try:
            async with anyio.create_task_group() as tasks:
                token = trio.lowlevel.current_trio_token()
                self._channel.listen(partial(_soon, token, self._arrived.notify))
                while True:
                    # Note the count before the queue is emptied. A command that arrives after the last `take` is then
                    # not missed.
                    arrived = self._arrived.count
                    while (waiting := self._channel.take()) is not None:
                        tasks.start_soon(self._answer, *waiting)
                    await self._arrived.wait(after=arrived)
        finally:
            while (waiting := self._channel.take()) is not None:
                waiting[1].set_exception(NotReadyError(STOPPING))

    async def _answer(self, command: Command, answer: Future[CommandAnswer]) -> None:
        if not answer.set_running_or_notify_cancel():
            return  # the caller has given up
        try:
            answer.set_result(await self._carry_out(command))
        except NeuroShardError as error:
            answer.set_exception(error)
        finally:
            if not answer.done():  # cancelled, or a defect that ends the node: no caller may wait for ever
                answer.set_exception(NotReadyError(STOPPING))

    async def _carry_out(self, command: Command) -> CommandAnswer:
        if self._stop.reason is not None and not isinstance(command, Shutdown):
            raise NotReadyError(STOPPING)  # the status may not show it yet
        match command:
            case Shutdown(reason):
                _LOG.info("Stopping: %s.", reason)
                self._stop.ask(reason)
                return CommandResult("stopping", "Stopping after a final checkpoint.")
            case UpdateSettings(changes):
                result = self._configuration.change(changes, str(self._board.current().state))
                self._apply_settings(self._configuration.settings)
                if self._node is not None:
                    self._node.apply_settings(self._configuration.settings)
                self._rules_changed.notify()
                return result
            case Restart():
                self._stop.ask_restart("the owner asked for a restart")
                return CommandResult("stopping", "The node saves a checkpoint and starts again.")
            case ListMembers() | Invite() | RevokeInvitation() | NameDeputy() | JoinRun() | AnswerKnock():
                if self._runs is None:
                    raise NotReadyError("The node is still starting.", "Try again in a few seconds.")
                return await self._runs.carry_out(command)
            case ListMachines() | OrderMachines():
                if self._machines is None:
                    raise NotReadyError("The node is still starting.", "Try again in a few seconds.")
                return await self._machines.carry_out(command)
            case Pause() | Resume() | SaveCheckpoint() | Generate():
                return await self._train(command)

    async def _train(self, command: Pause | Resume | SaveCheckpoint | Generate) -> CommandAnswer:
        """Carry out a command for the trainer."""
        match command:
            case Pause(duration):
                return await self._pause(duration)
            case Resume():
                return await self._resume()
            case SaveCheckpoint():
                return await self._running().save_now()
            case Generate():
                return await self._running().generate(command)

    async def _pause(self, duration_seconds: float | None) -> CommandResult:
        """Request a pause and wait until the accelerator is free. `duration_seconds` None: until it is resumed."""
        if self._is_between:
            self._requested_pause.begin(PAUSED_BY_USER, duration_seconds)
            kept = await self._store_requested_pause()
            return self._answer_between(f"The pause begins as soon as this node has its new layers.{kept}")
        trainer = self._running()
        trainer.pause(duration_seconds)
        self._throttle()
        kept = await self._store_requested_pause()
        state = await trainer.wait_until_paused()
        if state is not NodeState.PAUSED and self._requested_pause.holds:
            return CommandResult(state, "The node is leaving its layers or stopping; afterwards it is paused.")
        if state is not NodeState.PAUSED:
            return CommandResult(state, "The pause did not begin, because the node was resumed or stopped before.")
        until = "until it is resumed" if duration_seconds is None else f"for {duration_seconds:,.0f} seconds"
        rule = self._requested_pause.rule_reason
        also = f" One of your rules would also pause it: {rule}" if rule else ""
        return CommandResult(state, f"Paused {until}; finished steps are kept.{also}{kept}")

    async def _resume(self) -> CommandResult:
        if self._is_between:
            self._requested_pause.end()
            kept = await self._store_requested_pause()
            return self._answer_between(f"Training resumes as soon as this node has its new layers.{kept}")
        trainer = self._running()
        trainer.resume()
        self._throttle()
        kept = await self._store_requested_pause()
        if rule := self._requested_pause.rule_reason:
            return CommandResult(
                trainer.snapshot().state, f"Your pause has ended, but one of your rules applies: {rule}{kept}"
            )
        state = await trainer.wait_until_resumed()
        if state in (NodeState.PAUSED, NodeState.STOPPING, NodeState.NOT_TRAINING):
            return CommandResult(
                state, "Training does not resume, because the node was paused again or stopped before."
            )
        return CommandResult(state, f"Training resumes.{kept}")

    async def _store_requested_pause(self) -> str:
        """Store the requested pause for the next start; return "", or a sentence to append if that fails."""
        self._rules_changed.notify()
        async with self._keeping:  # one write at a time; each stores the newest request
            try:
                await anyio.to_thread.run_sync(
                    keep_pause, self._configuration.settings.data_dir, self._requested_pause.asked
                )
            except StorageError as error:
                _LOG.warning("%s", error)
                return f" {error}"
        return ""

    def _throttle(self) -> None:
        """Set the compute thread's share of time. Before a pause, work in progress finishes at full speed."""
        if self._node is not None:
            share = 1.0 if self._requested_pause.holds else self._decision.share
            self._node.ground.compute.throttle(share or 1.0)

    def _answer_between(self, message: str) -> CommandResult:
        return CommandResult(self._board.current().state, message)

    def _running(self) -> Trainer:
        if self._is_between:
            raise NotReadyError("The node is moving to other layers.", "Try again when it has them.")
        if self._node is None:
            raise NotReadyError(
                "The node is still starting.", "Try again when it trains; the dashboard shows progress."
            )
        return self._node.trainer


def _soon(token: trio.lowlevel.TrioToken, work: Callable[[], None]) -> None:
    """Run `work` on the event loop; do nothing if the loop has ended."""
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(work)  # pyright: ignore[reportUnknownMemberType]
