"""Real replicas of an open run: the wallets that the owner names get seats, whatever free names do around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import pytest

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.foundation import Foundation, SignedFoundation
from neuroshard.consensus.matchmaking import RoundTimes
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.network import InMemoryNetwork
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.types import NodeId
from tests.training.test_attacks_by_free_names import check_one_line, free
from tests.worlds.free_names import FreeName
from tests.worlds.replicas import EVERYBODY, IDENTITIES, NOW, RUN, SimulatedReplica, for_seconds, play
from tests.worlds.rounds import LIARS

OWNER, *NAMED = EVERYBODY[:4]
STRANGERS = EVERYBODY[4:6]
OWNERS_WALLET = Wallet.from_secret(TokenSecret("hex", bytes(32)))
STEP_SECONDS = 60.0  # so an interval is ten minutes, and three aggregates are the half hour of a seat
TIMES = RoundTimes(look_seconds=120, near_seconds=60, quick_seconds=5, query_seconds=0.1, absent_seconds=300)


def replica(name: NodeId, network: InMemoryNetwork) -> SimulatedReplica:
    seed = EVERYBODY.index(name)
    one = SimulatedReplica(name, network, seed, seats=(OWNER,), is_open=True, step_seconds=STEP_SECONDS, times=TIMES)
    one.may_be_alone = name == OWNER
    return one


def list_of(number: int, names: Sequence[NodeId]) -> SignedFoundation:
    """The statement that `run trust` signs."""
    trusted = tuple(IDENTITIES[name].wallet_id for name in names)
    return SignedFoundation.sign(OWNERS_WALLET, Foundation(RUN, number, (), "e" * 64, trusted=trusted))


def chain_of(one: SimulatedReplica) -> Chain:
    chain = one.group.chain.chain
    assert chain is not None
    return chain


def seated(one: SimulatedReplica) -> set[NodeId]:
    return {seat.node_id for seat in chain_of(one).ledger.committee.seats}


async def live_until(done: Callable[[], bool], *replicas: SimulatedReplica, within: float = 20_000) -> None:
    async with anyio.create_task_group() as tasks:
        for one in replicas:
            tasks.start_soon(one.live)
        with anyio.fail_after(within):
            while not done():
                await anyio.sleep(5)
        tasks.cancel_scope.cancel()


def surround(network: InMemoryNetwork, count: int, of: SimulatedReplica) -> None:
    """Names that cost nothing: they report the same state and any work, answer or stay silent."""

    def same() -> ReplicaStatus:
        return replace(of.replica_status(), sequences=10**6)

    def now_and_then() -> ReplicaStatus | None:
        return same() if anyio.current_time() % 25 < 2 else None

    for number, name in enumerate(free(count)):
        FreeName(name, network, (same, now_and_then)[number % 2])


def test_the_committee_grows_from_the_owner_to_four_in_one_value_and_goes_on_without_one_of_them() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        owner, b, c, d, *strangers = everybody = [replica(name, network) for name in (OWNER, *NAMED, *STRANGERS)]
        surround(network, 60, owner)
        await live_until(lambda: owner.state.outer_step >= 2, *everybody)
        assert seated(owner) == {OWNER}
        assert "Only the owner's seats vote: name wallets with `neuroshard run trust`" in b.group.seats.advice
        owner.word = list_of(1, NAMED)  # only the owner's node knows it
        await live_until(lambda: len(seated(owner)) > 1, *everybody)
        await for_seconds(5, *everybody)
        changes = [each.value for each in chain_of(owner).changes]
        assert [len(change.next_committee.seats) for change in changes if change.next_committee] == [4]
        assert all(seated(one) == {OWNER, *NAMED} for one in everybody if one.state.outer_step >= changes[0].outer_step)
        committee = chain_of(owner).ledger.committee
        assert (committee.faults, committee.quorum, owner.group.seats.advice) == (1, 3, "")

        network.suspend(OWNER)  # the owner is away
        before = b.state.outer_step
        await live_until(lambda: min(b.state.outer_step, c.state.outer_step) >= before + 3, b, c, d, *strangers)
        assert all(len(each.signers) >= 3 for each in chain_of(b).recent if each.value.committee == committee.digest)

        network.suspend(d.name)
        before = b.state.outer_step
        await for_seconds(2 * 10 * STEP_SECONDS, b, c, *strangers)
        assert b.state.outer_step == before
        for name in (OWNER, d.name):
            assert IDENTITIES[name].wallet_id[:8] in b.group.obstacle
        assert "too few voting nodes are online" in b.group.obstacle

        network.wake(d.name)
        await live_until(lambda: min(b.state.outer_step, c.state.outer_step) >= before + 2, b, c, d, *strangers)
        check_one_line([b, c])
        assert seated(b) == {OWNER, *NAMED}

    play(scenario)


@pytest.mark.parametrize("lie", ["two_votes", "wrong_results", "silence"])
def test_a_liar_that_is_named_by_mistake_is_one_of_those_that_the_seats_tolerate(lie: str) -> None:
    """It works honestly until it has its seat."""

    async def scenario(network: InMemoryNetwork) -> None:
        owner, b, c, liar = everybody = [replica(name, network) for name in (OWNER, *NAMED)]
        owner.word = list_of(1, NAMED)
        await live_until(lambda: len(seated(owner)) > 1, *everybody)
        liar.lie = LIARS[lie]
        honest, before = [owner, b, c], owner.state.outer_step
        await live_until(lambda: min(one.state.outer_step for one in honest) >= before + 4, *everybody)
        check_one_line(honest)
        assert all(len(each.signers) >= 3 for each in chain_of(owner).recent[-3:])

    play(scenario)


def test_another_computer_of_the_owner_takes_the_silent_seat_over() -> None:
    """It has the owner's wallet, so it needs no name, and no free name can do the same."""
    key = NodeKey.from_seed(b"2" * 32)
    delegation = Delegation.issue(OWNERS_WALLET, key.public_key, NOW + 1e6)
    second = NodeIdentity(OWNERS_WALLET.wallet_id, key.node_id, key, delegation)

    async def scenario(network: InMemoryNetwork) -> None:
        owner, b, c, d = everybody = [replica(name, network) for name in (OWNER, *NAMED)]
        owner.word = list_of(1, NAMED)
        await live_until(lambda: len(seated(owner)) > 1, *everybody)
        other = SimulatedReplica(second.node_id, network, 9, seats=(OWNER,), is_open=True, times=TIMES)
        other.step_seconds = STEP_SECONDS
        other.follow(owner)
        network.suspend(OWNER)
        await live_until(lambda: second.node_id in seated(b), b, c, d, other)
        assert seated(b) == {second.node_id, *NAMED}
        assert chain_of(b).ledger.committee.seats[0].node_id == second.node_id
        before = b.state.outer_step
        network.suspend(d.name)  # three of four seats are a quorum, so each step needs its vote
        await live_until(lambda: min(one.state.outer_step for one in (b, c, other)) >= before + 3, b, c, other)
        assert all(other.member in each.signers for each in chain_of(b).recent[-2:])
        check_one_line([b, c, other])

    IDENTITIES[second.node_id] = second
    try:
        play(scenario)
    finally:
        del IDENTITIES[second.node_id]
