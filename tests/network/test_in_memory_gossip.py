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
    ScoreReason,
    Subscription,
    TransportClosedError,
)
from neuroshard.network.in_memory_gossip import (
    DEGREE,
    ID_BYTES,
    LEAST_DEGREE,
    MOST_DEGREE,
    NEW_NEIGHBOURS,
    SEEN_MESSAGES,
    Mesh,
    SeenMessages,
)
from neuroshard.network.transport import MAX_GOSSIP_BYTES
from neuroshard.types import NodeId

TOPIC = "reports/run/0"


def run(scenario: Callable[[InMemoryNetwork], Awaitable[None]], network: InMemoryNetwork | None = None) -> None:
    with network or InMemoryNetwork() as opened:
        trio.run(scenario, opened, clock=MockClock(autojump_threshold=0))


def names(count: int) -> list[NodeId]:
    return [NodeId(f"node {number}") for number in range(count)]


def accept_all(_sender: NodeId, _data: bytes) -> bool:
    return True


def listeners(network: InMemoryNetwork, nodes: list[NodeId]) -> dict[NodeId, Subscription]:
    for node in nodes:
        network.join(node)
    return {node: network.network_of(node).gossip.subscribe(TOPIC, accept_all) for node in nodes}


async def heard(subscription: Subscription) -> list[bytes]:
    """All that waits in the queue."""
    messages: list[bytes] = []
    with anyio.move_on_after(0.001):
        while True:
            messages.append(await subscription.receive())
    return messages


def test_everybody_hears_once_what_one_tells_and_only_on_its_topic() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(60)
        heard_by = listeners(network, nodes)
        network.join(NodeId("elsewhere"))
        other = network.network_of(NodeId("elsewhere")).gossip.subscribe("another topic", accept_all)
        await network.network_of(nodes[7]).gossip.publish(TOPIC, b"hello")
        for node, subscription in heard_by.items():
            assert await heard(subscription) == ([] if node == nodes[7] else [b"hello"])
        assert await heard(other) == []

    run(scenario)


def test_a_node_that_only_tells_is_heard_too() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        heard_by = listeners(network, names(30))
        network.join(NodeId("teller"))
        await network.network_of(NodeId("teller")).gossip.publish(TOPIC, b"x")
        await network.network_of(NodeId("teller")).gossip.publish("nobody listens", b"x")
        for subscription in heard_by.values():
            assert await heard(subscription) == [b"x"]

    run(scenario)


def test_copies_are_counted_with_their_bytes_on_both_sides() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(100)
        listeners(network, nodes)
        data = bytes(500)
        await network.network_of(nodes[0]).gossip.publish(TOPIC, data)
        traffic = [network.traffic_of(node) for node in nodes]
        sent = sum(t.messages_sent for t in traffic)
        assert sent == sum(t.messages_received for t in traffic)
        size = len(data) + len(TOPIC) + ID_BYTES
        assert sum(t.bytes_sent for t in traffic) == sum(t.bytes_received for t in traffic) == sent * size
        assert sum(t.messages_received - t.duplicates for t in traffic) == 99
        assert (DEGREE - 2) * 100 <= sent <= DEGREE * 100  # an edge carries it once or twice

    run(scenario)


def test_what_was_seen_is_not_told_again() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(10)
        heard_by = listeners(network, nodes)
        for teller in nodes[:3]:
            await network.network_of(teller).gossip.publish(TOPIC, b"same words")
        assert await heard(heard_by[nodes[9]]) == [b"same words"]
        before = sum(network.traffic_of(node).messages_sent for node in nodes)
        await network.network_of(nodes[0]).gossip.publish(TOPIC, b"same words")
        after = sum(network.traffic_of(node).messages_sent for node in nodes)
        assert after - before <= MOST_DEGREE  # nobody passes it on

    run(scenario)


def test_what_a_check_refuses_goes_no_further_and_costs_the_forwarder() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(40)
        asked: list[NodeId] = []

        def check(sender: NodeId, data: bytes) -> bool:
            asked.append(sender)
            return data != b"bad"

        for node in nodes:
            network.join(node)
        heard_by = {node: network.network_of(node).gossip.subscribe(TOPIC, check) for node in nodes}
        liar = network.network_of(nodes[3]).gossip
        await liar.publish(TOPIC, b"bad")
        assert set(asked) == {nodes[3]}  # only its own neighbours ever met it
        refusing = [node for node in nodes if network.traffic_of(node).refused]
        assert len(refusing) == len(asked) <= MOST_DEGREE
        for node in refusing:
            assert network.network_of(node).reputation.score(nodes[3]) < 0
        await liar.publish(TOPIC, b"good")
        assert sum([len(await heard(s)) for s in heard_by.values()]) == 39

    run(scenario)


def test_a_banned_neighbour_is_not_listened_to_but_others_bring_the_message() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(12)
        heard_by = listeners(network, nodes)
        for node in nodes[1:]:
            for _ in range(6):
                network.network_of(node).reputation.report(nodes[0], ScoreReason.FLOOD)
        await network.network_of(nodes[0]).gossip.publish(TOPIC, b"from a banned node")
        assert [await heard(heard_by[node]) for node in nodes[1:]] == [[]] * 11
        await network.network_of(nodes[1]).gossip.publish(TOPIC, b"from a good node")
        assert [await heard(heard_by[node]) for node in nodes[2:]] == [[b"from a good node"]] * 10

    run(scenario)


def test_delays_add_up_along_the_way() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        heard_by = listeners(network, names(200))
        times: list[float] = []

        async def listen(subscription: Subscription) -> None:
            await subscription.receive()
            times.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for subscription in list(heard_by.values())[1:]:
                tasks.start_soon(listen, subscription)
            await network.network_of(names(1)[0]).gossip.publish(TOPIC, b"x")
        hops = sorted({round(time / 0.05, 6) for time in times})
        assert hops == list(range(1, len(hops) + 1))
        assert 3 <= len(hops) <= 8  # a random mesh of six neighbours reaches 200 nodes in a few hops

    run(scenario, InMemoryNetwork(default_link=Link(delay_seconds=0.05)))


def test_some_loss_is_made_up_for_by_other_neighbours() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(100)
        heard_by = listeners(network, nodes)
        for number in range(20):
            await network.network_of(nodes[number]).gossip.publish(TOPIC, bytes([number]))
        received = sum([len(await heard(s)) for s in heard_by.values()])
        assert received >= 0.95 * 20 * 99
        sent = sum(network.traffic_of(node).messages_sent for node in nodes)
        arrived = sum(network.traffic_of(node).messages_received for node in nodes)
        assert 0.65 * sent <= arrived <= 0.75 * sent

    run(scenario, InMemoryNetwork(random=Random(4), default_link=Link(loss=0.3)))


def test_a_partition_separates_gossip_and_each_side_stays_whole() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(80)
        heard_by = listeners(network, nodes)
        left, right = nodes[:20], nodes[20:]
        network.partition(left, right)
        await network.network_of(left[0]).gossip.publish(TOPIC, b"left")
        await network.network_of(right[0]).gossip.publish(TOPIC, b"right")
        assert [await heard(heard_by[node]) for node in left[1:]] == [[b"left"]] * 19
        assert [await heard(heard_by[node]) for node in right[1:]] == [[b"right"]] * 59
        network.partition()
        await network.network_of(left[0]).gossip.publish(TOPIC, b"all")
        assert [await heard(heard_by[node]) for node in nodes[1:]] == [[b"all"]] * 79

    run(scenario)


def test_the_dead_are_replaced_by_other_neighbours() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        nodes = names(90)
        heard_by = listeners(network, nodes)
        for node in nodes[30:]:
            network.kill(node)
        with pytest.raises(TransportClosedError):
            await heard_by[nodes[40]].receive()
        await network.network_of(nodes[0]).gossip.publish(TOPIC, b"still here")
        assert [await heard(heard_by[node]) for node in nodes[1:30]] == [[b"still here"]] * 29
        with pytest.raises(PeerUnreachableError):
            network.network_of(nodes[40])
        network.join(nodes[40])
        again = network.network_of(nodes[40]).gossip.subscribe(TOPIC, accept_all)
        await network.network_of(nodes[1]).gossip.publish(TOPIC, b"welcome back")
        assert await heard(again) == [b"welcome back"]

    run(scenario)


def test_a_node_that_dies_while_a_message_is_under_way_to_it_misses_it() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = names(3)
        heard_by = listeners(network, [a, b, c])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(network.network_of(a).gossip.publish, TOPIC, b"x")
            await anyio.sleep(1)
            network.kill(b)
        assert await heard(heard_by[c]) == [b"x"]
        with pytest.raises(TransportClosedError):
            await heard_by[b].receive()

    run(scenario, InMemoryNetwork(default_link=Link(delay_seconds=10)))


def test_queues_and_sizes_are_bounded_and_drops_are_counted() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = names(2)
        heard_by = listeners(network, [a, b])
        gossip = network.network_of(a).gossip
        for number in range(9):
            await gossip.publish(TOPIC, bytes([number]))
        assert await heard(heard_by[b]) == [bytes([number]) for number in range(4)]  # the newest were dropped
        assert heard_by[b].dropped == 5
        with pytest.raises(MessageTooLargeError):
            await gossip.publish(TOPIC, bytes(MAX_GOSSIP_BYTES + 1))

    run(scenario, InMemoryNetwork(gossip_queue_length=4))


def test_a_closed_subscription_hears_nothing_and_its_topic_is_free_again() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = names(2)
        heard_by = listeners(network, [a, b])
        gossip = network.network_of(b).gossip
        with pytest.raises(ValueError, match="already"):
            gossip.subscribe(TOPIC, accept_all)
        heard_by[b].close()
        heard_by[b].close()
        await network.network_of(a).gossip.publish(TOPIC, b"missed")
        with pytest.raises(TransportClosedError):
            await heard_by[b].receive()
        again = gossip.subscribe(TOPIC, accept_all)
        await network.network_of(a).gossip.publish(TOPIC, b"heard")
        assert await heard(again) == [b"heard"]
        network.kill(b)
        with pytest.raises(TransportClosedError):
            await gossip.publish(TOPIC, b"x")
        with pytest.raises(TransportClosedError):
            gossip.subscribe(TOPIC, accept_all)

    run(scenario)


def test_the_memory_of_seen_messages_is_bounded_and_keeps_the_newest() -> None:
    seen = SeenMessages()
    ids = [number.to_bytes(4) for number in range(5 * SEEN_MESSAGES)]
    for message_id in ids:
        seen.add(message_id)
    kept = [message_id for message_id in ids if message_id in seen]
    assert SEEN_MESSAGES <= len(kept) <= 2 * SEEN_MESSAGES
    assert kept == ids[-len(kept) :]


def test_the_mesh_has_about_six_neighbours_whatever_comes_and_goes() -> None:
    random = Random(5)
    mesh = Mesh(random, lambda _one, _other: False)
    nodes = names(300)
    for node in nodes:
        mesh.add(node)
    for node in random.sample(nodes, 150):
        mesh.remove(node)
        nodes.remove(node)
    degrees = [len(mesh.neighbours(node)) for node in nodes]
    assert min(degrees) >= min(LEAST_DEGREE, NEW_NEIGHBOURS)
    assert max(degrees) <= MOST_DEGREE
    assert DEGREE - 1 <= sum(degrees) / len(degrees) <= DEGREE + 1.5
    assert all(node in mesh.neighbours(other) for node in nodes for other in mesh.neighbours(node))
