"""Chunks are checked in a thread, in the order in which they came; what comes of it is told on the event loop."""

from __future__ import annotations

import threading
from typing import cast

import anyio
import pytest
import trio
import trio.testing

from neuroshard.messages import ChunkCheck
from neuroshard.network.pool.receiving import ASIDE_BYTES, Verifier


class NotedCheck:
    """Notes in which thread it runs, once it may."""

    def __init__(self, byte_count: int = ASIDE_BYTES) -> None:
        self.byte_count = byte_count
        self.may_run = threading.Event()
        self.ran_in: int | None = None

    def run(self) -> None:
        assert self.may_run.wait(10)
        self.ran_in = threading.get_ident()


def test_large_chunks_are_checked_aside_and_told_in_order() -> None:
    async def main() -> None:
        verifier, checks = Verifier(), [NotedCheck() for _ in range(3)]
        told: list[tuple[object, int]] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(verifier.run)
            for check in checks:
                verifier.verify(cast("ChunkCheck", check), lambda done: told.append((done, threading.get_ident())))
            await trio.testing.wait_all_tasks_blocked()
            assert told == []
            for check in reversed(checks):
                check.may_run.set()
            with anyio.fail_after(10):
                while len(told) < len(checks):
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        assert told == [(check, threading.get_ident()) for check in checks]
        assert {check.ran_in for check in checks}.isdisjoint({None, threading.get_ident()})

    trio.run(main)


def test_a_small_chunk_is_checked_at_once() -> None:
    told: list[object] = []
    check = NotedCheck(ASIDE_BYTES - 1)
    check.may_run.set()
    Verifier().verify(cast("ChunkCheck", check), told.append)
    assert told == [check]
    assert check.ran_in == threading.get_ident()


@pytest.mark.parametrize("waiting", [0, 3])
def test_the_thread_ends_with_the_task(waiting: int) -> None:
    async def main() -> None:
        verifier, told = Verifier(), list[object]()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(verifier.run)
                await trio.testing.wait_all_tasks_blocked()
                for _ in range(waiting):
                    check = NotedCheck()
                    check.may_run.set()
                    verifier.verify(cast("ChunkCheck", check), told.append)
                tasks.cancel_scope.cancel()
        assert told == []

    before = threading.active_count()
    trio.run(main)
    assert threading.active_count() <= before + 1  # trio keeps an idle thread for the next work
