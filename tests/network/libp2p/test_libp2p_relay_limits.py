"""Relays that hang up, and clients of a relay that want too much; without sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.network.libp2p.address_book import PeerAddressBook
from neuroshard.network.libp2p.relay import LOOK_SECONDS, RelayClient, RelayLimits, RelayServer
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL, encode_message
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of


def virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_a_relay_that_hangs_up_while_it_is_asked_ends_nothing() -> None:
    tries: list[float] = []

    async def open_stream() -> None:
        await anyio.lowlevel.checkpoint()
        tries.append(anyio.current_time())
        raise MuxedConnUnavailable("the connection is closed")

    async def scenario() -> None:
        relay, own = identity_of(1).node_id, identity_of(2).node_id
        swarm: Any = SimpleNamespace(
            connections=[ID.from_base58(relay)], peerstore=SimpleNamespace(get_protocols=lambda _: [HOP_PROTOCOL])
        )
        connections: Any = SimpleNamespace(
            local_id=own,
            is_reached_from_outside=False,
            kind_of=lambda _: ConnectionKind.DIRECT,
            of=lambda _: SimpleNamespace(open_stream=open_stream),
        )
        with anyio.move_on_after(2.5 * LOOK_SECONDS):
            await RelayClient(swarm, connections, PeerAddressBook(own)).run()

    virtual(scenario)
    assert len(tries) == 3  # it may be back soon


class Asking:
    """The stream of a client that asks for a circuit."""

    def __init__(self) -> None:
        self.told = b""

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        await anyio.lowlevel.checkpoint()
        self.told += data

    async def wait_ended(self) -> None:
        await anyio.lowlevel.checkpoint()


def test_one_address_gets_only_some_of_the_circuits() -> None:
    refused = encode_message(HopMessage(type=HopMessage.STATUS, status=Status.RESOURCE_LIMIT_EXCEEDED))
    addresses = {"a": "203.0.113.1", "b": "203.0.113.1", "c": "203.0.113.1", "d": "203.0.113.2"}

    async def scenario() -> None:
        connections: Any = SimpleNamespace(
            direct_ip=addresses.get, of=lambda _: SimpleNamespace(open_stream=trio.sleep_forever)
        )
        server = RelayServer(connections, tuple, trio.current_time, RelayLimits(circuits_of_address=2))
        server._reserved(NodeId("target"))
        asking = {name: Asking() for name in "abcd"}

        async with anyio.create_task_group() as tasks:
            for name, stream in asking.items():
                tasks.start_soon(server._connect, NodeId(name), NodeId("target"), stream)
                await wait_all_tasks_blocked()
            assert [name for name, stream in asking.items() if stream.told == refused] == ["c"]
            tasks.cancel_scope.cancel()
        assert not server._circuits_of_address

    virtual(scenario)


def test_one_address_gets_only_some_of_the_reservations() -> None:
    """Names cost nothing: one computer must not take the relay from all other households."""
    near, far = "203.0.113.1", "203.0.113.2"
    addresses = {"a": near, "b": near, "c": near, "d": far, "e": "127.0.0.1", "f": "127.0.0.1", "g": "127.0.0.1"}
    connections: Any = SimpleNamespace(direct_ip=addresses.get)
    server = RelayServer(connections, tuple, lambda: 0.0, RelayLimits(reservations=6, reservations_of_address=2))

    def is_reserved(name: str) -> bool:
        return server._reserved(NodeId(name)).status == Status.OK

    assert [name for name in addresses if not is_reserved(name)] == ["c"]
    assert is_reserved("a")  # it renews its own
    server.part(NodeId("b"))
    assert is_reserved("c")
    assert not is_reserved("h")  # all are taken


class Endless:
    """One side of a circuit, which always has bytes and takes any number of them."""

    def __init__(self) -> None:
        self.taken = 0

    async def read(self, n: int) -> bytes:
        await anyio.lowlevel.checkpoint()
        return bytes(min(n, 100))

    async def write(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        self.taken += len(data)


def test_all_circuits_between_two_households_share_one_burst_and_one_rate() -> None:
    """Names and circuits cost nothing, so they must not bring more."""
    burst, rate, seconds = 10_000, 1000, 20
    limits = RelayLimits(bytes_per_second=rate, burst_seconds=burst / rate)

    async def scenario() -> None:
        connections: Any = SimpleNamespace()
        server = RelayServer(connections, tuple, trio.current_time, limits)
        one_way, back = ("203.0.113.1/32", "203.0.113.2/32"), ("203.0.113.2/32", "203.0.113.1/32")

        async def carried(ways: list[tuple[str, str]]) -> list[int]:
            targets = [Endless() for _ in ways]
            with anyio.move_on_after(seconds):
                async with anyio.create_task_group() as tasks:
                    for way, target in zip(ways, targets, strict=True):
                        tasks.start_soon(server._carry, Endless(), target, way, (NodeId("a"), NodeId("b")))
            return [target.taken for target in targets]

        *same, other = await carried([one_way, one_way, back])
        for total in (sum(same), other):
            assert burst + 0.9 * rate * seconds <= total <= burst + 1.1 * rate * seconds
        server._forget_rested()
        (again,) = await carried([one_way])  # a new circuit gets no new burst
        assert again <= 1.1 * rate * seconds
        await anyio.sleep(2 * burst / rate)
        server._forget_rested()
        assert not server._pacers

    virtual(scenario)
