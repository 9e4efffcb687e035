"""Notices that the computer is about to sleep, and delays that for some seconds so that the node can say goodbye.

On Linux logind announces the sleep on the system's message bus and waits for programs that hold a delay lock, for 5 s
unless the administrator has changed that. Two of the system's programs connect this process with it: `gdbus monitor`
prints the announcements, and `systemd-inhibit` holds the lock. Both end when their standard input does, so also when
this process is killed. Other systems announce nothing here: a node that sleeps there is only absent.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from subprocess import DEVNULL, PIPE

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

MONITOR = (
    # gdbus reads no input, and the kernel's signal at a parent's death already follows the death of the thread
    *("sh", "-c", 'exec 3<&0; (cat <&3; kill $$) > /dev/null 2>&1 & exec "$@"', "sh"),
    *("gdbus", "monitor", "--system"),
    *("--dest", "org.freedesktop.login1", "--object-path", "/org/freedesktop/login1"),
)
DELAY = (
    *("systemd-inhibit", "--what=sleep", "--mode=delay", "--who=NeuroShard"),
    *("--why=The node gives its votes up before the computer sleeps.", "cat"),
)
ANNOUNCEMENT, SLEEPS = b"Manager.PrepareForSleep ", b"(true,)"
MOST_LINE_BYTES = 1 << 20
END_SECONDS = 1.0  # for a program whose input has ended
DELAYED_SECONDS = 4.0  # logind waits for 5 s

Action = Callable[[], Awaitable[None]]


async def watch_sleep(sleeps: Action, wakes: Action) -> str:
    """Call `sleeps` before the computer sleeps, for DELAYED_SECONDS at most, and `wakes` when it is awake again.

    Returns the reason when this system does not announce it, or no longer.
    """
    missing = [program for program in ("gdbus", "systemd-inhibit") if shutil.which(program) is None]
    if sys.platform != "linux" or missing:
        return f"there is no {missing[0]} here" if missing else "this system does not announce it"
    try:
        async with _program(MONITOR) as monitor:
            await _follow(monitor, sleeps, wakes)
    except OSError as error:
        return f"gdbus cannot be started ({error.strerror})"
    return "gdbus has ended"


async def _follow(monitor: Process, sleeps: Action, wakes: Action) -> None:
    """Act on the announcements until there are no more."""
    if monitor.stdout is None:
        raise ValueError("the monitor's output is not read")
    lines = BufferedByteReceiveStream(monitor.stdout)
    while True:
        async with _program(DELAY):
            if await _next_is(lines, is_sleep=True) is None:
                return
            with anyio.move_on_after(DELAYED_SECONDS):
                await sleeps()
        # the lock is released: the computer sleeps now
        heard = await _next_is(lines, is_sleep=False)
        await wakes()
        if heard is None:
            return


async def _next_is(lines: BufferedByteReceiveStream, *, is_sleep: bool) -> bool | None:
    """Wait for the announcement of a sleep, or of its end. Returns None if the output ends."""
    while True:
        try:
            line = await lines.receive_until(b"\n", MOST_LINE_BYTES)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.DelimiterNotFound):
            return None
        if ANNOUNCEMENT in line and (SLEEPS in line) == is_sleep:
            return True


@asynccontextmanager
async def _program(command: Sequence[str]) -> AsyncGenerator[Process]:
    """A program that ends with the block. It does not see the settings of this node, which may contain the token."""
    environment: Mapping[str, str] = {key: text for key, text in os.environ.items() if "NEUROSHARD" not in key}
    process = await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.stdin is not None:
                await process.stdin.aclose()
            with anyio.move_on_after(END_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.aclose()
