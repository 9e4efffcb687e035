"""A node whose router passes ports on: who reads its record in the directory dials it, and its pool, from outside."""

from __future__ import annotations

import time
from typing import Any, cast

import anyio
import pytest
from test_libp2p_nat import HOME, Meeting, Roles, Scene, eventually, kind_with, play

from neuroshard.membership.announcements import Announcement, directory_namespace
from neuroshard.membership.claim_intake import signed_announcement
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.nat_pmp import NatPmpRouter
from neuroshard.network.nat.port_mapping import PortMapping
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import LayerRange, RunId
from tests.worlds.claims import identity_of
from tests.worlds.lan import Internet, is_possible
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, nodes, run

MIB = 1024 * 1024
PUBLIC = "1.2.3"  # only ever inside the namespaces
RUN = RunId("ab" * 32)
PLACE = directory_namespace(RUN)
LIMITS = FrameLimits(max_body_bytes=2 * MIB)


def record_of(number: int, network: Network) -> bytes:
    said = Announcement(
        RUN, 1, LayerRange(0, 2), None, 0.0, 500, is_relay=False, version="1", addresses=network.transport.addresses()
    )
    return signed_announcement(identity_of(number), said, time.time())


def ports_at(network: Network, ip: str) -> list[int]:
    return [int(text.split("/")[4]) for text in network.transport.addresses() if text.startswith(f"/ip4/{ip}/")]


async def router_at_home() -> NatPmpRouter:
    """The gateway of the home at the right: the file that tells it shows the network of the process's first thread."""
    router = NatPmpRouter("10.0.2.1")
    await router.external_host()
    return router


def mapped(place: Internet, meeting: Meeting) -> Roles:
    """A node at the right maps its ports; one at the left finds it through a seed that relays for nobody."""

    place.routers["right"].speaks_nat_pmp = True

    async def seed() -> None:
        options = NetworkOptions(place.relay, lan_discovery=False, port_mapping=False, relay=False)
        async with libp2p_network(identity_of(1), options) as network:
            meeting.say("seed", address_of(network))
            await meeting.hear("done")

    async def right() -> None:
        outside = ExternalAddresses()
        async with libp2p_network(identity_of(2), HOME, parts=NetworkParts(outside=outside)) as network:
            network.transport.serve("echo", echo, LIMITS)
            await network.transport.connect(await meeting.hear("seed"))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(PortMapping(outside, (router_at_home,)).live, network)
                await eventually(lambda: network.transport.addresses()[0].startswith(f"/ip4/{PUBLIC}.20/"))
                (inside,) = ports_at(network, "10.0.2.2")
                assert ports_at(network, f"{PUBLIC}.20")[0] == inside + 1000
                await network.directory.announce(PLACE, record_of(2, network))
                meeting.say("announced", True)
                await meeting.hear("asked")
                assert kind_with(network, identity_of(3).node_id) is ConnectionKind.DIRECT
                meeting.say("done", True)
                tasks.cancel_scope.cancel()
            assert inside + 1000 not in ports_at(network, f"{PUBLIC}.20")

    async def left() -> None:
        async with libp2p_network(identity_of(3), HOME) as network:
            await network.transport.connect(await meeting.hear("seed"))
            await meeting.hear("announced")
            (record,) = await network.directory.find(PLACE)
            assert f"/ip4/{PUBLIC}.20/tcp/".encode() in record
            right_id = identity_of(2).node_id
            part = TensorPart(TensorSpec("x", "uint8", (MIB,)), bytes(MIB))
            frame = Frame("echo", {}, (part,))
            reply = await network.transport.request(right_id, frame, reply=LIMITS, timeout_seconds=20)
            assert len(reply.tensors[0].data) == MIB
            (there,) = (each for each in network.transport.connections() if each.peer == right_id)
            assert (there.kind, there.bulk_connections > 0) == (ConnectionKind.DIRECT, True)
            meeting.say("asked", True)
            await meeting.hear("done")

    return {"relay": seed, "right": right, "left": left}


@pytest.mark.process
@pytest.mark.skipif(not is_possible(), reason="needs root, network namespaces and TUN devices")
def test_who_reads_the_record_of_a_mapped_node_reaches_it_over_several_connections() -> None:
    (place,) = play({"a mapped node": Scene(mapped, network=PUBLIC)})
    assert place.routers["right"].forwards == {}
    assert len(set(place.routers["right"].forwarded.values())) == 1


def test_a_loopback_host_has_nothing_to_map() -> None:
    async def main() -> None:
        outside = ExternalAddresses()
        async with nodes(1, LOOPBACK, lambda _: NetworkParts(outside=outside)) as (network,):
            assert outside.ports() == ()
            outside.update({ports_at(network, "127.0.0.1")[0]: ("1.2.3.4", 4001)})
            assert ports_at(network, "1.2.3.4") == []

    run(main)


def test_a_mapped_address_is_told_first_and_no_more_when_it_is_lost() -> None:
    class Far(NetworkOptions):
        @property
        def is_local(self) -> bool:
            return False

    async def main() -> None:
        outside = ExternalAddresses()
        options = cast("Any", Far)(host="127.0.0.1", lan_discovery=False, port_mapping=False)
        async with nodes(1, options, lambda _: NetworkParts(outside=outside)) as (network,):
            own = network.transport.addresses()
            (listening,) = outside.ports()
            assert own == (f"/ip4/127.0.0.1/tcp/{listening}/p2p/{network.transport.local_id}",)
            outside.update({listening: ("1.2.3.4", 4001)})
            first = f"/ip4/1.2.3.4/tcp/4001/p2p/{network.transport.local_id}"
            assert network.transport.addresses() == (first, *own)
            outside.update({})
            assert network.transport.addresses() == own
        assert outside.ports() == ()

    run(main)
