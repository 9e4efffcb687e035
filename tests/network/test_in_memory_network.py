from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.messages import Frame
from neuroshard.network import (
    InMemoryNetwork,
    InMemoryTransport,
    Link,
    PeerUnreachableError,
    RequestTimeoutError,
    TransportClosedError,
)
from neuroshard.types import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def run(scenario: Callable[[InMemoryNetwork], Awaitable[None]], network: InMemoryNetwork | None = None) -> None:
    with network or InMemoryNetwork() as opened:
        trio.run(scenario, opened, clock=MockClock(autojump_threshold=0))


async def echo(_: NodeId, frame: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    return frame


def joined(network: InMemoryNetwork, node_id: NodeId) -> InMemoryTransport:
    transport = network.join(node_id)
    transport.serve("echo", echo)
    return transport


async def reaches(asker: InMemoryTransport, peer: NodeId) -> bool:
    try:
        return bool(await asker.request(peer, Frame("echo"), timeout_seconds=1))
    except RequestTimeoutError:
        return False


def test_losses_follow_the_given_random_numbers() -> None:
    def arrived(seed: int) -> list[int]:
        numbers: list[int] = []

        async def scenario(network: InMemoryNetwork) -> None:
            a, _ = joined(network, A), joined(network, B)
            network.set_link(A, B, Link(loss=0.3))
            numbers.extend([number for number in range(100) if await reaches(a, B)])

        run(scenario, InMemoryNetwork(random=Random(seed)))
        return numbers

    assert 55 <= len(arrived(1)) <= 85
    assert arrived(1) == arrived(1) != arrived(2)


def test_a_partition_swallows_messages_until_it_heals() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, _ = (joined(network, name) for name in (A, B, C))
        network.partition([A], [B])
        assert not await reaches(a, B)
        assert not await reaches(b, A)
        assert await reaches(a, C)  # on no side
        network.partition()
        assert await reaches(a, B)

    run(scenario)


def test_what_is_asked_of_a_sleeper_or_by_it_arrives_when_it_wakes() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = joined(network, A), joined(network, B)
        network.suspend(B)
        assert not await reaches(a, B)
        answered = list[float]()

        async def ask(asker: InMemoryTransport, peer: NodeId) -> None:
            await asker.request(peer, Frame("echo"), timeout_seconds=60)
            answered.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, a, B)
            tasks.start_soon(ask, b, A)
            await anyio.sleep(20)
            network.wake(B)
        assert answered == [21, 21]
        network.suspend(B)
        network.kill(B)
        joined(network, B)
        assert await reaches(a, B)  # in a new life it is awake

    run(scenario)


def test_a_dead_node_is_unreachable_and_can_come_back() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = joined(network, A), joined(network, B)
        network.kill(B)
        with pytest.raises(PeerUnreachableError, match="cannot be reached"):
            await reaches(a, B)
        with pytest.raises(TransportClosedError):
            await reaches(b, A)
        joined(network, B)
        assert await reaches(a, B)

    run(scenario)


def test_closing_leaves_the_network() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = joined(network, A), joined(network, B)
        await b.close()
        await b.close()
        with pytest.raises(PeerUnreachableError):
            await reaches(a, B)

    run(scenario)


def test_one_node_joins_once_and_links_are_checked() -> None:
    network = InMemoryNetwork()
    network.join(A)
    with pytest.raises(ValueError, match="already"):
        network.join(A)
    for delay, loss in ((-1, 0), (float("inf"), 0), (0, 1.5), (float("nan"), 0)):
        with pytest.raises(ValueError, match="link"):
            Link(delay, loss)
