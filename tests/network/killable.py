"""Python programs that tests start, listen to and kill."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import trio


class Program:
    """Seen from the process that started it."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._said = bytearray()

    async def line(self) -> str:
        """The next line it prints. Raises EOFError when it ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._said:
            data = await self._process.stdout.receive_some()
            if not data:
                raise EOFError(f"ended with code {await self._process.wait()}")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """At once, without a chance to say anything."""
        self._process.kill()


@asynccontextmanager
async def program(script: Path, *arguments: object) -> AsyncGenerator[Program]:
    """Runs within the block at most; it should end when its standard input does."""
    process = await trio.lowlevel.open_process(
        [sys.executable, str(script), *map(str, arguments)], stdin=PIPE, stdout=PIPE
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                await stream.aclose()
