"""In an organised run the organiser's word ends a pass, and the owner's word an admission; nobody ends the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import trio

from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.admissions import (
    ADMISSION_SECONDS,
    Admission,
    AdmissionRegister,
    AdmissionRevocation,
    sign_admission,
    sign_admission_revocation,
)
from neuroshard.identity.claims import NodeIdentity
from neuroshard.identity.invitations import Invitation, InvitationTerms, InvitedPlaces, invite, sign_revocation
from neuroshard.identity.pass_register import PassRegister
from neuroshard.identity.signing import SigningKey
from neuroshard.membership.run_members import Papers, RunMembers
from neuroshard.types import LayerRange, RunId
from tests.worlds.claims import identity_of

T = TypeVar("T")
NOW = 1_800_000_000
RUN = RunId("ab" * 32)
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
AUTHORITY = SigningKey.from_seed(b"authority".ljust(32, b"\0"))
FRIEND, OWNERS = identity_of(1), identity_of(2)
UNTIL = NOW + 86_400.0


def members(owner: bytes = OWNER.public_key) -> RunMembers:
    admissions = AdmissionRegister(RUN, lambda: [AUTHORITY.public_key])
    register = PassRegister(RUN, owner)
    return RunMembers(register, identity_of(0), None, lambda: NOW, named=lambda: (), admissions=admissions)


def invited() -> Invitation:
    return invite(OWNER, RUN, InvitationTerms(NOW + 60, 1, "Ada"), InvitedPlaces("run"), seed=bytes(32))


def key_of(identity: NodeIdentity) -> bytes:
    return identity.delegation.grant.wallet_public_key


def pass_of(identity: NodeIdentity) -> Papers:
    return Papers(passes=(invited().pass_for(key_of(identity), NOW),))


def admission_of(identity: NodeIdentity) -> Papers:
    made = Admission(
        RUN, identity.node_id, identity.wallet_id, "head-0", LayerRange(0, 1), 1, NOW, NOW + ADMISSION_SECONDS
    )
    return Papers(admissions=(sign_admission(AUTHORITY, made),))


def ended(identity: NodeIdentity, named: str) -> Papers:
    node, wallet = (identity.node_id, None) if named == "node" else (None, identity.wallet_id)
    return Papers(ended=(sign_admission_revocation(AUTHORITY, AdmissionRevocation(RUN, node, wallet, "", NOW)),))


@pytest.mark.parametrize("named", ["node", "wallet"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_organiser_ends_the_place_of_a_wallet_with_a_pass(named: str, is_first: bool) -> None:
    known = members()
    if is_first:
        known.learn(ended(FRIEND, named))
    else:
        assert known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL, pass_of(FRIEND)) == ""
        known.learn(ended(FRIEND, named))
    assert "ended the place" in known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL, pass_of(FRIEND))
    assert "ended the place" in known.refusal(FRIEND.node_id)
    assert known.refused_nodes() == [FRIEND.node_id]


@pytest.mark.parametrize("named", ["invitation", "wallet"])
def test_the_owner_ends_the_place_of_a_wallet_with_an_admission(named: str) -> None:
    known = members()
    known.learn(pass_of(FRIEND))
    assert known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL, admission_of(FRIEND)) == ""
    key = key_of(FRIEND) if named == "wallet" else invited().grant.invitation
    known.learn(Papers(revocations=(sign_revocation(OWNER, RUN, key, NOW),)))
    for again in (known.refusal(FRIEND.node_id), known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL)):
        assert "The owner of the run ended this membership" in again


def test_a_removed_wallet_without_a_pass_is_refused_in_spite_of_its_admission() -> None:
    known = members()
    known.learn(Papers(revocations=(sign_revocation(OWNER, RUN, key_of(FRIEND), NOW),)))
    assert "ended this membership" in known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL, admission_of(FRIEND))


def test_stored_admissions_are_read_and_verified_outside_the_event_loop() -> None:
    """A run may have 20,000 of them, and a node serves requests meanwhile."""
    friend = admission_of(FRIEND)
    stored = Papers(admissions=(*friend.admissions, b"damaged"), ended=(*ended(OWNERS, "node").ended, b"damaged"))
    known, verified, is_outside = members(), list[bool](), False
    register = known.admissions
    assert register is not None

    def authorities() -> list[bytes]:
        verified.append(is_outside)
        return [AUTHORITY.public_key]

    register._authorities = authorities  # pyright: ignore[reportPrivateUsage]

    async def outside(function: Callable[[], T], /) -> T:
        nonlocal is_outside
        is_outside = True
        try:
            return function()
        finally:
            is_outside = False

    trio.run(known.restore, lambda: stored, outside)
    assert verified == [True] * 4
    assert known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL) == ""
    assert "ended the place" in known.introduce(OWNERS.node_id, OWNERS.wallet_id, UNTIL)


@pytest.mark.parametrize("kind", ["pass", "admission"])
def test_a_known_revocation_is_not_verified_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = members()
    papers = ended(FRIEND, "node")
    if kind == "pass":
        papers = Papers(revocations=(sign_revocation(OWNER, RUN, key_of(FRIEND), NOW),))
    known.learn(papers)

    def verify(*_: object) -> None:
        raise AssertionError("verified again")

    monkeypatch.setattr("neuroshard.identity.pass_register.read_revocation", verify)
    monkeypatch.setattr("neuroshard.identity.admissions.read_admission_revocation", verify)
    known.learn(papers)
    assert known.introduce(FRIEND.node_id, FRIEND.wallet_id, UNTIL, admission_of(FRIEND)) != ""


def test_nobody_ends_the_place_of_the_owner() -> None:
    known = members(key_of(OWNERS))
    known.learn(ended(OWNERS, "wallet"))
    known.learn(ended(OWNERS, "node"))
    assert known.introduce(OWNERS.node_id, OWNERS.wallet_id, UNTIL) == ""
    assert known.refusal(OWNERS.node_id) == ""
