from __future__ import annotations

import pytest
from msgspec.structs import replace

from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.swarm_view import ENTRY_BYTES, Membership
from neuroshard.types import LayerRange, NodeId, RunId, WalletId

ME, WALLET = NodeId("me"), WalletId("wallet")
LONG = tuple("x" * 256 for _ in range(16))
WORDS = Announcement(
    run_id=RunId("ab" * 32),
    parameters_version=1,
    layers=LayerRange(0, 2),
    addresses=LONG,
    pool=None,
    started_at=0.0,
    memory_tier_mb=500,
    is_relay=False,
    version="0",
)


def said(number: int, at: float, words: Announcement = WORDS) -> Statement[Announcement]:
    return Statement(NodeId(f"node {number}"), WALLET, at, 1e12, words)


@pytest.mark.parametrize("addresses", [LONG, LONG[:1], ()])
def test_announcements_take_no_more_memory_than_they_may(addresses: tuple[str, ...]) -> None:
    most = 200_000
    membership = Membership(ME, WALLET, most)
    words = replace(WORDS, addresses=addresses)
    for number in range(1000):
        membership.hear_announcement(said(number, number, words))
    known = membership.announcements
    each = ENTRY_BYTES + 256 * len(addresses)
    assert most - each < len(known) * each <= most
    assert NodeId("node 999") in known  # the last ones stay
    assert NodeId("node 0") not in known


def test_what_is_said_again_or_forgotten_gives_its_memory_back() -> None:
    membership = Membership(ME, WALLET, 3 * (ENTRY_BYTES + 16 * 256))
    for at in range(100):
        for number in range(3):
            membership.hear_announcement(said(number, 3 * at + number))
    assert len(membership.announcements) == 3
    membership.forget_silent(1e9)
    assert len(membership.announcements) == 0
    for number in range(3):
        membership.hear_announcement(said(number, 1e9))
    assert len(membership.announcements) == 3
