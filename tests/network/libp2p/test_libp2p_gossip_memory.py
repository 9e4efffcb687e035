"""What a gossiping node remembers stays within its memory, however small or many the messages are."""

from __future__ import annotations

import tracemalloc

import pytest

from neuroshard.network.libp2p.gossip_messages import (
    KeptMessage,
    KeptMessages,
    MessageId,
    MissingMessages,
    SeenIds,
    topic_id,
)
from neuroshard.types import NodeId

TOPIC, A = topic_id("reports/0"), NodeId("a")


def test_memory_is_bounded() -> None:
    seen, kept, missing = SeenIds(), KeptMessages(), MissingMessages()
    for number in range(100_000):
        seen.add(MessageId(number.to_bytes(12, "big")), 0)
    assert MessageId((99_999).to_bytes(12, "big")) in seen
    assert MessageId((0).to_bytes(12, "big")) not in seen
    for number in range(10_000):
        missing.hear(MessageId(number.to_bytes(12, "big")), TOPIC, A, 0)
    assert len(missing) == 4096
    ids = [MessageId(number.to_bytes(12, "big")) for number in range(200)]
    for number, name in enumerate(ids):
        kept.add(name, KeptMessage(TOPIC, bytes(64 * 1024), number))
    assert kept.get(ids[0]) is None
    assert len(kept.younger_than(-1, TOPIC)) == 127  # 8 MiB with what each takes besides
    kept.expire(1000)
    assert kept.younger_than(-1, TOPIC) == []


def test_tiny_messages_do_not_fill_more_memory_than_large_ones() -> None:
    most = 1024 * 1024
    kept = KeptMessages(most)
    tracemalloc.start()
    try:
        for number in range(20_000):
            kept.add(MessageId(number.to_bytes(12, "big")), KeptMessage(TOPIC, number.to_bytes(3, "big"), 0.0))
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_told_of", [False, True])
def test_ids_do_not_fill_more_memory_than_they_may(is_told_of: bool) -> None:
    most, holders = 1024 * 1024, [NodeId(f"node {number}") for number in range(10)]
    seen, missing = SeenIds(most), MissingMessages(most)
    tracemalloc.start()
    try:
        for number in range(20_000):
            message = MessageId(number.to_bytes(12, "big"))
            if is_told_of:
                for holder in holders:
                    missing.hear(message, TOPIC, holder, float(number))
            else:
                seen.add(message, 0.0)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
