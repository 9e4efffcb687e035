"""What the owner of a node allows its network."""

from __future__ import annotations

import pytest

from neuroshard.membership.network_opening import network_parts
from neuroshard.model.memory_limit import MEGABYTE, network_memory
from neuroshard.network import MessageTooLargeError, Reputation
from neuroshard.types import NodeId


@pytest.mark.parametrize("limit_mb", [100, 500, 6_500, 500_000])
def test_a_network_holds_no_more_than_the_plan_gives_it(limit_mb: int) -> None:
    parts, memory = network_parts(limit_mb, Reputation()), network_memory(limit_mb)
    assert parts.budget is not None
    assert parts.receive is not None
    most = memory.frames // 4
    with pytest.raises(MessageTooLargeError):
        parts.budget.check(most + 1)
    held = [parts.budget.try_reserve(NodeId(str(peer)), most) for peer in range(5)]
    assert [reservation is not None for reservation in held] == [True] * 4 + [False]
    assert parts.receive.unread == memory.unread
    assert parts.receive.growth_of_peer < parts.receive.growth < parts.receive.unread
    assert (parts.directory_bytes, parts.gossip_bytes) == (memory.directory, memory.gossip)
    assert parts.heads is not None
    assert parts.heads._total == memory.heads
    together = (
        memory.heads
        + parts.budget.used
        + parts.receive.unread
        + parts.directory_bytes
        + parts.gossip_bytes
        + memory.claims
    )
    assert together <= memory.total
    assert limit_mb > 500 or together < 40 * MEGABYTE
