"""Sending a command to the node and waiting, within a deadline, for what it led to."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress

from neuroshard.api.context import ApiContext
from neuroshard.api.problems import CommandTimeoutError
from neuroshard.errors import NeuroShardError, NotReadyError
from neuroshard.status.commands import (
    Answer,
    Command,
    CommandResult,
    Generate,
    Pause,
    Resume,
    SaveCheckpoint,
    Shutdown,
    UpdateSettings,
)
from neuroshard.status.snapshot import NodeState, NodeStatus


def deadline_seconds(command: Command) -> float:
    """How long a client waits for a command."""
    match command:
        case SaveCheckpoint() | Resume():
            return 60.0  # gigabytes move to or from the disk or the accelerator
        case Pause():
            return 30.0  # the step in progress ends first
        case UpdateSettings():
            return 10.0
        case Shutdown():
            return 5.0  # then it is queued: a node that still starts stops as soon as it can
        case Generate():
            return 300.0


def require_ready(status: NodeStatus) -> None:
    """Raise NotReadyError, with the node's own words, when it cannot carry out commands."""
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

    Raises NotReadyError, CommandTimeoutError, and whatever the node answers with.
    """
    require_ready(context.board.current())
    answer = await answer_within(context.commands.send(command), deadline_seconds(command))
    return expect_result(answer)


async def shut_down(context: ApiContext, reason: str) -> CommandResult:
    """Ask the node to stop; this works in every state, also while it starts."""
    status = context.board.current()
    if status.state is NodeState.STOPPING:
        return CommandResult(NodeState.STOPPING, "The node is stopping already.")
    command = Shutdown(reason)
    future = context.commands.send(command)
    try:
        return expect_result(await answer_within(future, deadline_seconds(command)))
    except CommandTimeoutError:
        return CommandResult(status.state, "The node will stop as soon as it can take commands.")


async def answer_within(future: Future[Answer], seconds: float) -> Answer:
    """The answer of a command, however it comes. Raises CommandTimeoutError after `seconds`.

    The future is never cancelled: the node may be carrying the command out and must be able to set its result.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[Answer]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server stopped and nobody waits
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError as error:
        raise CommandTimeoutError(
            f"The node did not answer within {seconds:g} s; it may still carry the command out.", "Look at its status."
        ) from error
    return future.result()


def expect_result(answer: Answer) -> CommandResult:
    """The result of a command other than Generate. Raises NeuroShardError for another kind of answer."""
    if not isinstance(answer, CommandResult):
        raise NeuroShardError("The node answered something else than was asked.")
    return answer
