"""Windows and what waits in them are bounded for all streams together, whatever peers say about the line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import trio
from trio.testing import MockClock

from neuroshard.network.libp2p.peer_limits import ReceiveLimits, ReceiveMemory
from neuroshard.network.libp2p.streams import INITIAL_WINDOW, MAX_WINDOW
from tests.worlds.network_nodes import SlowLine, connected, run


@dataclass(eq=False)
class Stream:
    name: str
    ended: list[str] = field(default_factory=list)

    def abandon(self) -> None:
        self.ended.append(self.name)


def test_a_peer_that_answers_pings_late_gets_no_larger_windows_for_it() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            stream = await a.open_stream()
            b.round_trips = SlowLine(60.0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.write, bytes(2 * MAX_WINDOW))
                other: Any = await b.accept_stream()
                for _ in range(200):
                    await trio.sleep(1)
                    await other.read(16 * 1024)
                assert other._window == INITIAL_WINDOW
                tasks.cancel_scope.cancel()

    run(scenario, clock=MockClock(autojump_threshold=0))


def test_windows_of_one_peer_grow_no_further_than_its_share() -> None:
    async def scenario() -> None:
        async with connected() as (a, b):
            b.round_trips = SlowLine(0.1)
            others: list[Any] = []
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    stream = await a.open_stream()
                    tasks.start_soon(stream.write, bytes(8 * MAX_WINDOW))
                    others.append(await b.accept_stream())
                for other in others:
                    received = 0
                    while received < 6 * MAX_WINDOW:
                        received += len(await other.read())
                grown = sum(other._window - INITIAL_WINDOW for other in others)
                assert MAX_WINDOW < grown <= ReceiveLimits().growth_of_peer
                tasks.cancel_scope.cancel()
            for other in others:
                other.abandon()
            assert b._options.memory.may_grow(Stream("x"), b.peer_id, ReceiveLimits().growth_of_peer)

    run(scenario, clock=MockClock(autojump_threshold=0))


def test_the_peer_that_leaves_most_unread_pays_for_it() -> None:
    memory = ReceiveMemory(ReceiveLimits(unread=1000))
    ended: list[str] = []
    greedy, other, small = (Stream(name, ended) for name in ("greedy", "greedy too", "small"))
    memory.arrived(greedy, "A", 400)
    memory.arrived(other, "A", 300)
    memory.arrived(small, "B", 300)
    assert ended == []
    memory.arrived(small, "B", 1)
    assert ended == ["greedy"]
    assert memory.unread == 601
    memory.taken(greedy, 400)  # it was read although it is over
    memory.taken(small, 301)
    memory.leave(other)
    assert memory.unread == 0


def test_growth_is_bounded_for_each_peer_and_in_all() -> None:
    memory = ReceiveMemory(ReceiveLimits(growth=100, growth_of_peer=60))
    one, two, three = Stream("1"), Stream("2"), Stream("3")
    assert memory.may_grow(one, "A", 60)
    assert not memory.may_grow(two, "A", 1)
    assert memory.may_grow(three, "B", 40)
    assert not memory.may_grow(three, "B", 1)
    memory.leave(one)
    assert memory.may_grow(two, "A", 60)
