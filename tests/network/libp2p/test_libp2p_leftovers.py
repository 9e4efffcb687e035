"""What strangers leave behind, and what they may make a node do."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from neuroshard.network.libp2p.gossip import Libp2pGossip
from neuroshard.network.libp2p.gossip_messages import Item, ItemKind, topic_id
from neuroshard.network.libp2p.gossip_router import GossipRouter
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.types import NodeId
from tests.worlds.network_nodes import connected, run

STRANGERS = 50


def test_what_a_peer_said_last_is_forgotten_with_it() -> None:
    async def scenario() -> None:
        async with connected() as (first, second), anyio.create_task_group() as tasks:
            gone: Any = SimpleNamespace(of=lambda _: None)
            gossip = Libp2pGossip(gone, lambda *_: None, tasks, GossipRouter(Random(1)), MembershipGate())
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
