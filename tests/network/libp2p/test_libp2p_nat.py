from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio

from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.status.snapshot import ConnectionKind
from tests.worlds.claims import identity_of
from tests.worlds.lan import RELAY_IP, Internet, internet, is_possible
from tests.worlds.network_nodes import TEST_SECONDS, address_of, echo

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not is_possible(), reason="needs root, network namespaces and TUN devices"),
]
HOME = NetworkOptions(host="0.0.0.0", lan_discovery=False, port_mapping=False)
RELAY = NetworkOptions(host=RELAY_IP, lan_discovery=False, port_mapping=False, relay=False, serve_relay=True)

MIB = 1024 * 1024
LIMITS = FrameLimits(max_body_bytes=4 * MIB)


class Meeting:
    """What the threads of one scenario tell each other."""

    def __init__(self) -> None:
        self._said: dict[str, object] = {}
        self._condition = threading.Condition()
        self.failures: list[BaseException] = []

    def say(self, name: str, value: object) -> None:
        with self._condition:
            self._said[name] = value
            self._condition.notify_all()

    async def hear(self, name: str) -> str:
        with anyio.fail_after(TEST_SECONDS):
            while name not in self._said:
                if self.failures:
                    raise RuntimeError("another thread failed")
                await anyio.sleep(0.02)
        return str(self._said[name])


def play(place: Internet, meeting: Meeting, roles: dict[str, Callable[[], Awaitable[None]]]) -> None:
    """Run every role in its own network."""

    def body(role: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        def work() -> None:
            try:
                trio.run(role)
            except BaseException as error:  # noqa: BLE001 - told in the main thread
                meeting.failures.append(error)

        return work

    threads = [place.run_in(name, body(role)) for name, role in roles.items()]
    for thread in threads:
        thread.join(TEST_SECONDS)
    if meeting.failures:
        raise meeting.failures[0]


def kind_with(network: Network, peer: str) -> ConnectionKind | None:
    return next((c.kind for c in network.transport.connections() if c.peer == peer), None)


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(40):
        while not condition():
            await anyio.sleep(0.05)


def scenario(meeting: Meeting, expected: ConnectionKind) -> dict[str, Callable[[], Awaitable[None]]]:
    """A node at the right is called by one at the left through a relay, and they end up connected as expected."""

    async def relay() -> None:
        async with libp2p_network(identity_of(1), RELAY) as network:
            meeting.say("relay", address_of(network))
            await meeting.hear("done")

    async def right() -> None:
        async with libp2p_network(identity_of(2), HOME) as network:
            network.transport.serve("echo", echo, LIMITS)
            await network.transport.connect(await meeting.hear("relay"))
            await eventually(lambda: any("p2p-circuit" in text for text in network.transport.addresses()))
            meeting.say("circuit", next(text for text in network.transport.addresses() if "p2p-circuit" in text))
            await meeting.hear("checked")
            assert kind_with(network, identity_of(3).node_id) is expected
            meeting.say("done", True)

    async def left() -> None:
        async with libp2p_network(identity_of(3), HOME) as network:
            circuit = await meeting.hear("circuit")
            right_id = await network.transport.connect(circuit)
            if expected is ConnectionKind.PUNCHED:
                await eventually(lambda: kind_with(network, right_id) is ConnectionKind.PUNCHED)
            else:
                await anyio.sleep(14)  # three rounds of calling
                assert kind_with(network, right_id) is expected
            body = TensorPart(TensorSpec("x", "uint8", (2 * MIB,)), bytes(range(256)) * (2 * MIB // 256))
            question = Frame("echo", {"x": 1}, (body,))
            reply = await network.transport.request(right_id, question, reply=LIMITS, timeout_seconds=60)
            assert reply.header == {"x": 1}
            assert bytes(reply.tensors[0].data) == bytes(body.data)
            bodies = next(c.bulk_connections for c in network.transport.connections() if c.peer == right_id)
            assert bodies > 0  # through the relay, too
            await anyio.sleep(0.5)
            meeting.say("checked", True)
            await meeting.hear("done")

    return {"relay": relay, "right": right, "left": left}


def test_two_behind_routers_meet_through_a_relay_and_punch_a_hole() -> None:
    meeting = Meeting()
    with internet() as place:
        play(place, meeting, scenario(meeting, ConnectionKind.PUNCHED))
        assert all(router.called for router in place.routers.values())


def test_where_a_router_lets_no_call_through_the_relay_stays() -> None:
    meeting = Meeting()
    with internet() as place:
        place.routers["right"].inwards = only_from_relay(place)
        play(place, meeting, scenario(meeting, ConnectionKind.RELAYED))


def only_from_relay(place: Internet) -> Callable[[bytearray], bool]:
    from ipaddress import IPv4Address

    from tests.worlds.lan import Router, flows

    router = place.routers["right"]

    def inwards(packet: bytearray) -> bool:
        is_relay = flows(packet)[0][0] == int(IPv4Address(RELAY_IP))
        return is_relay and Router.inwards(router, packet)

    return inwards
