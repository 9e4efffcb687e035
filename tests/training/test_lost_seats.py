"""Seats whose vote log is lost or that stay away: the others confirm or remove them, and the steps continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import Committee, MoveKey, Remove, Seat
from neuroshard.consensus.foundation import Foundations, Founding, StageStart
from neuroshard.consensus.matchmaking import SILENT_HEIGHTS, SILENT_SECONDS, Matchmaking, RoundTimes
from neuroshard.consensus.seat_changes import LOST_LOG
from neuroshard.consensus.stage_chain import InMemoryChainStore
from neuroshard.consensus.vote_log import InMemoryVoteLog
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.network import InMemoryNetwork
from neuroshard.types import NodeId
from tests.worlds.replicas import (
    DUE_SECONDS,
    IDENTITIES,
    NAMES,
    NOW,
    RUN,
    A,
    B,
    C,
    SimulatedReplica,
    for_seconds,
    founding_of,
    play,
)


def seated(replica: SimulatedReplica) -> list[str]:
    """Nodes with a seat, as a replica knows them."""
    chain = replica.group.chain.chain
    assert chain is not None
    return [seat.node_id for seat in chain.ledger.committee.seats]


def entries(replica: SimulatedReplica) -> list[object]:
    """All entries of the values that a replica knows."""
    chain = replica.group.chain.chain
    assert chain is not None
    return [entry for certificate in chain.recent for entry in certificate.value.entries]


def voters(replica: SimulatedReplica) -> set[str]:
    """The nodes that signed the newest certificate."""
    chain = replica.group.chain.chain
    assert chain is not None
    assert chain.tip is not None
    return {member.node_id for member in chain.tip.signers}


def without_log(replica: SimulatedReplica, name: NodeId | None = None) -> SimulatedReplica:
    """The node after a start without the folder of its rounds; its checkpoint is still there."""
    again = replace(replica, name=name or replica.name, book=InMemoryVoteLog(), store=InMemoryChainStore())
    again.follow(replica)
    return again


SLOW = RoundTimes(near_seconds=10.0, quick_seconds=5.0)  # looks per hour cost these tests most of their time
STEP_SECONDS = 12.0


async def three_after_a_step(
    network: InMemoryNetwork, step_seconds: float = 1.0, times: RoundTimes | None = None
) -> list[SimulatedReplica]:
    replicas = [
        SimulatedReplica(name, network, seed, step_seconds, may_be_alone=True, times=times)
        for seed, name in enumerate((A, B, C))
    ]
    await for_seconds(step_seconds * DUE_SECONDS + 5, *replicas)
    assert {each.state.outer_step for each in replicas} == {1}
    return replicas


def test_a_seat_without_its_log_votes_again_after_the_others_have_confirmed_it() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = await three_after_a_step(network)
        network.kill(B)
        b = without_log(b)
        await for_seconds(2 * DUE_SECONDS, a, b, c)
        key = MoveKey(IDENTITIES[B].wallet_id, B)
        assert [entry for entry in entries(a) if entry == key] == [key]
        assert B not in next(
            {member.node_id for member in each.signers}
            for each in a.group.chain.chain.recent  # type: ignore[union-attr]
            if key in each.value.entries
        )
        network.kill(C)
        before = a.state.outer_step
        await for_seconds(3 * DUE_SECONDS, a, b)
        assert a.state.outer_step > before  # a quorum needs its vote now
        assert voters(a) == {A, B}
        assert a.replica_status().line == b.replica_status().line

    play(scenario)


def test_a_seat_without_its_log_does_not_vote_while_the_others_are_no_quorum() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, _ = await three_after_a_step(network)
        for name in (B, C):
            network.kill(name)
        b = without_log(b)
        await for_seconds(6 * DUE_SECONDS, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        assert b.group.obstacle == LOST_LOG
        assert b.book.votes() == []
        assert seated(a) == [A, B, C]

    play(scenario)


def test_a_lone_seat_without_its_log_waits_for_a_foundation() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a = SimulatedReplica(A, network, 0, may_be_alone=True, seats=(A,))
        b = SimulatedReplica(B, network, 1, seats=(A,))
        await for_seconds(3 * DUE_SECONDS, a, b)
        assert a.state.outer_step > 0
        network.kill(A)
        before, a = a.state.outer_step, without_log(a)
        await for_seconds(4 * DUE_SECONDS, a, b)
        assert a.state.outer_step == before
        assert a.group.obstacle == LOST_LOG

    play(scenario)


def test_friends_who_are_away_overnight_are_removed_and_get_their_seats_back() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = await three_after_a_step(network, STEP_SECONDS, SLOW)
        network.kill(C)
        await for_seconds(SILENT_SECONDS - 10, a, b)
        assert seated(a) == [A, B, C]
        await for_seconds(SILENT_HEIGHTS * STEP_SECONDS * DUE_SECONDS, a, b)
        assert Remove(IDENTITIES[C].wallet_id) in entries(a)
        assert seated(a) == seated(b) == [A, B]
        network.kill(B)  # the owner's half of two seats decides
        before = a.state.outer_step
        await for_seconds(3 * STEP_SECONDS * DUE_SECONDS, a)
        assert a.state.outer_step > before
        c = replace(c)  # the disk is the one of the evening
        c.follow(a)
        await for_seconds(3 * STEP_SECONDS * DUE_SECONDS, a, c)
        assert seated(a) == seated(c) == [A, B, C]
        assert a.replica_status().line == c.replica_status().line

    play(scenario)


def test_the_seat_of_a_wallet_that_the_owner_removed_ends_with_the_next_step() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, _ = await three_after_a_step(network)
        network.kill(C)  # the gate of the others refuses it
        for each in (a, b):
            each.removed = frozenset({IDENTITIES[C].wallet_id})
        await for_seconds(7 * DUE_SECONDS, a, b)  # the first step waits for the seat that was there
        assert seated(a) == seated(b) == [A, B]

    play(scenario)


def new_node_of(name: NodeId, monkeypatch: pytest.MonkeyPatch) -> NodeId:
    """A second node of a seat's wallet."""
    wallet = Wallet.from_secret(TokenSecret("hex", bytes([(A, B, C).index(name)] * 32)))
    key = NodeKey.from_seed(bytes([250] * 32))
    new = NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, NOW + 1e6))
    assert wallet.wallet_id == IDENTITIES[name].wallet_id
    monkeypatch.setitem(IDENTITIES, new.node_id, new)
    return new.node_id


def test_a_wallet_votes_with_its_new_computer_when_the_old_one_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    new = new_node_of(B, monkeypatch)

    async def scenario(network: InMemoryNetwork) -> None:
        a = SimulatedReplica(A, network, 0, STEP_SECONDS, may_be_alone=True, seats=(A, B), times=SLOW)
        b = SimulatedReplica(new, network, 1, STEP_SECONDS, seats=(A, B), times=SLOW)
        await for_seconds(SILENT_SECONDS - 10, a, b)
        assert seated(a) == [A, B]
        await for_seconds(SILENT_HEIGHTS * STEP_SECONDS * DUE_SECONDS, a, b)
        assert seated(a) == seated(b) == [A, new]
        assert b.book.votes()

    play(scenario)


def test_the_seat_of_a_revoked_node_goes_to_the_new_node_of_its_wallet_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others refuse the revoked node, and the certificates with its votes stay valid for a newcomer."""
    new = new_node_of(C, monkeypatch)

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = await three_after_a_step(network)
        assert C in voters(a)
        before = a.state.outer_step
        network.kill(C)  # the gate of the others refuses it
        laptop = replace(c, name=new, book=InMemoryVoteLog(), store=InMemoryChainStore())
        laptop.follow(a)
        for each in (a, b, laptop):
            each.revoked = frozenset({(IDENTITIES[C].wallet_id, C)})
        await for_seconds(4 * DUE_SECONDS, a, b, laptop)
        assert seated(a) == seated(b) == seated(laptop) == [A, B, new]
        assert MoveKey(IDENTITIES[C].wallet_id, new) in entries(a)
        network.kill(B)
        moved = a.state.outer_step
        await for_seconds(3 * DUE_SECONDS, a, laptop)
        assert a.state.outer_step > moved > before  # a quorum needs its vote now
        assert voters(a) == {A, new}
        chain = a.group.chain.chain
        assert chain is not None
        assert any(C in {member.node_id for member in each.signers} for each in chain.recent)
        newcomer = Chain.founded(founding_of((A, B, C)))
        assert newcomer.proven(chain.proof()).standing == chain.standing

    play(scenario)


def test_a_revoked_node_that_still_answers_neither_votes_nor_contributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate may let it in: it has a pass of another wallet. Its messages name the wallet that has revoked it."""
    new = new_node_of(B, monkeypatch)

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = await three_after_a_step(network)
        for each in (a, c):
            each.revoked = frozenset({(IDENTITIES[B].wallet_id, B)})
        before = a.state.outer_step
        await for_seconds(5 * DUE_SECONDS, a, b, c)
        chain = a.group.chain.chain
        assert chain is not None
        values = [each for each in chain.recent if each.value.outer_step > before]
        assert values
        assert B not in {member.node_id for each in values for member in each.signers}
        assert B not in {node for each in values for node in each.value.accepted}
        laptop = replace(b, name=new, book=InMemoryVoteLog(), store=InMemoryChainStore(), revoked=a.revoked)
        laptop.follow(a)
        await for_seconds(4 * DUE_SECONDS, a, b, c, laptop)
        assert seated(a) == seated(c) == [A, new, C]

    play(scenario)


def test_seats_refuse_a_proposal_with_work_of_a_revoked_node() -> None:
    """The proposer does not know of the revocation, or is a friend of the thief; the next one leaves the node out."""

    async def scenario(network: InMemoryNetwork) -> None:
        stolen = NAMES[3]
        replicas = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C, stolen))]
        for informed in replicas[1:3]:
            informed.revoked = frozenset({(IDENTITIES[stolen].wallet_id, stolen)})
        await for_seconds(5 * DUE_SECONDS, *replicas)
        chain = replicas[0].group.chain.chain
        assert chain is not None
        values = [each.value for each in chain.recent]
        assert values
        assert {stolen}.isdisjoint(node for value in values for node in value.accepted)

    play(scenario)


def test_a_revoked_node_gets_no_seat_back_although_its_wallet_keeps_delegating_to_it() -> None:
    """Its wish for a new vote log would move the seat to it: no seat supports that."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = await three_after_a_step(network)
        network.kill(B)
        thief = without_log(b)
        for each in (a, c):
            each.revoked = frozenset({(IDENTITIES[B].wallet_id, B)})
        await for_seconds(4 * DUE_SECONDS, a, c, thief)
        assert MoveKey(IDENTITIES[B].wallet_id, B) not in entries(a)
        assert not thief.book.votes()

    play(scenario)


def test_a_seat_is_silent_only_after_ten_minutes_and_six_heights() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = await three_after_a_step(network)
        await for_seconds(1, a, b, c)
        chain, step = a.group.chain.chain, a.group._present_step()  # pyright: ignore[reportPrivateUsage]
        assert chain is not None
        assert step is not None
        matchmaking = Matchmaking(a, a, RoundTimes())

        def silent(heights: int, now: float, *here: NodeId) -> list[str]:
            standing = structs.replace(chain.standing, height=chain.standing.height + heights)
            later = replace(chain)
            vars(later)["standing"] = standing
            matchmaking.note_answers([B, *here], now)
            matchmaking.voters(later, now)
            return [seat.node_id for seat in matchmaking.silent_seats(replace(step, standing=standing), now)]

        assert silent(0, 0.0) == []
        assert silent(0, 100 * SILENT_SECONDS) == []  # no height has passed
        assert silent(SILENT_HEIGHTS, 100 * SILENT_SECONDS) == [C]
        assert silent(2 * SILENT_HEIGHTS, 200 * SILENT_SECONDS, C) == []
        assert silent(3 * SILENT_HEIGHTS, 200 * SILENT_SECONDS + 60) == []
        assert silent(4 * SILENT_HEIGHTS, 201 * SILENT_SECONDS + 59) == []
        assert silent(4 * SILENT_HEIGHTS, 201 * SILENT_SECONDS + 60) == [C]

    play(scenario)


def test_a_deputy_founds_while_the_owner_is_away_and_the_members_follow() -> None:
    owner, deputy = (Wallet.from_secret(TokenSecret("hex", bytes([number] * 32))) for number in (0, 1))
    assert [IDENTITIES[A].wallet_id, IDENTITIES[B].wallet_id] == [owner.wallet_id, deputy.wallet_id]
    first = StageStart(0, founding_of((A, B, C)).start.committee)
    known = [Foundations(RUN, owner.public_key)]

    def signed(by: Wallet, starts: Sequence[StageStart], deputies: tuple[bytes, ...] | None = None) -> None:
        known.append(known[-1].with_statements([known[-1].next(by, starts, deputies)]))

    def founding() -> Founding:
        found = known[-1].start_of(0)
        assert found is not None
        return Founding(found[0].id, found[0].foundation.epoch, found[1], owner.wallet_id)

    async def scenario(network: InMemoryNetwork) -> None:
        signed(owner, [first])
        signed(owner, [], (deputy.public_key,))  # it changes no chain
        a, b, c = (SimulatedReplica(name, network, seed, founding=founding) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        network.kill(A)
        network.kill(C)
        await for_seconds(3 * DUE_SECONDS, b)
        standing = b.group.chain.last.standing  # type: ignore[union-attr]
        assert standing.outer_step == b.state.outer_step == 1
        alone = Committee.founded([Seat(deputy.wallet_id, B, 0)], is_open=False)
        root = b.replica_status().root
        signed(deputy, [StageStart(0, alone, standing.height, 1, root, standing.value)])
        b.may_be_alone = True
        again = replace(c)
        again.follow(c)
        await for_seconds(5 * DUE_SECONDS, b, again)
        assert seated(b) == seated(again) == [B]
        assert again.state.outer_step > 1
        assert b.replica_status().line == again.replica_status().line

    play(scenario)
