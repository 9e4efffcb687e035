from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.network import (
    InMemoryNetwork,
    Link,
    MessageTooLargeError,
    PeerUnreachableError,
    TransportClosedError,
)
from neuroshard.network.inboxes import MAX_KINDS
from neuroshard.types import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def run(scenario: Callable[[InMemoryNetwork], Awaitable[None]], network: InMemoryNetwork | None = None) -> None:
    with network or InMemoryNetwork() as opened:
        trio.run(scenario, opened, clock=MockClock(autojump_threshold=0))


def test_messages_arrive_by_kind_in_order_with_their_sender() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = network.join(A), network.join(B)
        for number in range(3):
            await a.send(B, "x", bytes([number]))
        await a.send(B, "y", b"other")
        assert (await b.receive("y")).payload == b"other"
        messages = [await b.receive("x") for _ in range(3)]
        assert [m.payload for m in messages] == [b"\0", b"\1", b"\2"]
        assert {m.sender for m in messages} == {A}
        await a.send(A, "x", b"self")
        assert (await a.receive("x")).sender == A

    run(scenario)


def test_a_delay_takes_virtual_time() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = network.join(A), network.join(B)
        network.set_link(A, B, Link(delay_seconds=30))
        started = anyio.current_time()
        await a.send(B, "x", b"")
        await b.receive("x")
        await b.send(A, "x", b"")
        assert anyio.current_time() - started == 30

    run(scenario)


def test_a_full_queue_holds_the_sender_back() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = network.join(A), network.join(B)
        with anyio.move_on_after(10) as scope:
            for _ in range(3):
                await a.send(B, "x", b"")
        assert scope.cancelled_caught
        await b.receive("x")
        await a.send(B, "x", b"")

    run(scenario, InMemoryNetwork(queue_length=2))


def test_losses_follow_the_given_random_numbers() -> None:
    def arrived(seed: int) -> list[int]:
        numbers: list[int] = []

        async def scenario(network: InMemoryNetwork) -> None:
            a, b = network.join(A), network.join(B)
            network.set_link(A, B, Link(loss=0.3))
            for number in range(100):
                await a.send(B, "x", bytes([number]))
            with anyio.move_on_after(1):
                while True:
                    numbers.append((await b.receive("x")).payload[0])

        run(scenario, InMemoryNetwork(random=Random(seed), queue_length=200))
        return numbers

    assert 55 <= len(arrived(1)) <= 85
    assert arrived(1) == arrived(1) != arrived(2)


def test_a_partition_swallows_messages_until_it_heals() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = network.join(A), network.join(B), network.join(C)
        network.partition([A], [B])
        await a.send(B, "x", b"lost")
        await b.send(A, "x", b"lost")
        await a.send(C, "x", b"c is on no side")
        assert (await c.receive("x")).sender == A
        network.partition()
        await a.send(B, "x", b"through")
        assert (await b.receive("x")).payload == b"through"

    run(scenario)


def test_a_dead_node_is_unreachable_and_can_come_back() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = network.join(A), network.join(B)

        async def wait_for_end() -> None:
            with pytest.raises(TransportClosedError):
                await b.receive("x")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_end)
            await anyio.sleep(1)
            network.kill(B)
        with pytest.raises(PeerUnreachableError):
            await a.send(B, "x", b"")
        with pytest.raises(TransportClosedError):
            await b.send(A, "x", b"")
        again = network.join(B)
        await a.send(B, "x", b"hello")
        assert (await again.receive("x")).payload == b"hello"

    run(scenario)


def test_a_sender_that_waits_learns_of_the_death() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, _ = network.join(A), network.join(B)
        await a.send(B, "x", b"")

        async def blocked() -> None:
            with pytest.raises(PeerUnreachableError):
                await a.send(B, "x", b"")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(blocked)
            await anyio.sleep(1)
            network.kill(B)

    run(scenario, InMemoryNetwork(queue_length=1))


def test_closing_leaves_the_network() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = network.join(A), network.join(B)
        await b.close()
        await b.close()
        with pytest.raises(PeerUnreachableError):
            await a.send(B, "x", b"")
        with pytest.raises(TransportClosedError):
            await b.receive("x")

    run(scenario)


def test_sizes_and_kinds_are_bounded() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = network.join(A), network.join(B)
        with pytest.raises(MessageTooLargeError):
            await a.send(B, "x", bytes(11))
        for number in range(MAX_KINDS):
            await a.send(B, f"kind {number}", b"")
        with pytest.raises(PeerUnreachableError, match="does not know"):
            await a.send(B, "one more", b"")
        with anyio.move_on_after(1) as scope:
            await b.receive("what b itself wants to hear")
        assert scope.cancelled_caught
        with pytest.raises(PeerUnreachableError, match="does not know"):
            await b.send(A, "k" * 65, b"")

    run(scenario, InMemoryNetwork(max_payload_bytes=10))


def test_one_node_joins_once_and_links_are_checked() -> None:
    network = InMemoryNetwork()
    network.join(A)
    with pytest.raises(ValueError, match="already"):
        network.join(A)
    for delay, loss in ((-1, 0), (float("inf"), 0), (0, 1.5), (float("nan"), 0)):
        with pytest.raises(ValueError, match="link"):
            Link(delay, loss)
