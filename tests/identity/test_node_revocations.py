"""A wallet revokes its nodes: only it can, no clock and no later delegation undoes it, and a flood takes no memory."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from neuroshard.errors import DataError
from neuroshard.identity import Delegation, NodeKey, TokenSecret, Wallet, sign_claim, verify_claim
from neuroshard.identity.claims import DELEGATION_SECONDS, NodeIdentity, sign_message
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, invite, sign_revocation
from neuroshard.identity.node_revocations import (
    MAX_NODE_REVOCATION_BYTES,
    MAX_NODE_REVOCATIONS,
    MOST_REVOKED,
    NODE_REVOCATION,
    NodeRevocation,
    RevokedNodes,
    sign_node_revocation,
)
from neuroshard.identity.pass_register import PassRegister
from neuroshard.membership.pass_gossip import MAX_NEWS_BYTES, MAX_REVOCATIONS_SAID
from neuroshard.membership.run_members import Papers, RunMembers
from neuroshard.types import DAY_SECONDS, RunId, WalletId

NOW = 1_800_000_000.0
RUN = RunId("ab" * 32)


def wallet(number: int) -> Wallet:
    return Wallet.from_secret(TokenSecret("hex", number.to_bytes(32, "big")))


def node(number: int) -> NodeKey:
    return NodeKey.from_seed(number.to_bytes(32, "little"))


def anybody(_: WalletId) -> bool:
    return True


OWNER, FRIEND, EVE = wallet(0), wallet(1), wallet(2)
STOLEN, NEW = node(1), node(2)


def test_a_wallet_revokes_a_node_once_and_for_ever() -> None:
    revoked, data = RevokedNodes(), sign_node_revocation(FRIEND, STOLEN.public_key)
    assert [revoked.learn(data, anybody), revoked.learn(data, anybody)] == [True, False]
    assert revoked.has(STOLEN.node_id, FRIEND.wallet_id)
    assert not revoked.has(NEW.node_id, FRIEND.wallet_id)
    assert revoked.nodes_of(FRIEND.wallet_id) == (STOLEN.node_id,)
    assert (revoked.statements(), revoked.count) == ((data,), 1)


def test_another_wallet_revokes_nothing() -> None:
    """Eve's statement about the node concerns the node as one of Eve's wallet only."""
    revoked = RevokedNodes()
    revoked.learn(sign_node_revocation(EVE, STOLEN.public_key), anybody)
    assert not revoked.has(STOLEN.node_id, FRIEND.wallet_id)


@pytest.mark.parametrize("signer", [EVE, STOLEN], ids=["another wallet", "the stolen node key"])
def test_a_forged_statement_is_refused(signer: Wallet | NodeKey) -> None:
    for key in (NEW.public_key, STOLEN.public_key):
        statement = NodeRevocation(key, FRIEND.public_key)
        revoked, forged = RevokedNodes(), msgspec.msgpack.encode(sign_message(signer, NODE_REVOCATION, statement))
        with pytest.raises(DataError):
            revoked.learn(forged, anybody)
        assert revoked.statements() == ()


def test_other_signed_messages_of_the_wallet_are_no_statements() -> None:
    grant = Delegation.issue(FRIEND, STOLEN.public_key, NOW).signed
    statement = NodeRevocation(STOLEN.public_key, FRIEND.public_key)
    other_kind = sign_message(FRIEND, "delegation", statement)
    for data in (
        msgspec.msgpack.encode(grant),
        msgspec.msgpack.encode(other_kind),
        sign_revocation(FRIEND, RUN, STOLEN.public_key, NOW),
        b"",
        b"\x92" * 200,
        sign_node_revocation(FRIEND, STOLEN.public_key) + b"\0",
        bytes(MAX_NODE_REVOCATION_BYTES + 1),
    ):
        with pytest.raises(DataError):
            RevokedNodes().learn(data, anybody)


def test_a_statement_fits_the_bounds_of_its_messages() -> None:
    data = sign_node_revocation(FRIEND, STOLEN.public_key)
    assert len(data) <= MAX_NODE_REVOCATION_BYTES
    assert MAX_REVOCATIONS_SAID * (len(data) + 3) < MAX_NEWS_BYTES // 2


def test_wallets_without_a_place_take_no_memory_and_others_take_a_little() -> None:
    revoked = RevokedNodes()
    for number in range(3 * MOST_REVOKED):
        revoked.learn(sign_node_revocation(EVE, node(number + 1).public_key), lambda who: who == FRIEND.wallet_id)
    assert revoked.statements() == ()
    for number in range(2 * MOST_REVOKED):
        revoked.learn(sign_node_revocation(EVE, node(number + 1).public_key), anybody)
    assert len(revoked.statements()) == MOST_REVOKED
    assert revoked.learn(sign_node_revocation(FRIEND, STOLEN.public_key), anybody)


def test_a_flood_of_many_members_displaces_no_statement_of_another() -> None:
    revoked, numbers = RevokedNodes(), count(100)
    revoked.learn(sign_node_revocation(FRIEND, STOLEN.public_key), anybody)
    keys = [node(number + 1).public_key for number in range(MOST_REVOKED)]
    while len(revoked.statements()) < MAX_NODE_REVOCATIONS:
        liar = wallet(next(numbers))
        for key in keys:
            revoked.learn(sign_node_revocation(liar, key), anybody)
    for _ in range(3):
        liar = wallet(next(numbers))
        for key in keys:
            revoked.learn(sign_node_revocation(liar, key), anybody)
    honest = wallet(next(numbers))
    assert revoked.learn(sign_node_revocation(honest, NEW.public_key), anybody)
    assert revoked.has(STOLEN.node_id, FRIEND.wallet_id)
    assert revoked.has(NEW.node_id, honest.wallet_id)
    assert len(revoked.statements()) == MAX_NODE_REVOCATIONS


# A node among friends


def members_of(number: int, now: float = NOW) -> RunMembers:
    """The members as the owner's node knows them; the friend has a pass."""
    here = node(number)
    delegation = Delegation.issue(OWNER, here.public_key, NOW + DELEGATION_SECONDS)
    identity = NodeIdentity(OWNER.wallet_id, here.node_id, here, delegation)
    members = RunMembers(PassRegister(RUN, OWNER.public_key), identity, None, lambda: NOW)
    terms = InvitationTerms(NOW + DAY_SECONDS, 5, "Ada")
    invitation = invite(OWNER, RUN, terms, InvitedPlaces("friends"), seed=bytes(32))
    members.learn(Papers((invitation.pass_for(FRIEND.public_key, NOW),)))
    members.now = lambda: now
    return members


REVOKED = Papers(revoked_nodes=(sign_node_revocation(FRIEND, STOLEN.public_key),))
UNTIL = NOW + 10 * DELEGATION_SECONDS  # as a wallet whose clock was wrong would delegate


@pytest.mark.parametrize("ahead", [-DAY_SECONDS, 0.0, DAY_SECONDS, 13 * DAY_SECONDS])
def test_no_clock_lets_a_revoked_node_back_in(ahead: float) -> None:
    """Neither that of the reader nor that of the wallet, and a newer delegation does not either."""
    members, friend = members_of(10, NOW + ahead), FRIEND.wallet_id
    assert members.introduce(STOLEN.node_id, friend, UNTIL) == members.refusal(STOLEN.node_id) == ""
    members.learn(REVOKED)
    assert members.changed.count == 1
    reason = members.refusal(STOLEN.node_id)
    assert f"has revoked node {STOLEN.node_id}" in reason
    assert members.refused_nodes() == [STOLEN.node_id]
    assert members.introduce(STOLEN.node_id, friend, UNTIL + 1) == reason
    assert members.introduce(NEW.node_id, friend, UNTIL) == members.refusal(NEW.node_id) == ""
    members.learn(REVOKED)  # a copy says nothing new
    assert members.changed.count == 1


def test_a_statement_comes_with_the_pass_that_gives_its_wallet_a_place() -> None:
    members = members_of(10)
    papers = members.papers()
    members.learn(REVOKED)
    told = members_of(11)
    told.register = PassRegister(RUN, OWNER.public_key)
    told.learn(REVOKED)
    assert told.papers() == Papers()  # Ada is nobody here
    told.learn(Papers(papers.passes, (), REVOKED.revoked_nodes))
    assert told.papers() == members.papers()


def test_a_revocation_of_the_node_leaves_its_old_votes_valid() -> None:
    """Whoever reads a chain verifies the vote as of its date, with the delegation alone."""
    delegation = Delegation.issue(FRIEND, STOLEN.public_key, NOW + DELEGATION_SECONDS)
    claim = sign_claim(NodeIdentity(FRIEND.wallet_id, STOLEN.node_id, STOLEN, delegation), "vote", 1, NOW)
    members_of(10).learn(REVOKED)
    assert verify_claim(claim, "vote", NOW).node_id == STOLEN.node_id
