"""Checks what arrived beside the event loop, which receives the next chunk meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import anyio
import anyio.to_thread
import trio

from neuroshard.wire import ChunkCheck

ASIDE_BYTES = 256 * 1024  # hashing fewer takes no longer than to hand them over and back

Done: TypeAlias = Callable[[ChunkCheck], None]
"""Called on the event loop once a check has run."""


class Verifier:
    """One thread, in which checks run in the order in which they were asked for; it lives as long as `run`."""

    def __init__(self) -> None:
        self._asked = SimpleQueue[tuple[ChunkCheck, Done] | None]()
        self._ran = deque[tuple[ChunkCheck, Done]]()
        self._waiting = trio.lowlevel.ParkingLot()

    def verify(self, check: ChunkCheck, done: Done) -> None:
        """Run a check and call `done`: at once for a small chunk, else soon, while `run` runs."""
        if check.byte_count < ASIDE_BYTES:
            check.run()
            done(check)
        else:
            self._asked.put((check, done))

    async def run(self) -> None:
        """Check until cancelled."""
        in_thread = partial(self._check_all, trio.lowlevel.current_trio_token())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(anyio.to_thread.run_sync, in_thread, limiter=anyio.CapacityLimiter(1)))
            try:
                await self._tell_all()
            finally:
                self._asked.put(None)

    def _check_all(self, loop: trio.lowlevel.TrioToken) -> None:
        while (asked := self._asked.get()) is not None:
            asked[0].run()
            self._ran.append(asked)
            loop.run_sync_soon(self._waiting.unpark_all, idempotent=True)  # pyright: ignore[reportUnknownMemberType]

    async def _tell_all(self) -> None:
        while True:
            while self._ran:
                check, done = self._ran.popleft()
                done(check)
            await self._waiting.park()
