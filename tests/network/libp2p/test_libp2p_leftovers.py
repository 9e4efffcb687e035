"""What strangers leave behind, and what they may make a node do."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p_nodes import identity, run
from multiaddr import Multiaddr
from muxers_in_memory import connected

from neuroshard.network.libp2p.gossip import Libp2pGossip
from neuroshard.network.libp2p.gossip_items import Item, ItemKind, topic_id
from neuroshard.network.libp2p.gossip_router import GossipRouter
from neuroshard.network.libp2p.punching import usable_addresses
from neuroshard.types import NodeId

STRANGERS = 50


def test_what_a_peer_said_last_is_forgotten_with_it() -> None:
    async def scenario() -> None:
        async with connected() as (first, second), anyio.create_task_group() as tasks:
            gone: Any = SimpleNamespace(of=lambda _: None)
            gossip = Libp2pGossip(gone, lambda *_: None, tasks, GossipRouter(Random(1)))
            for number in range(STRANGERS):
                there: Any = await first.open_stream()
                await there.write(Item(ItemKind.SUBSCRIBE, topic_id("run")).encode(), is_last=True)
                here: Any = await second.accept_stream()
                gossip.part(NodeId(f"stranger {number}"))  # its connection ended before its words were read
                told = SimpleNamespace(muxed_conn=SimpleNamespace(peer_id=f"stranger {number}"), muxed_stream=here)
                with pytest.raises(MuxedStreamEOF):
                    await gossip.handle_stream(told)  # type: ignore[arg-type]
            assert gossip.router.counts["subscribe"] == STRANGERS
            assert not gossip.router._peers
            tasks.cancel_scope.cancel()

    run(scenario)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "0.0.0.0"])
def test_nobody_behind_a_relay_makes_a_node_call_itself(host: str) -> None:
    peer = identity(1).node_id
    texts = (f"/ip4/{host}/tcp/22", "/ip4/203.0.113.5/tcp/4001", "/ip6/::1/tcp/22", "/ip4/192.168.1.7/tcp/4001")
    told = HolePunch(type=HolePunch.CONNECT, ObsAddrs=[Multiaddr(text).to_bytes() for text in texts] + [b"nonsense"])
    assert [address.host for address in usable_addresses(told, peer)] == ["203.0.113.5", "192.168.1.7"]
