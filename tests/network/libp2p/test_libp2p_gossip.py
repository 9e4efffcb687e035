from __future__ import annotations

import time
from collections.abc import Sequence

import anyio
import pytest

from neuroshard.network import MessageTooLargeError, Network, Reputation, Subscription, TransportClosedError
from neuroshard.network.libp2p import NetworkParts, libp2p_network
from neuroshard.network.libp2p.gossip import QUEUE_LENGTH
from neuroshard.network.libp2p.gossip_messages import topic_id
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, nodes, run

TOPIC = "reports/run/0"


def accept(_: str, data: bytes) -> bool:
    return True


def has_links(network: Network, count: int) -> bool:
    return len(network.gossip.router.links(topic_id(TOPIC))) >= count


async def joined(networks: Sequence[Network]) -> None:
    """Everybody knows the first one and one more."""
    for index, network in enumerate(networks[1:], 1):
        await network.transport.connect(address_of(networks[0]))
        await network.transport.connect(address_of(networks[index - 1]))


def test_ten_nodes_hear_each_other() -> None:
    async def scenario() -> None:
        async with nodes(10) as networks:
            await joined(networks)
            subscriptions = [network.gossip.subscribe(TOPIC, accept) for network in networks]
            await until(lambda: all(has_links(network, 2) for network in networks))
            expected = {f"{node} {number}".encode() for node in range(10) for number in range(4)}
            heard: list[set[bytes]] = [set() for _ in networks]

            async def listen(index: int, subscription: Subscription) -> None:
                while len(heard[index]) < 36:
                    data = await subscription.receive()
                    assert data not in heard[index]
                    heard[index].add(data)

            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    for index, subscription in enumerate(subscriptions):
                        tasks.start_soon(listen, index, subscription)
                    for number in range(4):
                        for node, network in enumerate(networks):
                            await network.gossip.publish(TOPIC, f"{node} {number}".encode())
            for index, words in enumerate(heard):
                assert words == {word for word in expected if not word.startswith(f"{index} ".encode())}

    run(scenario)


def test_what_a_listener_refuses_goes_no_further_and_costs_the_forwarder() -> None:
    async def scenario() -> None:
        opinions = [Reputation() for _ in range(3)]
        async with nodes(3, parts=lambda i: NetworkParts(reputation=opinions[i])) as (a, b, c):
            await b.transport.connect(address_of(a))  # a - b - c
            await c.transport.connect(address_of(b))
            a.gossip.subscribe(TOPIC, accept)
            asked: list[tuple[str, bytes]] = []

            def check(peer: str, data: bytes) -> bool:
                asked.append((peer, data))
                return data == b"good"

            middle = b.gossip.subscribe(TOPIC, check)
            end = c.gossip.subscribe(TOPIC, accept)
            await until(lambda: has_links(a, 1) and has_links(c, 1) and has_links(b, 2))
            await a.gossip.publish(TOPIC, b"bad")
            await a.gossip.publish(TOPIC, b"good")
            with anyio.fail_after(10):
                assert await middle.receive() == b"good"
                assert await end.receive() == b"good"
            assert asked == [(a.transport.local_id, b"bad"), (a.transport.local_id, b"good")]
            assert opinions[1].score(a.transport.local_id) < 0
            assert dict(opinions[1].refused()) == {"refused_gossip": 1}

    run(scenario)


def test_sizes_queues_and_ends() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            await b.transport.connect(address_of(a))
            with pytest.raises(MessageTooLargeError):
                await a.gossip.publish(TOPIC, bytes(64 * 1024 + 1))
            subscription = b.gossip.subscribe(TOPIC, accept)
            with pytest.raises(ValueError, match="already subscribed"):
                b.gossip.subscribe(TOPIC, accept)
            await until(lambda: bool(a.gossip.router._peers[b.transport.local_id].topics))
            await a.gossip.publish(TOPIC, bytes(64 * 1024))
            with anyio.fail_after(60):
                assert len(await subscription.receive()) == 64 * 1024
            for number in range(QUEUE_LENGTH + 20):
                await a.gossip.publish(TOPIC, number.to_bytes(4, "big"))
            await until(lambda: subscription.dropped == 20)
            assert await subscription.receive() == bytes(4)
            subscription.close()
            for _ in range(QUEUE_LENGTH - 1):
                await subscription.receive()
            with pytest.raises(TransportClosedError):
                await subscription.receive()
            assert b.gossip.subscribe(TOPIC, accept)

    run(scenario)


def test_a_closed_network_gossips_no_more() -> None:
    async def scenario() -> None:
        async with libp2p_network(identity_of(1), LOOPBACK) as a:
            subscription = a.gossip.subscribe(TOPIC, accept)
        with pytest.raises(TransportClosedError):
            await subscription.receive()
        with pytest.raises(TransportClosedError):
            await a.gossip.publish(TOPIC, b"")
        with pytest.raises(TransportClosedError):
            a.gossip.subscribe("other", accept)

    run(scenario)


def test_a_newcomer_and_one_who_comes_back_hear_what_is_said_next() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            await b.transport.connect(address_of(a))
            a.gossip.subscribe(TOPIC, accept)
            b.gossip.subscribe(TOPIC, accept)
            for _ in range(2):
                async with nodes(1, first=3) as (c,):
                    subscription = c.gossip.subscribe(TOPIC, accept)
                    await c.transport.connect(address_of(b))
                    began = time.monotonic()
                    await until(lambda: has_links(c, 1))
                    assert time.monotonic() - began < 20
                    await a.gossip.publish(TOPIC, str(began).encode())
                    with anyio.fail_after(60):
                        assert await subscription.receive() == str(began).encode()
                await until(lambda: len(b.transport.connections()) == 1)

    run(scenario)


def test_the_last_words_of_a_node_are_heard() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            subscription = a.gossip.subscribe(TOPIC, accept)
            for number in range(3):
                async with nodes(1, first=3) as (leaving,):
                    leaving.gossip.subscribe(TOPIC, accept)
                    await leaving.transport.connect(address_of(a))
                    await until(lambda: has_links(leaving, 1))
                    await leaving.gossip.publish(TOPIC, str(number).encode())
                with anyio.fail_after(20):
                    assert await subscription.receive() == str(number).encode()

    run(scenario)
