"""The context of request handlers: the board, the command channel and the settings, and commands with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from neuroshard.api.model_tokens import ModelTokens
from neuroshard.api.problems import CommandTimeoutError
from neuroshard.errors import NeuroShardError, NotReadyError
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
    MachineCommand,
    NameDeputy,
    OrderMachines,
    Pause,
    Restart,
    Resume,
    RevokeInvitation,
    RunCommand,
    SaveCheckpoint,
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.machines import MachineList
from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.telemetry.counters import Counters
from neuroshard.telemetry.logs import LogRing
from neuroshard.telemetry.redaction import Redactor
from neuroshard.types import JsonValue


@dataclass(frozen=True)
class ApiLimits:
    """Limits on requests, event streams and completions."""

    header_bytes: int = 16_384
    body_bytes: int = 1 << 20
    body_seconds: float = 10.0  # for a whole request body
    event_streams: int = 100
    completions: int = 4
    completion_seconds: float = 300.0
    heartbeat_seconds: float = 15.0  # interval of comments on an event stream without events
    events_per_second: float = 4.0  # maximum rate of status events


@dataclass(frozen=True)
class ApiContext:
    """Everything that the API may use. `host` and `port` are the address that was actually bound."""

    board: StatusBoard
    commands: CommandChannel
    log_ring: LogRing
    secret: str
    config_view: Callable[[], JsonValue]
    host: str
    port: int
    counters: Counters = field(default_factory=Counters)
    redactor: Redactor = field(default_factory=Redactor)  # contains the secrets of this node
    limits: ApiLimits = field(default_factory=ApiLimits)
    clock: Callable[[], float] = time.time  # seconds since the epoch
    model_tokens: ModelTokens = field(default_factory=ModelTokens)
    opened_link: str | None = None  # an invitation with which this node was started by a click


def deadline_seconds(command: Command) -> float:
    """Seconds that a client waits for the result of a command."""
    match command:
        case SaveCheckpoint() | Resume() | OrderMachines():
            return 60.0  # gigabytes move to or from the disk or the accelerator
        case Pause():
            return 30.0  # the step in progress ends first
        case (
            UpdateSettings()
            | Restart()
            | ListMachines()
            | ListMembers()
            | Invite()
            | RevokeInvitation()
            | NameDeputy()
            | JoinRun()
            | AnswerKnock()
        ):
            return 10.0
        case Shutdown():
            return 5.0  # the command stays queued: a node that is still starting stops as soon as it can
        case Generate():
            return 300.0


def require_ready(status: NodeStatus) -> None:
    """Raise NotReadyError with the node's reason if it cannot carry out commands in this state."""
    match status.state:
        case NodeState.STARTING:
            raise NotReadyError(f"The node is still starting: {status.state_reason}", "Try again in a few seconds.")
        case NodeState.STOPPING:
            raise NotReadyError("The node is stopping.")
        case NodeState.FAILED:
            raise NotReadyError(f"The node has failed: {status.state_reason}", "Look at its log and start it again.")
        case _:
            return


async def carry_out(context: ApiContext, command: Command) -> CommandResult:
    """Send a command and wait for its result.

    Raises NotReadyError, CommandTimeoutError, and the error of the node if the command failed.
    """
    require_ready(context.board.current())
    answer = await answer_within(context.commands.send(command), deadline_seconds(command))
    return expect_result(answer)


async def carry_out_run_command(context: ApiContext, command: RunCommand) -> CommandResult:
    """Send a command about runs and their members. It is answered in any state, also while the node waits for a run.

    Raises NotReadyError, CommandTimeoutError, and the error of the node if the command failed.
    """
    return expect_result(await answer_within(context.commands.send(command), deadline_seconds(command)))


async def carry_out_machine_command(context: ApiContext, command: MachineCommand) -> MachineList:
    """Send a command about the wallet's machines. It is answered in any state: the others may be ready.

    Raises NotReadyError, CommandTimeoutError, and the error of the node if the command failed.
    """
    answer = await answer_within(context.commands.send(command), deadline_seconds(command))
    if not isinstance(answer, MachineList):
        raise NeuroShardError("The node's answer has the wrong type.")
    return answer


async def shut_down(context: ApiContext, reason: str) -> CommandResult:
    """Ask the node to stop, in any state, also during its start. Raises NotReadyError if the queue is full."""
    status = context.board.current()
    if status.state is NodeState.STOPPING:
        return CommandResult(NodeState.STOPPING, "The node is stopping already.")
    command = Shutdown(reason)
    future = context.commands.send(command)
    try:
        return expect_result(await answer_within(future, deadline_seconds(command)))
    except CommandTimeoutError:
        return CommandResult(status.state, "The node will stop as soon as it can take commands.")


async def answer_within(future: Future[CommandAnswer], seconds: float) -> CommandAnswer:
    """Wait for the result of a command. Raises CommandTimeoutError after `seconds`, and the error of the command.

    The future is never cancelled: the node may be carrying out the command and must be able to set its result.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[CommandAnswer]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server stopped, so no client waits
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError as error:
        raise CommandTimeoutError(
            f"The node did not answer within {seconds:g} s; it may still execute the command.", "Look at its status."
        ) from error
    return future.result()


def expect_result(answer: CommandAnswer) -> CommandResult:
    """Check that the answer is a CommandResult, as for every command except Generate. Raises NeuroShardError."""
    if not isinstance(answer, CommandResult):
        raise NeuroShardError("The node's answer has the wrong type.")
    return answer
