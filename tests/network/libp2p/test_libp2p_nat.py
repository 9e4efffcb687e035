from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import anyio
import pytest
import trio

from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network, PeerUnreachableError
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.lan import RELAY_IP, Internet, internet, is_possible
from tests.worlds.network_nodes import TEST_SECONDS, address_of, echo

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not is_possible(), reason="needs root, network namespaces and TUN devices"),
]
HOME = NetworkOptions()
RELAY = NetworkOptions(host=RELAY_IP, relay=False, serve_relay=True)

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

    def has(self, name: str) -> bool:
        return name in self._said

    async def hear(self, name: str) -> str:
        with anyio.fail_after(TEST_SECONDS):
            while name not in self._said:
                if self.failures:
                    raise RuntimeError("another thread failed")
                await anyio.sleep(0.02)
        return str(self._said[name])


Roles: TypeAlias = dict[str, Callable[[], Awaitable[None]]]


@dataclass(frozen=True)
class Scene:
    """Two homes and a relay in an internet of their own. Homes in `public` have no router."""

    roles: Callable[[Internet, Meeting], Roles]
    public: tuple[str, ...] = ()
    network: str = "203.0.113"


def play(scenes: Mapping[str, Scene]) -> list[Internet]:
    """Run every role in its own network. All scenes run at the same time, because they mostly wait."""
    with ExitStack() as stack:
        places = [
            stack.enter_context(internet(f"nsnat{n}", s.network, s.public)) for n, s in enumerate(scenes.values())
        ]
        meetings = [Meeting() for _ in places]
        casts = [s.roles(place, meeting) for s, place, meeting in zip(scenes.values(), places, meetings, strict=True)]
        threads = [
            place.run_in(name, _body(role, meeting))
            for place, meeting, roles in zip(places, meetings, casts, strict=True)
            for name, role in roles.items()
        ]
        for thread in threads:
            thread.join(TEST_SECONDS)
        for name, meeting in zip(scenes, meetings, strict=True):
            if meeting.failures:
                meeting.failures[0].add_note(f"scene: {name}")
                raise meeting.failures[0]
    return places


def _body(role: Callable[[], Awaitable[None]], meeting: Meeting) -> Callable[[], None]:
    def work() -> None:
        try:
            trio.run(role)
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            meeting.failures.append(error)

    return work


def kind_with(network: Network, peer: str) -> ConnectionKind | None:
    return next((c.kind for c in network.transport.connections() if c.peer == peer), None)


def bodies_with(network: Network, peer: str) -> int:
    return next(c.bulk_connections for c in network.transport.connections() if c.peer == peer)


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(40):
        while not condition():
            await anyio.sleep(0.05)


def scenario(meeting: Meeting, expected: ConnectionKind) -> Roles:
    """A node at the right is called by one at the left, and they end up connected as expected.

    The left one knows the way through the relay, or a public address where the right one has it.
    """
    wanted = "/203.0.113.20/" if expected is ConnectionKind.DIRECT else "p2p-circuit"

    async def relay() -> None:
        async with libp2p_network(identity_of(1), RELAY) as network:
            meeting.say("relay", address_of(network))
            await meeting.hear("done")

    async def right() -> None:
        async with libp2p_network(identity_of(2), HOME) as network:
            network.transport.serve("echo", echo, LIMITS)
            await network.transport.connect(await meeting.hear("relay"))
            await eventually(lambda: any(wanted in text for text in network.transport.addresses()))
            meeting.say("way", next(text for text in network.transport.addresses() if wanted in text))
            await meeting.hear("checked")
            is_relayed = kind_with(network, identity_of(3).node_id) is ConnectionKind.RELAYED
            assert is_relayed is (expected is ConnectionKind.RELAYED)  # it may have dialled the left one on its own
            meeting.say("done", True)

    async def left() -> None:
        async with libp2p_network(identity_of(3), HOME) as network:
            right_id = await network.transport.connect(await meeting.hear("way"))
            if expected is not ConnectionKind.RELAYED:
                await eventually(lambda: kind_with(network, right_id) is expected)
            else:
                await anyio.sleep(14)  # three rounds of calling
                assert kind_with(network, right_id) is expected
            body = TensorPart(TensorSpec("x", "uint8", (2 * MIB,)), bytes(range(256)) * (2 * MIB // 256))
            question = Frame("echo", {"x": 1}, (body,))
            reply = await network.transport.request(right_id, question, reply=LIMITS, timeout_seconds=60)
            assert reply.header == {"x": 1}
            assert bytes(reply.tensors[0].data) == bytes(body.data)
            assert bodies_with(network, right_id) > 0  # through the relay, too
            await anyio.sleep(0.5)
            meeting.say("checked", True)
            await meeting.hear("done")

    return {"relay": relay, "right": right, "left": left}


ROUTERS: dict[str, dict[str, bool]] = {
    "none": {},
    "open": {"lets_everybody_in": True},
    "cone": {},
    "symmetric": {"is_symmetric": True},
}


def between(left: str, right: str, expected: ConnectionKind) -> Scene:
    homes = {"left": left, "right": right}

    def roles(place: Internet, meeting: Meeting) -> Roles:
        for home, kind in homes.items():
            for name, value in ROUTERS[kind].items():
                setattr(place.routers[home], name, value)
        return scenario(meeting, expected)

    return Scene(roles, tuple(home for home, kind in homes.items() if kind == "none"))


def behind_a_closed_router(place: Internet, meeting: Meeting) -> Roles:
    place.routers["right"].inwards = only_from_relay(place)
    return scenario(meeting, ConnectionKind.RELAYED)


def test_two_behind_routers_meet_through_a_relay_and_punch_a_hole() -> None:
    (place,) = play({"two cones": between("cone", "cone", ConnectionKind.PUNCHED)})
    assert all(router.called for router in place.routers.values())


@pytest.mark.parametrize(
    ("expected", "pairs"),
    [
        (ConnectionKind.PUNCHED, ["open open", "open cone", "open symmetric", "symmetric open"]),
        (ConnectionKind.PUNCHED, ["none cone", "none symmetric"]),
        (ConnectionKind.DIRECT, ["symmetric none", "cone none"]),
    ],
    ids=["punched", "punched from a public address", "direct"],
)
def test_kinds_of_routers(expected: ConnectionKind, pairs: list[str]) -> None:
    play({pair: between(*pair.split(), expected) for pair in pairs})


def rebooting(place: Internet, meeting: Meeting, *, is_strict: bool) -> Roles:
    """Holes, and all connections through them, are gone from the tables. A body arrives all the same, once."""
    heard = list[int]()

    async def relay() -> None:
        async with libp2p_network(identity_of(1), RELAY) as network:
            meeting.say("relay", address_of(network))
            await meeting.hear("done")

    async def right() -> None:
        async def note(_: NodeId, frame: Frame) -> Frame:
            await anyio.lowlevel.checkpoint()
            heard.append(len(frame.tensors[0].data))
            return Frame("noted")

        async with libp2p_network(identity_of(2), HOME) as network:
            network.transport.serve("note", note, LIMITS)
            await network.transport.connect(await meeting.hear("relay"))
            await eventually(lambda: any("p2p-circuit" in text for text in network.transport.addresses()))
            meeting.say("way", next(text for text in network.transport.addresses() if "p2p-circuit" in text))
            while not meeting.has("done"):  # as a node comes back to its seeds
                with suppress(PeerUnreachableError):
                    await network.transport.connect(await meeting.hear("relay"))
                await anyio.sleep(1.0)

    async def left() -> None:
        async with libp2p_network(identity_of(3), replace(HOME, upload_bytes_per_second=MIB)) as network:
            peer = await network.transport.connect(await meeting.hear("way"))
            await eventually(lambda: kind_with(network, peer) is ConnectionKind.PUNCHED)

            async def reboot() -> None:
                connections = network.transport.connections
                await eventually(lambda: any(one.peer == peer and one.bytes_sent > MIB for one in connections()))
                for router in place.routers.values():
                    router.needs_a_beginning = is_strict
                    router.reboot()

            body = (TensorPart(TensorSpec("x", "uint8", (4 * MIB,)), bytes(4 * MIB)),)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reboot)
                while not heard:
                    with suppress(PeerUnreachableError):
                        await network.transport.connect(await meeting.hear("way"))
                        await network.transport.request(peer, Frame("note", {}, body), timeout_seconds=100)
                    await anyio.sleep(0.5)
            assert heard == [4 * MIB]
            meeting.say("done", True)

    return {"relay": relay, "right": right, "left": left}


def test_the_relay_stays_where_no_hole_can_be_punched() -> None:
    play({"symmetric cone": between("symmetric", "cone", ConnectionKind.RELAYED)})


@pytest.mark.long  # only the simulated routers differ from those above
def test_the_relay_stays_behind_routers_of_other_kinds() -> None:
    play(
        {
            "symmetric symmetric": between("symmetric", "symmetric", ConnectionKind.RELAYED),
            "a router that lets no call through": Scene(behind_a_closed_router),
        }
    )


@pytest.mark.long
@pytest.mark.parametrize("is_strict", [True, False], ids=["SYN only", "any"])
def test_both_routers_may_reboot_during_a_transfer(is_strict: bool) -> None:
    """Afterwards a new connection begins with a SYN, or with any packet.

    In `test_libp2p_relay.py` a transfer goes on through another relay, and `tests/network/test_silence.py` has lines
    that end in silence.
    """
    play({"reboot": Scene(partial(rebooting, is_strict=is_strict))})


def only_from_relay(place: Internet) -> Callable[[bytearray], bool]:
    from ipaddress import IPv4Address

    from tests.worlds.lan import Router, flows

    router = place.routers["right"]

    def inwards(packet: bytearray) -> bool:
        is_relay = flows(packet)[0][0] == int(IPv4Address(RELAY_IP))
        return is_relay and Router.inwards(router, packet)

    return inwards
