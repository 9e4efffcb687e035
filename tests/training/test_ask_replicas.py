"""Asking replicas: all answers that come, at most some questions at a time, and lies cost reputation."""

from __future__ import annotations

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.network import ScoreReason
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.transfer_messages import DonorError, LyingDonorError
from neuroshard.types import NodeId

PEERS = [NodeId(f"peer {number}") for number in range(5)]


def test_peers_that_are_gone_are_left_out_and_hold_up_nobody() -> None:
    running, most = 0, 0

    async def ask(peer: NodeId) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(1)
        running -= 1
        if peer == PEERS[1]:
            raise DonorError("It is gone.")
        return f"from {peer}"

    async def scenario() -> None:
        began = trio.current_time()
        answers = await ask_replicas(PEERS, ask, at_once=2)
        assert answers == {peer: f"from {peer}" for peer in PEERS if peer != PEERS[1]}
        assert trio.current_time() - began == pytest.approx(3)  # five questions, two at a time

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    assert most == 2


def test_a_lie_is_reported_and_rises_and_an_honest_refusal_is_not_reported() -> None:
    reported = list[tuple[NodeId, ScoreReason]]()
    client = ReplicaClient(requester=None, report=lambda peer, reason: reported.append((peer, reason)))  # type: ignore[arg-type]
    with pytest.raises(LyingDonorError), client.blaming(PEERS[0]):
        raise LyingDonorError("Another digest.", ScoreReason.DIGEST_MISMATCH)
    with pytest.raises(DonorError), client.blaming(PEERS[1]):
        raise DonorError("It is gone.")
    assert reported == [(PEERS[0], ScoreReason.DIGEST_MISMATCH)]
